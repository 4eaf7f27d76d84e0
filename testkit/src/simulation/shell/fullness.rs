//! Checks that passes are as full as possible, and that the models of a device take turns.

use std::collections::BTreeSet;

use vramq_core::action::PassOrder;
use vramq_core::device::PassShape;
use vramq_core::event::Source;
use vramq_core::ids::{ItemIndex, JobKey, ModelIndex};
use vramq_schemas::status::WorkerState;

use super::Shell;
use super::accounts::SUSPECT_AFTER;
use super::stored_job::{StoredJob, Withdrawn};
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;
use crate::simulation::ledger::Kind;

/// How much longer than a job's own model other models may have the device while the job waits, in longest passes.
const PASSES_OF_OTHERS: u64 = 4;

impl Shell {
    /// Checks that a pass has the size in its order, and that no waiting item could have joined it.
    pub(super) fn check_fullness(&self, env: &mut Env, order: &PassOrder, jobs: &[JobKey]) {
        if order.items.is_empty() {
            return;
        }
        let who = self.life.worker;
        let cost_of = |job: &JobKey, item: ItemIndex| {
            let stored = self.jobs.get(job)?;
            env.ledger.job(stored.job).spec.costs.get(item.0 as usize).map(|cost| (*cost).max(1))
        };
        let shape: PassShape = order.items.iter().filter_map(|(job, item)| cost_of(job, *item)).collect();
        if shape != order.shape {
            let pass = order.pass;
            return env.ledger.fail("a pass is of the size that it is admitted with", || {
                format!("worker-{who}: {pass} of {shape:?} instead of {:?}", order.shape)
            });
        }
        let model = &self.models[order.model.0];
        if order.shape.cost > model.pass_cost_max && order.items.len() > 1 {
            return env.ledger.fail("a pass has a cost that its model allows", || {
                format!("worker-{who}: {:?}", order.shape)
            });
        }
        // Beside other passes, memory may be kept for a reserved turn.
        let is_lone = self.passes.is_empty() && !order.exclusive && self.models.len() == 1;
        let of_pass: Vec<_> = jobs.iter().filter_map(|key| self.jobs.get(key)).collect();
        if !is_lone
            || !of_pass.iter().all(|stored| self.may_share(env, stored))
            || of_pass.len() != jobs.len()
        {
            return;
        }
        let limits = self.core.learned_limits();
        let limit_of = |longest: usize| limits.limit(&model.name, longest);
        // An item may have been refused before the pass got its longest item. For that length, more bytes are known to fit.
        let least = order.items.iter().filter_map(|(job, item)| cost_of(job, *item)).map(limit_of).min();
        let least = least.unwrap_or(u64::MAX).min(self.budget.limit());
        let left_behind = self.jobs.iter().find(|(key, stored)| {
            let next = self.next_item(order, **key, stored);
            let Some(cost) = next.and_then(|item| cost_of(key, item)) else { return false };
            let larger = shape.with(cost);
            let bytes = (model.pass_bytes)(larger);
            stored.model == order.model
                && self.may_share(env, stored)
                && larger.cost <= model.pass_cost_max
                && bytes <= least.min(limit_of(cost))
        });
        if let Some((_, stored)) = left_behind.filter(|_| self.core.status().state == WorkerState::Consuming)
        {
            let number = stored.job.0;
            let (most, of) = (model.pass_cost_max, self.budget.limit());
            env.ledger.fail("passes are as full as they can be", || {
                format!("worker-{who}: {shape:?} of {most} on {of} bytes, without an item of job {number}")
            });
        }
    }

    /// Whether a job may join any pass of its model: it continues here, without a hint or a history.
    pub(super) fn may_share(&self, env: &Env, stored: &StoredJob) -> bool {
        let Kind::Job { headers: Some(headers), .. } = &env.ledger.letter(stored.letter).kind else {
            return false;
        };
        let may_crash = headers.crashes.saturating_add(stored.returns) >= SUSPECT_AFTER;
        let is_plain =
            headers.batch_hint.is_none() && !headers.exclusive && headers.attempt == 0 && !may_crash;
        // A job that was held for long will be requeued soon, and a large one may make room for others.
        let is_fresh =
            env.now < stored.delivered_at + env.plan.job_limit && matches!(stored.source, Source::Jobs(..));
        let goes_on = stored.withdrawn == Withdrawn::No && !stored.is_cancelled && is_fresh;
        let was_hit = !stored.ran_out.is_empty() || stored.may_be_alone || stored.programs_lost > 0;
        is_plain && goes_on && stored.is_decoded && !stored.is_publishing && !was_hit
    }

    /// The first item of a job that no pass has taken, if it is prepared.
    fn next_item(&self, order: &PassOrder, key: JobKey, stored: &StoredJob) -> Option<ItemIndex> {
        let is_taken = |item: ItemIndex| {
            order.items.contains(&(key, item))
                || stored.outputs.get(item.0 as usize) == Some(&true)
                || self.passes_with(key).any(|flight| flight.order.items.contains(&(key, item)))
        };
        (stored.next..stored.prepared).map(ItemIndex).find(|item| !is_taken(*item))
    }

    /// A pass is over. Checks that jobs of other models on the same executor did not wait for more than their share of it.
    pub(super) fn check_turns_of_models(
        &mut self,
        env: &mut Env,
        model: ModelIndex,
        took: Micros,
        is_calm: bool,
    ) {
        if self.models.len() == 1 {
            return;
        }
        let before_pass = self.model_time.clone();
        self.model_time[model.0] += took;
        self.longest_pass = self.longest_pass.max(took);
        let (who, time) = (self.life.worker, self.model_time.clone());
        let most = PASSES_OF_OTHERS * self.longest_pass + SECOND / 10;
        let executor = self.models[model.0].executor;
        let waiting: BTreeSet<usize> = self
            .jobs
            .values()
            .filter(|stored| is_calm && self.waits_for_turn(env, stored))
            .map(|stored| stored.model.0)
            .filter(|own| self.models[*own].executor == executor)
            .collect();
        let models = &self.models;
        self.model_backlogs.retain(|own, _| models[*own].executor != executor || waiting.contains(own));
        let weight = |model: usize| u64::from(env.plan.sharing.model(model));
        for own in waiting {
            let before = self.model_backlogs.entry(own).or_insert_with(|| before_pass.clone());
            let (had, others) = (time[own] - before[own], time[model.0] - before[model.0]);
            // The models' clocks run by weight, and may differ by this much.
            let (of_own, of_other) = (weight(own), weight(model.0));
            if own != model.0 && others > had * of_other / of_own + most * of_other.div_ceil(of_own) {
                return env.ledger.fail("models have the device in turns", || {
                    format!(
                        "worker-{who}: jobs of model {own} wait while model {model} of weight {of_other} had {} ms, and theirs of weight \
                         {of_own} {} ms",
                        others / 1_000,
                        had / 1_000
                    )
                });
            }
        }
    }

    /// Whether a job without items in a pass could be in the next one. Large jobs, and jobs with a hint or for the whole device, may wait
    /// longer than for their model's turn.
    fn waits_for_turn(&self, env: &Env, stored: &StoredJob) -> bool {
        // Other processes may leave no memory for the pass, which waits two seconds for them.
        let model = &self.models[stored.model.0];
        let full = PassShape { items: 1, cost: model.pass_cost_max, longest: model.pass_cost_max };
        let is_short = self.budget.limit() < (model.pass_bytes)(full);
        !stored.has_started && !is_short && self.may_share(env, stored)
    }
}
