//! How long a job may be held. Owns the limit, which follows the broker's `consumer_timeout` once a broker has shown it.

use std::time::Duration;

/// The part of the broker's `consumer_timeout` for which a job may be held. The rest is for the pass that still runs then, and
/// for replies that wait.
const OF_TIMEOUT: f64 = 0.8;

/// The least time between the worker's limit and the one that it asks the broker for: the worker looks at its jobs once a second, and a
/// pass or a reply may take some seconds more.
const BEYOND_MIN: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub(crate) struct TimeLimits {
    job: Duration,
}

impl TimeLimits {
    /// With the configured limit.
    pub(crate) fn new(job: Duration) -> Self {
        Self { job }
    }

    /// How long a job may be held.
    pub(crate) fn job(&self) -> Duration {
        self.job
    }

    /// The `consumer_timeout` with which a job may be held for so long.
    pub(crate) fn consumer_timeout(&self) -> Duration {
        self.job.div_f64(OF_TIMEOUT).max(self.job.saturating_add(BEYOND_MIN))
    }

    /// The broker closed a channel because a job was held for longer than this. The limit only ever gets shorter.
    pub(crate) fn learn_consumer_timeout(&mut self, timeout: Duration) {
        self.job = timeout.mul_f64(OF_TIMEOUT).min(self.job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_held_for_four_fifths_of_a_shorter_consumer_timeout() {
        let mut limits = TimeLimits::new(Duration::from_secs(600));
        assert_eq!(limits.consumer_timeout(), Duration::from_secs(750));
        limits.learn_consumer_timeout(Duration::from_secs(100));
        assert_eq!(limits.job(), Duration::from_secs(80));
        limits.learn_consumer_timeout(Duration::from_secs(1000));
        assert_eq!(limits.job(), Duration::from_secs(80));
    }

    #[test]
    fn the_broker_is_asked_for_a_minute_more_than_a_short_limit() {
        assert_eq!(TimeLimits::new(Duration::from_secs(1)).consumer_timeout(), Duration::from_secs(61));
    }
}
