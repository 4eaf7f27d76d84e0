//! Carries out what was decided about a job: publish, wait for the confirm, and only then allow the ack. The broker's answers to
//! publications come in; the next step goes out. Pure.
//!
//! A job's replies go first, then what was decided: another attempt (`settling/requeue.rs`) or a dead letter (`settling/dead_letter.rs`).
//!
//! [`JobOutcome`] is the decision. A [`Step`] is what to do next, and a job takes several. [`End`] is how the job ended here, which may
//! differ from the decision: a reply that no queue takes ends as a dead letter. `Step` and `End` are two types because an end must not be
//! acted on before the last step: only [`Settling::confirmed`] and [`Settling::nacked`] return it.

mod dead_letter;
mod requeue;

use std::time::Instant;

pub(crate) use dead_letter::undeliverable;
use vramq_schemas::JobHeaders;

use super::{Confirmed, Ended, Received};
use crate::action::{Publication, Run};
use crate::disposition::JobOutcome;
use crate::event::PublicationOutcome;
use crate::observation::End;

/// What to do next for a job.
#[derive(Debug)]
pub(crate) enum Step {
    Publish(Publication),
    /// The broker refused the publication: wait, then publish it again.
    Retry,
    /// The broker takes neither a dead letter nor another attempt: wait, then give the job back to its queue.
    GiveBack,
    /// Have the broker dead-letter the job.
    Reject,
    /// All is published: acknowledge the job.
    Ack(AllPublished),
    /// A queue or a binding of the worker's own was deleted. The next session declares it again.
    SessionUnusable(String),
}

/// The proof that a job may be acknowledged: nothing about it is left to publish, and the broker has confirmed what must not be lost. Only
/// [`Settling::may_be_acked`] creates it.
#[derive(Debug)]
pub(crate) struct AllPublished(());

/// Conditions for the next step after a publication.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PublishPolicy {
    /// Whether a refused publication may be offered again.
    pub(crate) may_retry: bool,
    /// Whether sessions declare the queues: the next session then restores a deleted queue.
    pub(crate) declares: bool,
}

/// Who reads a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// The job's caller.
    Caller,
    /// Other workers, from a queue of theirs.
    OtherWorkers,
    /// An operator, from the dead letters.
    Operator,
    /// The workers of this model, from the model's own queues.
    OwnQueues,
}

/// What is being published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Reply,
    Requeue,
    /// The job's queue or the dead queue is full: another attempt by way of a delay queue.
    RequeueLater,
    DeadReplies,
    DeadLetter,
    Notice,
    /// Nothing is published any more.
    Over,
}

/// A job whose messages are being published.
#[derive(Debug)]
pub(crate) struct Settling {
    received: Received,
    outcome: JobOutcome,
    /// Finished items, published first.
    run: Option<Run>,
    /// The job's headers without those items.
    headers_before: Option<Box<JobHeaders>>,
    /// Whether replies were not taken and go to the dead letters.
    has_dead_replies: bool,
    stage: Stage,
    /// How often the broker refused the current publication.
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

    /// When settling began.
    pub(crate) fn since(&self) -> Instant {
        self.ready_at
    }

    pub(crate) fn outcome(&self) -> &JobOutcome {
        &self.outcome
    }

    /// The first step.
    pub(crate) fn begin(&mut self) -> Step {
        match (&self.outcome, self.run) {
            (JobOutcome::AckOnly, _) => self.may_be_acked(),
            (JobOutcome::Withdrawn, _) => self.notice(),
            (_, Some(run)) => self.publish(Stage::Reply, Publication::Reply(run)),
            (JobOutcome::Reply, None) => self.may_be_acked(),
            (JobOutcome::Requeue(_), None) => self.requeue(),
            (JobOutcome::DeadLetter { .. }, None) => self.dead_letters(),
        }
    }

    /// Who reads what is being published.
    pub(crate) fn reader(&self) -> Reader {
        match (self.stage, &self.outcome) {
            (Stage::Reply | Stage::Notice, _) => Reader::Caller,
            (Stage::DeadReplies | Stage::DeadLetter, _) => Reader::Operator,
            (Stage::Requeue, JobOutcome::Requeue(requeue)) if requeue.otherwise.is_some() => {
                Reader::OtherWorkers
            }
            _ => Reader::OwnQueues,
        }
    }

    /// The caller has the items before `item`, from the first replies. If a later reply is not taken, the job counts as done up to there.
    pub(crate) fn replies_taken(&mut self, item: u32) {
        let Some(run) = self.run.as_mut().filter(|_| self.stage == Stage::Reply) else { return };
        run.skip_to(item);
        if let Some(headers) = &mut self.headers_before {
            headers.items_done = run.offset;
        }
    }

    /// Counts a refusal by the broker. Returns the refusals of this publication so far.
    pub(crate) fn count_refusal(&mut self) -> u32 {
        self.tries += 1;
        self.tries
    }

    pub(crate) fn tries(&self) -> u32 {
        self.tries
    }

    /// Whether the current publication is replies after which the job does not end.
    pub(crate) fn is_part(&self) -> bool {
        self.stage == Stage::Reply && !matches!(self.outcome, JobOutcome::Reply)
    }

    /// Repeats the refused publication.
    pub(crate) fn again(&mut self) -> Step {
        let tries = self.tries;
        let step = match self.stage {
            Stage::Reply => Step::Publish(Publication::ReplyAgain),
            Stage::Requeue => self.requeue(),
            Stage::RequeueLater => self.requeue_later(),
            Stage::DeadReplies => self.dead_letters(),
            Stage::DeadLetter => self.dead_letter(),
            Stage::Notice => self.notice(),
            Stage::Start | Stage::Over => Step::GiveBack,
        };
        self.tries = tries;
        step
    }

    /// The next step after a publication.
    pub(crate) fn published(&mut self, outcome: PublicationOutcome, policy: PublishPolicy) -> Step {
        let PublishPolicy { may_retry, declares } = policy;
        if matches!(outcome, PublicationOutcome::Refused { .. }) && may_retry {
            return Step::Retry;
        }
        match self.stage {
            Stage::Reply => self.replied(outcome),
            Stage::Requeue => self.requeued(outcome, declares),
            Stage::RequeueLater => self.requeued_later(outcome, declares),
            Stage::DeadReplies => self.replies_dead_lettered(outcome, declares),
            Stage::DeadLetter => self.dead_lettered(outcome, declares),
            Stage::Notice => self.notified(&outcome),
            Stage::Start | Stage::Over => Step::GiveBack,
        }
    }

    fn replied(&mut self, outcome: PublicationOutcome) -> Step {
        match outcome {
            PublicationOutcome::Confirmed { .. } => self.after_replies(),
            PublicationOutcome::Cut { rejection, .. } => {
                self.becomes_dead_letter(rejection);
                self.dead_letters()
            }
            outcome => self.replies_not_taken(&outcome),
        }
    }

    /// The replies are confirmed.
    fn after_replies(&mut self) -> Step {
        match self.outcome {
            JobOutcome::Reply | JobOutcome::AckOnly => self.may_be_acked(),
            JobOutcome::Requeue(_) => self.requeue(),
            JobOutcome::DeadLetter { .. } => self.dead_letters(),
            JobOutcome::Withdrawn => self.notice(),
        }
    }

    /// The replies go to the dead letters, and the job too.
    fn replies_not_taken(&mut self, outcome: &PublicationOutcome) -> Step {
        self.has_dead_replies = true;
        match &mut self.outcome {
            JobOutcome::DeadLetter { headers: Some(headers), .. } => {
                headers.items_done = self.run.map_or(headers.items_done, |run| run.offset);
            }
            JobOutcome::DeadLetter { headers: None, .. } => {}
            _ => self.becomes_dead_letter(undeliverable(outcome)),
        }
        self.dead_letters()
    }

    /// A queue or a binding of the worker's own was deleted. If sessions declare queues, the next session restores it. If not, a new
    /// session would not help, and would return the unacknowledged jobs of all callers.
    fn no_queue(&mut self, destination: &str, declares: bool) -> Step {
        let error = format!("no queue takes what is published to {destination}: it was deleted or unbound");
        if declares {
            return Step::SessionUnusable(error);
        }
        let delivery = &self.received.delivery;
        let (job, trace_id) = (&delivery.id, &delivery.trace_id);
        tracing::error!(
            job,
            trace_id,
            error,
            "cannot requeue or dead-letter the job: giving it back to its queue. Declare the missing queue or binding again"
        );
        self.give_back()
    }

    fn give_back(&mut self) -> Step {
        self.end = End::GivenBack;
        self.over(Step::GiveBack)
    }

    fn publish(&mut self, stage: Stage, publication: Publication) -> Step {
        (self.stage, self.tries) = (stage, 0);
        Step::Publish(publication)
    }

    fn over(&mut self, step: Step) -> Step {
        self.stage = Stage::Over;
        step
    }

    fn may_be_acked(&mut self) -> Step {
        self.over(Step::Ack(AllPublished(())))
    }

    /// The stage of a job of which the broker has confirmed everything.
    pub(crate) fn confirmed(self, _proof: AllPublished) -> Confirmed {
        Confirmed(self.into_ended())
    }

    /// The end of a job that was given back, or that the broker was asked to dead-letter. It is never acknowledged.
    pub(crate) fn nacked(self) -> Ended {
        self.into_ended()
    }

    fn into_ended(self) -> Ended {
        let Self { received, end, first_pass_at, ready_at, .. } = self;
        Ended { received, end, first_pass_at, ready_at }
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

#[cfg(test)]
#[path = "settling_tests.rs"]
mod tests;
