//! One execution on a device: items of one or several jobs of a model, with the memory that they may use.

use std::sync::Arc;

use crate::admission::Permit;
use crate::batcher::{Draft, JobKey};
use crate::drill;
use crate::engine::{Item, PassShape};
use crate::model::Model;

/// A pass that has been admitted.
#[derive(Debug)]
pub struct Pass {
    pub model: Arc<Model>,
    /// Job and index within the job of each item.
    pub sources: Vec<(JobKey, u32)>,
    pub items: Vec<Item>,
    pub shape: PassShape,
    /// It holds the whole device.
    pub exclusive: bool,
    /// What a drill does with it.
    pub drill: Option<drill::Action>,
    /// The fingerprints of the messages that its jobs came in.
    pub messages: Arc<[u64]>,
    /// Held until the device is done with the memory.
    pub permit: Permit,
}

impl Pass {
    pub fn new(model: Arc<Model>, draft: Draft, permit: Permit) -> Self {
        let Draft { picks, shape, exclusive } = draft;
        let (sources, items) = picks.into_iter().map(|pick| ((pick.job, pick.index), pick.item)).unzip();
        Self { model, sources, items, shape, exclusive, drill: None, messages: Arc::default(), permit }
    }

    /// A pass of no job, to see whether the device works.
    pub fn canary(model: Arc<Model>, permit: Permit) -> Self {
        let (items, shape) = (model.canary.clone(), model.canary.iter().collect());
        let (sources, messages) = (Vec::new(), Arc::default());
        Self { model, sources, items, shape, exclusive: false, drill: None, messages, permit }
    }

    pub fn is_canary(&self) -> bool {
        self.sources.is_empty()
    }

    /// The jobs in the pass, each once.
    pub fn jobs(&self) -> Vec<JobKey> {
        let mut jobs: Vec<_> = self.sources.iter().map(|(job, _)| *job).collect();
        jobs.sort_unstable();
        jobs.dedup();
        jobs
    }
}
