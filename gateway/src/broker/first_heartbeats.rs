//! When a gateway that has started knows the workers: each of them has had the time to send a heartbeat. Pure.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The time between a worker's heartbeats by default. Nobody waits for workers that are slower.
const INTERVAL: Duration = Duration::from_secs(5);

/// How much later than its interval a heartbeat may come.
const LATE_MAX: Duration = Duration::from_millis(500);

/// How long a request may wait for the first heartbeats.
pub const FIRST_WITHIN: Duration = INTERVAL.saturating_add(LATE_MAX);

/// Since when the gateway can hear heartbeats.
#[derive(Debug, Default)]
pub struct FirstHeartbeats(OnceLock<Instant>);

impl FirstHeartbeats {
    /// The gateway has a connection. Only the first one counts: the gateway knows the workers when it connects again.
    pub fn connected(&self, now: Instant) {
        let _ = self.0.set(now);
    }

    /// Whether all workers should have been heard. `interval` is the longest of those that were.
    pub fn are_heard(&self, interval: Option<Duration>, now: Instant) -> bool {
        let within = interval.unwrap_or(INTERVAL).min(INTERVAL) + LATE_MAX;
        self.0.get().is_some_and(|since| now.saturating_duration_since(*since) >= within)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_known_an_interval_after_the_first_connection() {
        let (first, now) = (FirstHeartbeats::default(), Instant::now());
        let after = |ms| now + Duration::from_millis(ms);
        assert!(!first.are_heard(None, after(60_000)), "there was no connection");
        first.connected(now);
        first.connected(after(60_000));
        for (interval_ms, ms, known) in [
            (None, 5_499, false),
            (None, 5_500, true),
            (Some(1_000), 1_499, false),
            (Some(1_000), 1_500, true),
            (Some(60_000), 5_500, true),
        ] {
            let interval = interval_ms.map(Duration::from_millis);
            assert_eq!(first.are_heard(interval, after(ms)), known, "{interval_ms:?} {ms}");
        }
    }
}
