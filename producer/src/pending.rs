//! The handle of a published job: its publisher awaits the result with it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use vramq_schemas::{ItemProgress, Output};

use crate::client::Handle;
use crate::error::JobError;
use crate::registry::{Receivers, Registration};

/// A published job whose result is awaited. Dropping it forgets the job: it still runs, and its reply is dropped.
#[derive(Debug)]
#[must_use = "dropping it forgets the job"]
pub struct Pending {
    pub(crate) registration: Registration,
    pub(crate) receivers: Receivers,
    pub(crate) deadline: Option<Deadline>,
    /// Keeps the connection open while a caller waits.
    pub(crate) client: Arc<Handle>,
}

/// How far a job is.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    pub items_done: usize,
    pub items: usize,
    /// How far the item is that the model last reported on, while it has no output. Only if the job asked
    /// ([`SubmitOptions::progress`](crate::SubmitOptions::progress)) and the model reports.
    pub current: Option<ItemProgress>,
}

/// A job's result, with what the replies said of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// One for every input, in their order.
    pub outputs: Vec<Output>,
    /// The tokens of all items; `None` if the worker does not count them.
    pub tokens: Option<u64>,
    /// The revisions of the model that computed the outputs: one, or more if workers with other revisions continued the job, or
    /// none if workers do not report it.
    pub model_revisions: Vec<String>,
    /// Who sent the last reply, and the milliseconds that the job waited and ran there.
    pub worker: String,
    pub queued_ms: u64,
    pub ran_ms: u64,
}

/// When a job's time is up, and how much it was.
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

    /// Follows the job's parts, and reports on its items, as they come in. It stays at the last value when the job ends.
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
    /// Cancel safety: dropping the future drops the handle, which forgets the job.
    ///
    /// # Errors
    /// [`JobError`]; that of a failed job has the items that were answered before.
    pub async fn answer(self) -> Result<Answer, JobError> {
        let Self {
            registration: _registration,
            receivers: Receivers { progress, result },
            deadline,
            client: _client,
        } = self;
        // The sender is dropped unsent only by a registry that is gone.
        let answered = async { result.await.unwrap_or(Err(JobError::Closed)) };
        let Some(Deadline { at, after }) = deadline else {
            return answered.await;
        };
        timeout_at(at, answered).await.unwrap_or_else(|_| {
            let Progress { items_done, items, .. } = *progress.borrow();
            Err(JobError::Timeout { after, items_done, items })
        })
    }
}
