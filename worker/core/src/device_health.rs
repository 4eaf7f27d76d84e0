//! Decides whether the device and its engine work. Pure.
//!
//! If a pass fails although it had memory, the job or the device is at fault. A sick device would fail one job after the other, and all of
//! them would be dead-lettered. So before a job is blamed, a health probe runs: a small pass that is known to be good. Another probe runs
//! before each quarantined job: a job made the device sick only if the device was well before. If a probe fails, the worker stops
//! consuming until a later probe succeeds, and exits after several failures. A probe that runs out of memory shows nothing: the process
//! that took the memory may be the reason why the pass failed.
//!
//! All this concerns the device's own thread. Programs have processes of their own and go on beside a probe, unless an earlier probe has
//! shown nothing. While the device is known to be sick, no pass starts.

use std::time::{Duration, Instant};

/// The wait before a sick device is probed again; doubled with every probe that fails.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// Consecutive failed probes after which the worker restarts. With the waits in between this takes about 15 s.
const PROBES_MAX: u32 = 5;

/// How the device is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DeviceHealth(State);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Well,
    /// A pass failed, or a quarantined job is to run: a probe is in flight or due. `unclear`: probes in a row that ran out of memory.
    Doubtful { unclear: u32, next_at: Option<Instant> },
    /// `failed` probes in a row have failed.
    Sick { failed: u32, next_at: Option<Instant> },
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    Passed,
    Failed,
    OutOfMemory,
}

/// What a probe's end means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The device was well all the time: the jobs are to blame.
    Well,
    /// It is well again.
    Recovered,
    /// It has just turned out to be sick.
    Sick,
    /// It is still sick.
    StillSick,
    /// It does not recover.
    Hopeless,
    /// Another probe is needed.
    Unclear,
    /// No probe could tell: neither the device nor the jobs can be blamed.
    Unknown,
}

impl DeviceHealth {
    /// Whether passes of all models may start.
    pub(crate) fn is_well(&self) -> bool {
        matches!(self.0, State::Well)
    }

    /// Whether a probe has shown nothing, and no later probe has shown the device's state.
    pub(crate) fn is_unclear(&self) -> bool {
        matches!(self.0, State::Doubtful { unclear: 1.., .. })
    }

    /// Whether the worker should take jobs.
    pub(crate) fn is_sick(&self) -> bool {
        matches!(self.0, State::Sick { .. })
    }

    /// The session ended while a probe was in flight, so nothing handles its result: another probe is needed.
    pub(crate) fn forget_probe(&mut self, now: Instant) {
        match &mut self.0 {
            State::Well => {}
            doubtful @ State::Doubtful { .. } => *doubtful = State::Well,
            State::Sick { next_at, .. } => drop(next_at.get_or_insert(now)),
        }
    }

    /// A pass failed, or the device's health must be known before the next one. True if a probe is to be sent.
    pub(crate) fn doubt(&mut self) -> bool {
        let first = self.is_well();
        if first {
            self.0 = State::Doubtful { unclear: 0, next_at: None };
        }
        first
    }

    /// Whether it is time for another probe; if so, it counts as sent.
    pub(crate) fn is_due(&mut self, now: Instant) -> bool {
        match &mut self.0 {
            State::Sick { next_at, .. } | State::Doubtful { next_at, .. } => {
                next_at.take_if(|at| *at <= now).is_some()
            }
            State::Well => false,
        }
    }

    /// The probe's end.
    pub(crate) fn probe_ended(&mut self, result: ProbeResult, now: Instant) -> Finding {
        let before = std::mem::take(&mut self.0);
        let after = |probes: u32| Some(now + PROBE_WAIT * 2u32.pow(probes.min(PROBES_MAX) - 1));
        match (result, before) {
            (ProbeResult::Passed, State::Sick { .. }) => return Finding::Recovered,
            (ProbeResult::Passed, _) => return Finding::Well,
            (ProbeResult::OutOfMemory, State::Sick { failed, .. }) => {
                self.0 = State::Sick { failed, next_at: after(failed) };
                return Finding::Unclear;
            }
            (ProbeResult::OutOfMemory, State::Doubtful { unclear, .. }) if unclear + 1 < PROBES_MAX => {
                let unclear = unclear + 1;
                self.0 = State::Doubtful { unclear, next_at: after(unclear) };
                return Finding::Unclear;
            }
            (ProbeResult::OutOfMemory, _) => return Finding::Unknown,
            (ProbeResult::Failed, _) => {}
        }
        let failed = if let State::Sick { failed, .. } = before { failed + 1 } else { 1 };
        self.0 = State::Sick { failed, next_at: after(failed) };
        match failed {
            1 => Finding::Sick,
            2..PROBES_MAX => Finding::StillSick,
            _ => Finding::Hopeless,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_succeeds_leaves_the_blame_with_the_job() {
        let mut health = DeviceHealth::default();
        assert!(health.is_well() && health.doubt());
        // Another failure meanwhile sends no second one.
        assert!(!health.doubt() && !health.is_well() && !health.is_sick());
        assert_eq!(health.probe_ended(ProbeResult::Passed, Instant::now()), Finding::Well);
        assert!(health.is_well());
    }

    #[test]
    fn a_sick_device_recovers_or_is_given_up() {
        let now = Instant::now();
        let mut health = DeviceHealth::default();
        assert!(health.doubt());
        assert_eq!(health.probe_ended(ProbeResult::Failed, now), Finding::Sick);
        assert!(health.is_sick() && !health.is_due(now));
        assert!(health.is_due(now + PROBE_WAIT) && !health.is_due(now + PROBE_WAIT));
        assert_eq!(health.probe_ended(ProbeResult::Failed, now), Finding::StillSick);
        assert!(!health.is_due(now + PROBE_WAIT));
        let mut recovered = health;
        assert_eq!(recovered.probe_ended(ProbeResult::Passed, now), Finding::Recovered);
        assert!(recovered.is_well());
        assert!(health.is_due(now + 2 * PROBE_WAIT));
        health.forget_probe(now);
        assert!(health.is_due(now));
        for failed in 3..=PROBES_MAX {
            let finding = health.probe_ended(ProbeResult::Failed, now);
            assert_eq!(finding, if failed < PROBES_MAX { Finding::StillSick } else { Finding::Hopeless });
        }
    }

    #[test]
    fn a_probe_that_runs_out_of_memory_shows_nothing() {
        let now = Instant::now();
        let mut health = DeviceHealth::default();
        assert!(health.doubt());
        assert!(!health.is_unclear());
        assert_eq!(health.probe_ended(ProbeResult::OutOfMemory, now), Finding::Unclear);
        assert!(health.is_unclear());
        assert!(
            !health.is_well() && !health.is_sick() && !health.is_due(now) && health.is_due(now + PROBE_WAIT)
        );
        let mut cleared = health;
        assert_eq!(cleared.probe_ended(ProbeResult::Passed, now), Finding::Well);
        assert!(!cleared.is_unclear());
        let mut failed = health;
        assert_eq!(failed.probe_ended(ProbeResult::Failed, now), Finding::Sick);
        // Probes without memory neither end the sickness nor count as failed.
        for _ in 0..2 * PROBES_MAX {
            assert_eq!(failed.probe_ended(ProbeResult::OutOfMemory, now), Finding::Unclear);
            assert!(failed.is_sick());
        }
        assert_eq!(failed.probe_ended(ProbeResult::Failed, now), Finding::StillSick);
        for _ in 2..PROBES_MAX {
            assert_eq!(health.probe_ended(ProbeResult::OutOfMemory, now), Finding::Unclear);
        }
        assert_eq!(health.probe_ended(ProbeResult::OutOfMemory, now), Finding::Unknown);
        assert!(health.is_well());
    }
}
