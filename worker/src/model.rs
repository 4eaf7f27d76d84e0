//! A loaded model, and its settings for the core.

use std::fmt;
use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;

use vramq_core::device::PassShape;
use vramq_core::event::Source;
use vramq_core::ids::{ExecutorIndex, ModelIndex, QueueIndex};
use vramq_core::settings::{ModelFacts, QueueFacts};
use vramq_core::slots::{DoesNotFit, JobPasses, SlotInputs};
use vramq_schemas::status::QueueStatus;
use vramq_schemas::topology::{bulk_queue, suspects_queue};
use vramq_schemas::{Input, Params};

use crate::config::ModelConfig;
use crate::engine::{Engine, Item, shape_of};
use crate::stores::outputs::OutputStore;

/// A loaded model, ready to take jobs.
pub struct Model {
    pub index: ModelIndex,
    pub name: String,
    /// Routing key of its jobs and dead letters, and suffix of its queues' names.
    pub key: String,
    /// Where its jobs come from: first its own queue.
    pub queues: Vec<QueueFacts>,
    /// The queue for replies to jobs without a `reply_to`.
    pub reply_queue: String,
    /// Routing key for jobs of which not even one item fits this device.
    pub larger: Option<String>,
    pub engine: Arc<dyn Engine>,
    /// The most jobs that may be unacknowledged, however much memory there is.
    pub slots_max: NonZeroU16,
    /// The most cost of a pass (tokens, for an encoder). One item alone may exceed it.
    pub pass_cost_max: usize,
    /// Bytes of the largest body of a job, and of all replies to a job.
    pub body_max: u64,
    pub reply_max: u64,
    /// Bytes of all inputs that a job refers to.
    pub fetch_max: u64,
    /// Where its large outputs go, if not with the replies.
    pub outputs: Option<Arc<OutputStore>>,
    /// Its share of the device's time while several models have work.
    pub share: NonZeroU32,
    /// The largest pass that one job can ask for; what a slot is computed for.
    pub job_shape: PassShape,
    /// The items of its health probe: a small pass that works if the device does.
    pub probe: Vec<Item>,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The default where neither the configuration nor the engine sets it, and on a GPU with several models. Large enough to keep a CPU busy,
/// small enough that a short job waits only a fraction of a second for a pass.
pub const PASS_TOKENS_DEFAULT: usize = 2048;

/// Whether a model fits its device.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    pub inputs: SlotInputs,
    pub slots: Result<NonZeroU16, DoesNotFit>,
}

impl Model {
    /// A model of which the host's memory allows so many slots.
    pub fn new(
        index: ModelIndex,
        config: &ModelConfig,
        slots_max: NonZeroU16,
        engine: Arc<dyn Engine>,
    ) -> Self {
        let longest = engine.item_cost_max();
        let items = config.job_items as usize;
        let pass_tokens = config.pass_tokens.or_else(|| engine.pass_cost()).unwrap_or(PASS_TOKENS_DEFAULT);
        // A job of many long items runs in several passes, and needs the memory of one at a time.
        let cost = (items * longest).min(pass_tokens.max(longest));
        Self {
            index,
            name: config.name.clone(),
            reply_queue: config.reply_queue.clone(),
            larger: config.larger.clone(),
            key: config.key.clone(),
            queues: config.queues.clone(),
            slots_max,
            pass_cost_max: pass_tokens,
            share: config.weight,
            body_max: config.body_max,
            reply_max: config.reply_max,
            fetch_max: config.fetch_max,
            outputs: config.outputs.as_ref().map(OutputStore::new),
            job_shape: PassShape { items, cost, longest },
            // An engine without plain text input has a probe without items, which always passes.
            probe: engine.prepare(&[Input::Text("canary".into())], &Params::default()).unwrap_or_default(),
            engine,
        }
    }

    /// The queue that a delivery came from.
    pub fn queue_of(&self, source: Source) -> String {
        match source {
            Source::Jobs(queue, _) => {
                self.queues.get(queue.0).map_or_else(String::new, |queue| queue.name.clone())
            }
            Source::Bulk(_) => bulk_queue(&self.key),
            Source::Quarantine => suspects_queue(&self.key),
        }
    }

    /// Where its jobs come from, if that is more than its own queue.
    pub fn queue_statuses(&self, is_missing: impl Fn(QueueIndex) -> bool) -> Vec<QueueStatus> {
        let status = |(at, queue): (usize, &QueueFacts)| QueueStatus {
            queue: queue.name.clone(),
            weight: queue.weight.get(),
            missing: is_missing(QueueIndex(at)),
        };
        if self.queues.len() > 1 { self.queues.iter().enumerate().map(status).collect() } else { Vec::new() }
    }

    /// Computes slots from the device's free bytes, after the weights of all its models were loaded.
    pub fn fit(&self, free: u64, reserve: u64, models: u64) -> Fit {
        let weights = self.engine.resident_bytes();
        let passes = JobPasses {
            job: self.job_shape,
            pass_cost_max: self.pass_cost_max,
            pass_bytes: |shape| self.engine.pass_bytes(shape),
        };
        let inputs =
            SlotInputs { free, reserve, weights, models, per_job: 0 }.with(|room| passes.job_bytes(room));
        Fit { inputs, slots: inputs.slots(self.slots_max) }
    }

    /// The facts by which the core decides. `executor` runs the model's passes.
    pub fn facts(&self, slots: NonZeroU16, executor: ExecutorIndex) -> ModelFacts {
        let engine = Arc::clone(&self.engine);
        ModelFacts {
            name: self.name.clone(),
            queues: self.queues.clone(),
            larger: self.larger.clone(),
            slots_max: self.slots_max,
            slots,
            pass_cost_max: self.pass_cost_max,
            job_shape: self.job_shape,
            reply_max: self.reply_max,
            share: self.share,
            weights: self.engine.resident_bytes(),
            executor,
            probe: shape_of(&self.probe),
            pass_bytes: Arc::new(move |shape| engine.pass_bytes(shape)),
        }
    }
}
