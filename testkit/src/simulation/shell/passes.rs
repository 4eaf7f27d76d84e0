//! Executors: the device's own thread, which runs one pass at a time, and processes, which run several at once.

use std::collections::VecDeque;

use vramq_core::action::PassOrder;
use vramq_core::device::{Loss, OutOfMemory, PassError};
use vramq_core::event::{Event, OutputSize, PassEnd, PassResult};
use vramq_core::ids::{ExecutorIndex, ItemIndex, JobKey, ModelIndex, PassId};
use vramq_core::settings::ExecutorFacts;

use super::Shell;
use crate::simulation::agenda::{Happening, MILLI, Micros, SECOND};
use crate::simulation::device::{DevicePass, Fate, PassFate};
use crate::simulation::env::Env;
use crate::simulation::ledger::{JobNumber, Nature};

/// The time of a pass in addition to that of its items.
const PASS_MIN: Micros = 3 * MILLI;

/// How long a program may take for a pass.
const PROGRAM_LIMIT: Micros = 20 * SECOND;

/// How long a program may take to stop a cancelled pass, or to be killed for it.
const STOP_LIMIT: Micros = 2 * SECOND;

/// Bytes of an output in a reply.
pub const OUTPUT_BYTES: usize = 4_096;

#[derive(Debug)]
pub(super) struct Executor {
    facts: ExecutorFacts,
    queue: VecDeque<PassId>,
    is_busy: bool,
    failures: u64,
}

impl Executor {
    pub(super) fn new(facts: ExecutorFacts) -> Self {
        Self { facts, queue: VecDeque::new(), is_busy: false, failures: 0 }
    }

    pub(super) fn is_serial(&self) -> bool {
        self.facts.is_serial
    }
}

/// A pass that an executor has.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) order: PassOrder,
    /// The jobs in the order of their items.
    pub(super) jobs: Vec<JobNumber>,
    pub(super) bytes: u64,
    pub(super) executor: ExecutorIndex,
    since: Micros,
    /// The session that it was started in.
    pub(super) session: u32,
    /// Bytes that it was admitted with.
    pub(super) admitted: u64,
    /// Whether another pass of this process could have been on the device at the same time.
    beside: bool,
}

impl Flight {
    /// Whether only the pass itself can have caused an out-of-memory.
    pub(super) fn was_alone(&self, oom: &OutOfMemory) -> bool {
        self.order.exclusive || (!self.beside && oom.foreign == 0)
    }

    pub(super) fn has(&self, job: JobKey) -> bool {
        self.order.items.iter().any(|(of, _)| *of == job)
    }

    /// The job, if all of its items are of one.
    pub(super) fn of_one_job(&self) -> Option<JobNumber> {
        let first = self.jobs.first().copied()?;
        self.jobs.iter().all(|job| *job == first).then_some(first)
    }
}

impl Shell {
    pub(super) fn run(&mut self, env: &mut Env, order: PassOrder) {
        self.check_run(env, &order);
        self.check_first_passes(env, &order);
        let model = &self.models[order.model.0];
        let jobs: Vec<_> =
            order.items.iter().filter_map(|(job, _)| self.jobs.get(job)).map(|stored| stored.job).collect();
        for (job, _) in &order.items {
            if let Some(stored) = self.jobs.get_mut(job) {
                stored.has_started = true;
                stored.first_pass_at.get_or_insert(env.now);
                env.ledger.started(stored.job);
            }
        }
        let mut flight = Flight {
            bytes: (model.pass_bytes)(order.shape),
            jobs,
            executor: model.executor,
            since: env.now,
            session: self.sessions,
            admitted: std::mem::take(&mut self.observations.admitted),
            beside: false,
            order,
        };
        let is_serial = self.executors[flight.executor.0].facts.is_serial;
        let others = self.passes.values_mut().filter(|other| !is_serial || other.executor != flight.executor);
        for other in others {
            (other.beside, flight.beside) = (true, true);
        }
        (self.observations.busy_at, self.idle_ticks) = (env.now, 0);
        let (pass, executor) = (flight.order.pass, flight.executor);
        self.passes.insert(pass, flight);
        if self.executors[executor.0].facts.is_serial {
            self.executors[executor.0].queue.push_back(pass);
            self.next_pass(env, executor);
        } else {
            self.start_on_device(env, pass);
        }
    }

    /// The device's thread takes its next pass.
    fn next_pass(&mut self, env: &mut Env, executor: ExecutorIndex) {
        let thread = &mut self.executors[executor.0];
        if thread.is_busy {
            return;
        }
        let Some(pass) = thread.queue.pop_front() else { return };
        thread.is_busy = true;
        let known = self.passes.get(&pass).map_or(0, |flight| flight.order.failures_known);
        // Skips of passes that have begun are dropped with the next pass.
        let is_skipped = self.skips.contains(&pass);
        self.skips.retain(|skipped| *skipped > pass);
        if is_skipped || known < self.executors[executor.0].failures {
            env.agenda.at(env.now, Happening::PassReturns { life: self.life, pass });
        } else {
            self.start_on_device(env, pass);
        }
    }

    fn start_on_device(&mut self, env: &mut Env, pass: PassId) {
        self.check_wanted(env, pass);
        let Some(flight) = self.passes.get_mut(&pass) else { return };
        flight.since = env.now;
        if self.lost.is_some() {
            env.agenda.at(env.now, Happening::PassReturns { life: self.life, pass });
            return;
        }
        let specs = || flight.jobs.iter().map(|job| &env.ledger.job(*job).spec);
        let hunger = specs().map(|spec| spec.hunger_tenths).max().unwrap_or(10);
        let fate =
            specs().map(|spec| fate_of(spec.nature)).find(|fate| *fate != Fate::Ends).unwrap_or(Fate::Ends);
        let per_cost = env.plan.models[flight.order.model.0].micros_per_cost;
        let is_serial = self.executors[flight.executor.0].facts.is_serial;
        let is_written = env.disks.takes(self.life.worker, flight.order.shape.cost);
        if !is_serial && (self.cannot_load || !is_written) {
            env.agenda.at(env.now, Happening::PassReturns { life: self.life, pass });
            return;
        }
        let on_device = DevicePass {
            program_limit: (!is_serial).then_some(PROGRAM_LIMIT),
            life: self.life,
            pass,
            bytes: flight.bytes * hunger / 10,
            exclusive: flight.order.exclusive,
            takes: PASS_MIN + flight.order.shape.cost as u64 * per_cost,
            fate,
        };
        let started = env.devices[self.device].enter(on_device, env.now);
        env.started(self.device, started);
    }

    /// Cancels a pass. The device's thread skips it if it has not begun, and most programs stop it. Other programs finish it before they
    /// notice.
    pub(super) fn cancel_pass(&mut self, env: &mut Env, pass: PassId) {
        let Some(flight) = self.passes.get(&pass) else { return };
        if self.executors[flight.executor.0].facts.is_serial {
            self.skips.insert(pass);
        } else if env.random.chance(70)
            && let Some(ticket) = env.devices[self.device].cancel(self.life, pass)
        {
            let at = env.soon(STOP_LIMIT);
            env.agenda.at(at, Happening::PassEnds { device: self.device, ticket });
        }
    }

    /// A pass returns without having been on the device.
    pub fn pass_returns(&mut self, env: &mut Env, pass: PassId) {
        let Some(flight) = self.passes.get(&pass) else { return };
        let result = match &self.lost {
            Some(loss) => PassResult::DeviceLostBefore(loss.error.clone()),
            None if self.executors[flight.executor.0].facts.is_serial => PassResult::Skipped,
            None if self.cannot_load => PassResult::Unavailable("its libraries are missing".to_owned()),
            None => PassResult::Failed(PassError::DiskFull("write the items: no space".to_owned())),
        };
        self.pass_over(env, pass, result, Vec::new(), 0);
    }

    /// A pass on the device is over.
    pub fn pass_ended(&mut self, env: &mut Env, pass: PassId, fate: PassFate, took: Micros) {
        let Some(flight) = self.passes.get(&pass) else { return };
        let items = flight.order.items.len();
        let one = flight.of_one_job();
        let executor = flight.executor;
        let (result, outputs) = match fate {
            PassFate::ProcessDies => {
                self.note_killer(env, pass);
                return self.die();
            }
            PassFate::Done => (PassResult::Done, vec![Some(OUTPUT_BYTES); items]),
            PassFate::Cancelled => {
                let finished = env.random.below(items.max(1));
                (PassResult::Cancelled, first_outputs(finished, items))
            }
            PassFate::Failed(mut error) => {
                self.executors[executor.0].failures += 1;
                if let PassError::InvalidInput { item, .. } = &mut error {
                    *item = self.named_item(env, pass);
                }
                if let Some(job) = one {
                    self.note_failure(env, job, items, &error);
                }
                if matches!(error, PassError::Crashed(_)) {
                    self.note_killer(env, pass);
                }
                if let PassError::DeviceLost(error) = &error {
                    self.lost.get_or_insert(Loss { error: error.clone(), is_late: false });
                    self.culprit = Some(pass);
                }
                // A program's process may have finished some items before.
                let is_serial = self.executors[executor.0].facts.is_serial;
                let finished =
                    if is_serial || env.random.chance(60) { 0 } else { env.random.below(items.max(1)) };
                let outputs = first_outputs(finished, items);
                let late = self.lost.as_ref().filter(|loss| loss.is_late);
                (
                    late.map_or(PassResult::Failed(error), |loss| {
                        PassResult::DeviceLostBefore(loss.error.clone())
                    }),
                    outputs,
                )
            }
        };
        self.pass_over(env, pass, result, outputs, took);
    }

    /// Programs cannot be loaded, or can again.
    pub fn set_loadable(&mut self, env: &mut Env, loadable: bool) {
        self.cannot_load = !loadable;
        if loadable {
            for model in 0..self.models.len() {
                if !self.executors[self.models[model].executor.0].facts.is_serial {
                    self.handle(env, Event::ModelAvailable { model: ModelIndex(model) });
                }
            }
        }
    }

    fn pass_over(
        &mut self,
        env: &mut Env,
        pass: PassId,
        result: PassResult,
        outputs: Vec<Option<usize>>,
        took: Micros,
    ) {
        let Some(flight) = self.passes.remove(&pass) else { return };
        self.skips.remove(&pass);
        for (((key, item), job), output) in flight.order.items.iter().zip(&flight.jobs).zip(&outputs) {
            if output.is_some() {
                env.ledger.computed(*job, item.0);
                self.take_output(env, *key, *job, *item);
            }
        }
        if matches!(result, PassResult::Done) {
            let mut keys: Vec<_> = flight.order.items.iter().map(|(key, _)| *key).collect();
            keys.dedup();
            for key in keys {
                if let Some(stored) = self.jobs.get_mut(&key) {
                    stored.fitted += 1;
                }
            }
        }
        let is_ours = self.session.is_some() && flight.session == self.sessions;
        let (model, shape, is_probe) =
            (flight.order.model, flight.order.shape, flight.order.items.is_empty());
        let fitted = (is_ours && !is_probe && matches!(result, PassResult::Done)).then_some((model, shape));
        if is_ours {
            self.note_result(env, &flight, &result);
        }
        let executor = &mut self.executors[flight.executor.0];
        let end = PassEnd {
            pass,
            result,
            outputs: outputs.into_iter().map(|bytes| bytes.map(OutputSize::inline)).collect(),
            failures: executor.failures,
            took: std::time::Duration::from_micros(took.max(env.now - flight.since)),
            memory: env.devices[self.device].memory(self.life),
        };
        executor.is_busy = false;
        let is_serial = executor.facts.is_serial;
        // The thread continues before the event loop handles the result.
        if is_serial {
            self.next_pass(env, flight.executor);
        }
        let took = u64::try_from(end.took.as_micros()).unwrap_or(u64::MAX);
        self.note_times(env, &flight, &end);
        if fitted.is_some() {
            self.note_held(env, end.memory.own(), end.memory.total);
        }
        self.observations.pass_ended(env, flight, &end, is_ours);
        self.pass_is_over(env, end);
        if is_ours && self.exit.is_none() {
            self.check_limits(env, fitted);
            let is_calm = self.is_well(env.now) && env.faults_now == 0;
            self.check_turns_of_models(env, model, took, is_calm);
        }
    }

    fn take_output(&mut self, env: &mut Env, key: JobKey, job: JobNumber, item: ItemIndex) {
        match self.jobs.get_mut(&key).and_then(|stored| stored.outputs.get_mut(item.0 as usize)) {
            Some(output) => *output = true,
            // The job was given up, or is gone with its session.
            None => env.ledger.in_vain(job, item.0),
        }
    }

    fn pass_is_over(&mut self, env: &mut Env, end: PassEnd) {
        if self.session.is_some() {
            self.handle(env, Event::PassEnded(end));
        } else if self.exit.is_none() {
            self.apply(env, Event::PassEnded(end));
        }
    }

    /// The passes in flight with a job, and whether each may be waited for in vain.
    pub(super) fn passes_with(&self, job: JobKey) -> impl Iterator<Item = &Flight> {
        self.passes.values().filter(move |flight| flight.has(job))
    }

    /// Whether a pass of this executor is in flight.
    pub(super) fn is_busy(&self, executor: ExecutorIndex) -> bool {
        self.passes.values().any(|flight| flight.executor == executor)
    }

    pub(super) fn bytes_in_flight(&self) -> u64 {
        self.passes.values().map(|flight| flight.bytes).sum()
    }
}

/// The outputs of a pass that ended after so many of its items.
fn first_outputs(finished: usize, items: usize) -> Vec<Option<usize>> {
    (0..items).map(|at| (at < finished).then_some(OUTPUT_BYTES)).collect()
}

fn fate_of(nature: Nature) -> Fate {
    match nature {
        Nature::PoisonPass => Fate::KillsProcess,
        Nature::Failing => Fate::Fails,
        Nature::Invalid => Fate::IsInvalid,
        Nature::Hanging => Fate::Hangs,
        Nature::DeviceKiller => Fate::KillsDevice,
        Nature::Good | Nature::Malformed | Nature::Huge | Nature::PoisonDecode => Fate::Ends,
    }
}
