//! What must return to the device when a program ends, and how much of it has: from two snapshots of the device's memory.

use super::device_view::Reading;

/// How far the device's figures may differ and still count as equal: rounding, and what a driver keeps for itself. The smaller of
/// this and a 64th of the device.
const TOLERANCE_MAX: u64 = 64 << 20;
const TOLERANCE_PART: u64 = 64;

/// The device's memory, and how much of it our programs hold: as the device tells, or as was last measured of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    pub reading: Reading,
    pub ours: u64,
    /// The part of it that no request to end frees: that of one-shot programs, which end by themselves, and of processes that do not end
    /// although they were killed.
    pub staying: u64,
    /// What the programs that run passes may still take for them, as far as is known.
    pub owed: u64,
    /// Whether the device reports what each process holds. Otherwise `ours` is estimated from the loads (`difference.rs`).
    pub tells_apart: bool,
    /// What had been removed from the account before the snapshot.
    pub removed: Removed,
}

/// How often bytes were removed from the account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Those reserved for a program that has taken them since. An earlier snapshot still shows them as free.
    pub reservations: u64,
    /// Those of programs that have ended. An earlier snapshot shows less free than there is.
    pub programs: u64,
}

impl Snapshot {
    /// What other processes hold, as far as `ours` is right.
    pub(super) fn others(&self) -> u64 {
        self.used().saturating_sub(self.ours)
    }

    /// What other processes have taken since an earlier snapshot.
    pub(super) fn taken_since(&self, earlier: &Self) -> u64 {
        // Not a difference of `others`, which is 0 where `ours` is too much.
        (self.used() + earlier.ours).saturating_sub(earlier.used() + self.ours)
    }

    /// What is in use, but not by the worker's own process.
    fn used(&self) -> u64 {
        let Reading { free, total, own } = self.reading;
        total.saturating_sub(free).saturating_sub(own)
    }
}

/// The memory that must return when a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The last snapshot of the device while the program lived.
    pub alive: Snapshot,
    /// What it held then.
    pub held: u64,
    /// What of `held` was the program's beyond doubt. The rest may be memory that others took while the program was loaded: only on a
    /// device that does not tell processes apart.
    pub sure: u64,
}

impl Claim {
    /// Bytes by which the device's free memory has grown with the program's end.
    pub fn returned(&self, now: Snapshot) -> u64 {
        (self.alive.others() + self.held).saturating_sub(now.others())
    }

    /// Bytes that have not returned: other processes seem to hold them. None if all that was surely the program's has returned.
    pub fn missing(&self, now: Snapshot) -> u64 {
        let missing = self.held.saturating_sub(self.returned(now));
        let doubtful = self.held.saturating_sub(self.sure);
        if missing > doubtful + tolerance(now.reading.total) { missing } else { 0 }
    }
}

pub(super) fn tolerance(total: u64) -> u64 {
    TOLERANCE_MAX.min(total / TOLERANCE_PART)
}

#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
