//! Jobs whose inputs are references. Requests the bytes from the stores, has the job read again, and decides what a failed fetch means.

use vramq_schemas::JobHeaders;

use crate::Core;
use crate::action::{Action, Route};
use crate::backoff;
use crate::disposition::JobOutcome;
use crate::event::FetchFault;
use crate::ids::JobKey;
use crate::jobs::{Job, Received};
use crate::observation::Cause;
use crate::rejection::Rejection;

/// How often a job waits for a store, or for room on a worker's disk, before it is dead-lettered. That takes nearly half an hour, enough
/// for a store to restart or a network to be repaired.
const STORE_WAITS_MAX: u32 = 64;

impl Core {
    /// A job refers to inputs that are not here: has them fetched.
    pub(crate) fn referring(&mut self, job: JobKey) {
        let Some(mut received) = self.take_unless_withdrawn(job) else { return };
        let now = self.now.at;
        if received.is_expired(now) {
            let outcome = JobOutcome::dead_letter(received.reached(), Rejection::expired());
            return self.settle(received.settle(outcome, now));
        }
        received.set_fetching(true);
        self.jobs.insert(Job::Received(Box::new(received)));
        if self.lifecycle.is_draining() || self.lifecycle.requeues_all() {
            // A store may take longer than the drain has.
            return self.requeue_fetching();
        }
        self.act(Action::Fetch { job });
    }

    /// The inputs of a job were fetched, and the job is read again; or the fetch failed.
    pub(crate) fn fetched(&mut self, job: JobKey, result: Result<(), FetchFault>) {
        // The job may have been withdrawn or requeued meanwhile.
        let Some(mut received) = self.jobs.take_received(job) else { return };
        let fault = match result {
            Ok(()) => {
                received.set_fetching(false);
                return self.read(received);
            }
            Err(fault) => fault,
        };
        let outcome = match fault.is_transient {
            true => self.wait_for_store(&received, fault.rejection),
            false => JobOutcome::dead_letter(received.reached(), fault.rejection),
        };
        self.settle(received.settle(outcome, self.now.at));
    }

    /// The outcome of a job whose store does not work: it waits at the broker, so that it takes no slot from others.
    fn wait_for_store(&mut self, received: &Received, rejection: Rejection) -> JobOutcome {
        let outcome =
            self.wait_for_room_or_store(received.reached(), Cause::StoreUnavailable, rejection.clone());
        if let JobOutcome::Requeue(requeue) = &outcome {
            let (job, trace_id) = (&received.delivery.id, &received.delivery.trace_id);
            let (why, waits) = (&rejection.error, requeue.headers.store_waits);
            tracing::info!(
                job,
                trace_id,
                why,
                waits,
                "a store of the job's inputs is unavailable: the job waits and is not run"
            );
        }
        outcome
    }

    /// The outcome of a job that lacks a store, or room on the worker's disk. It waits at the broker a limited number of times, and any
    /// worker may try it again. `rejection`: why it is dead-lettered after the last wait.
    pub(crate) fn wait_for_room_or_store(
        &mut self,
        mut headers: JobHeaders,
        cause: Cause,
        rejection: Rejection,
    ) -> JobOutcome {
        headers.store_waits = headers.store_waits.saturating_add(1);
        if headers.store_waits > STORE_WAITS_MAX {
            let error = format!("{}; the job waited for it {STORE_WAITS_MAX} times", rejection.error);
            return JobOutcome::dead_letter(headers, Rejection { error, ..rejection });
        }
        let wait = backoff::for_memory(headers.store_waits, &mut self.random);
        JobOutcome::requeue(headers, Route::Later(wait), cause)
    }

    /// Requeues the jobs whose inputs are being fetched, because a fetch may take longer than there is time. Like other unfinished jobs
    /// they wait until our own consumers cannot receive them again.
    pub(crate) fn requeue_fetching(&mut self) {
        for job in self.jobs.fetching_where(|received| self.may_requeue_unfinished(received.delivery.model)) {
            let Some(received) = self.jobs.take_received(job) else { continue };
            let outcome = JobOutcome::unfinished(received.reached(), Cause::Unfinished);
            self.settle(received.settle(outcome, self.now.at));
        }
    }
}

#[cfg(test)]
#[path = "references_tests.rs"]
mod tests;
