//! Waiting jobs for the tests of the batcher and of the scheduler.

use super::Waiting;
use crate::ids::{ItemIndex, JobKey, QueueIndex};

/// A job with items of these costs, on the model's own queue, without a caller, and free to share passes.
pub(super) fn job(key: u64, costs: &[usize]) -> Waiting {
    Waiting {
        key: JobKey(key),
        queue: QueueIndex::OWN,
        caller: None,
        hint: None,
        exclusive: false,
        tried_at_ms: 0,
        isolated: false,
        items: (0..).map(ItemIndex).zip(costs.iter().copied()).collect(),
        more: false,
    }
}

/// A job of so many items, each of cost 1.
pub(super) fn unit_job(key: u64, items: usize) -> Waiting {
    job(key, &vec![1; items])
}

/// The job as this caller's.
pub(super) fn of(caller: &str, job: Waiting) -> Waiting {
    Waiting { caller: Some(caller.to_owned()), ..job }
}
