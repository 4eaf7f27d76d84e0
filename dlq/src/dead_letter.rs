//! A dead letter, and why a worker or the broker dead-lettered it. Pure.

use std::fmt;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use vramq_schemas::dead_letter::{DEAD_AT_MS, ERROR, REASON, WORKER, WORKER_VERSION};
use vramq_schemas::fields::{as_text, integer};
use vramq_schemas::headers::{self, ATTEMPT, RETRIES};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Reason, ReplyHeaders, ReplyKind, TraceContext};

pub use crate::fingerprint::Fingerprint;

/// The version in groups of messages that the broker dead-lettered.
pub const BY_BROKER: &str = "broker";

/// The version, and the reason, of messages without a record of dead-lettering.
pub const UNKNOWN: &str = "unknown";

/// The length of error texts in lists, in characters: ten thousand of them are kept in memory at once.
const ERROR_CHARS_MAX: usize = 200;

/// Headers with the broker's delivery counts, which change with every reading of the queue.
const COUNTERS: [&str; 2] = ["x-delivery-count", "x-acquired-count"];

/// The header in which the broker keeps why and from where it dead-lettered a message, newest first.
const X_DEATH: &str = "x-death";

/// A message in a dead queue.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// The name of the dead queue.
    pub queue: String,
    /// Without headers, which have a field of their own.
    pub properties: BasicProperties,
    /// Without those that change with every reading of the queue.
    pub headers: FieldTable,
    pub body: Vec<u8>,
}

/// What dead letters are counted by.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// That of the [`DeadLetterCause`].
    pub reason: String,
    /// The model's key: the end of the queue's name.
    pub model: String,
    /// The worker's version, or [`BY_BROKER`], or [`UNKNOWN`].
    pub version: String,
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.reason, self.model, self.version)
    }
}

/// Why a message was dead-lettered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetterCause {
    /// The name of a [`Reason`], also of a later version; or the broker's reason, with hyphens; or [`UNKNOWN`].
    pub reason: String,
    /// What the worker wrote. If the broker dead-lettered it, or nothing tells who did: a sentence that this crate composes.
    pub error: String,
    /// The worker's name. `None` if no worker dead-lettered it.
    pub worker: Option<String>,
    /// The worker's version, or [`BY_BROKER`], or [`UNKNOWN`].
    pub version: String,
    /// Unix time in milliseconds.
    pub dead_at_ms: Option<u64>,
}

/// What is kept of a dead letter when its body is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub fingerprint: Fingerprint,
    /// The job's id.
    pub id: Option<String>,
    pub group: Group,
    /// Unix time in milliseconds.
    pub dead_at_ms: Option<u64>,
    /// The larger one of the header `attempt` and the number of attempts in the history.
    pub attempts: u32,
    /// How often an operator has retried it.
    pub retries: u32,
    pub body_bytes: usize,
    /// The worker's name. `None` if no worker dead-lettered it.
    pub worker: Option<String>,
    /// The beginning of [`DeadLetterCause::error`].
    pub error: String,
    /// The trace that the job belongs to: 32 hexadecimal digits.
    pub trace: Option<String>,
    /// It holds results, not a job.
    pub results: Option<ReplyKind>,
}

impl DeadLetter {
    /// A message that was read from `queue`.
    pub fn new(queue: &str, properties: BasicProperties, body: Vec<u8>) -> Self {
        let headers: FieldTable = properties
            .headers()
            .iter()
            .flatten()
            .filter(|(name, _)| !COUNTERS.contains(&name.as_str()))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect::<std::collections::BTreeMap<_, _>>()
            .into();
        // Kept in a field of their own.
        let properties = properties.with_headers(FieldTable::default());
        Self { queue: queue.to_owned(), properties, headers, body }
    }

    /// The job's id: the message id, or without one (an empty one is none) the correlation id.
    pub fn id(&self) -> Option<&str> {
        let properties = &self.properties;
        let ids = [properties.message_id(), properties.correlation_id()];
        ids.into_iter().flatten().map(|id| id.as_str()).find(|id| !id.is_empty())
    }

    /// The model's key.
    pub fn model(&self) -> &str {
        self.queue.strip_prefix(&dead_queue("")).unwrap_or(&self.queue)
    }

    /// Whether the broker dead-lettered the message, rather than a worker. Then the publisher may have written any header except the
    /// broker's own. Workers write a reason, and publish without `x-death`.
    pub(crate) fn is_by_broker(&self) -> bool {
        self.headers.inner().contains_key(X_DEATH) || self.text(REASON).is_none()
    }

    /// The kind of reply, if the letter holds results that could not be delivered rather than a job. If a job failed after some items, the
    /// results of these items carry the job's reason, so their reply headers identify them.
    pub fn results(&self) -> Option<ReplyKind> {
        let kind = self.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str()));
        // `progress` is never kept.
        kind.filter(|kind| *kind != ReplyKind::Progress).filter(|_| !self.is_by_broker()).filter(|_| {
            self.text(REASON).as_deref() == Some(Reason::Unroutable.as_str())
                || ReplyHeaders::read(&self.headers).is_ok()
        })
    }

    /// A header's text. `None` if the header is missing or no text.
    pub fn text(&self, header: &str) -> Option<String> {
        self.headers.inner().get(header).and_then(as_text)
    }

    /// A header's integer. `None` if the header is missing, no integer, or negative.
    pub fn number(&self, header: &str) -> Option<u64> {
        integer(self.headers.inner().get(header)).and_then(|n| n.try_into().ok())
    }

    /// A header's integer; 0 if there is none or it is negative, at most `u32::MAX`.
    pub fn number_u32(&self, header: &str) -> u32 {
        self.number(header).map_or(0, |n| n.try_into().unwrap_or(u32::MAX))
    }

    /// Identifies it. Computed from all that an import restores, its body included.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.queue, &self.properties, &self.headers, &self.body)
    }

    /// Why it was dead-lettered: what the worker wrote, or else the broker.
    pub fn cause(&self) -> DeadLetterCause {
        if let Some(reason) = self.text(REASON).filter(|_| !self.is_by_broker()) {
            return DeadLetterCause {
                reason,
                error: self.text(ERROR).unwrap_or_default(),
                worker: self.text(WORKER),
                version: self.text(WORKER_VERSION).unwrap_or_else(|| UNKNOWN.to_owned()),
                dead_at_ms: self.number(DEAD_AT_MS),
            };
        }
        self.cause_by_broker().unwrap_or_else(|| DeadLetterCause {
            reason: UNKNOWN.to_owned(),
            error: "it has no record of dead-lettering, neither of a worker nor of the broker".to_owned(),
            worker: None,
            version: UNKNOWN.to_owned(),
            dead_at_ms: None,
        })
    }

    /// From the newest entry of `x-death`.
    fn cause_by_broker(&self) -> Option<DeadLetterCause> {
        let AMQPValue::FieldArray(deaths) = self.headers.inner().get(X_DEATH)? else { return None };
        let AMQPValue::FieldTable(death) = deaths.as_slice().first()? else { return None };
        let text = |name| death.inner().get(name).and_then(as_text);
        let reason = text("reason")?;
        let queue = text("queue").unwrap_or_default();
        let count = integer(death.inner().get("count")).unwrap_or(1);
        let seconds = match death.inner().get("time") {
            Some(AMQPValue::Timestamp(seconds)) => Some(*seconds),
            _ => None,
        };
        let times = if count == 1 { String::new() } else { format!(", {count} times") };
        Some(DeadLetterCause {
            error: format!(
                "the broker took it from the queue {queue}: {}{times}",
                explained_by_broker(&reason)
            ),
            reason: reason.replace('_', "-"),
            worker: None,
            version: BY_BROKER.to_owned(),
            dead_at_ms: seconds.map(|seconds| seconds.saturating_mul(1000)),
        })
    }

    /// What lists and plans keep of it. Computes the fingerprint.
    pub fn summary(&self) -> Summary {
        let DeadLetterCause { reason, error, worker, version, dead_at_ms } = self.cause();
        Summary {
            fingerprint: self.fingerprint(),
            id: self.id().map(str::to_owned),
            group: Group { reason, model: self.model().to_owned(), version },
            dead_at_ms,
            attempts: self.number_u32(ATTEMPT).max(u32::try_from(self.history().len()).unwrap_or(u32::MAX)),
            retries: self.number_u32(RETRIES),
            body_bytes: self.body.len(),
            worker,
            error: error.chars().take(ERROR_CHARS_MAX).collect(),
            trace: TraceContext::of(&self.headers).map(|trace| trace.parent.trace_id().to_owned()),
            results: self.results(),
        }
    }

    /// The past attempts, newest last. Its publisher may have invented them if the broker dead-lettered it.
    pub fn history(&self) -> Vec<vramq_schemas::Attempt> {
        headers::history(&self.headers)
    }
}

/// Completes the sentence about a reason of the broker.
fn explained_by_broker(reason: &str) -> String {
    match reason {
        "expired" => "its time to live had passed".to_owned(),
        "delivery_limit" => "it was delivered too often, and never acknowledged".to_owned(),
        "maxlen" => "the queue was full".to_owned(),
        "rejected" => "a consumer rejected it".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use vramq_schemas::DeadLetter as Dossier;

    /// A dead letter as a worker publishes it.
    pub(crate) fn written(id: &str, reason: Reason, change: impl FnOnce(&mut FieldTable)) -> DeadLetter {
        let mut headers = FieldTable::default();
        let letter = Dossier {
            reason,
            error: "it went wrong".to_owned(),
            dead_at_ms: 1_700_000_000_000,
            worker: "w1".to_owned(),
            worker_version: "0.1.0".to_owned(),
            requirement: None,
        };
        letter.write(&mut headers);
        change(&mut headers);
        let properties = BasicProperties::default().with_message_id(id.into()).with_headers(headers);
        DeadLetter::new("vramq.dead.minilm", properties, b"{}".to_vec())
    }

    /// A dead letter of the broker, with the broker's reason for it.
    pub(crate) fn dead_lettered_by_broker(reason: &str) -> DeadLetter {
        let mut death = FieldTable::default();
        death.insert("reason".into(), AMQPValue::LongString(reason.into()));
        death.insert("queue".into(), AMQPValue::LongString("vramq.jobs.minilm".into()));
        death.insert("count".into(), AMQPValue::LongLongInt(2));
        death.insert("time".into(), AMQPValue::Timestamp(1_700_000_000));
        let mut headers = FieldTable::default();
        headers.insert("x-death".into(), AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into()));
        DeadLetter::new("vramq.dead.minilm", BasicProperties::default().with_headers(headers), Vec::new())
    }

    #[test]
    fn the_cause_is_read_from_the_worker_or_the_broker() {
        let Summary { group, dead_at_ms, .. } = written("a", Reason::OutOfMemory, |_| {}).summary();
        assert_eq!(
            (group.to_string().as_str(), dead_at_ms),
            ("out-of-memory/minilm/0.1.0", Some(1_700_000_000_000))
        );
        let Summary { group, dead_at_ms, error, id, .. } =
            dead_lettered_by_broker("delivery_limit").summary();
        assert_eq!(group.to_string(), "delivery-limit/minilm/broker");
        assert_eq!((dead_at_ms, id), (Some(1_700_000_000_000), None));
        assert!(
            error.contains("vramq.jobs.minilm")
                && error.contains("delivered too often")
                && error.contains("2 times")
        );
        let neither = DeadLetter::new("vramq.dead.m", BasicProperties::default(), Vec::new()).summary();
        assert_eq!(neither.group.to_string(), "unknown/m/unknown");
    }

    #[test]
    fn a_reason_of_a_later_version_is_shown_as_it_is() {
        let letter = written("a", Reason::Malformed, |headers| {
            headers.insert(REASON.into(), AMQPValue::LongString("haunted".into()));
        });
        assert_eq!(letter.summary().group.reason, "haunted");
    }

    /// A publisher can write any header, but not the broker's.
    #[test]
    fn a_dossier_that_a_publisher_wrote_is_not_believed() {
        let real = dead_lettered_by_broker("expired");
        let mut letter = written("a", Reason::Unroutable, |headers| {
            headers.insert("x-death".into(), real.headers.inner()["x-death"].clone());
        });
        letter.properties = letter.properties.with_type("done".into());
        assert_eq!(letter.summary().group.to_string(), "expired/minilm/broker");
        assert_eq!((letter.results(), letter.cause().worker), (None, None));
        letter.headers.insert("x-death".into(), AMQPValue::Boolean(true));
        assert_eq!(letter.summary().group.to_string(), "unknown/minilm/unknown");
    }

    #[test]
    fn only_what_a_worker_could_not_deliver_holds_results() {
        let kind = |reason, kind: &str| {
            let letter = written("a", reason, |_| {});
            DeadLetter { properties: letter.properties.with_type(kind.into()), ..letter }.results()
        };
        assert_eq!(kind(Reason::Unroutable, "done"), Some(ReplyKind::Done));
        assert_eq!(kind(Reason::Unroutable, "part"), Some(ReplyKind::Part));
        assert_eq!(kind(Reason::Unroutable, "job"), None);
        assert_eq!(kind(Reason::Malformed, "done"), None);
        let of_a_failed_job = written("a", Reason::EngineFailed, |headers| {
            let reply = ReplyHeaders { items: 2, items_total: 5, ..ReplyHeaders::default() };
            for (name, value) in &reply.to_table() {
                headers.insert(name.clone(), value.clone());
            }
        });
        let properties = of_a_failed_job.properties.with_type("part".into());
        assert_eq!(DeadLetter { properties, ..of_a_failed_job }.results(), Some(ReplyKind::Part));
    }
}
