//! Drains the worker, and requeues unfinished jobs: because the worker drains, because its device is sick, or because they were held
//! for too long. Their finished items are published first, and no attempt is counted.

use crate::Core;
use crate::action::SessionEnd;
use crate::ids::JobKey;
use crate::jobs::{Running, StopReason};
use crate::observation::Cause;
use crate::timers::Timer;

impl Core {
    pub(crate) fn stop_requested(&mut self, signal: &str) {
        let jobs = self.unacked();
        let is_second = self.lifecycle.ask_to_stop();
        if self.lifecycle.cancel_restart() {
            tracing::info!(
                signal,
                "asked to stop while draining for a restart: the process will not be restarted"
            );
            return;
        }
        if self.lifecycle.has_deadline() && !is_second {
            tracing::info!(signal, jobs, "asked to stop while draining: the drain continues");
            return;
        }
        if self.lifecycle.has_deadline() {
            tracing::error!(
                signal,
                jobs,
                "asked to stop twice: stopping at once; the broker delivers the unacknowledged jobs again"
            );
            return self.end_session(SessionEnd::Killed);
        }
        tracing::info!(signal, jobs, seconds = self.settings.drain.as_secs(), "draining");
        self.drain();
    }

    /// Stops consuming, and ends when no job is unacknowledged: jobs of more than a pass are requeued at once, the others are
    /// finished if half of the time is enough.
    pub(crate) fn drain(&mut self) {
        let (half_time, deadline) = self.lifecycle.drain(self.now.at, self.settings.drain);
        self.timers.set(half_time, Timer::HalfTime);
        self.timers.set(deadline, Timer::DrainDeadline);
        self.requeue_large();
        self.adjust_consumers();
    }

    /// Requeues the jobs of more than a pass, and those whose inputs are not here.
    pub(crate) fn requeue_large(&mut self) {
        // A health probe decides about those that it is for.
        let is_unprepared = |key, job: &Running| job.has_unprepared() && !self.health.is_pending(key);
        let unprepared = self.jobs.running_where(is_unprepared);
        for job in self.scheduler.large().into_iter().chain(unprepared) {
            self.requeue_unfinished(job);
        }
        self.requeue_fetching();
    }

    /// Starts no pass any more, and requeues all jobs.
    pub(crate) fn requeue_all_unfinished(&mut self) {
        self.lifecycle.requeue_all();
        self.requeue_fetching();
        for job in self.jobs.running_keys() {
            self.requeue_unfinished(job);
        }
    }

    /// Requeues a job as soon as the passes that it is in have ended.
    pub(crate) fn requeue_unfinished(&mut self, job: JobKey) {
        self.requeue_because(job, Cause::HandedOver);
    }

    /// The same, for another reason than that the job cannot go on here.
    pub(crate) fn requeue_because(&mut self, job: JobKey, cause: Cause) {
        let Some(running) = self.jobs.running_mut(job) else { return };
        if running.stop_reason().is_none() {
            running.stop(StopReason::Requeued(cause));
            let model = running.received.delivery.model;
            self.scheduler.remove(model, job);
        }
        // Its passes may have been abandoned, also if the job was to be requeued before.
        self.advance(job);
    }
}
