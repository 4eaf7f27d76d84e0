//! The client's jobs in flight, by id, and where their replies go.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lapin::Acker;
use tokio::sync::{OwnedSemaphorePermit, oneshot, watch};
use tokio::time::Instant;
use vramq_amqp::Withdrawals;
use vramq_schemas::withdrawal::Withdrawal;
use vramq_schemas::{Failure, ItemProgress, Output, Reason, ReplyHeaders};

use crate::answer::{Answer, Progress};
use crate::assembly::{Added, Assembly};
use crate::error::{JobError, JobFailed};
use crate::held::HeldReplies;
use crate::token_sum::TokenSum;

/// Invariant: a job is in here, with its permit, from before it is published until it is answered, has failed, or its caller
/// drops it. So there are never more entries than permits, and no permit outlives its job.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    jobs: Mutex<HashMap<String, JobInFlight>>,
    registrations: AtomicU64,
    pub(crate) stray_replies: AtomicU64,
    pub(crate) duplicate_items: AtomicU64,
    /// Jobs whose withdrawal the broker has taken.
    pub(crate) withdrawn: AtomicU64,
    pub(crate) withdrawals: Withdrawals,
    /// The replies of clients that hold them.
    pub(crate) held: HeldReplies<Acker>,
}

#[derive(Debug)]
struct JobInFlight {
    registration: u64,
    at_broker: AtBroker,
    /// The withdrawal of the job. `None` if the client must not withdraw it: because its replies go to another queue, because its caller
    /// withdraws it or has called `forget`, or because it is withdrawn already.
    withdrawal: Option<Withdrawal>,
    is_withdrawn: bool,
    /// `None` for a job whose replies go elsewhere.
    awaited: Option<Awaited>,
    _permit: OwnedSemaphorePermit,
}

/// Whether the broker has a job, as far as the client knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtBroker {
    No,
    /// It was sent at least once, so replies may exist. It is sent again after the loss of a session.
    Perhaps,
    /// It is confirmed.
    Yes,
}

#[derive(Debug)]
struct Awaited {
    assembly: Assembly,
    tokens: TokenSum,
    /// The revisions in the parts so far, each once.
    revisions: Vec<String>,
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
    Outputs {
        headers: ReplyHeaders,
        tokens: Option<u64>,
        revision: Option<String>,
        outputs: Vec<Output>,
    },
    Failed(Failure),
    /// How far an item is; `None` if that cannot be read, which is no reason to give the job up.
    Progress(Option<ItemProgress>),
    Invalid(String),
}

/// On drop: removes its job from the registry, withdraws the job if it is unanswered, and releases its held replies.
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

    /// Tells the job from a younger one with the same id.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The job is not withdrawn when this is dropped.
    pub(crate) fn forget(&self) {
        if let Some(job) = self.registry.jobs().get_mut(&self.id)
            && job.registration == self.number
        {
            job.withdrawal = None;
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Entry::Occupied(entry) = self.registry.jobs().entry(self.id.clone()) {
            // After its answer a job's id is free, and may be that of a younger job by now.
            if entry.get().registration == self.number {
                entry.remove().withdraw(&self.registry.withdrawals);
            }
        }
        // Only after the removal, from when on no reply is held for the job.
        self.registry.held.release(&self.id, self.number);
    }
}

impl Registry {
    /// Adds a job. Without `awaits`, only to keep its id unique. `withdrawal` takes it back. `None` if the id is in use.
    pub(crate) fn register(
        self: &Arc<Self>,
        id: &str,
        items: usize,
        permit: OwnedSemaphorePermit,
        awaits: bool,
        withdrawal: Option<Withdrawal>,
    ) -> Option<(Registration, Receivers)> {
        let (progress, progress_receiver) = watch::channel(Progress { items_done: 0, items, current: None });
        let (result, result_receiver) = oneshot::channel();
        let number = self.registrations.fetch_add(1, Ordering::Relaxed);
        match self.jobs().entry(id.to_owned()) {
            Entry::Occupied(_) => return None,
            Entry::Vacant(place) => place.insert(JobInFlight {
                registration: number,
                at_broker: AtBroker::No,
                withdrawal,
                is_withdrawn: false,
                awaited: awaits.then(|| Awaited {
                    assembly: Assembly::new(items),
                    tokens: TokenSum::default(),
                    revisions: Vec::new(),
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

    /// Notes that the job of a registration is given to the broker; false if it is not in flight any more. The id is not enough: the caller
    /// may have given up on the job, and submitted another one under the same id.
    pub(crate) fn mark_sent(&self, id: &str, registration: u64) -> bool {
        self.mark(id, registration, AtBroker::Perhaps)
    }

    /// Notes that the broker has the job of a registration, which is not published again from then on.
    pub(crate) fn mark_confirmed(&self, id: &str, registration: u64) {
        self.mark(id, registration, AtBroker::Yes);
    }

    fn mark(&self, id: &str, registration: u64, at_broker: AtBroker) -> bool {
        let mut jobs = self.jobs();
        let job = jobs.get_mut(id).filter(|job| job.registration == registration);
        job.map(|job| job.at_broker = at_broker).is_some()
    }

    /// Whether a job with this id is in flight.
    pub(crate) fn contains(&self, id: &str) -> bool {
        self.jobs().contains_key(id)
    }

    /// Handles a reply to the job `id`. With an acker, holds the reply for the job; returns the acker if the reply is not to be held.
    /// Counts and drops a reply to a job that is not in flight.
    pub(crate) fn on_reply(&self, id: &str, reply: Reply, acker: Option<Acker>) -> Option<Acker> {
        let mut jobs = self.jobs();
        let Entry::Occupied(mut entry) = jobs.entry(id.to_owned()) else {
            self.count_stray();
            return acker;
        };
        let (registration, is_withdrawn) = (entry.get().registration, entry.get().is_withdrawn);
        let is_withdrawal = matches!(&reply, Reply::Failed(failure) if failure.reason == Reason::Withdrawn);
        if is_withdrawal && entry.get().withdrawal.is_some() {
            // This job is not withdrawn, so the reply ends an earlier one with the same id, which its caller gave up on.
            self.withdrawals.ended(id);
            self.count_stray();
            return acker;
        }
        let Some(awaited) = &mut entry.get_mut().awaited else {
            self.count_stray();
            return acker;
        };
        let holds = acker.is_some();
        // A progress report is worthless to a client that adopts the queue later.
        let unheld = match acker {
            Some(acker) if !matches!(reply, Reply::Progress(_)) => {
                self.held.hold(registration, acker, Instant::now());
                None
            }
            acker => acker,
        };
        let end = match reply {
            Reply::Outputs { headers, tokens, revision, outputs } => {
                match awaited.assembly.add(&headers, outputs) {
                    Ok(added) => {
                        self.duplicate_items.fetch_add(added.duplicates as u64, Ordering::Relaxed);
                        awaited.note_part(&headers, added, tokens, revision);
                        added.complete.then_some(End::Complete(headers))
                    }
                    Err(problem) => Some(End::Invalid(problem)),
                }
            }
            Reply::Progress(report) => {
                match report.filter(|report| awaited.assembly.expects(report)) {
                    Some(report) => awaited.progress.send_modify(|progress| progress.current = Some(report)),
                    None => self.count_stray(),
                }
                None
            }
            // Jobs that are still awaited are withdrawn only by a client that closes.
            Reply::Failed(_) if is_withdrawal && is_withdrawn => Some(End::Withdrawn),
            Reply::Failed(failure) => Some(End::Failed(failure)),
            Reply::Invalid(problem) => Some(End::Invalid(problem)),
        };
        if let Some(end) = end
            && let Some(awaited) = entry.remove().awaited
        {
            self.withdrawals.ended(id);
            if holds {
                self.held.answered(id, registration);
            }
            awaited.finish(end);
        }
        unheld
    }

    /// Whether no job is in flight, and none waits for its replies to be let go.
    pub(crate) fn is_done(&self) -> bool {
        self.jobs().is_empty() && self.held.is_empty()
    }

    /// Withdraws every job in flight that may be published. Their replies are still taken.
    pub(crate) fn withdraw_all(&self) {
        self.jobs().values_mut().for_each(|job| job.withdraw(&self.withdrawals));
    }

    /// Fails every job in flight.
    pub(crate) fn fail_all(&self, error: &JobError) {
        for job in std::mem::take(&mut *self.jobs()).into_values() {
            job.fail(error);
        }
    }

    /// Fails and withdraws the awaited jobs that the broker has confirmed; how many there were. The others are published again.
    pub(crate) fn fail_confirmed(&self, error: &JobError) -> usize {
        let is_lost = |job: &JobInFlight| job.at_broker == AtBroker::Yes && job.awaited.is_some();
        let failed = self.jobs().extract_if(|_, job| is_lost(job)).collect::<Vec<_>>();
        let count = failed.len();
        for (_, mut job) in failed {
            job.withdraw(&self.withdrawals);
            job.fail(error);
        }
        count
    }

    pub(crate) fn count_stray(&self) {
        self.stray_replies.fetch_add(1, Ordering::Relaxed);
    }

    fn jobs(&self) -> MutexGuard<'_, HashMap<String, JobInFlight>> {
        // Nothing panics while it holds the lock.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl JobInFlight {
    /// Withdraws the job, unless the broker cannot have it.
    fn withdraw(&mut self, withdrawals: &Withdrawals) {
        if self.at_broker != AtBroker::No
            && let Some(withdrawal) = self.withdrawal.take()
        {
            withdrawals.withdraw(withdrawal);
            self.is_withdrawn = true;
        }
    }

    fn fail(self, error: &JobError) {
        if let Some(awaited) = self.awaited {
            // An `Err`: the caller has dropped its handle.
            let _ = awaited.result.send(Err(error.clone()));
        }
    }
}

/// How a job ends.
#[derive(Debug)]
enum End {
    Complete(ReplyHeaders),
    Failed(Failure),
    Withdrawn,
    Invalid(String),
}

impl Awaited {
    /// Notes what a part says besides its outputs, which are added already.
    fn note_part(
        &mut self,
        headers: &ReplyHeaders,
        added: Added,
        tokens: Option<u64>,
        revision: Option<String>,
    ) {
        if let Some(tokens) = tokens {
            // The assembly has checked that the job has these items.
            self.tokens.add(headers.offset, headers.offset + headers.items, tokens);
        }
        // Of an item that comes twice the first answer counts.
        let is_new = added.duplicates < headers.items as usize;
        if let Some(revision) = revision.filter(|revision| is_new && !self.revisions.contains(revision)) {
            self.revisions.push(revision);
        }
        let assembly = &self.assembly;
        self.progress.send_modify(|progress| {
            progress.items_done = assembly.done();
            progress.current.take_if(|current| assembly.has(current.item));
        });
    }

    fn finish(mut self, end: End) {
        let outputs = self.assembly.into_outputs();
        let result = match end {
            // Complete: no entry is `None`.
            End::Complete(headers) => Ok(Answer {
                outputs: outputs.into_iter().flatten().collect(),
                tokens: self.tokens.of_first(headers.items_total),
                model_revisions: self.revisions,
                worker: headers.worker,
                queued_ms: headers.queued_ms,
                ran_ms: headers.ran_ms,
            }),
            End::Failed(Failure { reason, error }) => Err(JobFailed { reason, error, outputs }.into()),
            End::Withdrawn => Err(JobError::Closed),
            End::Invalid(problem) => Err(JobError::InvalidReply(problem)),
        };
        // An `Err`: the caller has dropped its handle.
        let _ = self.result.send(result);
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    /// Without a connection a job waits to be published. Its caller gives up meanwhile, and submits it again under the same id.
    #[test]
    fn a_job_that_was_given_up_is_not_taken_for_the_next_one_with_its_id() {
        let registry = Arc::new(Registry::default());
        let permits = Arc::new(Semaphore::new(2));
        let register = || {
            let permit = Arc::clone(&permits).try_acquire_owned().unwrap();
            registry.register("id", 1, permit, true, None)
        };
        let (first, _receivers) = register().unwrap();
        assert!(register().is_none());
        let given_up = first.number();
        drop(first);
        let (second, _receivers) = register().unwrap();
        assert!(!registry.mark_sent("id", given_up));
        assert!(registry.mark_sent("id", second.number()));
        registry.mark_confirmed("id", given_up);
        // So a reply queue that is lost now does not fail the second one, which is published again.
        assert_eq!(registry.fail_confirmed(&JobError::ReplyQueueLost), 0);
        registry.mark_confirmed("id", second.number());
        assert_eq!(registry.fail_confirmed(&JobError::ReplyQueueLost), 1);
        assert!(!registry.mark_sent("id", second.number()));
    }
}
