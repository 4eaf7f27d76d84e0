//! Withdrawals that a worker's process receives, and the checks of what must follow.

use vramq_core::action::Publication;
use vramq_core::event::{self, Event};
use vramq_core::ids::{JobKey, PassId};
use vramq_schemas::Reason;
use vramq_schemas::withdrawal::{REMEMBERED_S, Withdrawal};

use super::Shell;
use super::frames::id_of;
use super::stored_job::Withdrawn;
use crate::simulation::agenda::{Claim, Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::{JobNumber, secret_of};

impl Shell {
    /// The number of the open session; the queue of withdrawals exists only during it.
    pub fn session_number(&self) -> Option<u32> {
        self.session.as_ref().map(|session| session.number)
    }

    /// A withdrawal comes, true or not.
    pub fn withdrawal(&mut self, env: &mut Env, session: u32, claim: Claim) {
        if self.session_number() != Some(session) {
            return;
        }
        let secret = claim.secret_of.map_or_else(|| "a guess".to_owned(), |of| secret_of(JobNumber(of)));
        let withdrawal = Withdrawal { job: id_of(claim.job), secret };
        let (job, digest) = (JobNumber(claim.job), withdrawal.digest());
        if env.ledger.job(job).digest == Some(digest) {
            self.hear(env.now, job);
        }
        self.handle(env, Event::Withdrawn(event::Withdrawn { id: withdrawal.job, digest }));
    }

    fn hear(&mut self, now: Micros, job: JobNumber) {
        self.heard.retain(|_, at| is_remembered(*at, now));
        self.heard.insert(job, now);
        for stored in self.jobs.values_mut().filter(|stored| stored.job == job) {
            stored.withdrawn = match (stored.withdrawn, stored.is_publishing) {
                (Withdrawn::No, true) => Withdrawn::WhilePublishing,
                (Withdrawn::No, false) => Withdrawn::Yes,
                (before, _) => before,
            };
        }
    }

    /// What the process knows of a job's withdrawal when the job is delivered.
    pub(super) fn known_withdrawal(&self, now: Micros, job: JobNumber) -> Withdrawn {
        let is_known = self.heard.get(&job).is_some_and(|at| is_remembered(*at, now));
        if is_known { Withdrawn::Yes } else { Withdrawn::No }
    }

    /// Checks that the only publication about a withdrawn job is its withdrawal notice, and that no other job gets one.
    pub(super) fn check_withdrawn(&self, env: &mut Env, job: JobKey, publication: &Publication) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let (who, number) = (self.life.worker, stored.job.0);
        let is_notice = matches!(publication, Publication::FailureNotice(rejection) if rejection.reason == Reason::Withdrawn);
        if is_notice && stored.withdrawn == Withdrawn::No {
            env.ledger.fail("only its caller withdraws a job", || {
                format!("worker-{who} believes so of job {number}")
            });
        }
        let is_dead_letter =
            matches!(publication, Publication::DeadLetter { .. } | Publication::DeadReplies(_));
        if stored.withdrawn == Withdrawn::Yes && !is_notice {
            let rule = match is_dead_letter {
                true => "a withdrawn job leaves no dead letter",
                false => "a withdrawn job gets its failed reply only",
            };
            env.ledger.fail(rule, || format!("worker-{who}: job {number}: {publication:?}"));
        }
    }

    /// Checks that a pass that begins has an item that is still needed.
    pub(super) fn check_wanted(&self, env: &mut Env, pass: PassId) {
        let Some(flight) = self.passes.get(&pass) else { return };
        let is_withdrawn =
            |job: &JobKey| self.jobs.get(job).is_some_and(|stored| stored.withdrawn == Withdrawn::Yes);
        let items = &flight.order.items;
        if !items.is_empty() && items.iter().all(|(job, _)| is_withdrawn(job)) {
            let who = self.life.worker;
            env.ledger.fail("a withdrawn job starts no pass", || {
                format!("worker-{who}: the device begins pass {pass} of withdrawn jobs")
            });
        }
    }
}

/// Whether a worker still remembers a withdrawal that was not repeated.
fn is_remembered(at: Micros, now: Micros) -> bool {
    now - at <= REMEMBERED_S * SECOND
}
