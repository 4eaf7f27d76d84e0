//! Checks what a worker accepts: no more jobs than slots, none while it is paused or drains, none twice, and quarantined jobs alone.

use vramq_core::event::Source;
use vramq_core::ids::{JobKey, ModelIndex};
use vramq_schemas::JobHeaders;
use vramq_schemas::headers::PROCESS_LOST;

use super::Shell;
use super::accounts::SUSPECT_AFTER;
use super::confirms::CONFIRM_MAX;
use super::stored_job::StoredJob;
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;

/// How long a process remembers what it has settled.
const REMEMBERED: Micros = 280 * SECOND;

/// After so many losses, quarantined jobs are dead-lettered.
pub(super) const CRASHES_MAX: u32 = 5;

impl Shell {
    /// Checks that the slots cover what live and stopping consumers may be sent, and the unsettled jobs of ended ones.
    pub(super) fn check_consume(&self, env: &mut Env, model: ModelIndex, prefetch: u16) {
        let Some(session) = &self.session else { return };
        let leases = || session.leases.iter().filter(|lease| lease.model == model);
        let leased: usize = leases().map(|lease| usize::from(lease.prefetch)).sum();
        let is_leased = |consumer| leases().any(|lease| Some(lease.consumer) == consumer);
        let orphans = self.jobs.values().filter(|job| job.model == model && !is_leased(job.consumer)).count();
        let slots = usize::from(self.core.status().models[model.0].slots);
        let committed = leased + orphans + usize::from(prefetch);
        if committed > slots {
            let who = self.life.worker;
            env.ledger.fail("prefetch stays within the slots", || {
                format!("worker-{who}: {leased} for consumers, {orphans} others and {prefetch} more, with {slots} slots")
            });
        }
    }

    /// Quarantined jobs are taken one at a time, with nothing beside them.
    pub(super) fn check_taking(&self, env: &mut Env) {
        let held = self.held();
        if held > 0 || self.session.as_ref().is_some_and(|session| !session.leases.is_empty()) {
            let who = self.life.worker;
            env.ledger.fail("quarantined jobs run alone", || {
                format!("worker-{who} fetches one beside {held} jobs")
            });
        }
    }

    pub(super) fn check_isolation(&self, env: &mut Env, source: Source) {
        let quarantined = self.jobs.values().filter(|job| job.consumer.is_none()).count();
        let leases = || self.session.iter().flat_map(|session| &session.leases);
        let is_late =
            |job: &StoredJob| job.consumer.is_some_and(|own| leases().all(|lease| lease.consumer != own));
        // The model of a quorum queue may deliver after the consumer's end, where RabbitMQ returns the message. The worker is not at fault.
        if self.jobs.values().any(is_late) {
            return;
        }
        if (source == Source::Quarantine || quarantined > 0) && self.held() > 1 {
            let (who, held) = (self.life.worker, self.held());
            env.ledger.fail("quarantined jobs run alone", || {
                format!("worker-{who} holds {held} jobs, {quarantined} of them quarantined")
            });
        }
    }

    /// A worker that is paused, or that drains, takes no jobs.
    pub(super) fn check_takes(&self, env: &mut Env) {
        if self.operators.is_paused || self.is_draining() {
            let who = self.life.worker;
            env.ledger.fail("a worker that is paused or drains takes no jobs", || format!("worker-{who}"));
        }
    }

    /// How often the broker delivered a job before without an excuse. A worker's own losses, including lost queues, explain the returns to
    /// it.
    pub(super) fn unexplained_returns(&self, stored: &StoredJob) -> u32 {
        let is_explained = self.sessions > 1 || self.gave_back || self.shares.has_missed();
        if is_explained { 0 } else { stored.returns }
    }

    /// Whether a message is the next attempt of a job that is still here.
    pub(super) fn is_next_attempt(&self, stored: &StoredJob) -> bool {
        self.jobs.values().any(|before| before.next_attempt == Some(stored.letter))
    }

    /// Checks that a next attempt is not read while its predecessor is held. If the worker died with both messages, the job would exist
    /// twice.
    fn check_order(&self, env: &mut Env, stored: &StoredJob) {
        let is_due = env.now > stored.delivered_at + CONFIRM_MAX * SECOND;
        if !is_due && self.is_next_attempt(stored) {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("a next attempt is read when the message before it is settled", || {
                format!("worker-{who}: job {number}")
            });
        }
    }

    /// Checks that the worker does not read a job that it has answered, nor a job that may crash workers among other jobs.
    pub(super) fn check_decode(&self, env: &mut Env, job: JobKey) {
        let Some(stored) = self.jobs.get(&job) else { return };
        self.check_order(env, stored);
        let (who, number) = (self.life.worker, stored.job.0);
        let twin = env.ledger.letter(stored.letter).twin;
        let is_answered = self.answered.get(&twin).is_some_and(|(at, session)| {
            env.now - at < REMEMBERED && self.sessions > *session && stored.returns > 0
        });
        if is_answered && env.ledger.job(stored.job).copies == 1 {
            env.ledger.fail("a message that was settled here is only acknowledged", || {
                format!("worker-{who}: job {number}")
            });
        }
        let Kind::Job { headers: Some(headers), .. } = &env.ledger.letter(stored.letter).kind else { return };
        let returns = self.unexplained_returns(stored);
        let charged = headers.crashes.saturating_add(returns);
        // A job that was lost only with programs harms no worker: it runs among other jobs, in separate passes.
        let by_workers = if of_programs(headers) { returns } else { charged };
        let is_quarantined = stored.consumer.is_none();
        if charged >= CRASHES_MAX || (!is_quarantined && by_workers >= SUSPECT_AFTER) {
            let crashes = headers.crashes;
            env.ledger.fail("a job that may crash workers runs alone, and not for ever", || {
                format!("worker-{who}: job {number} after {crashes} crashes and {returns} returns")
            });
        }
    }
}

/// Whether all crashes of a job were those of programs, as its history says.
pub(super) fn of_programs(headers: &JobHeaders) -> bool {
    let mut crashes = headers.history.iter().filter(|attempt| attempt.outcome.ends_with("-lost"));
    crashes.clone().count() >= headers.crashes as usize
        && crashes.all(|attempt| attempt.outcome == PROCESS_LOST)
}
