//! What the processes of a model and their passes need of the device, as far as it is known, and how many processes that makes.

use std::num::NonZero;

use super::super::config::{INSTANCES_MAX, Instances, Mode};
use super::super::cost::{Costs, Unit, of_pass};
use super::super::need::Need;
use super::super::once;
use super::Shared;
use super::state::State;
use super::status::SlotStatus;

/// Processes of a model whose needs are unknown: two might not fit.
const INSTANCES_UNKNOWN: usize = 1;

/// A pass is taken to need at least this part of what was learned, however much its process has grown.
const NEED_LEAST_PART: u64 = 8;

impl Shared {
    /// Whether the budget admits another process.
    pub(super) fn has_room(&self, state: &State) -> bool {
        state.slots.iter().filter(|slot| slot.status.state.has_process()).count() < self.instances(state)
    }

    pub(super) fn instances(&self, state: &State) -> usize {
        if let Instances::These(count) = self.config.instances {
            return count;
        }
        let Some(each) = self.need_of_instance(state) else { return INSTANCES_UNKNOWN };
        let processors = || std::thread::available_parallelism().map_or(INSTANCES_UNKNOWN, NonZero::get);
        let admitted = match (self.options.budget.checked_div(each), &self.config.mode) {
            (Some(admitted), _) => usize::try_from(admitted).unwrap_or(INSTANCES_MAX),
            // Such programs are declared to take no device memory; the host's processors limit them.
            (None, Mode::Once(_)) => processors(),
            (None, Mode::Warm) => INSTANCES_UNKNOWN,
        };
        // More programs than processors would only make each other slow, and the worker too.
        let useful =
            if self.options.account.view().computes_on_host() { processors() } else { INSTANCES_MAX };
        admitted.min(useful).clamp(1, INSTANCES_MAX)
    }

    /// What a process and its smallest pass take, as far as is known.
    fn need_of_instance(&self, state: &State) -> Option<u64> {
        let vram = &self.config.vram;
        if let Mode::Once(_) = self.config.mode {
            return match state.learned.need(1.0, None) {
                Need::Bytes(bytes) => Some(bytes),
                // The need of one pixel or second says nothing about an item's.
                Need::Unknown
                    if vram.base_bytes.is_some() || (vram.per == Unit::Items && vram.declared.is_some()) =>
                {
                    Some(vram.declared_bytes(1.0))
                }
                Need::Unknown => None,
            };
        }
        let pass = match state.learned.need(1.0, vram.declared) {
            Need::Bytes(bytes) => bytes,
            Need::Unknown => 0,
        };
        Some(self.resident(state)?.saturating_add(pass))
    }

    pub(super) fn resident(&self, state: &State) -> Option<u64> {
        state.learned.resident().max(self.config.vram.base_bytes)
    }

    pub(super) fn need(&self, state: &State, items: &[Costs]) -> Need {
        let unit = self.config.vram.per;
        let cost = match self.config.mode {
            Mode::Warm => of_pass(items, unit),
            Mode::Once(_) => once::pass_cost(items, unit),
        };
        match cost {
            Some(cost) => self.need_of(state, cost),
            // An image whose header says nothing.
            None => Need::Unknown,
        }
    }

    /// What a pass of this cost needs. Learned needs count from what a process held when it was loaded. So a pass needs less in a
    /// process that has grown since, and more in one that has shrunk.
    pub(super) fn need_of(&self, state: &State, cost: f64) -> Need {
        let loaded = || state.slots.iter().map(|slot| &slot.status).filter(|slot| slot.state.is_loaded());
        let grown = loaded().map(SlotStatus::grown_bytes).min().unwrap_or(0);
        let shrunk = loaded().map(SlotStatus::shrunk_bytes).max().unwrap_or(0);
        match state.learned.need(cost, None) {
            // Growth after the learning is not part of the learned need, so some of that need always remains.
            Need::Bytes(bytes) => {
                let least = bytes / NEED_LEAST_PART;
                Need::Bytes(bytes.saturating_sub(grown).max(least).saturating_add(shrunk))
            }
            Need::Unknown => match (state.learned.need(cost, self.config.vram.declared), &self.config.mode) {
                // A one-shot program takes its base memory in the pass itself.
                (Need::Bytes(_), Mode::Once(_)) => Need::Bytes(self.config.vram.declared_bytes(cost)),
                (need, _) => need,
            },
        }
    }

    /// Whether other processes of this worker could use what an idle one keeps.
    pub(super) fn is_beside_others(&self) -> bool {
        self.options.shares_device || self.state().slots.len() > 1
    }
}
