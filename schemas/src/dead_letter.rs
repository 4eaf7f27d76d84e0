//! What a dead letter tells besides the job: its body is the job's, byte for byte; the rest is in these headers.

use amq_protocol_types::FieldTable;

use crate::headers::{as_text, integer, long, text};
use crate::reason::Reason;

pub const REASON: &str = "reason";
pub const ERROR: &str = "error";
pub const DEAD_AT_MS: &str = "dead-at-ms";
pub const WORKER: &str = "worker";
pub const WORKER_VERSION: &str = "worker-version";

/// The headers that the worker adds to a job when it gives up on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    pub reason: Reason,
    /// What, where and what to do, in words.
    pub error: String,
    /// Unix time in milliseconds.
    pub dead_at_ms: u64,
    pub worker: String,
    pub worker_version: String,
}

impl DeadLetter {
    /// Writes the headers into `table`, over those of the same names; foreign ones stay.
    pub fn write(&self, table: &mut FieldTable) {
        table.insert(REASON.into(), text(self.reason.as_str()));
        table.insert(ERROR.into(), text(&self.error));
        table.insert(DEAD_AT_MS.into(), long(self.dead_at_ms));
        table.insert(WORKER.into(), text(&self.worker));
        table.insert(WORKER_VERSION.into(), text(&self.worker_version));
    }

    /// Reads them back; `None` for a message that no worker dead-lettered (the broker did, for example).
    pub fn read(table: &FieldTable) -> Option<Self> {
        let word = |name| table.inner().get(name).and_then(as_text);
        Some(Self {
            reason: word(REASON)?.parse().ok()?,
            error: word(ERROR)?,
            dead_at_ms: integer(table.inner().get(DEAD_AT_MS))?.try_into().ok()?,
            worker: word(WORKER)?,
            worker_version: word(WORKER_VERSION)?,
        })
    }
}
