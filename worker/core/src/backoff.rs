//! The waits between attempts: they grow, with jitter from the core's random choices.

use std::time::Duration;

use vramq_schemas::topology::DELAYS_MS;

use crate::random::Random;

/// The `tries`th wait (from 0) of a sequence that doubles from `min` to `max`; spread by half up or down so that workers do
/// not move in step.
pub(crate) fn doubling(tries: u32, min: Duration, max: Duration, random: &mut Random) -> Duration {
    middle(tries, min, max).mul_f64(0.5 + random.fraction())
}

/// The longest that the same wait can be.
pub(crate) fn doubling_max(tries: u32, min: Duration, max: Duration) -> Duration {
    middle(tries, min, max).mul_f64(1.5)
}

fn middle(tries: u32, min: Duration, max: Duration) -> Duration {
    min.saturating_mul(2u32.saturating_pow(tries.min(31))).min(max)
}

/// How many milliseconds a job waits for memory of other processes before its `delays`th try. There are only a few delay queues with fixed
/// times, so the jitter is in the choice: half of the jobs get their turn's wait, the others the next shorter or longer one.
pub(crate) fn for_memory(delays: u32, random: &mut Random) -> u64 {
    let last = DELAYS_MS.len() - 1;
    let turn = (delays.saturating_sub(1) as usize).min(last);
    let chosen = match random.below(4) {
        0 => turn.saturating_sub(1),
        1 | 2 => turn,
        _ => (turn + 1).min(last),
    };
    DELAYS_MS[chosen]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_the_longest_and_differ() {
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(2));
        let mut random = Random::new(1);
        let waits: Vec<_> = (0..200).map(|tries| doubling(tries, min, max, &mut random)).collect();
        let longest = |tries| doubling_max(tries, min, max);
        assert!((0..200).all(|tries| waits[tries as usize] <= longest(tries)), "longer than the longest");
        assert_eq!((longest(0), longest(1), longest(199)), (min * 3 / 2, min * 3, max * 3 / 2));
        assert!(waits[0] >= min / 2 && waits[0] <= min * 3 / 2, "{:?}", waits[0]);
        assert!(waits[10..].iter().all(|wait| *wait >= max / 2 && *wait <= max * 3 / 2));
        assert!(waits[10..].windows(2).any(|pair| pair[0] != pair[1]), "no jitter");
    }

    #[test]
    fn waits_for_memory_are_those_of_the_delay_queues_and_grow() {
        let mut random = Random::new(1);
        let mut share = |delays, ms| (0..400).filter(|_| for_memory(delays, &mut random) == ms).count();
        assert!((240..360).contains(&share(1, 1_000)));
        assert!((60..140).contains(&share(1, 5_000)));
        assert!((140..260).contains(&share(2, 5_000)) && share(2, 1_000) > 0 && share(2, 30_000) > 0);
        for delays in [3, 50] {
            assert!((240..360).contains(&share(delays, 30_000)) && share(delays, 5_000) > 0);
        }
    }
}
