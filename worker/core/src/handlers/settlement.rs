//! A job's last steps: publishes its parts and its end, and acks it.

use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;

use crate::Core;
use crate::action::{Action, Answer, Publication, SessionEnd};
use crate::backoff;
use crate::commands::describe;
use crate::disposition::JobOutcome;
use crate::event::PublishOutcome;
use crate::ids::{ChannelId, JobKey};
use crate::jobs::{Confirmed, Job, Leaving, Settling, Step, undeliverable};
use crate::observation::{End, Observation};
use crate::rejection::Rejection;
use crate::timers::Timer;

/// How often a message of the worker's own that the broker refused (a full queue with `reject-publish`) is published, and the
/// waits in between: about 20 s in all, in which a consumer that only paused comes back.
const OWN_TRIES: u32 = 8;

/// The same for what goes to a caller, or to other workers: about 1.5 s in all. Those whose queue stays full must not hold slots
/// that others need. A caller's results are kept beside the dead letter; a job for other workers waits in a delay queue.
const OTHERS_TRIES: u32 = 4;

const REFUSED_WAIT_MIN: Duration = Duration::from_millis(200);
const REFUSED_WAIT_MAX: Duration = Duration::from_secs(5);

/// How long a job that can neither be answered nor dead-lettered is kept before it is given back to its queue. The broker
/// redelivers it at once, and a person needs longer than that to repair what is missing.
const RETURN_WAIT: Duration = Duration::from_secs(1);

/// How long a job may be published for, as a part of how long it may be held: that limit is four fifths of the broker's own, and a
/// fifth is left for the job's end.
const PUBLISHED_WITHIN: f64 = 0.95 / 0.8;

/// The part of a drain that is left for what comes after a full queue: the way by a delay queue.
const DRAIN_RESERVE: f64 = 0.2;

impl Core {
    /// Outputs of a job are there, or a part of it was published: ends the job if that was all, publishes a part if enough is
    /// finished. One part of a job is in flight at a time, so that parts arrive in order.
    pub(crate) fn advance(&mut self, job: JobKey) {
        let now = self.now.at;
        let Some(running) = self.jobs.running(job) else { return };
        let may_requeue = self.may_requeue_unfinished(running.received.delivery.model);
        let Some(running) = self.jobs.running_mut(job) else { return };
        if running.has_part_in_flight() {
            return;
        }
        let is_idle = !running.is_in_a_pass();
        if running.is_decided() {
            if let Some(outcome) = running.take_decision_if(is_idle) {
                self.conclude(job, outcome);
            }
            return;
        }
        match running.leaving() {
            Some(Leaving::Cancelled) if is_idle => return self.end_cancelled(job),
            Some(Leaving::Withdrawn) if is_idle => return self.end_withdrawn(job),
            Some(Leaving::Cancelled | Leaving::Withdrawn) => return,
            Some(Leaving::Requeued(_)) if is_idle && !running.is_complete() && !may_requeue => return,
            Some(Leaving::Requeued(cause)) if is_idle && !running.is_complete() => {
                let outcome = JobOutcome::unfinished(running.headers.clone(), cause);
                return self.conclude(job, outcome);
            }
            Some(Leaving::Requeued(_)) | None => {}
        }
        if running.is_complete() {
            return self.conclude(job, JobOutcome::Reply);
        }
        if running.has_part(now)
            && let Some(run) = running.start_part(now)
        {
            self.act(Action::Publish { job, publication: Publication::Reply(run) });
        }
    }

    /// Lets a decision about a running job take effect: at once, or when the part that is in flight has arrived and the other
    /// passes with its items have ended. Their outputs would be lost, and computed again.
    pub(crate) fn decide(&mut self, job: JobKey, outcome: JobOutcome) {
        if let Some(running) = self.jobs.running_mut(job) {
            // A withdrawn job ends as such, whatever happens to it meanwhile.
            if !running.is_withdrawn() {
                running.decide(Some(outcome));
            }
            self.advance(job);
        }
    }

    /// Ends a running job with what is finished of it.
    fn conclude(&mut self, job: JobKey, outcome: JobOutcome) {
        let Some(running) = self.jobs.take_running(job) else { return };
        let model = running.received.delivery.model;
        self.scheduler.batcher_mut(model).remove(job);
        let items = running.out_of_order();
        if items > 0 {
            self.observe(Observation::Recomputed { model, items });
        }
        self.settle(running.settle(outcome, self.now.at));
    }

    /// Ends a running job, whose items may still wait or run, without any more of its results.
    pub(crate) fn dead_letter(&mut self, job: JobKey, headers: Option<JobHeaders>, rejection: Rejection) {
        let Some(running) = self.jobs.take_running(job) else { return };
        self.scheduler.batcher_mut(running.received.delivery.model).remove(job);
        let outcome = JobOutcome::DeadLetter { headers: headers.map(Box::new), rejection };
        self.settle(running.settle_without_results(outcome, self.now.at));
    }

    /// Carries out what was decided about a job.
    pub(crate) fn settle(&mut self, mut settling: Settling) {
        let job = settling.received().delivery.job;
        self.log_dead_letter(&settling);
        if matches!(settling.outcome(), JobOutcome::Withdrawn) {
            let delivery = &settling.received().delivery;
            let model = &self.models[delivery.model.0].name;
            let (job, trace_id) = (&delivery.id, &delivery.trace_id);
            tracing::info!(job, trace_id, model, "the caller withdrew the job: no pass of it follows");
        }
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

    fn take_step(&mut self, job: JobKey, step: Step) {
        match step {
            Step::Publish(publication) => self.act(Action::Publish { job, publication }),
            Step::Return => self.after(RETURN_WAIT, Timer::Return(job)),
            Step::Reject => self.act(Action::Reject { job }),
            Step::SessionUnusable(error) => self.end_session(SessionEnd::Lost(error)),
            Step::Retry => {
                if let Some(settling) = self.jobs.settling_mut(job) {
                    let tries = settling.tries();
                    let wait =
                        backoff::doubling(tries - 1, REFUSED_WAIT_MIN, REFUSED_WAIT_MAX, &mut self.random);
                    self.after(wait, Timer::PublishAgain(job));
                }
            }
            Step::Ack => {
                let Some(settling) = self.jobs.take_settling(job) else { return };
                let confirmed = settling.confirmed();
                let delivery = &confirmed.received.delivery;
                self.redelivery.confirmed(delivery.fingerprint, confirmed.end, self.now.at);
                self.session.acks_mut(delivery.channel).add(delivery.tag, confirmed);
            }
        }
    }

    pub(crate) fn published(&mut self, job: JobKey, outcome: PublishOutcome) {
        match self.jobs.get(job) {
            Some(Job::Running(_)) => self.part_published(job, outcome),
            Some(Job::Settling(_)) => self.settlement_published(job, outcome),
            _ => {}
        }
    }

    fn settlement_published(&mut self, job: JobKey, outcome: PublishOutcome) {
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        let received = settling.received();
        let (received_at, model) = (received.at, received.delivery.model);
        if let PublishOutcome::Confirmed { messages } = outcome
            && settling.is_reply()
            && !matches!(settling.outcome(), JobOutcome::Reply)
        {
            self.observe(Observation::Parts { model, count: messages });
        }
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        let is_for_caller = settling.is_for_caller();
        if is_for_caller {
            let queue = settling.received().delivery.reply_queue.clone();
            self.destinations.published(queue.as_deref(), &outcome, self.now.at);
        }
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        let tries = if matches!(outcome, PublishOutcome::Refused { .. }) { settling.refused() } else { 0 };
        let is_for_others = is_for_caller || settling.is_for_other_workers();
        let may_retry = self.may_retry(tries, is_for_others, received_at);
        let declares = self.session.declares();
        let Some(settling) = self.jobs.settling_mut(job) else { return };
        let was_dead_letter = matches!(settling.outcome(), JobOutcome::DeadLetter { .. });
        let step = settling.published(outcome, may_retry, declares);
        if !was_dead_letter && let Some(settling) = self.jobs.settling(job) {
            self.log_dead_letter(settling);
        }
        self.take_step(job, step);
    }

    /// Whether a refused message may be published again.
    fn may_retry(&self, tries: u32, is_for_others: bool, received_at: Instant) -> bool {
        let most = if is_for_others { OTHERS_TRIES } else { OWN_TRIES };
        let longest = backoff::doubling_max(tries.saturating_sub(1), REFUSED_WAIT_MIN, REFUSED_WAIT_MAX);
        tries < most && self.now.at + longest <= self.publish_until(received_at)
    }

    /// How long what is published for a job that was delivered then may be offered again: nearly as long as the broker lets it be
    /// held, and while draining not to the end.
    fn publish_until(&self, received_at: Instant) -> Instant {
        let until = received_at + self.settings.job_limit.mul_f64(PUBLISHED_WITHIN);
        let deadline = self.lifecycle.deadline().map(|at| at - self.settings.drain.mul_f64(DRAIN_RESERVE));
        deadline.map_or(until, |at| at.min(until))
    }

    /// A part of a job that goes on was published, or could not be.
    fn part_published(&mut self, job: JobKey, outcome: PublishOutcome) {
        let Some(running) = self.jobs.running_mut(job) else { return };
        let (received_at, model) = (running.received.at, running.received.delivery.model);
        self.destinations.published(running.received.delivery.reply_queue.as_deref(), &outcome, self.now.at);
        let is_withdrawn = running.is_withdrawn();
        if let PublishOutcome::Refused { .. } = outcome
            && !is_withdrawn
            && let Some(part) = running.part_mut()
        {
            let tries = part.refused();
            if self.may_retry(tries, true, received_at) {
                let wait = backoff::doubling(tries - 1, REFUSED_WAIT_MIN, REFUSED_WAIT_MAX, &mut self.random);
                return self.after(wait, Timer::PublishAgain(job));
            }
        }
        let Some(running) = self.jobs.running_mut(job) else { return };
        let Some(part) = running.part_ended() else { return };
        if let PublishOutcome::Confirmed { messages } = outcome {
            self.observe(Observation::Parts { model, count: messages });
            return self.advance(job);
        }
        if is_withdrawn {
            // Nobody waits for the part.
            return self.advance(job);
        }
        let headers = JobHeaders { items_done: part.run.offset, ..running.headers.clone() };
        let rejection = undeliverable(&outcome);
        if let PublishOutcome::NotEncoded(_) = outcome {
            return self.dead_letter(job, Some(headers), rejection);
        }
        let Some(running) = self.jobs.take_running(job) else { return };
        self.scheduler.batcher_mut(model).remove(job);
        let outcome = JobOutcome::dead_letter(headers, rejection);
        self.settle(running.settle_undeliverable(part.run, outcome, self.now.at));
    }

    /// A timer of a job is due.
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

    /// A job that could be neither answered nor dead-lettered was given back, or was to be dead-lettered by the broker.
    pub(crate) fn given_back(&mut self, job: JobKey, sent: bool) {
        let Some(settling) = self.jobs.take_settling(job) else { return };
        let confirmed = settling.confirmed();
        let delivery = &confirmed.received.delivery;
        self.redelivery.confirmed(delivery.fingerprint, confirmed.end, self.now.at);
        if sent {
            self.session.acks_mut(delivery.channel).given_back(delivery.tag);
        }
        self.ended(&confirmed, sent);
        self.adjust_consumers();
    }

    /// Sends the acks that are due.
    pub(crate) fn send_acks(&mut self) {
        for (channel, frames) in self.session.take_acks() {
            self.act(Action::Ack { channel, frames });
        }
    }

    pub(crate) fn acks_sent(&mut self, channel: ChannelId, sent: &[bool]) {
        for (confirmed, acked) in self.session.acks_mut(channel).sent(sent) {
            self.ended(&confirmed, acked);
        }
        self.adjust_consumers();
    }

    /// A job has ended here.
    fn ended(&mut self, confirmed: &Confirmed, acked: bool) {
        let delivery = &confirmed.received.delivery;
        if !acked {
            self.redelivery.ack_lost(delivery.fingerprint, confirmed.end, self.now.at);
        }
        self.consumers[delivery.model.0].settled(delivery.source);
        self.destinations.settled(delivery.reply_queue.as_deref());
        if confirmed.end == End::Replied {
            self.memory.job_answered();
        }
        self.observe(Observation::Settled(confirmed.settled(acked)));
        self.act(Action::Release { job: delivery.job });
        let Some(id) = delivery.id.as_deref().filter(|id| self.session.commands().is_cancelled(Some(*id)))
        else {
            return;
        };
        let others = self.jobs.has_id(id);
        for (request, is_cancelled) in self.session.commands_mut().settled(id, confirmed.end, others) {
            let (answer, text) = if is_cancelled {
                (Answer::MemoryBack, "the job is a dead letter, its slot and its memory are free".to_owned())
            } else {
                (Answer::TooLate, format!("the job ended before: {}", describe(confirmed.end)))
            };
            self.act(Action::Answer { request, answer, text, last: true });
        }
    }
}
