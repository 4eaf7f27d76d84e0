//! Whether the device and its engine work at all. Pure.
//!
//! A pass that fails, though it had memory, is the job's fault or the device's. A sick device would fail job after job and
//! send them all to the dead letters. So before a job is blamed, a canary runs: a pass that is known to be good. If that
//! fails too, the worker takes no jobs until a later canary lives, and gives up after some. A canary that runs out of memory
//! says nothing: whoever took the memory may be why the pass failed, too.

use std::time::{Duration, Instant};

/// The wait before a sick device is tried again; doubled with every canary that dies.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// Canaries that die one after the other until a restart is the better idea: with the waits in between a quarter of a
/// minute.
const PROBES_MAX: u32 = 5;

/// How the device is.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceHealth(State);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Well,
    /// A pass failed; a canary is under way, or will be. So many have said nothing.
    Doubtful { unclear: u32, next_at: Option<Instant> },
    /// So many canaries died.
    Sick { died: u32, next_at: Option<Instant> },
}

/// How a canary ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeResult {
    Passed,
    Failed,
    OutOfMemory,
}

/// What a canary's end means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
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
    /// Another canary has to tell.
    Unclear,
    /// None could: neither the device nor the jobs can be blamed.
    Unknown,
}

impl DeviceHealth {
    /// Whether passes of jobs may start.
    pub fn is_well(&self) -> bool {
        matches!(self.0, State::Well)
    }

    /// Whether the worker should take jobs.
    pub fn is_sick(&self) -> bool {
        matches!(self.0, State::Sick { .. })
    }

    /// A canary that was under way when a session ended is not heard of again: what it was to tell is asked anew.
    pub fn forget_canary(&mut self, now: Instant) {
        match &mut self.0 {
            State::Well => {}
            doubtful @ State::Doubtful { .. } => *doubtful = State::Well,
            State::Sick { next_at, .. } => drop(next_at.get_or_insert(now)),
        }
    }

    /// A pass failed. True if a canary is to be sent.
    pub fn doubt(&mut self) -> bool {
        let first = self.is_well();
        if first {
            self.0 = State::Doubtful { unclear: 0, next_at: None };
        }
        first
    }

    /// Whether it is time for another canary; if so, it counts as sent.
    pub fn is_due(&mut self, now: Instant) -> bool {
        match &mut self.0 {
            State::Sick { next_at, .. } | State::Doubtful { next_at, .. } => {
                next_at.take_if(|at| *at <= now).is_some()
            }
            State::Well => false,
        }
    }

    /// The canary's end.
    pub fn canary(&mut self, result: ProbeResult, now: Instant) -> Finding {
        let before = std::mem::take(&mut self.0);
        let after = |probes: u32| Some(now + PROBE_WAIT * 2u32.pow(probes.min(PROBES_MAX) - 1));
        match (canary, before) {
            (ProbeResult::Passed, State::Sick { .. }) => return Finding::Recovered,
            (ProbeResult::Passed, _) => return Finding::Well,
            (ProbeResult::OutOfMemory, State::Sick { died, .. }) => {
                self.0 = State::Sick { died, next_at: after(died) };
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
        let died = if let State::Sick { died, .. } = before { died + 1 } else { 1 };
        self.0 = State::Sick { died, next_at: after(died) };
        match died {
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
    fn a_living_canary_leaves_the_blame_with_the_job() {
        let mut health = DeviceHealth::default();
        assert!(health.is_well() && health.doubt());
        // Another failure meanwhile sends no second one.
        assert!(!health.doubt() && !health.is_well() && !health.is_sick());
        assert_eq!(health.canary(ProbeResult::Passed, Instant::now()), Finding::Well);
        assert!(health.is_well());
    }

    #[test]
    fn a_sick_device_recovers_or_is_given_up() {
        let now = Instant::now();
        let mut health = DeviceHealth::default();
        assert!(health.doubt());
        assert_eq!(health.canary(ProbeResult::Failed, now), Finding::Sick);
        assert!(health.is_sick() && !health.is_due(now));
        assert!(health.is_due(now + PROBE_WAIT) && !health.is_due(now + PROBE_WAIT));
        assert_eq!(health.canary(ProbeResult::Failed, now), Finding::StillSick);
        assert!(!health.is_due(now + PROBE_WAIT));
        let mut recovered = health;
        assert_eq!(recovered.canary(ProbeResult::Passed, now), Finding::Recovered);
        assert!(recovered.is_well());
        assert!(health.is_due(now + 2 * PROBE_WAIT));
        health.forget_canary(now);
        assert!(health.is_due(now));
        for died in 3..=PROBES_MAX {
            let finding = health.canary(ProbeResult::Failed, now);
            assert_eq!(finding, if died < PROBES_MAX { Finding::StillSick } else { Finding::Hopeless });
        }
    }

    #[test]
    fn a_canary_that_runs_out_of_memory_says_nothing() {
        let now = Instant::now();
        let mut health = DeviceHealth::default();
        assert!(health.doubt());
        assert_eq!(health.canary(ProbeResult::OutOfMemory, now), Finding::Unclear);
        assert!(
            !health.is_well() && !health.is_sick() && !health.is_due(now) && health.is_due(now + PROBE_WAIT)
        );
        let mut cleared = health;
        assert_eq!(cleared.canary(ProbeResult::Passed, now), Finding::Well);
        let mut died = health;
        assert_eq!(died.canary(ProbeResult::Failed, now), Finding::Sick);
        // A sick device that has no memory is still sick, and no nearer to its end.
        for _ in 0..2 * PROBES_MAX {
            assert_eq!(died.canary(ProbeResult::OutOfMemory, now), Finding::Unclear);
            assert!(died.is_sick());
        }
        assert_eq!(died.canary(ProbeResult::Failed, now), Finding::StillSick);
        for _ in 2..PROBES_MAX {
            assert_eq!(health.canary(ProbeResult::OutOfMemory, now), Finding::Unclear);
        }
        assert_eq!(health.canary(ProbeResult::OutOfMemory, now), Finding::Unknown);
        assert!(health.is_well());
    }
}
