//! Names of exchanges and queues. Only names: the worker declares them.

use crate::limits::MODEL_NAME_BYTES_MAX;

/// Direct exchange that jobs are published to. The routing key is the model's name, or the `key` that its workers set.
pub const JOBS_EXCHANGE: &str = "vramq.jobs";

/// Direct exchange that dead letters go to; the routing key is the model's name.
pub const DEAD_EXCHANGE: &str = "vramq.dead";

/// The queue of a model's jobs.
pub fn jobs_queue(model: &str) -> String {
    format!("vramq.jobs.{model}")
}

/// The queue of a model's dead letters.
pub fn dead_queue(model: &str) -> String {
    format!("vramq.dead.{model}")
}

/// Direct exchange for jobs that workers publish for workers. Workers trust headers about earlier attempts only in deliveries from it. Its
/// routing keys are a model's key, for another attempt, and those of [`bulk_key`], [`quarantine_key`] and [`delay_key`].
pub const RETRY_EXCHANGE: &str = "vramq.retry";

/// The queue of a model's large jobs. Workers move them there unrun, so that other jobs do not wait behind them.
pub fn bulk_queue(model: &str) -> String {
    format!("vramq.bulk.{model}")
}

/// Routing key of [`RETRY_EXCHANGE`] for the large jobs of a model. No model's name has a tilde.
pub fn bulk_key(model: &str) -> String {
    format!("~bulk.{model}")
}

/// Routing key of [`RETRY_EXCHANGE`] for the quarantine of a model.
pub fn quarantine_key(model: &str) -> String {
    format!("~suspects.{model}")
}

/// The queue of a model's jobs under quarantine: two workers were lost while they held them. Workers take them one at a time and
/// run them in isolation.
pub fn suspects_queue(model: &str) -> String {
    format!("vramq.suspects.{model}")
}

/// The waits of the delay queues, in milliseconds. A few fixed ones: a queue's messages expire in order only if they all
/// have the same time to live.
pub const DELAYS_MS: [u64; 3] = [1_000, 5_000, 30_000];

/// The queue in which a model's jobs wait for `ms` milliseconds. Then the broker publishes them to [`RETRY_EXCHANGE`].
pub fn delay_queue(model: &str, ms: u64) -> String {
    format!("vramq.delay.{model}.{ms}")
}

/// Routing key of [`RETRY_EXCHANGE`] for that queue.
pub fn delay_key(model: &str, ms: u64) -> String {
    format!("~delay.{ms}.{model}")
}

/// Fanout exchange of heartbeats; see [`status`](crate::status). Bind a queue of your own to receive them.
pub const STATUS_EXCHANGE: &str = "vramq.status";

/// Direct exchange for commands to workers; see [`control`](crate::control).
pub const CONTROL_EXCHANGE: &str = "vramq.control";

/// Fanout exchange on which callers withdraw jobs; see [`withdrawal`](crate::withdrawal). Durable; workers and callers
/// declare it.
pub const WITHDRAWALS_EXCHANGE: &str = "vramq.withdrawals";

/// Routing key of commands to all workers.
pub const CONTROL_ALL: &str = "all";

/// Routing key of commands to one worker, and to all that have the same name.
pub fn control_key(worker: &str) -> String {
    format!("worker.{worker}")
}

/// The queue for replies to jobs without `reply_to`.
pub fn default_reply_queue(model: &str) -> String {
    format!("vramq.replies.{model}")
}

/// What the names of the reply queues begin with that clients declare for themselves.
pub const CLIENT_REPLIES: &str = "vramq.replies.client.";

/// Why a text cannot name a model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` cannot name a model: 1 to {MODEL_NAME_BYTES_MAX} characters of a-z, A-Z, 0-9, `-`, `_`, `.`, `/` and `:` are allowed"
)]
pub struct InvalidModelName(String);

/// Checks a model's name: it becomes part of queue names, routing keys and metric labels.
///
/// # Errors
/// [`InvalidModelName`] on an empty, long or oddly spelt name.
pub fn check_model_name(name: &str) -> Result<(), InvalidModelName> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_./:".contains(&b);
    if (1..=MODEL_NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(allowed) {
        return Ok(());
    }
    Err(InvalidModelName(name.chars().take(MODEL_NAME_BYTES_MAX).collect()))
}
