//! A job as the broker delivered it; reads its properties and headers.

use std::sync::Arc;
use std::time::Instant;

use lapin::message::Delivery;
use lapin::types::FieldTable;
use vramq_core::event::{self, Source};
use vramq_core::ids::{ChannelId, DeliveryTag, Fingerprint, JobKey, ModelIndex};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::{CALLER, InvalidHeader, TENANT, USER};
use vramq_schemas::topology::RETRY_EXCHANGE;
use vramq_schemas::withdrawal::Digest;
use vramq_schemas::{JobHeaders, TraceContext, headers};

use super::fingerprint::fingerprint;
use crate::observability::summary::Summary;
use crate::publishers::PublisherRules;
use crate::publishers::direct_address::DIRECT_REPLIES;
use crate::unix_ms;

/// Larger timestamps must be in milliseconds: as seconds they would be after the year 5000.
const SECONDS_MAX: u64 = 100_000_000_000;

/// The latest moment that a job's timestamp allows, in Unix milliseconds. Most publishers write whole seconds, so a job may be almost a
/// second younger than its timestamp says.
fn published_ms(timestamp: u64) -> u64 {
    if timestamp > SECONDS_MAX { timestamp } else { timestamp.saturating_mul(1000).saturating_add(999) }
}

/// A delivery with its time of arrival.
#[derive(Debug)]
pub struct ReceivedJob {
    pub delivery: Delivery,
    /// Kept until the job is settled, longer than the body.
    pub summary: Arc<Summary>,
    rules: Arc<PublisherRules>,
}

impl ReceivedJob {
    pub fn now(delivery: Delivery, source: Source, rules: &Arc<PublisherRules>) -> Self {
        let properties = &delivery.properties;
        let ids = [properties.message_id(), properties.correlation_id()];
        let id = ids.into_iter().flatten().find(|id| !id.as_str().is_empty());
        let at_ms = unix_ms();
        let summary = Summary {
            id: id.map(ToString::to_string),
            trace: properties.headers().as_ref().and_then(TraceContext::of),
            correlation_id: properties.correlation_id().clone(),
            exchange: delivery.exchange.clone(),
            routing_key: delivery.routing_key.clone(),
            source,
            delivery_tag: delivery.delivery_tag,
            body_bytes: delivery.data.len(),
            published_ms: (*properties.timestamp()).map(|at| published_ms(at).min(at_ms)),
            at: Instant::now(),
            at_ms,
        };
        Self { delivery, summary: Arc::new(summary), rules: Arc::clone(rules) }
    }

    pub fn id(&self) -> Option<&str> {
        self.summary.id.as_deref()
    }

    pub fn headers(&self) -> Option<&FieldTable> {
        self.delivery.properties.headers().as_ref()
    }

    /// When the job's `expiration` ends, in Unix milliseconds: as an earlier attempt wrote it, or else computed from the property and the
    /// publishing time.
    pub fn expires_at_ms(&self) -> Option<u64> {
        let written = self.headers().filter(|_| self.is_from_worker()).and_then(headers::expires_at_ms);
        written.or_else(|| {
            let ttl_ms = self.delivery.properties.expiration().as_ref()?.as_str().parse::<u64>().ok()?;
            let Summary { published_ms, at_ms, .. } = *self.summary;
            Some(published_ms.unwrap_or(at_ms).saturating_add(ttl_ms))
        })
    }

    /// Whether its `expiration` has passed. The system clock is read once, at the delivery: setting the clock forward later does not end a
    /// job.
    pub fn is_expired(&self) -> bool {
        let held_ms = u64::try_from(self.summary.at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.expires_at_ms().is_some_and(|at| self.summary.at_ms.saturating_add(held_ms) > at)
    }

    /// Whether a worker published it, or the broker after a delay. Only then are its headers about earlier attempts trusted. This is safe
    /// as long as publishers may not write to that exchange.
    pub fn is_from_worker(&self) -> bool {
        self.delivery.exchange.as_str() == RETRY_EXCHANGE
    }

    /// The user who published it. The broker accepts a `user_id` only from that user; a worker that publishes the job again repeats it in a
    /// header.
    pub fn user(&self) -> Option<String> {
        match self.is_from_worker() {
            true => self.text(USER),
            false => self.delivery.properties.user_id().as_ref().map(ToString::to_string),
        }
    }

    /// The caller whose share its passes take; `None` if the publisher is not known.
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

    /// The model revision that the job demands, if any.
    ///
    /// # Errors
    /// The header is no text.
    pub fn model_revision(&self) -> Result<Option<String>, InvalidHeader> {
        self.headers().map_or(Ok(None), headers::demanded_revision)
    }

    /// Why its `reply_to` must not get replies, if it must not.
    pub fn reply_to_fault(&self) -> Option<String> {
        self.rules.reply_to_fault(self.delivery.properties.reply_to().as_ref()?.as_str())
    }

    /// The headers that are trusted.
    ///
    /// # Errors
    /// A trusted header cannot be read.
    pub fn job_headers(&self) -> Result<JobHeaders, InvalidHeader> {
        match self.headers() {
            None => Ok(JobHeaders::default()),
            Some(table) if self.is_from_worker() => JobHeaders::read(table),
            Some(table) => JobHeaders::read_of_publisher(table),
        }
    }

    /// Whether it has worker headers that are ignored, because a publisher wrote them.
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
            // A queue that does not count leaves a header that the publisher may have written. That affects only the publisher's own job.
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
