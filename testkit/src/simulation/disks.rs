//! The disks on which programs find the items of a pass, one for each worker, and when they are nearly full. The faults have random
//! numbers of their own, so that a seed without programs is the same history as before.

use std::collections::BTreeMap;

use super::agenda::{Micros, SECOND};
use super::plan::{Fault, FaultKind};
use super::random::Random;

/// Keeps these choices apart from all others.
const DISKS: u64 = 0x0064_6973_6b73_0000;

/// The disks of all workers. They outlive the workers' processes.
#[derive(Debug, Default)]
pub struct Disks {
    /// Of each worker whose disk is nearly full: the cost of the largest pass whose items it takes.
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

/// When disks are nearly full in the history of a seed. Some take nothing then, others small passes.
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
