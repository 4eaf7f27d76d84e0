//! Jobs whose inputs are references. Requests the bytes from the stores, has the job read again, and decides what a failed fetch means.

use std::time::Duration;

use vramq_schemas::{JobHeaders, Reason};

use crate::Core;
use crate::action::{Action, Route};
use crate::backoff;
use crate::disposition::JobOutcome;
use crate::event::{Delivery, FetchFault};
use crate::ids::{JobKey, StoreIndex};
use crate::jobs::{Job, Received};
use crate::observation::Cause;
use crate::rejection::Rejection;
use crate::silent_stores::SilentStores;

/// How often a job waits for a store, for room on a worker's disk or, in quarantine, for room on its device, before it is dead-lettered.
/// That takes nearly half an hour at least, enough for a store to restart or a network to be repaired.
const STORE_WAITS_MAX: u32 = 64;

/// A fetch that goes on for so long after its end is ended here. It got a later end if the limit for holding a job has become shorter.
const OVERDUE_AFTER: Duration = Duration::from_secs(2);

impl Core {
    /// A job refers to inputs in these stores: has them fetched, unless the stores did not answer this caller's jobs lately.
    pub(crate) fn referring(&mut self, job: JobKey, stores: Vec<StoreIndex>) {
        let Some(mut received) = self.take_unless_given_up(job) else { return };
        let now = self.now.at;
        if received.is_expired(now) {
            let outcome = JobOutcome::dead_letter(received.reached(), received.expired());
            return self.settle(received.settle(outcome, now));
        }
        if self.must_wait_for_stores(&received, &stores) {
            return self.wait_unfetched(received);
        }
        received.fetch_begins(stores, now);
        // Held for longer, the job would cost the session when the broker's `consumer_timeout` is over, and other callers' jobs would be
        // redelivered, too.
        let until = received.at + self.time_limits.job();
        self.jobs.insert(Job::Received(Box::new(received)));
        if self.lifecycle.is_draining() || self.lifecycle.requeues_all() {
            // A store may take longer than the drain has.
            return self.requeue_fetching();
        }
        self.act(Action::Fetch { job, until });
    }

    /// The inputs of a job were fetched, and the job is read again; or the fetch failed.
    pub(crate) fn fetched(&mut self, job: JobKey, result: Result<(), FetchFault>) {
        // The job may have been withdrawn or requeued meanwhile.
        let Some(mut received) = self.jobs.take_received(job) else { return };
        received.fetch_ended(self.now.at);
        let fault = match result {
            Ok(()) => return self.read(received),
            Err(fault) => fault,
        };
        for store in &fault.stores {
            self.store_failed(&received, *store, &fault);
        }
        let outcome = match fault.is_transient {
            true => self.wait_for_store(&received, fault.rejection),
            false => JobOutcome::dead_letter(received.reached(), fault.rejection),
        };
        self.settle(received.settle(outcome, self.now.at));
    }

    /// Whether a store of the job is silent for its caller, and as many jobs of the caller as may fetch from it.
    fn must_wait_for_stores(&self, received: &Received, stores: &[StoreIndex]) -> bool {
        let Delivery { caller, model, .. } = &received.delivery;
        let slots = self.memory.slots(model.0);
        stores.iter().any(|store| {
            let most = self.silent_stores.fetches_max(*store, caller.as_deref(), slots, self.now.at);
            most.is_some_and(|most| self.fetching_for(caller.as_deref(), *store).len() >= most)
        })
    }

    /// The jobs of a caller that fetch from a store, in the order of their delivery.
    fn fetching_for(&self, caller: Option<&str>, store: StoreIndex) -> Vec<JobKey> {
        let is_meant = |received: &Received| {
            received.delivery.caller.as_deref() == caller && received.is_fetching_from(store)
        };
        self.jobs.fetching_where(is_meant)
    }

    /// Reading from the store failed. If it was silent, most of the caller's other jobs that fetch from it give their slots up.
    fn store_failed(&mut self, received: &Received, store: StoreIndex, fault: &FetchFault) {
        let Delivery { caller, id: job, trace_id, model, .. } = &received.delivery;
        let silence = self.silent_stores.failed(store, caller.as_deref(), fault.took, self.now.at);
        let Some(is_new) = silence else { return };
        if is_new {
            let (why, seconds) = (&fault.rejection.error, fault.took.as_secs());
            tracing::warn!(
                job,
                trace_id,
                caller,
                why,
                seconds,
                "a store did not answer: for a while few jobs of this caller fetch from it, and the others wait"
            );
        }
        let kept = SilentStores::part(self.memory.slots(model.0));
        for job in self.fetching_for(caller.as_deref(), store).into_iter().skip(kept) {
            if let Some(received) = self.jobs.take_received(job) {
                self.wait_unfetched(received);
            }
        }
    }

    /// A job waits at the broker because a store did not answer other jobs of its caller.
    fn wait_unfetched(&mut self, received: Received) {
        let error =
            "a store of the job's inputs did not answer other jobs; the inputs of this one were not fetched";
        let rejection = Rejection::new(Reason::StoreUnavailable, error);
        let outcome = self.wait_for_room_or_store(received.reached(), Cause::StoreUnavailable, rejection);
        if matches!(outcome, JobOutcome::Requeue(_)) {
            let Delivery { id: job, trace_id, .. } = &received.delivery;
            tracing::debug!(
                job,
                trace_id,
                "a store of the job's inputs does not answer: the job waits unfetched"
            );
        }
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

    /// The outcome of a job that lacks a store, or room on the worker's disk or device. It waits at the broker a limited number of times, and
    /// any worker may try it again. `rejection`: why it is dead-lettered after the last wait.
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

    /// Every second: ends the fetches of jobs that are held for longer than a job may be, although they should have ended by themselves.
    /// These jobs wait at the broker.
    pub(crate) fn end_overdue_fetches(&mut self) {
        let (now, limit) = (self.now.at, self.time_limits.job());
        let is_overdue =
            |received: &Received| now.saturating_duration_since(received.at) > limit + OVERDUE_AFTER;
        for job in self.jobs.fetching_where(is_overdue) {
            let Some(received) = self.jobs.take_received(job) else { continue };
            let error = format!(
                "the job's inputs were not fetched within {} s, the longest that a job may be held: see worker.job_s",
                limit.as_secs_f64()
            );
            let outcome = self.wait_for_store(&received, Rejection::new(Reason::StoreUnavailable, error));
            self.settle(received.settle(outcome, now));
        }
    }

    /// Requeues the jobs whose inputs are being fetched, because a fetch may take longer than there is time. Like other unfinished jobs
    /// they wait until our own consumers cannot receive them again.
    pub(crate) fn requeue_fetching(&mut self) {
        for job in self.jobs.fetching_where(|received| self.may_requeue_unfinished(received.delivery.model)) {
            let Some(received) = self.jobs.take_received(job) else { continue };
            let outcome = JobOutcome::unfinished(received.reached(), Cause::Unfinished);
            self.settle(received.settle(outcome, self.now.at));
            self.quarantine.cuts_fetches();
        }
    }
}

#[cfg(test)]
#[path = "references_tests.rs"]
mod tests;
