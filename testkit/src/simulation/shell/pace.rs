//! Checks when a worker acts: it offers refused messages again with growing waits, drains end in time, and it probes a sick device.

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

/// How often what goes to callers or to other workers is offered, and what goes to queues of the worker's own.
const OTHERS_TRIES: u32 = 4;
const OWN_TRIES: u32 = 8;

/// How long a job that nobody takes is kept before it is given back.
const RETURN_WAIT: Micros = SECOND;

/// Timers, frames and the event loop take a moment.
const MOMENT: Micros = 20 * MILLI;

/// Failed probes after which a process restarts.
const PROBES_MAX: u32 = 5;

/// What is being offered to the broker again and again.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tries {
    refused: u32,
    refused_at: Micros,
    is_for_others: bool,
    /// When the broker last answered anything about the job.
    answered_at: Micros,
}

/// The device as its probes have shown it.
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

/// A process that ends.
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

    /// A full queue has refused what is published.
    pub(super) fn is_refused(&self) -> bool {
        self.refused > 0
    }

    /// What is published now is something else.
    pub(super) fn begin(&mut self) {
        self.refused = 0;
    }
}

impl Shell {
    /// The same is published about a job as before: after a wait that grows, a bounded number of times, and while there is time.
    pub(super) fn check_again(&self, env: &mut Env, stored: &StoredJob) {
        let tries = stored.tries;
        let wait = (REFUSED_WAIT_MIN << (tries.refused - 1).min(10)).min(REFUSED_WAIT_MAX);
        let waited = env.now - tries.refused_at;
        let is_due = (wait / 2 - MILLI..=wait * 3 / 2 + MOMENT).contains(&waited);
        let most = if tries.is_for_others { OTHERS_TRIES } else { OWN_TRIES };
        let limit = stored.delivered_at + env.plan.job_limit * 95 / 80 + MOMENT;
        let drain = env.plan.workers[self.life.worker].drain;
        // What was refused before the drain is on its way.
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

    /// A job is given back because the broker takes nothing about it.
    pub(super) fn check_return(&self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let waited = env.now - stored.tries.answered_at.max(stored.delivered_at);
        if !(RETURN_WAIT..=RETURN_WAIT + MOMENT).contains(&waited) {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("what nobody takes is given back after a second", || {
                format!("worker-{who}: job {number} after {} ms", waited / MILLI)
            });
        }
    }

    /// Takes note of what bears on the drain and on the device's health, before the core hears of it.
    pub(super) fn note_event(&mut self, now: Micros, event: &Event) -> bool {
        match event {
            Event::StopRequested { .. } => {
                self.drain.signals += 1;
                true
            }
            Event::Command { command: Command::Drain, .. } | Event::MemoryWithheld { .. } => true,
            Event::Tick(reading) => {
                reading.lost.is_some() || reading.on_device.is_some() || self.is_full(now)
            }
            Event::PassEnded(end) => {
                let is_lost =
                    matches!(end.result, PassResult::Lost(_) | PassResult::Failed(PassError::DeviceLost(_)));
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
            | PassResult::Lost(_) => {}
            PassResult::Failed(_) | PassResult::Unavailable(_) => {
                self.health.findings += u32::from(self.health.failed == 0);
                (self.health.failed, self.health.failed_at) = (self.health.failed + 1, env.now);
            }
        }
    }

    /// It drained before the event that is carried out now.
    pub(super) fn is_draining(&self) -> bool {
        self.drain.began_at.is_some()
    }

    /// A drain begins only for a reason. `has_reason`: the event may be one.
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

    /// A drain starts no pass in its second half.
    pub(super) fn check_half_time(&self, env: &mut Env, order: &PassOrder) {
        let half = env.plan.workers[self.life.worker].drain / 2;
        let is_late = self.drain.began_at.is_some_and(|began| env.now > began + half + MOMENT);
        if is_late && !order.items.is_empty() {
            let (who, pass) = (self.life.worker, order.pass);
            env.ledger.fail("a drain starts no pass in its second half", || format!("worker-{who}: {pass}"));
        }
    }

    /// A process ends by force only if it is out of time, or asked twice.
    pub(super) fn check_end(&self, env: &mut Env, end: &SessionEnd) {
        let (who, time) = (self.life.worker, env.plan.workers[self.life.worker].drain);
        let is_over = self.drain.began_at.is_some_and(|began| env.now >= began + time);
        if *end == SessionEnd::Killed && !is_over && self.drain.signals < 2 {
            env.ledger
                .fail("a drain has its time", || format!("worker-{who} ends with {} jobs", self.jobs.len()));
        }
        // What is not in a pass, or on its way to the broker, was requeued at half time.
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

    /// Every second: a drain that is out of time is over, and a sick device is known as such and probed again.
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

    /// A health probe starts: a sick device is left alone for a while between two.
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

    /// A job is blamed for a failed pass on the device's own thread only once a probe has succeeded since.
    pub(super) fn check_probed(&self, env: &mut Env, stored: &StoredJob, publication: &Publication) {
        let Publication::DeadLetter { rejection, .. } = publication else { return };
        let is_unproved = stored.failed_at.is_some_and(|failed| self.health.passed_at < failed);
        if rejection.reason == Reason::EngineFailed && is_unproved {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger
                .fail("a job is blamed on a device that is well", || format!("worker-{who}: job {number}"));
        }
    }

    /// A consumer starts: the broker must let it hold jobs for longer than the worker does.
    pub(super) fn check_hold(&self, env: &mut Env, hold_max: Duration) {
        let most = u64::try_from(hold_max.as_micros()).unwrap_or(u64::MAX);
        let learned = self.learned_timeout.map_or(Micros::MAX, |timeout| timeout * 8 / 10);
        let limit = env.plan.job_limit.min(learned);
        let asked = (limit * 10 / 8).max(limit + 60 * SECOND);
        if most.abs_diff(asked) > MILLI {
            let who = self.life.worker;
            env.ledger.fail("the broker's limit is longer than the worker's", || {
                format!("worker-{who}: {most} µs")
            });
        }
    }
}
