//! Whether the device and its engine work at all. Pure.
//!
//! A pass that fails, though it had memory, is the job's fault or the device's. A sick device would fail job after job and
//! send them all to the dead letters. So before a job is blamed, a canary runs: a pass that is known to be good. If that
//! fails too, the worker takes no jobs until a later canary lives, and gives up after some.

use std::time::{Duration, Instant};

/// The wait before a sick device is tried again; doubled with every canary that dies.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// Canaries that die one after the other until a restart is the better idea: with the waits in between a quarter of a
/// minute.
const PROBES_MAX: u32 = 5;

/// How the device is.
#[derive(Clone, Copy, Debug, Default)]
pub struct Health(State);

#[derive(Clone, Copy, Debug, Default)]
enum State {
    #[default]
    Well,
    /// A pass failed; a canary is under way.
    Doubtful,
    /// So many canaries died.
    Sick { died: u32, next_at: Option<Instant> },
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
}

impl Health {
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
            doubtful @ State::Doubtful => *doubtful = State::Well,
            State::Sick { next_at, .. } => drop(next_at.get_or_insert(now)),
        }
    }

    /// A pass failed. True if a canary is to be sent.
    pub fn doubt(&mut self) -> bool {
        let first = self.is_well();
        if first {
            self.0 = State::Doubtful;
        }
        first
    }

    /// Whether it is time for another canary; if so, it counts as sent.
    pub fn is_due(&mut self, now: Instant) -> bool {
        match &mut self.0 {
            State::Sick { next_at, .. } => next_at.take_if(|at| *at <= now).is_some(),
            _ => false,
        }
    }

    /// The canary's end.
    pub fn canary(&mut self, lives: bool, now: Instant) -> Finding {
        let before = std::mem::take(&mut self.0);
        if lives {
            return if let State::Sick { .. } = before { Finding::Recovered } else { Finding::Well };
        }
        let died = if let State::Sick { died, .. } = before { died + 1 } else { 1 };
        self.0 = State::Sick { died, next_at: Some(now + PROBE_WAIT * 2u32.pow(died.min(PROBES_MAX) - 1)) };
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
        let mut health = Health::default();
        assert!(health.is_well() && health.doubt());
        // Another failure meanwhile sends no second one.
        assert!(!health.doubt() && !health.is_well() && !health.is_sick());
        assert_eq!(health.canary(true, Instant::now()), Finding::Well);
        assert!(health.is_well());
    }

    #[test]
    fn a_sick_device_recovers_or_is_given_up() {
        let now = Instant::now();
        let mut health = Health::default();
        assert!(health.doubt());
        assert_eq!(health.canary(false, now), Finding::Sick);
        assert!(health.is_sick() && !health.is_due(now));
        assert!(health.is_due(now + PROBE_WAIT) && !health.is_due(now + PROBE_WAIT));
        assert_eq!(health.canary(false, now), Finding::StillSick);
        assert!(!health.is_due(now + PROBE_WAIT));
        let mut recovered = health;
        assert_eq!(recovered.canary(true, now), Finding::Recovered);
        assert!(recovered.is_well());
        assert!(health.is_due(now + 2 * PROBE_WAIT));
        health.forget_canary(now);
        assert!(health.is_due(now));
        for died in 3..=PROBES_MAX {
            let finding = health.canary(false, now);
            assert_eq!(finding, if died < PROBES_MAX { Finding::StillSick } else { Finding::Hopeless });
        }
    }
}
