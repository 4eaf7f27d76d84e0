//! Estimates the device memory that a pass needs beyond its model's weights: as declared, or as learned from passes.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

/// Buckets for each doubling of the cost: neighbours differ by a fifth.
const BUCKETS_PER_DOUBLING: f64 = 4.0;

/// Peaks that a bucket keeps. With a hundred, the 99th percentile is a peak that was measured.
const PEAKS_MAX: usize = 100;

/// Peaks from which a bucket counts, and no longer the declaration.
const PEAKS_BELIEVED: usize = 3;

/// How often a bucket that has [`PEAKS_BELIEVED`] is measured again: once in this many passes. A measured pass is slower, because
/// cached memory is returned first.
const MEASURED_EVERY: u64 = 64;

/// After so many passes in a row whose measurement told nothing, a bucket is measured so seldom, too.
const MISSED_MAX: u32 = 16;

/// The need is estimated for costs up to this many times the largest measured one. A pass with a larger cost runs alone.
const EXTRAPOLATED: f64 = 2.0;

/// Added to what was learned: allocators round up, and fragments are lost.
const MARGIN: f64 = 1.05;

/// Loads that are remembered.
const LOADS_MAX: usize = 4;

/// Buckets of a model: 128 doublings' worth, more than there are sensible costs.
const BUCKETS_MAX: usize = 512;

/// What a pass needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    Bytes(u64),
    /// Unknown: the pass has the whole device.
    Unknown,
}

/// What the configuration declares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Declared {
    pub bytes_per_unit: f64,
}

/// What is known of a model's passes on one device. It is serialised as it is, and kept with the learned limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Learned {
    /// By bucket of cost.
    buckets: BTreeMap<i32, Bucket>,
    /// Bytes that the process took by being loaded, the newest last.
    #[serde(default)]
    loads: VecDeque<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Bucket {
    /// The newest, in bytes.
    peaks: VecDeque<u64>,
    /// Passes since the last that was measured.
    #[serde(default)]
    since: u64,
    /// Measurements since then that told nothing.
    #[serde(skip)]
    missed: u32,
}

impl Bucket {
    /// The 99th percentile.
    fn need(&self) -> u64 {
        let mut peaks: Vec<u64> = self.peaks.iter().copied().collect();
        peaks.sort_unstable();
        let at = (peaks.len() * 99).div_ceil(100).saturating_sub(1);
        peaks.get(at).copied().unwrap_or(0)
    }
}

impl Learned {
    /// What a pass of this cost needs. A larger pass never needs less.
    pub fn need(&self, cost: f64, declared: Option<Declared>) -> Need {
        let by_declaration = declared.map(|declared| bytes(cost * declared.bytes_per_unit));
        if !cost.is_finite() {
            return Need::Unknown;
        }
        let own = bucket(cost);
        let believed = || self.buckets.iter().filter(|(_, bucket)| bucket.peaks.len() >= PEAKS_BELIEVED);
        let smaller = believed().filter(|(at, _)| **at <= own).map(|(_, bucket)| bucket.need()).max();
        let larger = believed().find(|(at, _)| **at >= own);
        let learned = match (smaller, larger) {
            // Between measured costs the estimate is that of the larger one, which is safe. The maximum makes it grow with the
            // cost.
            (smaller, Some((_, bucket))) => Some(smaller.unwrap_or(0).max(bucket.need())),
            (Some(smaller), None) => {
                let last = believed().next_back().map_or(own, |(at, _)| *at);
                let ratio = cost / top(last);
                (ratio <= EXTRAPOLATED).then(|| bytes(smaller as f64 * ratio.max(1.0)))
            }
            (None, None) => None,
        };
        match (learned, by_declaration) {
            (Some(learned), _) => Need::Bytes(bytes(learned as f64 * MARGIN)),
            (None, Some(declared)) => Need::Bytes(declared),
            (None, None) => Need::Unknown,
        }
    }

    /// Measured needs, by ascending cost: a cost, and what passes of at most that cost need.
    pub fn known(&self) -> Vec<(f64, u64)> {
        let believed = self.buckets.iter().filter(|(_, bucket)| bucket.peaks.len() >= PEAKS_BELIEVED);
        let need = |cost| match self.need(cost, None) {
            Need::Bytes(bytes) => Some((cost, bytes)),
            Need::Unknown => None,
        };
        believed.filter_map(|(at, _)| need(top(*at))).collect()
    }

    /// Whether to measure the next pass of this cost. Counts that pass.
    pub fn should_measure(&mut self, cost: f64) -> bool {
        if !cost.is_finite() || self.buckets.len() >= BUCKETS_MAX && !self.buckets.contains_key(&bucket(cost))
        {
            return false;
        }
        let bucket = self.buckets.entry(bucket(cost)).or_default();
        bucket.since += 1;
        let is_unknown = bucket.peaks.len() < PEAKS_BELIEVED && bucket.missed < MISSED_MAX;
        is_unknown || bucket.since >= MEASURED_EVERY
    }

    /// The memory of a pass that was to be measured could not be: where the device does not report what processes hold, something else moved.
    pub fn missed(&mut self, cost: f64) {
        let Some(bucket) = self.buckets.get_mut(&bucket(cost)) else { return };
        bucket.missed = bucket.missed.saturating_add(1);
        if bucket.missed >= MISSED_MAX {
            bucket.since = 0;
        }
    }

    /// Records the memory of a pass.
    pub fn took(&mut self, cost: f64, peak: u64) {
        if !cost.is_finite() {
            return;
        }
        let bucket = self.buckets.entry(bucket(cost)).or_default();
        (bucket.since, bucket.missed) = (0, 0);
        if bucket.peaks.len() >= PEAKS_MAX {
            bucket.peaks.pop_front();
        }
        bucket.peaks.push_back(peak);
    }

    /// Makes the next pass of each cost a measured one, because the process has changed.
    pub fn measure_again(&mut self) {
        self.buckets.values_mut().for_each(|bucket| bucket.since = MEASURED_EVERY);
    }

    /// Records the memory of a loaded process.
    pub fn loaded(&mut self, bytes: u64) {
        if self.loads.len() >= LOADS_MAX {
            self.loads.pop_front();
        }
        self.loads.push_back(bytes);
    }

    /// Corrects the newest record of a load that said `bytes`, which counted memory of others.
    pub fn load_was(&mut self, bytes: u64, corrected: u64) {
        if let Some(load) = self.loads.iter_mut().rev().find(|load| **load == bytes) {
            *load = corrected;
        }
    }

    /// The least that a process took when it was loaded, of the last few times.
    pub fn least_load(&self) -> Option<u64> {
        self.loads.iter().copied().min()
    }

    /// What a process takes when it is loaded: the most of the last few times. So a figure that was too large, because something
    /// else took memory, is forgotten. `None` if no process was loaded yet.
    pub fn resident(&self) -> Option<u64> {
        self.loads.iter().copied().max()
    }
}

/// The bucket of a cost; the least holds all costs up to 1.
fn bucket(cost: f64) -> i32 {
    (cost.max(1.0).log2() * BUCKETS_PER_DOUBLING).ceil() as i32
}

/// The largest cost of a bucket.
fn top(bucket: i32) -> f64 {
    (f64::from(bucket) / BUCKETS_PER_DOUBLING).exp2()
}

/// A float as bytes: saturating, and 0 for NaN.
fn bytes(value: f64) -> u64 {
    value.ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn learned(peaks: &[(f64, u64)]) -> Learned {
        let mut learned = Learned::default();
        for (cost, peak) in peaks {
            (0..PEAKS_BELIEVED).for_each(|_| learned.took(*cost, *peak));
        }
        learned
    }

    fn known(need: Need) -> u64 {
        match need {
            Need::Bytes(bytes) => bytes,
            Need::Unknown => panic!("unknown"),
        }
    }

    #[test]
    fn an_unmeasured_need_is_unknown_unless_declared() {
        assert_eq!(Learned::default().need(8.0, None), Need::Unknown);
        let declared = Some(Declared { bytes_per_unit: 100.0 });
        assert_eq!(Learned::default().need(8.0, declared), Need::Bytes(800));
    }

    #[test]
    fn measured_peaks_replace_the_declaration() {
        let declared = Some(Declared { bytes_per_unit: MIB as f64 * 100.0 });
        let mut seen = Learned::default();
        seen.took(8.0, 40 * MIB);
        assert_eq!(known(seen.need(8.0, declared)), 800 * MIB);
        let seen = learned(&[(8.0, 40 * MIB)]);
        assert_eq!(known(seen.need(8.0, declared)), 42 * MIB);
    }

    #[test]
    fn costs_far_beyond_the_measured_are_unknown() {
        let seen = learned(&[(8.0, 40 * MIB)]);
        assert_eq!(known(seen.need(16.0, None)), 84 * MIB);
        assert_eq!(seen.need(17.0, None), Need::Unknown);
        // Smaller ones need at most as much.
        assert_eq!(known(seen.need(1.0, None)), 42 * MIB);
    }

    #[test]
    fn a_measured_need_is_known_by_its_cost() {
        let mut seen = learned(&[(8.0, 40 * MIB), (1.0, 20 * MIB)]);
        // Not enough peaks yet.
        seen.took(1e6, 900 * MIB);
        assert_eq!(seen.known(), [(1.0, 21 * MIB), (8.0, 42 * MIB)]);
    }

    #[test]
    fn one_outlier_of_a_hundred_does_not_count_and_two_do() {
        let mut seen = Learned::default();
        (0..99).for_each(|_| seen.took(8.0, MIB));
        seen.took(8.0, 900 * MIB);
        assert!(known(seen.need(8.0, None)) < 2 * MIB);
        seen.took(8.0, 900 * MIB);
        assert!(known(seen.need(8.0, None)) > 900 * MIB);
        // Old peaks go.
        (0..100).for_each(|_| seen.took(8.0, 3 * MIB));
        assert!(known(seen.need(8.0, None)) < 4 * MIB);
    }

    #[test]
    fn each_bucket_is_measured_first_and_now_and_then() {
        let mut seen = Learned::default();
        for _ in 0..PEAKS_BELIEVED {
            assert!(seen.should_measure(8.0));
            seen.took(8.0, MIB);
        }
        let measured = (0..MEASURED_EVERY * 3)
            .filter(|_| {
                let measure = seen.should_measure(8.0);
                if measure {
                    seen.took(8.0, MIB);
                }
                measure
            })
            .count();
        assert_eq!(measured, 3);
        assert!(seen.should_measure(100.0));
    }

    /// Otherwise a model beside busy neighbours would give its caches back before every pass.
    #[test]
    fn passes_that_cannot_be_measured_are_measured_now_and_then() {
        let mut seen = Learned::default();
        let mut measured = |passes: u64| {
            let pass = |_: &u64| {
                let measure = seen.should_measure(8.0);
                if measure {
                    seen.missed(8.0);
                }
                measure
            };
            (0..passes).filter(pass).count()
        };
        let tries = MISSED_MAX as usize;
        assert_eq!([measured(tries as u64), measured(MEASURED_EVERY * 3)], [tries, 3]);
        // Once one could be measured, so can the next ones.
        seen.took(8.0, MIB);
        assert!(seen.should_measure(8.0));
    }

    #[test]
    fn learned_needs_outlive_the_process() {
        let mut seen = learned(&[(8.0, 40 * MIB), (1e7, 900 * MIB)]);
        seen.loaded(500 * MIB);
        let text = serde_json::to_string(&seen).unwrap();
        assert_eq!(serde_json::from_str::<Learned>(&text).unwrap(), seen);
    }

    proptest! {
        #[test]
        fn a_larger_pass_never_needs_less(
            peaks in proptest::collection::vec((1.0f64..1e6, 0u64..1000 * MIB), 0..40),
            one in 1.0f64..2e6,
            other in 1.0f64..2e6,
        ) {
            let seen = learned(&peaks);
            let (small, large) = (one.min(other), one.max(other));
            match (seen.need(small, None), seen.need(large, None)) {
                (Need::Bytes(small), Need::Bytes(large)) => prop_assert!(small <= large),
                (Need::Unknown, large) => prop_assert_eq!(large, Need::Unknown),
                (Need::Bytes(_), Need::Unknown) => {}
            }
        }
    }
}
