//! Rejected input: each job ends once, is kept whole, is reported to its caller, and costs no other caller anything.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use serde_json::Value;
use tempfile::NamedTempFile;
use vramq_schemas::{Reason, ReplyKind, topology};
use vramq_tests::on_queue_types;
use vramq_tests::rejections::{Rejected, keeps_serving, rejected_and_reported};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};

on_queue_types!(
    jobs_for_nobody,
    headers_that_make_no_sense,
    expired_jobs,
    a_job_that_expires_while_a_worker_holds_it,
    replies_to_queues_of_jobs,
    replies_to_nowhere,
    properties_that_would_stop_a_republish,
    headers_too_large_to_keep,
    a_job_over_which_the_code_panics,
);

async fn jobs_for_nobody(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let to_replies = BasicProperties::default().with_reply_to(REPLIES.into());
    let good = env.job("x", ["x"])?;
    let cases = [
        Rejected::new("no id", good.clone().with(|_| to_replies.clone()), Reason::Malformed),
        Rejected::new(
            "empty ids",
            good.clone().with(|_| to_replies.with_message_id("".into()).with_correlation_id("".into())),
            Reason::Malformed,
        ),
        Rejected::new(
            "content type",
            env.job("type", ["x"])?.with(|p| p.with_content_type("text/plain".into())),
            Reason::UnsupportedEncoding,
        ),
        Rejected::new(
            "empty content type",
            env.job("no type", ["x"])?.with(|p| p.with_content_type("".into())),
            Reason::UnsupportedEncoding,
        ),
        Rejected::new(
            "version in the content type",
            env.job("v2", ["x"])?.with(|p| p.with_content_type("application/vnd.vramq.v2+bincode".into())),
            Reason::UnsupportedEncoding,
        ),
    ];
    rejected_and_reported(env, &cases).await?;
    keeps_serving(env, &worker).await
}

async fn headers_that_make_no_sense(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let text = |text: &str| AMQPValue::LongString(text.into());
    let values = [
        ("batch-hint", AMQPValue::LongInt(0)),
        ("batch-hint", AMQPValue::LongInt(-1)),
        ("batch-hint", AMQPValue::LongLongInt(1 << 32)),
        ("batch-hint", AMQPValue::LongLongInt(i64::MIN)),
        ("batch-hint", text("eight")),
        ("batch-hint", AMQPValue::Double(8.5)),
        ("batch-hint", AMQPValue::FieldTable(FieldTable::default())),
        ("attempt", AMQPValue::ShortInt(-1)),
        ("attempt", AMQPValue::Boolean(true)),
        ("items-done", AMQPValue::LongInt(-1)),
        ("items-done", AMQPValue::LongInt(4)),
        ("items-done", AMQPValue::LongLongInt(u32::MAX.into())),
        ("exclusive", text("yes")),
        ("exclusive", AMQPValue::LongInt(1)),
        ("vramq-model-revision", AMQPValue::LongInt(7)),
        ("vramq-model-revision", AMQPValue::Boolean(true)),
        ("vramq-model-revision", AMQPValue::FieldTable(FieldTable::default())),
    ];
    let mut cases = Vec::new();
    for (at, (name, value)) in values.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        cases.push(Rejected::new(&what, job, Reason::Malformed));
    }
    rejected_and_reported(env, &cases).await?;

    // These are odd, but no fault.
    let fine = [
        ("batch-hint", AMQPValue::LongLongInt(u32::MAX.into())),
        ("batch-hint", AMQPValue::ShortShortUInt(1)),
        ("batch-hint", AMQPValue::Void),
        ("vramq-model-revision", AMQPValue::Void),
        ("exclusive", AMQPValue::Boolean(true)),
        ("items-done", AMQPValue::LongInt(2)),
        ("history", text("was long")),
        ("history", AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1); 1000]))),
        ("traceparent", AMQPValue::LongInt(7)),
        ("reason", text("mine")),
    ];
    let mut replies = env.replies().await?;
    for (at, (name, value)) in fine.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        env.client.publish(MODEL, job).await?;
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done && reply.id() == what, "{what}: {:?}", reply.properties);
        let headers = reply.reply()?;
        let done = if name == "items-done" { 2 } else { 0 };
        ensure!((headers.offset, headers.items, headers.items_total) == (done, 3 - done, 3), "{what}");
    }
    drop(replies);
    keeps_serving(env, &worker).await
}

async fn expired_jobs(env: &mut TestEnv) -> Result<()> {
    // In the hands of a worker: published long ago, by the publisher's clock.
    let worker = env.worker(&[]).await?;
    let old =
        env.job("old", ["x"])?.with(|p| p.with_timestamp(1_500_000_000).with_expiration("60000".into()));
    rejected_and_reported(env, &[Rejected::new("old", old, Reason::Expired)]).await?;
    let odd = env.job("a deadline that is not a number", ["x"])?;
    let future = odd.with(|p| p.with_timestamp(u64::MAX / 2).with_expiration("60000".into()));
    env.client.publish(MODEL, future).await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Done);
    keeps_serving(env, &worker).await?;
    worker.drain().await?;

    // In the queue, with no worker there: the broker itself dead-letters it, whole.
    let job = env.job("waited", ["x"])?.with(|p| p.with_expiration("50".into()));
    env.client.publish(MODEL, job.clone()).await?;
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body && letter.id() == "waited");
    ensure!(letter.headers().inner().contains_key("x-death"), "{:?}", letter.headers());
    Ok(())
}

/// Without a time of publishing, it counts from the delivery.
async fn a_job_that_expires_while_a_worker_holds_it(env: &mut TestEnv) -> Result<()> {
    const TTL: Duration = Duration::from_secs(4);
    env.announce("a failpoint is set");
    env.announce("job dead-lettered");
    let hang = NamedTempFile::new()?;
    let drill = format!("worker.drill=pass=hang,job=first,while={}", hang.path().display());
    let worker = env.worker(&[&drill]).await?;
    env.client.publish(MODEL, env.job("first", ["x"])?).await?;
    env.vhost.until_unacked(&topology::jobs_queue(MODEL), 1).await?;
    let ttl = TTL.as_millis().to_string();
    let job = env.job("second", ["x"])?.with(|p| p.with_expiration(ttl.into()));
    env.client.publish(MODEL, job.clone()).await?;
    env.vhost.until_unacked(&topology::jobs_queue(MODEL), 2).await?;
    // It was delivered before now.
    tokio::time::sleep(TTL).await;
    hang.close()?;

    let mut replies = env.replies().await?;
    let answers = replies.take(2).await?;
    let kind = |id: &str| answers.iter().find(|reply| reply.id() == id).context("no reply")?.kind();
    ensure!((kind("first")?, kind("second")?) == (ReplyKind::Done, ReplyKind::Failed), "{answers:?}");
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Expired);
    drop(replies);
    keeps_serving(env, &worker).await
}

async fn replies_to_queues_of_jobs(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("job dead-lettered");
    let mut dead = env.dead_letters().await?;
    for queue in [
        topology::jobs_queue(MODEL),
        topology::dead_queue(MODEL),
        topology::jobs_queue("other"),
        topology::suspects_queue(MODEL),
        "vramq.delay.1000".to_owned(),
    ] {
        let job = env.job(&queue, ["x"])?.with(|p| p.with_reply_to(queue.as_str().into()));
        env.client.publish(MODEL, job.clone()).await?;
        let letter = dead.next().await?;
        ensure!(letter.dead_letter()?.reason == Reason::Malformed, "{queue}");
        ensure!(letter.body == job.body && letter.id() == queue);
    }
    drop(dead);
    keeps_serving(env, &worker).await
}

async fn replies_to_nowhere(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    let mut dead = env.dead_letters().await?;

    let nowhere = |p: BasicProperties| p.with_reply_to("no such queue".into());
    // The job claims the `type` of a reply. Operators must still tell it from its results, which they recognize by their `type`.
    let job = env.job("unroutable", ["the result"])?.with(nowhere).with(|p| p.with_type("done".into()));
    env.client.publish(MODEL, job.clone()).await?;
    // The results first, then the job: neither is lost.
    let letters = dead.take(2).await?;
    let (results, jobs): (Vec<_>, Vec<_>) = letters.into_iter().partition(|letter| letter.kind().is_ok());
    let [results] = &results[..] else { anyhow::bail!("{} letters with results", results.len()) };
    let [letter] = &jobs[..] else { anyhow::bail!("{} letters with jobs", jobs.len()) };
    ensure!(letter.body == job.body, "the job is not intact");
    for letter_of in [results, letter] {
        ensure!(letter_of.dead_letter()?.reason == Reason::Unroutable);
        ensure!(letter_of.properties.reply_to() == job.properties.reply_to());
        ensure!(letter_of.id() == "unroutable");
    }
    ensure!(results.outputs()?.outputs == [vramq_schemas::Output::Json("the result".into())]);
    ensure!(results.reply()?.items_total == 1);

    // A bad job without anybody to report to: only its dead letter remains.
    let job = env.job("bad", ["x"])?.with(nowhere).with_body("{");
    env.client.publish(MODEL, job.clone()).await?;
    let letter = dead.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::Malformed && letter.body == job.body);
    drop(dead);
    keeps_serving(env, &worker).await
}

async fn properties_that_would_stop_a_republish(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let list = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|n| AMQPValue::LongString((*n).into())).collect();
        AMQPValue::FieldArray(FieldArray::from(names))
    };
    // Copies that neither the dead letter nor the failed reply may make: both go by exchanges that would take them to this queue.
    env.client.declare_queue("copies", env.setup.queue.arguments()).await?;
    env.client.bind_queue("copies", topology::DEAD_EXCHANGE, "copies").await?;
    let copied = env
        .job("copies", ["x"])?
        .with_body("{")
        .with_header("CC", list(&["copies"]))
        .with_header("BCC", list(&["copies"]));
    let cases = [
        Rejected::new(
            "user id",
            env.job("user", ["x"])?.with_body("{").with(|p| p.with_user_id("guest".into())),
            Reason::Malformed,
        )
        .losing_user_id(),
        Rejected::new("CC and BCC", copied, Reason::Malformed).losing_headers(&["CC", "BCC"]),
        Rejected::new(
            "priority",
            env.job("priority", ["x"])?.with_body("{").with(|p| p.with_priority(255)),
            Reason::Malformed,
        ),
        Rejected::new(
            "transient",
            env.job("transient", ["x"])?.with_body("{").with(|p| p.with_delivery_mode(1)),
            Reason::Malformed,
        ),
        Rejected::new(
            "all properties",
            env.job("all", ["x"])?.with_body("{").with(|p| {
                p.with_content_encoding("gzip".into())
                    .with_app_id("an app".into())
                    .with_type("order".into())
                    .with_cluster_id("deprecated".into())
                    .with_timestamp(u64::MAX)
                    .with_priority(3)
                    .with_expiration("3600000".into())
            }),
            Reason::Malformed,
        ),
        Rejected::new(
            "properties of 255 bytes",
            env.job(&"i".repeat(200), ["x"])?
                .with_body("{")
                .with(|p| p.with_app_id("ä".repeat(127).into()))
                .with(|p| p.with_correlation_id("c".repeat(255).into())),
            Reason::Malformed,
        ),
    ];
    rejected_and_reported(env, &cases).await?;
    ensure!(env.client.ready("copies").await? == 0);
    keeps_serving(env, &worker).await
}

async fn headers_too_large_to_keep(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("dropped headers that are too large to publish again");
    env.announce("job dead-lettered");
    let (mut dead, mut replies) = (env.dead_letters().await?, env.replies().await?);
    let blob = |bytes: usize| AMQPValue::LongString("h".repeat(bytes).into());
    let mut many = env.job("many", ["x"])?.with_body("{");
    for at in 0..1500 {
        many = many.with_header(&format!("header-{at:04}"), blob(50));
    }
    let one = env
        .job("one", ["x"])?
        .with_body("{")
        .with_header("big", blob(100 * 1024))
        .with_header("small", blob(9));
    for job in [one, many] {
        env.client.publish(MODEL, job.clone()).await?;
        let letter = dead.next().await.context("dead letter")?;
        ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Malformed);
        ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
        let kept = letter.headers();
        ensure!(kept.inner().contains_key("small") || kept.inner().len() > 1000, "small headers are kept");
    }
    // One line for each message, however many of its headers are dropped.
    worker.log.counts("dropped headers that are too large", 2).await?;
    // No model has such a revision. The job runs with no other one, also if its dead letter is retried.
    let demanding = env.job("demanding", ["x"])?.with_header("vramq-model-revision", blob(110 * 1024));
    env.client.publish(MODEL, demanding).await?;
    let letter = dead.next().await.context("dead letter")?;
    ensure!(letter.dead_letter()?.reason == Reason::Malformed);
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    let kept = letter.headers().inner().get("vramq-model-revision").cloned();
    ensure!(kept == Some(AMQPValue::Boolean(false)), "{kept:?}");
    // A good job with large headers runs.
    let good = env.job("good", ["x"])?.with_header("big", blob(100 * 1024));
    env.client.publish(MODEL, good).await?;
    ensure!(replies.next().await?.kind()? == ReplyKind::Done);
    drop((dead, replies));
    keeps_serving(env, &worker).await
}

async fn a_job_over_which_the_code_panics(env: &mut TestEnv) -> Result<()> {
    env.announce("a failpoint is set");
    env.announce("panicked");
    let worker = env.worker(&["worker.drill=decode=panic,job=killer"]).await?;
    let cases = [Rejected::new("killer", env.job("killer", ["x"])?, Reason::EngineFailed)];
    rejected_and_reported(env, &cases).await?;
    // Where the log is JSON, the panic is.
    let line = worker.log.wait_for("panicked").await?;
    let at = line.field("at").and_then(Value::as_str).context("no place in the line")?;
    ensure!(at.contains("failpoint.rs:"), "{}", line.text());
    ensure!(line.field("panic") == Some(&"made to panic by a failpoint".into()), "{}", line.text());
    keeps_serving(env, &worker).await
}
