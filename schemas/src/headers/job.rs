//! The headers of jobs, which change between attempts.

use amq_protocol_types::{AMQPValue, FieldArray, FieldTable};

use super::values::{InvalidHeader, boolean, moment_ms, unsigned};
use super::{
    ATTEMPT, BATCH_HINT, BATCH_HINT_MAX, BATCH_HINT_PREFIXED, CALLER, CRASHES, DELAYS, EXCLUSIVE,
    EXPIRES_AT_MS, HISTORY, ITEMS_DONE, MOVED, QUEUE, REVISION_WAITS, STORE_WAITS, USER, WAITS,
};
use crate::attempt::Attempt;
use crate::fields::{as_text, long, text};
use crate::reason::Reason;

/// Past attempts kept in the `history` header, newest last: enough to halve a hint of 65,536 down to 1.
pub const HISTORY_MAX: usize = 16;

/// Each time that a job has run this many passes, it may try again a size that ran out of memory.
pub const PASSES_PER_GROWTH: u32 = 16;

/// The headers that only workers may write, but for the batch hint: those of [`JobHeaders`], [`USER`] and [`CALLER`].
pub const OF_JOBS: [&str; 16] = [
    BATCH_HINT,
    BATCH_HINT_MAX,
    ATTEMPT,
    ITEMS_DONE,
    EXCLUSIVE,
    HISTORY,
    DELAYS,
    EXPIRES_AT_MS,
    CRASHES,
    WAITS,
    REVISION_WAITS,
    STORE_WAITS,
    MOVED,
    QUEUE,
    USER,
    CALLER,
];

/// A job's headers. They hold everything that changes between attempts, so that the body never changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobHeaders {
    /// The most items that may share a pass with this job, at least 1. `None`: no wish.
    pub batch_hint: Option<u32>,
    /// The publisher's own hint, once an out-of-memory has lowered it: what it may grow back to.
    pub batch_hint_max: Option<u32>,
    /// How often the job was tried before.
    pub attempt: u32,
    /// Items from the start that are already answered.
    pub items_done: u32,
    /// The job may run only with the whole device to itself.
    pub exclusive: bool,
    /// What happened before, newest last, at most [`HISTORY_MAX`].
    pub history: Vec<Attempt>,
    /// How often the job waited for memory that other processes held.
    pub delays: u32,
    /// When the job expires, in Unix milliseconds: the property `expiration` starts again with every publish.
    pub expires_at_ms: Option<u64>,
    /// How often a worker was lost while it held the job.
    pub crashes: u32,
    /// How often the job waited because its reply queue was full, or the queue of the workers that are to run it.
    pub waits: u32,
    /// How often the job waited unrun because the worker has another revision of the model.
    pub revision_waits: u32,
    /// How often the job waited unrun because a store did not give its inputs.
    pub store_waits: u32,
    /// A rule of the model has moved the job to the workers that it is with now.
    pub moved: bool,
    /// The queue that it first came from, if that was not its model's own.
    pub queue: Option<String>,
}

impl JobHeaders {
    /// The last attempt that ran out of memory.
    pub fn last_out_of_memory(&self) -> Option<&Attempt> {
        self.history.iter().rfind(|attempt| attempt.outcome == Reason::OutOfMemory.as_str())
    }

    /// Records a pass of `items` items that fitted, the `passes`th since the job was taken. A lowered hint doubles, up to the publisher's
    /// own, and further items no longer need the device to themselves. Sizes below the one that failed last come back at once; that one is
    /// tried again only at every [`PASSES_PER_GROWTH`]th pass.
    pub fn fitted(&mut self, items: u32, passes: u32) {
        self.exclusive = false;
        let Some(items_failed) = self.last_out_of_memory().map(|last| last.items) else { return };
        let Some(hint) = self.batch_hint.filter(|hint| items >= *hint) else { return };
        let doubled = hint.saturating_mul(2);
        if doubled < items_failed || passes.is_multiple_of(PASSES_PER_GROWTH) {
            self.batch_hint = Some(self.batch_hint_max.map_or(doubled, |most| doubled.min(most)));
        }
    }

    /// Reads the headers of a job message; absent ones have their defaults, unknown ones are ignored.
    ///
    /// # Errors
    /// Names the first header of ours with a wrong type or an absurd value. A faulty `history` is dropped instead:
    /// it only informs.
    pub fn read(table: &FieldTable) -> Result<Self, InvalidHeader> {
        Ok(Self {
            batch_hint: match batch_hint(table, BATCH_HINT)? {
                None => batch_hint(table, BATCH_HINT_PREFIXED)?,
                hint => hint,
            },
            batch_hint_max: unsigned(table, BATCH_HINT_MAX)?.filter(|hint| *hint > 0),
            attempt: unsigned(table, ATTEMPT)?.unwrap_or(0),
            items_done: unsigned(table, ITEMS_DONE)?.unwrap_or(0),
            exclusive: boolean(table, EXCLUSIVE)?,
            history: history(table),
            delays: unsigned(table, DELAYS)?.unwrap_or(0),
            expires_at_ms: moment_ms(table, EXPIRES_AT_MS)?,
            crashes: unsigned(table, CRASHES)?.unwrap_or(0),
            waits: unsigned(table, WAITS)?.unwrap_or(0),
            revision_waits: unsigned(table, REVISION_WAITS)?.unwrap_or(0),
            store_waits: unsigned(table, STORE_WAITS)?.unwrap_or(0),
            moved: boolean(table, MOVED)?,
            queue: table.inner().get(QUEUE).and_then(as_text).filter(|queue| !queue.is_empty()),
        })
    }

    /// Reads what a publisher may set on its own job: the batch hint. All other headers are for workers only.
    ///
    /// # Errors
    /// The hint is not a number above 0.
    pub fn read_of_publisher(table: &FieldTable) -> Result<Self, InvalidHeader> {
        let mut own = FieldTable::default();
        for name in [BATCH_HINT, BATCH_HINT_PREFIXED] {
            if let Some(hint) = table.inner().get(name) {
                own.insert(name.into(), hint.clone());
            }
        }
        Self::read(&own)
    }

    /// Whether a table has headers that only workers may write, which [`read_of_publisher`](Self::read_of_publisher) ignores.
    pub fn has_of_workers(table: &FieldTable) -> bool {
        OF_JOBS.iter().any(|name| *name != BATCH_HINT && table.inner().contains_key(*name))
    }

    /// Writes the headers into `table`; headers with other names stay.
    pub fn write(&self, table: &mut FieldTable) {
        if let Some(hint) = self.batch_hint {
            table.insert(BATCH_HINT.into(), AMQPValue::LongLongInt(hint.into()));
        }
        if let Some(hint) = self.batch_hint_max {
            table.insert(BATCH_HINT_MAX.into(), long(hint.into()));
        }
        table.insert(ATTEMPT.into(), AMQPValue::LongLongInt(self.attempt.into()));
        table.insert(ITEMS_DONE.into(), AMQPValue::LongLongInt(self.items_done.into()));
        table.insert(EXCLUSIVE.into(), AMQPValue::Boolean(self.exclusive));
        let newest = &self.history[self.history.len().saturating_sub(HISTORY_MAX)..];
        let entries =
            newest.iter().map(|attempt| AMQPValue::FieldTable(attempt.to_table())).collect::<Vec<_>>();
        table.insert(HISTORY.into(), AMQPValue::FieldArray(FieldArray::from(entries)));
        if self.delays > 0 {
            table.insert(DELAYS.into(), long(self.delays.into()));
        }
        if let Some(at) = self.expires_at_ms {
            table.insert(EXPIRES_AT_MS.into(), long(at));
        }
        if self.crashes > 0 {
            table.insert(CRASHES.into(), long(self.crashes.into()));
        }
        if self.waits > 0 {
            table.insert(WAITS.into(), long(self.waits.into()));
        }
        if self.revision_waits > 0 {
            table.insert(REVISION_WAITS.into(), long(self.revision_waits.into()));
        }
        if self.store_waits > 0 {
            table.insert(STORE_WAITS.into(), long(self.store_waits.into()));
        }
        if self.moved {
            table.insert(MOVED.into(), AMQPValue::Boolean(true));
        }
        if let Some(queue) = &self.queue {
            table.insert(QUEUE.into(), text(queue));
        }
    }
}

/// When a job expires, in Unix milliseconds, if an earlier attempt wrote it down.
pub fn expires_at_ms(table: &FieldTable) -> Option<u64> {
    moment_ms(table, EXPIRES_AT_MS).ok().flatten()
}

/// The past attempts, newest last. Empty if there are none, or the header cannot be read: it is only informational.
pub fn history(table: &FieldTable) -> Vec<Attempt> {
    let Some(AMQPValue::FieldArray(entries)) = table.inner().get(HISTORY) else {
        return Vec::new();
    };
    let entries = entries.as_slice();
    let newest = &entries[entries.len().saturating_sub(HISTORY_MAX)..];
    newest.iter().filter_map(|entry| entry.as_field_table().map(Attempt::from_table)).collect()
}

const POSITIVE: &str = "a whole number from 1 to 4294967295";

fn batch_hint(table: &FieldTable, name: &'static str) -> Result<Option<u32>, InvalidHeader> {
    match unsigned(table, name) {
        Ok(Some(0)) => Err(InvalidHeader { name, found: "0".to_owned(), expected: POSITIVE }),
        Err(invalid) => Err(InvalidHeader { expected: POSITIVE, ..invalid }),
        hint => hint,
    }
}
