//! The wait before a process is started again.

use tokio::time::Duration;

/// The first wait after a second failure in a row; the first failure waits for nothing, since most are a job's.
const FIRST: Duration = Duration::from_secs(1);

/// The longest: a model that came back should be used within a minute.
const LONGEST: Duration = Duration::from_secs(60);

/// Failures since the last success.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    pub fn failed(&mut self) {
        self.failures = self.failures.saturating_add(1);
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
    }

    pub fn failures(self) -> u32 {
        self.failures
    }

    /// How long to wait now.
    pub fn wait(self) -> Duration {
        match self.failures {
            0 | 1 => Duration::ZERO,
            failures => FIRST.saturating_mul(1 << (failures - 2).min(16)).min(LONGEST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_minute_and_a_success_ends_them() {
        let mut backoff = Backoff::default();
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(backoff.wait().as_secs());
            backoff.failed();
        }
        assert_eq!(waits, [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]);
        backoff.succeeded();
        assert_eq!(backoff.wait(), Duration::ZERO);
        (0..1000).for_each(|_| backoff.failed());
        assert_eq!(backoff.wait(), LONGEST);
    }
}
