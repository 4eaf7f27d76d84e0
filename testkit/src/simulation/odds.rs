//! The part of a plan that is about rarer ends: replies that nobody confirms or that cannot be encoded, jobs for other workers, revisions
//! of a model that a job demands, and memory that stays missing. It has random numbers of its own, so that a seed without such ends
//! is the same history as before.

use serde::{Deserialize, Serialize};

use super::agenda::{Micros, SECOND};
use super::plan::{Fault, FaultKind};
use super::random::Random;

/// Keeps these choices apart from all others.
pub const ODDS: u64 = 0x006f_6464_7300_0000;

/// How often they happen. The default: never.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Odds {
    /// Of a hundred jobs of hostile callers, so many have an output that no reply can hold.
    pub unencodable_percent: usize,
    /// Of a hundred jobs, a rule of the model has so many run by the workers with larger devices.
    pub moved_percent: usize,
    /// Of a hundred jobs, so many demand a revision of the model.
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

    /// Faults that only matter with these.
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

    /// How much of this there is, for what cuts a plan down.
    pub fn size(&self) -> usize {
        self.unencodable_percent + self.moved_percent + self.revision_percent + usize::from(self.has_larger)
    }

    /// The revision of the models that the so many-th process of a worker loads. Upgrades roll through the workers.
    pub fn revision(&self, worker: usize, life: u32) -> u8 {
        u8::from((worker + life as usize).is_multiple_of(2))
    }
}
