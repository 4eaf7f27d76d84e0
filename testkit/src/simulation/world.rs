//! The simulated world: runs one event after the other until every job has ended.

use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;

use vramq_core::device::PassShape;
use vramq_core::event::Event;
use vramq_core::ids::ExecutorIndex;
use vramq_core::settings::{ModelFacts, QueueFacts};

use super::agenda::{Happening, Life, MINUTE, Micros, SECOND};
use super::broker::Name;
use super::callers::Callers;
use super::env::{Env, Owner};
use super::ledger::End;
use super::names::{LARGER_KEY, ModelNames, Names};
use super::plan::{MIB, ModelPlan, Plan};
use super::shell::{Exit, OUTPUT_BYTES, Shell};
use super::trace::{Detail, Trace, Violation};

/// Within this time after the last fault every job must have ended. A job that hangs reaches its time limit five times.
const SETTLED_WITHIN: Micros = 60 * MINUTE;

/// How long the world continues after the last job: nothing may happen any more.
const QUIET: Micros = 15 * SECOND;

/// The result of a history.
#[derive(Debug)]
pub struct History {
    pub violation: Option<Violation>,
    pub jobs: usize,
    /// Jobs that ended because their callers withdrew them.
    pub withdrawn: usize,
    /// How often a large job was requeued to make room for others.
    pub handed_over: usize,
    pub faults: usize,
    pub lasted: Micros,
    /// Events that happened.
    pub steps: u64,
    pub trace: Trace,
}

/// The whole simulation.
#[derive(Debug)]
pub struct World {
    pub(super) env: Env,
    pub(super) callers: Callers,
    pub(super) workers: Vec<Option<Shell>>,
    models: Arc<Vec<ModelFacts>>,
    lives: Vec<u32>,
    /// When the broker notices the next death, if late.
    pub(super) noticed_late: Option<Micros>,
    ended_at: Option<Micros>,
    is_over: bool,
}

/// Runs a plan to its end.
pub fn run(plan: Plan, detail: Detail) -> History {
    let plan = Arc::new(plan);
    let mut env = Env::new(Arc::clone(&plan), Trace::new(detail));
    env.declare_topology();
    let models =
        plan.models.iter().enumerate().map(|(at, model)| facts(at, model, &plan, &env.names)).collect();
    let callers = Callers::new(&mut env);
    for worker in 0..plan.workers.len() {
        let at = env.soon(SECOND);
        env.agenda.at(at, Happening::Start { worker });
    }
    for (number, fault) in plan.faults.iter().enumerate() {
        env.agenda.at(fault.at, Happening::Fault { number, ends: false });
    }
    let workers = plan.workers.iter().map(|_| None).collect();
    let lives = vec![0; plan.workers.len()];
    let mut world = World {
        env,
        callers,
        workers,
        models: Arc::new(models),
        lives,
        noticed_late: None,
        ended_at: None,
        is_over: false,
    };
    world.callers.connect(&mut world.env);
    let mut steps = 0;
    while let Some((at, what)) = world.env.agenda.pop() {
        steps += 1;
        world.env.now = at;
        world.env.ledger.now = at;
        world.happen(what);
        if world.is_over || world.env.ledger.violation.is_some() {
            break;
        }
    }
    if world.env.ledger.violation.is_none() {
        world.check_end();
    }
    let Env { ledger, trace, now, .. } = world.env;
    History {
        violation: ledger.violation.clone(),
        jobs: ledger.jobs().len(),
        withdrawn: ledger.jobs().iter().filter(|job| job.last_end == Some(End::Withdrawn)).count(),
        handed_over: ledger.handed_over,
        faults: plan.faults.len(),
        lasted: now,
        steps,
        trace,
    }
}

impl World {
    fn happen(&mut self, what: Happening) {
        let env = &mut self.env;
        match what {
            Happening::Broker => env.run_broker(),
            Happening::Frame(emitted) => match env.owner(emitted.connection) {
                Some(Owner::Worker(life)) => self.with(life, |shell, env| shell.frame(env, *emitted)),
                Some(Owner::Publishers | Owner::Readers) => self.callers.frame(env, emitted.frame),
                None => {}
            },
            Happening::ConnectionNoticed(connection) => env.lose(connection),
            Happening::Start { worker } => self.start(worker),
            Happening::Connect(life) => self.with(life, Shell::connect),
            Happening::Tick(life) => self.tick(life),
            Happening::Timer(life) => self.with(life, Shell::timer),
            Happening::Idle(life) => self.with(life, Shell::idle),
            Happening::Decoded { life, job } => self.with(life, |shell, env| shell.decoded_later(env, job)),
            Happening::Prepared { life, job } => self.with(life, |shell, env| shell.prepared_later(env, job)),
            Happening::Fetched { life, job } => self.with(life, |shell, env| shell.inputs_fetched(env, job)),
            Happening::Counted { life, session, model, counts } => self.with(life, |shell, env| {
                shell.in_session(env, session, Event::QueuesCounted { model, counts });
            }),
            Happening::AcksSent { life, session, channel, sent } => self
                .with(life, |shell, env| shell.in_session(env, session, Event::AcksSent { channel, sent })),
            Happening::NackSent { life, session, job, sent } => {
                self.with(life, |shell, env| shell.in_session(env, session, Event::NackSent { job, sent }));
            }
            Happening::PassEnds { device, ticket } => {
                let Some((pass, fate, took, started)) = env.devices[device].end(ticket, env.now) else {
                    return;
                };
                env.started(device, started);
                self.with(pass.life, |shell, env| shell.pass_ended(env, pass.pass, fate, took));
            }
            Happening::PassReturns { life, pass } => {
                self.with(life, |shell, env| shell.pass_returns(env, pass));
            }
            Happening::Publish { caller } => self.callers.publish(env, caller),
            Happening::Withdraw { claim, repeats } => self.withdraw(claim, repeats),
            Happening::Withdrawal { life, session, claim } => {
                self.with(life, |shell, env| shell.withdrawal(env, session, claim));
            }
            Happening::LookedFor { life, session, model, queue } => {
                self.with(life, |shell, env| shell.looked_for(env, session, model, queue));
            }
            Happening::Fault { number, ends } => self.fault(number, ends),
        }
    }

    /// Runs `act` on a process, if that life still runs.
    fn with(&mut self, life: Life, act: impl FnOnce(&mut Shell, &mut Env)) {
        let Some(shell) = self.workers[life.worker].as_mut().filter(|shell| shell.life() == life) else {
            return;
        };
        act(shell, &mut self.env);
        self.after(life.worker);
    }

    /// Handles the end of a process, if it has ended.
    pub(super) fn after(&mut self, worker: usize) {
        let Some(exit) = self.workers[worker].as_ref().and_then(Shell::exit) else { return };
        let Some(shell) = self.workers[worker].take() else { return };
        let env = &mut self.env;
        env.disturbed();
        let late = self.noticed_late.take();
        for connection in shell.connections() {
            match late {
                Some(at) if exit == Exit::Died => {
                    env.forget(connection);
                    env.agenda.at(at, Happening::ConnectionNoticed(connection));
                }
                _ => env.lose(connection),
            }
        }
        let started = env.devices[shell.device()].leave(shell.life(), env.now);
        env.started(shell.device(), started);
        env.trace.line(env.now, format_args!("worker-{worker}"), || format!("process ended: {exit:?}"));
        let at = env.now + SECOND + env.random.bits() % (5 * SECOND);
        env.agenda.at(at, Happening::Start { worker });
    }

    /// Starts a process, or tries again later if its device has no room.
    fn start(&mut self, worker: usize) {
        self.lives[worker] += 1;
        let life = Life { worker, number: self.lives[worker] };
        let env = &mut self.env;
        let Some(shell) = Shell::start(life, &self.models, env) else {
            env.agenda.at(env.now + 5 * SECOND, Happening::Start { worker });
            return;
        };
        env.trace.line(env.now, format_args!("worker-{worker}"), || "process started".to_owned());
        self.workers[worker] = Some(shell);
        env.agenda.at(env.now + SECOND, Happening::Tick(life));
        self.with(life, Shell::connect);
    }

    fn tick(&mut self, life: Life) {
        let is_alive = self.workers[life.worker].as_ref().is_some_and(|shell| shell.life() == life);
        if !is_alive {
            return;
        }
        self.env.agenda.at(self.env.now + SECOND, Happening::Tick(life));
        self.with(life, Shell::tick);
        if self.env.operating.below(1_000) < self.env.plan.commanded_permille {
            self.with(life, Shell::idle_command);
        }
        self.callers.connect(&mut self.env);
        self.watch_waits();
        self.look_for_the_end();
    }

    fn look_for_the_end(&mut self) {
        let Env { now, plan, ledger, .. } = &self.env;
        if *now < plan.busy {
            return;
        }
        // A pass of a lost session may hang until its worker gives it up.
        let is_busy = self.workers.iter().flatten().any(Shell::has_passes);
        if ledger.open() > 0 || is_busy || self.left_in_queues().is_some() {
            self.ended_at = None;
            self.is_over = *now > plan.busy + SETTLED_WITHIN;
            return;
        }
        let ended_at = *self.ended_at.get_or_insert(*now);
        self.is_over = *now >= ended_at + QUIET;
    }

    /// A queue of jobs that is not empty, and how many jobs it holds. Copies left by a crash may continue after their job has ended.
    fn left_in_queues(&self) -> Option<(Name, usize)> {
        let Env { names, broker, .. } = &self.env;
        let of = |model: &'_ ModelNames| {
            model.queues().chain([&model.bulk, &model.suspects]).cloned().collect::<Vec<_>>()
        };
        let mut queues = names.models.iter().flat_map(of);
        queues.find_map(|queue| {
            let counts = broker.queue(&queue)?;
            let left = counts.ready + counts.unacked;
            (left > 0).then_some((queue, left))
        })
    }

    /// At the end: checks that every job has ended, and that every worker is in its initial state.
    fn check_end(&mut self) {
        self.env.ledger.check_all_ended();
        if let Some((queue, left)) = self.left_in_queues() {
            self.env.ledger.fail("the queues are empty in the end", || format!("{queue}: {left} messages"));
        }
        let (workers, env) = (&self.workers, &mut self.env);
        workers.iter().flatten().for_each(|shell| shell.check_at_rest(env));
    }
}

/// A model as its workers know it. A pass takes some bytes of its own, and some for each unit of cost.
fn facts(at: usize, model: &ModelPlan, plan: &Plan, names: &Names) -> ModelFacts {
    // The largest pass takes a quarter of the smallest device.
    let smallest = plan.devices.iter().map(|device| device.total).min().unwrap_or(MIB);
    let per_cost = smallest / 4 / model.pass_cost_max as u64;
    let cost = model.pass_cost_max;
    let serial_only = !model.concurrent;
    let key = format!("model-{at}");
    let weight = |weight: u32| NonZeroU32::new(weight).unwrap_or(NonZeroU32::MIN);
    let queue = |(name, of): (&Name, &u32)| QueueFacts { name: name.to_string(), weight: weight(*of) };
    ModelFacts {
        queues: names.models[at].queues().zip(plan.sharing.queues(at)).map(queue).collect(),
        name: key,
        larger: model.larger.then(|| LARGER_KEY.to_owned()),
        slots_max: NonZeroU16::new(model.slots_max).unwrap_or(NonZeroU16::MIN),
        slots: NonZeroU16::MIN,
        pass_cost_max: cost,
        job_shape: PassShape { items: 16, cost: cost / 8, longest: cost / 16 },
        reply_max: plan.reply_outputs_max.map_or(u64::MAX, |most| u64::from(most) * OUTPUT_BYTES as u64),
        share: weight(plan.sharing.model(at)),
        weights: 0,
        executor: ExecutorIndex(usize::from(!serial_only)),
        probe: PassShape { items: 1, cost: 8, longest: 8 },
        pass_bytes: Arc::new(move |shape| MIB + per_cost * shape.cost as u64),
    }
}
