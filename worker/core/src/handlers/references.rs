//! Jobs whose inputs are references. Requests the bytes from the stores, has the job read again, and decides what a failed fetch means.

use vramq_schemas::{JobHeaders, Reason};

use crate::Core;
use crate::action::{Action, Route};
use crate::backoff;
use crate::disposition::JobOutcome;
use crate::event::{Delivery, FetchFault};
use crate::ids::{JobKey, StoreIndex};
use crate::jobs::{Fetch, Job, Received};
use crate::observation::Cause;
use crate::rejection::Rejection;

/// How often a job waits for a store, or for room on a worker's disk, before it is dead-lettered. That takes nearly half an hour, enough
/// for a store to restart or a network to be repaired.
const STORE_WAITS_MAX: u32 = 64;

impl Core {
    /// A job refers to inputs in these stores: has them fetched, unless the stores did not answer this caller's jobs lately.
    pub(crate) fn referring(&mut self, job: JobKey, stores: Vec<StoreIndex>) {
        let Some(mut received) = self.take_unless_withdrawn(job) else { return };
        let now = self.now.at;
        if received.is_expired(now) {
            let outcome = JobOutcome::dead_letter(received.reached(), Rejection::expired());
            return self.settle(received.settle(outcome, now));
        }
        if self.must_wait_for_stores(&received, &stores) {
            let error = "a store of the job's inputs did not answer other jobs of this caller";
            let rejection = Rejection::new(Reason::StoreUnavailable, error);
            let outcome = self.wait_for_room_or_store(received.reached(), Cause::StoreUnavailable, rejection);
            let Delivery { id: job, trace_id, .. } = &received.delivery;
            tracing::debug!(
                job,
                trace_id,
                "a store of the job's inputs does not answer: the job waits and is not run"
            );
            return self.settle(received.settle(outcome, now));
        }
        received.fetch_begins(stores, now);
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
        let Some(fetch) = received.fetch_ended() else {
            return self.jobs.insert(Job::Received(Box::new(received)));
        };
        let fault = match result {
            Ok(()) => {
                self.silent_stores.answered(&fetch.stores, received.delivery.caller.as_deref());
                return self.read(received);
            }
            Err(fault) => fault,
        };
        if fault.is_transient {
            self.stores_failed(&received, &fetch, &fault.rejection);
        }
        let outcome = match fault.is_transient {
            true => self.wait_for_store(&received, fault.rejection),
            false => JobOutcome::dead_letter(received.reached(), fault.rejection),
        };
        self.settle(received.settle(outcome, self.now.at));
    }

    /// Whether a store of the job is silent for its caller and must not be tried now, or another job of the caller tries it.
    fn must_wait_for_stores(&self, received: &Received, stores: &[StoreIndex]) -> bool {
        let caller = &received.delivery.caller;
        stores.iter().any(|store| {
            let is_other =
                |other: &Received| other.delivery.caller == *caller && other.is_fetching_from(*store);
            let tries = self.silent_stores.tries(*store, caller.as_deref(), self.now.at);
            tries.is_some_and(|tries| self.jobs.fetching_where(is_other).len() >= tries)
        })
    }

    /// Remembers stores that did not answer a job in time.
    fn stores_failed(&mut self, received: &Received, fetch: &Fetch, why: &Rejection) {
        let Delivery { caller, id: job, trace_id, .. } = &received.delivery;
        let took = self.now.at.saturating_duration_since(fetch.since);
        if self.silent_stores.failed(&fetch.stores, caller.as_deref(), took, self.now.at) {
            let (why, seconds) = (&why.error, took.as_secs());
            tracing::warn!(
                job,
                trace_id,
                caller,
                why,
                seconds,
                "a store did not answer: further jobs of this caller that refer to it wait, and one at a time tries it"
            );
        }
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
