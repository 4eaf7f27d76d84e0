//! Carries out the commands of operators, and answers each with what has been reached so far.

use vramq_schemas::control::Command;
use vramq_schemas::{JobHeaders, Reason};

use crate::Core;
use crate::action::{Action, Answer};
use crate::disposition::JobOutcome;
use crate::ids::{JobKey, RequestId};
use crate::jobs::{Received, Running, StopReason};
use crate::rejection::Rejection;

/// The longest filter for logs.
const FILTER_BYTES_MAX: usize = 1024;

impl Core {
    pub(crate) fn command(&mut self, request: RequestId, command: Command) {
        match command {
            Command::Pause | Command::Resume if self.lifecycle.is_draining() => {
                self.answer(request, Answer::Refused, "the worker is draining: it takes no more jobs");
            }
            Command::Pause => {
                // While other pauses wait, the worker is paused already.
                if !self.session.commands_mut().wait_for_pause(request) {
                    return self.answer(request, Answer::Refused, "too many pauses at a time: try again");
                }
                self.lifecycle.set_paused(true);
                self.adjust_consumers();
            }
            Command::Resume => self.resume(request),
            Command::Drain => self.drain_on_command(request),
            Command::Cancel { job } => self.cancel(job, request),
            Command::Set { log } if log.len() > FILTER_BYTES_MAX => {
                self.answer(
                    request,
                    Answer::Refused,
                    format!("the filter is longer than {FILTER_BYTES_MAX} bytes"),
                );
            }
            Command::Set { log } => self.act(Action::SetLog { request, directives: log }),
            other => {
                self.answer(
                    request,
                    Answer::Refused,
                    format!("this worker does not know the command `{}`", other.name()),
                );
            }
        }
    }

    /// The last answer to a command.
    fn answer(&mut self, request: RequestId, answer: Answer, text: impl Into<String>) {
        self.act(Action::Answer { request, answer, text: text.into(), last: true });
    }

    /// Answers the waiting pauses, once the broker has confirmed that it sends no more jobs.
    pub(crate) fn answer_pauses(&mut self) {
        if !self.session.commands().has_pauses() || !self.has_stopped_consuming() {
            return;
        }
        let text = format!("takes no more jobs; {} unacknowledged jobs go on", self.unacked());
        for request in self.session.commands_mut().take_pauses() {
            self.answer(request, Answer::Done, text.clone());
        }
    }

    fn resume(&mut self, request: RequestId) {
        let was_paused = self.lifecycle.set_paused(false);
        for pause in self.session.commands_mut().take_pauses() {
            self.answer(pause, Answer::Refused, "an operator resumed the worker meanwhile");
        }
        self.adjust_consumers();
        let text = match self.status().reason {
            Some(reason) => format!("resumed, but not consuming yet: {reason}"),
            None if was_paused => "takes jobs".to_owned(),
            None => "was not paused".to_owned(),
        };
        self.answer(request, Answer::Done, text);
    }

    /// Drains like SIGTERM; but a second command, unlike a second signal, does not stop the worker at once.
    fn drain_on_command(&mut self, request: RequestId) {
        let (jobs, seconds) = (self.unacked(), self.settings.drain.as_secs());
        let was_restarting = self.lifecycle.cancel_restart();
        if self.lifecycle.has_deadline() {
            let text = if was_restarting {
                "was draining for a restart, and will end instead"
            } else {
                "drains already"
            };
            return self.answer(request, Answer::Done, format!("{text}; {jobs} unacknowledged jobs"));
        }
        tracing::info!(jobs, seconds, "draining, by an operator's command");
        self.drain();
        let text = format!("drains, and ends in {seconds} s at most; {jobs} unacknowledged jobs");
        self.answer(request, Answer::Done, text);
    }

    fn cancel(&mut self, id: String, request: RequestId) {
        if !self.jobs.has_id(&id) {
            return self.answer(request, Answer::NotHere, "this worker holds no job of that id");
        }
        let is_meant = |received: &Received| received.delivery.id.as_deref() == Some(id.as_str());
        let jobs = self.jobs.running_where(|_, job| is_meant(&job.received));
        let fetching = self.jobs.fetching_where(is_meant);
        if !self.session.commands_mut().cancel(id, request) {
            return self.answer(request, Answer::Refused, "too many cancellations at a time: try again");
        }
        let text = "the worker holds the job, and will stop it".to_owned();
        self.act(Action::Answer { request, answer: Answer::Requested, text, last: false });
        // Those that are being read end when that is done. A next attempt that is held ends when the message before it is settled: if that
        // message came back after the end, the job would run although its caller was answered.
        for job in fetching {
            if let Some(received) = self.jobs.take_received(job) {
                self.end_cancelled_unread(received);
            }
        }
        jobs.into_iter().for_each(|job| self.cancel_job(job));
    }

    /// Drops a job's waiting items, for an operator. Its passes in flight are cancelled or waited for, and their outputs dropped.
    fn cancel_job(&mut self, job: JobKey) {
        let withdrawn = self.jobs.running(job).is_some_and(Running::is_withdrawn);
        if !withdrawn {
            self.stop_job(job, StopReason::Cancelled);
        }
    }

    /// Drops a job's waiting items, cancels its passes that no other job needs, and ends the job with this reason as soon as none of its
    /// passes runs.
    pub(crate) fn stop_job(&mut self, job: JobKey, why: StopReason) {
        let Some(running) = self.jobs.running_mut(job) else { return };
        running.stop(why);
        // An earlier decision would wait for the part in flight. The stop waits for it too, and takes the decision's place.
        running.set_decision(None);
        let model = running.received.delivery.model;
        self.scheduler.remove(model, job);
        self.advance(job);
        // Nothing more is published of a job that has ended although a pass of it runs.
        let needs_none = |job: JobKey| self.jobs.running(job).is_none_or(Running::is_given_up);
        for pass in self.scheduler.passes_of(job, needs_none) {
            self.act(Action::CancelPass { pass, model });
        }
    }

    /// Ends a cancelled job of which nothing waits or runs any more.
    pub(crate) fn end_cancelled(&mut self, job: JobKey) {
        let Some(running) = self.jobs.running(job) else { return };
        let id = running.received.delivery.id.clone();
        let headers = JobHeaders { items_done: running.items_done(), ..running.headers.clone() };
        self.dead_letter(job, JobOutcome::dead_letter(headers, cancelled()));
        self.answer_stopped(id.as_deref());
    }

    /// Ends a cancelled job that is not read yet.
    pub(crate) fn end_cancelled_unread(&mut self, received: Received) {
        let (id, outcome) = (received.delivery.id.clone(), received.rejected(cancelled()));
        self.settle(received.settle(outcome, self.now.at));
        self.answer_stopped(id.as_deref());
    }

    /// A job was stopped for an operator. Answers those who cancelled it, unless another job with this id still waits or runs.
    fn answer_stopped(&mut self, id: Option<&str>) {
        if !self.jobs.running_where(|_, job| job.received.delivery.id.as_deref() == id).is_empty() {
            return;
        }
        for request in self.session.commands_mut().stopped(id) {
            let text = "the job is stopped: no pass of it waits or runs".to_owned();
            self.act(Action::Answer { request, answer: Answer::Stopped, text, last: false });
        }
    }
}

fn cancelled() -> Rejection {
    Rejection::new(Reason::Cancelled, "an operator cancelled the job")
}
