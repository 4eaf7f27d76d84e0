//! Learns the largest passes that fit, from passes that ran out of memory although no other process used the device. A size that failed is
//! not tried again, even after a restart.
//!
//! For each model, device and length bucket it keeps the largest pass that fitted and the smallest that did not, in bytes as the engine
//! plans them. Passes stay within the limit, which grows back in small steps. Pure: the shell keeps the file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// So many passes near a limit must fit before it is raised, because a step too far causes an out-of-memory.
const PASSES_PER_STEP: u32 = 32;

/// A raise moves the limit by a `STEP`th of the gap to the size that failed. Once the gap is a `GAP_MIN`th of that size, the limit is not
/// raised any more: the rest is not worth another out-of-memory.
const STEP: u64 = 8;
const GAP_MIN: u64 = 16;

/// After an hour without an out-of-memory the limit is relaxed slightly: the shortage may have had a reason that is gone.
const RELAX_AFTER_MS: u64 = 3_600_000;

/// Limits that are kept; a worker has a few models with some ten buckets each.
pub const LIMITS_MAX: usize = 1024;

/// Model, device and sizes that a limit applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LimitKey {
    pub model: String,
    pub device: String,
    /// Bytes of the device. A device of the same name and another size has limits of its own.
    pub total: u64,
    /// Passes whose longest item costs at most this, and more than half of it.
    pub longest_max: usize,
}

/// What is known for a key. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedLimit {
    /// The largest pass that fitted; 0 while none is known.
    pub fitted: u64,
    /// The smallest pass that did not fit.
    pub failed: u64,
    /// When `failed` was last set, in Unix milliseconds.
    pub failed_at_ms: u64,
    /// The most bytes that a pass may take.
    pub limit: u64,
    /// Passes near the limit that fitted since the limit last moved.
    #[serde(default)]
    near: u32,
}

impl LearnedLimit {
    fn new(failed: u64, now_ms: u64) -> Self {
        Self { fitted: 0, failed, failed_at_ms: now_ms, limit: failed / 2, near: 0 }
    }

    fn ran_out(&mut self, bytes: u64, now_ms: u64) {
        self.failed = self.failed.min(bytes);
        self.failed_at_ms = now_ms;
        // The size fitted before by chance, since it fails now.
        self.fitted = if self.fitted < self.failed { self.fitted } else { 0 };
        self.limit = self.fitted.max(self.failed / 2);
        self.near = 0;
    }

    /// Records a pass that fitted. True if the limit moved.
    fn fitted(&mut self, bytes: u64, now_ms: u64) -> bool {
        self.fitted = self.fitted.max(bytes);
        // The clock was ahead at the failure and was set back since.
        self.failed_at_ms = self.failed_at_ms.min(now_ms);
        if now_ms.saturating_sub(self.failed_at_ms) > RELAX_AFTER_MS {
            self.failed = self.failed.saturating_add(self.failed / STEP);
            self.failed_at_ms = now_ms;
        }
        let gap = self.failed.saturating_sub(self.limit);
        if bytes < self.limit - self.limit / STEP || gap <= self.failed / GAP_MIN {
            return false;
        }
        self.near += 1;
        if self.near < PASSES_PER_STEP {
            return false;
        }
        self.near = 0;
        self.limit += gap / STEP;
        true
    }
}

/// The limits of one device, and those of other devices that share the file.
#[derive(Clone, Debug, Default)]
pub struct LearnedLimits {
    device: String,
    total: u64,
    all: BTreeMap<LimitKey, LearnedLimit>,
}

impl LearnedLimits {
    /// The limits for a device of `total` bytes. `all`: what earlier processes learned, including other devices.
    pub fn new(device: &str, total: u64, all: BTreeMap<LimitKey, LearnedLimit>) -> Self {
        Self { device: device.to_owned(), total, all }
    }

    /// The most bytes of a pass whose longest item costs so much.
    pub fn limit(&self, model: &str, longest: usize) -> u64 {
        if self.all.is_empty() {
            return u64::MAX;
        }
        self.all.get(&self.key(model, longest)).map_or(u64::MAX, |limit| limit.limit)
    }

    /// Records a pass that ran out of memory while it had the device to itself. The limits must be saved then.
    pub(crate) fn ran_out(&mut self, model: &str, longest: usize, bytes: u64, now_ms: u64) {
        let key = self.key(model, longest);
        if !self.all.contains_key(&key) {
            keep_newest(&mut self.all, LIMITS_MAX - 1);
        }
        let limit = self.all.entry(key).or_insert_with(|| LearnedLimit::new(bytes, now_ms));
        limit.ran_out(bytes, now_ms);
        let limit = limit.limit;
        tracing::info!(
            model,
            longest,
            bytes,
            limit,
            "learned limit lowered for passes with items of this length"
        );
    }

    /// A pass fitted. True if the limit moved.
    pub(crate) fn fitted(&mut self, model: &str, longest: usize, bytes: u64, now_ms: u64) -> bool {
        if self.all.is_empty() {
            return false;
        }
        let key = self.key(model, longest);
        let Some(limit) = self.all.get_mut(&key) else { return false };
        let moved = limit.fitted(bytes, now_ms);
        if moved {
            let limit = limit.limit;
            tracing::debug!(
                model,
                longest,
                limit,
                "learned limit raised for passes with items of this length"
            );
        }
        moved
    }

    /// What is known of this device's models.
    pub fn known(&self) -> impl Iterator<Item = (&LimitKey, &LearnedLimit)> {
        self.all.iter().filter(|(key, _)| key.device == self.device && key.total == self.total)
    }

    fn key(&self, model: &str, longest: usize) -> LimitKey {
        let longest_max = longest.next_power_of_two();
        LimitKey { model: model.to_owned(), device: self.device.clone(), total: self.total, longest_max }
    }
}

/// Drops the limits whose failures are the longest ago, until at most `most` are left. What was dropped is learned again if it still holds.
pub fn keep_newest(limits: &mut BTreeMap<LimitKey, LearnedLimit>, most: usize) {
    while limits.len() > most {
        let oldest = limits.iter().min_by_key(|(_, limit)| limit.failed_at_ms).map(|(key, _)| key.clone());
        let Some(oldest) = oldest else { return };
        limits.remove(&oldest);
        let LimitKey { model, device, longest_max, .. } = oldest;
        tracing::info!(
            model,
            device,
            longest_max,
            "dropped the learned limit of the oldest failure, to make room"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn none_yet() -> LearnedLimits {
        LearnedLimits::new("cpu", 1000 * MIB, BTreeMap::new())
    }

    #[test]
    fn a_size_that_ran_out_of_memory_is_not_tried_again() {
        let mut limits = none_yet();
        assert_eq!(limits.limit("m", 100), u64::MAX);
        limits.ran_out("m", 100, 80 * MIB, 0);
        assert_eq!(limits.limit("m", 100), 40 * MIB);
        // The same bucket, then other buckets, then another model.
        assert_eq!(limits.limit("m", 65), 40 * MIB);
        assert_eq!(limits.limit("m", 64), u64::MAX);
        assert_eq!(limits.limit("m", 129), u64::MAX);
        assert_eq!(limits.limit("n", 100), u64::MAX);
        limits.ran_out("m", 100, 30 * MIB, 0);
        assert_eq!(limits.limit("m", 100), 15 * MIB);
    }

    #[test]
    fn a_size_that_fitted_stays_the_limit_until_it_runs_out_of_memory() {
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, 0);
        limits.fitted("m", 100, 60 * MIB, 0);
        limits.ran_out("m", 100, 70 * MIB, 0);
        assert_eq!(limits.limit("m", 100), 60 * MIB);
        limits.ran_out("m", 100, 60 * MIB, 0);
        assert_eq!(limits.limit("m", 100), 30 * MIB);
    }

    #[test]
    fn limits_grow_back_in_small_steps_and_stop_short_of_what_failed() {
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, 0);
        let mut before = limits.limit("m", 100);
        for _ in 0..PASSES_PER_STEP * 100 {
            let limit = limits.limit("m", 100);
            assert!(limit >= before && limit - before <= 80 * MIB / STEP);
            before = limit;
            limits.fitted("m", 100, limit, 0);
        }
        let gap = 80 * MIB - before;
        let most = 80 * MIB / GAP_MIN;
        assert!((most - most / STEP..=most).contains(&gap), "{gap}");
        // Small passes that fit do not raise the limit of large ones.
        limits.ran_out("m", 100, 60 * MIB, 0);
        let held = limits.limit("m", 100);
        for _ in 0..1000 {
            limits.fitted("m", 100, MIB, 0);
        }
        assert_eq!(limits.limit("m", 100), held);
    }

    #[test]
    fn a_limit_grows_by_an_eighth_of_the_gap_after_32_passes_that_come_near_it() {
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, 0);
        // An eighth below the limit.
        let near = 35 * MIB;
        assert!((1..PASSES_PER_STEP).all(|_| !limits.fitted("m", 100, near, 0)));
        assert!(!limits.fitted("m", 100, near - 1, 0), "a smaller pass does not count");
        assert_eq!(limits.limit("m", 100), 40 * MIB);
        assert!(limits.fitted("m", 100, near, 0));
        assert_eq!(limits.limit("m", 100), 45 * MIB);
    }

    #[test]
    fn a_full_list_forgets_the_oldest_failure_for_a_new_one() {
        let mut limits = none_yet();
        let names: Vec<_> = (0..LIMITS_MAX as u64).map(|model| model.to_string()).collect();
        (1..).zip(&names).for_each(|(at_ms, model)| limits.ran_out(model, 1, 80 * MIB, at_ms));
        // The oldest but one is now the oldest.
        limits.ran_out("0", 1, 20 * MIB, 5000);
        // A clock that is behind does not make the new one the oldest.
        limits.ran_out("other", 1, 80 * MIB, 0);
        let known = ["0", "1", "2", "other"].map(|model| limits.limit(model, 1) / MIB);
        assert_eq!(known, [10, u64::MAX / MIB, 40, 40]);
        assert_eq!(limits.known().count(), LIMITS_MAX);
    }

    #[test]
    fn only_limits_of_this_device_with_this_much_memory_are_reported() {
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, 0);
        for (device, total, known) in [("cpu", 1000, 1), ("cpu", 2000, 0), ("cuda:0", 1000, 0)] {
            let of_device = LearnedLimits::new(device, total * MIB, limits.all.clone());
            assert_eq!(of_device.known().count(), known, "{device} with {total} MiB");
        }
    }

    #[test]
    fn the_limit_of_an_old_failure_is_relaxed() {
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, 0);
        for hour in 1..=50 {
            for _ in 0..PASSES_PER_STEP * 10 {
                let limit = limits.limit("m", 100);
                limits.fitted("m", 100, limit, hour * (RELAX_AFTER_MS + 1));
            }
        }
        assert!(limits.limit("m", 100) > 1000 * MIB);
    }

    #[test]
    fn a_clock_that_was_ahead_for_a_while_does_not_keep_a_limit_for_ever() {
        let year = 365 * 24 * RELAX_AFTER_MS;
        let mut limits = none_yet();
        limits.ran_out("m", 100, 80 * MIB, year);
        // The clock was set back, and is right again.
        limits.fitted("m", 100, MIB, 1000);
        let failed =
            |limits: &LearnedLimits| limits.known().map(|(_, limit)| limit.failed).collect::<Vec<_>>();
        assert_eq!(failed(&limits), [80 * MIB]);
        limits.fitted("m", 100, MIB, 1000 + RELAX_AFTER_MS);
        assert_eq!(failed(&limits), [80 * MIB], "not before an hour is over");
        limits.fitted("m", 100, MIB, 1000 + RELAX_AFTER_MS + 1);
        assert_eq!(failed(&limits), [90 * MIB]);
        // A clock that is a year ahead relaxes the limit only once.
        limits.fitted("m", 100, MIB, year);
        limits.fitted("m", 100, MIB, year + 1);
        assert_eq!(failed(&limits), [90 * MIB + 90 * MIB / STEP]);
    }

    proptest! {
        /// A device with room for `truth` bytes: after some time no pass runs out, whatever sizes are wanted.
        #[test]
        fn running_out_ends(truth in MIB..500 * MIB, wanted in 1u64..1000) {
            let mut limits = none_yet();
            let mut ran_out = 0;
            for _ in 0..20_000 {
                let bytes = (wanted * MIB).min(limits.limit("m", 100));
                if bytes > truth {
                    limits.ran_out("m", 100, bytes, 0);
                    ran_out += 1;
                } else {
                    limits.fitted("m", 100, bytes, 0);
                }
            }
            prop_assert!(ran_out <= 40, "{ran_out} times");
            let held = (wanted * MIB).min(limits.limit("m", 100));
            prop_assert!(held <= truth && held * 10 >= truth.min(wanted * MIB) * 8, "{held} of {truth}");
        }
    }
}
