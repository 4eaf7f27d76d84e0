//! Requeues unfinished jobs: because the worker drains, because its device is sick, or because they were held for too long. Their
//! finished items are published first, and no attempt is counted.

use std::time::Duration;

use vramq_schemas::Reason;

use crate::Core;
use crate::action::SessionEnd;
use crate::event::{OnDevice, Reading};
use crate::handlers::health::Blame;
use crate::ids::JobKey;
use crate::jobs::{Leaving, Running};
use crate::observation::Cause;
use crate::rejection::Rejection;
use crate::timers::Timer;

/// The part of the broker's `consumer_timeout` for which a job may be held. The rest is for the pass that still runs then, and
/// for replies that wait.
pub(crate) const OF_TIMEOUT: f64 = 0.8;

impl Core {
    pub(crate) fn stop_requested(&mut self, signal: &str) {
        let jobs = self.unacked();
        if self.lifecycle.cancel_restart() {
            tracing::info!(
                signal,
                "asked to stop while draining for a restart: the process will not be restarted"
            );
            return;
        }
        if self.lifecycle.has_deadline() {
            tracing::error!(signal, jobs, "asked to stop twice: stopping at once");
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

    pub(crate) fn timers_due(&mut self) {
        while let Some(timer) = self.timers.take_due(self.now.at) {
            match timer {
                Timer::PublishAgain(job) => self.publish_again(job),
                Timer::Return(job) => {
                    if self.jobs.get(job).is_some() {
                        self.act(crate::action::Action::Return { job });
                    }
                }
                Timer::LookForQueue(model, queue) => self.look_for_queue(model, queue),
                Timer::HalfTime if self.lifecycle.has_deadline() => self.requeue_all_unfinished(),
                Timer::DrainDeadline if self.lifecycle.has_deadline() => {
                    tracing::error!(jobs = self.unacked(), "drain deadline passed");
                    self.end_session(SessionEnd::Killed);
                }
                Timer::HalfTime | Timer::DrainDeadline => {}
            }
        }
    }

    /// Starts no pass any more, and requeues all jobs.
    pub(crate) fn requeue_all_unfinished(&mut self) {
        self.lifecycle.hand_over();
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
        if running.leaving().is_none() {
            running.leave(Leaving::Requeued(cause));
            let model = running.received.delivery.model;
            self.scheduler.batcher_mut(model).remove(job);
        }
        // Its passes may have been abandoned, also if the job was to be requeued before.
        self.advance(job);
    }

    /// Looks for jobs that were held for too long, and for a pass that does not end.
    pub(crate) fn watch_time(&mut self, reading: &Reading) {
        let (limit, now) = (self.settings.job_limit, self.now.at);
        let lasts = |pass: &OnDevice| self.standstills.running_since(pass.since, now);
        if let Some(pass) = reading.on_device.filter(|pass| lasts(pass) > self.settings.pass_limit) {
            let (error, blame) = match pass.waits {
                true => ("another process keeps the device to itself", Blame::Nobody),
                false => ("a pass does not end", Blame::Jobs(self.jobs_in(pass.pass))),
            };
            return self.device_lost(error, blame);
        }
        let stuck = reading.on_device.filter(|pass| lasts(pass) > limit);
        for job in self.jobs.running_keys() {
            let Some(running) = self.jobs.running(job) else { continue };
            let is_late = now.saturating_duration_since(running.received.at) > limit;
            // A health probe decides about those.
            if !is_late || self.health.is_pending(job) {
                continue;
            }
            // It may be decided that a job ends or is requeued, and not happen, because one of its passes does not end.
            let is_behind_stuck_pass = stuck.is_some() && running.is_in_a_pass();
            let is_over = running.is_decided() || matches!(running.leaving(), Some(Leaving::Requeued(_)));
            // Its last pass is waited for as long as it takes.
            let is_given_up = running.is_given_up();
            if is_given_up || (is_over && !is_behind_stuck_pass) {
                continue;
            }
            self.held_too_long(job, stuck);
        }
    }

    /// A job was held for long enough; `stuck` is a pass that has been on the device for as long.
    fn held_too_long(&mut self, job: JobKey, stuck: Option<OnDevice>) {
        let Some(running) = self.jobs.running(job) else { return };
        let Some(stuck) = stuck else { return self.requeue_unfinished(job) };
        let message = running.received.delivery.fingerprint;
        let pass = self.scheduler.in_flight(stuck.pass).filter(|pass| pass.has(message));
        let Some(pass) = pass.filter(|_| !stuck.waits) else {
            // A job that is queued behind it would wait as long.
            return self.leave_pass(job);
        };
        if pass.is_of_one() && !running.has_progress() {
            let (headers, limit) = (running.headers.clone(), self.settings.job_limit);
            self.dead_letter(job, Some(headers), Rejection::new(Reason::TimedOut, timed_out(limit)));
        } else {
            // Until a job is alone in the pass, nothing shows which of them it is.
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
        let limit = timeout.mul_f64(OF_TIMEOUT).min(self.settings.job_limit);
        let (timeout_s, job_s) = (timeout.as_secs_f64(), limit.as_secs_f64());
        tracing::warn!(
            timeout_s,
            job_s,
            "the broker's consumer_timeout is shorter than a job took: from now on jobs are requeued before it; raise it, or \
             lower worker.job_s"
        );
        self.settings.job_limit = limit;
    }
}

fn timed_out(limit: Duration) -> String {
    format!(
        "the job was held for {} s, and nothing of it was finished: make it smaller, or raise worker.job_s and the broker's \
         consumer_timeout",
        limit.as_secs_f64()
    )
}
