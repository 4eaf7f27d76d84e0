//! Records what the end of a pass means for its jobs. Checks compare this with the worker's decisions.

use vramq_core::action::PassOrder;
use vramq_core::device::{OutOfMemory, PassError};
use vramq_core::event::{PassEnd, PassResult};
use vramq_core::ids::{ItemIndex, PassId};
use vramq_schemas::{Attempt, Reason};

use super::Shell;
use super::passes::Flight;
use crate::simulation::env::Env;
use crate::simulation::ledger::{JobNumber, Nature};

impl Shell {
    /// Takes note of what a pass's end means for its jobs, the limits and the device.
    pub(super) fn note_result(&mut self, env: &Env, flight: &Flight, result: &PassResult) {
        if flight.order.items.is_empty() {
            return self.probed(env, result);
        }
        let mut keys: Vec<_> = flight.order.items.iter().map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys.dedup();
        let is_serial = self.executors[flight.executor.0].is_serial();
        match result {
            PassResult::Failed(PassError::OutOfMemory { oom, .. }) => {
                let (alone, PassOrder { model, shape, items, .. }) = (flight.was_alone(oom), &flight.order);
                self.ran_out(*model, *shape, oom, alone);
                self.note_shortage(env);
                for key in keys {
                    let first = items.iter().filter(|(of, _)| *of == key).map(|(_, item)| *item).min();
                    let attempt = self.attempt(env, flight, oom, first.unwrap_or(ItemIndex(0)));
                    self.jobs
                        .get_mut(&key)
                        .into_iter()
                        .for_each(|stored| stored.ran_out.push(attempt.clone()));
                }
            }
            PassResult::Failed(PassError::Crashed(_)) => {
                for key in keys {
                    self.jobs.get_mut(&key).into_iter().for_each(|stored| stored.programs_lost += 1);
                }
            }
            PassResult::Failed(PassError::DiskFull(_)) => {
                let is_alone = keys.len() == 1;
                for key in keys {
                    if let Some(stored) = self.jobs.get_mut(&key) {
                        stored.may_be_alone = true;
                        stored.had_no_room_alone |= is_alone;
                    }
                }
            }
            PassResult::Failed(_) => {
                for key in keys {
                    if let Some(stored) = self.jobs.get_mut(&key) {
                        stored.may_be_alone = true;
                        stored.failed_at = if is_serial { Some(env.now) } else { stored.failed_at };
                    }
                }
            }
            _ => {}
        }
    }

    /// The item that an engine names as invalid. Most engines name one, of a job that is really invalid.
    pub(super) fn named_item(&self, env: &mut Env, pass: PassId) -> Option<usize> {
        let flight = self.passes.get(&pass)?;
        let invalid = |job: &JobNumber| env.ledger.job(*job).spec.nature == Nature::Invalid;
        let at = flight.jobs.iter().position(invalid)?;
        env.random.chance(70).then_some(at)
    }

    /// A process died in a pass. Attributes this to the job that kills processes, if the pass has one.
    pub(super) fn note_killer(&self, env: &mut Env, pass: PassId) {
        let Some(flight) = self.passes.get(&pass) else { return };
        let killer = |job: &&JobNumber| env.ledger.job(**job).spec.nature == Nature::PoisonPass;
        if let Some(job) = flight.jobs.iter().find(killer).copied() {
            env.ledger.killed(job);
        }
    }

    /// A pass with only this job failed, which explains how the job may end.
    pub(super) fn note_failure(&self, env: &mut Env, job: JobNumber, items: usize, error: &PassError) {
        let excuses = env.ledger.excuses_mut(job);
        match error {
            PassError::OutOfMemory { .. } => excuses.out_of_memory_alone |= items == 1,
            PassError::Failed(_) | PassError::FailedItem { .. } => excuses.failed_alone = true,
            PassError::TimedOut(_) => excuses.hung_alone = true,
            PassError::Crashed(_) | PassError::DeviceLost(_) => excuses.died_alone += 1,
            // The job's nature explains this error, or no job causes it.
            PassError::InvalidInput { .. } | PassError::DiskFull(_) => {}
        }
    }

    /// The history entry of a job for an out-of-memory. `item`: the job's first item in the pass.
    fn attempt(&self, env: &Env, flight: &Flight, oom: &OutOfMemory, item: ItemIndex) -> Attempt {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        Attempt {
            at_ms: env.unix_ms(),
            worker: format!("worker-{}", self.life.worker),
            device: format!("device-{}", self.device),
            outcome: Reason::OutOfMemory.as_str().to_owned(),
            item: item.0,
            items: count(flight.order.items.len()),
            longest: count(flight.order.shape.longest),
            asked: oom.asked,
            free: oom.free,
            total: oom.total,
            foreign: oom.foreign,
            alone: flight.was_alone(oom),
        }
    }

    /// Records each job's share of a pass that fitted, by the cost of its items.
    pub(super) fn note_times(&mut self, env: &Env, flight: &Flight, end: &PassEnd) {
        if !matches!(end.result, PassResult::Done) {
            return;
        }
        let took = u64::try_from(end.took.as_micros()).unwrap_or(u64::MAX);
        for ((key, item), job) in flight.order.items.iter().zip(&flight.jobs) {
            let cost =
                env.ledger.job(*job).spec.costs.get(item.0 as usize).copied().unwrap_or(0).max(1) as u64;
            if let Some(stored) = self.jobs.get_mut(key) {
                // To the nanosecond, or a thousand items would lose a millisecond.
                stored.had_device += took * 1_000 * cost / (flight.order.shape.cost.max(1) as u64);
            }
        }
    }
}
