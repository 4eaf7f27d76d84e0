//! Chooses the items of a pass. What comes in are the items of waiting jobs; what goes out is the content of a pass within its limits.

use std::collections::VecDeque;

use crate::device::PassShape;
use crate::ids::{ItemIndex, JobKey, QueueIndex};

/// The publisher of a job, if the broker verified it. All unverified publishers together are the caller `None`.
pub(crate) type Caller = Option<String>;

/// What limits a pass besides memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PassLimits {
    /// The most cost of a pass (tokens, for an encoder). One item alone may exceed it.
    pub(crate) cost_max: usize,
}

/// The items of one job that no pass has taken yet.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    pub(crate) key: JobKey,
    /// The queue whose share the job's passes take.
    pub(crate) queue: QueueIndex,
    pub(crate) caller: Caller,
    /// The most items that may share a pass with this job.
    pub(crate) hint: Option<u32>,
    /// Whether the job needs passes that have the whole device.
    pub(crate) exclusive: bool,
    /// When the job was first tried, in Unix milliseconds. Exclusive jobs run in this order.
    pub(crate) tried_at_ms: u64,
    /// Whether the job needs passes without items of other jobs.
    pub(crate) isolated: bool,
    /// Index within the job and cost of each prepared item, in order.
    pub(crate) items: VecDeque<(ItemIndex, usize)>,
    /// Whether more items of the job are still to be prepared.
    pub(crate) more: bool,
}

impl Waiting {
    pub(super) fn cost(&self) -> usize {
        self.items.iter().map(|(_, cost)| cost).sum()
    }

    pub(super) fn items_max(&self) -> usize {
        self.hint.map_or(usize::MAX, |hint| hint.max(1) as usize)
    }

    /// Whether it must not join a pass of other jobs.
    pub(super) fn is_alone(&self) -> bool {
        self.exclusive || self.isolated
    }
}

/// The content of a pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Draft {
    /// Job and index within the job of each item, longest first: that order lets an engine spread items evenly over parallel units.
    pub(crate) items: Vec<(JobKey, ItemIndex, usize)>,
    pub(crate) shape: PassShape,
    /// Whether the pass must have the device to itself.
    pub(crate) exclusive: bool,
}

/// A pass that is being formed.
pub(super) struct Forming {
    items: Vec<(JobKey, ItemIndex, usize)>,
    pub(super) shape: PassShape,
    /// The smallest batch hint of the jobs in it.
    items_max: usize,
}

impl Forming {
    pub(super) fn new() -> Self {
        Self { items: Vec::new(), shape: PassShape::default(), items_max: usize::MAX }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(super) fn is_full(&self, limits: PassLimits) -> bool {
        self.is_cut() || self.shape.cost >= limits.cost_max
    }

    /// Whether a hint leaves no room for more items.
    pub(super) fn is_cut(&self) -> bool {
        self.shape.items >= self.items_max
    }

    /// Takes items of a job: at least one if the pass is empty, no more than fit, and none after `share` is used up.
    pub(super) fn take(
        &mut self,
        job: &mut Waiting,
        share: usize,
        limits: PassLimits,
        fits: impl Fn(PassShape) -> bool,
    ) {
        let (hint, start) = (job.items_max(), self.shape.cost);
        while let Some((_, cost)) = job.items.front() {
            let shape = self.shape.with(*cost);
            let within =
                shape.items <= self.items_max.min(hint) && shape.cost <= limits.cost_max && fits(shape);
            if !self.items.is_empty() && (!within || self.shape.cost - start >= share) {
                return;
            }
            if let Some((index, cost)) = job.items.pop_front() {
                self.items.push((job.key, index, cost));
                self.shape = shape;
                self.items_max = self.items_max.min(hint);
            }
        }
    }

    pub(super) fn finish(mut self, exclusive: bool) -> Draft {
        self.items.sort_by_key(|(_, _, cost)| std::cmp::Reverse(*cost));
        Draft { items: self.items, shape: self.shape, exclusive }
    }
}
