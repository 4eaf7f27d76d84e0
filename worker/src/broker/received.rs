//! A job as the broker delivered it; reads its properties and headers.

use std::sync::Arc;
use std::time::Instant;

use lapin::message::Delivery;
use lapin::types::FieldTable;
use vramq_core::event::{self, Source};
use vramq_core::ids::{ChannelId, DeliveryTag, Fingerprint, JobKey, ModelIndex};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::{CALLER, InvalidHeader, MODEL_REVISION, TENANT, USER};
use vramq_schemas::topology::RETRY_EXCHANGE;
use vramq_schemas::withdrawal::Digest;
use vramq_schemas::{JobHeaders, TraceContext, headers};

use super::fingerprint::fingerprint;
use crate::observability::summary::Summary;
use crate::publishers::PublisherRules;
use crate::publishers::direct_address::DIRECT_REPLIES;
use crate::unix_ms;

/// Timestamps above this are milliseconds: as seconds they would be after the year 5000.
const SECONDS_MAX: u64 = 100_000_000_000;

/// A delivery, with the moment at which it came.
#[derive(Debug)]
pub struct ReceivedJob {
    pub delivery: Delivery,
    /// What is kept of it until it is settled, longer than its body.
    pub summary: Arc<Summary>,
    rules: Arc<PublisherRules>,
}

impl ReceivedJob {
    pub fn now(delivery: Delivery, source: Source, rules: &Arc<PublisherRules>) -> Self {
        let properties = &delivery.properties;
        let id = properties.message_id().as_ref().or(properties.correlation_id().as_ref());
        let summary = Summary {
            id: id.map(|id| id.to_string()).filter(|id| !id.is_empty()),
            trace: properties.headers().as_ref().and_then(TraceContext::of),
            correlation_id: properties.correlation_id().clone(),
            exchange: delivery.exchange.clone(),
            routing_key: delivery.routing_key.clone(),
            source,
            delivery_tag: delivery.delivery_tag,
            body_bytes: delivery.data.len(),
            published_ms: (*properties.timestamp())
                .map(|at| if at > SECONDS_MAX { at } else { at.saturating_mul(1000) }),
            at: Instant::now(),
            at_ms: unix_ms(),
        };
        Self { delivery, summary: Arc::new(summary), rules: Arc::clone(rules) }
    }

    pub fn id(&self) -> Option<&str> {
        self.summary.id.as_deref()
    }

    pub fn headers(&self) -> Option<&FieldTable> {
        self.delivery.properties.headers().as_ref()
    }

    /// When the job's `expiration` passes, in Unix milliseconds: as an earlier attempt wrote it, else from the property and
    /// the moment of publishing.
    pub fn expires_at_ms(&self) -> Option<u64> {
        let written = self.headers().filter(|_| self.is_from_worker()).and_then(headers::expires_at_ms);
        written.or_else(|| {
            let ttl_ms = self.delivery.properties.expiration().as_ref()?.as_str().parse::<u64>().ok()?;
            let Summary { published_ms, at_ms, .. } = *self.summary;
            // A timestamp in whole seconds may stand for a moment almost a second later.
            let since = published_ms.map_or(at_ms, |ms| ms.saturating_add(999)).min(at_ms);
            Some(since.saturating_add(ttl_ms))
        })
    }

    /// Whether its `expiration` has passed. The system's clock is asked once, when the job comes: a clock that is set forward later
    /// ends no job.
    pub fn is_expired(&self) -> bool {
        let held_ms = u64::try_from(self.summary.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.expires_at_ms().is_some_and(|at| self.summary.at_ms.saturating_add(held_ms) > at)
    }

    /// Whether a worker published it, or the broker after a delay: only then is what it says of earlier attempts believed. This
    /// holds while publishers may not write to that exchange.
    pub fn is_from_worker(&self) -> bool {
        self.delivery.exchange.as_str() == RETRY_EXCHANGE
    }

    /// Who published it. The broker takes a message with a `user_id` only from that user; a worker that publishes the job again
    /// repeats it in a header.
    pub fn user(&self) -> Option<String> {
        match self.is_from_worker() {
            true => self.text(USER),
            false => self.delivery.properties.user_id().as_ref().map(ToString::to_string),
        }
    }

    /// Whose share of the passes it takes; nobody's in particular if its publisher is not known.
    pub fn caller(&self) -> Option<String> {
        match self.is_from_worker() {
            true => self.text(CALLER),
            false => self.rules.caller(self.user(), self.text(TENANT)),
        }
    }

    fn text(&self, header: &str) -> Option<String> {
        let text = self.headers().and_then(|table| table.inner().get(header)).and_then(as_text);
        text.filter(|text| !text.is_empty())
    }

    /// The revision of the model that the job demands, if it does.
    pub fn model_revision(&self) -> Option<String> {
        self.text(MODEL_REVISION)
    }

    /// Why no reply may be sent to its `reply_to`, if so.
    pub fn reply_to_fault(&self) -> Option<String> {
        self.rules.reply_to_fault(self.delivery.properties.reply_to().as_ref()?.as_str())
    }

    /// What its headers say, as far as they are believed.
    ///
    /// # Errors
    /// A header that is believed cannot be read.
    pub fn job_headers(&self) -> Result<JobHeaders, InvalidHeader> {
        match self.headers() {
            None => Ok(JobHeaders::default()),
            Some(table) if self.is_from_worker() => JobHeaders::read(table),
            Some(table) => JobHeaders::read_of_publisher(table),
        }
    }

    /// Whether it has headers of workers that are ignored, because a publisher wrote them.
    pub fn has_ignored_headers(&self) -> bool {
        !self.is_from_worker() && self.headers().is_some_and(JobHeaders::has_of_workers)
    }

    /// What the core decides by.
    pub fn facts(&self, job: JobKey, model: ModelIndex, channel: ChannelId) -> event::Delivery {
        let table = self.headers();
        let reply_to =
            self.delivery.properties.reply_to().as_ref().filter(|queue| !queue.as_str().is_empty());
        event::Delivery {
            job,
            model,
            source: self.summary.source,
            channel,
            tag: DeliveryTag(self.delivery.delivery_tag),
            fingerprint: Fingerprint(fingerprint(&self.delivery)),
            redelivered: self.delivery.redelivered,
            // Where the broker does not count, a header that says so was written by a publisher; it matters to its own job only.
            delivery_count: table.and_then(headers::delivery_count),
            id: self.summary.id.clone(),
            caller: self.caller(),
            withdrawal: table.and_then(Digest::read),
            reply_queue: reply_to.map(ToString::to_string).filter(|queue| !queue.starts_with(DIRECT_REPLIES)),
            trace_id: self.summary.trace.as_ref().map(|trace| trace.parent.trace_id().to_owned()),
            bytes: self.delivery.data.len(),
            headers: self.job_headers().ok(),
            expires_at_ms: self.expires_at_ms(),
            published_ms: self.summary.published_ms,
        }
    }
}
