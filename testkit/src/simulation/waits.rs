//! Checks how long jobs wait for their first pass while nothing is wrong.

use super::agenda::{Micros, SECOND};
use super::ledger::{JobNumber, Ledger};
use super::record::{JobRecord, JobSpec, Nature, ReplyTo};
use super::shell::Shell;
use super::world::World;

/// How long after a fault, a lost session or the end of a process jobs may still wait because of it. A silent reply queue is avoided for
/// two minutes; then backlogs drain.
const CALM_AFTER: Micros = 180 * SECOND;

/// The longest time from the publish of a small job to its first pass. A worker gives quarantined jobs ten seconds and a pass, or twenty
/// after a turn that a program exceeded, and jobs also wait for other callers before them. In a calm history no queue is longer.
const WAIT_MAX: Micros = 35 * SECOND;

/// How long jobs may wait behind a flood in their queue, by their own or another caller.
const FLOOD_LASTS: Micros = 300 * SECOND;

/// How long a reply queue is affected after it confirmed nothing: it is avoided for up to ten minutes, and then tried by one job at a time.
const SILENCE_LASTS: Micros = 1_200 * SECOND;

/// A job of at most this part of a pass is a small one.
const SMALL: usize = 8;

impl World {
    /// Every second: notes whether the world is calm, and checks what waits.
    pub(super) fn watch_waits(&mut self) {
        let env = &self.env;
        let is_well = |shell: &Shell| shell.is_well(env.now) && !env.devices[shell.device()].is_hanging();
        let are_all_well = self.workers.iter().all(|worker| worker.as_ref().is_some_and(is_well));
        if env.faults_now > 0 || !are_all_well {
            self.env.disturbed();
        }
        let since = self.env.disturbed_at + CALM_AFTER;
        if self.env.now > since {
            let costs: Vec<_> =
                self.env.plan.models.iter().map(|model| model.pass_cost_max / SMALL).collect();
            self.env.ledger.check_waits(since, WAIT_MAX, &costs);
        }
    }
}

impl Ledger {
    /// A job's first item, or its next ones, are in a pass.
    pub fn started(&mut self, job: JobNumber) {
        self.unstarted.remove(&job);
    }

    /// A queue of a model is flooded now: for a while jobs wait in it behind the flood.
    pub fn flooded(&mut self, model: usize, queue: usize) {
        self.flooded.insert((model, queue), self.now);
    }

    /// A caller's reply queue confirms nothing.
    pub fn fell_silent(&mut self, caller: usize) {
        self.silent.insert(caller, self.now);
    }

    /// The reply queue of a job is held off, because it confirmed nothing.
    pub fn is_silent(&self, job: JobNumber) -> bool {
        self.is_silent_for(self.job(job).spec.reply_to)
    }

    fn is_silent_for(&self, reply_to: ReplyTo) -> bool {
        let ReplyTo::Caller(caller) = reply_to else { return false };
        self.silent.get(&caller).is_some_and(|at| self.now < at + SILENCE_LASTS)
    }

    /// Whether something that happened to the job, or to jobs before it, explains that it waits.
    fn waits_for_others(&self, job: &JobRecord) -> bool {
        // Reasons: copies with the same bytes cannot be told apart; a store may not answer; a job with forged headers may belong to the
        // quarantine; and earlier events may make the job wait.
        let JobSpec { headers, model, queue, reply_to, refers, moves, revision, .. } = &job.spec;
        let flooded_at = self.flooded.get(&(*model, *queue));
        let is_in_flood = flooded_at.is_some_and(|at| job.published_at < at + FLOOD_LASTS);
        let is_sent_on = *moves || revision.is_some() || self.is_silent_for(*reply_to);
        let is_forged = headers.exclusive || headers.crashes > 0 || headers.attempt > 0;
        let was_hit = job.excuses.repeats > 0 || job.excuses.replies_refused || job.is_withdrawn;
        let is_partial = job.copies > 1 || headers.items_done > 0;
        is_partial || *refers || is_forged || was_hit || is_in_flood || is_sent_on
    }

    /// Checks that no small job published since `since` has waited longer than `most` for its first pass. `costs`: for each model, the
    /// largest cost of a small job.
    fn check_waits(&mut self, since: Micros, most: Micros, costs: &[usize]) {
        let now = self.now;
        let is_small = |job: &JobRecord| {
            let spec = &job.spec;
            let cost: usize = spec.costs.iter().sum();
            spec.nature == Nature::Good && spec.hunger_tenths == 10 && cost <= costs[spec.model]
        };
        let late = self.unstarted.iter().map(|job| (*job, self.job(*job))).find(|(_, job)| {
            let waited = now - job.published_at;
            job.published_at >= since && waited > most && is_small(job) && !self.waits_for_others(job)
        });
        if let Some((JobNumber(job), record)) = late {
            let seconds = (now - record.published_at) / SECOND;
            self.fail("a small job starts soon while all is well", || {
                format!("job {job} has waited for {seconds} s")
            });
        }
    }
}
