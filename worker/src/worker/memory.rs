//! The loop's eye on the device's memory: the budget follows it at once, slots with hysteresis; what stays nearly full, or
//! fills up, is told, and ends in a restart.

use std::ops::ControlFlow;
use std::time::Instant;

use super::{Loop, Outcome};
use crate::admission::Mib;
use crate::device::Memory;
use crate::pressure::Leaking;

/// Ticks without a pass after which memory that is kept for the next one goes back to the system: long enough that a
/// load with pauses does not pay for it again and again.
const TRIM_AFTER_TICKS: u32 = 10;

/// Readings of the memory that may be disturbed by a pass, before one is taken as it is: passes take much longer.
const READINGS_MAX: usize = 3;

impl Loop<'_> {
    /// Reads the memory and follows it.
    pub(super) async fn watch_memory(&mut self) -> ControlFlow<Outcome> {
        let (memory, passing) = self.read_memory();
        let free = memory.free + passing;
        let now = Instant::now();
        self.host.budget.set_limit(free.saturating_sub(self.host.reserve));
        self.follow_memory(free, now);
        let starved = self.host.capacities.iter().all(|capacity| capacity.slots() == 0);
        if self.host.pressure.observe(memory, passing, starved, now) && !self.host.draining {
            let Memory { free, total, foreign } = memory;
            let (free, total, foreign, own) = (Mib(free), Mib(total), Mib(foreign), Mib(memory.own()));
            tracing::error!(%own, %foreign, %free, %total, "the device stays nearly full: draining for a restart");
            self.host.restarting = true;
            self.drain().await?;
        }
        self.trim_when_idle();
        self.follow_capacity().await
    }

    /// The memory, and what passes hold of it: that comes back to our passes. The two are read one after the other, so
    /// again if a pass began or ended in between.
    fn read_memory(&self) -> (Memory, u64) {
        let device = &self.host.device;
        let mut passing = device.passing();
        for _ in 0..READINGS_MAX {
            let memory = device.memory();
            let now = device.passing();
            if now == passing {
                return (memory, passing);
            }
            passing = now;
        }
        let memory = device.memory();
        (memory, passing.min(memory.own()))
    }

    fn trim_when_idle(&mut self) {
        self.idle_ticks = if self.passes > 0 { 0 } else { self.idle_ticks.saturating_add(1) };
        if self.idle_ticks == TRIM_AFTER_TICKS {
            self.host.device.trim();
        }
    }

    fn follow_memory(&mut self, free: u64, now: Instant) {
        let count = self.host.models.len() as u64;
        for (model, capacity) in self.host.models.iter().zip(&mut self.host.capacities) {
            let fitting = model.slots_now(free, self.host.reserve, count);
            let before = capacity.slots();
            let Some(slots) = capacity.observe(fitting, now) else { continue };
            let (name, free) = (&model.name, Mib(free));
            if slots == 0 {
                tracing::warn!(model = name, before, %free, "no room for a single item: not consuming");
            } else {
                tracing::info!(model = name, before, slots, %free, "slots follow the device's memory");
            }
        }
    }

    /// Looks for a leak, after a pass.
    pub(super) fn watch_leak(&mut self, memory: Memory) {
        let jobs = self.host.meters.answered();
        if let Some(Leaking { grown, bytes_per_job, jobs_left }) = self.host.leak.observe(memory, jobs) {
            let (device, grown) = (self.host.device.name(), Mib(grown));
            tracing::warn!(
                device,
                %grown,
                bytes_per_job,
                jobs_left,
                "device memory grows with every job: a leak"
            );
        }
    }
}
