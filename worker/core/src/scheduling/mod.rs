//! Passes: which items run next, with how much memory, and what is in flight.

mod batcher;
mod draft;
mod in_flight;
mod lanes;
mod turns;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use batcher::Batcher;
pub(crate) use draft::{Caller, Waiting};
use draft::{Draft, PassLimits};
pub(crate) use in_flight::{InFlight, PassJob};
pub(crate) use turns::Turn;
use turns::{Holder, Turns};

use crate::action::PassOrder;
use crate::admission::{Budget, Permit};
use crate::device::PassShape;
use crate::ids::{JobKey, ModelIndex, PassId};
use crate::learned_limits::LearnedLimits;
use crate::settings::{ExecutorFacts, ModelFacts};
use crate::sizes::Size;

/// One executor's state.
#[derive(Clone, Copy, Debug)]
struct Executor {
    facts: ExecutorFacts,
    /// Failed passes that the core has heard of.
    failures_known: u64,
    /// Passes in flight that this session made.
    passes: usize,
    /// A pass failed or was skipped, and others may be in flight that were made before that was known: their items go first.
    failed_since_idle: bool,
}

/// The passes of a worker.
#[derive(Debug)]
pub(crate) struct Scheduler {
    batchers: Vec<Batcher>,
    /// Of each model: seconds of the device that it has had, by its configured share, as far as they count against the others.
    device_time: Vec<f64>,
    /// That of the model whose pass started last, when it did.
    clock: f64,
    executors: Vec<Executor>,
    /// Of each model: it cannot be loaded.
    unavailable: Vec<bool>,
    budget: Budget,
    in_flight: HashMap<PassId, InFlight>,
    next_pass: u64,
    /// Passes up to this one were made in sessions that are over.
    passes_before: u64,
    /// Since when items wait for memory.
    blocked_since: Option<Instant>,
    turns: Turns,
}

impl Scheduler {
    pub(crate) fn new(models: &[ModelFacts], executors: &[ExecutorFacts], budget: Budget) -> Self {
        let executor = |facts: &ExecutorFacts| Executor {
            facts: *facts,
            failures_known: 0,
            passes: 0,
            failed_since_idle: false,
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
        }
    }

    /// The session is over: its waiting items are gone. Passes in flight keep their permits until they end.
    pub(crate) fn session_closed(&mut self, models: &[ModelFacts]) {
        self.batchers = batchers(models);
        self.passes_before = self.next_pass;
        for executor in &mut self.executors {
            (executor.passes, executor.failed_since_idle) = (0, false);
        }
        self.blocked_since = None;
        self.turns.session_closed();
    }

    pub(crate) fn batcher(&self, model: ModelIndex) -> &Batcher {
        &self.batchers[model.0]
    }

    pub(crate) fn batcher_mut(&mut self, model: ModelIndex) -> &mut Batcher {
        &mut self.batchers[model.0]
    }

    pub(crate) fn push(&mut self, model: ModelIndex, job: Waiting) {
        self.forget_claim(model);
        self.batchers[model.0].push(job);
    }

    /// More items of a job were prepared.
    pub(crate) fn extend(&mut self, model: ModelIndex, job: Waiting) {
        self.forget_claim(model);
        self.batchers[model.0].extend(job);
    }

    /// A model that had nothing to run has no claim on the time that others had meanwhile, also not where they have nothing that
    /// waits at this moment.
    fn forget_claim(&mut self, model: ModelIndex) {
        if self.batchers[model.0].waiting() == 0 {
            let busy = (0..self.batchers.len()).filter(|other| self.batchers[*other].waiting() > 0);
            let least = busy.map(|other| self.device_time[other]).min_by(f64::total_cmp);
            let own = &mut self.device_time[model.0];
            *own = own.max(least.unwrap_or(self.clock));
        }
    }

    /// The jobs that wait with more than a pass can take.
    pub(crate) fn large(&self) -> Vec<JobKey> {
        self.batchers.iter().flat_map(Batcher::large).collect()
    }

    /// Passes in flight that this session made.
    pub(crate) fn passes(&self) -> usize {
        self.executors.iter().map(|executor| executor.passes).sum()
    }

    pub(crate) fn in_flight(&self, pass: PassId) -> Option<&InFlight> {
        self.in_flight.get(&pass)
    }

    /// The passes in flight with items of this job whose other jobs are all like that; in the order in which they were made.
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

    pub(crate) fn set_budget(&self, bytes: u64) {
        self.budget.set_limit(bytes);
    }

    /// Passes are about to start: [`next_turn`](Self::next_turn) names them one by one.
    pub(crate) fn begin_round(&mut self) {
        for executor in &mut self.executors {
            executor.failed_since_idle &= executor.passes > 0;
        }
        let (batchers, unavailable) = (&self.batchers, &self.unavailable);
        self.turns.begin_round(|turn| {
            !unavailable[turn.model.0] && batchers[turn.model.0].first(turn.lead).is_some()
        });
    }

    /// Whose pass starts next, and its first job: of the models that may have one, that which has had the device for the shortest
    /// time by its share. A turn that was refused comes again in the next round.
    pub(crate) fn next_turn(&self, models: &[ModelFacts]) -> Option<(Turn, JobKey)> {
        let has_full_pass = |executor: usize| {
            let mut batchers = self.batchers.iter().enumerate();
            batchers.any(|(at, batcher)| {
                models[at].executor == executor && !self.unavailable[at] && batcher.has_full_pass()
            })
        };
        let may_start = |at: &usize| {
            let (batcher, executor) = (&self.batchers[*at], &self.executors[models[*at].executor]);
            // Behind a pass that runs none is queued but where a model has a full one: more items may still join it. Where a model
            // has, the others have their turns too, or they would wait for as long as it has.
            let is_worth_it =
                executor.passes == 0 || !executor.facts.is_serial || has_full_pass(models[*at].executor);
            let has_room = executor.passes < executor.facts.passes_max && !executor.failed_since_idle;
            batcher.waiting() > 0 && !self.unavailable[*at] && has_room && is_worth_it
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

    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let waiting = self.batchers.iter().map(Batcher::waiting).sum();
        [Size::of("jobs that wait for passes", waiting, unacked), self.turns.size(self.batchers.len())]
    }

    fn has_waiting(&self) -> bool {
        self.batchers.iter().any(|batcher| batcher.waiting() > 0)
    }

    /// The pass of a turn with its permit, if the device has the memory. `budget_max`: the budget while no other process holds
    /// anything.
    pub(crate) fn admit(
        &mut self,
        turn: Turn,
        model: &ModelFacts,
        limits: &LearnedLimits,
        budget_max: u64,
        now: Instant,
    ) -> Option<Box<InFlight>> {
        match self.form(turn, model, limits, budget_max, now) {
            Ok((draft, permit)) => {
                self.turns.started(turn);
                Some(Box::new(InFlight::new(turn.model, model.executor, draft, permit, now)))
            }
            Err(holder) => {
                self.turns.refused(turn, holder, self.in_flight.keys().copied());
                None
            }
        }
    }

    /// Forms the pass of a turn, unless somebody holds the memory that it needs.
    fn form(
        &mut self,
        turn: Turn,
        model: &ModelFacts,
        limits: &LearnedLimits,
        budget_max: u64,
        now: Instant,
    ) -> Result<(Draft, Permit), Holder> {
        let batcher = &mut self.batchers[turn.model.0];
        let (first, exclusive) = batcher.first_shape(turn.lead).ok_or(Holder::Processes)?;
        let (first_bytes, limit) = ((model.pass_bytes)(first), self.budget.limit());
        // What other processes hold may come back within moments; until then the pass would only run out of memory.
        if first_bytes <= limit {
            self.turns.is_not_short(turn);
        } else if !exclusive && first_bytes <= budget_max && self.turns.waits_for_processes(turn, now) {
            return Err(Holder::Processes);
        }
        // A pass that is larger than the device, or waited in vain, gets the whole budget, and the device says what is missing.
        let (whole, room) = if exclusive || first_bytes > limit {
            (Some(self.budget.try_acquire_all().ok_or(Holder::Passes(u64::MAX))?), limit)
        } else {
            let in_flight = self.in_flight.iter().map(|(id, pass)| (id, pass.runs(now), pass.bytes()));
            let room = self.budget.available().saturating_sub(self.turns.kept(turn, limit, in_flight));
            if first_bytes > room {
                return Err(Holder::Passes(first_bytes));
            }
            (None, room)
        };
        // The need of a program is learned while it is asked for: the permit is for what was found to fit.
        let fitted = std::cell::Cell::new(first_bytes);
        let fits = |shape: PassShape| {
            let bytes = (model.pass_bytes)(shape);
            let fits = bytes <= room.min(limits.limit(&model.name, shape.longest));
            if fits {
                fitted.set(bytes);
            }
            fits
        };
        let draft = batcher.next_pass(turn.lead, fits).ok_or(Holder::Processes)?;
        // What was available a moment ago still is: nothing else takes from the budget.
        let permit = whole.or_else(|| self.budget.try_acquire(fitted.get()));
        Ok((draft, permit.ok_or(Holder::Processes)?))
    }

    /// A health probe of a model; nothing while passes hold too much.
    pub(crate) fn probe(&self, index: ModelIndex, model: &ModelFacts, now: Instant) -> Option<InFlight> {
        let bytes = (model.pass_bytes)(model.probe);
        let permit = self.budget.try_acquire(bytes).or_else(|| self.budget.try_acquire_all())?;
        let draft = Draft { items: Vec::new(), shape: model.probe, exclusive: false };
        Some(InFlight::new(index, model.executor, draft, permit, now))
    }

    /// Takes note of a pass that starts, and of its jobs. Gives the order for its executor, and its bytes.
    pub(crate) fn start(
        &mut self,
        mut pass: InFlight,
        model: &ModelFacts,
        jobs: Vec<PassJob>,
        now: Instant,
    ) -> (PassOrder, u64, Option<Duration>) {
        self.next_pass += 1;
        let id = PassId(self.next_pass);
        if !pass.is_probe() {
            self.clock = self.clock.max(self.device_time[pass.model.0]);
        }
        pass.set_jobs(jobs);
        let is_serial = self.executors[model.executor].facts.is_serial;
        // Passes of one serial executor never hold memory at the same time.
        let overlaps = |other: &InFlight| !is_serial || other.executor() != model.executor;
        for other in self.in_flight.values_mut().filter(|other| overlaps(other)) {
            (other.overlapped, pass.overlapped) = (true, true);
        }
        let executor = &mut self.executors[model.executor];
        executor.passes += 1;
        let order = PassOrder {
            pass: id,
            model: pass.model,
            items: pass.items.iter().map(|(job, index, _)| (*job, *index)).collect(),
            shape: pass.shape,
            exclusive: pass.exclusive,
            failures_known: executor.failures_known,
        };
        let bytes = pass.bytes();
        self.in_flight.insert(id, pass);
        (order, bytes, self.unblocked(now))
    }

    /// A pass has ended: its memory is back. Gives it, and whether this session made it.
    pub(crate) fn ended(
        &mut self,
        pass: PassId,
        models: &[ModelFacts],
        failures: u64,
        took: Duration,
    ) -> Option<(InFlight, bool)> {
        let ended = self.in_flight.remove(&pass)?;
        let model = &models[ended.model.0];
        let executor = &mut self.executors[model.executor];
        executor.failures_known = executor.failures_known.max(failures);
        let is_ours = pass.0 > self.passes_before;
        if is_ours {
            executor.passes -= 1;
            if !ended.is_probe() {
                self.turns.pass_took(ended.model, took);
            }
            self.device_time[ended.model.0] += took.as_secs_f64() / f64::from(model.share.get());
        }
        Some((ended, is_ours))
    }

    /// A pass of a model's executor failed or was skipped. Where passes run one after the other, nothing new starts before those
    /// in flight have ended.
    pub(crate) fn failed(&mut self, model: &ModelFacts) {
        let executor = &mut self.executors[model.executor];
        executor.failed_since_idle |= executor.facts.is_serial;
    }

    pub(crate) fn is_probed(&self, model: &ModelFacts) -> bool {
        self.executors[model.executor].facts.is_probed()
    }

    /// Whether passes of a model start. One that cannot be loaded has none.
    pub(crate) fn set_available(&mut self, model: ModelIndex, available: bool) {
        self.unavailable[model.0] = !available;
    }

    pub(crate) fn is_available(&self, model: ModelIndex) -> bool {
        !self.unavailable[model.0]
    }

    /// No more passes start now. Gives how long some waited for memory, if none waits any more.
    pub(crate) fn end_round(&mut self, now: Instant) -> Option<Duration> {
        if self.turns.is_any_refused() && self.passes() == 0 {
            self.blocked_since.get_or_insert(now);
        }
        if self.has_waiting() { None } else { self.unblocked(now) }
    }

    /// Nothing waits for memory any more. Gives how long it did.
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
