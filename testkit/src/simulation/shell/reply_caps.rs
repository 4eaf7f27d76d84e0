//! Checks the cap on a job's replies. A job of which it is known when it is read that its replies cannot hold all outputs never runs. How
//! much a program answers is not known before, so a job of one runs, and its replies end at the cap.

use vramq_core::action::{PassOrder, Run};
use vramq_core::ids::JobKey;

use super::stored_job::StoredJob;
use super::{Sabotage, Shell};
use crate::simulation::env::Env;

impl Shell {
    /// Whether the replies of a job cannot hold all outputs, and that is known when it is read.
    fn is_known_above_cap(&self, env: &Env, stored: &StoredJob) -> bool {
        let is_program = !self.executors[self.models[stored.model.0].executor.0].is_serial();
        let items_done = self.headers_of(env, stored).items_done;
        !is_program && env.ledger.job(stored.job).spec.is_above_cap(items_done)
    }

    /// Whether a job that is read is rejected for its cap.
    pub(super) fn is_rejected_for_cap(&self, env: &Env, stored: &StoredJob) -> bool {
        self.sabotage != Some(Sabotage::ReplyCapNotRead) && self.is_known_above_cap(env, stored)
    }

    pub(super) fn check_caps(&self, env: &mut Env, order: &PassOrder) {
        let jobs = || order.items.iter().filter_map(|(job, _)| self.jobs.get(job));
        if let Some(stored) = jobs().find(|stored| self.is_known_above_cap(env, stored)) {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("a job above the cap on its replies starts no pass", || {
                format!("worker-{who}: job {number}")
            });
        }
    }

    /// The replies of an attempt hold no more outputs than they may.
    pub(super) fn check_cap_of_reply(&self, env: &mut Env, job: JobKey, run: &Run) {
        let Some(stored) = self.jobs.get(&job) else { return };
        let most = env.ledger.job(stored.job).spec.outputs_max;
        let outputs = (run.offset + run.items).saturating_sub(self.headers_of(env, stored).items_done);
        if most.is_some_and(|most| outputs > most) {
            let (who, number) = (self.life.worker, stored.job.0);
            env.ledger.fail("replies hold no more than the cap allows", || {
                format!("worker-{who}: job {number}: {outputs} outputs of {most:?}")
            });
        }
    }
}
