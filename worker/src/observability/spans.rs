//! Spans of jobs for an OTLP collector: `process DESTINATION`, and in it `queued`, `run` and `publish`, built from recorded times when a job
//! is settled. Names and attributes follow OpenTelemetry's conventions for messaging and RabbitMQ.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _};
use opentelemetry::{Context, KeyValue};
use vramq_amqp::BrokerHost;
use vramq_core::observation::{End, Settled};
use vramq_spans::{Spans, remote_parent};

use super::summary::Summary;
use crate::identity::Identity;
use crate::model::Model;

/// Spans of jobs, on their way to a collector.
#[derive(Debug)]
pub struct JobSpans(Spans);

impl JobSpans {
    /// `None` if the environment names no collector.
    ///
    /// # Errors
    /// The variables cannot be used. The text names one.
    pub fn from_environment(identity: &Identity) -> Result<Option<Self>, String> {
        let spans = Spans::from_environment("vramq-worker", identity.version, identity.worker.clone())?;
        Ok(spans.map(Self))
    }

    /// Records a job that is settled.
    pub fn record(&self, settled: &Settled, job: &Summary, model: &Model, host: Option<&BrokerHost>) {
        let now = SystemTime::now();
        let trace = job.trace.as_ref();
        let parent = trace.map_or_else(Context::new, |trace| remote_parent(&trace.parent, trace.state()));
        let start = published(job);
        let destination = destination(job, &model.queue_of(job.source));
        let builder = self.0.tracer().span_builder(format!("{OPERATION} {destination}"));
        let attributes = attributes(settled, job, &model.name, destination, host);
        let builder =
            builder.with_kind(SpanKind::Consumer).with_start_time(start).with_attributes(attributes);
        let mut span = builder.start_with_context(self.0.tracer(), &parent);
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
        let tracer = self.0.tracer();
        let builder = tracer.span_builder(name).with_start_time(start);
        builder.start_with_context(tracer, inside).end_with_timestamp(end);
    }

    /// Sends the waiting spans, if the collector accepts them soon. Blocks.
    pub fn finish(&self) {
        self.0.finish();
    }
}

/// The publishing time, or the delivery's if the publisher says none.
fn published(job: &Summary) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(job.published_ms.unwrap_or(job.at_ms))
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
