//! The headers of jobs, which change between attempts, and of replies.

use amq_protocol_types::{AMQPValue, FieldArray, FieldTable};

use crate::attempt::Attempt;
use crate::fields::{as_text, integer, long, shown, text};
use crate::reason::Reason;

pub const BATCH_HINT: &str = "batch-hint";

/// The batch hint under the name that it gets in 1.0 (ADR 19). If a job has both, the older name counts, because workers write that one.
pub const BATCH_HINT_PREFIXED: &str = "vramq-batch-hint";

pub const ATTEMPT: &str = "attempt";
pub const ITEMS_DONE: &str = "items-done";
pub const EXCLUSIVE: &str = "exclusive";
pub const HISTORY: &str = "history";
pub const BATCH_HINT_MAX: &str = "batch-hint-max";
pub const DELAYS: &str = "delays";
pub const EXPIRES_AT_MS: &str = "expires-at-ms";
pub const CRASHES: &str = "crashes";
pub const WAITS: &str = "vramq-waits";
pub const TRACEPARENT: &str = "traceparent";
pub const TRACESTATE: &str = "tracestate";

/// For whom a gateway publishes a job: one of several callers behind one user of the broker.
pub const TENANT: &str = "vramq-tenant";

/// `USER`: who published the job (its `user_id`). `CALLER`: whose share of the passes the job takes. Workers write both when they republish
/// a job, because the broker refuses another user's `user_id`.
pub const USER: &str = "vramq-user";
pub const CALLER: &str = "vramq-caller";

/// How often an operator has retried the job from the dead letters. Workers only pass it on. Version 0.2 called it `retries`, which is
/// ignored now, because Celery's messages have a header of that name (ADR 19).
pub const RETRIES: &str = "vramq-retries";

/// A number that identifies a publish. lapin attaches a returned message to the confirm that completes next, so the message
/// itself must show which publish it belongs to. It also makes every copy of a job different.
pub const PUBLISH_SEQ: &str = "publish-seq";

/// Headers that could not be read, as bytes. The patched reader (third-party/amq-protocol-types) adds it.
pub const UNREADABLE: &str = "unreadable-headers";

pub const OFFSET: &str = "offset";
pub const ITEMS: &str = "items";
pub const ITEMS_TOTAL: &str = "items-total";
pub const WORKER: &str = "worker";
pub const QUEUED_MS: &str = "queued";
pub const RAN_MS: &str = "ran";

/// The outcome of an attempt whose worker crashed or was cut off; another worker reports it.
pub const WORKER_LOST: &str = "worker-lost";

/// The outcome of an attempt whose device was lost, or hung.
pub const DEVICE_LOST: &str = "device-lost";

/// The outcome of an attempt during which a process of the model died; the worker went on.
pub const PROCESS_LOST: &str = "process-lost";

/// Of a `part` or `done`: how many tokens its items had, as the model counts them. Absent from models without tokens, and
/// from workers before 0.2.
pub const TOKENS: &str = "vramq-tokens";

/// Of a `part` or `done`: the model's revision. Of a job: the one that it demands.
pub const MODEL_REVISION: &str = "vramq-model-revision";

/// How often the job was taken by workers with another revision of the model than it demands.
pub const REVISION_WAITS: &str = "vramq-revision-waits";

/// How often the job waited unrun because a store did not give its inputs.
pub const STORE_WAITS: &str = "vramq-store-waits";

/// The queue that the job first came from, if that was not its model's own. Its passes take that queue's share, wherever workers requeue
/// the job.
pub const QUEUE: &str = "vramq-queue";

/// A rule of a model has moved the job to other workers; none moves it again.
pub const MOVED: &str = "vramq-moved";

/// Of a job: the id of the request that it came from, for logs.
pub const REQUEST_ID: &str = "vramq-request-id";

/// Past attempts kept in the `history` header, newest last: enough to halve a hint of 65,536 down to 1.
pub const HISTORY_MAX: usize = 16;

/// Each time that a job has run this many passes, it may try again a size that ran out of memory.
pub const PASSES_PER_GROWTH: u32 = 16;

const POSITIVE: &str = "a whole number from 1 to 4294967295";

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
}

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

/// A header that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("header `{name}` is {found}; it must be {expected}")]
pub struct InvalidHeader {
    pub name: &'static str,
    pub found: String,
    pub expected: &'static str,
}

impl JobHeaders {
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

/// How often a quorum queue delivered the message before; `None` for other queues, which do not count.
pub fn delivery_count(table: &FieldTable) -> Option<u32> {
    integer(table.inner().get("x-delivery-count")).map(|n| n.try_into().unwrap_or(u32::MAX))
}

/// Why not all headers could be read; `None` if they could. The readable ones are then not reliable either.
pub fn unreadable(table: &FieldTable) -> Option<String> {
    let first = match table.inner().get(UNREADABLE)? {
        // An entry starts with its name, which starts with its length.
        AMQPValue::ByteArray(bytes) => bytes.as_slice().split_first().map(|(length, rest)| {
            let name = &rest[..rest.len().min((*length).into())];
            String::from_utf8_lossy(name).chars().take(40).collect::<String>()
        }),
        _ => None,
    };
    let first = first.unwrap_or_default();
    Some(format!(
        "the headers cannot be read from {first:?} on: an unknown type, a wrong length, or more than 32 tables within \
         each other; they are kept as bytes in `{UNREADABLE}`"
    ))
}

/// The revision of the model that a job demands, if it demands one.
///
/// # Errors
/// The header is no text. It must not be ignored: the job would run with any revision.
pub fn demanded_revision(table: &FieldTable) -> Result<Option<String>, InvalidHeader> {
    let (name, expected) = (MODEL_REVISION, "text");
    match table.inner().get(name) {
        None | Some(AMQPValue::Void) => Ok(None),
        Some(value) => match as_text(value) {
            Some(revision) => Ok(Some(revision).filter(|revision| !revision.is_empty())),
            None => Err(InvalidHeader { name, found: shown(Some(value)), expected }),
        },
    }
}

/// When a job expires, in Unix milliseconds, if an earlier attempt wrote it down.
pub fn expires_at_ms(table: &FieldTable) -> Option<u64> {
    moment_ms(table, EXPIRES_AT_MS).ok().flatten()
}

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

fn batch_hint(table: &FieldTable, name: &'static str) -> Result<Option<u32>, InvalidHeader> {
    match unsigned(table, name) {
        Ok(Some(0)) => Err(InvalidHeader { name, found: "0".to_owned(), expected: POSITIVE }),
        Err(invalid) => Err(InvalidHeader { expected: POSITIVE, ..invalid }),
        hint => hint,
    }
}

fn unsigned(table: &FieldTable, name: &'static str) -> Result<Option<u32>, InvalidHeader> {
    number(table, name, "a whole number from 0 to 4294967295")
}

/// A time in Unix milliseconds.
fn moment_ms(table: &FieldTable, name: &'static str) -> Result<Option<u64>, InvalidHeader> {
    number(table, name, "a whole number of at least 0")
}

fn number<N: TryFrom<i64>>(
    table: &FieldTable,
    name: &'static str,
    expected: &'static str,
) -> Result<Option<N>, InvalidHeader> {
    let value = match table.inner().get(name) {
        None | Some(AMQPValue::Void) => return Ok(None),
        value => value,
    };
    let read = integer(value).and_then(|n| N::try_from(n).ok());
    read.map(Some).ok_or_else(|| InvalidHeader { name, found: shown(value), expected })
}

fn boolean(table: &FieldTable, name: &'static str) -> Result<bool, InvalidHeader> {
    match table.inner().get(name) {
        None | Some(AMQPValue::Void) => Ok(false),
        Some(AMQPValue::Boolean(b)) => Ok(*b),
        value => Err(InvalidHeader { name, found: shown(value), expected: "a boolean" }),
    }
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
