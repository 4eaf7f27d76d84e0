//! The disks of the workers' programs, one for each worker, and when they are nearly full. These faults have separate random numbers, so
//! that a seed without programs gives the same history as before.

use std::collections::BTreeMap;

use super::agenda::{Micros, SECOND};
use super::plan::{Fault, FaultKind};
use super::random::Random;

/// Separates these random choices from all others.
const DISKS: u64 = 0x0064_6973_6b73_0000;

/// The disks of all workers. They outlive the workers' processes.
#[derive(Debug, Default)]
pub struct Disks {
    /// For each worker with a nearly full disk: the largest cost of a pass whose items fit.
    room: BTreeMap<usize, usize>,
}

impl Disks {
    /// From now on a worker's disk takes only passes of at most this cost.
    pub fn fill(&mut self, worker: usize, room: usize) {
        self.room.insert(worker, room);
    }

    /// A worker's disk takes any pass again.
    pub fn clear(&mut self, worker: usize) {
        self.room.remove(&worker);
    }

    pub fn takes(&self, worker: usize, cost: usize) -> bool {
        self.room.get(&worker).is_none_or(|room| cost <= *room)
    }
}

/// When disks are nearly full in the history of a seed. Some then accept nothing, others only small passes.
pub fn faults(seed: u64, busy: Micros) -> Vec<Fault> {
    let mut random = Random::new(seed ^ DISKS);
    let r = &mut random;
    let count = [0, 1, 2, 3][r.below(4)];
    let fault = |_| {
        let (worker, room) = (r.below(8), [0, 0, 16, 128][r.below(4)]);
        let lasts = (10 + r.below(120)) as Micros * SECOND;
        let at = r.bits() % busy.saturating_sub(lasts).max(1);
        Fault { at, lasts, kind: FaultKind::DiskFull { worker, room } }
    };
    (0..count).map(fault).collect()
}
