//! Checks that queues of a model, and callers of a queue, get their shares of its passes, and that the queues have consumers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use vramq_core::action::{JobQueue, PassOrder};
use vramq_core::device::PassShape;
use vramq_core::ids::{JobKey, ModelIndex, QueueIndex};
use vramq_schemas::status::WorkerState;

use super::Shell;
use super::stored_job::StoredJob;
use crate::simulation::env::Env;

/// How much more than a waiting caller of its queue another caller may get of a model, in full passes: four that the waiting one owes for
/// earlier passes, and those that are formed while a job of it is read.
const PASSES_OF_A_CALLER: u64 = 8;

/// The same for a queue, for each unit of its weight and the other's. The queues' virtual times may differ by an item, which counts for at
/// most four passes, and passes are formed ahead.
const PASSES_OF_A_QUEUE: u64 = 6;

/// Within so many seconds a queue with waiting jobs must be consumed. Workers check for a lost queue every ten seconds.
const CONSUMED_WITHIN: u32 = 25;

/// Seconds of a queue's turn where a model has fewer slots than queues.
const TURN: u32 = 10;

/// The index of the queue, and the caller.
type Party = (usize, Option<Arc<str>>);

/// The cost of each party's share of a model's passes.
type Had = BTreeMap<Party, u64>;

/// The passes' costs by queue and caller.
#[derive(Debug, Default)]
pub(super) struct Shares {
    /// By model.
    had: BTreeMap<usize, Had>,
    /// The same at the moment when each waiting job arrived.
    before: BTreeMap<JobKey, Had>,
    /// The same at the moment when the current backlog of a queue began, by model and index.
    backlogs: BTreeMap<(usize, usize), Had>,
    /// Further queues that the worker says it cannot consume, by model and place.
    missing: BTreeSet<(usize, usize)>,
    /// Whether one was missing. As after a lost session, jobs may then come back without a crash.
    has_missed: bool,
    /// Seconds in a row in which jobs waited in a queue that is not consumed, by model and place.
    unserved: BTreeMap<(usize, usize), u32>,
}

impl Shares {
    pub(super) fn session_ended(&mut self) {
        *self = Self::default();
    }

    /// A further queue was lost in this session.
    pub(super) fn has_missed(&self) -> bool {
        self.has_missed
    }

    /// The worker says whether it can consume a further queue.
    pub(super) fn told_missing(&mut self, model: ModelIndex, queue: QueueIndex, is_missing: bool) {
        let queue = (model.0, queue.0);
        if is_missing {
            self.missing.insert(queue);
            self.has_missed = true;
        } else {
            self.missing.remove(&queue);
        }
    }
}

impl Shell {
    fn party_of(env: &Env, stored: &StoredJob) -> Party {
        let spec = &env.ledger.job(stored.job).spec;
        (spec.queue, spec.identity.clone())
    }

    /// A pass starts. Checks that since each job began to wait, queues got passes by weight and callers of a queue equally.
    pub(super) fn check_shares(&mut self, env: &mut Env, order: &PassOrder, jobs: &[JobKey]) {
        let (at, model) = (order.model.0, &self.models[order.model.0]);
        let full = u64::try_from(model.pass_cost_max).unwrap_or(u64::MAX);
        for (job, item) in &order.items {
            let Some(stored) = self.jobs.get(job) else { continue };
            let costs = &env.ledger.job(stored.job).spec.costs;
            let cost = costs.get(item.0 as usize).map_or(1, |cost| (*cost).max(1) as u64);
            let party = Self::party_of(env, stored);
            *self.shares.had.entry(at).or_default().entry(party).or_default() += cost.min(full);
        }
        let largest = PassShape { items: 1, cost: model.pass_cost_max, longest: model.pass_cost_max };
        let is_short = self.budget.limit() < (model.pass_bytes)(largest);
        let waits = |key: &JobKey, stored: &StoredJob| {
            let spec = &env.ledger.job(stored.job).spec;
            let is_small = spec.costs.iter().all(|cost| *cost <= model.pass_cost_max / 8);
            stored.model == order.model
                && !stored.has_started
                && is_small
                && self.may_share(env, stored)
                && !jobs.contains(key)
        };
        let waiting: Vec<(JobKey, Party)> = self
            .jobs
            .iter()
            .filter(|(key, stored)| !is_short && waits(key, stored))
            .map(|(key, stored)| (*key, Self::party_of(env, stored)))
            .collect();
        let is_of_model = |key: &JobKey| self.jobs.get(key).is_some_and(|stored| stored.model == order.model);
        self.shares
            .before
            .retain(|key, _| !is_of_model(key) || waiting.iter().any(|(other, _)| other == key));
        self.shares.before.retain(|key, _| self.jobs.contains_key(key));
        let queues: BTreeSet<usize> = waiting.iter().map(|(_, party)| party.0).collect();
        self.shares.backlogs.retain(|(model, queue), _| *model != at || queues.contains(queue));
        let Some(had) = self.shares.had.get(&at) else { return };
        let (who, weights) = (self.life.worker, env.plan.sharing.queues(at).to_vec());
        for (key, own) in waiting {
            let before = self.shares.before.entry(key).or_insert_with(|| had.clone());
            if let Some(text) = wrong_caller(had, before, &own, full) {
                let number = self.jobs[&key].job.0;
                return env.ledger.fail("callers of a queue have equal shares", || {
                    format!("worker-{who}: job {number} of {own:?} waits: {text}")
                });
            }
        }
        for queue in queues {
            let before = self.shares.backlogs.entry((at, queue)).or_insert_with(|| had.clone());
            if let Some(text) = wrong_queue(had, before, queue, &weights, full) {
                return env.ledger.fail("queues of a model have its passes by weight", || {
                    format!("worker-{who}: jobs of queue {queue} wait: {text}")
                });
            }
        }
    }

    /// Every second: checks that each queue with waiting jobs is consumed, or waits for its turn.
    pub(super) fn check_queues(&mut self, env: &mut Env) {
        let (who, status) = (self.life.worker, self.core.status());
        // A pass that hangs keeps its slots.
        let is_hanging = env.devices[self.device].is_hanging();
        let is_well = status.state == WorkerState::Consuming && env.faults_now == 0 && !is_hanging;
        for (at, told) in status.models.iter().enumerate() {
            let weights = env.plan.sharing.queues(at);
            if weights.len() == 1 {
                continue;
            }
            let total: u32 = weights.iter().sum();
            // Up to two slots may be reserved for large jobs, and a single slot serves large and other jobs in turns.
            let has_turns = usize::from(told.slots) < weights.len() + 2;
            for (queue, weight) in weights.iter().enumerate() {
                let name = env.names.models[at].queue(queue);
                let is_told = self.shares.missing.contains(&(at, queue));
                let waits = env.broker.queue(name).is_some_and(|counts| counts.ready > 0 || is_told);
                let is_served = self.serves(ModelIndex(at), QueueIndex(queue));
                let seconds = self.shares.unserved.entry((at, queue)).or_default();
                *seconds = if is_well && told.slots > 0 && waits && !is_served { *seconds + 1 } else { 0 };
                let turns = if has_turns { 3 * TURN * total.div_ceil(*weight) } else { 0 };
                if *seconds > CONSUMED_WITHIN + turns {
                    let (slots, seconds) = (told.slots, *seconds);
                    return env.ledger.fail("a queue in which jobs wait is consumed", || {
                        format!("worker-{who}: queue {queue} of model {at} is not, for {seconds} s, with {slots} slots")
                    });
                }
            }
        }
    }

    /// A worker consumes a queue, or holds jobs from it.
    fn serves(&self, model: ModelIndex, queue: QueueIndex) -> bool {
        let mut leases = self.session.iter().flat_map(|session| &session.leases);
        let is_leased = leases
            .any(|lease| lease.model == model && lease.queue == JobQueue::Jobs(queue) && !lease.is_stopping);
        let is_of = |stored: &StoredJob| stored.source.queue() == Some(JobQueue::Jobs(queue));
        is_leased || self.jobs.values().any(|stored| stored.model == model && is_of(stored))
    }

    /// Every queue has a consumer, if there are slots for all.
    pub(super) fn consumes_all(&self, env: &Env) -> bool {
        let Some(session) = &self.session else { return false };
        let status = self.core.status();
        let is_consumed = |model: usize| {
            let mut channels = session.channels.live().filter(|channel| channel.id.model.0 == model);
            let has_consumer =
                |channel: &super::channels::JobChannel| !env.broker.consumer_tags(channel.wire).is_empty();
            let queues = self.models[model].queues.len();
            match usize::from(status.models[model].slots) >= queues + 2 {
                true => channels.all(has_consumer),
                false => channels.any(has_consumer),
            }
        };
        (0..self.models.len()).all(is_consumed)
    }
}

/// Which other caller of the queue got too much since a job of `own` began to wait, if any.
fn wrong_caller(had: &Had, before: &Had, own: &Party, full: u64) -> Option<String> {
    let own_had = had.get(own).map_or(0, |now| since(before, own, *now));
    had.iter().filter(|(party, _)| party.0 == own.0).find_map(|(party, now)| {
        let theirs = since(before, party, *now);
        let is_wrong = theirs > own_had + PASSES_OF_A_CALLER * full;
        is_wrong
            .then(|| format!("{party:?} had {theirs}, and its own caller {own_had}; a full pass is {full}"))
    })
}

/// Which other queue got too much since jobs of the queue `own` began to wait, if any.
fn wrong_queue(had: &Had, before: &Had, own: usize, weights: &[u32], full: u64) -> Option<String> {
    let mut of_queues = vec![0; weights.len()];
    for (party, now) in had {
        of_queues[party.0] += since(before, party, *now);
    }
    let weight = |queue: usize| u64::from(weights[queue]);
    let most = PASSES_OF_A_QUEUE * full * PASSES_SCALE;
    let by_weight = |queue: usize| of_queues[queue] * PASSES_SCALE / weight(queue);
    let is_wrong =
        |queue: &usize| by_weight(*queue) > by_weight(own) + most / weight(own) + most / weight(*queue);
    let queue = (0..weights.len()).find(is_wrong)?;
    Some(format!("queue {queue} had {}, and this one {}; {weights:?}", of_queues[queue], of_queues[own]))
}

/// What a party had since then.
fn since(before: &Had, party: &Party, now: u64) -> u64 {
    now - before.get(party).copied().unwrap_or(0)
}

/// Scales costs so that dividing them by weights loses nothing.
const PASSES_SCALE: u64 = 1_000;
