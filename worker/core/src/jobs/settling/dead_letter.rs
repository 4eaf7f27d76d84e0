//! A job's dead letter: first the replies that the reply queue did not take, then the job, then a `failed` reply to the caller.

use std::sync::Arc;

use vramq_schemas::Reason;
use vramq_schemas::topology::DELAYS_MS;

use super::{Settling, Stage, Step, end_of};
use crate::action::{Publication, Route};
use crate::disposition::JobOutcome;
use crate::event::PublicationOutcome;
use crate::observation::{Cause, End};
use crate::rejection::Rejection;

/// How long a job waits whose dead letter is refused: only a person makes room in the dead queue.
const REFUSED_DELAY_MS: u64 = DELAYS_MS[DELAYS_MS.len() - 1];

impl Settling {
    /// Changes the outcome to a dead letter. Its headers count the items that were answered before the run that is published first.
    pub(super) fn becomes_dead_letter(&mut self, rejection: Rejection) {
        self.end = End::DeadLettered(rejection.reason);
        self.outcome = JobOutcome::DeadLetter { headers: self.headers_before.take(), rejection };
    }

    /// Publishes the replies that were not taken, if any, and then the job.
    pub(super) fn dead_letters(&mut self) -> Step {
        if !self.has_dead_replies {
            return self.dead_letter();
        }
        let Some(rejection) = self.rejection() else { return self.give_back() };
        self.publish(Stage::DeadReplies, Publication::DeadReplies(rejection))
    }

    pub(super) fn dead_letter(&mut self) -> Step {
        let JobOutcome::DeadLetter { headers, rejection } = &self.outcome else {
            return self.give_back();
        };
        let (headers, rejection) = (headers.clone(), Arc::new(rejection.clone()));
        self.publish(Stage::DeadLetter, Publication::DeadLetter { headers, rejection })
    }

    /// A `failed` reply to the caller.
    pub(super) fn notice(&mut self) -> Step {
        let Some(rejection) = self.rejection() else { return self.give_back() };
        self.publish(Stage::Notice, Publication::FailureNotice(rejection))
    }

    /// The next step after the replies were published to the dead letters. The job follows even if the broker did not take them.
    pub(super) fn replies_dead_lettered(&mut self, outcome: PublicationOutcome, declares: bool) -> Step {
        match outcome {
            PublicationOutcome::Unroutable { destination } => self.no_queue(&destination, declares),
            PublicationOutcome::Refused { destination } => self.dead_letter_refused(&destination),
            _ => self.dead_letter(),
        }
    }

    /// The next step after the job was published to the dead letters.
    pub(super) fn dead_lettered(&mut self, outcome: PublicationOutcome, declares: bool) -> Step {
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        let Some(rejection) = self.rejection() else { return self.give_back() };
        match outcome {
            PublicationOutcome::Confirmed { .. } => {}
            PublicationOutcome::TooLarge if declares => {
                tracing::error!(
                    job,
                    trace_id,
                    "the dead letter, or its headers, are larger than the broker accepts (max_message_size, frame_max): the broker dead-letters the \
                     job, without the worker's explanation"
                );
                self.end = End::Rejected(rejection.reason);
            }
            PublicationOutcome::Unroutable { destination } => return self.no_queue(&destination, declares),
            PublicationOutcome::Refused { destination } => return self.dead_letter_refused(&destination),
            outcome => {
                tracing::error!(
                    job,
                    trace_id,
                    ?outcome,
                    "cannot publish the dead letter: returning the job to its queue"
                );
                return self.give_back();
            }
        }
        // A caller whose reply queue is gone cannot be sent anything.
        if self.has_dead_replies && rejection.reason == Reason::Unroutable {
            return self.end_of_dead_letter();
        }
        self.notice()
    }

    /// The job waits in a delay queue, with the headers that it was delivered with and the items that are answered by now. Then it is
    /// decided about again. Holding it, or giving it back to the front of its queue, would occupy a slot that jobs of others need.
    fn dead_letter_refused(&mut self, destination: &str) -> Step {
        let delivery = &self.received.delivery;
        let (job, trace_id, seconds) = (&delivery.id, &delivery.trace_id, REFUSED_DELAY_MS / 1000);
        tracing::error!(
            job,
            trace_id,
            destination,
            seconds,
            "the dead letter is refused: the dead queue, or another queue with the same binding, is full. The job waits in a delay queue, \
             and is then decided about again. Make room or raise the length limit; remove a limit only after that"
        );
        let mut headers = self.received.reached();
        if let JobOutcome::DeadLetter { headers: Some(of_letter), .. } = &self.outcome {
            headers.items_done = of_letter.items_done;
        }
        self.outcome = JobOutcome::requeue(headers, Route::Later(REFUSED_DELAY_MS), Cause::DeadQueueFull);
        self.end = end_of(&self.outcome);
        self.requeue_later()
    }

    /// The next step after the `failed` reply was published. The job ends even if the reply did not arrive.
    pub(super) fn notified(&mut self, outcome: &PublicationOutcome) -> Step {
        // A caller that withdrew a job may be gone, so a lost reply is not logged.
        let is_awaited = !matches!(self.outcome, JobOutcome::Withdrawn);
        if is_awaited && !matches!(outcome, PublicationOutcome::Confirmed { .. }) {
            let delivery = &self.received.delivery;
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::warn!(
                job,
                trace_id,
                ?outcome,
                "the `failed` reply could not be delivered to the caller: only the dead letter says how the job ended"
            );
        }
        self.end_of_dead_letter()
    }

    /// The next step when the `failed` reply is skipped, because the caller's reply queue confirms nothing.
    pub(crate) fn notice_skipped(&mut self) -> Step {
        let destination = self.received.delivery.reply_queue.clone().unwrap_or_default();
        self.notified(&PublicationOutcome::Unreachable { destination, why: "confirms nothing" })
    }

    fn end_of_dead_letter(&mut self) -> Step {
        if matches!(self.end, End::Rejected(_)) { self.over(Step::Reject) } else { self.may_be_acked() }
    }

    fn rejection(&self) -> Option<Arc<Rejection>> {
        match &self.outcome {
            JobOutcome::DeadLetter { rejection, .. } => Some(Arc::new(rejection.clone())),
            JobOutcome::Withdrawn => Some(Arc::new(Rejection::withdrawn())),
            _ => None,
        }
    }
}

/// Why a job is dead-lettered whose replies were not taken.
pub(crate) fn undeliverable(outcome: &PublicationOutcome) -> Rejection {
    let (queue, fault) = match outcome {
        PublicationOutcome::TooLarge => {
            let error = "the reply is larger than the broker accepts: raise its max_message_size, or ask for less at a time";
            return Rejection::new(Reason::TooLarge, error);
        }
        PublicationOutcome::Cut { rejection, .. } => return rejection.clone(),
        PublicationOutcome::Unroutable { destination } => (destination.as_str(), "does not exist"),
        PublicationOutcome::Refused { destination } => (destination.as_str(), "stayed full"),
        PublicationOutcome::Unreachable { destination, why } => (destination.as_str(), *why),
        PublicationOutcome::Confirmed { .. } => ("", "was not used"),
    };
    let error = format!("the reply queue `{queue}` {fault}; the results are beside this dead letter");
    Rejection::new(Reason::Unroutable, error)
}
