//! Waits between attempts: exponential, with jitter. The only user of the `backoff` crate.

use std::time::Duration;

use backoff::ExponentialBackoff;
use backoff::backoff::Backoff as _;
use vramq_schemas::topology::DELAYS_MS;

/// First and longest wait before reconnecting. A broker restarts in some seconds; half a minute between attempts
/// keeps a fleet from knocking it over when it comes back.
const RECONNECT_MIN: Duration = Duration::from_millis(250);
const RECONNECT_MAX: Duration = Duration::from_secs(30);

/// A sequence of growing waits. Never ends by itself: the caller bounds it.
#[derive(Debug)]
pub struct Waits(ExponentialBackoff);

impl Waits {
    /// For connecting to the broker.
    pub fn reconnect() -> Self {
        Self::between(RECONNECT_MIN, RECONNECT_MAX)
    }

    /// Doubles from `min` to `max`, each wait spread by half up or down so that workers do not move in step.
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

    /// For a job that waits for memory which other processes hold, before its `delays`th try: what is nearest among the
    /// waits that there are queues for.
    pub fn for_memory(delays: u32) -> u64 {
        let mut waits =
            Self::between(Duration::from_millis(DELAYS_MS[0]), Duration::from_millis(DELAYS_MS[2]));
        waits.0.multiplier = 5.0;
        let wait_ms = (0..delays.max(1)).fold(0, |_, _| waits.next_wait().as_millis()) as f64;
        let distance = |ms: &u64| (wait_ms.max(1.0) / *ms as f64).ln().abs();
        // The list is not empty.
        DELAYS_MS.into_iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(DELAYS_MS[0])
    }

    /// The next wait.
    pub fn next_wait(&mut self) -> Duration {
        // `None` only comes with a `max_elapsed_time`, which is unset.
        self.0.next_backoff().unwrap_or(self.0.max_interval)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_the_cap_and_go_on_for_ever() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut waits = Waits::between(min, max);
        let taken: Vec<_> = (0..200).map(|_| waits.next_wait()).collect();
        assert!(taken[0] >= min / 2 && taken[0] <= min * 3 / 2, "{:?}", taken[0]);
        assert!(taken[10..].iter().all(|w| *w >= max / 2 && *w <= max * 3 / 2));
        assert!(taken[10..].windows(2).any(|w| w[0] != w[1]), "no jitter");
    }

    #[test]
    fn waits_for_memory_are_those_of_the_queues_and_grow() {
        let mean = |delays| (0..200).map(|_| Waits::for_memory(delays)).sum::<u64>() / 200;
        assert!((0..200).all(|_| Waits::for_memory(1) == 1_000));
        assert!(mean(1) < mean(2) && mean(2) < mean(3), "{} {} {}", mean(1), mean(2), mean(3));
        assert!((0..200).all(|n| DELAYS_MS.contains(&Waits::for_memory(n))));
        assert_eq!(mean(50), 30_000);
    }
}
