//! Checks the times of a worker's actions: refused messages are published again after growing waits, drains end in time, and a sick device
//! is probed.

use std::time::Duration;

use vramq_core::action::{PassOrder, Publication, SessionEnd};
use vramq_core::device::PassError;
use vramq_core::event::{Event, PassResult, PublicationOutcome};
use vramq_core::ids::JobKey;
use vramq_schemas::Reason;
use vramq_schemas::control::Command;

use super::Shell;
use super::stored_job::StoredJob;
use crate::simulation::agenda::{MILLI, Micros, SECOND};
use crate::simulation::env::Env;

/// The first wait and the longest before a refused message is offered again, each spread by half up or down.
const REFUSED_WAIT_MIN: Micros = 200 * MILLI;
const REFUSED_WAIT_MAX: Micros = 5 * SECOND;

/// How often messages to callers, other workers or operators are published, and messages to the worker's own queues.
const OTHERS_TRIES: u32 = 4;
const OWN_TRIES: u32 = 8;

/// How long a job is kept that can neither be dead-lettered nor requeued.
const RETURN_WAIT: Micros = SECOND;

/// The delay of timers, frames and the event loop.
const MOMENT: Micros = 20 * MILLI;

/// Failed probes after which a process restarts.
const PROBES_MAX: u32 = 5;

/// The attempts to publish the same message.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tries {
    refused: u32,
    refused_at: Micros,
    is_for_others: bool,
    /// When the broker last answered anything about the job.
    answered_at: Micros,
}

/// The device's health according to its probes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Health {
    /// Probes that failed since the last one that did not.
    failed: u32,
    failed_at: Micros,
    /// When a probe last succeeded.
    passed_at: Micros,
    /// How often the device was found to be sick.
    pub(super) findings: u32,
}

/// The drain of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drain {
    began_at: Option<Micros>,
    /// How often it was asked to stop by a signal.
    signals: u32,
}

impl Tries {
    /// The broker answered what was published about a job.
    pub(super) fn answered(
        &mut self,
        outcome: Option<&PublicationOutcome>,
        is_for_others: bool,
        now: Micros,
    ) {
        self.answered_at = now;
        match outcome {
            Some(PublicationOutcome::Refused { .. }) => {
                (self.refused, self.refused_at, self.is_for_others) = (self.refused + 1, now, is_for_others);
            }
            Some(_) => self.refused = 0,
            None => {}
        }
    }

    /// Whether a full queue has refused the current message.
    pub(super) fn is_refused(&self) -> bool {
        self.refused > 0
    }

    /// Another message is published now.
    pub(super) fn begin(&mut self) {
        self.refused = 0;
    }
}

impl Shell {
    /// The same message is published again. Checks the growing wait, the number of tries, and the time that is left.
    pub(super) fn check_again(&self, env: &mut Env, stored: &StoredJob) {
        let tries = stored.tries;
        let wait = (REFUSED_WAIT_MIN << (tries.refused - 1).min(10)).min(REFUSED_WAIT_MAX);
        let waited = env.now - tries.refused_at;
        let is_due = (wait / 2 - MILLI..=wait * 3 / 2 + MOMENT).contains(&waited);
        let most = if tries.is_for_others { OTHERS_TRIES } else { OWN_TRIES };
        let limit = stored.delivered_at + env.plan.job_limit * 95 / 80 + MOMENT;
        let drain = env.plan.workers[self.life.worker].drain;
        // Messages refused before the drain are already in flight.
        let began = self.drain.began_at.filter(|began| *began <= tries.refused_at);
        let is_in_time = env.now <= began.map_or(limit, |began| limit.min(began + drain * 8 / 10 + MOMENT));
        if !is_due || tries.refused >= most || !is_in_time {
            let (who, number) = (self.life.worker, stored.job.0);
            let held = (env.now - stored.delivered_at) / MILLI;
            env.ledger
                .fail("a refused message is offered again in time, and a bounded number of times", || {
                    format!("worker-{who}: job {number}: after {} ms of {held}, {tries:?}", waited / MILLI)
                });
        }
    }

    /// Checks that a job is given back only because the broker takes neither a dead letter of it nor another attempt.
    pub(super) fn check_give_back(&self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let waited = env.now - stored.tries.answered_at.max(stored.delivered_at);
        if !(RETURN_WAIT..=RETURN_WAIT + MOMENT).contains(&waited) {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("what nobody takes is given back after a second", || {
                format!("worker-{who}: job {number} after {} ms", waited / MILLI)
            });
        }
    }

    /// Records an event that affects the drain or the device's health, before the core gets it. Returns whether it may be a reason to
    /// drain.
    pub(super) fn note_event(&mut self, now: Micros, event: &Event) -> bool {
        match event {
            Event::StopRequested { .. } => {
                self.drain.signals += 1;
                true
            }
            Event::Command { command: Command::Drain, .. }
            | Event::MemoryWithheld { .. }
            | Event::OtherRevision { .. } => true,
            Event::Tick(reading) => {
                reading.lost.is_some() || reading.on_device.is_some() || self.is_full(now)
            }
            Event::PassEnded(end) => {
                let is_lost = matches!(
                    end.result,
                    PassResult::DeviceLostBefore(_) | PassResult::Failed(PassError::DeviceLost(_))
                );
                is_lost || self.health.failed + 1 >= PROBES_MAX
            }
            _ => false,
        }
    }

    /// A health probe has ended.
    pub(super) fn probed(&mut self, env: &Env, result: &PassResult) {
        match result {
            PassResult::Done => (self.health.failed, self.health.passed_at) = (0, env.now),
            PassResult::Failed(PassError::OutOfMemory { .. }) if self.health.failed > 0 => {
                self.health.failed_at = env.now;
            }
            PassResult::Failed(PassError::OutOfMemory { .. })
            | PassResult::Skipped
            | PassResult::Cancelled
            | PassResult::DeviceLostBefore(_) => {}
            PassResult::Failed(_) | PassResult::Unavailable(_) => {
                self.health.findings += u32::from(self.health.failed == 0);
                (self.health.failed, self.health.failed_at) = (self.health.failed + 1, env.now);
            }
        }
    }

    /// Whether it began to drain before the current event.
    pub(super) fn is_draining(&self) -> bool {
        self.drain.began_at.is_some()
    }

    /// Checks that a drain begins only for a reason. `has_reason`: whether the event may be one.
    pub(super) fn check_drain(&mut self, env: &mut Env, has_reason: bool) {
        if !self.core.is_draining() || self.drain.began_at.is_some() {
            return;
        }
        self.drain.began_at = Some(env.now);
        if !has_reason {
            let who = self.life.worker;
            env.ledger.fail("a worker drains only for a reason", || format!("worker-{who}"));
        }
    }

    /// Checks that no pass starts in the second half of a drain.
    pub(super) fn check_half_time(&self, env: &mut Env, order: &PassOrder) {
        let half = env.plan.workers[self.life.worker].drain / 2;
        let is_late = self.drain.began_at.is_some_and(|began| env.now > began + half + MOMENT);
        if is_late && !order.items.is_empty() {
            let (who, pass) = (self.life.worker, order.pass);
            env.ledger.fail("a drain starts no pass in its second half", || format!("worker-{who}: {pass}"));
        }
    }

    /// Checks that a process is forced to end only when its time is over or it was asked twice.
    pub(super) fn check_end(&self, env: &mut Env, end: &SessionEnd) {
        let (who, time) = (self.life.worker, env.plan.workers[self.life.worker].drain);
        let is_over = self.drain.began_at.is_some_and(|began| env.now >= began + time);
        if *end == SessionEnd::Killed && !is_over && self.drain.signals < 2 {
            env.ledger
                .fail("a drain has its time", || format!("worker-{who} ends with {} jobs", self.jobs.len()));
        }
        // Everything else was requeued at half time: only jobs in a pass or being published are left.
        let is_kept = |(key, stored): (&JobKey, &StoredJob)| {
            stored.is_decoded
                && !stored.is_publishing
                && stored.end.is_none()
                && self.passes_with(*key).next().is_none()
        };
        let kept = self.jobs.iter().filter(|job| is_kept(*job)).count();
        if *end == SessionEnd::Killed && self.drain.signals < 2 && self.takes_nothing() && kept > 0 {
            env.ledger
                .fail("a drain requeues what it cannot finish", || format!("worker-{who} keeps {kept} jobs"));
        }
    }

    /// Every second: checks that a drain ends in time, and that a sick device is recognised and probed again.
    pub(super) fn check_pace(&self, env: &mut Env) {
        let (who, time) = (self.life.worker, env.plan.workers[self.life.worker].drain);
        if self.drain.began_at.is_some_and(|began| env.now > began + time + SECOND) {
            env.ledger
                .fail("a drain ends in time", || format!("worker-{who} holds {} jobs", self.jobs.len()));
        }
        let is_sick = self.core.status().is_sick;
        if is_sick != (self.health.failed > 0) {
            env.ledger.fail("a device is sick as long as its probes fail", || {
                format!("worker-{who}: sick {is_sick}, and {} probes failed", self.health.failed)
            });
        }
        let since =
            self.session.as_ref().map_or(env.now, |session| session.opened_at.max(self.health.failed_at));
        let wait = SECOND << self.health.failed.saturating_sub(1).min(PROBES_MAX);
        let is_forgotten = is_sick && self.passes.is_empty() && env.now > since + wait + 3 * SECOND;
        if is_forgotten && !self.core.is_draining() {
            env.ledger.fail("a sick device is probed again", || {
                format!("worker-{who}: {} probes failed", self.health.failed)
            });
        }
        if self.health.failed >= PROBES_MAX && !self.core.is_draining() {
            env.ledger.fail("a device that stays sick ends in a restart", || format!("worker-{who}"));
        }
    }

    /// A health probe starts. Checks the wait between probes of a sick device.
    pub(super) fn check_probe(&self, env: &mut Env, order: &PassOrder) {
        let Some(session) = self.session.as_ref().filter(|_| order.items.is_empty()) else { return };
        let since = self.health.failed_at;
        let wait = SECOND << self.health.failed.saturating_sub(1).min(PROBES_MAX);
        if self.health.failed > 0 && since > session.opened_at && env.now < since + wait {
            let who = self.life.worker;
            env.ledger.fail("a sick device is left alone between probes", || {
                format!("worker-{who}: after {} ms", (env.now - since) / MILLI)
            });
        }
    }

    /// Checks that a job is blamed for a failed pass on the device's thread only after a successful probe.
    pub(super) fn check_probed(&self, env: &mut Env, stored: &StoredJob, publication: &Publication) {
        let Publication::DeadLetter { rejection, .. } = publication else { return };
        let is_unproved = stored.failed_at.is_some_and(|failed| self.health.passed_at < failed);
        if rejection.reason == Reason::EngineFailed && is_unproved {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger
                .fail("a job is blamed on a device that is well", || format!("worker-{who}: job {number}"));
        }
    }

    /// How long the worker may hold a job, as far as it knows the broker's timeout.
    pub(super) fn hold_limit(&self, env: &Env) -> Micros {
        let learned = self.learned_timeout.map_or(Micros::MAX, |timeout| timeout * 8 / 10);
        env.plan.job_limit.min(learned)
    }

    /// A consumer starts. Checks that the broker lets it hold jobs for longer than the worker does.
    pub(super) fn check_hold(&self, env: &mut Env, hold_max: Duration) {
        let most = u64::try_from(hold_max.as_micros()).unwrap_or(u64::MAX);
        let limit = self.hold_limit(env);
        let asked = (limit * 10 / 8).max(limit + 60 * SECOND);
        if most.abs_diff(asked) > MILLI {
            let who = self.life.worker;
            env.ledger.fail("the broker's limit is longer than the worker's", || {
                format!("worker-{who}: {most} µs")
            });
        }
    }
}
