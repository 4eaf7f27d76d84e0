//! Tests of the scheduler: how models share the device, and whose pass waits for memory.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::sync::Arc;

use proptest::prelude::*;

use super::batcher::Lead;
use super::test_jobs::unit_job;
use super::turns::Holder;
use super::*;
use crate::learned_limits::LearnedLimits;

/// A model with this share of the device. Its passes take a byte per unit of cost.
fn model(share: u32) -> ModelFacts {
    ModelFacts {
        name: share.to_string(),
        pass_cost_max: 1,
        reply_max: u64::MAX,
        share: NonZeroU32::new(share).unwrap(),
        ..ModelFacts::for_tests()
    }
}

const SECOND: Duration = Duration::from_secs(1);

/// A scheduler with its models, at a moment.
struct Device {
    scheduler: Scheduler,
    models: Vec<ModelFacts>,
    limits: LearnedLimits,
    now: Instant,
    /// A pass's model and when it ends.
    running: Vec<(PassId, ModelIndex, Vec<JobKey>, Instant, Duration)>,
}

impl Device {
    /// Each model has an executor of its own; the first runs one pass after the other, the rest several side by side.
    fn new(models: usize, bytes: u64, pass_cost_max: usize) -> Self {
        let model = |at| ModelFacts { executor: ExecutorIndex(at), pass_cost_max, ..model(1) };
        let executor = |at| ExecutorFacts { passes_max: 2, is_serial: at == 0 };
        let models: Vec<_> = (0..models).map(model).collect();
        let executors: Vec<_> = (0..models.len()).map(executor).collect();
        Self {
            scheduler: Scheduler::new(&models, &executors, Budget::new(bytes)),
            models,
            limits: LearnedLimits::new("cpu", bytes, Default::default()),
            now: Instant::now(),
            running: Vec::new(),
        }
    }

    fn push(&mut self, model: usize, job: Waiting) {
        self.scheduler.push(ModelIndex(model), job);
    }

    /// Starts passes while memory is available. `takes`: how long a pass of each model takes. Returns the jobs of each pass that started.
    fn round(&mut self, takes: &[Duration]) -> Vec<Vec<JobKey>> {
        let (now, mut started) = (self.now, Vec::new());
        self.scheduler.begin_round();
        while let Some((turn, _)) = self.scheduler.next_turn(&self.models, now) {
            let model = &self.models[turn.model.0];
            let limit = self.scheduler.budget.limit();
            let Some(pass) = self.scheduler.admit(turn, model, &self.limits, limit, now) else { continue };
            let (jobs, lasts) = (pass.jobs(), takes[turn.model.0]);
            let StartedPass { order, .. } = self.scheduler.start(*pass, model, Vec::new(), now);
            self.running.push((order.pass, turn.model, jobs.clone(), now + lasts, lasts));
            started.push(jobs);
        }
        self.scheduler.end_round(now);
        started
    }

    /// Advances to the end of the next pass. False if no pass runs.
    fn next_end(&mut self) -> bool {
        let ends = self.running.iter().map(|(.., at, _)| *at).min();
        let Some(at) = ends else { return false };
        self.now = at;
        for (pass, _, _, _, lasted) in self.running.extract_if(.., |(.., ends, _)| *ends == at) {
            self.scheduler.end_pass(pass, &self.models, 0, lasted, at);
        }
        true
    }
}

/// Counts the passes of each model until `passes` have run, with endless jobs. A pass of the n-th model takes `seconds[n]`.
fn passes_of(models: &[ModelFacts], seconds: &[u64], passes: usize) -> Vec<u64> {
    let (now, limits) = (Instant::now(), LearnedLimits::new("cpu", 1, Default::default()));
    let executor = ExecutorFacts { passes_max: 1, is_serial: true };
    let mut scheduler = Scheduler::new(models, &[executor], Budget::new(1));
    for index in 0..models.len() {
        scheduler.push(ModelIndex(index), unit_job(index as u64, passes));
    }
    let mut counts = vec![0; models.len()];
    for _ in 0..passes {
        scheduler.begin_round();
        let (turn, _) = scheduler.next_turn(models, now).unwrap();
        let model = &models[turn.model.0];
        let pass = scheduler.admit(turn, model, &limits, 1, now).expect("memory");
        let StartedPass { order, .. } = scheduler.start(*pass, model, Vec::new(), now);
        scheduler.end_pass(order.pass, models, 0, Duration::from_secs(seconds[turn.model.0]), now);
        counts[turn.model.0] += 1;
    }
    counts
}

#[test]
fn a_closed_session_leaves_nothing_reserved() {
    let turn = |at| Turn { model: ModelIndex(at), lead: Lead::Shared };
    let mut turns = Turns::default();
    turns.refused(turn(0), Holder::Passes(8), [PassId(1)].into_iter());
    assert_eq!((turns.reserved(), turns.kept(turn(1), 10, std::iter::empty())), (Some(turn(0)), 8));
    turns.session_closed();
    assert_eq!((turns.reserved(), turns.kept(turn(1), 10, std::iter::empty())), (None, 0));
    assert!(turns.is_open(turn(0)));
}

#[test]
fn a_wait_for_memory_is_reported_once_with_its_length() {
    let mut device = Device::new(1, 1, 1);
    let others = device.scheduler.budget.try_acquire(1).expect("nothing holds it");
    device.push(0, unit_job(1, 1));
    let start = device.now;
    device.round(&[SECOND]);
    device.now += 3 * SECOND;
    device.round(&[SECOND]);
    assert_eq!(device.scheduler.unblocked(start + 3 * SECOND), Some(3 * SECOND));
    assert_eq!(device.scheduler.unblocked(start + 4 * SECOND), None);
    drop(others);
    assert_eq!(device.round(&[SECOND]), [[JobKey(1)]]);
}

#[test]
fn a_wait_for_memory_ends_when_the_jobs_that_waited_are_gone() {
    let mut device = Device::new(1, 1, 1);
    let _others = device.scheduler.budget.try_acquire(1).expect("nothing holds it");
    device.push(0, unit_job(1, 1));
    device.round(&[SECOND]);
    device.scheduler.remove(ModelIndex(0), JobKey(1));
    device.scheduler.begin_round();
    assert_eq!(device.scheduler.end_round(device.now + SECOND), Some(SECOND));
}

#[test]
fn models_share_the_devices_time_by_their_weights() {
    assert_eq!(passes_of(&[model(1), model(1)], &[1, 1], 100), [50, 50]);
    assert_eq!(passes_of(&[model(1), model(3)], &[1, 1], 100), [25, 75]);
    // Device time is shared, not the number of passes: 40 s for each.
    assert_eq!(passes_of(&[model(1), model(1)], &[4, 1], 50), [10, 40]);
    assert_eq!(passes_of(&[model(2), model(1), model(1)], &[1, 1, 1], 100), [50, 25, 25]);
}

/// A scheduler with two models on one executor, which holds at most so many passes, queued ones included.
struct Shared {
    scheduler: Scheduler,
    models: [ModelFacts; 2],
    in_flight: VecDeque<PassId>,
}

impl Shared {
    fn new(passes_max: usize) -> Self {
        let models = [(); 2].map(|()| ModelFacts { pass_cost_max: 10, ..model(1) });
        let executor = ExecutorFacts { passes_max, is_serial: true };
        Self {
            scheduler: Scheduler::new(&models, &[executor], Budget::new(100)),
            models,
            in_flight: VecDeque::new(),
        }
    }

    fn push(&mut self, model: usize, job: Waiting) {
        self.scheduler.push(ModelIndex(model), job);
    }

    /// Starts passes, and ends the oldest pass after a second. Returns the models of the passes that started.
    fn second(&mut self) -> Vec<usize> {
        let (now, limits) = (Instant::now(), LearnedLimits::new("cpu", 100, Default::default()));
        let mut started = Vec::new();
        self.scheduler.begin_round();
        while let Some((turn, _)) = self.scheduler.next_turn(&self.models, now) {
            let model = &self.models[turn.model.0];
            let pass = self.scheduler.admit(turn, model, &limits, 100, now).expect("memory");
            let StartedPass { order, .. } = self.scheduler.start(*pass, model, Vec::new(), now);
            self.in_flight.push_back(order.pass);
            started.push(turn.model.0);
        }
        self.scheduler.end_round(now);
        let pass = self.in_flight.pop_front().expect("a pass runs");
        self.scheduler.end_pass(pass, &self.models, 0, SECOND, now);
        started
    }
}

#[test]
fn a_job_that_fills_no_pass_has_its_turn_beside_full_passes_of_another_model() {
    let mut shared = Shared::new(2);
    shared.push(0, unit_job(1, 1000));
    assert_eq!(shared.second(), [0, 0], "one runs, and one is ready");
    shared.push(1, unit_job(2, 1));
    let passes: Vec<_> = (0..3).flat_map(|_| shared.second()).collect();
    assert_eq!(passes, [0, 1, 0]);
}

#[test]
fn a_job_that_fills_no_pass_is_not_queued_behind_another_for_more_to_join_it() {
    let mut shared = Shared::new(2);
    shared.push(0, unit_job(1, 5));
    shared.push(1, unit_job(2, 5));
    assert_eq!(shared.second(), [0]);
    assert_eq!(shared.second(), [1]);
}

#[test]
fn after_a_failure_nothing_starts_before_the_passes_that_were_made_have_ended() {
    let mut shared = Shared::new(2);
    shared.push(0, unit_job(1, 1000));
    assert_eq!(shared.second(), [0, 0]);
    assert_eq!(shared.scheduler.passes_on(ExecutorIndex(0)), 1, "one of them has failed");
    shared.scheduler.failed(&shared.models[0]);
    assert_eq!(shared.second(), [0; 0]);
    assert_eq!(shared.second(), [0, 0]);
}

#[test]
fn while_the_device_may_be_sick_no_pass_of_jobs_starts_on_it() {
    let mut shared = Shared::new(2);
    shared.push(0, unit_job(1, 1));
    shared.scheduler.set_doubtful(true);
    shared.scheduler.begin_round();
    assert!(shared.scheduler.next_turn(&shared.models, Instant::now()).is_none());
    shared.scheduler.set_doubtful(false);
    assert_eq!(shared.second(), [0]);
}

#[test]
fn a_pass_of_a_session_that_is_over_keeps_its_memory_and_gives_nothing_to_the_next_one() {
    let mut device = Device::new(2, 100, 60);
    device.push(1, unit_job(1, 60));
    assert_eq!(device.round(&[SECOND; 2]), [[JobKey(1)]]);
    device.push(1, unit_job(2, 60));
    device.scheduler.session_closed(&device.models);
    assert_eq!((device.scheduler.passes(), device.scheduler.budget.available()), (0, 40));
    assert_eq!(device.round(&[SECOND; 2]), [[JobKey(0); 0]; 0], "its jobs are gone");
    let (pass, ..) = device.running[0];
    let (_, is_ours) =
        device.scheduler.end_pass(pass, &device.models, 0, SECOND, device.now).expect("it ran");
    assert!(!is_ours);
    assert_eq!(device.scheduler.budget.available(), 100);
}

/// A model that had the device alone for long does not have to wait for models that come later, even if it has nothing waiting at that
/// moment.
#[test]
fn a_model_has_no_claim_on_what_another_had_before_it() {
    let mut shared = Shared::new(1);
    for number in 0..100 {
        shared.push(0, unit_job(number, 1));
        assert_eq!(shared.second(), [0]);
    }
    shared.push(1, unit_job(200, 1000));
    assert_eq!(shared.second(), [1]);
    shared.push(0, unit_job(300, 1));
    let passes = [shared.second(), shared.second()].concat();
    assert!(passes.contains(&0), "{passes:?}");
}

/// A program's pass takes 45 s, and an exclusive job of the encoder waits for it. Meanwhile the encoder's other jobs run, and the
/// program's next pass does not start before the exclusive one.
#[test]
fn an_exclusive_job_that_waits_for_a_long_pass_stops_no_short_ones() {
    let takes = [SECOND / 10, 45 * SECOND];
    let mut device = Device::new(2, 100, 1);
    device.push(0, unit_job(1, 1));
    assert_eq!(device.round(&takes), [[JobKey(1)]]);
    device.next_end();
    device.push(1, unit_job(2, 1));
    assert_eq!(device.round(&takes), [[JobKey(2)]]);
    device.now += SECOND;
    device.push(0, Waiting { exclusive: true, ..unit_job(3, 1) });
    device.push(1, unit_job(4, 1));
    let mut key = 100;
    while device.running.iter().any(|(_, model, ..)| *model == ModelIndex(1)) {
        key += 1;
        device.push(0, unit_job(key, 1));
        assert_eq!(device.round(&takes), [[JobKey(key)]], "one short pass after the other");
        device.next_end();
    }
    assert!(key > 300, "{key}");
    device.push(0, unit_job(5, 1));
    while !device.running.is_empty() {
        assert_eq!(device.round(&takes), [[JobKey(0); 0]; 0], "nothing starts before it any more");
        device.next_end();
    }
    assert_eq!(device.round(&takes), [[JobKey(3)]]);
    device.next_end();
    let both = device.round(&takes);
    assert!(both.contains(&vec![JobKey(4)]) && both.contains(&vec![JobKey(5)]), "{both:?}");
}

/// The second pass of a program does not fit beside its first. Another program's pass may still start, if it leaves enough memory for the
/// second one once the first has ended.
#[test]
fn a_pass_that_leaves_room_for_the_reserved_one_starts_whatever_it_takes() {
    let takes = [SECOND / 10, 45 * SECOND, 50 * SECOND];
    let mut device = Device::new(3, 100, 60);
    device.push(1, unit_job(1, 60));
    assert_eq!(device.round(&takes), [[JobKey(1)]]);
    device.models[1].pass_bytes = Arc::new(|_| 70);
    device.models[2].pass_bytes = Arc::new(|_| 31);
    device.push(1, unit_job(2, 1));
    device.push(2, unit_job(3, 1));
    assert_eq!(
        device.round(&takes),
        [[JobKey(0); 0]; 0],
        "there is room, but it would keep the reserved one waiting"
    );
    device.models[2].pass_bytes = Arc::new(|_| 30);
    assert_eq!(device.round(&takes), [[JobKey(3)]]);
    device.next_end();
    assert_eq!(device.round(&takes), [[JobKey(2)]]);
}

/// Only the model that needs the memory of other processes waits for it.
#[test]
fn memory_that_other_processes_may_give_back_is_waited_for_by_one_model() {
    let mut device = Device::new(2, 1, 1);
    device.models[0].pass_bytes = Arc::new(|_| 50);
    let (limits, now) = (device.limits.clone(), device.now);
    device.push(0, unit_job(1, 1));
    device.push(1, unit_job(2, 1));
    device.scheduler.begin_round();
    let mut tried = Vec::new();
    while let Some((turn, job)) = device.scheduler.next_turn(&device.models, now) {
        tried.push(job);
        // If no other process held memory, the budget would be 100 bytes.
        let model = &device.models[turn.model.0];
        if let Some(pass) = device.scheduler.admit(turn, model, &limits, 100, now) {
            assert_eq!(pass.jobs(), [JobKey(2)]);
            device.scheduler.start(*pass, model, Vec::new(), now);
        }
    }
    assert_eq!(tried, [JobKey(1), JobKey(2)]);
}

proptest! {
    /// Passes of up to 45 s, exclusive jobs and jobs that need half of the memory, pushed as fast as they run. The only job of its kind
    /// waits for a bounded time, whatever comes later.
    #[test]
    fn nobody_starves_beside_exclusive_jobs_and_long_passes(
        millis in prop::collection::vec(prop_oneof![1u64..200, 1_000u64..45_000], 2..5),
        flood in prop::collection::vec((0usize..5, prop::bool::weighted(0.2), 1usize..60), 600),
        victim in 0usize..5,
        is_exclusive: bool,
    ) {
        let takes: Vec<_> = millis.into_iter().map(Duration::from_millis).collect();
        let longest = takes.iter().max().copied().unwrap_or_default();
        let mut device = Device::new(takes.len(), 100, 60);
        let mut flood = (1..).zip(flood);
        let mut fill = |device: &mut Device, jobs: usize| {
            for (key, (model, exclusive, items)) in flood.by_ref().take(jobs) {
                device.push(model % takes.len(), Waiting { exclusive, ..unit_job(key, items) });
            }
        };
        fill(&mut device, 20);
        let (start, before) = (device.now, 21);
        device.push(victim % takes.len(), Waiting { exclusive: is_exclusive, ..unit_job(10_000, 1) });
        loop {
            let started = device.round(&takes);
            if started.iter().flatten().any(|key| *key == JobKey(10_000)) {
                break;
            }
            // The bound: each earlier job has one or two turns. Each turn may wait for the running passes and for one beside them.
            let waited = device.now - start;
            prop_assert!(waited <= longest * 2 * 2 * before, "{waited:?} with passes of {takes:?}");
            prop_assert!(device.next_end(), "nothing runs, and something waits");
            fill(&mut device, started.len());
        }
    }
}
