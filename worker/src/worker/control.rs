//! What operators tell the loop to do, and the loop's word on how far it came.

use std::ops::ControlFlow;

use vramq_schemas::control::{Command, Outcome as Answer};
use vramq_schemas::{JobHeaders, Reason};

use super::{Loop, Outcome};
use crate::amqp::commands::{Asked, Asker};
use crate::amqp::settle::{Burial, End, Settled};
use crate::batcher::JobKey;
use crate::job::Leaving;
use crate::refusal::Refusal;

/// Cancellations under way at a time. Each is looked at whenever a job is settled.
const CANCELS_MAX: usize = 64;

/// The longest filter for logs.
const FILTER_BYTES_MAX: usize = 1024;

/// A job that is to be stopped.
#[derive(Debug)]
pub(super) struct Cancel {
    job: String,
    asker: Asker,
    /// The operator knows that nothing of it waits or runs.
    stopped: bool,
    /// One of that id ended as asked for.
    ended: bool,
}

impl Loop<'_> {
    pub(super) async fn obey(&mut self, asked: Asked) -> ControlFlow<Outcome> {
        let Asked { command, asker } = asked;
        match command {
            Command::Pause if self.host.draining => {
                asker.end(Answer::Refused, "the worker is draining: it takes no jobs any more");
            }
            Command::Pause => {
                self.host.paused = true;
                self.pausing.push(asker);
                self.follow_capacity().await?;
                self.answer_pauses();
            }
            Command::Resume => return self.resume(asker).await,
            Command::Drain => return self.drain_on_command(asker).await,
            Command::Cancel { job } => self.cancel(job, asker),
            Command::Set { log } => self.set_log(&log, asker),
            other => asker.end(Answer::Refused, format!("this worker knows no `{}`", other.name())),
        }
        ControlFlow::Continue(())
    }

    /// Answers those who asked for a pause, once the broker has confirmed that it sends no more.
    pub(super) fn answer_pauses(&mut self) {
        if self.pausing.is_empty() || !self.has_stopped_consuming() {
            return;
        }
        self.tell();
        let text = format!("takes no jobs; {} in hand go on", self.jobs_in_hand());
        self.pausing.drain(..).for_each(|asker| asker.end(Answer::Done, text.clone()));
    }

    async fn resume(&mut self, asker: Asker) -> ControlFlow<Outcome> {
        if self.host.draining {
            asker.end(Answer::Refused, "the worker is draining: it takes no jobs any more");
            return ControlFlow::Continue(());
        }
        let was_paused = std::mem::take(&mut self.host.paused);
        self.pausing.drain(..).for_each(|asker| asker.end(Answer::Refused, "told to resume meanwhile"));
        self.follow_capacity().await?;
        self.tell();
        let now = self.host.board.now();
        let text = match (now.reason, self.in_hand.iter().sum::<usize>()) {
            (Some(reason), _) => format!("not paused any more, but takes no jobs yet: {reason}"),
            (None, _) if !was_paused => "was not paused".to_owned(),
            (None, 0) => "takes jobs".to_owned(),
            (None, jobs) => {
                format!("takes jobs of each model when it has settled those in hand, {jobs} in all")
            }
        };
        asker.end(Answer::Done, text);
        ControlFlow::Continue(())
    }

    /// As SIGTERM; but asked twice it does not stop at once.
    async fn drain_on_command(&mut self, asker: Asker) -> ControlFlow<Outcome> {
        let (jobs, seconds) = (self.jobs_in_hand(), self.host.drain.as_secs());
        let restarting = std::mem::take(&mut self.host.restarting);
        if self.deadline.is_some() {
            let text = if restarting {
                "was draining for a restart, and will end instead"
            } else {
                "drains already"
            };
            asker.end(Answer::Done, format!("{text}; {jobs} jobs in hand"));
            return ControlFlow::Continue(());
        }
        tracing::info!(jobs, seconds, "draining, as an operator asks");
        self.drain().await?;
        self.tell();
        asker.end(Answer::Done, format!("drains, and ends in {seconds} s at most; {jobs} jobs in hand"));
        ControlFlow::Continue(())
    }

    fn set_log(&self, directives: &str, asker: Asker) {
        if directives.len() > FILTER_BYTES_MAX {
            return asker.end(Answer::Refused, format!("the filter is longer than {FILTER_BYTES_MAX} bytes"));
        }
        match self.host.logs.set(directives) {
            Ok(()) => asker.end(Answer::Done, format!("logs `{directives}`")),
            Err(error) => asker.end(Answer::Refused, format!("no filter for logs: {error}")),
        }
    }

    fn cancel(&mut self, job: String, asker: Asker) {
        let in_hand = self.holding.values().any(|held| held.id.as_deref() == Some(job.as_str()));
        if !in_hand {
            return asker.end(Answer::NotHere, "no job of that id is in hand");
        }
        if self.cancels.len() >= CANCELS_MAX {
            return asker.end(Answer::Refused, "too many cancellations at a time: try again");
        }
        asker.tell(Answer::Requested, "the job is in hand, and will be stopped");
        let here = self.jobs.iter().filter(|(_, (_, here))| here.received.id() == Some(job.as_str()));
        let keys: Vec<_> = here.map(|(key, _)| *key).collect();
        self.cancels.push(Cancel { job, asker, stopped: false, ended: false });
        keys.into_iter().for_each(|key| self.call_off(key));
    }

    /// Whether a job that has just been read is to be stopped.
    pub(super) fn is_cancelled(&self, id: Option<&str>) -> bool {
        !self.cancels.is_empty() && self.cancels.iter().any(|cancel| Some(cancel.job.as_str()) == id)
    }

    /// Takes what waits of a job away. What runs comes home, and is dropped.
    pub(super) fn call_off(&mut self, key: JobKey) {
        let Some((model, job)) = self.jobs.get_mut(&key) else { return };
        job.leaving = Some(Leaving::Cancelled);
        // What had been decided waits for a part that is under way, and so does this.
        job.ending = None;
        self.batchers[*model].remove(key);
        self.advance(key);
    }

    /// Nothing of a cancelled job waits or runs any more.
    pub(super) fn end_cancelled(&mut self, key: JobKey) {
        let Some((_, job)) = self.jobs.get(&key) else { return };
        let id = job.received.id().map(str::to_owned);
        let refusal = Refusal::new(Reason::Cancelled, "an operator cancelled the job");
        self.give_up(key, |job| Burial {
            answered: job.items_done(),
            headers: Some(JobHeaders { items_done: job.items_done(), ..job.headers.clone() }),
            ..Burial::of(refusal)
        });
        let others = self.jobs.values().any(|(_, job)| job.received.id() == id.as_deref());
        if others {
            return;
        }
        for cancel in self.cancels.iter_mut().filter(|cancel| Some(&cancel.job) == id.as_ref()) {
            if !std::mem::replace(&mut cancel.stopped, true) {
                cancel.asker.tell(Answer::Stopped, "nothing of the job waits or runs any more");
            }
        }
    }

    /// A job is settled: those who wanted it cancelled learn how it ended, and, if it did as they asked, what the device
    /// has free now.
    pub(super) fn answer_cancels(&mut self, settled: &Settled) {
        let Some(id) = settled.id.as_deref().filter(|id| self.is_cancelled(Some(*id))) else { return };
        let others = self.holding.values().any(|held| held.id.as_deref() == Some(id));
        let (device, free_bytes) = (self.host.device.name().to_owned(), self.host.device.memory().free);
        let (mut done, mut open) = (Vec::new(), Vec::new());
        for mut cancel in std::mem::take(&mut self.cancels) {
            if cancel.job != id {
                open.push(cancel);
                continue;
            }
            cancel.ended |=
                matches!(settled.end, End::Dead(Reason::Cancelled) | End::Rejected(Reason::Cancelled));
            if others { open.push(cancel) } else { done.push(cancel) }
        }
        self.cancels = open;
        for cancel in done {
            if cancel.ended {
                let outcome = Answer::MemoryBack { device: device.clone(), free_bytes };
                cancel.asker.end(outcome, "the job is a dead letter, its slot and its memory are free");
            } else {
                cancel.asker.end(Answer::TooLate, format!("the job ended before: {}", how(settled.end)));
            }
        }
    }
}

/// How a job ended, in words.
fn how(end: End) -> String {
    match end {
        End::Answered | End::Forgotten => "it was answered".to_owned(),
        End::Requeued(_) => "it goes on elsewhere; cancel it there".to_owned(),
        End::Dead(reason) | End::Rejected(reason) => format!("it is a dead letter, as {reason}"),
        End::HandedBack => "it went back to the broker; cancel it where it comes next".to_owned(),
    }
}
