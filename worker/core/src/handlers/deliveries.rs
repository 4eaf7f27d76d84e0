//! A job's first steps. A delivery comes in, and later the result of reading it. An order to read it goes out, or items for the scheduler,
//! or the end of a job that is not run here.

use vramq_schemas::headers::WORKER_LOST;
use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{Attempt, JobHeaders, Reason};

use crate::Core;
use crate::action::{Action, Route};
use crate::backoff;
use crate::consumers::ModelConsumers;
use crate::device::work;
use crate::disposition::{JobOutcome, Otherwise, Requeue, WAITS_MAX};
use crate::event::{DecodedJob, Delivery, Source};
use crate::handlers::preparation::with_indices;
use crate::ids::{JobKey, ModelIndex, QueueIndex};
use crate::jobs::{Job, Received};
use crate::observation::{Cause, Observation};
use crate::poison_policy::RedeliveryDecision;
use crate::rejection::Rejection;

/// How often a job waits for a worker with the model revision that it demands. If one in four workers has it, 16 tries find one in 99 of
/// 100 cases. With the waits of `backoff.rs` they take about seven minutes, as long as a rolling upgrade.
const REVISION_WAITS_MAX: u32 = 16;

/// A job that costs more than this many full passes is a large one. This also limits how long other jobs wait for a job that is
/// not large.
const BULK_PASSES: usize = 4;

impl Core {
    pub(crate) fn delivered(&mut self, mut delivery: Delivery) {
        let came_from = self.note_delivery(&delivery);
        let of_share = self.queue_of_share(&mut delivery, came_from);
        let mut received = Received::new(delivery, self.now).of_share(of_share);
        let outcome = self.outcome_unrun(&mut received);
        // Must come after the decision: it excuses the next delivery of the message, not this one.
        self.excuse_late(&received.delivery, came_from);
        if let Some(outcome) = outcome {
            return self.settle(received.settle(outcome, self.now.at));
        }
        self.read_in_turn(received);
    }

    /// Has a job read.
    pub(crate) fn read(&mut self, received: Received) {
        let (job, cost) = (received.delivery.job, self.cost_at_first(received.delivery.model));
        self.jobs.insert(Job::Received(Box::new(received)));
        self.act(Action::Decode { job, cost });
    }

    /// Counts a delivery in all sub-states that count deliveries. Returns its queue, if that is a queue of jobs.
    fn note_delivery(&mut self, delivery: &Delivery) -> Option<QueueIndex> {
        let (model, source) = (delivery.model, delivery.source);
        let queue = self.consumers[model.0].count_delivered(source);
        self.destinations.delivered(delivery);
        self.republish_allowance.consumed(delivery.bytes);
        if let Some(queue) = queue {
            self.quarantine.delivered(model, queue);
        }
        let quarantined = source == Source::Quarantine;
        if quarantined {
            self.quarantine.taken();
        }
        self.observe(Observation::Received { model, queue, quarantined });
        queue
    }

    /// The outcome of a job that is not run now: an earlier delivery was settled, its caller withdrew it, it may crash workers, or its
    /// reply queue is full.
    fn outcome_unrun(&mut self, received: &mut Received) -> Option<JobOutcome> {
        let (delivery, now) = (&received.delivery, self.now.at);
        if self.redelivery.take_settlement(delivery, now) {
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::info!(job, trace_id, "the redelivered job was settled before: acknowledging it");
            return Some(JobOutcome::AckOnly);
        }
        if self.withdrawals.has(delivery, now) {
            return Some(JobOutcome::Withdrawn);
        }
        match self.redelivery.judge(delivery, now) {
            RedeliveryDecision::Run(crashes) => {
                received.set_crashes(crashes);
                self.wait_for_reply_queue(received)
            }
            RedeliveryDecision::RunAlone(crashes) => {
                let (job, trace_id) = (&delivery.id, &delivery.trace_id);
                let model = &self.models[delivery.model.0].name;
                tracing::info!(
                    job,
                    trace_id,
                    model,
                    crashes,
                    "processes of the model died while they ran the job: it runs in passes of its own"
                );
                let is_last_try = crashes.saturating_add(1) >= self.settings.poison.crashes_max;
                received.set_crashes(crashes);
                received.run_alone(is_last_try);
                self.wait_for_reply_queue(received)
            }
            decision => {
                // If the dead letter is refused, the job is published again, and the broker counts the deliveries of the new message from zero.
                received.set_crashes(decision.crashes());
                Some(self.after_crashes(received, decision))
            }
        }
    }

    /// The queue whose share a job's passes take: the first queue that it came from. A header names that queue, because workers republish
    /// jobs to the model's own queues.
    fn queue_of_share(&self, delivery: &mut Delivery, came_from: Option<QueueIndex>) -> QueueIndex {
        let model = &self.models[delivery.model.0];
        let Some(headers) = &mut delivery.headers else { return QueueIndex(0) };
        if let Some(further) = came_from.filter(|queue| queue.is_further()) {
            headers.queue = model.queues.get(further.0).map(|queue| queue.name.clone());
            return further;
        }
        headers.queue.as_deref().map_or(QueueIndex(0), |name| model.queue_named(name))
    }

    /// The outcome of a job whose reply queue is full or silent: it waits unrun, so that it takes no slot from others. Counts the wait.
    fn wait_for_reply_queue(&mut self, received: &Received) -> Option<JobOutcome> {
        let delivery = &received.delivery;
        let Delivery { id: job, trace_id, model, reply_queue, headers, .. } = delivery;
        if !self.destinations.must_wait(delivery, self.memory.slots(model.0), self.now.at) {
            return None;
        }
        let queue = reply_queue.as_ref()?;
        headers.as_ref()?;
        let mut headers = received.reached();
        headers.waits = headers.waits.saturating_add(1);
        if headers.waits > WAITS_MAX {
            let error =
                format!("the reply queue `{queue}` stayed full or did not confirm; the job was not run");
            return Some(JobOutcome::dead_letter(headers, Rejection::new(Reason::Unroutable, error)));
        }
        tracing::debug!(
            job,
            trace_id,
            queue,
            "the reply queue is full, or does not confirm: the job waits and is not run"
        );
        self.destinations.released(delivery);
        let wait = backoff::for_memory(headers.waits, &mut self.random);
        Some(JobOutcome::requeue(headers, Route::Later(wait), Cause::ReplyQueueFull))
    }

    /// The outcome of a job that may be the reason why workers crash.
    fn after_crashes(&self, received: &Received, decision: RedeliveryDecision) -> JobOutcome {
        let Delivery { id: job, trace_id, model, headers, .. } = &received.delivery;
        let (model, crashes) = (&self.models[model.0].name, decision.crashes());
        let mut headers = headers.clone().unwrap_or_default();
        if crashes > headers.crashes {
            headers.history.push(self.incident(WORKER_LOST));
        }
        headers.crashes = crashes;
        match decision {
            RedeliveryDecision::DeadLetter(_) => {
                headers.crashes = self.redelivery.crashes_of_dead_letter();
                JobOutcome::dead_letter(headers, Rejection::new(Reason::Crashed, crashed(crashes)))
            }
            RedeliveryDecision::Quarantine(_) => {
                tracing::warn!(
                    job,
                    trace_id,
                    model,
                    crashes,
                    "workers were lost while they held the job: it will run in isolation"
                );
                JobOutcome::requeue(headers, Route::Quarantine, Cause::Quarantine)
            }
            RedeliveryDecision::Count(_) | RedeliveryDecision::Run(_) | RedeliveryDecision::RunAlone(_) => {
                tracing::info!(
                    job,
                    trace_id,
                    model,
                    crashes,
                    "the job was redelivered after its worker was lost: adding one to its crashes"
                );
                JobOutcome::requeue(headers, route_of_counted(received.delivery.source), Cause::Counted)
            }
        }
    }

    /// A history entry about a job that may have crashed a worker or a device. It names this worker, which noticed the crash.
    pub(crate) fn incident(&self, outcome: &str) -> Attempt {
        let (worker, outcome) = (self.settings.worker.clone(), outcome.to_owned());
        Attempt { at_ms: self.now.unix_ms, worker, outcome, ..Attempt::default() }
    }

    pub(crate) fn decoded(&mut self, job: JobKey, result: Result<DecodedJob, Rejection>) {
        let Some(received) = self.take_unless_given_up(job) else { return };
        let decoded = match result {
            Ok(_) if received.is_expired(self.now.at) => Err(received.expired()),
            result => result,
        };
        match decoded {
            Ok(decoded) => self.queue(received, decoded),
            Err(rejection) if rejection.reason == Reason::WrongRevision => {
                let outcome = self.wait_for_revision(&received, rejection);
                self.settle(received.settle(outcome, self.now.at));
            }
            Err(rejection) => {
                let outcome = received.rejected(rejection);
                self.settle(received.settle(outcome, self.now.at));
            }
        }
    }

    /// A rule of the model wants other workers to run the job: publishes it to them, unrun.
    pub(crate) fn moved(&mut self, job: JobKey, key: String) {
        let Some(received) = self.take_unless_given_up(job) else { return };
        let headers = received.reached();
        let error = format!(
            "a rule of the model moves the job to the routing key `{key}`, and no queue is bound with it"
        );
        let no_queue = Rejection::new(Reason::InvalidInput, error);
        let full = Rejection::new(Reason::Unroutable, "a rule of the model moves the job to other workers");
        let otherwise = Some(Otherwise::new(&key, no_queue, &headers, full));
        let headers = Box::new(JobHeaders { moved: true, ..headers });
        let requeue = Requeue { route: Route::OtherWorkers(key), headers, cause: Cause::Moved, otherwise };
        self.settle(received.settle(JobOutcome::Requeue(requeue), self.now.at));
    }

    /// The outcome of a job that demands another revision of the model: it waits for a worker that has that revision.
    fn wait_for_revision(&mut self, received: &Received, rejection: Rejection) -> JobOutcome {
        let Delivery { id: job, trace_id, .. } = &received.delivery;
        let mut headers = received.reached();
        headers.revision_waits = headers.revision_waits.saturating_add(1);
        if headers.revision_waits > REVISION_WAITS_MAX {
            let error = format!(
                "{}; the workers that received the job before had other revisions, too",
                rejection.error
            );
            return JobOutcome::dead_letter(headers, Rejection { error, ..rejection });
        }
        tracing::debug!(
            job,
            trace_id,
            why = rejection.error,
            "the job demands another revision of the model: it waits for a worker with that revision"
        );
        let wait = backoff::for_memory(headers.revision_waits, &mut self.random);
        JobOutcome::requeue(headers, Route::Later(wait), Cause::WrongRevision)
    }

    /// The largest cost of a job that does not count as large.
    pub(crate) fn cost_of_large(&self, model: ModelIndex) -> usize {
        self.models[model.0].pass_cost_max.saturating_mul(BULK_PASSES)
    }

    /// Whether a job is so large that jobs behind it would wait for it; it then moves to the bulk queue, unrun. The items that were
    /// prepared first are enough to decide this. While the bulk queue is full, large jobs run like others. If jobs are then published
    /// faster than they run, the queue of jobs fills, and its length limit stops publishers.
    fn is_bulk(&self, received: &Received, cost: usize) -> bool {
        let Delivery { model, source, .. } = received.delivery;
        let is_large = cost > self.cost_of_large(model);
        let has_room = self.consumers[model.0].has_room_in_bulk(self.settings.bulk_jobs_max);
        let has_queue = ModelConsumers::has_bulk(self.memory.slots(model.0));
        matches!(source, Source::Jobs(..)) && is_large && has_queue && has_room
    }

    /// A job was read. Its items wait for passes, or it moves to the bulk queue, or nothing of it is left to run.
    fn queue(&mut self, received: Received, decoded: DecodedJob) {
        let Delivery { job, model, source, .. } = received.delivery;
        let pass_cost_max = self.models[model.0].pass_cost_max;
        let cost: usize = decoded.costs.iter().map(|cost| work(*cost, pass_cost_max)).sum();
        if self.is_bulk(&received, cost) {
            self.consumers[model.0].moved_to_bulk();
            let outcome = JobOutcome::requeue(received.reached(), Route::Bulk, Cause::Bulk);
            return self.settle(received.settle(outcome, self.now.at));
        }
        let costs = decoded.costs.clone();
        let running = received.decoded(decoded, self.models[model.0].reply_max);
        if running.is_complete() {
            return self.settle(running.settle(JobOutcome::Reply, self.now.at));
        }
        let cost_left = estimate(cost, costs.len(), running.items_left());
        match source {
            Source::Jobs(..) => self.credit[model.0].job_decoded(cost_left),
            Source::Bulk(_) => self.credit[model.0].large_job_decoded(cost_left),
            Source::Quarantine => {}
        }
        self.scheduler.push(model, running.waiting(with_indices(running.items_done(), costs)));
        self.jobs.insert(Job::Running(Box::new(running)));
        if source == Source::Quarantine && self.scheduler.is_probed(&self.models[model.0]) {
            self.health.probe_before(model);
        }
        if self.lifecycle.requeues_all() {
            self.requeue_unfinished(job);
        }
        self.prepare_more(job);
        self.adjust_consumers();
    }
}

/// Where a job is requeued that was redelivered after its worker was lost. A job from a queue of jobs takes a delay queue: delivered at
/// once, the new message could kill a worker before the ack of this one is sent, and both would come back.
fn route_of_counted(source: Source) -> Route {
    match source {
        Source::Quarantine => Route::Quarantine,
        Source::Jobs(..) | Source::Bulk(_) => Route::Later(DELAYS_MS[0]),
    }
}

/// Estimates what `items` items of a job cost. `cost` is the cost of the `prepared` ones.
fn estimate(cost: usize, prepared: usize, items: usize) -> usize {
    if prepared == items { cost } else { (cost / prepared.max(1)).saturating_mul(items) }
}

fn crashed(crashes: u32) -> String {
    format!(
        "{crashes} workers crashed, lost their device or were killed while they held this job, the last ones while it ran \
         alone: the job is probably the cause. The times that are known are in `history`; look at what the workers and the \
         system logged then"
    )
}

#[cfg(test)]
#[path = "deliveries_tests.rs"]
mod tests;
