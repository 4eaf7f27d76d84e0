//! Remembers which stores of inputs did not answer the jobs of which callers. A job that fetches holds its slot, so while a store is silent
//! for a caller, few of that caller's jobs fetch from it, and the others wait at the broker. Jobs of other callers fetch from it as
//! before, because what does not answer may be a single object.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ids::StoreIndex;
use crate::sizes::Size;

/// A store is silent if reading an object failed after so long. A store that fails sooner holds up nobody.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// After a silence none of the caller's jobs fetch from the store for as long as the silence was, and at least for this time. So the
/// caller's jobs have a place that exists once, such as that for large jobs, for half of the time at most.
const PAUSE_MIN: Duration = Duration::from_secs(10);

/// How long a silence is remembered after the pause: at least twice its length, so that the next one is noticed before.
const REMEMBERED_MIN: Duration = Duration::from_secs(60);

/// The part of a model's slots for the jobs of a caller that fetch from a silent store, at least one.
const FETCHING_PART: usize = 8;

/// The most pairs of a store and a caller that are remembered.
const SILENT_MAX: usize = 1024;

/// Jobs without a caller share one entry of each store.
type StoreAndCaller = (StoreIndex, Option<String>);

/// A store did not answer a caller's job.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// When that was noticed last.
    at: Instant,
    lasted: Duration,
}

impl Silence {
    fn pause(self) -> Duration {
        self.lasted.max(PAUSE_MIN)
    }

    fn is_pause(self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) < self.pause()
    }

    fn is_forgotten(self, now: Instant) -> bool {
        let remembered = self.lasted.saturating_mul(2).max(REMEMBERED_MIN);
        now.saturating_duration_since(self.at) >= self.pause().saturating_add(remembered)
    }
}

/// The stores that did not answer.
#[derive(Debug, Default)]
pub(crate) struct SilentStores(BTreeMap<StoreAndCaller, Silence>);

impl SilentStores {
    pub(crate) fn size(&self) -> Size {
        Size::of("silent stores", self.0.len(), SILENT_MAX)
    }

    /// How many of the caller's jobs may fetch from the store at a time; `None` if it is not silent. `slots`: those of their model.
    pub(crate) fn fetches_max(
        &self,
        store: StoreIndex,
        caller: Option<&str>,
        slots: u16,
        now: Instant,
    ) -> Option<usize> {
        let silence =
            self.0.get(&(store, caller.map(str::to_owned))).filter(|silence| !silence.is_forgotten(now))?;
        Some(if silence.is_pause(now) { 0 } else { Self::part(slots) })
    }

    /// How many of a caller's jobs may fetch from a silent store after the pause.
    pub(crate) fn part(slots: u16) -> usize {
        (usize::from(slots) / FETCHING_PART).max(1)
    }

    /// A read from the store failed after so long. Returns `None` if that is no silence, else whether the store was not known as silent.
    pub(crate) fn failed(
        &mut self,
        store: StoreIndex,
        caller: Option<&str>,
        lasted: Duration,
        now: Instant,
    ) -> Option<bool> {
        if lasted < SILENT_AFTER {
            return None;
        }
        self.0.retain(|_, silence| !silence.is_forgotten(now));
        let key = (store, caller.map(str::to_owned));
        let is_new = !self.0.contains_key(&key);
        if is_new && self.0.len() >= SILENT_MAX {
            self.forget_oldest();
        }
        self.0.insert(key, Silence { at: now, lasted });
        Some(is_new)
    }

    fn forget_oldest(&mut self) {
        let oldest = self.0.iter().min_by_key(|(_, silence)| silence.at).map(|(key, _)| key.clone());
        if let Some(key) = oldest {
            self.0.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: StoreIndex = StoreIndex(0);
    const SLOTS: u16 = 16;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn nobody_fetches_from_a_silent_store_for_a_while_and_then_a_part_of_the_slots_does() {
        let start = Instant::now();
        for (lasted, pause, remembered) in [(3, 10, 60), (30, 30, 60), (300, 300, 600)] {
            let mut stores = SilentStores::default();
            assert_eq!(stores.failed(STORE, Some("a"), seconds(lasted), start), Some(true));
            let after = |after| stores.fetches_max(STORE, Some("a"), SLOTS, start + seconds(after));
            assert_eq!([after(pause - 1), after(pause)], [Some(0), Some(2)], "{lasted}");
            assert_eq!(
                [after(pause + remembered - 1), after(pause + remembered)],
                [Some(2), None],
                "{lasted}"
            );
            assert_eq!(stores.fetches_max(STORE, Some("a"), 2, start + seconds(pause)), Some(1));
            // Another failure begins the pause anew.
            assert_eq!(stores.failed(STORE, Some("a"), seconds(3), start + seconds(pause)), Some(false));
            let now = start + seconds(pause + 9);
            assert_eq!(stores.fetches_max(STORE, Some("a"), SLOTS, now), Some(0));
        }
    }

    #[test]
    fn a_silence_concerns_one_caller_and_one_store() {
        let (mut stores, now) = (SilentStores::default(), Instant::now());
        stores.failed(STORE, Some("a"), seconds(30), now);
        stores.failed(StoreIndex(1), None, seconds(30), now);
        assert_eq!(stores.fetches_max(STORE, Some("a"), SLOTS, now), Some(0));
        assert_eq!(stores.fetches_max(StoreIndex(1), None, SLOTS, now), Some(0));
        for (store, caller) in [(0, Some("b")), (0, None), (1, Some("a"))] {
            assert_eq!(stores.fetches_max(StoreIndex(store), caller, SLOTS, now), None, "{store} {caller:?}");
        }
    }

    #[test]
    fn a_store_that_fails_at_once_is_not_silent() {
        let mut stores = SilentStores::default();
        let now = Instant::now();
        assert_eq!(stores.failed(STORE, None, seconds(1), now), None);
        assert_eq!(stores.fetches_max(STORE, None, SLOTS, now), None);
    }

    #[test]
    fn the_oldest_of_too_many_is_forgotten() {
        let (mut stores, start) = (SilentStores::default(), Instant::now());
        for number in 0..=SILENT_MAX {
            let now = start + Duration::from_millis(number as u64);
            stores.failed(STORE, Some(&number.to_string()), seconds(30), now);
        }
        assert_eq!(stores.size().entries, SILENT_MAX);
        let max = |number: usize| stores.fetches_max(STORE, Some(&number.to_string()), SLOTS, start);
        assert_eq!((max(0), max(1), max(SILENT_MAX)), (None, Some(0), Some(0)));
    }
}
