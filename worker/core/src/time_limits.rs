//! The longest time that a job may be held. The limit shrinks when a broker reveals a shorter `consumer_timeout`.

use std::time::Duration;

/// A job may be held for this part of the broker's `consumer_timeout`. The rest is for a pass that is still running then, and for replies
/// that wait.
const OF_TIMEOUT: f64 = 0.8;

/// The least time between the worker's limit and the timeout that it requests from the broker. The worker checks its jobs once a second,
/// and a pass or a reply may take some seconds more.
const BEYOND_MIN: Duration = Duration::from_mins(1);

#[derive(Debug)]
pub(crate) struct TimeLimits {
    job: Duration,
    /// The broker's `consumer_timeout`, as far as it is known: the requested one, or a shorter one that the broker has shown.
    timeout: Duration,
}

impl TimeLimits {
    /// With the configured limit.
    pub(crate) fn new(job: Duration) -> Self {
        Self { job, timeout: to_request(job) }
    }

    /// How long a job may be held.
    pub(crate) fn job(&self) -> Duration {
        self.job
    }

    /// The `consumer_timeout` to request from the broker, so that a job may be held for the limit.
    pub(crate) fn consumer_timeout(&self) -> Duration {
        to_request(self.job)
    }

    /// How long the broker lets the worker hold a job, as far as it is known.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The broker closed a channel because a job was held for longer than `timeout`. The limit never grows.
    pub(crate) fn learn_consumer_timeout(&mut self, timeout: Duration) {
        self.job = timeout.mul_f64(OF_TIMEOUT).min(self.job);
        self.timeout = timeout.min(self.timeout);
    }
}

/// The `consumer_timeout` with which jobs may be held for so long.
fn to_request(job: Duration) -> Duration {
    job.div_f64(OF_TIMEOUT).max(job.saturating_add(BEYOND_MIN))
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

    #[test]
    fn the_timeout_is_the_requested_one_or_a_shorter_one_that_the_broker_has_shown() {
        let mut limits = TimeLimits::new(Duration::from_secs(60));
        assert_eq!(limits.timeout(), Duration::from_secs(120));
        limits.learn_consumer_timeout(Duration::from_secs(100));
        assert_eq!((limits.job(), limits.timeout()), (Duration::from_secs(60), Duration::from_secs(100)));
        limits.learn_consumer_timeout(Duration::from_secs(1000));
        assert_eq!(limits.timeout(), Duration::from_secs(100));
    }
}
