//! Checks the content of heartbeats each second: jobs and memory must be the worker's, and must explain its state.

use std::collections::VecDeque;

use vramq_core::action::JobQueue;
use vramq_core::event::Reading;
use vramq_core::ids::ModelIndex;
use vramq_core::status::Status;
use vramq_schemas::status::WorkerState;

use super::Shell;
use super::session::Lease;
use super::start::{RESERVE, RESIDENT};
use crate::simulation::env::Env;

/// Slots shrink two seconds after the memory. They grow ten seconds after it, to the least that was free meanwhile, and then further.
const SHRUNK_WITHIN: usize = 5;
const GROWN_WITHIN: usize = 24;

/// Jobs for which a model always has room, if they fit its equal part.
const JOBS_MIN: u16 = 2;

/// How many recent job costs of a model are kept.
const COSTS_KEPT: usize = 32;

/// After so many seconds, the number of jobs that a model holds must match their cost.
const SETTLED_AFTER: u32 = 5;

/// Seconds without a pass after which memory goes back.
const TRIMMED_AFTER: u32 = 10;

/// What the device had at the last readings.
#[derive(Debug, Default)]
pub(super) struct Memories {
    /// For each reading in this session: the bytes for jobs.
    readings: VecDeque<u64>,
}

/// What is known of a model's jobs.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    /// What the last jobs cost that were read, newest last.
    costs: VecDeque<usize>,
    /// Consecutive seconds in which many jobs waited at the broker while the worker was well.
    backlog: u32,
}

impl Memories {
    /// Forgets the readings: without a session nothing follows the memory.
    pub(super) fn session_ended(&mut self) {
        self.readings.clear();
    }
}

impl Load {
    pub(super) fn decoded(&mut self, cost: usize) {
        if self.costs.len() == COSTS_KEPT {
            self.costs.pop_front();
        }
        self.costs.push_back(cost.max(1));
    }
}

impl Shell {
    /// After a reading of the device: checks heartbeats and gauges.
    pub(super) fn check_figures(&mut self, env: &mut Env, reading: &Reading) {
        let status = self.core.status();
        let who = self.life.worker;
        let wrong = self.wrong_state(&status).or_else(|| self.wrong_counts(&status));
        let wrong =
            wrong.or_else(|| self.wrong_memory(env, reading)).or_else(|| self.wrong_slots(reading, &status));
        let wrong = wrong.or_else(|| self.wrong_hold(env, &status));
        let told = self.core.memory_status(env.clock().at);
        let wrong = wrong.or_else(|| self.wrong_leak(env, reading, &status, &told));
        if let Some(what) = wrong {
            env.ledger.fail("heartbeats match worker state", || format!("worker-{who}: {what}: {status:?}"));
        }
    }

    /// Checks that kept memory is given back only after some seconds without a pass.
    pub(super) fn check_trim(&mut self, env: &mut Env) {
        if self.idle_ticks != TRIMMED_AFTER {
            let (who, ticks) = (self.life.worker, self.idle_ticks);
            env.ledger.fail("kept memory goes back after ten seconds without a pass", || {
                format!("worker-{who}: after {ticks}")
            });
        }
        // It is done.
        self.idle_ticks = TRIMMED_AFTER + 1;
    }

    /// Checks that it is given back then: one second later it must be done.
    pub(super) fn check_trimmed(&self, env: &mut Env) {
        if self.idle_ticks == TRIMMED_AFTER + 1 {
            let who = self.life.worker;
            env.ledger
                .fail("kept memory goes back after ten seconds without a pass", || format!("worker-{who}"));
        }
    }

    fn wrong_state(&self, status: &Status) -> Option<&'static str> {
        let has_no_room = status.models.iter().all(|model| model.slots == 0);
        let is_right = match status.state {
            WorkerState::Draining => self.core.is_draining(),
            WorkerState::Sick => status.is_sick,
            WorkerState::Blocked => self.is_blocked,
            WorkerState::Paused => self.operators.is_paused,
            WorkerState::NoRoom => has_no_room,
            WorkerState::Isolating => true,
            WorkerState::Consuming => {
                !(self.core.is_draining()
                    || status.is_sick
                    || self.is_blocked
                    || self.operators.is_paused
                    || has_no_room)
            }
            _ => false,
        };
        let has_reason = status.reason.is_some() == (status.state != WorkerState::Consuming);
        (!is_right || !has_reason || status.is_blocked != self.is_blocked).then_some("another state")
    }

    fn wrong_counts(&self, status: &Status) -> Option<&'static str> {
        for (at, told) in status.models.iter().enumerate() {
            let of_model = || self.jobs.values().filter(|stored| stored.model == ModelIndex(at));
            let leases = self.session.iter().flat_map(|session| &session.leases);
            let is_consuming =
                leases.clone().any(|lease| lease.model == ModelIndex(at) && !lease.is_stopping);
            let may_wait = of_model().filter(|stored| stored.is_decoded && stored.end.is_none()).count();
            if told.unacked != of_model().count() || told.waiting > may_wait {
                return Some("other jobs");
            }
            if told.is_consuming != is_consuming {
                return Some("other consumers");
            }
            if told.slots > self.models[at].slots_max.get() {
                return Some("more slots than there may be");
            }
        }
        None
    }

    /// Checks that the budget is the free memory without the reserve, counting the memory of passes as free.
    fn wrong_memory(&self, env: &Env, reading: &Reading) -> Option<&'static str> {
        let (memory, active) = (reading.memory, reading.passes.own);
        let told = self.core.memory_status(env.clock().at);
        let used = (memory.total - memory.free - active) as f64 / memory.total as f64;
        let is_told = (told.pressure_ratio - used).abs() < 0.001 && told.resident == RESIDENT;
        let has_budget = self.budget.limit() == (memory.free + active).saturating_sub(RESERVE);
        (!is_told || !has_budget).then_some("other memory")
    }

    /// Checks that slots follow the memory: down within seconds, up after a lasting change.
    fn wrong_slots(&mut self, reading: &Reading, status: &Status) -> Option<&'static str> {
        let total = (reading.memory.free + reading.passes.own).saturating_sub(RESERVE);
        let readings = &mut self.memories.readings;
        readings.push_back(total);
        if readings.len() > GROWN_WITHIN {
            readings.pop_front();
        }
        let latest = |count: usize| {
            let bytes = readings.iter().rev().take(count).copied();
            (readings.len() >= count).then_some(bytes)
        };
        for (model, told) in self.models.iter().zip(&status.models) {
            let slots = told.slots;
            if let Some(most) = latest(SHRUNK_WITHIN).and_then(Iterator::max) {
                let fitting = fitting(model, most);
                if fitting < slots && fitting <= slots - (slots / 8).max(1) {
                    return Some("slots without memory");
                }
            }
            if let Some(least) = latest(GROWN_WITHIN).and_then(Iterator::min) {
                let fitting = match self.models.len() {
                    1 => fitting(model, least),
                    count => fitting(model, least / count as u64).min(JOBS_MIN),
                };
                if fitting >= slots.saturating_add((slots / 4).max(1)) {
                    return Some("fewer slots than fit");
                }
            }
        }
        None
    }

    /// Checks that with a backlog a worker holds about two passes of work. With less its device would wait; with much more, other workers
    /// would.
    fn wrong_hold(&mut self, env: &Env, status: &Status) -> Option<&'static str> {
        for (at, told) in status.models.iter().enumerate() {
            let model = &self.models[at];
            let names = &env.names.models[at];
            let waiting = env.broker.queue(&names.jobs).map_or(0, |counts| counts.ready);
            let load = &mut self.load[at];
            let is_well = status.state == WorkerState::Consuming && env.faults_now == 0;
            load.backlog = if is_well && waiting > usize::from(told.slots) { load.backlog + 1 } else { 0 };
            let (Some(smallest), Some(largest)) = (load.costs.iter().min(), load.costs.iter().max()) else {
                continue;
            };
            let leases =
                || self.session.iter().flat_map(|session| &session.leases).filter(|lease| !lease.is_stopping);
            let of_jobs = leases().filter(|lease| lease.model.0 == at && lease.queue != JobQueue::Bulk);
            let prefetch: usize = of_jobs.map(|lease| usize::from(lease.prefetch)).sum();
            // Deliveries of stopped consumers take slots until they are settled.
            let is_live = |consumer| leases().any(|lease| Some(lease.consumer) == consumer);
            let of_model = self.jobs.values().filter(|stored| stored.model.0 == at);
            let others = of_model.filter(|stored| !is_live(stored.consumer)).count();
            // A consumer of a queue that lends its slots is being stopped. Its slots are used by other queues only after it has ended.
            let is_stopping = |lease: &&Lease| lease.is_stopping && lease.model.0 == at;
            let all = self.session.iter().flat_map(|session| &session.leases);
            let stopping: usize = all.filter(is_stopping).map(|lease| usize::from(lease.prefetch)).sum();
            let passes = 2 * model.pass_cost_max;
            // A model keeps slots for large jobs.
            let slots = usize::from(told.slots.saturating_sub(2).max(1));
            let least = passes.div_ceil(*largest).min(slots).min(slots / 2 + 1);
            // A single slot serves large and other jobs in turns. With fewer slots than queues, the queues take turns too.
            let has_turns = usize::from(told.slots) < model.queues.len() + 2 && model.queues.len() > 1;
            if told.slots > 1
                && !has_turns
                && load.backlog > SETTLED_AFTER
                && prefetch + others + stopping < least
            {
                return Some("too little work for its device");
            }
            let per_second = 1_000_000 / env.plan.models[at].micros_per_cost as usize;
            let most = (passes + per_second / 2).div_ceil(*smallest);
            if load.costs.len() == COSTS_KEPT && prefetch > (4 * most).max(8) {
                return Some("more work than it can need");
            }
        }
        None
    }
}

/// How many jobs of a model fit so many bytes; one, if at least its longest item fits.
fn fitting(model: &vramq_core::settings::ModelFacts, bytes: u64) -> u16 {
    let slots = u16::try_from(bytes / model.job_passes().job_bytes(bytes).max(1)).unwrap_or(u16::MAX);
    let longest = model.job_shape.longest;
    let item = vramq_core::device::PassShape { items: 1, cost: longest, longest };
    match slots {
        0 => u16::from(bytes >= (model.pass_bytes)(item)),
        some => some.min(model.slots_max.get()),
    }
}
