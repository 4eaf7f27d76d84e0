//! Isolation: the worker stops consuming, settles or requeues what it holds, and then takes quarantined jobs one by one. Each step has a
//! time limit, which bounds how long a quarantined job holds up other callers. Only a fetch of its inputs has no other limit than fetches of
//! other jobs: with less time it might never end, and the job would be lost although it is slow and not at fault.

use std::time::Duration;

use vramq_schemas::Reason;

use crate::Core;
use crate::action::Action;
use crate::event::Source;
use crate::ids::{JobKey, ModelIndex};
use crate::jobs::Running;
use crate::observation::Cause;
use crate::rejection::Rejection;

/// How long a quarantined job may wait for its first pass while the isolation's time is over. A program or another process may hold the
/// memory that it needs, for longer than others should wait.
const FIRST_PASS_WITHIN: Duration = Duration::from_secs(60);

impl Core {
    /// Quarantined jobs of a model wait. Of the jobs that the worker holds, those that need about one pass are finished. The others are
    /// requeued now, as in a drain.
    pub(crate) fn isolate(&mut self, model: ModelIndex, count: u32) {
        let name = &self.models[model.0].name;
        tracing::info!(
            model = name,
            count,
            "not consuming: quarantined jobs run next, one at a time, once the unacknowledged jobs have ended"
        );
        self.quarantine.isolate(model, self.now.at);
        self.requeue_large();
        self.adjust_consumers();
    }

    /// Takes the next quarantined job, if no other job is unacknowledged.
    pub(crate) fn take_quarantined(&mut self) {
        let is_alone = self.unacked() == 0 && self.has_stopped_consuming();
        let may_run =
            !self.lifecycle.requeues_all() && !self.lifecycle.is_draining() && !self.lifecycle.is_paused();
        if is_alone
            && may_run
            && let Some(model) = self.quarantine.take(self.now.at)
        {
            self.act(Action::TakeQuarantined { model });
        }
    }

    pub(crate) fn quarantine_empty(&mut self) {
        self.quarantine.taken();
        self.end_isolation();
    }

    /// The broker has counted `count` quarantined jobs of a model. If other workers took them all meanwhile, the isolation ends.
    pub(crate) fn counted_while_isolating(&mut self, model: ModelIndex, count: u32) {
        if count == 0 && self.quarantine.is_waiting_for(model) {
            self.end_isolation();
        }
    }

    /// Every second: enforces the isolation's time limit. After half of it, requeues the jobs that the isolation still waits for. At its
    /// end, requeues the quarantined job after its current pass. One that has waited for its first pass for too long waits at the broker.
    pub(crate) fn watch_isolation(&mut self) {
        let now = self.now.at;
        if self.quarantine.is_time_over(now) {
            let is_alone = self.unacked() == 0 && !self.quarantine.is_taking();
            // Other jobs need not wait for passes that outlast the isolation.
            if is_alone || !self.quarantine.has_begun() {
                return self.end_isolation();
            }
            return self.requeue_quarantined();
        }
        if self.quarantine.is_half_time_over(now) && !self.quarantine.has_begun() {
            self.requeue_fetching();
            let held = self.jobs.running_where(|job, _| !self.health.is_pending(job));
            held.into_iter().for_each(|job| self.requeue_unfinished(job));
        }
    }

    fn requeue_quarantined(&mut self) {
        let now = self.now.at;
        // A job of an unavailable model never gets another pass.
        let may_leave = |job: &Running| {
            let delivery = &job.received.delivery;
            let is_available = self.scheduler.is_available(delivery.model);
            let waited = now.saturating_duration_since(job.received.complete_since());
            let is_over = job.has_started() || waited >= FIRST_PASS_WITHIN;
            delivery.source == Source::Quarantine && (is_over || !is_available)
        };
        let quarantined = self.jobs.running_where(|key, job| may_leave(job) && !self.health.is_pending(key));
        for job in quarantined {
            let is_short_of_room = self.jobs.running(job).is_some_and(|job| {
                let is_available = self.scheduler.is_available(job.received.delivery.model);
                is_available && job.goes_on() && !job.has_started()
            });
            if is_short_of_room {
                self.wait_for_first_pass(job);
            } else {
                self.requeue_unfinished(job);
            }
        }
    }

    /// The device had no room for a quarantined job. The wait is counted, so that one that can never start does not stop worker after worker
    /// for ever.
    fn wait_for_first_pass(&mut self, job: JobKey) {
        let Some(running) = self.jobs.running(job) else { return };
        let headers = running.headers.clone();
        let (id, trace_id) = (&running.received.delivery.id, &running.received.delivery.trace_id);
        let error = format!(
            "{} had no room for the job within {} s, although the worker held no other job",
            self.settings.device,
            FIRST_PASS_WITHIN.as_secs()
        );
        tracing::info!(job = id, trace_id, error, "a quarantined job waits, and is not run");
        let rejection = Rejection::new(Reason::OutOfMemory, error);
        let outcome = self.wait_for_room_or_store(headers, Cause::Delayed, rejection);
        self.conclude_when_idle(job, outcome);
    }

    fn end_isolation(&mut self) {
        self.quarantine.end_isolation(self.now.at);
        self.adjust_consumers();
    }
}

#[cfg(test)]
#[path = "isolation_tests.rs"]
mod tests;
