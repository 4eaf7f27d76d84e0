//! Starts a worker's process: loads its models, and gives its core the device's memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use vramq_core::Core;
use vramq_core::device::Memory;
use vramq_core::learned_limits::LearnedLimits;
use vramq_core::poison_policy::PoisonPolicy;
use vramq_core::settings::{ExecutorFacts, ModelFacts, Settings};

use super::as_known::{budget_as_known, models_as_known};
use super::confirms::CONFIRM_MAX;
use super::figures::{Load, Memories};
use super::leaks::{FULL_FOR, FULL_PERCENT, Leak};
use super::observations::Observations;
use super::operators::Operators;
use super::pace::{Drain, Health};
use super::passes::Executor;
use super::shares::Shares;
use super::{Bytes, Shell};
use crate::simulation::agenda::Life;
use crate::simulation::env::Env;
use crate::simulation::plan::{MIB, Plan, WorkerPlan};

/// Bytes of the weights and context of a worker's process.
pub(super) const RESIDENT: u64 = 300 * MIB;
pub(super) const RESERVE: u64 = 64 * MIB;

impl Shell {
    /// Starts a process, unless the device has no room for a job.
    pub fn start(life: Life, models: &Arc<Vec<ModelFacts>>, env: &mut Env) -> Option<Self> {
        let plan = Arc::clone(&env.plan);
        let worker = plan.workers.get(life.worker)?;
        let device = worker.device;
        env.devices[device].settle_in(life, RESIDENT);
        let memory = env.devices[device].memory(life);
        let Some(own) = with_slots(models, memory) else {
            let started = env.devices[device].leave(life, env.now);
            env.started(device, started);
            return None;
        };
        let executors = executors(&plan);
        let settings = settings(life, worker, memory, executors.clone(), env);
        let admission = budget_as_known(plan.sabotage, memory.free.saturating_sub(RESERVE));
        let budget = admission.view();
        let learned = env.limit_files.get(&life.worker).cloned().unwrap_or_default();
        let limits = LearnedLimits::new(&settings.device, memory.total, learned);
        Some(Self {
            core: Core::new(settings, models_as_known(plan.sabotage, own.clone()), limits, admission),
            life,
            budget,
            models: Arc::new(own),
            executors: executors.into_iter().map(Executor::new).collect(),
            device,
            session: None,
            sessions: 0,
            settled: 0,
            bytes: Bytes::default(),
            settled_at_open: 0,
            is_closing: false,
            ending: None,
            ready: VecDeque::new(),
            jobs: BTreeMap::new(),
            last_job: 0,
            passes: BTreeMap::new(),
            operators: Operators::default(),
            observations: Observations::default(),
            health: Health::default(),
            drain: Drain::default(),
            memories: Memories::default(),
            leak: Leak::default(),
            load: vec![Load::default(); models.len()],
            ran_out: Vec::new(),
            seen_limits: BTreeMap::new(),
            short_of: None,
            model_time: vec![0; models.len()],
            model_backlogs: BTreeMap::new(),
            longest_pass: 0,
            shares: Shares::default(),
            answered: BTreeMap::new(),
            gave_back: false,
            is_blocked: false,
            learned_timeout: None,
            idle_ticks: 0,
            die_after: None,
            exit: None,
            timer_at: None,
            idle_is_due: false,
            backoff: 0,
            lost: None,
            cannot_load: false,
            culprit: None,
            sabotage: plan.sabotage,
            silences: BTreeMap::new(),
            heard: BTreeMap::new(),
            skips: BTreeSet::new(),
        })
    }
}

/// The device's thread, and another executor if a model runs several passes at once.
fn executors(plan: &Plan) -> Vec<ExecutorFacts> {
    let device = ExecutorFacts { passes_max: 2, is_serial: true };
    let programs = ExecutorFacts { passes_max: 3, is_serial: false };
    let concurrent = plan.models.iter().any(|model| model.concurrent);
    iter::once(device).chain(concurrent.then_some(programs)).collect()
}

/// The models with the slots that they start with, unless one has no room for a job.
fn with_slots(models: &[ModelFacts], memory: Memory) -> Option<Vec<ModelFacts>> {
    let count = models.len() as u64;
    let with_slots = |model: &ModelFacts| {
        let slots = NonZeroU16::new(model.slots_in(model.slot_inputs(memory.free, RESERVE, count).share()))?;
        Some(ModelFacts { slots, ..model.clone() })
    };
    models.iter().map(with_slots).collect()
}

/// The settings of a process's core.
fn settings(
    life: Life,
    worker: &WorkerPlan,
    memory: Memory,
    executors: Vec<ExecutorFacts>,
    env: &mut Env,
) -> Settings {
    let limit = Duration::from_micros(env.plan.job_limit);
    Settings {
        worker: format!("worker-{}", life.worker),
        device: format!("device-{}", worker.device),
        job_limit: limit,
        pass_limit: limit,
        drain: Duration::from_micros(worker.drain),
        poison: PoisonPolicy { suspect_after: 2, crashes_max: 5 },
        reserve: RESERVE,
        resident: memory.own(),
        total: memory.total,
        pressure_percent: FULL_PERCENT,
        pressure_tolerated: Duration::from_micros(FULL_FOR),
        bulk_jobs_max: env.plan.jobs_max,
        large_turn: Duration::from_micros(env.plan.large_turn),
        confirm_max: Duration::from_secs(CONFIRM_MAX),
        executors,
        started_at: env.clock().at,
        seed: env.random.bits(),
    }
}
