//! A past attempt at a job: what happened, where, and with how much memory. The header `history` is a list of them.

use amq_protocol_types::{AMQPValue, FieldTable};

use crate::fields::{as_text, cut, integer, long};
#[cfg(doc)]
use crate::headers::{DEVICE_LOST, WORKER_LOST};

/// The longest text in a `history` entry, in bytes. With three texts in each of 16 entries, `history` takes some 16 KiB of the header frame
/// at most, so a requeue never fails because of it.
const HISTORY_TEXT_BYTES_MAX: usize = 256;

/// A past attempt: an entry of the header `history`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attempt {
    /// Unix time in milliseconds.
    pub at_ms: u64,
    pub worker: String,
    pub device: String,
    /// What happened: `out-of-memory`, [`WORKER_LOST`] or [`DEVICE_LOST`]. For the last two only the reporting worker is known.
    pub outcome: String,
    /// Index of the job's first item in the pass.
    pub item: u32,
    /// Items in the pass.
    pub items: u32,
    /// Cost of its longest item (tokens, for an encoder); 0 if it is unknown.
    pub longest: u32,
    /// Bytes asked of the device, and what it had.
    pub asked: u64,
    pub free: u64,
    pub total: u64,
    /// Bytes that other processes held.
    pub foreign: u64,
    /// Whether the pass had the device to itself.
    pub alone: bool,
}

impl Attempt {
    pub(crate) fn to_table(&self) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert("at-ms".into(), long(self.at_ms));
        table.insert("worker".into(), cut(&self.worker, HISTORY_TEXT_BYTES_MAX));
        table.insert("device".into(), cut(&self.device, HISTORY_TEXT_BYTES_MAX));
        table.insert("outcome".into(), cut(&self.outcome, HISTORY_TEXT_BYTES_MAX));
        table.insert("item".into(), long(self.item.into()));
        table.insert("items".into(), long(self.items.into()));
        table.insert("longest".into(), long(self.longest.into()));
        table.insert("asked".into(), long(self.asked));
        table.insert("free".into(), long(self.free));
        table.insert("total".into(), long(self.total));
        table.insert("foreign".into(), long(self.foreign));
        table.insert("alone".into(), AMQPValue::Boolean(self.alone));
        table
    }

    pub(crate) fn from_table(table: &FieldTable) -> Self {
        let number = |name| integer(table.inner().get(name)).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        let count = |name| u32::try_from(number(name)).unwrap_or(u32::MAX);
        let word = |name| table.inner().get(name).and_then(as_text).unwrap_or_default();
        Self {
            at_ms: number("at-ms"),
            worker: word("worker"),
            device: word("device"),
            outcome: word("outcome"),
            item: count("item"),
            items: count("items"),
            longest: count("longest"),
            asked: number("asked"),
            free: number("free"),
            total: number("total"),
            foreign: number("foreign"),
            alone: matches!(table.inner().get("alone"), Some(AMQPValue::Boolean(true))),
        }
    }
}
