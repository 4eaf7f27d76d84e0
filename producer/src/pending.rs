//! The handle of a published job: its publisher awaits the result with it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use vramq_schemas::Output;

use crate::answer::{Answer, Progress};
use crate::error::JobError;
use crate::registry::{Receivers, Registration};

/// A published job whose result is awaited. Dropping it before the job has ended withdraws the job: workers start no further pass for it,
/// and it leaves no dead letter. Dropping never waits; the client publishes the withdrawal, and repeats it until the job has ended.
#[derive(Debug)]
#[must_use = "dropping it withdraws the job"]
pub struct Pending {
    pub(crate) registration: Registration,
    pub(crate) receivers: Receivers,
    pub(crate) deadline: Option<Deadline>,
    /// The client's handle. It keeps the connection open while a caller waits.
    pub(crate) client: Arc<dyn fmt::Debug + Send + Sync>,
}

/// A job's deadline, and the timeout that it came from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    pub(crate) at: Instant,
    pub(crate) after: Duration,
}

impl Pending {
    /// The job id.
    pub fn id(&self) -> &str {
        self.registration.id()
    }

    /// Stops waiting for the job without withdrawing it. Its reply is dropped, or becomes a dead letter if the client is closed first. To
    /// publish a job that nobody waits for at all, use [`Client::publish`](crate::Client::publish).
    pub fn forget(self) {
        self.registration.forget();
    }

    /// Receives the job's progress: parts as they come, and reports on its items. Keeps the last value when the job ends.
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.receivers.progress.clone()
    }

    /// The outputs, one for every input and in their order.
    ///
    /// Cancel safety: as for [`Pending::answer`].
    ///
    /// # Errors
    /// As for [`Pending::answer`].
    pub async fn outputs(self) -> Result<Vec<Output>, JobError> {
        Ok(self.answer().await?.outputs)
    }

    /// The outputs, with what the replies said of the job.
    ///
    /// Cancel safety: dropping the future drops the handle, which withdraws the job.
    ///
    /// # Errors
    /// [`JobError`]. The error of a failed job has the items that were answered before. A job that times out is withdrawn.
    pub async fn answer(self) -> Result<Answer, JobError> {
        self.answer_with_receipt().await.0
    }

    /// Like [`Pending::answer`], with a receipt for the job's replies. A client that [holds replies](crate::Options::hold_replies)
    /// acknowledges them when the receipt is dropped, so store the answer before that. A job that timed out is withdrawn when the receipt
    /// is dropped.
    ///
    /// Cancel safety: as for [`Pending::answer`].
    pub async fn answer_with_receipt(self) -> (Result<Answer, JobError>, Receipt) {
        let Self { registration, receivers: Receivers { progress, result }, deadline, client } = self;
        let receipt = Receipt { _registration: registration, _client: client };
        // The sender is dropped unsent only by a registry that is gone.
        let answered = async { result.await.unwrap_or(Err(JobError::Closed)) };
        let Some(Deadline { at, after }) = deadline else {
            return (answered.await, receipt);
        };
        let answer = timeout_at(at, answered).await.unwrap_or_else(|_| {
            let Progress { items_done, items, .. } = *progress.borrow();
            Err(JobError::Timeout { after, items_done, items })
        });
        (answer, receipt)
    }
}

/// The right to the replies of a job that has ended.
#[derive(Debug)]
#[must_use = "dropping it lets the job's replies go"]
pub struct Receipt {
    _registration: Registration,
    /// Keeps the connection open on which the replies are acknowledged.
    _client: Arc<dyn fmt::Debug + Send + Sync>,
}
