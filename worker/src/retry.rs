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

    /// For a job that waits for memory which others hold, before its `delays`th try: one of the waits that there are
    /// queues for. They are few and fixed, so the jitter is in the choice: half of the jobs wait their turn's wait, the
    /// others the next shorter or longer one.
    pub fn for_memory(delays: u32) -> u64 {
        let last = DELAYS_MS.len() - 1;
        let turn = (delays.saturating_sub(1) as usize).min(last);
        // Evenly spread from half a second to one and a half.
        let spread = Self::between(Duration::from_secs(1), Duration::from_secs(1)).next_wait();
        let chosen = match spread.as_millis() {
            0..750 => turn.saturating_sub(1),
            750..1250 => turn,
            _ => (turn + 1).min(last),
        };
        DELAYS_MS[chosen]
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
    fn waits_for_memory_are_those_of_the_queues_and_grow_with_jitter() {
        let drawn = |delays| (0..400).map(|_| Waits::for_memory(delays)).collect::<Vec<_>>();
        let share = |delays, ms| drawn(delays).iter().filter(|wait| **wait == ms).count();
        assert!((240..360).contains(&share(1, 1_000)), "{}", share(1, 1_000));
        assert!((60..140).contains(&share(1, 5_000)), "{}", share(1, 5_000));
        assert!((140..260).contains(&share(2, 5_000)) && share(2, 1_000) > 0 && share(2, 30_000) > 0);
        for delays in [3, 50] {
            assert!((240..360).contains(&share(delays, 30_000)) && share(delays, 5_000) > 0);
        }
    }
}
