//! Adapts a model's slots to the memory, with hysteresis: a changed prefetch takes effect only when unacknowledged jobs are settled, so
//! slots follow only a lasting change. Pure.

use std::time::{Duration, Instant};

/// How long fewer jobs must fit before slots shrink. Passes follow the free memory at once; slots only decide how many jobs wait here
/// instead of where another worker could take them.
const SHRINK_AFTER: Duration = Duration::from_secs(2);

/// How long more jobs must fit before slots grow. Between two peaks of another process, memory is free for seconds only.
const GROW_AFTER: Duration = Duration::from_secs(10);

/// The least change of the slots, as a part of them.
const GROWTH_MIN: u16 = 4;
const SHRINKING_MIN: u16 = 8;

/// A model's slots over time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotController {
    slots: u16,
    /// Since when a number other than `slots` fits, and the number closest to `slots` in that time.
    moving: Option<(Instant, u16)>,
}

impl SlotController {
    pub(crate) fn new(slots: u16) -> Self {
        Self { slots, moving: None }
    }

    /// The current slots; zero while not even one item fits.
    pub(crate) fn slots(&self) -> u16 {
        self.slots
    }

    /// Raises the slots at once.
    pub(crate) fn raise(&mut self, slots: u16) {
        if slots > self.slots {
            *self = Self::new(slots);
        }
    }

    /// Adds how many jobs fit now. Returns the new slots if they change.
    pub(crate) fn observe(&mut self, fitting: u16, now: Instant) -> Option<u16> {
        let shrinking = fitting < self.slots && fitting <= self.slots - (self.slots / SHRINKING_MIN).max(1);
        let growing = fitting >= self.slots.saturating_add((self.slots / GROWTH_MIN).max(1));
        if !shrinking && !growing {
            self.moving = None;
            return None;
        }
        let (since, closest) = match self.moving {
            Some((since, closest)) if (closest < self.slots) == shrinking => {
                (since, if shrinking { closest.max(fitting) } else { closest.min(fitting) })
            }
            _ => (now, fitting),
        };
        self.moving = Some((since, closest));
        // A model without slots gets them back soon.
        let after = if shrinking || self.slots == 0 { SHRINK_AFTER } else { GROW_AFTER };
        if now.duration_since(since) < after {
            return None;
        }
        *self = Self::new(closest);
        Some(closest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds one value a second. Returns the changes with their seconds.
    fn moves(slots: u16, fitting: impl IntoIterator<Item = u16>) -> Vec<(u64, u16)> {
        let start = Instant::now();
        let mut slots = SlotController::new(slots);
        let observed = fitting.into_iter().zip(0..).filter_map(|(fitting, second)| {
            Some((second, slots.observe(fitting, start + Duration::from_secs(second))?))
        });
        observed.collect()
    }

    #[test]
    fn as_many_slots_as_before_do_not_delay_a_change() {
        let start = Instant::now();
        let mut slots = SlotController::new(8);
        assert_eq!(slots.observe(4, start), None);
        slots.raise(8);
        assert_eq!(slots.observe(4, start + SHRINK_AFTER), Some(4));
    }

    #[test]
    fn slots_shrink_soon_and_grow_late() {
        assert_eq!(moves(8, [4; 5]), [(2, 4)]);
        assert_eq!(moves(8, [10; 15]), [(10, 10)]);
        assert_eq!(moves(8, [0; 5]), [(2, 0)]);
        assert_eq!(moves(0, [1; 5]), [(2, 1)]);
        // Changes that are too small.
        assert_eq!(moves(64, [57; 30]), []);
        assert_eq!(moves(64, [56; 5]), [(2, 56)]);
        assert_eq!(moves(8, [9; 30]), []);
        assert_eq!(moves(1, [2; 15]), [(10, 2)]);
    }

    #[test]
    fn memory_that_comes_and_goes_moves_no_slots() {
        assert_eq!(moves(8, (0..100).map(|n| if n % 2 == 0 { 4 } else { 8 })), []);
        assert_eq!(moves(8, (0..100).map(|n| if n % 5 == 0 { 8 } else { 20 })), []);
        assert_eq!(moves(8, (0..100).map(|n| if n % 2 == 0 { 4 } else { 20 })), []);
    }

    #[test]
    fn slots_move_to_the_figure_that_held_all_the_time() {
        assert_eq!(moves(8, [2, 5, 3]), [(2, 5)]);
        assert_eq!(moves(8, [20, 12, 20, 20, 20, 20, 20, 20, 20, 20, 20]), [(10, 12)]);
    }
}
