//! The device's health: probes after failed passes, and a device that is lost.

use std::collections::BTreeSet;

use vramq_schemas::headers::DEVICE_LOST;

use crate::Core;
use crate::device_health::{Finding, ProbeResult};
use crate::event::Reading;
use crate::ids::{JobKey, ModelIndex, PassId};
use crate::jobs::Running;
use crate::observation::Observation;

/// The jobs that may have caused the loss of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Blame {
    /// One of the jobs that were on the device: a crash is counted for each of them.
    Jobs(Vec<JobKey>),
    Nobody,
}

impl Core {
    pub(crate) fn probe_ended(&mut self, model: ModelIndex, result: ProbeResult) {
        self.observe(Observation::HealthProbe(result));
        let (device, model) = (self.settings.device.clone(), self.models[model.0].name.clone());
        match self.health.probe_ended(result, self.now.at) {
            Finding::Well => {
                self.jobs.for_each_running(Running::device_is_well);
                for (job, outcome) in self.health.take_pending() {
                    self.conclude_when_idle(job, outcome);
                }
            }
            Finding::Recovered => {
                tracing::info!(device, model, "health probe succeeded: consuming again");
                self.lifecycle.device_recovered();
                self.adjust_consumers();
                self.requeue_waiting();
            }
            Finding::Sick => {
                tracing::error!(device, model, "health probe failed; not consuming until one succeeds");
                // Whether these jobs made the device fail, or a failing device made them fail, is unknown.
                for (job, _) in self.health.take_pending() {
                    if self.jobs.running(job).is_some_and(Running::is_charged_with_sickness) {
                        self.count_crash(job);
                    }
                }
                self.requeue_all_unfinished();
                self.adjust_consumers();
            }
            Finding::StillSick => {
                tracing::warn!(device, model, "health probe failed again: still not consuming");
            }
            Finding::Hopeless => {
                if self.lifecycle.lose_device() {
                    // Passes of programs still end, so their jobs are requeued after that.
                    self.give_device_up("every health probe fails", Blame::Nobody);
                }
            }
            Finding::Unclear => {
                tracing::warn!(device, model, "health probe ran out of memory: trying another one");
            }
            Finding::Unknown => {
                tracing::warn!(
                    device,
                    model,
                    "every health probe ran out of memory: requeueing the jobs whose passes failed"
                );
                for (job, _) in self.health.take_pending() {
                    self.requeue_unfinished(job);
                }
            }
        }
    }

    /// Checks whether the device is lost, even while no pass runs that would fail on it.
    pub(crate) fn watch_device(&mut self, reading: &Reading) {
        let Some(loss) = &reading.lost else { return };
        let blame = match (loss.is_late, reading.culprit) {
            (true, _) => Blame::Nobody,
            (false, culprit) => Blame::Jobs(culprit.map(|pass| self.jobs_in(pass)).unwrap_or_default()),
        };
        self.device_lost(&loss.error, blame);
    }

    /// The unacknowledged jobs that are in a pass, also in one that an earlier session made.
    pub(crate) fn jobs_in(&self, pass: PassId) -> Vec<JobKey> {
        let Some(pass) = self.scheduler.in_flight(pass) else { return Vec::new() };
        self.jobs.running_where(|_, running| pass.has(running.received.delivery.fingerprint))
    }

    /// The device is unusable until the process restarts. All jobs are requeued, even those in a pass that never ends.
    pub(crate) fn device_lost(&mut self, error: &str, blame: Blame) {
        if !self.lifecycle.lose_device() {
            return;
        }
        self.jobs.for_each_running(Running::forget_passes);
        self.give_device_up(error, blame);
    }

    /// Requeues the jobs as soon as their passes have ended; then the process restarts.
    fn give_device_up(&mut self, error: &str, blame: Blame) {
        tracing::error!(device = self.settings.device, error, "device lost: draining for a restart");
        self.lifecycle.restart();
        let pending = self.health.take_pending().into_iter().map(|(job, _)| job);
        if let Blame::Jobs(jobs) = blame {
            // Each job once, even if it is in both lists.
            let concerned: BTreeSet<_> = pending.chain(jobs).collect();
            concerned.into_iter().for_each(|job| self.count_crash(job));
        }
        self.requeue_all_unfinished();
        if !self.lifecycle.has_deadline() {
            self.drain();
        }
    }

    /// The device was lost, or found to be sick, while it ran the job. That counts as if a worker had crashed.
    pub(crate) fn count_crash(&mut self, job: JobKey) {
        self.count_crash_as(job, DEVICE_LOST);
    }

    pub(crate) fn count_crash_as(&mut self, job: JobKey, what: &str) {
        let incident = self.incident(what);
        if let Some(running) = self.jobs.running_mut(job) {
            running.count_crash(incident);
        }
    }
}
