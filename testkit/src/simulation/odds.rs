//! The part of a plan for rare events: replies that are not confirmed or cannot be encoded, jobs for other workers, demanded model
//! revisions, and memory that stays missing. It has separate random numbers, so that a seed without such events gives the same history as
//! before.

use serde::{Deserialize, Serialize};

use super::agenda::{Micros, SECOND};
use super::plan::{Fault, FaultKind};
use super::random::Random;

/// Separates these random choices from all others.
pub const ODDS: u64 = 0x006f_6464_7300_0000;

/// How often rare events happen; by default never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Odds {
    /// Percent of the jobs of hostile callers with an output that no reply can hold.
    pub unencodable_percent: usize,
    /// Percent of jobs that a rule of the model gives to workers with larger devices.
    pub moved_percent: usize,
    /// Percent of jobs that demand a revision of the model.
    pub revision_percent: usize,
    /// There are workers with larger devices, and they have a queue.
    pub has_larger: bool,
    seed: u64,
}

impl Odds {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed ^ ODDS);
        let r = &mut random;
        Self {
            unencodable_percent: [0, 4, 12][r.below(3)],
            moved_percent: [0, 0, 2][r.below(3)],
            revision_percent: [0, 0, 3][r.below(3)],
            has_larger: r.chance(60),
            seed: r.bits(),
        }
    }

    /// Faults that only occur with rare events.
    pub fn faults(&self, busy: Micros) -> Vec<Fault> {
        if self.seed == 0 {
            return Vec::new();
        }
        let mut random = Random::new(self.seed);
        let r = &mut random;
        let fault = |r: &mut Random, kind| {
            let lasts = (10 + r.below(150)) as Micros * SECOND;
            Fault { at: r.bits() % busy.saturating_sub(lasts).max(1), lasts, kind }
        };
        let mut faults = vec![];
        if r.chance(50) {
            let kind = FaultKind::SilentReplies { caller: r.below(8) };
            faults.push(fault(r, kind));
        }
        if self.has_larger && r.chance(60) {
            faults.push(fault(r, FaultKind::LargerStands));
        }
        if r.chance(30) {
            let kind = FaultKind::MemoryWithheld { worker: r.below(8) };
            faults.push(fault(r, kind));
        }
        faults
    }

    /// A measure of the plan's rare events, for shortening the plan.
    pub fn size(&self) -> usize {
        self.unencodable_percent + self.moved_percent + self.revision_percent + usize::from(self.has_larger)
    }

    /// The revision of the models that a process of a worker loads, by the number of the process. So upgrades roll through the workers.
    pub fn revision(&self, worker: usize, life: u32) -> u8 {
        u8::from((worker + life as usize).is_multiple_of(2))
    }
}
