//! Another attempt of a job: to which queue the job goes, and what follows if that queue does not take it.

use vramq_schemas::Reason;
use vramq_schemas::topology::DELAYS_MS;

use super::{Settling, Stage, Step, end_of};
use crate::action::{Publication, Route};
use crate::disposition::{JobOutcome, Requeue};
use crate::event::PublicationOutcome;
use crate::rejection::Rejection;

impl Settling {
    /// Another attempt, by the route that was decided on.
    pub(super) fn requeue(&mut self) -> Step {
        self.publish_attempt(Stage::Requeue)
    }

    /// Publishes another attempt to a delay queue, because the job's queue or the dead queue is full. Giving the old message back instead
    /// would repeat the size that failed, and the parts that were sent. Holding it would occupy a slot without draining the queue. A delay
    /// queue has no length limit.
    pub(super) fn requeue_later(&mut self) -> Step {
        self.publish_attempt(Stage::RequeueLater)
    }

    fn publish_attempt(&mut self, stage: Stage) -> Step {
        let JobOutcome::Requeue(Requeue { route, headers, .. }) = &self.outcome else {
            return self.give_back();
        };
        let publication = Publication::Requeue { headers: headers.clone(), route: route.clone() };
        self.publish(stage, publication)
    }

    /// The next step after the attempt was published by the route that was decided on.
    pub(super) fn requeued(&mut self, outcome: PublicationOutcome, declares: bool) -> Step {
        match outcome {
            PublicationOutcome::Confirmed { .. } => self.may_be_acked(),
            PublicationOutcome::Refused { destination }
            | PublicationOutcome::Unreachable { destination, .. } => self.requeue_queue_full(&destination),
            PublicationOutcome::Unroutable { destination } => self.requeue_unroutable(&destination, declares),
            PublicationOutcome::TooLarge => {
                let error = "the job has to be requeued, and is larger than the broker accepts now";
                self.requeue_impossible(Rejection::new(Reason::TooLarge, error))
            }
            PublicationOutcome::Cut { rejection, .. } => self.requeue_impossible(rejection),
        }
    }

    /// The next step after the attempt was published to a delay queue.
    pub(super) fn requeued_later(&mut self, outcome: PublicationOutcome, declares: bool) -> Step {
        match outcome {
            PublicationOutcome::Confirmed { .. } => self.may_be_acked(),
            PublicationOutcome::Unroutable { destination } => self.no_queue(&destination, declares),
            _ => self.give_back(),
        }
    }

    fn requeue_queue_full(&mut self, destination: &str) -> Step {
        let JobOutcome::Requeue(requeue) = &mut self.outcome else { return self.give_back() };
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        if let Some(otherwise) = requeue.otherwise.take() {
            tracing::debug!(
                job,
                trace_id,
                destination,
                "the queue of the workers that the job moves to is full: the job waits, or is dead-lettered after too many waits"
            );
            return self.instead(otherwise.full);
        }
        tracing::warn!(
            job,
            trace_id,
            destination,
            "the queue of the requeued job is full or has a length limit: the job waits in a delay queue"
        );
        requeue.route = Route::Later(DELAYS_MS[0]);
        self.requeue_later()
    }

    fn requeue_unroutable(&mut self, destination: &str, declares: bool) -> Step {
        let JobOutcome::Requeue(requeue) = &mut self.outcome else { return self.give_back() };
        let Some(otherwise) = requeue.otherwise.take() else {
            return self.no_queue(destination, declares);
        };
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        tracing::warn!(
            job,
            trace_id,
            destination,
            "cannot pass the job on to other workers: no queue is bound for their routing key; dead-lettering it"
        );
        self.requeue_impossible(otherwise.no_queue)
    }

    /// No other attempt is possible. The job ends as a dead letter, with the headers that the attempt would have had.
    fn requeue_impossible(&mut self, rejection: Rejection) -> Step {
        let JobOutcome::Requeue(requeue) = &self.outcome else { return self.give_back() };
        self.headers_before = Some(requeue.headers.clone());
        self.becomes_dead_letter(rejection);
        self.dead_letters()
    }

    /// Replaces the requeue with another outcome.
    fn instead(&mut self, outcome: JobOutcome) -> Step {
        (self.end, self.outcome) = (end_of(&outcome), outcome);
        match self.outcome {
            JobOutcome::Requeue(_) => self.requeue(),
            _ => self.dead_letters(),
        }
    }
}
