//! A model that is loaded and has its slots.

use std::fmt;
use std::num::NonZeroU16;

use crate::admission::{DoesNotFit, Room};
use crate::batcher::PassLimits;
use crate::config::ModelConfig;
use crate::device::Device;
use crate::engine::{Engine, PassShape};

/// A loaded model, ready to take jobs.
pub struct Model {
    pub name: String,
    /// Where replies go of jobs that name no `reply_to`.
    pub reply_queue: String,
    pub engine: Box<dyn Engine>,
    pub limits: PassLimits,
    /// The largest pass that one job can ask for; what a slot is computed for.
    pub job_shape: PassShape,
}

impl fmt::Debug for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model").field("name", &self.name).finish_non_exhaustive()
    }
}

/// How a model stands on its device.
#[derive(Clone, Copy, Debug)]
pub struct Fit {
    pub room: Room,
    pub slots: Result<NonZeroU16, DoesNotFit>,
}

impl Model {
    pub fn new(config: &ModelConfig, engine: Box<dyn Engine>) -> Self {
        let longest = engine.item_cost_max();
        let items = config.job_items as usize;
        // A job of many long items runs in several passes: at a time it needs one of them.
        let cost = (items * longest).min(config.pass_tokens.max(longest));
        Self {
            name: config.name.clone(),
            reply_queue: config.reply_queue.clone(),
            limits: PassLimits { cost_max: config.pass_tokens },
            job_shape: PassShape { items, cost, longest },
            engine,
        }
    }

    pub fn job_bytes(&self) -> u64 {
        self.engine.pass_bytes(self.job_shape)
    }

    /// Computes slots from what the device has free now, with the weights of all its models loaded.
    pub fn fit(&self, device: &dyn Device, reserve: u64, models: u64, cap: NonZeroU16) -> Fit {
        let room = Room {
            free: device.memory().free,
            reserve,
            weights: self.engine.resident_bytes(),
            models,
            per_job: self.job_bytes(),
        };
        Fit { room, slots: room.slots(cap) }
    }
}
