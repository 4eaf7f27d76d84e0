//! Starts and stops consumers by slots, credit and the worker's state, and asks the broker every second how many jobs wait.

use crate::Core;
use crate::action::{Action, JobQueue, SessionEnd};
use crate::consumers::{Change, ModelConsumers};
use crate::credit::Wanted;
use crate::event::QueueCounts;
use crate::ids::{ConsumerId, ModelIndex, QueueIndex};
use crate::jobs::StopReason;

impl Core {
    /// Brings the consumers in line with the slots and the work: none while draining, paused or sick, or while quarantined jobs
    /// run.
    pub(crate) fn adjust_consumers(&mut self) {
        if !self.session.is_active() {
            return;
        }
        let is_closed = self.lifecycle.is_draining()
            || self.lifecycle.is_paused()
            || self.health.is_sick()
            || self.quarantine.is_isolating();
        for model in (0..self.models.len()).map(ModelIndex) {
            let is_closed = is_closed || !self.scheduler.is_available(model);
            let cost_max = self.models[model.0].pass_cost_max;
            let wanted = if is_closed { Wanted::NONE } else { self.credit[model.0].wanted(cost_max) };
            self.adjust_consumers_of(model, wanted);
        }
        self.take_quarantined();
    }

    /// Starts and stops consumers of a model until it can hold the `wanted` jobs, as far as its slots allow.
    fn adjust_consumers_of(&mut self, model: ModelIndex, wanted: Wanted) {
        let slots = self.memory.slots(model.0);
        loop {
            let next = ConsumerId(self.session.next_consumer());
            match self.consumers[model.0].change(wanted, slots, next) {
                Some((queue, Change::Start { consumer, prefetch })) => {
                    let hold_max = self.time_limits.consumer_timeout();
                    self.act(Action::Consume { model, queue, consumer, prefetch, hold_max });
                }
                Some((queue, Change::Stop { consumer })) => {
                    self.act(Action::StopConsumer { model, queue, consumer });
                }
                None => return self.session.unused_consumer(),
            }
        }
    }

    /// Whether the broker has confirmed that it sends no more jobs.
    pub(crate) fn has_stopped_consuming(&self) -> bool {
        self.consumers.iter().all(ModelConsumers::is_over) && !self.quarantine.is_taking()
    }

    pub(crate) fn consumer_ended(&mut self, consumer: ConsumerId) {
        for model in (0..self.consumers.len()).map(ModelIndex) {
            match self.consumers[model.0].end_consumer(consumer) {
                None => {}
                Some(JobQueue::Jobs(queue)) if queue.is_further() => {
                    self.queue_missing(model, queue, "the broker cancelled its consumer".to_owned());
                }
                Some(_) => {
                    let name = &self.models[model.0].name;
                    let error = format!("the broker cancelled a consumer of `{name}`");
                    return self.end_session(SessionEnd::Lost(error));
                }
            }
        }
        self.adjust_consumers();
        self.requeue_waiting();
    }

    /// Whether a job that is published again now reaches none of our own consumers. RabbitMQ counts a delivery to a consumer that is being
    /// cancelled, although the worker never sees it. A later worker would take that count for a lost worker.
    pub(crate) fn may_requeue_unfinished(&self, model: ModelIndex) -> bool {
        let is_stopping = self.lifecycle.is_draining()
            || self.lifecycle.requeues_all()
            || self.quarantine.is_isolating()
            || !self.scheduler.is_available(model);
        !is_stopping || self.consumers[model.0].is_over()
    }

    /// Requeues the jobs that were waiting until our consumers had ended.
    pub(crate) fn requeue_waiting(&mut self) {
        let waiting =
            self.jobs.running_where(|_, job| matches!(job.stop_reason(), Some(StopReason::Requeued(_))));
        waiting.into_iter().for_each(|job| self.advance(job));
        let is_waiting = self.quarantine.is_isolating() && !self.quarantine.has_begun();
        if self.lifecycle.is_draining() || self.lifecycle.requeues_all() || is_waiting {
            self.requeue_fetching();
        }
    }

    /// Asks the broker how many jobs wait.
    pub(crate) fn count_queues(&mut self) {
        let may_run =
            !self.lifecycle.is_draining() && !self.lifecycle.is_paused() && !self.lifecycle.requeues_all();
        if !may_run {
            return;
        }
        let (memory, scheduler) = (&self.memory, &self.scheduler);
        let is_served = |model: &ModelIndex| memory.slots(model.0) > 0 && scheduler.is_available(*model);
        let with_slots = (0..self.models.len()).map(ModelIndex).filter(is_served);
        for model in self.quarantine.start_counting(with_slots) {
            self.act(Action::CountQueues { model });
        }
    }

    /// The broker has counted a model's queues. Isolates quarantined jobs, if there are any. Where jobs wait that should have been
    /// delivered, the consumer counts as dead.
    pub(crate) fn queues_counted(&mut self, model: ModelIndex, counts: QueueCounts) {
        self.quarantine.counted(model);
        self.bulk_counted(model, counts.bulk.waiting);
        if self.quarantine.is_isolating() {
            return self.counted_while_isolating(model, counts.quarantined);
        }
        if self.lifecycle.is_paused() {
            return;
        }
        self.consumers[model.0].queues_counted(&counts, self.now.at);
        let own = self.consumers[model.0].live();
        if self.quarantine.is_our_turn(&counts, own, self.now.at, &mut self.random) {
            return self.isolate(model, counts.quarantined);
        }
        if let Some(error) = self.check_deliveries(model, &counts) {
            return self.end_session(SessionEnd::Lost(error));
        }
        self.end_large_turn(model, counts.bulk);
        self.adjust_consumers();
    }

    /// Checks, for each queue in which jobs wait, whether the broker delivers them. A further queue without deliveries is marked as
    /// missing. For the model's own queue, returns why the session must end.
    fn check_deliveries(&mut self, model: ModelIndex, counts: &QueueCounts) -> Option<String> {
        for queue in (0..counts.jobs.len()).map(QueueIndex) {
            let starved = self.consumers[model.0].starved(queue, counts);
            if !self.quarantine.checked(model, queue, starved) {
                continue;
            }
            if !queue.is_further() {
                let name = &self.models[model.0].name;
                return Some(format!("the broker delivers no jobs of `{name}`, though some wait"));
            }
            let why = "the broker delivers no jobs from this queue, though some wait".to_owned();
            self.queue_missing(model, queue, why);
        }
        None
    }

    /// Logs when the queue of large jobs has become full, once each time.
    fn bulk_counted(&mut self, model: ModelIndex, waiting: u32) {
        if self.consumers[model.0].bulk_counted(waiting, self.settings.bulk_jobs_max) {
            tracing::warn!(
                model = self.models[model.0].name,
                waiting,
                "the queue of large jobs is full: further large jobs run like small ones until that queue has room"
            );
        }
    }
}
