//! The jobs that this client has out, by id, and where their replies go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use vramq_schemas::{Failure, Output, ReplyHeaders};

use crate::assembly::Assembly;
use crate::error::{JobError, JobFailed};
use crate::pending::{Answer, Progress};

/// Invariant: a job stands here from before it is published until it is answered, has failed or is forgotten, and
/// its permit with it. So the number of entries never exceeds the permits.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    jobs: Mutex<HashMap<String, Waiting>>,
    registrations: AtomicU64,
    pub(crate) stray_replies: AtomicU64,
    pub(crate) duplicate_items: AtomicU64,
}

#[derive(Debug)]
struct Waiting {
    registration: u64,
    /// `None` for a job whose replies go elsewhere.
    awaited: Option<Awaited>,
    _permit: OwnedSemaphorePermit,
}

#[derive(Debug)]
struct Awaited {
    assembly: Assembly,
    /// Of the parts so far; `None` once one did not say.
    tokens: Option<u64>,
    progress: watch::Sender<Progress>,
    result: oneshot::Sender<Result<Answer, JobError>>,
}

/// The receiving ends of an awaited job.
#[derive(Debug)]
pub(crate) struct Receivers {
    pub(crate) progress: watch::Receiver<Progress>,
    pub(crate) result: oneshot::Receiver<Result<Answer, JobError>>,
}

/// What a reply says, decoded.
#[derive(Debug)]
pub(crate) enum Reply {
    Outputs { headers: ReplyHeaders, tokens: Option<u64>, outputs: Vec<Output> },
    Failed(Failure),
    Invalid(String),
}

/// Forgets its job on drop.
#[derive(Debug)]
pub(crate) struct Registration {
    registry: Arc<Registry>,
    id: String,
    number: u64,
}

impl Registration {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.registry.jobs().entry(std::mem::take(&mut self.id)) {
            // After an answer the id is free, and may stand for a younger job by now.
            if entry.get().registration == self.number {
                entry.remove();
            }
        }
    }
}

impl Registry {
    /// Notes a job whose reply is awaited, or whose id is only to be kept unique; `None` if the id is taken.
    pub(crate) fn register(
        self: &Arc<Self>,
        id: &str,
        items: usize,
        permit: OwnedSemaphorePermit,
        awaits: bool,
    ) -> Option<(Registration, Receivers)> {
        let (progress, progress_receiver) = watch::channel(Progress { items_done: 0, items });
        let (result, result_receiver) = oneshot::channel();
        let number = self.registrations.fetch_add(1, Ordering::Relaxed);
        match self.jobs().entry(id.to_owned()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(Waiting {
                registration: number,
                awaited: awaits.then(|| Awaited {
                    assembly: Assembly::new(items),
                    tokens: Some(0),
                    progress,
                    result,
                }),
                _permit: permit,
            }),
        };
        Some((
            Registration { registry: Arc::clone(self), id: id.to_owned(), number },
            Receivers { progress: progress_receiver, result: result_receiver },
        ))
    }

    /// Whether the job is still out.
    pub(crate) fn contains(&self, id: &str) -> bool {
        self.jobs().contains_key(id)
    }

    /// Takes a reply to the job `id` in; one to a job that is not out is counted and dropped.
    pub(crate) fn take(&self, id: &str, reply: Reply) {
        let mut jobs = self.jobs();
        let Entry::Occupied(mut entry) = jobs.entry(id.to_owned()) else {
            self.count_stray();
            return;
        };
        let Some(awaited) = &mut entry.get_mut().awaited else {
            self.count_stray();
            return;
        };
        let end = match reply {
            Reply::Outputs { headers, tokens, outputs } => match awaited.assembly.add(&headers, outputs) {
                Ok(added) => {
                    // A part that came before was counted then.
                    if added.duplicates == 0 {
                        awaited.tokens =
                            awaited.tokens.zip(tokens).map(|(sum, more)| sum.saturating_add(more));
                    }
                    self.duplicate_items.fetch_add(added.duplicates as u64, Ordering::Relaxed);
                    awaited.progress.send_replace(Progress {
                        items_done: awaited.assembly.done(),
                        items: awaited.assembly.items(),
                    });
                    added.complete.then_some(End::Complete(headers))
                }
                Err(problem) => Some(End::Invalid(problem)),
            },
            Reply::Failed(failure) => Some(End::Failed(failure)),
            Reply::Invalid(problem) => Some(End::Invalid(problem)),
        };
        if let Some(end) = end
            && let Some(awaited) = entry.remove().awaited
        {
            awaited.finish(end);
        }
    }

    /// Ends every job that is out.
    pub(crate) fn fail_all(&self, error: &JobError) {
        for waiting in std::mem::take(&mut *self.jobs()).into_values() {
            if let Some(awaited) = waiting.awaited {
                // Nobody listens to a job whose handle was dropped at this moment.
                let _ = awaited.result.send(Err(error.clone()));
            }
        }
    }

    pub(crate) fn count_stray(&self) {
        self.stray_replies.fetch_add(1, Ordering::Relaxed);
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        // Nothing panics while it holds the lock.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a job ends.
#[derive(Debug)]
enum End {
    Complete(ReplyHeaders),
    Failed(Failure),
    Invalid(String),
}

impl Awaited {
    fn finish(self, end: End) {
        let outputs = self.assembly.into_outputs();
        let result = match end {
            // Complete: no entry is `None`.
            End::Complete(headers) => Ok(Answer {
                outputs: outputs.into_iter().flatten().collect(),
                tokens: self.tokens,
                worker: headers.worker,
                queued_ms: headers.queued_ms,
                ran_ms: headers.ran_ms,
            }),
            End::Failed(Failure { reason, error }) => Err(JobFailed { reason, error, outputs }.into()),
            End::Invalid(problem) => Err(JobError::InvalidReply(problem)),
        };
        // Nobody listens to a job whose handle was dropped at this moment.
        let _ = self.result.send(result);
    }
}
