//! Backoff between attempts: exponential, with jitter. The only user of the `backoff` crate.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;

/// The first and the longest wait before a reconnect. A broker restarts within seconds. With half a minute between attempts, a fleet does
/// not overload a broker that comes back.
const RECONNECT_MIN: Duration = Duration::from_millis(250);
const RECONNECT_MAX: Duration = Duration::from_secs(30);

/// A sequence of growing waits. It never ends, so the caller must limit the attempts.
#[derive(Debug)]
pub struct Backoff(ExponentialBackoff);

impl Backoff {
    /// For connecting to the broker.
    pub fn reconnect() -> Self {
        Self::between(RECONNECT_MIN, RECONNECT_MAX)
    }

    /// Waits that double from `min` to `max`. Each is changed randomly by up to a half, so that workers do not act in step.
    pub fn between(min: Duration, max: Duration) -> Self {
        Self(ExponentialBackoff {
            current_interval: min,
            initial_interval: min,
            max_interval: max,
            multiplier: 2.0,
            randomization_factor: 0.5,
            max_elapsed_time: None,
            ..ExponentialBackoff::default()
        })
    }

    /// The next wait.
    pub fn next_wait(&mut self) -> Duration {
        // `None` is returned only with a `max_elapsed_time`, which is not set.
        self.0.next_backoff().unwrap_or(self.0.max_interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_longest_and_never_end() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut waits = Backoff::between(min, max);
        let taken: Vec<_> = (0..200).map(|_| waits.next_wait()).collect();
        assert!(taken[0] >= min / 2 && taken[0] <= min * 3 / 2, "{:?}", taken[0]);
        assert!(taken[10..].iter().all(|w| *w >= max / 2 && *w <= max * 3 / 2));
        assert!(taken[10..].windows(2).any(|w| w[0] != w[1]), "no jitter");
    }
}
