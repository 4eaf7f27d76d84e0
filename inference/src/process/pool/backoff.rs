//! The wait before a process is started again.

use tokio::time::{Duration, Instant};

/// The first wait, after a second failure in a row. There is none after the first failure, because a job usually caused it.
const FIRST: Duration = Duration::from_secs(1);

/// The longest: a model that came back should be used within a minute.
const LONGEST: Duration = Duration::from_secs(60);

/// Deaths in passes, in a row, that wait for nothing: as many as one job causes until it is dead-lettered (the default of
/// `worker.crashes_max`). The other jobs of the model need not wait for that job's sake.
const CRASHES_OF_ONE_JOB: u32 = 5;

/// Failures since the last pass that was finished.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
    /// Those of them that were deaths in passes.
    crashes: u32,
    /// When the last of them was.
    last: Option<Instant>,
}

impl Backoff {
    /// A process could not be started or loaded, or failed while no pass ran.
    pub fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        self.last = Some(now);
    }

    /// A process died in a pass, or right after one.
    pub fn crashed(&mut self, now: Instant) {
        self.crashes = self.crashes.saturating_add(1);
        self.failed(now);
    }

    pub fn succeeded(&mut self) {
        *self = Self::default();
    }

    pub fn failures(self) -> u32 {
        self.failures
    }

    /// How long to wait from now on. What has passed since the last failure counts.
    pub fn wait(self, now: Instant) -> Duration {
        let after_last = match self.failures - self.crashes.min(CRASHES_OF_ONE_JOB - 1) {
            0 | 1 => Duration::ZERO,
            unexplained => FIRST.saturating_mul(1 << (unexplained - 2).min(16)).min(LONGEST),
        };
        let passed = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        after_last.saturating_sub(passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds that each of ten failures in a row waits.
    fn waits(fail: fn(&mut Backoff, Instant)) -> Vec<u64> {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        let wait = |_| {
            fail(&mut backoff, now);
            backoff.wait(now).as_secs()
        };
        (0..10).map(wait).collect()
    }

    #[test]
    fn waits_double_up_to_a_minute_and_a_success_ends_them() {
        assert_eq!(waits(Backoff::failed), [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        assert_eq!(backoff.wait(now), Duration::ZERO);
        (0..1000).for_each(|_| backoff.failed(now));
        assert_eq!(backoff.wait(now), LONGEST);
        backoff.succeeded();
        assert_eq!((backoff.wait(now), backoff.failures()), (Duration::ZERO, 0));
    }

    /// One job kills a process five times. A program that dies in every pass waits longer and longer.
    #[test]
    fn the_first_five_crashes_cause_no_wait() {
        assert_eq!(waits(Backoff::crashed), [0, 0, 0, 0, 0, 1, 2, 4, 8, 16]);
    }

    #[test]
    fn a_crash_forgives_no_failure_to_load() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        (0..3).for_each(|_| backoff.failed(now));
        assert_eq!(backoff.wait(now).as_secs(), 2);
        backoff.crashed(now);
        assert_eq!((backoff.wait(now).as_secs(), backoff.failures()), (2, 4));
    }

    /// An idle model has waited already when its next job comes.
    #[test]
    fn the_time_since_the_failure_counts() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        (0..4).for_each(|_| backoff.failed(now));
        assert_eq!(backoff.wait(now).as_secs(), 4);
        assert_eq!(backoff.wait(now + Duration::from_secs(3)).as_secs(), 1);
        assert_eq!(backoff.wait(now + Duration::from_secs(100)), Duration::ZERO);
    }
}
