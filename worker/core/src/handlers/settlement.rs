//! A job's last steps. Outcomes of jobs and the broker's answers to publications come in; publications go out, and an ack after the last
//! confirm.

use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;

use crate::Core;
use crate::action::{Action, Answer, Publication, Run, SessionEnd};
use crate::backoff;
use crate::commands::describe;
use crate::disposition::JobOutcome;
use crate::event::{Delivery, PublicationOutcome};
use crate::ids::{ChannelId, JobKey, ModelIndex};
use crate::jobs::{
    Ended, Job, NextStep, PublishPolicy, Reader, Received, Running, Settling, Step, StopReason, undeliverable,
};
use crate::observation::{End, Observation};
use crate::rejection::Rejection;
use crate::timers::Timer;

/// How often a job is published to the worker's own queues if the broker refuses it (a full queue with `reject-publish`). With the
/// waits that is about 20 s, enough for a reader that only paused.
const OWN_TRIES: u32 = 8;

/// The same for messages to callers and other workers, and for dead letters, about 1.5 s. Queues that stay full must not hold slots that
/// other callers need. A caller's results go to the dead letters with the job; a job for other workers, or whose dead letter is refused,
/// waits in a delay queue.
const OTHERS_TRIES: u32 = 4;

const REFUSED_WAIT_MIN: Duration = Duration::from_millis(200);
const REFUSED_WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a job that can neither be dead-lettered nor requeued is kept before the worker gives it back. The broker redelivers it at once,
/// and the repair by a person takes longer than that.
const GIVE_BACK_WAIT: Duration = Duration::from_secs(1);

/// Until when outputs of a job are written, as a part of the broker's timeout. The rest is for the job's end.
const WRITTEN_WITHIN: f64 = 0.95;

/// Until when a job's publications are offered again, as a multiple of how long the job may be held. That limit is four fifths of the
/// broker's timeout at most, so this is 95 % of the timeout at most. They are offered again for 20 s at most, and need no more.
const PUBLISHED_WITHIN: f64 = 0.95 / 0.8;

/// The part of a drain that is reserved for the time after a full queue: publishing to a delay queue.
const DRAIN_RESERVE: f64 = 0.2;

impl Core {
    /// Takes a job's next step, after outputs arrived, a part was published or is due, or a pass ended. Only one part of a job is in flight
    /// at a time, so that parts arrive in order.
    pub(crate) fn advance(&mut self, job: JobKey) {
        let Some(running) = self.jobs.running(job) else { return };
        let may_requeue = self.may_requeue_unfinished(running.received.delivery.model);
        match running.next_step(may_requeue, self.now.at) {
            NextStep::Wait => {}
            NextStep::EndAsDecided => {
                if let Some(outcome) = self.jobs.running_mut(job).and_then(Running::take_decision) {
                    self.conclude(job, outcome);
                }
            }
            NextStep::End(StopReason::Cancelled) => self.end_cancelled(job),
            NextStep::End(StopReason::Withdrawn) => self.end_withdrawn(job),
            NextStep::End(StopReason::Requeued(cause)) => {
                let outcome = JobOutcome::unfinished(running.headers.clone(), cause);
                self.conclude(job, outcome);
            }
            NextStep::Reply => self.conclude(job, JobOutcome::Reply),
            NextStep::PublishPart => self.publish_part(job),
        }
    }

    /// Every second: publishes finished items that their callers have waited for. The job's next pass may take minutes.
    pub(crate) fn publish_due_parts(&mut self) {
        let now = self.now.at;
        let due = self.jobs.running_where(|_, job| job.has_part(now));
        due.into_iter().for_each(|job| self.advance(job));
    }

    fn publish_part(&mut self, job: JobKey) {
        let now = self.now.at;
        if let Some(run) = self.jobs.running_mut(job).and_then(|running| running.start_part(now)) {
            self.act(Action::Publish { job, publication: Publication::Reply(run) });
        }
    }

    /// Sets how a running job ends. This takes effect after the part in flight is confirmed and the job's other passes have
    /// ended; otherwise their outputs would be lost and computed again.
    pub(crate) fn conclude_when_idle(&mut self, job: JobKey, outcome: JobOutcome) {
        if let Some(running) = self.jobs.running_mut(job) {
            // A cancelled or withdrawn job ends as such, whatever else happens.
            if !running.is_given_up() {
                running.set_decision(Some(outcome));
            }
            self.advance(job);
        }
    }

    /// Ends a running job; its finished items are published first.
    fn conclude(&mut self, job: JobKey, outcome: JobOutcome) {
        let Some(running) = self.jobs.take_running(job) else { return };
        let model = running.received.delivery.model;
        self.scheduler.remove(model, job);
        // Only a job that is requeued computes anything again.
        let items = if matches!(outcome, JobOutcome::Requeue(_)) { running.out_of_order() } else { 0 };
        if items > 0 {
            self.observe(Observation::Recomputed { model, items });
        }
        self.settle(running.settle(outcome, self.now.at));
    }

    /// Ends a running job as a dead letter, without publishing more results. Its items may still wait or run.
    pub(crate) fn dead_letter(&mut self, job: JobKey, outcome: JobOutcome) {
        let Some(running) = self.jobs.take_running(job) else { return };
        self.scheduler.remove(running.received.delivery.model, job);
        self.settle(running.settle_without_results(outcome, self.now.at));
    }

    /// Carries out what was decided about a job.
    pub(crate) fn settle(&mut self, mut settling: Settling) {
        let job = settling.received().delivery.job;
        self.log_dead_letter(&settling);
        self.log_withdrawal(&settling);
        let step = settling.begin();
        self.jobs.insert(Job::Settling(Box::new(settling)));
        self.take_step(job, step);
    }

    fn log_dead_letter(&self, settling: &Settling) {
        if let JobOutcome::DeadLetter { rejection, .. } = settling.outcome() {
            let delivery = &settling.received().delivery;
            let model = &self.models[delivery.model.0].name;
            let Rejection { reason, error, .. } = rejection;
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::warn!(job, trace_id, model, %reason, error, "job dead-lettered");
        }
    }

    fn log_withdrawal(&self, settling: &Settling) {
        if matches!(settling.outcome(), JobOutcome::Withdrawn) {
            let delivery = &settling.received().delivery;
            let model = &self.models[delivery.model.0].name;
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::info!(job, trace_id, model, "the caller withdrew the job: no further pass of it starts");
        }
    }

    fn take_step(&mut self, job: JobKey, step: Step) {
        match self.skip_notice_to_silent_queue(job, step) {
            Step::Publish(publication) => {
                self.note_next_attempt(job, &publication);
                self.act(Action::Publish { job, publication });
            }
            Step::GiveBack => self.after(GIVE_BACK_WAIT, Timer::GiveBack(job)),
            Step::Reject => self.act(Action::Reject { job }),
            Step::SessionUnusable(error) => self.end_session(SessionEnd::Lost(error)),
            Step::Retry => {
                if let Some(tries) = self.jobs.settling(job).map(Settling::tries) {
                    self.publish_after_wait(job, tries);
                }
            }
            Step::Ack(proof) => {
                let Some(settling) = self.jobs.take_settling(job) else { return };
                let confirmed = settling.confirmed(proof);
                let ended = confirmed.ended();
                let Delivery { tag, fingerprint, .. } = ended.received.delivery;
                self.redelivery.remember_end(fingerprint, ended.end, self.now.at);
                self.session.acks_of(&ended.received.delivery).add(tag, confirmed);
            }
        }
    }

    /// Skips a `failed` reply to a silent reply queue, because it might delay replies to other callers, and returns the step after it.
    /// Returns other steps unchanged.
    fn skip_notice_to_silent_queue(&mut self, job: JobKey, step: Step) -> Step {
        let Step::Publish(Publication::FailureNotice(_)) = step else { return step };
        let Some(settling) = self.jobs.settling_mut(job) else { return step };
        let queue = settling.received().delivery.reply_queue.as_deref();
        let is_silent = queue.is_some_and(|queue| self.destinations.is_silent(queue, self.now.at));
        if is_silent { settling.notice_skipped() } else { step }
    }

    /// The broker refused a publication for the `tries`th time. Publishes it again after a wait.
    fn publish_after_wait(&mut self, job: JobKey, tries: u32) {
        let wait = backoff::doubling(tries - 1, REFUSED_WAIT_MIN, REFUSED_WAIT_MAX, &mut self.random);
        self.after(wait, Timer::PublishAgain(job));
    }

    pub(crate) fn published(&mut self, job: JobKey, outcome: PublicationOutcome) {
        match self.jobs.get(job) {
            Some(Job::Running(_)) => self.part_published(job, outcome),
            Some(Job::Settling(_)) => self.settlement_published(job, outcome),
            _ => {}
        }
    }

    /// The caller has the items before `up_to`, from replies of which a later one was not taken.
    pub(crate) fn replies_taken(&mut self, job: JobKey, up_to: u32) {
        if let Some(settling) = self.jobs.settling_mut(job) {
            settling.replies_taken(up_to);
        } else if let Some(part) = self.jobs.running_mut(job).and_then(Running::part_mut) {
            part.taken_up_to(up_to);
        }
    }

    /// The broker answered a publication of a job that ends here. Takes the job's next step.
    fn settlement_published(&mut self, job: JobKey, outcome: PublicationOutcome) {
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        if let PublicationOutcome::Refused { .. } = outcome {
            settling.count_refusal();
        }
        let (tries, reader, is_part) = (settling.tries(), settling.reader(), settling.is_part());
        let received = settling.received();
        let model = received.delivery.model;
        if reader == Reader::Caller {
            let queue = received.delivery.reply_queue.as_deref();
            self.destinations.published(queue, &outcome, self.now.at);
        }
        match outcome {
            PublicationOutcome::Confirmed { messages } if is_part => self.observe_parts(model, messages),
            // Nothing of them says that the job is done.
            PublicationOutcome::Cut { confirmed, .. } => self.observe_parts(model, confirmed),
            _ => {}
        }
        let may_retry = self
            .jobs
            .settling(job)
            .is_some_and(|settling| self.may_retry(tries, reader, settling.received()));
        let policy = PublishPolicy { may_retry, declares: self.session.declares() };
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        let was_dead_letter = matches!(settling.outcome(), JobOutcome::DeadLetter { .. });
        let step = settling.published(outcome, policy);
        if !was_dead_letter && let Some(settling) = self.jobs.settling(job) {
            self.log_dead_letter(settling);
        }
        self.take_step(job, step);
    }

    /// Whether a refused message may be published again. `tries`: refusals so far; `reader`: who reads the message; `received`: its job.
    fn may_retry(&self, tries: u32, reader: Reader, received: &Received) -> bool {
        let slots = self.memory.slots(received.delivery.model.0);
        if reader == Reader::Caller && self.destinations.hold_too_many(&received.delivery, slots, self.now.at)
        {
            return false;
        }
        // Such jobs come back each half minute, and before others: together they must not take the slots.
        let may_have_refused = (usize::from(slots) / 4).max(1);
        if reader == Reader::Operator
            && self.jobs.with_refused_dead_letter(received.delivery.model) > may_have_refused
        {
            return false;
        }
        let tries_max = match reader {
            Reader::Caller | Reader::OtherWorkers | Reader::Operator => OTHERS_TRIES,
            Reader::OwnQueues => OWN_TRIES,
        };
        let longest = backoff::doubling_max(tries.saturating_sub(1), REFUSED_WAIT_MIN, REFUSED_WAIT_MAX);
        tries < tries_max && self.now.at + longest <= self.publish_until(received.at)
    }

    /// Until when publications of a job that was delivered at `received_at` may be offered again: before the broker's timeout, and in a drain
    /// until shortly before its deadline.
    fn publish_until(&self, received_at: Instant) -> Instant {
        let until = received_at + self.time_limits.job().mul_f64(PUBLISHED_WITHIN);
        let deadline = self.lifecycle.deadline().map(|at| at - self.settings.drain.mul_f64(DRAIN_RESERVE));
        deadline.map_or(until, |at| at.min(until))
    }

    /// Until when outputs of a job that was delivered at `received_at` may be written to their store: nearly until the broker's timeout. A
    /// drain does not end that earlier: the job of an output that is not written and fits no reply becomes a dead letter, and the broker
    /// redelivers one that is not finished when the drain is over.
    pub fn write_until(&self, received_at: Instant) -> Instant {
        received_at + self.time_limits.timeout().mul_f64(WRITTEN_WITHIN)
    }

    /// The broker answered the publication of a part of a job that continues.
    fn part_published(&mut self, job: JobKey, outcome: PublicationOutcome) {
        let Some(running) = self.jobs.running_mut(job) else { return };
        let model = running.received.delivery.model;
        self.destinations.published(running.received.delivery.reply_queue.as_deref(), &outcome, self.now.at);
        let is_withdrawn = running.is_withdrawn();
        if let PublicationOutcome::Refused { .. } = outcome
            && !is_withdrawn
            && let Some(tries) = running.part_mut().map(|part| part.count_refusal())
            && let Some(running) = self.jobs.running(job)
            && self.may_retry(tries, Reader::Caller, &running.received)
        {
            return self.publish_after_wait(job, tries);
        }
        let Some(part) = self.jobs.running_mut(job).and_then(Running::part_ended) else { return };
        if let PublicationOutcome::Cut { confirmed, .. } = outcome {
            self.observe_parts(model, confirmed);
        }
        match outcome {
            PublicationOutcome::Confirmed { messages } => {
                self.observe_parts(model, messages);
                self.advance(job);
            }
            // A withdrawn job's caller does not wait for the part.
            _ if is_withdrawn => self.advance(job),
            outcome => self.part_not_taken(job, part.run, &outcome),
        }
    }

    fn observe_parts(&mut self, model: ModelIndex, count: u32) {
        if count > 0 {
            self.observe(Observation::Parts { model, count });
        }
    }

    /// The broker did not take a part. The job ends as a dead letter; its state counts only the items that were answered before.
    fn part_not_taken(&mut self, job: JobKey, run: Run, outcome: &PublicationOutcome) {
        let Some(running) = self.jobs.running(job) else { return };
        let headers = JobHeaders { items_done: run.offset, ..running.headers.clone() };
        let rejection = undeliverable(outcome);
        if let PublicationOutcome::Cut { .. } = outcome {
            return self.dead_letter(job, JobOutcome::dead_letter(headers, rejection));
        }
        let Some(running) = self.jobs.take_running(job) else { return };
        self.scheduler.remove(running.received.delivery.model, job);
        let outcome = JobOutcome::dead_letter(headers, rejection);
        self.settle(running.settle_undeliverable(run, outcome, self.now.at));
    }

    /// A wait before publishing again is over.
    pub(crate) fn publish_again(&mut self, job: JobKey) {
        match self.jobs.get(job) {
            Some(Job::Running(running)) if running.has_part_in_flight() => {
                self.act(Action::Publish { job, publication: Publication::ReplyAgain });
            }
            Some(Job::Settling(_)) => {
                if let Some(settling) = self.jobs.settling_mut(job) {
                    let step = settling.again();
                    self.take_step(job, step);
                }
            }
            _ => {}
        }
    }

    /// A job that can neither be dead-lettered nor requeued has waited. Gives it back to its queue.
    pub(crate) fn give_back(&mut self, job: JobKey) {
        if self.jobs.get(job).is_some() {
            self.act(Action::GiveBack { job });
        }
    }

    /// The frame that gives a job back or rejects it was sent, or could not be. The job ends here.
    pub(crate) fn nack_sent(&mut self, job: JobKey, sent: bool) {
        let Some(settling) = self.jobs.take_settling(job) else { return };
        let ended = settling.nacked();
        let delivery = &ended.received.delivery;
        self.redelivery.remember_end(delivery.fingerprint, ended.end, self.now.at);
        self.session.nacked(delivery, sent);
        self.end_job(&ended, sent);
        self.adjust_consumers();
    }

    /// Sends the acks that are due.
    pub(crate) fn send_acks(&mut self) {
        for (channel, frames) in self.session.take_acks() {
            self.act(Action::Ack { channel, frames });
        }
    }

    pub(crate) fn acks_sent(&mut self, channel: ChannelId, sent: &[bool]) {
        for (confirmed, acked) in self.session.acks_sent(channel, sent) {
            self.end_job(&confirmed.into_ended(), acked);
        }
        self.adjust_consumers();
    }

    /// A job has ended here.
    fn end_job(&mut self, ended: &Ended, acked: bool) {
        let delivery = &ended.received.delivery;
        if !acked {
            self.redelivery.ack_lost(delivery.fingerprint, ended.end, self.now.at);
        }
        self.consumers[delivery.model.0].count_settled(delivery.source);
        self.destinations.released(delivery);
        if ended.end == End::Replied {
            self.memory.job_answered();
        }
        self.observe(Observation::Settled(ended.to_settled(acked)));
        self.act(Action::Release { job: delivery.job });
        self.answer_cancellations(ended);
        self.read_successors_of(delivery.job);
    }

    /// Answers the operators who cancelled the job with how it ended.
    fn answer_cancellations(&mut self, ended: &Ended) {
        let id = ended.received.delivery.id.as_deref();
        let Some(id) = id.filter(|id| self.session.commands().is_cancelled(Some(*id))) else { return };
        let others = self.jobs.has_id(id);
        for (request, is_cancelled) in self.session.commands_mut().end_cancellations(id, ended.end, others) {
            let (answer, text) = if is_cancelled {
                (Answer::MemoryBack, "the job is a dead letter, its slot and its memory are free".to_owned())
            } else {
                (Answer::TooLate, format!("the job had already ended: {}", describe(ended.end)))
            };
            self.act(Action::Answer { request, answer, text, last: true });
        }
    }
}

#[cfg(test)]
#[path = "settlement_tests.rs"]
mod tests;
