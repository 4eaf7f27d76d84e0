//! Passes: which items run next, with how much memory, and what is in flight.

mod batcher;
mod draft;
mod in_flight;
mod lanes;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use batcher::Batcher;
pub(crate) use draft::{Caller, Waiting};
use draft::{Draft, PassLimits};
pub(crate) use in_flight::{InFlight, PassJob};

use crate::action::PassOrder;
use crate::admission::Budget;
use crate::device::PassShape;
use crate::ids::{JobKey, ModelIndex, PassId};
use crate::learned_limits::LearnedLimits;
use crate::settings::{ExecutorFacts, ModelFacts};

/// How long a pass that would fit without other processes waits for them, before the device decides. Slots follow the memory
/// within as much; then the unacknowledged jobs should go where there is room.
const SHORTAGE_MAX: Duration = Duration::from_secs(2);

/// What became of an attempt to start a pass.
#[derive(Debug)]
pub(crate) enum Admission {
    Admitted(Box<InFlight>),
    /// No memory is left for it now.
    NoRoom,
}

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
    /// Since when other processes hold what the next pass needs.
    short_since: Option<Instant>,
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
            executors: executors.iter().map(executor).collect(),
            unavailable: vec![false; models.len()],
            budget,
            in_flight: HashMap::new(),
            next_pass: 0,
            passes_before: 0,
            blocked_since: None,
            short_since: None,
        }
    }

    /// The session is over: its waiting items are gone. Passes in flight keep their permits until they end.
    pub(crate) fn session_closed(&mut self, models: &[ModelFacts]) {
        self.batchers = batchers(models);
        self.passes_before = self.next_pass;
        for executor in &mut self.executors {
            (executor.passes, executor.failed_since_idle) = (0, false);
        }
        (self.blocked_since, self.short_since) = (None, None);
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

    /// A model that had nothing to run has no claim on the time that others had meanwhile.
    fn forget_claim(&mut self, model: ModelIndex) {
        if self.batchers[model.0].waiting() == 0 {
            let busy = (0..self.batchers.len()).filter(|other| self.batchers[*other].waiting() > 0);
            let least = busy.map(|other| self.device_time[other]).min_by(f64::total_cmp);
            let own = &mut self.device_time[model.0];
            *own = least.map_or(*own, |least| own.max(least));
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

    /// The model whose pass starts next: of those that may have one, that which has had the device for the shortest time by its share.
    pub(crate) fn next_model(&mut self, models: &[ModelFacts]) -> Option<ModelIndex> {
        for executor in &mut self.executors {
            executor.failed_since_idle &= executor.passes > 0;
        }
        let may_start = |at: &usize| {
            let (batcher, executor) = (&self.batchers[*at], &self.executors[models[*at].executor]);
            // Behind a pass that runs only a full one is queued: more items may still join it.
            let is_worth_it = executor.passes == 0 || !executor.facts.is_serial || batcher.has_full_pass();
            let has_room = executor.passes < executor.facts.passes_max && !executor.failed_since_idle;
            batcher.waiting() > 0 && !self.unavailable[*at] && has_room && is_worth_it
        };
        let candidates = (0..self.batchers.len()).filter(may_start);
        candidates.min_by(|a, b| self.device_time[*a].total_cmp(&self.device_time[*b])).map(ModelIndex)
    }

    pub(crate) fn has_waiting(&self) -> bool {
        self.batchers.iter().any(|batcher| batcher.waiting() > 0)
    }

    /// The next pass of a model with its permit, if the device has the memory. `budget_max`: the budget while no other process
    /// holds anything.
    pub(crate) fn admit(
        &mut self,
        index: ModelIndex,
        model: &ModelFacts,
        limits: &LearnedLimits,
        budget_max: u64,
        now: Instant,
    ) -> Admission {
        let batcher = &mut self.batchers[index.0];
        let Some((first, exclusive)) = batcher.first_shape() else { return Admission::NoRoom };
        let (first_bytes, limit) = ((model.pass_bytes)(first), self.budget.limit());
        // What other processes hold may come back within moments; until then the pass would only run out of memory.
        if first_bytes <= limit {
            self.short_since = None;
        } else if !exclusive && first_bytes <= budget_max {
            let since = *self.short_since.get_or_insert(now);
            if now.saturating_duration_since(since) < SHORTAGE_MAX {
                return Admission::NoRoom;
            }
        }
        // A pass that is larger than the device, or waited in vain, gets the whole budget, and the device says what is missing.
        let (whole, room) = if exclusive || first_bytes > limit {
            let Some(whole) = self.budget.try_acquire_all() else { return Admission::NoRoom };
            (Some(whole), limit)
        } else if first_bytes > self.budget.available() {
            return Admission::NoRoom;
        } else {
            (None, self.budget.available())
        };
        let fits = |shape: PassShape| {
            (model.pass_bytes)(shape) <= room.min(limits.limit(&model.name, shape.longest))
        };
        let Some(draft) = batcher.next_pass(fits) else { return Admission::NoRoom };
        // What was available a moment ago still is: nothing else takes from the budget.
        let permit = whole.or_else(|| self.budget.try_acquire((model.pass_bytes)(draft.shape)));
        let Some(permit) = permit else { return Admission::NoRoom };
        Admission::Admitted(Box::new(InFlight::new(index, model.executor, draft, permit)))
    }

    /// A health probe of a model; nothing while passes hold too much.
    pub(crate) fn probe(&self, index: ModelIndex, model: &ModelFacts) -> Option<InFlight> {
        let bytes = (model.pass_bytes)(model.probe);
        let permit = self.budget.try_acquire(bytes).or_else(|| self.budget.try_acquire_all())?;
        let draft = Draft { items: Vec::new(), shape: model.probe, exclusive: false };
        Some(InFlight::new(index, model.executor, draft, permit))
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

    /// Items wait, and no pass has room.
    pub(crate) fn blocked(&mut self, now: Instant) {
        if self.passes() == 0 {
            self.blocked_since.get_or_insert(now);
        }
    }

    /// Nothing waits for memory any more. Gives how long it did.
    pub(crate) fn unblocked(&mut self, now: Instant) -> Option<Duration> {
        let since = self.blocked_since.take()?;
        Some(now.saturating_duration_since(since))
    }

    pub(crate) fn nothing_waits(&mut self, now: Instant) -> Option<Duration> {
        self.short_since = None;
        self.unblocked(now)
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
mod tests {
    use std::num::{NonZeroU16, NonZeroU32};
    use std::sync::Arc;

    use super::*;
    use crate::ids::QueueIndex;
    use crate::settings::QueueFacts;

    fn model(share: u32) -> ModelFacts {
        ModelFacts {
            name: share.to_string(),
            queues: vec![QueueFacts::own("m")],
            larger: None,
            slots_max: NonZeroU16::MIN,
            slots: NonZeroU16::MIN,
            pass_cost_max: 1,
            job_shape: PassShape::default(),
            share: NonZeroU32::new(share).unwrap(),
            weights: 0,
            executor: 0,
            probe: PassShape::default(),
            pass_bytes: Arc::new(|_| 1),
        }
    }

    /// Passes of each model until `passes` have run, of jobs that never run out; a pass of the n-th model takes `seconds[n]`.
    fn passes_of(models: &[ModelFacts], seconds: &[u64], passes: usize) -> Vec<u64> {
        let (now, limits) = (Instant::now(), LearnedLimits::new("cpu", 1, Default::default()));
        let executor = ExecutorFacts { passes_max: 1, is_serial: true };
        let mut scheduler = Scheduler::new(models, &[executor], Budget::new(1));
        for index in 0..models.len() {
            let items = (0..).zip(vec![1; passes]).collect();
            let (key, index) = (JobKey(index as u64), ModelIndex(index));
            let job = Waiting {
                key,
                queue: QueueIndex(0),
                caller: None,
                hint: None,
                exclusive: false,
                tried_at_ms: 0,
                isolated: false,
                items,
                more: false,
            };
            scheduler.push(index, job);
        }
        let mut counts = vec![0; models.len()];
        for _ in 0..passes {
            let index = scheduler.next_model(models).unwrap();
            let Admission::Admitted(pass) = scheduler.admit(index, &models[index.0], &limits, 1, now) else {
                panic!("no memory")
            };
            let (order, ..) = scheduler.start(*pass, &models[index.0], Vec::new(), now);
            scheduler.ended(order.pass, models, 0, Duration::from_secs(seconds[index.0]));
            counts[index.0] += 1;
        }
        counts
    }

    #[test]
    fn a_wait_for_memory_is_reported_once_with_its_length() {
        let executor = ExecutorFacts { passes_max: 1, is_serial: true };
        let mut scheduler = Scheduler::new(&[model(1)], &[executor], Budget::new(1));
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        assert_eq!(scheduler.unblocked(start), None);
        scheduler.blocked(start);
        scheduler.blocked(start + second);
        assert_eq!(scheduler.unblocked(start + 3 * second), Some(3 * second));
        assert_eq!(scheduler.unblocked(start + 4 * second), None);
    }

    #[test]
    fn models_share_the_devices_time_by_their_weights() {
        assert_eq!(passes_of(&[model(1), model(1)], &[1, 1], 100), [50, 50]);
        assert_eq!(passes_of(&[model(1), model(3)], &[1, 1], 100), [25, 75]);
        // Time counts, not passes: 40 s of each.
        assert_eq!(passes_of(&[model(1), model(1)], &[4, 1], 50), [10, 40]);
        assert_eq!(passes_of(&[model(2), model(1), model(1)], &[1, 1, 1], 100), [50, 25, 25]);
    }
}
