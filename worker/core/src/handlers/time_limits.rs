//! Ends passes that do not end by themselves, and jobs that were held for too long. Readings of the device come in every second, and the
//! broker's `consumer_timeout` once the broker has shown it.

use std::time::Duration;

use vramq_schemas::Reason;

use crate::Core;
use crate::disposition::JobOutcome;
use crate::event::{OnDevice, Reading};
use crate::handlers::health::Blame;
use crate::ids::JobKey;
use crate::jobs::{Running, StopReason};
use crate::rejection::Rejection;

impl Core {
    /// Every second: gives the device up if a pass does not end, and ends or requeues jobs that were held for too long.
    pub(crate) fn watch_time(&mut self, reading: &Reading) {
        if let Some(pass) = self.on_device_beyond(self.settings.pass_limit, reading) {
            let (error, blame) = match pass.waits {
                true => ("another process keeps the device to itself", Blame::Nobody),
                false => ("a pass does not end", Blame::Jobs(self.jobs_in(pass.pass))),
            };
            return self.device_lost(error, blame);
        }
        let stuck = self.on_device_beyond(self.time_limits.job(), reading);
        let overdue = self.jobs.running_where(|key, job| self.is_overdue(key, job, stuck));
        for job in overdue {
            self.end_overdue(job, stuck);
        }
    }

    /// The pass that has been on the device for longer than `limit`, if there is one.
    fn on_device_beyond(&self, limit: Duration, reading: &Reading) -> Option<OnDevice> {
        let lasts = |pass: &OnDevice| self.standstills.running_since(pass.since, self.now.at);
        reading.on_device.filter(|pass| lasts(pass) > limit)
    }

    /// Whether a job was held for too long and must be handled now. `stuck`: the pass that has been on the device for as long, if any.
    fn is_overdue(&self, key: JobKey, job: &Running, stuck: Option<OnDevice>) -> bool {
        let held = self.now.at.saturating_duration_since(job.received.at);
        // These are decided when the probe has ended.
        if held <= self.time_limits.job() || self.health.is_pending(key) {
            return false;
        }
        // A given-up job only waits for its last pass, however long that takes.
        if job.is_given_up() {
            return false;
        }
        let is_over = job.is_decided() || matches!(job.stop_reason(), Some(StopReason::Requeued(_)));
        // The job's end may already be decided, but cannot take effect while one of its passes is stuck.
        let is_behind_stuck_pass = stuck.is_some() && job.is_in_a_pass();
        !is_over || is_behind_stuck_pass
    }

    fn end_overdue(&mut self, job: JobKey, stuck: Option<OnDevice>) {
        let Some(running) = self.jobs.running(job) else { return };
        let Some(stuck) = stuck else { return self.requeue_unfinished(job) };
        let message = running.received.delivery.fingerprint;
        let pass = self.scheduler.in_flight(stuck.pass).filter(|pass| pass.has(message));
        let Some(pass) = pass.filter(|_| !stuck.waits) else {
            // A job that is queued behind the stuck pass would wait as long.
            return self.leave_pass(job);
        };
        if pass.is_of_one() && !running.has_progress() {
            let (headers, limit) = (running.headers.clone(), self.time_limits.job());
            let rejection = Rejection::new(Reason::TimedOut, timed_out(limit));
            self.dead_letter(job, JobOutcome::dead_letter(headers, rejection));
        } else {
            // Only a job that is alone in the pass and has finished nothing is known to be the cause.
            self.count_crash(job);
            self.leave_pass(job);
        }
    }

    /// Requeues a job without waiting for its passes.
    fn leave_pass(&mut self, job: JobKey) {
        if let Some(running) = self.jobs.running_mut(job) {
            running.forget_passes();
        }
        self.requeue_unfinished(job);
    }

    /// The broker closed a channel because a job was held for too long.
    pub(crate) fn learn_consumer_timeout(&mut self, timeout: Duration) {
        self.time_limits.learn_consumer_timeout(timeout);
        let (timeout_s, job_s) = (timeout.as_secs_f64(), self.time_limits.job().as_secs_f64());
        tracing::warn!(
            timeout_s,
            job_s,
            "a job was held for longer than the broker's consumer_timeout (timeout_s), so the broker closed the channel: from now on \
             this worker requeues unfinished jobs after job_s seconds. Raise consumer_timeout at the broker, or set worker.job_s to \
             four fifths of it"
        );
    }
}

fn timed_out(limit: Duration) -> String {
    format!(
        "the job was held for {} s, and nothing of it was finished: make it smaller, or raise worker.job_s and the broker's \
         consumer_timeout",
        limit.as_secs_f64()
    )
}

#[cfg(test)]
#[path = "time_limits_tests.rs"]
mod tests;
