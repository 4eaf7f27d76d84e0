//! Further queues of a model that cannot be consumed: their owner deleted them, declared them again with other arguments, or took the
//! worker's permission away. Only that queue's consumers stop, and the other queues get its slots. The worker checks periodically whether
//! the queue can be consumed again.

use std::time::Duration;

use crate::Core;
use crate::action::Action;
use crate::event::Delivery;
use crate::ids::{ModelIndex, QueueIndex};
use crate::observation::Observation;
use crate::timers::Timer;

/// The time between two checks, and before the first. An owner who deletes a queue to declare it again with other arguments needs this
/// time, because a worker that declares queues would declare it first.
const CHECK_EVERY: Duration = Duration::from_secs(10);

impl Core {
    /// A session is open. `missing`: the further queues that it cannot consume.
    pub(crate) fn further_queues_opened(&mut self, missing: Vec<(ModelIndex, QueueIndex, String)>) {
        for model in (0..self.models.len()).map(ModelIndex) {
            for queue in (1..self.models[model.0].queues.len()).map(QueueIndex) {
                self.observe(Observation::QueueMissing { model, queue, is_missing: false });
            }
        }
        for (model, queue, why) in missing {
            self.queue_missing(model, queue, why);
        }
    }

    /// The broker closed the channel of a further queue's jobs. As after a lost session, their acks do not arrive. If the queue was
    /// deleted, none of these jobs is redelivered; if it still exists, all are.
    pub(crate) fn queue_lost(&mut self, model: ModelIndex, queue: QueueIndex, why: String) {
        self.consumers[model.0].channel_closed(queue);
        self.queue_missing(model, queue, why);
        self.adjust_consumers();
        self.requeue_waiting();
    }

    /// A further queue cannot be consumed. Its live consumers are stopped at the next adjustment.
    pub(crate) fn queue_missing(&mut self, model: ModelIndex, queue: QueueIndex, why: String) {
        if !self.session.is_active() || self.consumers[model.0].is_missing(queue) {
            return;
        }
        let held = self.jobs.messages_of(model, queue);
        if !held.is_empty() {
            self.redelivery.queue_lost(held, self.now.at);
        }
        self.consumers[model.0].set_missing(queue, &why);
        self.warn_of_missing(model, queue, &why);
        self.observe(Observation::QueueMissing { model, queue, is_missing: true });
        self.after(CHECK_EVERY, Timer::LookForQueue(model, queue));
    }

    /// Excuses a delivery that arrived after its further queue was lost or its consumer stopped. Its ack fails too, so it is redelivered,
    /// and this process is the reason.
    pub(crate) fn excuse_late(&mut self, delivery: &Delivery, queue: Option<QueueIndex>) {
        if queue.is_some_and(|queue| self.consumers[delivery.model.0].is_missing(queue)) {
            self.redelivery.comes_again(delivery.fingerprint, self.now.at);
        }
    }

    fn warn_of_missing(&self, model: ModelIndex, queue: QueueIndex, why: &str) {
        let facts = &self.models[model.0];
        tracing::warn!(
            model = facts.name,
            queue = facts.queues[queue.0].name,
            why,
            "a further queue cannot be consumed, as `why` says: the model's other queues use its slots until it can"
        );
    }

    /// The time has come to check whether a missing queue can be consumed.
    pub(crate) fn look_for_queue(&mut self, model: ModelIndex, queue: QueueIndex) {
        if self.session.is_active() && !self.lifecycle.is_draining() {
            self.act(Action::LookForQueue { model, queue });
        }
    }

    pub(crate) fn queue_looked_for(
        &mut self,
        model: ModelIndex,
        queue: QueueIndex,
        result: Result<(), String>,
    ) {
        if let Err(why) = result {
            // The broker's answer explains more than the end of a consumer. Each answer is logged once.
            if self.consumers[model.0].set_missing(queue, &why) {
                self.warn_of_missing(model, queue, &why);
            }
            return self.after(CHECK_EVERY, Timer::LookForQueue(model, queue));
        }
        let facts = &self.models[model.0];
        tracing::info!(
            model = facts.name,
            queue = facts.queues[queue.0].name,
            "the further queue is there again: starting its consumers"
        );
        self.consumers[model.0].set_found(queue);
        self.observe(Observation::QueueMissing { model, queue, is_missing: false });
        self.adjust_consumers();
    }
}
