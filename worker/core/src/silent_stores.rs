//! Remembers which stores did not answer the jobs of which callers. Such a job holds its slot until the store's time limit, so further jobs of
//! the caller that refer to the store wait at the broker, and only one at a time tries the store. Jobs of other callers may fetch from it as
//! before: what does not answer may be a single object.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::ids::StoreIndex;
use crate::sizes::Size;

/// A failed fetch counts as silence if it took so long. A store that fails sooner holds up nobody.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// How long no job of the caller tries the store after a silence. Each further silence doubles the time, up to [`LASTS_MAX`]. Jobs wait for
/// nearly half an hour before they are dead-lettered, which is long enough to notice that a store answers again.
const LASTS: Duration = Duration::from_secs(10);
const LASTS_MAX: Duration = Duration::from_secs(120);

/// How much longer one job at a time tries the store. This must be longer than a job may wait for its try and then fetch.
const REMEMBERED: Duration = Duration::from_secs(600);

/// The most pairs of a store and a caller that are remembered.
const SILENT_MAX: usize = 1024;

/// Jobs without a caller share one entry of each store.
type StoreAndCaller = (StoreIndex, Option<String>);

/// A store did not answer a caller's job.
#[derive(Clone, Copy, Debug)]
struct Silence {
    /// When that was noticed last.
    at: Instant,
    /// For how long no job tries the store.
    lasts: Duration,
}

impl Silence {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= self.lasts
    }

    fn is_forgotten(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= self.lasts.saturating_add(REMEMBERED)
    }

    /// The next silence. Fetches that were under way together count as one.
    fn next(self, now: Instant) -> Self {
        let lasts = if self.is_over(now) { self.lasts.saturating_mul(2).min(LASTS_MAX) } else { self.lasts };
        Self { at: now, lasts }
    }
}

/// The stores that did not answer.
#[derive(Debug, Default)]
pub(crate) struct SilentStores(BTreeMap<StoreAndCaller, Silence>);

impl SilentStores {
    pub(crate) fn size(&self) -> Size {
        Size::of("silent stores", self.0.len(), SILENT_MAX)
    }

    /// How many jobs of the caller may fetch from the store at a time; `None` is any number.
    pub(crate) fn tries(&self, store: StoreIndex, caller: Option<&str>, now: Instant) -> Option<usize> {
        let silence = self.0.get(&(store, caller.map(str::to_owned)))?;
        (!silence.is_forgotten(now)).then(|| usize::from(silence.is_over(now)))
    }

    /// These stores answered a job of the caller.
    pub(crate) fn answered(&mut self, stores: &[StoreIndex], caller: Option<&str>) {
        for store in stores {
            self.0.remove(&(*store, caller.map(str::to_owned)));
        }
    }

    /// Fetching from these stores failed after so long. Returns whether the caller's jobs wait for one of them only from now on.
    pub(crate) fn failed(
        &mut self,
        stores: &[StoreIndex],
        caller: Option<&str>,
        took: Duration,
        now: Instant,
    ) -> bool {
        if took < SILENT_AFTER {
            return false;
        }
        self.0.retain(|_, silence| !silence.is_forgotten(now));
        let mut is_new = false;
        for store in stores {
            let key = (*store, caller.map(str::to_owned));
            let known = self.0.get(&key).copied();
            is_new |= known.is_none();
            if known.is_none() && self.0.len() >= SILENT_MAX {
                self.forget_oldest();
            }
            self.0.insert(key, known.map_or(Silence { at: now, lasts: LASTS }, |silence| silence.next(now)));
        }
        is_new
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
    const SLOW: Duration = Duration::from_secs(30);

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn nobody_tries_a_silent_store_for_a_while_and_then_one_job_does() {
        let (mut stores, start) = (SilentStores::default(), Instant::now());
        assert!(stores.failed(&[STORE], Some("a"), SLOW, start));
        // In flight together with the first.
        assert!(!stores.failed(&[STORE], Some("a"), SLOW, start + seconds(9)));
        let tries = |stores: &SilentStores, after| stores.tries(STORE, Some("a"), start + seconds(after));
        assert_eq!(
            [tries(&stores, 18), tries(&stores, 19), tries(&stores, 618)],
            [Some(0), Some(1), Some(1)]
        );
        assert_eq!(tries(&stores, 619), None, "it is forgotten");
        assert!(!stores.failed(&[STORE], Some("a"), SLOW, start + seconds(49)));
        assert_eq!([tries(&stores, 68), tries(&stores, 69)], [Some(0), Some(1)], "the time doubles");
        for _ in 0..10 {
            let over = (69..).map(|after| start + seconds(after));
            let now = over.into_iter().find(|now| stores.tries(STORE, Some("a"), *now) == Some(1)).unwrap();
            stores.failed(&[STORE], Some("a"), SLOW, now);
        }
        let silence = stores.0.values().next().unwrap();
        assert_eq!(silence.lasts, LASTS_MAX);
        stores.answered(&[STORE], Some("a"));
        assert_eq!(tries(&stores, 69), None);
    }

    #[test]
    fn a_silence_concerns_one_caller_and_one_store() {
        let (mut stores, now) = (SilentStores::default(), Instant::now());
        stores.failed(&[STORE], Some("a"), SLOW, now);
        stores.failed(&[StoreIndex(1)], None, SLOW, now);
        assert_eq!(stores.tries(STORE, Some("a"), now), Some(0));
        assert_eq!(stores.tries(StoreIndex(1), None, now), Some(0));
        for (store, caller) in [(0, Some("b")), (0, None), (1, Some("a"))] {
            assert_eq!(stores.tries(StoreIndex(store), caller, now), None, "{store} {caller:?}");
        }
        stores.answered(&[STORE], Some("b"));
        assert_eq!(stores.tries(STORE, Some("a"), now), Some(0), "another caller's objects say nothing");
    }

    #[test]
    fn a_store_that_fails_at_once_is_not_silent() {
        let mut stores = SilentStores::default();
        let now = Instant::now();
        assert!(!stores.failed(&[STORE], None, seconds(1), now));
        assert_eq!(stores.tries(STORE, None, now), None);
    }

    #[test]
    fn the_oldest_of_too_many_is_forgotten() {
        let (mut stores, start) = (SilentStores::default(), Instant::now());
        for number in 0..=SILENT_MAX {
            let now = start + Duration::from_millis(number as u64);
            stores.failed(&[STORE], Some(&number.to_string()), SLOW, now);
        }
        assert_eq!(stores.size().entries, SILENT_MAX);
        let tries = |number: usize| stores.tries(STORE, Some(&number.to_string()), start);
        assert_eq!((tries(0), tries(1), tries(SILENT_MAX)), (None, Some(0), Some(0)));
    }
}
