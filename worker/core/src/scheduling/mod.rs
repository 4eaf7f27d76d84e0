//! Decides which pass starts next. Jobs with prepared items and ends of passes come in; passes with admitted memory go out. Owns a batcher
//! for each model, the passes in flight with their permits, and the device time of each model.

mod batcher;
mod draft;
mod fair_queue;
mod flow;
mod in_flight;
mod pace;
mod pass_memory;
#[cfg(test)]
mod test_jobs;
mod turns;
mod waiting_jobs;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use batcher::Batcher;
pub(crate) use draft::{Caller, Waiting};
use draft::{Draft, PassLimits};
pub(crate) use in_flight::{InFlight, PassJob};
use pace::Pace;
pub(crate) use turns::Turn;
use turns::Turns;

use crate::action::PassOrder;
use crate::admission::Budget;
use crate::ids::{ExecutorIndex, JobKey, ModelIndex, PassId};
use crate::settings::{ExecutorFacts, ModelFacts};
use crate::sizes::Size;

/// One executor's state.
#[derive(Clone, Copy, Debug)]
struct Executor {
    facts: ExecutorFacts,
    /// Failed passes that the core knows of.
    failures_known: u64,
    /// Passes in flight that this session made.
    passes: usize,
    /// A pass failed or was skipped, and passes that were made before may still be in flight. Their items go first when they come back.
    failed_since_idle: bool,
    /// When the pass behind the running one is formed.
    next_due: Option<Instant>,
}

/// The passes of a worker.
#[derive(Debug)]
pub(crate) struct Scheduler {
    batchers: Vec<Batcher>,
    /// For each model: seconds of device time that count against the other models, divided by its configured share.
    device_time: Vec<f64>,
    /// The device time of the model whose pass started last, at that start.
    clock: f64,
    executors: Vec<Executor>,
    /// For each model: whether no process can run it.
    unavailable: Vec<bool>,
    budget: Budget,
    in_flight: HashMap<PassId, InFlight>,
    next_pass: u64,
    /// Passes up to this one were made in sessions that are over.
    passes_before: u64,
    /// When items began to wait for memory.
    blocked_since: Option<Instant>,
    turns: Turns,
    /// Whether the device may be sick.
    is_doubtful: bool,
    paces: Vec<Pace>,
    /// When a pass will be formed that is delayed so that arriving jobs can join it.
    next_round: Option<Instant>,
}

/// A pass that starts.
#[derive(Debug)]
pub(crate) struct StartedPass {
    /// For its executor.
    pub(crate) order: PassOrder,
    /// Bytes of the budget that it holds.
    pub(crate) bytes: u64,
    /// For how long items had waited for memory, if this pass has ended their wait.
    pub(crate) blocked: Option<Duration>,
}

impl Scheduler {
    pub(crate) fn new(models: &[ModelFacts], executors: &[ExecutorFacts], budget: Budget) -> Self {
        let executor = |facts: &ExecutorFacts| Executor {
            facts: *facts,
            failures_known: 0,
            passes: 0,
            failed_since_idle: false,
            next_due: None,
        };
        Self {
            batchers: batchers(models),
            device_time: vec![0.0; models.len()],
            clock: 0.0,
            executors: executors.iter().map(executor).collect(),
            unavailable: vec![false; models.len()],
            budget,
            in_flight: HashMap::new(),
            next_pass: 0,
            passes_before: 0,
            blocked_since: None,
            turns: Turns::default(),
            is_doubtful: false,
            paces: vec![Pace::default(); models.len()],
            next_round: None,
        }
    }

    /// The session is over: its waiting items are gone. Passes in flight keep their permits until they end.
    pub(crate) fn session_closed(&mut self, models: &[ModelFacts]) {
        self.batchers = batchers(models);
        self.passes_before = self.next_pass;
        for executor in &mut self.executors {
            (executor.passes, executor.failed_since_idle, executor.next_due) = (0, false, None);
        }
        (self.blocked_since, self.next_round) = (None, None);
        self.turns.session_closed();
    }

    /// Passes in flight that this session made.
    pub(crate) fn passes(&self) -> usize {
        self.executors.iter().map(|executor| executor.passes).sum()
    }

    /// The same of one executor.
    pub(crate) fn passes_on(&self, executor: ExecutorIndex) -> usize {
        self.executors[executor.0].passes
    }

    /// Whether the device may be sick: then executors that are probed start no passes of jobs.
    pub(crate) fn set_doubtful(&mut self, is_doubtful: bool) {
        self.is_doubtful = is_doubtful;
    }

    pub(crate) fn in_flight(&self, pass: PassId) -> Option<&InFlight> {
        self.in_flight.get(&pass)
    }

    /// The passes in flight with items of this job whose other jobs all satisfy `are_others`, oldest first.
    pub(crate) fn passes_of(&self, job: JobKey, are_others: impl Fn(JobKey) -> bool) -> Vec<PassId> {
        let is_one = |pass: &InFlight| {
            let jobs = pass.jobs();
            jobs.contains(&job) && jobs.into_iter().all(|other| other == job || are_others(other))
        };
        let mut passes: Vec<_> =
            self.in_flight.iter().filter(|(_, pass)| is_one(pass)).map(|(id, _)| *id).collect();
        passes.sort_unstable();
        passes
    }

    /// The passes in flight that are no probes, oldest first.
    pub(crate) fn job_passes(&self) -> Vec<(PassId, ModelIndex)> {
        let passes = self.in_flight.iter().filter(|(_, pass)| !pass.is_probe());
        let mut passes: Vec<_> = passes.map(|(id, pass)| (*id, pass.model)).collect();
        passes.sort_unstable_by_key(|(id, _)| *id);
        passes
    }

    pub(crate) fn set_budget(&self, bytes: u64) {
        self.budget.set_limit(bytes);
    }

    /// Lowers the budget to so many bytes if it is larger.
    pub(crate) fn lower_budget(&self, bytes: u64) {
        self.budget.set_limit(self.budget.limit().min(bytes));
    }

    /// Prepares for starting passes; then [`next_turn`](Self::next_turn) names them one by one.
    pub(crate) fn begin_round(&mut self) {
        for executor in &mut self.executors {
            executor.failed_since_idle &= executor.passes > 0;
        }
        let (batchers, unavailable) = (&self.batchers, &self.unavailable);
        self.turns.begin_round(|turn| {
            !unavailable[turn.model.0] && batchers[turn.model.0].first(turn.lead).is_some()
        });
    }

    /// The model whose pass starts next, and the first job of the pass. Of the models that may start one, it is the model with the least
    /// device time by its share. A refused turn is tried again in the next round.
    pub(crate) fn next_turn(&self, models: &[ModelFacts], now: Instant) -> Option<(Turn, JobKey)> {
        let may_start = |at: &usize| {
            let (batcher, executor) = (&self.batchers[*at], &self.executors[models[*at].executor.0]);
            let is_worth_it = executor.passes == 0
                || !executor.facts.is_serial
                || self.may_queue(models[*at].executor, models, now);
            let has_room = executor.passes < executor.facts.passes_max && !executor.failed_since_idle;
            let is_held = self.is_doubtful && executor.facts.is_probed();
            batcher.waiting() > 0 && !self.unavailable[*at] && !is_held && has_room && is_worth_it
        };
        let reserved =
            self.turns.reserved().filter(|turn| may_start(&turn.model.0) && self.turns.is_open(*turn));
        let first_of = |turn: Turn| Some((turn, self.batchers[turn.model.0].first(turn.lead)?));
        let of_reserved = reserved.and_then(first_of);
        if of_reserved.is_some() {
            return of_reserved;
        }
        let turn_of = |at: usize| {
            let (model, batcher) = (ModelIndex(at), &self.batchers[at]);
            let mut turns = batcher.leads().map(|lead| Turn { model, lead });
            let turn = turns.find(|turn| self.turns.is_open(*turn))?;
            Some((turn, batcher.first(turn.lead)?))
        };
        let candidates = (0..self.batchers.len()).filter(may_start).filter_map(turn_of);
        let device_time = |(turn, _): &(Turn, JobKey)| self.device_time[turn.model.0];
        candidates.min_by(|a, b| device_time(a).total_cmp(&device_time(b)))
    }

    /// Whether a pass may be queued behind the one that a serial executor runs. Not long before it is needed, because more items may join
    /// it, and only while some model fills a pass. Then a pass of any model may be queued, so that a model with few jobs gets its turns
    /// beside a model with full passes.
    fn may_queue(&self, executor: ExecutorIndex, models: &[ModelFacts], now: Instant) -> bool {
        let is_due = self.executors[executor.0].next_due.is_none_or(|due| due <= now);
        let fills_a_pass = |(at, model): (usize, &ModelFacts)| {
            model.executor == executor && !self.unavailable[at] && self.batchers[at].has_full_pass()
        };
        is_due && models.iter().enumerate().any(fills_a_pass)
    }

    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let waiting = self.batchers.iter().map(Batcher::waiting).sum();
        [Size::of("jobs that wait for passes", waiting, unacked), self.turns.size(self.batchers.len())]
    }

    fn has_waiting(&self) -> bool {
        self.batchers.iter().any(|batcher| batcher.waiting() > 0)
    }

    /// A health probe of a model; `None` while passes hold too much memory.
    pub(crate) fn probe(&self, index: ModelIndex, model: &ModelFacts, now: Instant) -> Option<InFlight> {
        let bytes = (model.pass_bytes)(model.probe);
        let permit = self.budget.try_acquire(bytes).or_else(|| self.budget.try_acquire_all())?;
        let draft = Draft { items: Vec::new(), shape: model.probe, exclusive: false };
        Some(InFlight::new(index, model.executor, draft, permit, now))
    }

    /// Records that a pass starts.
    pub(crate) fn start(
        &mut self,
        mut pass: InFlight,
        model: &ModelFacts,
        jobs: Vec<PassJob>,
        now: Instant,
    ) -> StartedPass {
        self.next_pass += 1;
        let id = PassId(self.next_pass);
        if !pass.is_probe() {
            self.clock = self.clock.max(self.device_time[pass.model.0]);
        }
        pass.set_jobs(jobs);
        let is_serial = self.executors[model.executor.0].facts.is_serial;
        // Passes of one serial executor never hold memory at the same time.
        let overlaps = |other: &InFlight| !is_serial || other.executor() != model.executor;
        for other in self.in_flight.values_mut().filter(|other| overlaps(other)) {
            (other.overlapped, pass.overlapped) = (true, true);
        }
        let executor = &mut self.executors[model.executor.0];
        executor.passes += 1;
        let order = PassOrder {
            pass: id,
            model: pass.model,
            items: pass.items.iter().map(|(job, index, _)| (*job, *index)).collect(),
            shape: pass.shape,
            exclusive: pass.exclusive,
            failures_known: executor.failures_known,
        };
        let (bytes, is_first) = (pass.bytes(), executor.passes == 1);
        self.in_flight.insert(id, pass);
        if is_first {
            self.next_begins(model.executor, now);
        }
        StartedPass { order, bytes, blocked: self.unblocked(now) }
    }

    /// The executor begins its next pass, if it has one.
    fn next_begins(&mut self, executor: ExecutorIndex, now: Instant) {
        let is_of_it =
            |(id, pass): &(&PassId, &InFlight)| id.0 > self.passes_before && pass.executor() == executor;
        let next = self.in_flight.iter().filter(is_of_it).min_by_key(|(id, _)| **id);
        let due = next.map(|(_, pass)| now + self.paces[pass.model.0].next_after(pass.shape.cost));
        self.executors[executor.0].next_due = due;
    }

    /// A pass of a model ended well. Learns from its time how long others take.
    pub(crate) fn learn_pace(&mut self, model: ModelIndex, cost: usize, cost_max: usize, took: Duration) {
        self.paces[model.0].pass_took(cost, cost_max, took);
    }

    /// When a delayed pass can be formed, if one is delayed.
    pub(crate) fn next_round(&self) -> Option<Instant> {
        self.next_round
    }

    /// The shell has called the core. If the delay is over, the next pass starts when no other event waits.
    pub(crate) fn round_is_due(&mut self, now: Instant) {
        self.next_round.take_if(|at| *at <= now);
    }

    /// A pass has ended and its memory is free. Returns it, and whether this session made it.
    pub(crate) fn end_pass(
        &mut self,
        pass: PassId,
        models: &[ModelFacts],
        failures: u64,
        took: Duration,
        now: Instant,
    ) -> Option<(InFlight, bool)> {
        let ended = self.in_flight.remove(&pass)?;
        let model = &models[ended.model.0];
        let executor = &mut self.executors[model.executor.0];
        executor.failures_known = executor.failures_known.max(failures);
        let is_ours = pass.0 > self.passes_before;
        if is_ours {
            executor.passes -= 1;
            if !ended.is_probe() {
                self.turns.pass_took(ended.model, took);
            }
            self.device_time[ended.model.0] += took.as_secs_f64() / f64::from(model.share.get());
            self.next_begins(model.executor, now);
        }
        Some((ended, is_ours))
    }

    /// A pass of a model's executor failed or was skipped. A serial executor starts no new pass until the passes in flight have ended.
    pub(crate) fn failed(&mut self, model: &ModelFacts) {
        let executor = &mut self.executors[model.executor.0];
        executor.failed_since_idle |= executor.facts.is_serial;
    }

    pub(crate) fn is_probed(&self, model: &ModelFacts) -> bool {
        self.executors[model.executor.0].facts.is_probed()
    }

    /// Sets whether passes of a model may start: not while no process can run it.
    pub(crate) fn set_available(&mut self, model: ModelIndex, available: bool) {
        self.unavailable[model.0] = !available;
    }

    pub(crate) fn is_available(&self, model: ModelIndex) -> bool {
        !self.unavailable[model.0]
    }

    /// No more passes start in this round. If no items wait for memory any more, returns how long some did.
    pub(crate) fn end_round(&mut self, now: Instant) -> Option<Duration> {
        if self.turns.is_any_refused() && self.passes() == 0 {
            self.blocked_since.get_or_insert(now);
        }
        let has_room = |executor: &&Executor| {
            executor.facts.is_serial && (1..executor.facts.passes_max).contains(&executor.passes)
        };
        let due = self.executors.iter().filter(has_room).filter_map(|executor| executor.next_due);
        self.next_round = due.filter(|due| *due > now && self.has_waiting()).min();
        if self.has_waiting() { None } else { self.unblocked(now) }
    }

    /// No items wait for memory any more. Returns how long some did.
    pub(crate) fn unblocked(&mut self, now: Instant) -> Option<Duration> {
        let since = self.blocked_since.take()?;
        Some(now.saturating_duration_since(since))
    }
}

fn batchers(models: &[ModelFacts]) -> Vec<Batcher> {
    let batcher = |model: &ModelFacts| {
        let weights = model.queues.iter().map(|queue| queue.weight);
        Batcher::new(PassLimits { cost_max: model.pass_cost_max }, weights)
    };
    models.iter().map(batcher).collect()
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
