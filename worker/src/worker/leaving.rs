//! Jobs that go on elsewhere, for no fault of theirs: because the worker drains, because its device is sick, or because they
//! have been in hand for too long. What is finished of them goes out first, and no attempt is counted.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::Duration;

use tokio::time::Instant;
use vramq_schemas::Reason;

use super::deliveries::incident;
use super::{Loop, Outcome};
use crate::amqp::settle::Burial;
use crate::batcher::JobKey;
use crate::device::Loss;
use crate::device::thread::OnDevice;
use crate::disposition::Disposition;
use crate::health::{Canary, Finding};
use crate::job::{Decoded, Leaving};
use crate::pass::Pass;
use crate::refusal::Refusal;

/// How the history names a device that was lost or sick.
const DEVICE_LOST: &str = "device-lost";

/// The part of the broker's own patience that a job may be in hand for: the rest is for the pass that runs then, and for
/// replies that wait.
pub(super) const OF_TIMEOUT: f64 = 0.8;

/// Whose fault a lost device may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Blame {
    /// One of the jobs that were on it: all of them are charged.
    Jobs(Vec<JobKey>),
    Nobody,
}

impl Loop<'_> {
    /// Takes no more jobs, and ends when none is in hand: what takes more than a pass goes on elsewhere at once, the rest is
    /// finished if half of the time is enough.
    pub(super) async fn drain(&mut self) -> ControlFlow<Outcome> {
        let now = Instant::now();
        self.deadline = Some(now + self.host.drain);
        self.half_time = Some(now + self.host.drain / 2);
        self.host.draining = true;
        let large: Vec<_> = self.batchers.iter().flat_map(|batcher| batcher.large()).collect();
        large.into_iter().for_each(|key| self.hand_over(key));
        self.follow_capacity().await
    }

    /// Starts no pass any more, and lets all jobs go.
    pub(super) fn hand_over_all(&mut self) {
        self.half_time = None;
        self.leaving = true;
        let jobs: Vec<_> = self.jobs.keys().copied().collect();
        jobs.into_iter().for_each(|key| self.hand_over(key));
    }

    /// Lets a job go, as soon as what runs of it has come home.
    pub(super) fn hand_over(&mut self, key: JobKey) {
        let Some((model, job)) = self.jobs.get_mut(&key) else { return };
        if job.leaving.is_none() {
            job.leaving = Some(Leaving::Elsewhere);
            self.batchers[*model].remove(key);
        }
        // What ran of it may be given up, also if it was leaving before.
        self.advance(key);
    }

    pub(super) fn depart(&mut self, key: JobKey) {
        let Some((_, job)) = self.jobs.get(&key) else { return };
        let next = job.headers.clone();
        self.decided(key, Disposition::HandOver(next));
    }

    /// Looks for jobs that have been in hand for too long, and for a pass that does not end.
    pub(super) async fn watch_time(&mut self) -> ControlFlow<Outcome> {
        let limit = self.host.job_limit;
        let on_device = self.host.thread.busy().now();
        if let Some(pass) = on_device.as_ref().filter(|pass| pass.lasts() > self.host.pass_limit) {
            let (error, blame) = match pass.waits() {
                true => ("another process keeps the device to itself", Blame::Nobody),
                false => ("a pass does not end", Blame::Jobs(self.jobs_in(pass))),
            };
            return self.device_lost(error, blame).await;
        }
        let stuck = on_device.filter(|pass| pass.lasts() > limit);
        // Those that leave already wait for a pass, which may be the one that does not end.
        let waits = |job: &Decoded| match job.leaving {
            None => true,
            Some(leaving) => leaving == Leaving::Elsewhere && stuck.is_some() && job.running > 0,
        };
        let is_late = |job: &Decoded| job.received.at.elapsed() > limit && job.ending.is_none() && waits(job);
        let late: Vec<_> =
            self.jobs.iter().filter(|(_, (_, job))| is_late(job)).map(|(key, _)| *key).collect();
        for key in late {
            if !self.accused.iter().any(|(accused, _)| *accused == key) {
                self.time_is_up(key, stuck.as_ref());
            }
        }
        ControlFlow::Continue(())
    }

    /// A job has been in hand for long enough; `stuck` is a pass that has been on the device for as long.
    fn time_is_up(&mut self, key: JobKey, stuck: Option<&OnDevice>) {
        let Some((_, job)) = self.jobs.get(&key) else { return };
        let Some(pass) = stuck else { return self.hand_over(key) };
        if pass.waits() || !pass.has(job.received.fingerprint) {
            // What is queued behind it would wait as long.
            return self.leave_behind(key);
        }
        if pass.is_of_one() && !job.has_progress() {
            let refusal = Refusal::new(Reason::TimedOut, timed_out(self.host.job_limit));
            self.give_up(key, |job| Burial { headers: Some(job.headers.clone()), ..Burial::of(refusal) });
        } else {
            // Until it is alone nobody knows which of them it is.
            self.charge(key);
            self.leave_behind(key);
        }
    }

    /// Lets a job go without what runs of it.
    fn leave_behind(&mut self, key: JobKey) {
        if let Some((_, job)) = self.jobs.get_mut(&key) {
            job.running = 0;
        }
        self.hand_over(key);
    }

    /// The jobs in hand that are in a pass; also of one that an earlier session made.
    fn jobs_in(&self, pass: &OnDevice) -> Vec<JobKey> {
        let in_pass = self.jobs.iter().filter(|(_, (_, job))| pass.has(job.received.fingerprint));
        in_pass.map(|(key, _)| *key).collect()
    }

    /// The broker cut us off because a job was in hand for too long for it.
    pub(super) fn learn_timeout(&mut self, timeout: Duration) {
        let limit = timeout.mul_f64(OF_TIMEOUT).min(self.host.job_limit);
        let (timeout_s, job_s) = (timeout.as_secs_f64(), limit.as_secs_f64());
        tracing::warn!(
            timeout_s,
            job_s,
            "the broker's consumer_timeout is shorter than a job took: from now on jobs go back before it; raise it, or \
             lower worker.job_s"
        );
        self.host.job_limit = limit;
    }

    /// Looks whether the device is still there: also while nothing runs on it that could tell.
    pub(super) async fn watch_device(&mut self) -> ControlFlow<Outcome> {
        match self.host.device.lost() {
            None => ControlFlow::Continue(()),
            Some(Loss { error, is_late: true }) => self.device_lost(&error, Blame::Nobody).await,
            Some(Loss { error, is_late: false }) => self.device_lost(&error, self.blame()).await,
        }
    }

    /// The jobs of the pass that the device was lost in; of one that a lost session left behind those that have come again.
    fn blame(&self) -> Blame {
        let culprit = self.host.thread.busy().culprit();
        Blame::Jobs(culprit.map(|pass| self.jobs_in(&pass)).unwrap_or_default())
    }

    /// The device is of no use until the process restarts: the jobs go elsewhere, also those in a pass that never ends.
    pub(super) async fn device_lost(&mut self, error: &str, blame: Blame) -> ControlFlow<Outcome> {
        if std::mem::replace(&mut self.device_gone, true) {
            return ControlFlow::Continue(());
        }
        tracing::error!(device = self.host.device.name(), error, "device lost: draining for a restart");
        // Whoever has been told to end is not to be started again.
        self.host.restarting |= !self.host.draining;
        let accused = std::mem::take(&mut self.accused).into_iter().map(|(key, _)| key);
        if let Blame::Jobs(jobs) = blame {
            // Once for each.
            let concerned: BTreeSet<_> = accused.chain(jobs).collect();
            concerned.into_iter().for_each(|key| self.charge(key));
        }
        self.jobs.values_mut().for_each(|(_, job)| job.running = 0);
        self.hand_over_all();
        if self.deadline.is_some() {
            return ControlFlow::Continue(());
        }
        self.drain().await
    }

    /// A device was lost, or turned out to be sick, when it ran the job: as if a worker had vanished.
    fn charge(&mut self, key: JobKey) {
        if let Some((_, job)) = self.jobs.get_mut(&key) {
            job.headers.crashes = job.headers.crashes.saturating_add(1);
            job.headers.history.push(incident(DEVICE_LOST, &self.host.identity));
        }
    }

    /// A job's pass failed, not for want of memory: blames the job only if the device is well.
    pub(super) fn accuse(&mut self, key: JobKey, model: usize, disposition: Disposition) {
        self.accused.push((key, disposition));
        if self.host.health.doubt() {
            self.canary = Some(model);
        }
    }

    /// Sends the next canary to a sick device.
    pub(super) fn probe(&mut self) {
        if self.host.health.is_due(std::time::Instant::now()) {
            self.canary = Some(self.canary_model);
        }
    }

    pub(super) async fn canary_ended(&mut self, pass: &Pass, canary: Canary) -> ControlFlow<Outcome> {
        let (device, model) = (self.host.device.name().to_owned(), &pass.model.name);
        self.host.meters.device.canaries.inc(canary);
        match self.host.health.canary(canary, std::time::Instant::now()) {
            Finding::Well => {
                for (key, disposition) in std::mem::take(&mut self.accused) {
                    self.decided(key, disposition);
                }
            }
            Finding::Recovered => {
                tracing::info!(device, model, "a canary lives: taking jobs again");
                self.leaving = self.host.draining;
                return self.follow_capacity().await;
            }
            Finding::Sick => {
                tracing::error!(device, model, "even a canary fails: taking no jobs until one lives");
                self.release_accused();
                self.hand_over_all();
                return self.follow_capacity().await;
            }
            Finding::StillSick => tracing::warn!(device, model, "another canary fails"),
            Finding::Hopeless => return self.device_lost("canary after canary fails", Blame::Nobody).await,
            Finding::Unclear => {
                tracing::warn!(device, model, "a canary runs out of memory: another has to tell");
            }
            Finding::Unknown => {
                tracing::warn!(
                    device,
                    model,
                    "every canary runs out of memory: the jobs that failed go elsewhere"
                );
                for (key, _) in std::mem::take(&mut self.accused) {
                    self.hand_over(key);
                }
            }
        }
        ControlFlow::Continue(())
    }

    /// Nobody knows whether the device failed for them, or they for the device.
    fn release_accused(&mut self) {
        for (key, _) in std::mem::take(&mut self.accused) {
            self.charge(key);
            self.hand_over(key);
        }
    }
}

fn timed_out(limit: Duration) -> String {
    format!(
        "the job was in hand for {} s, and nothing of it was finished: make it smaller, or raise worker.job_s and the \
         broker's consumer_timeout",
        limit.as_secs_f64()
    )
}
