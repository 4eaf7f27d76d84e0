//! The headers of a dead letter. Its body is the job's, byte for byte.

use amq_protocol_types::FieldTable;

use crate::fields::{as_text, integer, long, text};
use crate::reason::Reason;

pub const REASON: &str = "reason";
pub const ERROR: &str = "error";
pub const DEAD_AT_MS: &str = "dead-at-ms";
pub const WORKER: &str = "worker";
pub const WORKER_VERSION: &str = "worker-version";
pub const ITEM: &str = "item";
pub const ITEM_COST: &str = "item-cost";
pub const NEEDS_BYTES: &str = "needs-bytes";

/// Keeps the publisher's `expiration` as a header: with the property of that name, the dead letter itself would expire.
pub const EXPIRATION: &str = "expiration";

/// The headers that [`DeadLetter`] reads and writes.
pub const OF_DEAD_LETTERS: [&str; 8] =
    [REASON, ERROR, DEAD_AT_MS, WORKER, WORKER_VERSION, ITEM, ITEM_COST, NEEDS_BYTES];

/// The headers that a worker adds to a job that it dead-letters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeadLetter {
    pub reason: Reason,
    /// What failed, where, and what to do, as text for people.
    pub error: String,
    /// Unix time in milliseconds.
    pub dead_at_ms: u64,
    pub worker: String,
    pub worker_version: String,
    /// Only of a job that ran out of memory. Its attempts are in the `history` header.
    pub requirement: Option<MinimumRequirement>,
}

/// The item that does not fit even alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinimumRequirement {
    /// Its index within the job.
    pub item: u32,
    /// Its cost (tokens, for an encoder); 0 if it is unknown.
    pub cost: u32,
    /// The least free device memory, in bytes, that it would fit in.
    pub needs_bytes: u64,
}

impl DeadLetter {
    /// Writes the headers into `table`; headers with other names stay.
    pub fn write(&self, table: &mut FieldTable) {
        table.insert(REASON.into(), text(self.reason.as_str()));
        table.insert(ERROR.into(), text(&self.error));
        table.insert(DEAD_AT_MS.into(), long(self.dead_at_ms));
        table.insert(WORKER.into(), text(&self.worker));
        table.insert(WORKER_VERSION.into(), text(&self.worker_version));
        if let Some(MinimumRequirement { item, cost, needs_bytes }) = self.requirement {
            table.insert(ITEM.into(), long(item.into()));
            table.insert(ITEM_COST.into(), long(cost.into()));
            table.insert(NEEDS_BYTES.into(), long(needs_bytes));
        }
    }

    /// Reads them back; `None` for a message that no worker dead-lettered (the broker did, for example).
    pub fn read(table: &FieldTable) -> Option<Self> {
        let word = |name| table.inner().get(name).and_then(as_text);
        let number = |name| integer(table.inner().get(name));
        Some(Self {
            reason: word(REASON)?.parse().ok()?,
            error: word(ERROR)?,
            dead_at_ms: number(DEAD_AT_MS)?.try_into().ok()?,
            worker: word(WORKER)?,
            worker_version: word(WORKER_VERSION)?,
            requirement: number(ITEM).zip(number(ITEM_COST)).zip(number(NEEDS_BYTES)).and_then(
                |((item, cost), needs)| {
                    Some(MinimumRequirement {
                        item: item.try_into().ok()?,
                        cost: cost.try_into().ok()?,
                        needs_bytes: needs.try_into().ok()?,
                    })
                },
            ),
        })
    }
}
