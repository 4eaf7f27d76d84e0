//! Checks leaks: a worker reports how much more memory its process holds than after its first passes, and restarts when that fills the
//! device.

use vramq_core::event::Reading;
use vramq_core::status::{MemoryStatus, Status};

use super::Shell;
use super::start::RESIDENT;
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;

/// Passes after which what a process holds is its normal.
const WARM_UP_PASSES: u32 = 20;

/// Growth below this part of the device is noise.
const NOISE: u64 = 256;

/// Percent of the device that are nearly all of it, and for how long that is tolerated.
pub(super) const FULL_PERCENT: u8 = 90;
pub(super) const FULL_FOR: Micros = 300 * SECOND;

/// What a process holds more and more of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leak {
    passes: u32,
    /// Bytes held and jobs answered after the first passes.
    before: (u64, u64),
    /// What the worker should tell: bytes more than then, and for each job since.
    told: (u64, u64),
    /// Jobs whose last reply is confirmed.
    pub(super) answered: u64,
    /// Since when the device has been nearly full of it.
    full_since: Option<Micros>,
}

impl Shell {
    /// A pass of jobs fitted, after which the process holds so much.
    pub(super) fn note_held(&mut self, env: &mut Env, own: u64, total: u64) {
        let leak = &mut self.leak;
        leak.passes += 1;
        if leak.passes == WARM_UP_PASSES {
            leak.before = (own, leak.answered);
        } else if leak.passes > WARM_UP_PASSES {
            let (grown, jobs) = (own.saturating_sub(leak.before.0), (leak.answered - leak.before.1).max(1));
            leak.told = (grown, if grown < total / NOISE { 0 } else { grown.div_ceil(jobs) });
        }
        // A leak is a fault, and every job ends within an hour after the last one: a process that leaks for ever has memory for a few
        // hundred passes, and then none for five minutes.
        if env.now < env.plan.busy {
            env.devices[self.device].leak(self.life, env.plan.leaked_by_pass);
        }
    }

    /// Whether a device has been nearly full for too long, by memory that a restart gives back.
    pub(super) fn is_full(&self, now: Micros) -> bool {
        self.leak.full_since.is_some_and(|since| now - since >= FULL_FOR)
    }

    /// After a reading: what the worker reports of the leak and of the full device, and that it does not stay like that.
    pub(super) fn wrong_leak(
        &mut self,
        env: &Env,
        reading: &Reading,
        status: &Status,
        told: &MemoryStatus,
    ) -> Option<&'static str> {
        let is_serial = self.models.iter().all(|model| self.executors[model.executor.0].is_serial());
        // What programs hold beside a pass looks like a leak.
        if is_serial && (told.leaked, told.leaked_per_job) != self.leak.told {
            return Some("another leak");
        }
        let (memory, active) = (reading.memory, reading.passes.own);
        let used = memory.total - memory.free - active;
        let grown = memory.own().saturating_sub(active).saturating_sub(RESIDENT);
        let has_no_room = status.models.iter().all(|model| model.slots == 0);
        let is_full = used * 100 >= memory.total * u64::from(FULL_PERCENT) || has_no_room;
        if !is_full || grown <= memory.total / NOISE {
            self.leak.full_since = None;
        } else {
            self.leak.full_since.get_or_insert(env.now);
        }
        let lasted = self.leak.full_since.map_or(0, |since| env.now - since);
        if told.pressure_lasted.as_micros() != u128::from(lasted) {
            return Some("a device that is full for another time");
        }
        (self.is_full(env.now) && !self.core.is_draining()).then_some("a full device and no restart")
    }
}
