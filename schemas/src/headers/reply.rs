//! The headers of replies with outputs.

use amq_protocol_types::FieldTable;

use super::values::{InvalidHeader, unsigned};
use super::{ATTEMPT, ITEMS, ITEMS_TOTAL, OFFSET, QUEUED_MS, RAN_MS, TOKENS, WORKER};
use crate::fields::{as_text, integer, long, text};

/// The headers of a `part` or `done` reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplyHeaders {
    /// Index of the first item in this reply, and how many items it holds.
    pub offset: u32,
    pub items: u32,
    /// Items of the whole job.
    pub items_total: u32,
    pub attempt: u32,
    pub worker: String,
    /// Milliseconds from publishing (if the job had a timestamp) or delivery to the first pass, and from there to
    /// the end of the last.
    pub queued_ms: u64,
    pub ran_ms: u64,
}

impl ReplyHeaders {
    /// # Errors
    /// Names the first header that is missing or wrong: such a message is no reply of a worker.
    pub fn read(table: &FieldTable) -> Result<Self, InvalidHeader> {
        let required = |name| {
            unsigned(table, name)?.ok_or(InvalidHeader {
                name,
                found: "absent".to_owned(),
                expected: "a whole number from 0 to 4294967295",
            })
        };
        Ok(Self {
            offset: required(OFFSET)?,
            items: required(ITEMS)?,
            items_total: required(ITEMS_TOTAL)?,
            attempt: unsigned(table, ATTEMPT)?.unwrap_or(0),
            worker: table.inner().get(WORKER).and_then(as_text).unwrap_or_default(),
            queued_ms: integer(table.inner().get(QUEUED_MS)).and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
            ran_ms: integer(table.inner().get(RAN_MS)).and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
        })
    }

    pub fn to_table(&self) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert(OFFSET.into(), long(self.offset.into()));
        table.insert(ITEMS.into(), long(self.items.into()));
        table.insert(ITEMS_TOTAL.into(), long(self.items_total.into()));
        table.insert(ATTEMPT.into(), long(self.attempt.into()));
        table.insert(WORKER.into(), text(&self.worker));
        table.insert(QUEUED_MS.into(), long(self.queued_ms));
        table.insert(RAN_MS.into(), long(self.ran_ms));
        table
    }
}

/// The tokens that a reply's items had, if the worker counts them.
pub fn tokens(table: &FieldTable) -> Option<u64> {
    integer(table.inner().get(TOKENS)).and_then(|n| n.try_into().ok())
}
