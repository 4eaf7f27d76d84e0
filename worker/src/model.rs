//! A model that is loaded and has its slots.

use std::fmt;
use std::num::NonZeroU16;

use vramq_schemas::{Input, Params};

use crate::admission::{DoesNotFit, Room};
use crate::batcher::PassLimits;
use crate::config::ModelConfig;
use crate::engine::{Engine, Item, PassShape};

/// A loaded model, ready to take jobs.
pub struct Model {
    /// Its place among the worker's models.
    pub index: usize,
    pub name: String,
    /// Routing key of its jobs and dead letters, and the end of its queues' names.
    pub key: String,
    /// Where replies go of jobs that name no `reply_to`.
    pub reply_queue: String,
    /// Routing key of jobs that have no room here even alone.
    pub larger: Option<String>,
    pub engine: Box<dyn Engine>,
    /// The most jobs in hand, however much memory there is.
    pub slots_max: NonZeroU16,
    pub limits: PassLimits,
    /// The largest pass that one job can ask for; what a slot is computed for.
    pub job_shape: PassShape,
    /// A small pass that works, if the device does.
    pub canary: Vec<Item>,
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
    pub fn new(index: usize, config: &ModelConfig, engine: Box<dyn Engine>) -> Self {
        let longest = engine.item_cost_max();
        let items = config.job_items as usize;
        // A job of many long items runs in several passes: at a time it needs one of them.
        let cost = (items * longest).min(config.pass_tokens.max(longest));
        Self {
            index,
            name: config.name.clone(),
            reply_queue: config.reply_queue.clone(),
            larger: config.larger.clone(),
            key: config.key.clone(),
            slots_max: config.slots_max,
            limits: PassLimits { cost_max: config.pass_tokens },
            job_shape: PassShape { items, cost, longest },
            // An engine that takes no plain text has no canary, which counts as one that lives.
            canary: engine.prepare(&[Input::Text("canary".into())], &Params::default()).unwrap_or_default(),
            engine,
        }
    }

    pub fn job_bytes(&self) -> u64 {
        self.engine.pass_bytes(self.job_shape)
    }

    /// What its jobs may share, of `free` bytes for passes on a device with so many models.
    pub fn room(&self, free: u64, reserve: u64, models: u64) -> Room {
        Room { free, reserve, weights: self.engine.resident_bytes(), models, per_job: self.job_bytes() }
    }

    /// Computes slots from what the device has free now, with the weights of all its models loaded.
    pub fn fit(&self, free: u64, reserve: u64, models: u64) -> Fit {
        let room = self.room(free, reserve, models);
        Fit { room, slots: room.slots(self.slots_max) }
    }

    /// Slots while the worker runs: one where less than a job fits but its longest item does, because passes are held
    /// to what fits; none where not even that.
    pub fn slots_now(&self, free: u64, reserve: u64, models: u64) -> u16 {
        let room = self.room(free, reserve, models);
        let item = PassShape::default().with(self.job_shape.longest);
        match room.slots(self.slots_max) {
            Ok(slots) => slots.get(),
            Err(_) => u16::from(room.share() >= self.engine.pass_bytes(item)),
        }
    }
}
