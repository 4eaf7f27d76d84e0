//! Error types, with the data that a caller needs to decide what to do.

use std::time::Duration;

use vramq_amqp::{InvalidAddress, InvalidCredentials};
use vramq_schemas::topology::{InvalidModelName, JOBS_EXCHANGE};
use vramq_schemas::{EncodeError, Output, Reason};

/// Why there is no connection to the broker. Never holds the URL's credentials.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("the broker URL {0}")]
    Url(InvalidAddress),
    #[error("the broker's {0}")]
    Credentials(InvalidCredentials),
    #[error("cannot reach the broker at {broker}: {error}")]
    Unreachable { broker: String, error: String },
    /// The broker answered with a refusal: wrong credentials, no such vhost, no permission for the reply queue, no channel left of those that the user may have.
    #[error("the broker at {broker} refuses: {error}")]
    Refused { broker: String, error: String },
    #[error("the broker at {broker} did not answer within {after:?}")]
    Timeout { broker: String, after: Duration },
}

impl ConnectError {
    /// Whether the same call can succeed later without a change of settings.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Timeout { .. })
    }
}

/// Why a job is not in its queue, or why that is unknown.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PublishError {
    #[error(transparent)]
    Model(#[from] InvalidModelName),
    #[error("option `{name}`: {problem}")]
    Option { name: &'static str, problem: String },
    #[error("a job without inputs has no result")]
    NoInputs,
    #[error("the job takes {bytes} bytes, at most {cap} are allowed; send large inputs by reference")]
    TooLarge { bytes: usize, cap: usize },
    #[error("the job has {items} inputs, at most {cap} are allowed")]
    TooManyItems { items: usize, cap: usize },
    #[error(transparent)]
    Encode(#[from] EncodeError),
    #[error("job id `{id}` is already in flight")]
    DuplicateId { id: String },
    /// The broker returned the job: nothing is bound for its routing key, `key`, which is the model's name unless
    /// [`SubmitOptions::key`](crate::SubmitOptions::key) says otherwise.
    #[error(
        "no queue for {}: is a worker for it configured? If its workers set a `key`, name it (the broker says: {broker_says})",
        with_key(.model, .key)
    )]
    Unroutable { model: String, key: String, broker_says: String },
    /// The length bound of the queue for the routing key `key` rejects new jobs.
    #[error("the queue of {} is full; try again later", with_key(.model, .key))]
    QueueFull { model: String, key: String },
    /// The broker closed the channel over this job: no permission, larger than it allows, …
    #[error("the broker refuses jobs for exchange `{JOBS_EXCHANGE}`: {code} {text}")]
    Refused { code: u16, text: String },
    /// The job may be in the queue. A job that [`submit`](crate::Client::submit) sent is withdrawn.
    #[error("the broker did not confirm the job within {after:?}; it may be in the queue all the same")]
    Timeout { after: Duration },
    /// The connection was lost for longer than [`Options::reconnect_for`](crate::Options::reconnect_for), or the broker refused to let the
    /// client back. With why the last attempt failed: if that [is retryable](ConnectError::is_retryable), a new client may succeed. This one
    /// has ended, and answers every call with this error at once.
    #[error("the connection to the broker is lost: {0}")]
    Disconnected(ConnectError),
    #[error("the client was connected without a reply queue; use `publish`")]
    NoReplyQueue,
    #[error("the client is closed")]
    Closed,
}

/// A model in a message, with its routing key if that is another one.
fn with_key(model: &str, key: &str) -> String {
    if key == model { format!("model `{model}`") } else { format!("model `{model}` with key `{key}`") }
}

impl PublishError {
    /// Whether the same job can succeed later without a change by its publisher; after [`Disconnected`](Self::Disconnected) with a new
    /// client only.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::QueueFull { .. } | Self::Unroutable { .. } | Self::Timeout { .. } => true,
            Self::Disconnected(error) => error.is_retryable(),
            Self::Model(_)
            | Self::Option { .. }
            | Self::NoInputs
            | Self::TooLarge { .. }
            | Self::TooManyItems { .. }
            | Self::Encode(_)
            | Self::DuplicateId { .. }
            | Self::Refused { .. }
            | Self::NoReplyQueue
            | Self::Closed => false,
        }
    }
}

/// Why a published job has no complete result.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JobError {
    /// A worker gave up on it; its dead letter has the details.
    #[error(transparent)]
    Failed(#[from] JobFailed),
    /// The time is over. The client withdraws the job.
    #[error("no complete reply within {after:?}: {items_done} of {items} items are answered")]
    Timeout { after: Duration, items_done: usize, items: usize },
    /// A message in the reply queue names this job but violates the contract.
    #[error("invalid reply: {0}")]
    InvalidReply(String),
    /// The connection was lost for longer than [`Options::reconnect_for`](crate::Options::reconnect_for), or the broker refused to let the
    /// client back. With why the last attempt failed: if that [is retryable](ConnectError::is_retryable), a new client may succeed. This one
    /// has ended, and answers every call with this error at once.
    #[error("the connection to the broker is lost: {0}")]
    Disconnected(ConnectError),
    /// The reply queue was deleted or has expired, and its replies with it. A worker may have run the job. The client withdraws the job, so
    /// that submitting it again mostly does not run it twice.
    #[error("the reply queue was lost, and with it any reply to this job; the job itself may have run")]
    ReplyQueueLost,
    #[error("the client was closed before the job was answered")]
    Closed,
}

/// A `failed` reply, and the items that were answered before it.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{reason}: {error}")]
pub struct JobFailed {
    pub reason: Reason,
    pub error: String,
    /// One entry for every input; `None` where there is no result.
    pub outputs: Vec<Option<Output>>,
}
