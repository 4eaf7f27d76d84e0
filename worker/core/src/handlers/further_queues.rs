//! Further queues of a model that cannot be consumed: their owner deleted them, made them again with other arguments, or took the worker's
//! permission away. Only that queue's consumers stop: the other queues have its slots, and the worker checks from time to time whether it
//! is back.

use std::time::Duration;

use crate::Core;
use crate::action::Action;
use crate::event::Delivery;
use crate::ids::{ModelIndex, QueueIndex};
use crate::observation::Observation;
use crate::timers::Timer;

/// The time between two checks. Also before the first one: a worker that declares queues leaves an owner who deletes a queue, to make
/// it again with other arguments, the time to do so.
const CHECK_EVERY: Duration = Duration::from_secs(10);

impl Core {
    /// A session stands: which further queues it cannot consume.
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

    /// The broker closed the channel of a further queue's jobs. Their acks go nowhere, as they would in a session that is lost. Of a
    /// queue that was deleted no job comes again; of one that lives on, all do.
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

    /// A delivery was still under way when its further queue was lost, or its consumer stopped: its ack goes nowhere either, and it
    /// comes again, because of this process.
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
            every_s = CHECK_EVERY.as_secs(),
            "a further queue cannot be consumed: the model's other queues use its slots, and the worker checks the queue again \
             at intervals of every_s. Declare the queue as workers do, give the worker's user its permissions back, or take the \
             queue out of the model's `queues`"
        );
    }

    /// It is time to check whether a queue is back.
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
            // The broker's answer says more than that a consumer has ended, and each answer is said once.
            if self.consumers[model.0].set_missing(queue, &why) {
                self.warn_of_missing(model, queue, &why);
            }
            return self.after(CHECK_EVERY, Timer::LookForQueue(model, queue));
        }
        let facts = &self.models[model.0];
        tracing::info!(
            model = facts.name,
            queue = facts.queues[queue.0].name,
            "the further queue can be consumed again"
        );
        self.consumers[model.0].set_found(queue);
        self.observe(Observation::QueueMissing { model, queue, is_missing: false });
        self.adjust_consumers();
    }
}
