//! Computes a CUDA device's memory figures from the driver's readings and the worker's own count. Pure.

use crate::device::Memory;

/// Any CUDA context takes more than this. So a smaller remainder belongs to no other process, but to the driver, or to this process
/// outside the pool.
const FOREIGN_MIN: u64 = 64 << 20;

/// A reading of the driver. This process's own allocations do not change it, so only other processes can make it outdated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of the device.
    pub total: u64,
    /// Bytes that are free, or in this process's pool: all that it can ever allocate while others hold what they hold.
    pub room: u64,
}

/// What this process holds, by its own count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnUsage {
    /// Bytes allocated and not given back.
    pub used: u64,
    /// Bytes of the context, of code and of libraries: taken at start, in no pool.
    pub overhead: u64,
    /// The most that `used` may be.
    pub cap: Option<u64>,
}

impl Reading {
    /// The memory as this process may use it. With a cap, the capped part counts as the whole device, and others hold only what
    /// they hold of that part.
    pub fn memory(self, own: OwnUsage) -> Memory {
        let OwnUsage { used, overhead, cap } = own;
        let own_most = self.total.saturating_sub(overhead);
        let Some(cap) = cap.filter(|cap| *cap < own_most) else {
            let foreign = foreign(own_most.saturating_sub(self.room));
            let free = self.room.saturating_sub(used);
            return Memory { free, total: self.total, foreign };
        };
        let within = self.room.min(cap);
        Memory { free: within.saturating_sub(used), total: cap, foreign: foreign(cap - within) }
    }
}

fn foreign(missing: u64) -> u64 {
    if missing < FOREIGN_MIN { 0 } else { missing }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn memory(total: u64, room: u64, used: u64, overhead: u64, cap: Option<u64>) -> (u64, u64, u64, u64) {
        let own = OwnUsage { used: used * MIB, overhead: overhead * MIB, cap: cap.map(|cap| cap * MIB) };
        let memory = Reading { total: total * MIB, room: room * MIB }.memory(own);
        (memory.total / MIB, memory.free / MIB, memory.foreign / MIB, memory.own() / MIB)
    }

    #[test]
    fn every_kind_of_device() {
        let rows = [
            // total, room, used, overhead, cap -> total, free, foreign, own
            ((8000, 7500, 0, 500, None), (8000, 7500, 0, 500)),
            ((8000, 7500, 1000, 500, None), (8000, 6500, 0, 1500)),
            // A neighbour of 3000 MiB.
            ((8000, 4500, 1000, 500, None), (8000, 3500, 3000, 1500)),
            // The context was not measured: it looks like a neighbour's.
            ((8000, 7500, 1000, 0, None), (8000, 6500, 500, 1000)),
            // A small remainder belongs to no other process.
            ((8000, 7450, 0, 500, None), (8000, 7450, 0, 550)),
            // A part of the device, and a neighbour in the other part.
            ((8000, 4500, 1000, 500, Some(4000)), (4000, 3000, 0, 1000)),
            // The neighbour holds some of ours.
            ((8000, 3000, 1000, 500, Some(4000)), (4000, 2000, 1000, 1000)),
            // More than there is: no cap.
            ((8000, 7500, 1000, 500, Some(9000)), (8000, 6500, 0, 1500)),
            // Others have all.
            ((8000, 1000, 1000, 500, None), (8000, 0, 6500, 1500)),
        ];
        for ((total, room, used, overhead, cap), expected) in rows {
            assert_eq!(memory(total, room, used, overhead, cap), expected);
        }
    }

    proptest! {
        #[test]
        fn the_parts_never_exceed_the_whole(
            total in 0u64..1 << 40, room in 0u64..1 << 40, used in 0u64..1 << 40, overhead in 0u64..1 << 40,
            cap in prop::option::of(0u64..1 << 40),
        ) {
            let room = room.min(total);
            let memory = Reading { total, room }.memory(OwnUsage { used: used.min(room), overhead, cap });
            prop_assert!(memory.free + memory.foreign <= memory.total, "{memory:?}");
        }
    }
}
