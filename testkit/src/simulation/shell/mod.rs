//! A worker's process: a real core, and a thin shell that connects it to the simulated world as `vramq-worker` does to the real one. The
//! shell makes no decisions.

mod accounts;
mod as_known;
mod attempts;
mod channels;
mod checks;
mod confirms;
mod figures;
mod frames;
mod fullness;
mod further;
mod intake;
mod leaks;
mod limits;
mod observations;
mod operators;
mod pace;
mod passes;
mod perform;
mod publications;
mod references;
mod reply_caps;
mod results;
mod sabotage;
mod session;
mod shares;
mod shortage;
mod start;
mod stored_job;
mod tamper;
mod trace;
mod withdrawals;

pub use frames::id_of;
pub use limits::{LimitsFile, RanOut};
pub use passes::OUTPUT_BYTES;
pub use sabotage::Sabotage;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use vramq_core::Core;
use vramq_core::action::SessionEnd;
use vramq_core::admission::BudgetView;
use vramq_core::device::Loss;
use vramq_core::event::{Event, Reading};
use vramq_core::ids::{JobKey, PassId};
use vramq_core::settings::ModelFacts;
use vramq_schemas::status::WorkerState;

use super::agenda::{Happening, Life, MILLI, Micros, SECOND};
use super::env::Env;
use super::ledger::{JobNumber, Letter};
use figures::{Load, Memories};
use leaks::Leak;
use limits::Seen;
use observations::Observations;
use operators::Operators;
use pace::{Drain, Health};
use passes::{Executor, Flight};
use references::Silence;
use sabotage::Verdict;
use session::Session;
use shares::Shares;
use stored_job::StoredJob;

/// Bytes of jobs.
#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    /// Of all that were delivered.
    consumed: usize,
    /// Of those that were requeued to make room for other large jobs.
    handed_over: usize,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Drained,
    Killed,
    /// The process died without warning.
    Died,
}

/// A worker's process.
#[derive(Debug)]
pub struct Shell {
    life: Life,
    core: Core,
    budget: BudgetView,
    models: Arc<Vec<ModelFacts>>,
    executors: Vec<Executor>,
    device: usize,
    session: Option<Session>,
    sessions: u32,
    settled: u64,
    settled_at_open: u64,
    bytes: Bytes,
    is_closing: bool,
    ending: Option<SessionEnd>,
    ready: VecDeque<Event>,
    jobs: BTreeMap<JobKey, StoredJob>,
    last_job: u64,
    passes: BTreeMap<PassId, Flight>,
    operators: Operators,
    observations: Observations,
    health: Health,
    drain: Drain,
    memories: Memories,
    leak: Leak,
    /// Of each model: what its jobs cost.
    load: Vec<Load>,
    /// Passes that ran out of memory alone, by model and length of the longest item, with their bytes. Cleared when saved.
    ran_out: Vec<((usize, usize), u64)>,
    seen_limits: Seen,
    /// Bytes that were left for passes when one ran out of memory, until the next second's reading.
    short_of: Option<u64>,
    /// For each model: device time of its passes; and the longest pass of all models.
    model_time: Vec<Micros>,
    /// For each model: the device time of all models when its current backlog began (since then it has had waiting jobs at the end of every
    /// pass).
    model_backlogs: BTreeMap<usize, Vec<Micros>>,
    longest_pass: Micros,
    shares: Shares,
    /// Messages that were acknowledged, with the time and the session of the ack.
    answered: BTreeMap<Letter, (Micros, u32)>,
    /// Whether it gave a job back to its queue.
    gave_back: bool,
    /// Whether the broker blocks publishers.
    is_blocked: bool,
    /// The broker's time limit for a delivery, as learned from a closed channel.
    learned_timeout: Option<Micros>,
    /// Seconds without a pass.
    idle_ticks: u32,
    /// The process dies after so many more actions.
    die_after: Option<u32>,
    exit: Option<Exit>,
    timer_at: Option<Micros>,
    idle_is_due: bool,
    backoff: u32,
    lost: Option<Loss>,
    /// Its programs cannot be loaded.
    cannot_load: bool,
    culprit: Option<PassId>,
    sabotage: Option<Sabotage>,
    /// For each store and caller whose job it did not answer: when that was last.
    silences: BTreeMap<(u64, Option<Arc<str>>), Silence>,
    /// When the last withdrawal of each job arrived.
    heard: BTreeMap<JobNumber, Micros>,
    /// Passes that must be skipped if they have not begun.
    skips: BTreeSet<PassId>,
}

impl Shell {
    pub fn life(&self) -> Life {
        self.life
    }

    pub fn device(&self) -> usize {
        self.device
    }

    /// How the process ended, if it has.
    pub fn exit(&self) -> Option<Exit> {
        self.exit
    }

    /// Whether its executors have passes, of any session.
    pub fn has_passes(&self) -> bool {
        !self.passes.is_empty()
    }

    pub fn die_after(&mut self, actions: u32) {
        self.die_after = Some(actions);
    }

    pub fn die(&mut self) {
        self.exit.get_or_insert(Exit::Died);
    }

    pub fn lose_device(&mut self, loss: Loss) {
        self.lost.get_or_insert(loss);
    }

    /// Whether its session has been open for a while, and it neither drains, pauses nor lacks anything.
    pub fn is_well(&self, now: Micros) -> bool {
        let state = self.core.status().state;
        let has_session = self.session.as_ref().is_some_and(|session| now > session.opened_at + 2 * SECOND);
        has_session && self.lost.is_none() && matches!(state, WorkerState::Consuming | WorkerState::Isolating)
    }

    /// One of the jobs that it holds, if any.
    pub fn any_job(&self, choice: usize) -> Option<JobNumber> {
        let count = self.jobs.len().max(1);
        self.jobs.values().nth(choice % count).map(|stored| stored.job)
    }

    /// Applies an event to the core, and carries out all resulting actions.
    pub fn handle(&mut self, env: &mut Env, event: Event) {
        if self.exit.is_some() {
            return;
        }
        self.apply(env, event);
        if self.exit.is_some() {
            return;
        }
        if self.session.is_some() && self.ending.is_none() {
            if env.random.chance(60) {
                self.apply(env, Event::Idle);
            } else if !self.idle_is_due {
                self.idle_is_due = true;
                let at = env.soon(MILLI);
                env.agenda.at(at, Happening::Idle(self.life));
            }
        }
        self.after_events(env);
    }

    pub fn idle(&mut self, env: &mut Env) {
        self.idle_is_due = false;
        if self.exit.is_none() && self.session.is_some() {
            self.apply(env, Event::Idle);
            self.after_events(env);
        }
    }

    /// A second has passed.
    pub fn tick(&mut self, env: &mut Env) {
        self.judge_confirms(env);
        if self.exit.is_some() || self.session.is_none() {
            return;
        }
        let device = &env.devices[self.device];
        let hanging = device.hanging_pass(self.life).and_then(|pass| self.passes.get(&pass)?.of_one_job());
        let on_device = device.on_device(self.life, env.base());
        let culprit = self.culprit.or(on_device.filter(|pass| !pass.waits).map(|pass| pass.pass));
        let (memory, passes) = self.read_memory(env);
        let reading = Reading { memory, passes, lost: self.lost.clone(), on_device, culprit };
        if let Some(job) = hanging {
            env.ledger.excuses_mut(job).hung_alone = true;
        }
        if env.devices[self.device].is_hanging() {
            self.jobs.values_mut().for_each(|stored| stored.was_behind_hung = true);
        }
        let is_busy = self.passes.values().any(|flight| flight.session == self.sessions);
        self.idle_ticks = if is_busy { 0 } else { self.idle_ticks + 1 };
        self.check_trimmed(env);
        self.shortage_ends();
        self.handle(env, Event::Tick(reading.clone()));
        if self.exit.is_some() || self.session.is_none() {
            return;
        }
        self.check_sizes_of_core(env);
        self.check_room_is_used(env);
        self.check_requests(env);
        self.check_pace(env);
        self.check_queues(env);
        self.check_figures(env, &reading);
    }

    pub fn timer(&mut self, env: &mut Env) {
        self.timer_at = None;
        if self.session.is_some() {
            self.handle(env, Event::Timer);
            self.check_timers(env);
        }
    }

    /// A signal that asks the process to stop.
    pub fn stop(&mut self, env: &mut Env) {
        if self.session.is_some() {
            self.handle(env, Event::StopRequested { signal: "SIGTERM" });
        } else {
            self.exit.get_or_insert(Exit::Drained);
        }
    }

    fn apply(&mut self, env: &mut Env, event: Event) {
        if self.exit.is_some() {
            return;
        }
        self.ready.push_back(event);
        while let Some(mut event) = self.ready.pop_front() {
            self.trace_event(env, &event);
            if self.tamper_event(&mut event) == Verdict::IsLost {
                continue;
            }
            let (expected, may_drain) = (self.expect(&event), self.note_event(env.now, &event));
            let actions = self.core.apply(event, env.clock());
            for mut action in actions {
                if let Some(left) = &mut self.die_after {
                    if *left == 0 {
                        return self.die();
                    }
                    *left -= 1;
                }
                if self.tamper_action(&mut action) == Verdict::IsLost {
                    continue;
                }
                self.trace_action(env, &action);
                self.perform(env, action);
                if self.exit.is_some() {
                    return;
                }
            }
            self.check_counted(env, &expected);
            self.check_drain(env, may_drain);
            self.check(env);
        }
    }

    /// Ends the session if the core requested that, and schedules the next timer.
    fn after_events(&mut self, env: &mut Env) {
        if let Some(end) = self.ending.take() {
            self.finish(env, end);
        }
        let due = self.core.next_timer().map(|at| env.micros_of(at).max(env.now));
        if let Some(at) = due
            && self.exit.is_none()
            && self.timer_at.is_none_or(|set| at < set)
        {
            self.timer_at = Some(at);
            env.agenda.at(at + 1, Happening::Timer(self.life));
        }
    }

    fn who(&self) -> impl std::fmt::Display + use<> {
        format!("worker-{}", self.life.worker)
    }
}
