//! The headers of jobs and of replies: their names, and what they hold.

mod job;
mod reply;
mod values;

use amq_protocol_types::{AMQPValue, FieldTable};

use crate::fields::{as_text, integer, shown};
use crate::limits::MODEL_REVISION_BYTES_MAX;
pub use job::{HISTORY_MAX, JobHeaders, OF_JOBS, PASSES_PER_GROWTH, expires_at_ms, history};
pub use reply::{ReplyHeaders, tokens};
pub use values::InvalidHeader;

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
/// The header is no text, or longer than any revision. It must not be ignored: the job would run with any revision.
pub fn demanded_revision(table: &FieldTable) -> Result<Option<String>, InvalidHeader> {
    let (name, expected) = (MODEL_REVISION, "a text of at most 2048 bytes");
    match table.inner().get(name) {
        None | Some(AMQPValue::Void) => Ok(None),
        Some(value) => match as_text(value) {
            Some(revision) if revision.len() <= MODEL_REVISION_BYTES_MAX => {
                Ok(Some(revision).filter(|revision| !revision.is_empty()))
            }
            Some(revision) => {
                let found = format!("a text of {} bytes", revision.len());
                Err(InvalidHeader { name, found, expected })
            }
            None => Err(InvalidHeader { name, found: shown(Some(value)), expected }),
        },
    }
}
