//! Traces: `traceparent`, `tracestate` and `app_id` from the publisher to every reply and dead letter, in logs, and as spans at a collector.

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use vramq_schemas::headers::{TRACEPARENT, TRACESTATE};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Reason, ReplyKind, TraceContext};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::client::Received;
use vramq_tests::job::Message;
use vramq_tests::metrics::figures;
use vramq_tests::ports::ClosedPort;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::span_collector::{Collected, SpanCollector};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(a_trace_goes_through_attempts_parts_and_dead_letters, a_malformed_traceparent_is_ignored);
on_one_setup!(spans_reach_a_collector, a_collector_that_is_away_costs_spans_and_nothing_else);

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const STATE: &str = "vendor=t61rcWkgMzE,other@tenant=1";
const APP: &str = "search-service";
const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn traceparent(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

fn carries(message: &Received) -> Result<()> {
    let found = TraceContext::of(&message.headers());
    ensure!(
        found.as_ref().is_some_and(|found| found.parent.as_str() == PARENT && found.state() == Some(STATE)),
        "{found:?} of {:?}",
        message.properties
    );
    let app = message.properties.app_id().as_ref().map(|app| app.as_str());
    ensure!(app == Some(APP), "{:?}", message.properties);
    Ok(())
}

fn traced(job: Message) -> Message {
    job.with_header(TRACEPARENT, traceparent(PARENT))
        .with_header(TRACESTATE, AMQPValue::LongString(STATE.into()))
        .with(|properties| properties.with_app_id(APP.into()))
}

async fn a_trace_goes_through_attempts_parts_and_dead_letters(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "job dead-lettered", "made to fail"] {
        env.announce(text);
    }
    let worker = env.worker(&["device.cpu.fault=skip=0,fail=1"]).await?;
    let mut replies = env.replies().await?;
    // Runs out of memory, goes back to the queue, and is answered at its second attempt.
    let halved = items(8);
    env.client.publish(MODEL, traced(env.job("halved", halved.clone())?)).await?;
    for reply in answered_once(&mut replies, "halved", &halved).await? {
        ensure!(reply.reply()?.attempt == 1, "{:?}", reply.reply());
        carries(&reply)?;
    }
    // Whoever is woken by this line finds the job and its item.
    let line = worker.log.wait_for("out of memory").await?;
    let text = |name: &str| line.field(name).and_then(|value| value.as_str().map(str::to_owned));
    ensure!(text("job").as_deref() == Some("halved"), "{}", line.text());
    ensure!(text("trace_id").as_deref() == Some(TRACE_ID), "{}", line.text());
    ensure!(
        line.field("item").and_then(|item| item.as_u64()).is_some_and(|item| item < 8),
        "{}",
        line.text()
    );
    let large: Vec<_> = (0..40).map(|at| format!("{at}").repeat(40_000)).collect();
    env.client.publish(MODEL, traced(env.job("large", large.clone())?)).await?;
    let parts = answered_once(&mut replies, "large", &large).await?;
    ensure!(parts.len() > 1, "one reply for {} items", large.len());
    parts.iter().try_for_each(carries)?;

    let bad = traced(env.job("bad", ["x"])?);
    env.client.publish(MODEL, bad.with_body("no job")).await?;
    let reply = replies.next().await?;
    ensure!(reply.failure()?.reason == Reason::Malformed);
    carries(&reply)?;
    carries(&env.dead_letters().await?.next().await?)?;
    let line = worker.log.wait_for("job dead-lettered").await?;
    ensure!(line.field("trace_id").and_then(|id| id.as_str()) == Some(TRACE_ID), "{}", line.text());
    Ok(())
}

async fn a_malformed_traceparent_is_ignored(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    let long = "x".repeat(10_000);
    let odd =
        ["", "none", "00-0-0-0", "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", long.as_str()];
    let odd = odd.map(traceparent).into_iter().chain([AMQPValue::LongInt(7), AMQPValue::Void]);
    for (at, value) in odd.enumerate() {
        let id = at.to_string();
        env.client.publish(MODEL, env.job(&id, ["x"])?.with_header(TRACEPARENT, value)).await?;
        let reply = replies.next().await?;
        ensure!(reply.id() == id && reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
        ensure!(!reply.headers().inner().contains_key(TRACEPARENT), "{:?}", reply.properties);
    }
    worker.drain().await?;
    ensure!(worker.log.find("trace_id").is_none(), "{}", worker.log.text());
    Ok(())
}

/// A worker that sends its spans to a collector, ten times a second.
async fn worker_that_exports(env: &mut TestEnv, endpoint: &str) -> Result<Worker> {
    env.set_environment("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint);
    env.set_environment("OTEL_BSP_SCHEDULE_DELAY", "100");
    env.worker(&[]).await
}

async fn spans_reach_a_collector(env: &mut TestEnv) -> Result<()> {
    let collector = SpanCollector::start().await?;
    let worker = worker_that_exports(env, &collector.endpoint).await?;
    let traced = traced(env.job("traced", ["x"])?);
    let traced = traced.with(|properties| properties.with_correlation_id("traced by its caller".into()));
    let body_bytes = i64::try_from(traced.body.len())?;
    env.client.publish(MODEL, traced).await?;
    let job = collector.span("a span of the job", |it| is_of_job(it) && it.trace_id() == TRACE_ID).await?;
    ensure!(env.replies().await?.next().await?.id() == "traced");
    ensure!(job.service == ("vramq-worker".to_owned(), "worker-0".to_owned()), "{job:?}");
    ensure!(job.parent() == "00f067aa0ba902b7", "{job:?}");
    ensure!(job.span.trace_state == STATE && job.span.kind == SpanKind::Consumer as i32, "{job:?}");
    describes_the_job(env, &job, body_bytes)?;
    stages_fill_the_job(&collector, &job).await?;
    spans_that_wait_are_sent_at_the_end(env, worker, &collector).await
}

fn is_of_job(it: &Collected) -> bool {
    it.span.name == format!("process {}", destination())
}

/// Where the broker's clients say that they publish the model's jobs.
fn destination() -> String {
    format!("vramq.jobs:{MODEL}:{}", jobs_queue(MODEL))
}

/// The span of the job says what it was, by OpenTelemetry's names and by vramq's.
fn describes_the_job(env: &TestEnv, job: &Collected, body_bytes: i64) -> Result<()> {
    let (_, address) = env.url.split_once('@').context("no user in the broker's address")?;
    let (address, _) = address.split_once('/').context("no virtual host in the broker's address")?;
    let (host, port) = address.rsplit_once(':').context("no port in the broker's address")?;
    let texts = [
        ("messaging.system", "rabbitmq"),
        ("messaging.operation.type", "process"),
        ("messaging.operation.name", "process"),
        ("messaging.destination.name", &destination()),
        ("messaging.rabbitmq.destination.routing_key", MODEL),
        ("messaging.message.id", "traced"),
        ("messaging.message.conversation_id", "traced by its caller"),
        ("server.address", host),
        ("vramq.model", MODEL),
        ("vramq.outcome", "answered"),
    ];
    let texts = texts.map(|(name, value)| (name, Value::StringValue(value.to_owned())));
    let numbers = [
        ("messaging.rabbitmq.message.delivery_tag", 1),
        ("messaging.message.body.size", body_bytes),
        ("server.port", port.parse()?),
    ];
    let numbers = numbers.map(|(name, value)| (name, Value::IntValue(value)));
    for (name, value) in texts.into_iter().chain(numbers) {
        let found = job.attribute(name);
        ensure!(found == Some(&value), "{name} is {found:?}, not {value:?}");
    }
    Ok(())
}

/// The spans of the job's stages follow one another without a gap, from its beginning to its end.
async fn stages_fill_the_job(collector: &SpanCollector, job: &Collected) -> Result<()> {
    let mut end = job.span.start_time_unix_nano;
    for name in ["queued", "run", "publish"] {
        let stage = collector.span(name, |it| it.span.name == name && it.parent() == job.id()).await?;
        ensure!(stage.trace_id() == job.trace_id(), "{stage:?}");
        let span = stage.span;
        ensure!(span.start_time_unix_nano == end && span.end_time_unix_nano >= end, "{name}: {span:?}");
        end = span.end_time_unix_nano;
    }
    ensure!(end == job.span.end_time_unix_nano, "{end} is not the end of {job:?}");
    Ok(())
}

/// The job's caller has no trace, so that the job is the beginning of one.
async fn spans_that_wait_are_sent_at_the_end(
    env: &mut TestEnv,
    worker: Worker,
    collector: &SpanCollector,
) -> Result<()> {
    env.client.publish(MODEL, env.job("untraced", ["x"])?).await?;
    // What the broker has sent need not have come to the worker.
    figures(&worker, "the job's pass", |figures| figures.sum("vramq_items_total") == 2).await?;
    worker.drain().await?;
    let is_untraced = |it: &Collected| is_of_job(it) && it.trace_id() != TRACE_ID;
    let job = collector.span("a span of a job without a parent", is_untraced).await?;
    ensure!(job.parent().is_empty(), "{job:?}");
    ensure!(env.replies().await?.next().await?.id() == "untraced");
    Ok(())
}

async fn a_collector_that_is_away_costs_spans_and_nothing_else(env: &mut TestEnv) -> Result<()> {
    env.announce("spans are lost");
    let nobody = ClosedPort::new()?;
    let endpoint = format!("http://{}", nobody.address);
    let worker = worker_that_exports(env, &endpoint).await?;
    publish_many(env, 1, 300, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, 300).await?;
    worker.log.wait_for("spans are lost").await?;
    worker.drain().await?;
    worker.log.counts("spans are lost", 1).await?;
    Ok(())
}
