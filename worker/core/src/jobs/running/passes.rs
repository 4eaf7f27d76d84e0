//! The passes of a running job: how many are in flight, and what the ended ones took.

use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub(super) struct Passes {
    in_flight: usize,
    first_at: Option<Instant>,
    /// How many have fitted.
    fitted: u32,
    /// The job's share of those that ended well, if it is from the queue of large jobs.
    device_time: Duration,
}

impl Passes {
    /// Records that a pass was made. Whether it is the first.
    pub(super) fn enter(&mut self, now: Instant) -> bool {
        self.in_flight += 1;
        let is_first = self.first_at.is_none();
        self.first_at.get_or_insert(now);
        is_first
    }

    /// Records that one has ended.
    pub(super) fn leave(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Stops waiting for those that run.
    pub(super) fn forget(&mut self) {
        self.in_flight = 0;
    }

    pub(super) fn are_in_flight(&self) -> bool {
        self.in_flight > 0
    }

    /// When the first was made.
    pub(super) fn first_at(&self) -> Option<Instant> {
        self.first_at
    }

    /// Counts one that fitted. Returns how many have.
    pub(super) fn fitted(&mut self) -> u32 {
        self.fitted += 1;
        self.fitted
    }

    pub(super) fn add_device_time(&mut self, time: Duration) {
        self.device_time += time;
    }

    pub(super) fn device_time(&self) -> Duration {
        self.device_time
    }
}
