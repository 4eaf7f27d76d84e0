//! Estimates from earlier passes how long a pass runs at least. The scheduler forms the next pass shortly before that time is over. Until
//! then, jobs that arrive can still join the next pass.

use std::time::Duration;

/// The next pass is formed when a quarter of the estimated time is left. Passes vary, and the next one should be ready in time.
const PART_LEFT: u32 = 4;

/// The least time that must be left, for earlier events and for the way to the device. If a pass is shorter, the next one is formed at
/// once.
const LEFT_MIN: Duration = Duration::from_millis(20);

/// The fastest pass counts for this much more time after each slower one, so that old figures are forgotten.
const FORGET: f64 = 1.1;

/// How fast a model's passes run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Seconds per unit of cost: about the least among recent passes.
    per_cost: Option<f64>,
}

impl Pace {
    /// Records a pass that ended well. A pass of less than half of `cost_max` is ignored: it says little about full ones.
    pub(super) fn pass_took(&mut self, cost: usize, cost_max: usize, took: Duration) {
        if cost == 0 || took.is_zero() || cost.saturating_mul(2) < cost_max {
            return;
        }
        let per_cost = took.as_secs_f64() / cost as f64;
        self.per_cost = Some(self.per_cost.map_or(per_cost, |fewest| per_cost.min(fewest * FORGET)));
    }

    /// How long after the start of a pass of this cost the next one is formed. Zero while no pass has been measured.
    pub(super) fn next_after(&self, cost: usize) -> Duration {
        let seconds = self.per_cost.unwrap_or(0.0) * cost as f64;
        let least = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        least.saturating_sub((least / PART_LEFT).max(LEFT_MIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn after(passes: &[(usize, u32)]) -> Pace {
        let mut pace = Pace::default();
        passes.iter().for_each(|(cost, millis)| pace.pass_took(*cost, 100, *millis * MILLI));
        pace
    }

    #[test]
    fn the_next_pass_is_formed_when_a_quarter_of_the_shortest_is_left() {
        assert_eq!(after(&[]).next_after(100), Duration::ZERO);
        assert_eq!(after(&[(100, 400)]).next_after(100), 300 * MILLI);
        assert_eq!(after(&[(100, 400)]).next_after(50), 150 * MILLI);
        assert_eq!(
            after(&[(100, 400), (50, 100)]).next_after(100),
            150 * MILLI,
            "the second is twice as fast"
        );
        assert_eq!(after(&[(100, 40)]).next_after(100), 20 * MILLI, "a quarter is too little");
        assert_eq!(after(&[(100, 20)]).next_after(100), Duration::ZERO);
    }

    #[test]
    fn one_short_pass_is_forgotten_and_small_passes_do_not_count() {
        let mut pace = after(&[(100, 400), (100, 200)]);
        (0..20).for_each(|_| pace.pass_took(100, 100, 400 * MILLI));
        assert_eq!(pace.next_after(100), 300 * MILLI);
        pace.pass_took(1, 100, 2_000 * MILLI);
        pace.pass_took(100, 100, Duration::ZERO);
        assert_eq!(pace.next_after(100), 300 * MILLI);
    }
}
