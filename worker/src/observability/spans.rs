//! Spans of jobs for an OTLP collector: `process DESTINATION`, and in it `queued`, `run` and `publish`, built from recorded times when a job
//! is settled. Names and attributes follow OpenTelemetry's conventions for messaging and RabbitMQ. If too many spans wait for the collector,
//! further ones are dropped.

use std::io::Read as _;
use std::str::FromStr as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use vramq_amqp::BrokerHost;
use vramq_core::observation::{End, Settled};
use vramq_schemas::TraceContext;

use super::summary::Summary;
use crate::identity::Identity;
use crate::model::Model;

/// How long a collector may take for a batch of spans, and the last spans at the end of the worker.
const EXPORT_MAX: Duration = Duration::from_secs(5);
const LAST_EXPORT_MAX: Duration = Duration::from_secs(2);

/// The most bytes of a collector's answer that are read.
const ANSWER_BYTES_MAX: u64 = 64 * 1024;

/// Where spans go.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

impl Spans {
    /// Sends spans to the collector in OpenTelemetry's standard variables (such as `OTEL_EXPORTER_OTLP_ENDPOINT`).
    ///
    /// # Errors
    /// The variables cannot be used.
    pub fn start(identity: &Identity) -> Result<Self, ExporterBuildError> {
        let agent = ureq::AgentBuilder::new().timeout(EXPORT_MAX).build();
        let client = Collector { agent, failing: AtomicBool::new(false) };
        let exporter = SpanExporter::builder().with_http().with_http_client(client).build()?;
        let resource = Resource::builder()
            .with_service_name("vramq-worker")
            .with_attribute(KeyValue::new("service.version", identity.version))
            .with_attribute(KeyValue::new("service.instance.id", identity.worker.clone()))
            .build();
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        let tracer = provider.tracer("vramq-worker");
        Ok(Self { provider, tracer })
    }

    /// Records a job that is settled.
    pub fn record(&self, settled: &Settled, job: &Summary, model: &Model, host: Option<&BrokerHost>) {
        let now = SystemTime::now();
        let parent = job
            .trace
            .as_ref()
            .and_then(remote)
            .map_or_else(Context::new, |parent| Context::new().with_remote_span_context(parent));
        let start = published(job);
        let destination = destination(job, &model.queue_of(job.source));
        let builder = self.tracer.span_builder(format!("{OPERATION} {destination}"));
        let attributes = attributes(settled, job, &model.name, destination, host);
        let builder =
            builder.with_kind(SpanKind::Consumer).with_start_time(start).with_attributes(attributes);
        let mut span = builder.start_with_context(&self.tracer, &parent);
        if let End::DeadLettered(reason) | End::Rejected(reason) = settled.end {
            span.set_status(Status::error(reason.as_str()));
        }
        let inside = parent.with_remote_span_context(span.span_context().clone());
        let first_pass = settled.first_pass_at.map(|at| job.system(at));
        let ready = job.system(settled.ready_at);
        self.part("queued", start, first_pass.unwrap_or(ready), &inside);
        if let Some(first_pass) = first_pass {
            self.part("run", first_pass, ready, &inside);
        }
        self.part("publish", ready, now, &inside);
        span.end_with_timestamp(now);
    }

    fn part(&self, name: &'static str, start: SystemTime, end: SystemTime, inside: &Context) {
        let builder = self.tracer.span_builder(name).with_start_time(start);
        builder.start_with_context(&self.tracer, inside).end_with_timestamp(end);
    }

    /// Sends the waiting spans, if the collector accepts them soon. Blocks.
    pub fn finish(&self) {
        // A failure was logged when it happened.
        let _ = self.provider.shutdown_with_timeout(LAST_EXPORT_MAX);
    }
}

/// The publishing time, but not after the delivery: the publisher's clock may be wrong.
fn published(job: &Summary) -> SystemTime {
    let ms = job.published_ms.map_or(job.at_ms, |ms| ms.min(job.at_ms));
    UNIX_EPOCH + Duration::from_millis(ms)
}

/// What a worker does with a message, in the conventions' words.
const OPERATION: &str = "process";

/// Where a message was published to and where it was consumed, as the conventions for RabbitMQ join them: exchange, routing key and queue,
/// without what is empty or said twice.
fn destination(job: &Summary, queue: &str) -> String {
    let key = Some(job.routing_key.as_str()).filter(|key| *key != queue).unwrap_or_default();
    let parts = [job.exchange.as_str(), key, queue];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(":")
}

/// What a span says of its job: names of OpenTelemetry's messaging conventions, and of our own. docs/configuration.md lists them.
fn attributes(
    settled: &Settled,
    job: &Summary,
    model: &str,
    destination: String,
    host: Option<&BrokerHost>,
) -> Vec<KeyValue> {
    let mut attributes = vec![
        KeyValue::new("messaging.system", "rabbitmq"),
        KeyValue::new("messaging.operation.type", OPERATION),
        KeyValue::new("messaging.operation.name", OPERATION),
        KeyValue::new("messaging.destination.name", destination),
        KeyValue::new("messaging.rabbitmq.destination.routing_key", job.routing_key.to_string()),
        KeyValue::new("messaging.rabbitmq.message.delivery_tag", number(job.delivery_tag)),
        KeyValue::new("messaging.message.body.size", number(job.body_bytes as u64)),
        KeyValue::new("vramq.model", model.to_owned()),
        KeyValue::new("vramq.outcome", outcome(settled.end)),
    ];
    attributes.extend(job.id.clone().map(|id| KeyValue::new("messaging.message.id", id)));
    let correlation_id = job.correlation_id.as_ref().map(ToString::to_string);
    attributes.extend(correlation_id.map(|id| KeyValue::new("messaging.message.conversation_id", id)));
    if let Some(BrokerHost { name, port }) = host {
        attributes.push(KeyValue::new("server.address", name.clone()));
        attributes.push(KeyValue::new("server.port", i64::from(*port)));
    }
    if let End::DeadLettered(reason) | End::Rejected(reason) = settled.end {
        attributes.push(KeyValue::new("error.type", reason.as_str()));
    }
    attributes
}

/// OpenTelemetry has no unsigned numbers.
fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn remote(trace: &TraceContext) -> Option<SpanContext> {
    let parent = &trace.parent;
    let trace_id = TraceId::from_hex(parent.trace_id()).ok()?;
    let span_id = SpanId::from_hex(parent.span_id()).ok()?;
    let flags = if parent.is_sampled() { TraceFlags::SAMPLED } else { TraceFlags::default() };
    // A state that OpenTelemetry cannot read is still copied to replies.
    let state = trace.state().and_then(|state| TraceState::from_str(state).ok()).unwrap_or_default();
    Some(SpanContext::new(trace_id, span_id, flags, true, state))
}

fn outcome(end: End) -> &'static str {
    match end {
        End::Replied => "answered",
        End::Requeued(cause) => cause.as_str(),
        End::DeadLettered(reason) | End::Rejected(reason) => reason.as_str(),
        End::AlreadySettled => "already-settled",
        End::Withdrawn => "withdrawn",
        End::GivenBack => "handed-back",
    }
}

/// Sends spans, on the SDK's own thread.
#[derive(Debug)]
struct Collector {
    agent: ureq::Agent,
    /// Whether the last batch was lost. Only the first loss in a row is logged.
    failing: AtomicBool,
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = self.send(request);
        let fault = match &answer {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(response.status().to_string()),
            Err(error) => Some(error.to_string()),
        };
        match (self.failing.swap(fault.is_some(), Ordering::Relaxed), fault) {
            (false, Some(error)) => {
                tracing::warn!(
                    error,
                    "spans are lost: the collector does not take them; jobs are not affected"
                );
            }
            (true, None) => tracing::info!("the collector takes spans again"),
            _ => {}
        }
        answer
    }
}

impl Collector {
    fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = request.into_parts();
        let mut sent = self.agent.request(head.method.as_str(), &head.uri.to_string());
        for (name, value) in &head.headers {
            sent = sent.set(name.as_str(), value.to_str()?);
        }
        let answer = match sent.send_bytes(&body) {
            Ok(answer) | Err(ureq::Error::Status(_, answer)) => answer,
            Err(error) => return Err(error.into()),
        };
        let status = answer.status();
        let mut bytes = Vec::new();
        answer.into_reader().take(ANSWER_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(Response::builder().status(status).body(bytes.into())?)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use vramq_core::event::Source;

    use super::*;

    #[test]
    fn a_destination_names_exchange_key_and_queue_each_once() {
        let of = |exchange: &str, key: &str, queue| {
            let job = Summary {
                id: None,
                trace: None,
                correlation_id: None,
                exchange: exchange.into(),
                routing_key: key.into(),
                source: Source::Quarantine,
                delivery_tag: 1,
                body_bytes: 0,
                published_ms: None,
                at: Instant::now(),
                at_ms: 0,
            };
            destination(&job, queue)
        };
        assert_eq!(of("vramq.jobs", "minilm", "vramq.jobs.minilm"), "vramq.jobs:minilm:vramq.jobs.minilm");
        assert_eq!(of("vramq.retry", "minilm", "vramq.jobs.minilm"), "vramq.retry:minilm:vramq.jobs.minilm");
        // By the default exchange, whose name is empty, the key is the queue.
        assert_eq!(of("", "vramq.jobs.minilm", "vramq.jobs.minilm"), "vramq.jobs.minilm");
        assert_eq!(of("fan", "", "team-a.jobs"), "fan:team-a.jobs");
        assert_eq!(of("direct", "same", "same"), "direct:same");
    }
}
