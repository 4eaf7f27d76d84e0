//! Requests the preparation of items (an encoder tokenises texts) a few passes before they run. So a job of many items takes memory only
//! for its next passes. Other threads prepare items while a pass runs.

use std::collections::VecDeque;

use vramq_schemas::Reason;

use crate::Core;
use crate::action::Action;
use crate::disposition::JobOutcome;
use crate::ids::{ItemIndex, JobKey, ModelIndex};
use crate::rejection::Rejection;

/// When fewer prepared items of a job wait than fill this many passes, items for as many more passes are prepared. The device's thread has
/// two more passes queued, so the executor waits only if preparation is slower than running.
const PASSES_PREPARED: usize = 4;

impl Core {
    /// The cost up to which items are prepared when a job is read: enough to decide whether the job is large.
    pub(crate) fn cost_at_first(&self, model: ModelIndex) -> usize {
        self.cost_of_large(model).saturating_add(1)
    }

    /// Requests the next items of a job, if few prepared ones wait for a pass.
    pub(crate) fn prepare_more(&mut self, job: JobKey) {
        let Some(running) = self.jobs.running(job).filter(|running| running.wants_items()) else { return };
        let model = running.received.delivery.model;
        let cost = self.models[model.0].pass_cost_max.saturating_mul(PASSES_PREPARED);
        if self.scheduler.waiting_cost(model, job) >= cost || self.health.is_pending(job) {
            return;
        }
        if let Some(running) = self.jobs.running_mut(job) {
            running.start_preparing();
        }
        self.act(Action::Prepare { job, cost });
    }

    /// More items of a job are prepared, or one cannot be.
    pub(crate) fn prepared(&mut self, job: JobKey, result: Result<Vec<usize>, Rejection>) {
        // Jobs that ended meanwhile are no longer here.
        let is_pending = self.health.is_pending(job);
        let Some(running) = self.jobs.running_mut(job) else { return };
        let result = result.and_then(|costs| {
            let error = "internal error: preparing the job gave no items; please report it";
            if costs.is_empty() { Err(Rejection::new(Reason::EngineFailed, error)) } else { Ok(costs) }
        });
        let first = running.prepared(result.as_ref().map_or(0, Vec::len));
        if !running.goes_on() || is_pending {
            return;
        }
        let model = running.received.delivery.model;
        match result {
            Ok(costs) => {
                let waiting = running.waiting(with_indices(first, costs));
                self.scheduler.extend(model, waiting);
                self.prepare_more(job);
            }
            Err(rejection) => {
                let headers = running.headers.clone();
                self.scheduler.remove(model, job);
                self.conclude_when_idle(job, JobOutcome::dead_letter(headers, rejection));
            }
        }
    }
}

/// Numbers the items from `first` on. Raises each cost to at least 1, because passes of zero-cost items would have no bound.
pub(crate) fn with_indices(first: u32, costs: Vec<usize>) -> VecDeque<(ItemIndex, usize)> {
    (first..).map(ItemIndex).zip(costs.into_iter().map(|cost| cost.max(1))).collect()
}

#[cfg(test)]
#[path = "preparation_tests.rs"]
mod tests;
