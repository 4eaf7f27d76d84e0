//! Large jobs take turns: one that has had the device for long is requeued while others wait in the queue of large jobs. Its finished
//! items are published as a part, and the rest goes to the end of that queue.

use crate::Core;
use crate::event::{Delivery, QueueCount};
use crate::ids::ModelIndex;
use crate::jobs::Running;
use crate::observation::Cause;

/// The most workers that are assumed to share the load. Each second, chance picks about as many workers as large jobs wait, and only these
/// requeue one. This bound keeps the wait at about so many seconds, even if only one of many workers has a job that had its turn.
const WORKERS_MAX: u64 = 8;

impl Core {
    /// Requeues one large job that has had its turn and is far from its end, if others wait. `queue`: the count of large jobs that no
    /// worker has taken.
    pub(crate) fn end_large_turn(&mut self, model: ModelIndex, queue: QueueCount) {
        if queue.waiting == 0 || self.lifecycle.is_draining() {
            return;
        }
        let had_turn = self.jobs.running_where(|key, job| {
            job.received.delivery.model == model && !self.health.is_pending(key) && self.has_had_turn(job)
        });
        if had_turn.is_empty() || !self.makes_room(model, queue) {
            return;
        }
        for job in had_turn {
            let Some(running) = self.jobs.running(job) else { continue };
            if self.republish_allowance.take(running.received.delivery.bytes) {
                self.log_end_of_turn(running, queue.waiting);
                return self.requeue_because(job, Cause::Turn);
            }
        }
    }

    /// Whether a job has had its device time, and what is left of it is still large.
    fn has_had_turn(&self, job: &Running) -> bool {
        job.device_time() >= self.settings.large_turn && job.goes_on() && self.leaves_a_large_rest(job)
    }

    fn log_end_of_turn(&self, running: &Running, waiting: u32) {
        let Delivery { id: job, trace_id, model, .. } = &running.received.delivery;
        let (model, items_left) = (&self.models[model.0].name, running.items_left());
        tracing::info!(
            job,
            trace_id,
            model,
            waiting,
            items_left,
            "other large jobs wait: the rest of this one goes back to their queue"
        );
    }

    /// Decides by chance whether this worker requeues a job for one of the waiting ones. Assumes that the other workers have as many
    /// consumers as this one.
    fn makes_room(&mut self, model: ModelIndex, queue: QueueCount) -> bool {
        let own = self.consumers[model.0].live_bulk().max(1);
        let workers = (u64::from(queue.consumers) / own as u64).clamp(1, WORKERS_MAX);
        self.random.below(workers) < u64::from(queue.waiting)
    }

    /// Whether the items that no pass has taken yet still make a large job. A smaller rest ends soon by itself.
    fn leaves_a_large_rest(&self, running: &Running) -> bool {
        let Delivery { job, model, .. } = &running.received.delivery;
        running.has_unprepared() || self.scheduler.waiting_cost(*model, *job) > self.cost_of_large(*model)
    }
}

#[cfg(test)]
#[path = "large_turns_tests.rs"]
mod tests;
