//! Drains the worker, and requeues unfinished jobs: in a drain, from a sick device, or after they were held for too long. Their finished
//! items are published first, and no attempt is counted.

use crate::Core;
use crate::action::{Action, SessionEnd};
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

    /// Stops consuming, and ends the session when no job is unacknowledged. Jobs of more than a pass are requeued at once. The others may
    /// finish until half of the time is over.
    pub(crate) fn drain(&mut self) {
        let (half_time, deadline) = self.lifecycle.drain(self.now.at, self.settings.drain);
        self.timers.set(half_time, Timer::HalfTime);
        self.timers.set(deadline, Timer::DrainDeadline);
        self.requeue_large();
        self.adjust_consumers();
    }

    /// Requeues jobs with more items than a pass takes, jobs with unprepared items, and jobs whose inputs are being fetched.
    pub(crate) fn requeue_large(&mut self) {
        // Jobs that wait for a health probe are decided by its result.
        let is_unprepared = |key, job: &Running| job.has_unprepared() && !self.health.is_pending(key);
        let unprepared = self.jobs.running_where(is_unprepared);
        for job in self.scheduler.large().into_iter().chain(unprepared) {
            self.requeue_unfinished(job);
        }
        self.requeue_fetching();
    }

    /// Half of a drain's time is over. Cancels the passes that still run, so that their jobs can be requeued with what is finished. An
    /// encoder's pass ends by itself within that time; a program's may take minutes, and the drain would end before it.
    pub(crate) fn half_time(&mut self) {
        self.requeue_all_unfinished();
        self.cancel_passes();
    }

    /// Cancels all passes of jobs. When a session opens, those of the session before are in vain: their jobs are redelivered, and would wait
    /// for a program that runs a long pass for nobody. When that session closes is too early: during the outage nobody waits for the program,
    /// and one that does not react would be killed and loaded again, although its pass may end before the outage does.
    pub(crate) fn cancel_passes(&mut self) {
        for (pass, model) in self.scheduler.job_passes() {
            self.act(Action::CancelPass { pass, model });
        }
    }

    /// Starts no more passes, and requeues all jobs.
    pub(crate) fn requeue_all_unfinished(&mut self) {
        self.lifecycle.requeue_all();
        self.requeue_fetching();
        for job in self.jobs.running_keys() {
            self.requeue_unfinished(job);
        }
    }

    /// Requeues a job as soon as the passes that it is in have ended.
    pub(crate) fn requeue_unfinished(&mut self, job: JobKey) {
        self.requeue_because(job, Cause::Unfinished);
    }

    /// The same, with another cause.
    pub(crate) fn requeue_because(&mut self, job: JobKey, cause: Cause) {
        let Some(running) = self.jobs.running_mut(job) else { return };
        if running.stop_reason().is_none() {
            running.stop(StopReason::Requeued(cause));
            let model = running.received.delivery.model;
            self.scheduler.remove(model, job);
        }
        // Its passes may have been abandoned, even if the job was already to be requeued.
        self.advance(job);
    }
}
