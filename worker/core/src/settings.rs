//! The settings of the core, fixed at start: limits from the configuration, and the needs of each loaded model.

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramq_schemas::topology::jobs_queue;

use crate::device::PassShape;
use crate::ids::{ExecutorIndex, QueueIndex};
use crate::poison_policy::PoisonPolicy;
pub use crate::slots::UNKNOWN_BYTES;
use crate::slots::{JobPasses, SlotInputs};

/// Limits and names of a worker.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The worker's name in history entries.
    pub worker: String,
    /// The device's name.
    pub device: String,
    /// How long a job may be held.
    pub job_limit: Duration,
    /// How long a pass may take.
    pub pass_limit: Duration,
    /// How long a drain may take.
    pub drain: Duration,
    pub poison: PoisonPolicy,
    /// Bytes of the device that stay free.
    pub reserve: u64,
    /// Bytes of the device that this process held when its models were loaded.
    pub resident: u64,
    /// Bytes of the whole device.
    pub total: u64,
    /// From this percentage in use on, the device counts as nearly full; and how long that may last.
    pub pressure_percent: u8,
    pub pressure_tolerated: Duration,
    /// From so many waiting large jobs of a model on, workers move no more to their queue.
    pub bulk_jobs_max: u32,
    /// How much device time a large job may have before it makes room for other large jobs.
    pub large_turn: Duration,
    /// How long the broker may take to confirm what is published.
    pub confirm_max: Duration,
    pub executors: Vec<ExecutorFacts>,
    /// When the process started.
    pub started_at: Instant,
    /// The seed of the core's random choices.
    pub seed: u64,
}

/// Runs passes: the device's own thread, or the processes of a model.
#[derive(Clone, Copy, Debug)]
pub struct ExecutorFacts {
    /// The most passes that it accepts at a time, queued ones included.
    pub passes_max: usize,
    /// Whether it runs one pass at a time, so that its passes never hold device memory together.
    pub is_serial: bool,
}

impl ExecutorFacts {
    /// Whether a failed pass needs a health probe, to tell a bad job from a sick device. Processes need none: a failed process is replaced,
    /// and the others are not affected.
    pub fn is_probed(&self) -> bool {
        self.is_serial
    }
}

/// Device bytes that a pass of a shape takes: exact, an upper bound, or [`UNKNOWN_BYTES`]. The figure is learned from passes, and changes
/// only between events.
pub type PassBytesFn = Arc<dyn Fn(PassShape) -> u64 + Send + Sync>;

/// A queue that a model's jobs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueFacts {
    pub name: String,
    /// Its share of the model's passes and slots, relative to other queues that have jobs.
    pub weight: NonZeroU32,
}

impl QueueFacts {
    /// The only queue of the jobs with this routing key.
    pub fn own(key: &str) -> Self {
        Self { name: jobs_queue(key), weight: NonZeroU32::MIN }
    }
}

/// A loaded model, as far as decisions depend on it.
#[derive(Clone)]
pub struct ModelFacts {
    pub name: String,
    /// The queues that its jobs come from, at least one. The first is the model's own, which also receives all jobs that are tried again.
    pub queues: Vec<QueueFacts>,
    /// Routing key for jobs of which not even one item fits this device.
    pub larger: Option<String>,
    /// The most jobs that may be unacknowledged, however much memory there is.
    pub slots_max: NonZeroU16,
    /// Slots when the worker starts.
    pub slots: NonZeroU16,
    /// The most cost of a pass. One item alone may exceed it.
    pub pass_cost_max: usize,
    /// The largest pass that one job can need; slots are computed from it.
    pub job_shape: PassShape,
    /// The most bytes that the replies to a job may take together.
    pub reply_max: u64,
    /// Its share of the device's time, relative to other models that have items waiting.
    pub share: NonZeroU32,
    /// Bytes of the model's weights.
    pub weights: u64,
    /// The index in [`Settings::executors`] of the executor that runs its passes.
    pub executor: ExecutorIndex,
    /// The shape of its health probe.
    pub probe: PassShape,
    pub pass_bytes: PassBytesFn,
}

impl fmt::Debug for ModelFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelFacts").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ModelFacts {
    /// The queue of this name, or the model's own if there is none.
    pub(crate) fn queue_named(&self, name: &str) -> QueueIndex {
        QueueIndex(self.queues.iter().position(|queue| queue.name == name).unwrap_or(0))
    }

    /// The passes that the model's jobs may share.
    pub fn job_passes(&self) -> JobPasses<&(dyn Fn(PassShape) -> u64 + Send + Sync)> {
        let Self { job_shape: job, pass_cost_max, .. } = *self;
        JobPasses { job, pass_cost_max, pass_bytes: &*self.pass_bytes }
    }

    /// The inputs for computing the model's slots. `free`: bytes for passes; `models`: models that share the device.
    pub fn slot_inputs(&self, free: u64, reserve: u64, models: u64) -> SlotInputs {
        SlotInputs { free, reserve, weights: self.weights, models, per_job: 0 }
            .with(|room| self.job_passes().job_bytes(room))
    }

    /// The slots of a model that has so many bytes for itself. One if less than a job fits but its longest item does, because passes are
    /// limited to what fits; zero if not even that item fits.
    pub fn slots_in(&self, bytes: u64) -> u16 {
        let item = PassShape::default().with(self.job_shape.longest);
        match self.slot_inputs(bytes, 0, 1).slots(self.slots_max) {
            Ok(slots) => slots.get(),
            Err(_) => u16::from(bytes >= (self.pass_bytes)(item)),
        }
    }
}

#[cfg(test)]
impl ModelFacts {
    /// A model for tests: `m`, with one queue and 64 slots. A pass of it takes a byte for each unit of cost.
    pub(crate) fn for_tests() -> Self {
        let one_item = PassShape::default().with(1);
        Self {
            name: "m".to_owned(),
            queues: vec![QueueFacts::own("m")],
            larger: None,
            slots_max: NonZeroU16::MAX,
            slots: NonZeroU16::MIN.saturating_add(63),
            pass_cost_max: 8,
            job_shape: one_item,
            reply_max: u64::MAX,
            share: NonZeroU32::MIN,
            weights: 0,
            executor: ExecutorIndex(0),
            probe: one_item,
            pass_bytes: Arc::new(|shape| shape.cost as u64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_one_slot_while_its_longest_item_fits_and_none_below() {
        // A job of eight items of two bytes each.
        let job_shape = PassShape { items: 8, cost: 16, longest: 2 };
        let model = ModelFacts { job_shape, ..ModelFacts::for_tests() };
        let slots = |bytes| model.slots_in(bytes);
        assert_eq!([slots(1), slots(2), slots(15), slots(16), slots(32)], [0, 1, 1, 1, 2]);
    }
}
