//! Messages that this process has dealt with, so that it knows them when they come again.

use std::collections::{HashMap, VecDeque};

/// How many are remembered: several times the most jobs that one lost connection can leave unacknowledged, at a few
/// dozen bytes each.
const REMEMBERED_MAX: usize = 16 * 1024;

/// A bounded memory of messages by their fingerprints, the oldest forgotten first.
#[derive(Debug, Default)]
pub struct Remembered {
    /// Each with the number of times, and when it was first remembered, as a number of its own.
    messages: HashMap<u64, (u32, u64)>,
    order: VecDeque<(u64, u64)>,
    last: u64,
}

impl Remembered {
    pub fn remember(&mut self, message: u64) {
        if let Some((times, _)) = self.messages.get_mut(&message) {
            *times = times.saturating_add(1);
            return;
        }
        self.last += 1;
        self.messages.insert(message, (1, self.last));
        self.order.push_back((message, self.last));
        if self.order.len() > REMEMBERED_MAX
            && let Some((oldest, number)) = self.order.pop_front()
            // Not what was forgotten and remembered anew.
            && self.messages.get(&oldest).is_some_and(|(_, of)| *of == number)
        {
            self.messages.remove(&oldest);
        }
    }

    /// Takes in what another one remembers.
    pub fn absorb(&mut self, other: Self) {
        let Self { messages, order, .. } = other;
        let kept = order
            .into_iter()
            .filter(|(message, number)| messages.get(message).is_some_and(|(_, of)| of == number));
        kept.for_each(|(message, _)| self.remember(message));
    }

    pub fn contains(&self, message: u64) -> bool {
        self.messages.contains_key(&message)
    }

    /// How often it was remembered.
    pub fn times(&self, message: u64) -> u32 {
        self.messages.get(&message).map_or(0, |(times, _)| *times)
    }

    pub fn forget(&mut self, message: u64) {
        // What is left of it in `order` costs a place until its turn comes, and nothing else.
        self.messages.remove(&message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_the_newest_and_no_more() {
        let mut remembered = Remembered::default();
        for message in 0..REMEMBERED_MAX as u64 + 10 {
            remembered.remember(message);
            remembered.remember(message);
        }
        assert!(!remembered.contains(9));
        assert!(remembered.contains(10) && remembered.contains(REMEMBERED_MAX as u64 + 9));
        assert_eq!((remembered.messages.len(), remembered.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
    }

    #[test]
    fn what_is_absorbed_is_the_newest() {
        let (mut one, mut other) = (Remembered::default(), Remembered::default());
        (0..REMEMBERED_MAX as u64).for_each(|message| one.remember(message));
        [7, u64::MAX].into_iter().for_each(|message| other.remember(message));
        other.remember(5);
        other.forget(5);
        one.absorb(other);
        assert!(!one.contains(0) && one.contains(7) && one.contains(u64::MAX));
        assert_eq!((one.times(7), one.times(5)), (2, 1));
    }

    #[test]
    fn forgetting_and_remembering_anew_stays_bounded() {
        let mut remembered = Remembered::default();
        for _ in 0..3 * REMEMBERED_MAX {
            remembered.remember(7);
            remembered.remember(7);
            assert_eq!(remembered.times(7), 2);
            remembered.forget(7);
            assert!(!remembered.contains(7));
        }
        assert!(remembered.order.len() <= REMEMBERED_MAX);
    }
}
