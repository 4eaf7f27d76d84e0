//! What the loop lets others see of itself: its state on the board, and the gauges.

use vramq_schemas::status::{CeilingStatus, WorkerState};

use super::Loop;
use crate::board::Now;

impl Loop<'_> {
    /// Shows what is so now. Called whenever the loop has nothing at hand, so it costs a comparison and a few stores.
    pub(super) fn tell(&self) {
        let host = &*self.host;
        host.board.set(self.doing());
        for (index, meters) in host.meters.models.iter().enumerate() {
            meters.slots.set(host.capacities[index].slots().into());
            meters.in_hand.set(count(self.in_hand[index]));
            meters.waiting.set(count(self.batchers[index].waiting()));
            meters.consuming.set(self.consuming[index].is_on().into());
        }
        host.meters.worker.blocked.set(self.broker_blocks.into());
        host.meters.device.circuit_open.set(host.health.is_sick().into());
    }

    /// Shows that the loop runs, and what changes slowly.
    pub(super) fn tell_slowly(&self) {
        let host = &*self.host;
        host.board.ticked();
        let device = &host.meters.device;
        device.resident_bytes.set(host.resident.cast_signed());
        device.pressure_ratio.set(host.pressure.ratio());
        device.pressure_seconds.set(host.pressure.lasted(std::time::Instant::now()).as_secs_f64());
        let (grown, per_job) = host.leak.growth();
        device.leaked_bytes.set(grown.cast_signed());
        device.leaked_per_job.set(per_job.cast_signed());
        let ceilings = host.ceilings.known().map(|(place, ceiling)| CeilingStatus {
            model: place.model.clone(),
            device: place.device.clone(),
            longest_max: place.longest_max as u64,
            limit: ceiling.limit,
            fitted: ceiling.fitted,
            failed: ceiling.failed,
        });
        host.board.set_ceilings(ceilings.collect());
    }

    fn doing(&self) -> Now {
        let host = &*self.host;
        if host.restarting {
            return Now::new(WorkerState::Draining, "draining for a restart");
        }
        if host.draining {
            return Now::new(WorkerState::Draining, "told to stop");
        }
        if host.health.is_sick() {
            return Now::new(WorkerState::Sick, "not even a canary runs on the device");
        }
        if self.broker_blocks {
            return Now::new(WorkerState::Blocked, "the broker takes no publishes: a memory or disk alarm");
        }
        if host.paused {
            return Now::new(WorkerState::Paused, "told to take no jobs");
        }
        if self.quiet_for.is_some() {
            return Now::new(WorkerState::Isolating, "suspects run alone");
        }
        if host.capacities.iter().all(|capacity| capacity.slots() == 0) {
            return Now::new(WorkerState::NoRoom, "the device has no room for a single item");
        }
        Now::consuming()
    }
}

fn count(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
