//! A bounded memory of messages that this process settled, to recognise them when they are redelivered.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::ids::Fingerprint;
use crate::sizes::Size;

/// How many messages are remembered: several times the most jobs that one lost connection can leave unacknowledged, at a few dozen bytes
/// each.
const REMEMBERED_MAX: usize = 16 * 1024;

/// For how long a message is remembered, without the time between sessions. A broker notices a lost connection after two heartbeats, at
/// most two minutes, and then redelivers. Identical bytes that come later than this are a new job.
const REMEMBERED_FOR: Duration = Duration::from_secs(300);

/// A bounded memory of messages by their fingerprints, the oldest forgotten first.
#[derive(Debug, Default)]
pub(crate) struct DedupCache {
    known: HashMap<Fingerprint, Entry>,
    /// In the order in which they were first remembered, each with its entry's number.
    order: VecDeque<(Fingerprint, u64)>,
    last: u64,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    times: u32,
    /// Distinguishes this entry from an earlier, forgotten entry of the same message.
    number: u64,
    at: Instant,
}

impl DedupCache {
    pub(crate) fn remember(&mut self, message: Fingerprint, at: Instant) {
        if let Some(entry) = self.known.get_mut(&message) {
            (entry.times, entry.at) = (entry.times.saturating_add(1), at);
            return;
        }
        self.last += 1;
        self.known.insert(message, Entry { times: 1, number: self.last, at });
        self.order.push_back((message, self.last));
        if self.order.len() > REMEMBERED_MAX
            && let Some((oldest, number)) = self.order.pop_front()
            // If the numbers differ, the message was forgotten and remembered again: keep the new entry.
            && self.known.get(&oldest).is_some_and(|entry| entry.number == number)
        {
            self.known.remove(&oldest);
        }
    }

    pub(crate) fn size(&self) -> Size {
        Size::of("remembered messages", self.order.len().max(self.known.len()), REMEMBERED_MAX)
    }

    /// Everything is remembered for so much longer.
    pub(crate) fn postpone(&mut self, time: Duration) {
        self.known.values_mut().for_each(|entry| entry.at += time);
    }

    /// Takes over what another one remembers.
    pub(crate) fn absorb(&mut self, other: Self) {
        let Self { known, order, .. } = other;
        for (message, number) in order {
            if let Some(entry) = known.get(&message).filter(|entry| entry.number == number) {
                self.remember(message, entry.at);
            }
        }
    }

    /// How often a message was remembered lately.
    pub(crate) fn times(&self, message: Fingerprint, now: Instant) -> u32 {
        let entry = self.known.get(&message);
        entry
            .filter(|entry| now.saturating_duration_since(entry.at) <= REMEMBERED_FOR)
            .map_or(0, |entry| entry.times)
    }

    pub(crate) fn contains(&self, message: Fingerprint, now: Instant) -> bool {
        self.times(message, now) > 0
    }

    pub(crate) fn forget(&mut self, message: Fingerprint) {
        // The entry in `order` stays until it is the oldest.
        self.known.remove(&message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u64 = REMEMBERED_MAX as u64;

    #[test]
    fn remembers_the_newest_and_no_more() {
        let (mut cache, now) = (DedupCache::default(), Instant::now());
        for message in 0..MAX + 10 {
            cache.remember(Fingerprint(message), now);
            cache.remember(Fingerprint(message), now);
        }
        assert!(!cache.contains(Fingerprint(9), now));
        assert!(cache.contains(Fingerprint(10), now) && cache.contains(Fingerprint(MAX + 9), now));
        assert_eq!((cache.known.len(), cache.order.len()), (REMEMBERED_MAX, REMEMBERED_MAX));
    }

    #[test]
    fn absorbing_keeps_the_newest() {
        let (mut one, mut other, now) = (DedupCache::default(), DedupCache::default(), Instant::now());
        (0..MAX).for_each(|message| one.remember(Fingerprint(message), now));
        [7, u64::MAX].into_iter().for_each(|message| other.remember(Fingerprint(message), now));
        other.remember(Fingerprint(5), now);
        other.forget(Fingerprint(5));
        one.absorb(other);
        assert!(!one.contains(Fingerprint(0), now) && one.contains(Fingerprint(u64::MAX), now));
        assert_eq!((one.times(Fingerprint(7), now), one.times(Fingerprint(5), now)), (2, 1));
    }

    #[test]
    fn forgetting_and_remembering_again_stays_bounded() {
        let (mut cache, now) = (DedupCache::default(), Instant::now());
        for _ in 0..3 * REMEMBERED_MAX {
            cache.remember(Fingerprint(7), now);
            cache.remember(Fingerprint(7), now);
            assert_eq!(cache.times(Fingerprint(7), now), 2);
            cache.forget(Fingerprint(7));
            assert!(!cache.contains(Fingerprint(7), now));
        }
        assert!(cache.order.len() <= REMEMBERED_MAX);
    }

    #[test]
    fn an_entry_expires() {
        let (mut cache, now) = (DedupCache::default(), Instant::now());
        cache.remember(Fingerprint(1), now);
        assert!(cache.contains(Fingerprint(1), now + REMEMBERED_FOR));
        assert!(!cache.contains(Fingerprint(1), now + REMEMBERED_FOR + Duration::from_millis(1)));
    }
}
