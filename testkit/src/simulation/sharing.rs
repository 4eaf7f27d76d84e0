//! The part of a plan for shares: further queues of models with their weights, weights of models on their device, and the identities of
//! callers. It has separate random numbers, so that a seed without shares gives the same history as before.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::agenda::{Micros, SECOND};
use super::plan::{Fault, FaultKind};
use super::random::Random;

/// Separates these random choices from all others.
const SHARING: u64 = 0x0073_6861_7269_6e67;

/// Jobs that a flood puts into a queue at once.
const FLOOD_JOBS: usize = 150;

/// The shares of queues, models and callers; by default there is one of each.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Sharing {
    /// For each model: the weights of its queues, its own first. Empty: it has only its own.
    queues: Vec<Vec<u32>>,
    /// Of each model: its weight on its device.
    models: Vec<u32>,
    callers: Vec<CallerSharing>,
    /// Seed for choosing the tenants of jobs.
    seed: u64,
}

/// The identity of a caller, and its queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct CallerSharing {
    /// The queue of its model, by its place: 0 is the model's own.
    queue: usize,
    /// It publishes for so many tenants; 0: for itself.
    tenants: usize,
    /// Whether the broker does not verify its identity.
    is_anonymous: bool,
}

impl Sharing {
    /// The shares of a seed. `on`: the model of each caller.
    pub fn new(seed: u64, models: usize, on: &[usize]) -> Self {
        let mut random = Random::new(seed ^ SHARING);
        let r = &mut random;
        let queues: Vec<Vec<u32>> = (0..models)
            .map(|_| {
                let further = [0, 0, 1, 2][r.below(4)];
                (0..=further).map(|_| [1, 1, 3, 6][r.below(4)]).collect()
            })
            .collect();
        let weights = (0..models).map(|_| [1, 1, 2, 5][r.below(4)]).collect();
        let callers = on
            .iter()
            .map(|model| CallerSharing {
                queue: r.below(queues[*model].len()),
                tenants: [0, 0, 0, 2, 4][r.below(5)],
                is_anonymous: r.chance(10),
            })
            .collect();
        Self { queues, models: weights, callers, seed: r.bits() }
    }

    /// Shares in which each caller has its own queue of the first model, with these weights.
    pub fn of_queues(weights: &[u32]) -> Self {
        let caller = |queue| CallerSharing { queue, ..CallerSharing::default() };
        Self {
            queues: vec![weights.to_vec()],
            callers: (0..weights.len()).map(caller).collect(),
            ..Self::default()
        }
    }

    /// Shares in which each caller has its own model, with these weights on the device.
    pub fn of_models(weights: &[u32]) -> Self {
        Self { models: weights.to_vec(), ..Self::default() }
    }

    /// Faults that only occur with shares: floods, and queues of other owners that are deleted and restored.
    pub fn faults(&self, count: usize, busy: Micros) -> Vec<Fault> {
        let mut random = Random::new(self.seed ^ SHARING);
        let r = &mut random;
        let mut faults = Vec::new();
        if self.queues.iter().any(|queues| queues.len() > 1) {
            faults.extend((0..count.div_ceil(4)).map(|_| {
                let lasts = (5 + r.below(60)) as Micros * SECOND;
                let kind = FaultKind::FurtherDeleted { queue: r.below(8), is_forbidden: r.chance(50) };
                Fault { at: r.bits() % busy.saturating_sub(lasts).max(1), lasts, kind }
            }));
            faults.extend((0..count.div_ceil(8)).map(|_| {
                let at = r.bits() % (busy * 7 / 10).max(1);
                Fault { at, lasts: 0, kind: FaultKind::Flood { caller: r.below(8), jobs: FLOOD_JOBS } }
            }));
        }
        faults
    }

    /// The weights of a model's queues, its own first.
    pub fn queues(&self, model: usize) -> &[u32] {
        self.queues.get(model).map_or(&[1], Vec::as_slice)
    }

    /// A model's weight on its device.
    pub fn model(&self, model: usize) -> u32 {
        self.models.get(model).copied().unwrap_or(1)
    }

    /// All further queues, by model and place.
    pub fn further(&self) -> Vec<(usize, usize)> {
        let of = |(model, queues): (usize, &Vec<u32>)| (1..queues.len()).map(move |queue| (model, queue));
        self.queues.iter().enumerate().flat_map(of).collect()
    }

    fn caller(&self, number: usize) -> CallerSharing {
        self.callers.get(number).copied().unwrap_or_default()
    }

    /// The queue that a caller publishes to.
    pub fn queue_of(&self, caller: usize) -> usize {
        self.caller(caller).queue
    }

    /// The verified identity of a caller's job. `choice` selects a tenant.
    pub fn identity(&self, caller: usize, choice: u64) -> Option<Arc<str>> {
        let CallerSharing { tenants, is_anonymous, .. } = self.caller(caller);
        if is_anonymous {
            return None;
        }
        let user = format!("caller-{caller}");
        if tenants == 0 {
            return Some(user.into());
        }
        // Some tenants have more jobs than others.
        let mut random = Random::new(self.seed ^ choice);
        let tenant = random.below(tenants).min(random.below(tenants));
        Some(format!("{user}/tenant-{tenant}").into())
    }

    /// A measure of the plan's shares, for shortening the plan.
    pub fn size(&self) -> usize {
        let of_queues: usize = self.queues.iter().map(Vec::len).sum();
        of_queues + self.callers.len() + self.models.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_shares_by_default() {
        let nobody = Sharing::default();
        assert_eq!((nobody.queues(1), nobody.model(1), nobody.queue_of(3)), (&[1][..], 1, 0));
        assert_eq!(nobody.identity(3, 7).as_deref(), Some("caller-3"));
        assert!(nobody.further().is_empty() && nobody.size() == 0);
    }

    #[test]
    fn seeds_have_further_queues_weights_tenants_and_callers_without_a_name() {
        let all: Vec<_> = (0..100).map(|seed| Sharing::new(seed, 2, &[0, 1, 0])).collect();
        assert!(all.iter().any(|sharing| !sharing.further().is_empty()));
        assert!(all.iter().any(|sharing| sharing.further().is_empty()));
        assert!(all.iter().any(|sharing| sharing.model(0) != sharing.model(1)));
        assert!(all.iter().any(|sharing| sharing.identity(0, 1).is_none()));
        let is_of_a_tenant =
            |sharing: &Sharing| sharing.identity(1, 1).is_some_and(|identity| identity.contains("/tenant-"));
        assert!(all.iter().any(is_of_a_tenant));
    }
}
