//! Checks leaks: a worker reports how much more memory its process holds than after its first passes, and restarts when the leak fills the
//! device.

use vramq_core::event::Reading;
use vramq_core::status::{MemoryStatus, Status};

use super::Shell;
use super::start::RESIDENT;
use crate::simulation::agenda::{Micros, SECOND};
use crate::simulation::env::Env;

/// After so many passes, the memory of a process counts as normal.
const WARM_UP_PASSES: u32 = 20;

/// Growth below this part of the device is noise.
const NOISE: u64 = 256;

/// The percentage from which on the device counts as nearly full, and how long that is tolerated.
pub(super) const FULL_PERCENT: u8 = 90;
pub(super) const FULL_FOR: Micros = 300 * SECOND;

/// The expected leak of a process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Leak {
    passes: u32,
    /// Bytes held and jobs answered after the first passes.
    before: (u64, u64),
    /// The leak that the worker must report: bytes more than then, and bytes per job since.
    told: (u64, u64),
    /// Jobs whose last reply is confirmed.
    pub(super) answered: u64,
    /// Since when the leak has filled the device nearly completely.
    full_since: Option<Micros>,
}

impl Shell {
    /// A pass of jobs has fitted. `own`: bytes that the process holds after it.
    pub(super) fn note_held(&mut self, env: &mut Env, own: u64, total: u64) {
        let leak = &mut self.leak;
        leak.passes += 1;
        if leak.passes == WARM_UP_PASSES {
            leak.before = (own, leak.answered);
        } else if leak.passes > WARM_UP_PASSES {
            let (grown, jobs) = (own.saturating_sub(leak.before.0), (leak.answered - leak.before.1).max(1));
            leak.told = (grown, if grown < total / NOISE { 0 } else { grown.div_ceil(jobs) });
        }
        // Leaks are faults, and end with the busy time: every job must end within an hour after the last fault, but a leaking process has
        // memory for a few hundred passes, and then none for five minutes.
        if env.now < env.plan.busy {
            env.devices[self.device].leak(self.life, env.plan.leaked_by_pass);
        }
    }

    /// Whether the device has been nearly full for too long, with memory that a restart would free.
    pub(super) fn is_full(&self, now: Micros) -> bool {
        self.leak.full_since.is_some_and(|since| now - since >= FULL_FOR)
    }

    /// After a reading: checks the reported leak, and that the worker restarts when the device is full.
    pub(super) fn wrong_leak(
        &mut self,
        env: &Env,
        reading: &Reading,
        status: &Status,
        told: &MemoryStatus,
    ) -> Option<&'static str> {
        let is_serial = self.models.iter().all(|model| self.executors[model.executor.0].is_serial());
        // Memory that programs hold beside a pass looks like a leak.
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
