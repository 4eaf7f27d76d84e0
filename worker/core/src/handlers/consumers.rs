//! Starts and stops consumers by slots, credit and the worker's state, and checks every second how many jobs wait at the broker.

use crate::Core;
use crate::action::{Action, SessionEnd};
use crate::consumers::{Change, ModelConsumers};
use crate::event::QueueCounts;
use crate::handlers::drain::OF_TIMEOUT;
use crate::ids::{ConsumerId, ModelIndex, QueueIndex};
use crate::jobs::Leaving;

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
            || self.quarantine.isolating().is_some();
        for at in 0..self.models.len() {
            let slots = self.memory.slots(at);
            let is_closed = is_closed || !self.scheduler.is_available(ModelIndex(at));
            let wanted = if is_closed { 0 } else { self.credit[at].jobs(self.models[at].pass_cost_max) };
            let model = ModelIndex(at);
            loop {
                let next = ConsumerId(self.session.next_consumer());
                match self.consumers[at].change(wanted, slots, next) {
                    Some((queue, Change::Start { consumer, prefetch })) => {
                        let hold_max = self.settings.job_limit.div_f64(OF_TIMEOUT);
                        self.act(Action::Consume { model, queue, consumer, prefetch, hold_max });
                    }
                    Some((_, Change::Stop { consumer })) => {
                        self.act(Action::StopConsumer { model, consumer });
                    }
                    None => {
                        self.session.unused_consumer();
                        break;
                    }
                }
            }
        }
        self.fetch_quarantined();
    }

    /// The broker sends nothing any more, and has confirmed it.
    pub(crate) fn has_stopped_consuming(&self) -> bool {
        self.consumers.iter().all(ModelConsumers::is_over) && !self.quarantine.is_fetching()
    }

    pub(crate) fn consumer_ended(&mut self, consumer: ConsumerId) {
        for at in 0..self.consumers.len() {
            if !self.consumers[at].ended(consumer) {
                let name = &self.models[at].name;
                let error = format!("the broker cancelled a consumer of `{name}`");
                return self.end_session(SessionEnd::Lost(error));
            }
        }
        self.adjust_consumers();
        self.requeue_waiting();
    }

    /// What is published now reaches none of our own consumers. RabbitMQ counts a delivery to a consumer that is being
    /// cancelled, although nobody sees it, and such counts are taken for lost workers.
    pub(crate) fn may_requeue_unfinished(&self, model: ModelIndex) -> bool {
        let is_leaving = self.lifecycle.is_draining()
            || self.lifecycle.is_handing_over()
            || !self.scheduler.is_available(model);
        !is_leaving || self.consumers[model.0].is_over()
    }

    /// Requeues the jobs that waited for the end of our consumers.
    pub(crate) fn requeue_waiting(&mut self) {
        let waiting = self.jobs.running_where(|_, job| job.leaving() == Some(Leaving::Requeued));
        waiting.into_iter().for_each(|job| self.advance(job));
        if self.lifecycle.is_draining() || self.lifecycle.is_handing_over() {
            self.requeue_fetching();
        }
    }

    /// Takes the next quarantined job, if no other job is unacknowledged.
    fn fetch_quarantined(&mut self) {
        let is_alone = self.unacked() == 0 && self.has_stopped_consuming();
        let may_run =
            !self.lifecycle.is_handing_over() && !self.lifecycle.is_draining() && !self.lifecycle.is_paused();
        if is_alone
            && may_run
            && let Some(model) = self.quarantine.fetch(self.now.at)
        {
            self.act(Action::FetchQuarantined { model });
        }
    }

    pub(crate) fn quarantine_empty(&mut self) {
        self.quarantine.fetched();
        self.end_isolation();
    }

    pub(crate) fn end_isolation(&mut self) {
        self.quarantine.end_isolation(self.now.at);
        self.adjust_consumers();
    }

    /// Asks how much waits at the broker.
    pub(crate) fn count_queues(&mut self) {
        let may_run =
            !self.lifecycle.is_draining() && !self.lifecycle.is_paused() && !self.lifecycle.is_handing_over();
        if !may_run {
            return;
        }
        let memory = &self.memory;
        let with_slots = (0..self.models.len()).filter(|at| memory.slots(*at) > 0).map(ModelIndex);
        for model in self.quarantine.start_counting(with_slots) {
            self.act(Action::CountQueues { model });
        }
    }

    /// So much waits of a model. If there are quarantined jobs, the worker stops consuming, settles what it holds, and then takes
    /// them one by one. And where jobs wait that should have been delivered, the consumer is dead.
    pub(crate) fn queues_counted(&mut self, model: ModelIndex, counts: QueueCounts) {
        self.quarantine.counted(model);
        self.bulk_counted(model, counts.bulk);
        if self.quarantine.isolating().is_some() || self.lifecycle.is_paused() {
            return;
        }
        self.consumers[model.0].looked(&counts, self.now.at);
        let name = &self.models[model.0].name;
        let own = self.consumers[model.0].live();
        if self.quarantine.is_our_turn(&counts, own, self.now.at, &mut self.random) {
            tracing::info!(
                model = name,
                count = counts.quarantined,
                "jobs wait in quarantine: each will run alone"
            );
            self.quarantine.isolate(model);
            return self.adjust_consumers();
        }
        let mut is_dead = false;
        for queue in (0..counts.jobs.len()).map(QueueIndex) {
            let starved = self.consumers[model.0].starved(queue, &counts);
            is_dead |= self.quarantine.looked(model, queue, starved.is_some(), starved.unwrap_or(false));
        }
        if is_dead {
            let error = format!("the broker delivers no jobs of `{name}`, though some wait");
            return self.end_session(SessionEnd::Lost(error));
        }
        self.adjust_consumers();
    }

    /// Says when the queue of large jobs is full, once each time.
    fn bulk_counted(&mut self, model: ModelIndex, waiting: u32) {
        if self.consumers[model.0].bulk_counted(waiting, self.settings.bulk_jobs_max) {
            tracing::warn!(
                model = self.models[model.0].name,
                waiting,
                "the queue of large jobs is full: further ones run like others until it has room"
            );
        }
    }
}
