//! Jobs that wait for the result of a health probe: jobs whose pass failed although it had memory, and quarantined jobs that run
//! next.

use std::time::Instant;

use crate::device_health::{DeviceHealth, Finding, ProbeResult};
use crate::disposition::JobOutcome;
use crate::ids::{JobKey, ModelIndex};
use crate::sizes::Size;

/// The device's health, and the jobs that depend on it.
#[derive(Debug, Default)]
pub(crate) struct HealthWatch {
    health: DeviceHealth,
    /// Jobs whose pass failed, and what happens to them if the device is well.
    pending: Vec<(JobKey, JobOutcome)>,
    /// The model whose probe is to run as soon as its executor runs no other pass.
    probe: Option<ModelIndex>,
    /// The model of the last probe.
    last_probe: Option<ModelIndex>,
}

impl HealthWatch {
    pub(crate) fn session_opened(&mut self, now: Instant) {
        self.health.forget_probe(now);
        self.pending.clear();
        self.probe = None;
    }

    /// `unacked`: the unacknowledged jobs, which bound this.
    pub(crate) fn size(&self, unacked: usize) -> Size {
        Size::of("jobs that wait for a probe", self.pending.len(), unacked)
    }

    pub(crate) fn is_sick(&self) -> bool {
        self.health.is_sick()
    }

    /// Whether passes of all models may start.
    pub(crate) fn is_well(&self) -> bool {
        self.health.is_well() && self.probe.is_none()
    }

    /// Whether the last probe ran out of memory and so showed nothing. The next probe must run alone.
    pub(crate) fn is_unclear(&self) -> bool {
        self.health.is_unclear()
    }

    /// A job's pass failed, not for want of memory: the job is blamed only if the device is well.
    pub(crate) fn suspect(&mut self, job: JobKey, model: ModelIndex, outcome: JobOutcome) {
        self.pending.push((job, outcome));
        if self.health.doubt() {
            self.probe = Some(model);
        }
    }

    /// Requests a probe before a quarantined job runs. If the job's pass fails then, the device was well before.
    pub(crate) fn probe_before(&mut self, model: ModelIndex) {
        if self.health.doubt() {
            self.probe = Some(model);
        }
    }

    pub(crate) fn is_pending(&self, job: JobKey) -> bool {
        self.pending.iter().any(|(pending, _)| *pending == job)
    }

    pub(crate) fn take_pending(&mut self) -> Vec<(JobKey, JobOutcome)> {
        std::mem::take(&mut self.pending)
    }

    /// A second has passed: another probe of a sick device may be due.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.health.is_due(now) {
            self.probe = self.last_probe.or(Some(ModelIndex(0)));
        }
    }

    /// The model whose probe is to run.
    pub(crate) fn wanted_probe(&self) -> Option<ModelIndex> {
        self.probe
    }

    /// The probe that was to run runs now.
    pub(crate) fn probe_started(&mut self) {
        self.last_probe = self.probe.take().or(self.last_probe);
    }

    /// A probe did not run, so it is wanted again.
    pub(crate) fn put_probe_back(&mut self, model: ModelIndex) {
        self.probe = Some(model);
    }

    pub(crate) fn probe_ended(&mut self, result: ProbeResult, now: Instant) -> Finding {
        self.health.probe_ended(result, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: ModelIndex = ModelIndex(0);

    #[test]
    fn passes_wait_from_a_suspicion_until_a_probe_has_passed() {
        let (mut watch, now) = (HealthWatch::default(), Instant::now());
        assert!(watch.is_well());
        watch.suspect(JobKey(1), MODEL, JobOutcome::Reply);
        assert_eq!((watch.is_well(), watch.wanted_probe()), (false, Some(MODEL)));
        assert!(watch.is_pending(JobKey(1)) && !watch.is_pending(JobKey(2)));
        watch.probe_started();
        assert_eq!((watch.is_well(), watch.wanted_probe()), (false, None), "the probe runs");
        watch.probe_ended(ProbeResult::Passed, now);
        assert!(watch.is_well());
        watch.put_probe_back(MODEL);
        assert!(!watch.is_well(), "another probe is wanted");
    }

    #[test]
    fn a_new_session_has_no_job_that_waits_for_a_probe() {
        let mut watch = HealthWatch::default();
        watch.suspect(JobKey(1), MODEL, JobOutcome::Reply);
        watch.session_opened(Instant::now());
        assert_eq!((watch.is_pending(JobKey(1)), watch.wanted_probe()), (false, None));
    }
}
