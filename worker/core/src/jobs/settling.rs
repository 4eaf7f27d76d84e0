//! Carries out what was decided about a job: publish, wait for the confirm, and only then let it be acknowledged. Pure: each
//! outcome of a publication gives the next step.

use std::sync::Arc;
use std::time::Instant;

use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{JobHeaders, Reason};

use super::{Confirmed, Received};
use crate::action::{Publication, Route, Run};
use crate::disposition::{JobOutcome, Requeue};
use crate::event::PublishOutcome;
use crate::observation::End;
use crate::rejection::Rejection;

/// What to do next for a job.
#[derive(Debug)]
pub(crate) enum Step {
    Publish(Publication),
    /// The broker refused the publication: wait, then publish it again.
    Retry,
    /// The broker takes nothing about the job: wait, then give it back to its queue.
    Return,
    /// Have the broker dead-letter the job.
    Reject,
    /// All is published: acknowledge the job.
    Ack,
    /// A queue or a binding of the worker's own is gone. The next session declares it again.
    SessionUnusable(String),
}

/// What is being published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Reply,
    Requeue,
    /// The job's queue is full: another attempt by way of a delay queue.
    RequeueLater,
    DeadReplies,
    DeadLetter,
    Notice,
    /// Nothing is published any more.
    Over,
}

/// A job that is published about.
#[derive(Debug)]
pub(crate) struct Settling {
    received: Received,
    outcome: JobOutcome,
    /// Finished items that go out first.
    run: Option<Run>,
    /// Where the job stands before those.
    headers_before: Option<Box<JobHeaders>>,
    /// Replies were not taken, and go to the dead letters.
    has_dead_replies: bool,
    stage: Stage,
    /// How often the broker refused what is being published.
    tries: u32,
    end: End,
    first_pass_at: Option<Instant>,
    ready_at: Instant,
}

impl Settling {
    pub(super) fn new(
        received: Received,
        outcome: JobOutcome,
        run: Option<Run>,
        headers_before: Option<JobHeaders>,
        now: Instant,
    ) -> Self {
        let end = end_of(&outcome);
        Self {
            received,
            outcome,
            run,
            headers_before: headers_before.map(Box::new),
            has_dead_replies: false,
            stage: Stage::Start,
            tries: 0,
            end,
            first_pass_at: None,
            ready_at: now,
        }
    }

    pub(super) fn with_dead_replies(mut self) -> Self {
        self.has_dead_replies = true;
        self
    }

    pub(super) fn after_first_pass(mut self, at: Option<Instant>) -> Self {
        self.first_pass_at = at;
        self
    }

    pub(crate) fn received(&self) -> &Received {
        &self.received
    }

    pub(crate) fn outcome(&self) -> &JobOutcome {
        &self.outcome
    }

    /// The first step.
    pub(crate) fn begin(&mut self) -> Step {
        match (&self.outcome, self.run) {
            (JobOutcome::AckOnly, _) => self.over(Step::Ack),
            (JobOutcome::Withdrawn, _) => self.notice(),
            (_, Some(run)) => self.publish(Stage::Reply, Publication::Reply(run)),
            (JobOutcome::Reply, None) => self.over(Step::Ack),
            (JobOutcome::Requeue(_), None) => self.requeue(None),
            (JobOutcome::DeadLetter { .. }, None) => self.dead_letters(),
        }
    }

    /// What was published is a reply to the caller, or word that the job failed; not a message of the worker's own.
    pub(crate) fn is_for_caller(&self) -> bool {
        matches!(self.stage, Stage::Reply | Stage::Notice)
    }

    /// What was published goes to a queue that other workers read.
    pub(crate) fn is_for_other_workers(&self) -> bool {
        let is_theirs = |requeue: &Requeue| requeue.otherwise.is_some();
        self.stage == Stage::Requeue
            && matches!(&self.outcome, JobOutcome::Requeue(requeue) if is_theirs(requeue))
    }

    /// The broker refused the publication: how often it has by now.
    pub(crate) fn refused(&mut self) -> u32 {
        self.tries += 1;
        self.tries
    }

    pub(crate) fn tries(&self) -> u32 {
        self.tries
    }

    /// What was published is a run of replies.
    pub(crate) fn is_reply(&self) -> bool {
        self.stage == Stage::Reply
    }

    /// The refused publication once more.
    pub(crate) fn again(&mut self) -> Step {
        let tries = self.tries;
        let step = match (self.stage, &self.outcome) {
            (Stage::Reply, _) => Step::Publish(Publication::ReplyAgain),
            (Stage::Requeue, _) => self.requeue(None),
            (Stage::RequeueLater, _) => self.requeue(Some(Route::Later(DELAYS_MS[0]))),
            (Stage::DeadReplies, _) => self.dead_letters(),
            (Stage::DeadLetter, _) => self.dead_letter(),
            (Stage::Notice, _) => self.notice(),
            (Stage::Start | Stage::Over, _) => Step::Return,
        };
        self.tries = tries;
        step
    }

    /// The next step after a publication. `may_retry`: a refused one may be offered again. `declares`: sessions declare the
    /// queues.
    pub(crate) fn published(&mut self, outcome: PublishOutcome, may_retry: bool, declares: bool) -> Step {
        if matches!(outcome, PublishOutcome::Refused { .. }) && may_retry {
            return Step::Retry;
        }
        match self.stage {
            Stage::Reply => self.replied(outcome),
            Stage::Requeue => self.requeued(outcome, declares),
            Stage::RequeueLater => match outcome {
                PublishOutcome::Confirmed { .. } => self.over(Step::Ack),
                PublishOutcome::Unroutable { destination } => self.no_queue(&destination, declares),
                _ => self.give_back(),
            },
            Stage::DeadReplies => match outcome {
                PublishOutcome::Unroutable { destination } => self.no_queue(&destination, declares),
                PublishOutcome::Refused { .. } => self.give_back(),
                _ => self.dead_letter(),
            },
            Stage::DeadLetter => self.dead_lettered(outcome, declares),
            Stage::Notice => {
                // Who withdrew a job may be gone.
                let is_awaited = !matches!(self.outcome, JobOutcome::Withdrawn);
                if is_awaited && !matches!(outcome, PublishOutcome::Confirmed { .. }) {
                    let delivery = &self.received.delivery;
                    let (job, trace_id) = (&delivery.id, &delivery.trace_id);
                    tracing::warn!(
                        job,
                        trace_id,
                        ?outcome,
                        "the `failed` reply could not be delivered to the caller"
                    );
                }
                self.end_of_dead_letter()
            }
            Stage::Start | Stage::Over => Step::Return,
        }
    }

    fn replied(&mut self, outcome: PublishOutcome) -> Step {
        let destination = match outcome {
            PublishOutcome::Confirmed { .. } => {
                return match self.outcome {
                    JobOutcome::Reply | JobOutcome::AckOnly => self.over(Step::Ack),
                    JobOutcome::Requeue(_) => self.requeue(None),
                    JobOutcome::DeadLetter { .. } => self.dead_letters(),
                    JobOutcome::Withdrawn => self.notice(),
                };
            }
            PublishOutcome::NotEncoded(rejection) => {
                self.becomes_dead_letter(rejection);
                return self.dead_letters();
            }
            other => other,
        };
        self.has_dead_replies = true;
        match &mut self.outcome {
            JobOutcome::DeadLetter { headers: Some(headers), .. } => {
                headers.items_done = self.run.map_or(headers.items_done, |run| run.offset);
            }
            JobOutcome::DeadLetter { headers: None, .. } => {}
            _ => self.becomes_dead_letter(undeliverable(&destination)),
        }
        self.dead_letters()
    }

    /// The job ends as a dead letter, at the items that were answered before the run that goes out first.
    fn becomes_dead_letter(&mut self, rejection: Rejection) {
        self.end = End::DeadLettered(rejection.reason);
        self.outcome = JobOutcome::DeadLetter { headers: self.headers_before.take(), rejection };
    }

    /// Another attempt, by the route that was decided on or by `instead`.
    fn requeue(&mut self, instead: Option<Route>) -> Step {
        let JobOutcome::Requeue(Requeue { route, headers, .. }) = &self.outcome else {
            return self.give_back();
        };
        let stage = if instead.is_some() { Stage::RequeueLater } else { Stage::Requeue };
        let publication = Publication::Requeue {
            headers: headers.clone(),
            route: instead.unwrap_or_else(|| route.clone()),
        };
        self.publish(stage, publication)
    }

    fn requeued(&mut self, outcome: PublishOutcome, declares: bool) -> Step {
        if matches!(outcome, PublishOutcome::Confirmed { .. }) {
            return self.over(Step::Ack);
        }
        let JobOutcome::Requeue(requeue) = &mut self.outcome else { return self.give_back() };
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        match outcome {
            PublishOutcome::Refused { .. } | PublishOutcome::Unreachable { .. } => {
                if let Some(otherwise) = requeue.otherwise.take() {
                    tracing::debug!(
                        job,
                        trace_id,
                        ?outcome,
                        "the queue that the job is to go to is full: it waits"
                    );
                    return self.instead(otherwise.full);
                }
                // As it was delivered it would run again at the size that failed, and send its parts again. Holding it would
                // occupy a slot without draining the queue. So it waits in a delay queue, which has no length limit.
                tracing::warn!(
                    job,
                    trace_id,
                    "the job queue is full: a job that is requeued waits in a delay queue"
                );
                self.requeue(Some(Route::Later(DELAYS_MS[0])))
            }
            PublishOutcome::Unroutable { destination } => {
                let Some(otherwise) = requeue.otherwise.take() else {
                    return self.no_queue(&destination, declares);
                };
                tracing::warn!(
                    job,
                    trace_id,
                    destination,
                    "no queue takes the job that other workers are to run"
                );
                self.headers_before = Some(requeue.headers.clone());
                self.becomes_dead_letter(otherwise.no_queue);
                self.dead_letters()
            }
            PublishOutcome::TooLarge | PublishOutcome::Confirmed { .. } => {
                let error = "the job has to be requeued, and is larger than the broker accepts now";
                self.headers_before = Some(requeue.headers.clone());
                self.becomes_dead_letter(Rejection::new(Reason::TooLarge, error));
                self.dead_letters()
            }
            PublishOutcome::NotEncoded(rejection) => {
                self.headers_before = Some(requeue.headers.clone());
                self.becomes_dead_letter(rejection);
                self.dead_letters()
            }
        }
    }

    /// Another outcome takes the place of the requeue that was decided on.
    fn instead(&mut self, outcome: JobOutcome) -> Step {
        (self.end, self.outcome) = (end_of(&outcome), outcome);
        match self.outcome {
            JobOutcome::Requeue(_) => self.requeue(None),
            _ => self.dead_letters(),
        }
    }

    /// Replies that were not taken first, then the job itself.
    fn dead_letters(&mut self) -> Step {
        if !self.has_dead_replies {
            return self.dead_letter();
        }
        let Some(rejection) = self.rejection() else { return self.give_back() };
        self.publish(Stage::DeadReplies, Publication::DeadReplies(rejection))
    }

    fn dead_letter(&mut self) -> Step {
        let JobOutcome::DeadLetter { headers, rejection } = &self.outcome else { return self.give_back() };
        let (headers, rejection) = (headers.clone(), Arc::new(rejection.clone()));
        self.publish(Stage::DeadLetter, Publication::DeadLetter { headers, rejection })
    }

    fn dead_lettered(&mut self, outcome: PublishOutcome, declares: bool) -> Step {
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        let Some(rejection) = self.rejection() else { return self.give_back() };
        match outcome {
            PublishOutcome::Confirmed { .. } => {}
            PublishOutcome::TooLarge if declares => {
                tracing::error!(
                    job,
                    trace_id,
                    "the dead letter is larger than the broker accepts: the broker dead-letters the job"
                );
                self.end = End::Rejected(rejection.reason);
            }
            PublishOutcome::Unroutable { destination } => return self.no_queue(&destination, declares),
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

    fn notice(&mut self) -> Step {
        let Some(rejection) = self.rejection() else { return self.give_back() };
        self.publish(Stage::Notice, Publication::FailureNotice(rejection))
    }

    fn end_of_dead_letter(&mut self) -> Step {
        let step = if matches!(self.end, End::Rejected(_)) { Step::Reject } else { Step::Ack };
        self.over(step)
    }

    fn rejection(&self) -> Option<Arc<Rejection>> {
        match &self.outcome {
            JobOutcome::DeadLetter { rejection, .. } => Some(Arc::new(rejection.clone())),
            JobOutcome::Withdrawn => Some(Arc::new(Rejection::withdrawn())),
            _ => None,
        }
    }

    /// A queue or a binding of the worker's own is gone. Where sessions declare them, the next one brings it back; where they
    /// do not, a new session would change nothing, and return the unacknowledged jobs of all others.
    fn no_queue(&mut self, destination: &str, declares: bool) -> Step {
        let error = format!("no queue takes what is published to {destination}: it was deleted or unbound");
        if declares {
            return Step::SessionUnusable(error);
        }
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        tracing::error!(job, trace_id, error, "the job is given back to its queue");
        self.give_back()
    }

    fn give_back(&mut self) -> Step {
        self.end = End::Returned;
        self.over(Step::Return)
    }

    fn publish(&mut self, stage: Stage, publication: Publication) -> Step {
        (self.stage, self.tries) = (stage, 0);
        Step::Publish(publication)
    }

    fn over(&mut self, step: Step) -> Step {
        self.stage = Stage::Over;
        step
    }

    /// The last stage of a job of which the broker has everything.
    pub(crate) fn confirmed(self) -> Confirmed {
        let Self { received, end, first_pass_at, ready_at, .. } = self;
        Confirmed { received, end, first_pass_at, ready_at }
    }
}

/// How a job ends if all is published as decided.
fn end_of(outcome: &JobOutcome) -> End {
    match outcome {
        JobOutcome::Reply => End::Replied,
        JobOutcome::Requeue(requeue) => End::Requeued(requeue.cause),
        JobOutcome::DeadLetter { rejection, .. } => End::DeadLettered(rejection.reason),
        JobOutcome::AckOnly => End::AlreadySettled,
        JobOutcome::Withdrawn => End::Withdrawn,
    }
}

/// Why a job ends whose replies were not taken.
pub(crate) fn undeliverable(outcome: &PublishOutcome) -> Rejection {
    let (queue, fault) = match outcome {
        PublishOutcome::TooLarge => {
            let error = "the reply is larger than the broker accepts: raise its max_message_size, or ask for less at a time";
            return Rejection::new(Reason::TooLarge, error);
        }
        PublishOutcome::NotEncoded(rejection) => return rejection.clone(),
        PublishOutcome::Unroutable { destination } => (destination.as_str(), "does not exist"),
        PublishOutcome::Refused { destination } => (destination.as_str(), "stayed full"),
        PublishOutcome::Unreachable { destination, why } => (destination.as_str(), *why),
        PublishOutcome::Confirmed { .. } => ("", "was not used"),
    };
    let error = format!("the reply queue `{queue}` {fault}; the results are beside this dead letter");
    Rejection::new(Reason::Unroutable, error)
}

#[cfg(test)]
#[path = "settling_tests.rs"]
mod tests;
