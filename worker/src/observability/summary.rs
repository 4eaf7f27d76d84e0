//! The facts of a job that logs and spans need. The worker keeps them until the job is settled, longer than the job's body.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lapin::types::ShortString;
use vramq_core::event::Source;
use vramq_schemas::TraceContext;

/// What logs and spans need of a job.
#[derive(Clone, Debug)]
pub struct Summary {
    /// `message_id`, else `correlation_id`.
    pub id: Option<String>,
    /// Its position in a trace, if its publisher provides one.
    pub trace: Option<TraceContext>,
    /// The publisher's own id of the exchange of messages that it belongs to.
    pub correlation_id: Option<ShortString>,
    /// Where it was published to.
    pub exchange: ShortString,
    pub routing_key: ShortString,
    /// Where it came from.
    pub source: Source,
    pub delivery_tag: u64,
    pub body_bytes: usize,
    /// When it was published, in Unix milliseconds, if the publisher says so. Never after `at_ms`: the publisher's clock may be wrong.
    pub published_ms: Option<u64>,
    /// When it was delivered, by both clocks.
    pub at: Instant,
    pub at_ms: u64,
}

impl Summary {
    /// The system time of a moment after the delivery.
    pub fn system(&self, at: Instant) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(self.at_ms) + at.saturating_duration_since(self.at)
    }
}
