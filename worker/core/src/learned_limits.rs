//! What a device turned out to have room for: learned from passes that ran out of memory although the device was theirs
//! alone, so that the same size is not tried again, also after a restart.
//!
//! For each model, device and length bucket: the largest pass that fitted and the smallest that did not, in bytes by the
//! engine's own plan. Passes are held to what fitted, and grow back in small steps.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Passes near a ceiling that must fit before it is raised: a step too far costs an out-of-memory.
const PASSES_PER_STEP: u32 = 32;

/// A ceiling is raised by this part of the gap up to what failed, and not any more once the gap is so small a part of
/// it: the rest is not worth another out-of-memory.
const STEP: u64 = 8;
const GAP_MIN: u64 = 16;

/// After so long without an out-of-memory what failed is believed a little less: the device may have been short then
/// for a reason that is gone.
const BELIEVED_MS: u64 = 3_600_000;

/// Ceilings that are kept; a worker has a few models with some ten buckets each.
const CEILINGS_MAX: usize = 1024;

/// Where a ceiling holds.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    pub model: String,
    pub device: String,
    /// Bytes of the device: another size is another device.
    pub total: u64,
    /// Passes whose longest item costs at most this, and more than half of it.
    pub longest_max: usize,
}

/// What is known of a place. All in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ceiling {
    /// The largest pass that fitted; 0 while none is known.
    pub fitted: u64,
    /// The smallest that did not.
    pub failed: u64,
    /// When that was, in Unix milliseconds.
    pub failed_at_ms: u64,
    /// What passes may take.
    pub limit: u64,
    /// Passes near the limit since it was last moved.
    #[serde(default)]
    near: u32,
}

impl Ceiling {
    fn new(failed: u64, now_ms: u64) -> Self {
        Self { fitted: 0, failed, failed_at_ms: now_ms, limit: failed / 2, near: 0 }
    }

    fn ran_out(&mut self, bytes: u64, now_ms: u64) {
        self.failed = self.failed.min(bytes);
        self.failed_at_ms = now_ms;
        // What fitted once and does not now was luck.
        self.fitted = if self.fitted < self.failed { self.fitted } else { 0 };
        self.limit = self.fitted.max(self.failed / 2);
        self.near = 0;
    }

    /// Takes note of a pass that fitted; whether the limit moved.
    fn held(&mut self, bytes: u64, now_ms: u64) -> bool {
        self.fitted = self.fitted.max(bytes);
        if now_ms.saturating_sub(self.failed_at_ms) > BELIEVED_MS {
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

/// The ceilings of a worker, and the file in which they outlive it.
#[derive(Debug, Default)]
pub struct Ceilings {
    device: String,
    total: u64,
    known: BTreeMap<Place, Ceiling>,
    file: Option<PathBuf>,
}

/// The file's content.
#[derive(Serialize, Deserialize)]
struct State {
    version: u32,
    ceilings: Vec<(Place, Ceiling)>,
}

const STATE_VERSION: u32 = 1;

impl Ceilings {
    /// Those of a device. What its file has is read; one that cannot be read is as good as none.
    pub fn of_device(device: &str, total: u64, folder: Option<&Path>) -> Self {
        let file = folder.map(|folder| folder.join("ceilings.json"));
        let known = file.as_deref().map(read).unwrap_or_default();
        Self { device: device.to_owned(), total, known, file }
    }

    /// The most bytes of a pass whose longest item costs so much.
    pub fn limit(&self, model: &str, longest: usize) -> u64 {
        if self.known.is_empty() {
            return u64::MAX;
        }
        self.known.get(&self.place(model, longest)).map_or(u64::MAX, |ceiling| ceiling.limit)
    }

    /// A pass ran out of memory that had the device to itself.
    pub fn ran_out(&mut self, model: &str, longest: usize, bytes: u64, now_ms: u64) {
        let place = self.place(model, longest);
        if self.known.len() >= CEILINGS_MAX && !self.known.contains_key(&place) {
            return;
        }
        let ceiling = self.known.entry(place).or_insert_with(|| Ceiling::new(bytes, now_ms));
        ceiling.ran_out(bytes, now_ms);
        let limit = ceiling.limit;
        tracing::info!(model, longest, bytes, limit, "passes of such items are held to less from now on");
        self.save();
    }

    /// A pass fitted.
    pub fn fitted(&mut self, model: &str, longest: usize, bytes: u64, now_ms: u64) {
        if self.known.is_empty() {
            return;
        }
        let place = self.place(model, longest);
        let Some(ceiling) = self.known.get_mut(&place) else { return };
        if ceiling.held(bytes, now_ms) {
            tracing::debug!(
                model,
                longest,
                limit = ceiling.limit,
                "passes of such items may take more again"
            );
            self.save();
        }
    }

    /// What is known of the device's models.
    pub fn known(&self) -> impl Iterator<Item = (&Place, &Ceiling)> {
        self.known.iter().filter(|(place, _)| place.device == self.device && place.total == self.total)
    }

    fn place(&self, model: &str, longest: usize) -> Place {
        let longest_max = longest.next_power_of_two();
        Place { model: model.to_owned(), device: self.device.clone(), total: self.total, longest_max }
    }

    /// Rarely, and a few KiB: not worth a thread.
    fn save(&self) {
        let Some(file) = &self.file else { return };
        let own = self.known().map(|(place, ceiling)| (place.clone(), *ceiling)).collect();
        if let Err(error) = write(file, own) {
            tracing::warn!(file = %file.display(), %error, "what was learned of memory will not outlive this process");
        }
    }
}

fn read(file: &Path) -> BTreeMap<Place, Ceiling> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return BTreeMap::new(),
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "read learned ceilings");
            return BTreeMap::new();
        }
    };
    match serde_json::from_slice::<State>(&text) {
        Ok(state) if state.version == STATE_VERSION => {
            state.ceilings.into_iter().take(CEILINGS_MAX).collect()
        }
        Ok(state) => {
            tracing::warn!(file = %file.display(), version = state.version, "learned ceilings of another version");
            BTreeMap::new()
        }
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "learned ceilings cannot be read, learning anew");
            BTreeMap::new()
        }
    }
}

/// Whole or not at all: written beside, then renamed. Workers that share a folder learn from each other: what the file
/// has of other devices stays.
fn write(file: &Path, own: BTreeMap<Place, Ceiling>) -> io::Result<()> {
    let mut all = read(file);
    all.extend(own);
    let state = State { version: STATE_VERSION, ceilings: all.into_iter().collect() };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
    std::fs::write(&beside, serde_json::to_vec_pretty(&state)?)?;
    std::fs::rename(&beside, file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn ceilings(folder: Option<&Path>) -> Ceilings {
        Ceilings::of_device("cpu", 1000 * MIB, folder)
    }

    #[test]
    fn what_ran_out_is_not_tried_again() {
        let mut ceilings = ceilings(None);
        assert_eq!(ceilings.limit("m", 100), u64::MAX);
        ceilings.ran_out("m", 100, 80 * MIB, 0);
        assert_eq!(ceilings.limit("m", 100), 40 * MIB);
        // The same bucket, others, another model.
        assert_eq!(ceilings.limit("m", 65), 40 * MIB);
        assert_eq!(ceilings.limit("m", 64), u64::MAX);
        assert_eq!(ceilings.limit("m", 129), u64::MAX);
        assert_eq!(ceilings.limit("n", 100), u64::MAX);
        ceilings.ran_out("m", 100, 30 * MIB, 0);
        assert_eq!(ceilings.limit("m", 100), 15 * MIB);
    }

    #[test]
    fn limits_grow_back_in_small_steps_and_stop_short_of_what_failed() {
        let mut ceilings = ceilings(None);
        ceilings.ran_out("m", 100, 80 * MIB, 0);
        let mut before = ceilings.limit("m", 100);
        for _ in 0..PASSES_PER_STEP * 100 {
            let limit = ceilings.limit("m", 100);
            assert!(limit >= before && limit - before <= 80 * MIB / STEP);
            before = limit;
            ceilings.fitted("m", 100, limit, 0);
        }
        let gap = 80 * MIB / GAP_MIN;
        assert!((80 * MIB - gap..80 * MIB).contains(&before), "{before}");
        // Small passes say nothing about large ones.
        ceilings.ran_out("m", 100, 60 * MIB, 0);
        let held = ceilings.limit("m", 100);
        (0..1000).for_each(|_| ceilings.fitted("m", 100, MIB, 0));
        assert_eq!(ceilings.limit("m", 100), held);
    }

    #[test]
    fn an_old_failure_is_believed_less() {
        let mut ceilings = ceilings(None);
        ceilings.ran_out("m", 100, 80 * MIB, 0);
        for hour in 1..=50 {
            for _ in 0..PASSES_PER_STEP * 10 {
                let limit = ceilings.limit("m", 100);
                ceilings.fitted("m", 100, limit, hour * (BELIEVED_MS + 1));
            }
        }
        assert!(ceilings.limit("m", 100) > 1000 * MIB);
    }

    #[test]
    fn what_was_learned_outlives_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = ceilings(Some(folder.path()));
        first.ran_out("m", 100, 80 * MIB, 7);
        let mut other = Ceilings::of_device("cuda:0", 1, Some(folder.path()));
        other.ran_out("m", 100, 10 * MIB, 7);
        let again = ceilings(Some(folder.path()));
        assert_eq!(again.limit("m", 100), 40 * MIB);
        assert_eq!(again.known().count(), 1);
        // Another size of the device is another device.
        assert_eq!(Ceilings::of_device("cpu", 1, Some(folder.path())).limit("m", 100), u64::MAX);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{}", "[1", r#"{"version": 9, "ceilings": []}"#] {
            std::fs::write(folder.path().join("ceilings.json"), text).unwrap();
            let mut ceilings = ceilings(Some(folder.path()));
            assert_eq!(ceilings.limit("m", 100), u64::MAX, "{text}");
            ceilings.ran_out("m", 100, 80 * MIB, 0);
        }
        assert_eq!(ceilings(Some(folder.path())).limit("m", 100), 40 * MIB);
    }

    proptest! {
        /// A device with room for `truth`: from some point on nothing runs out, however the passes come.
        #[test]
        fn running_out_ends(truth in MIB..500 * MIB, wanted in 1u64..1000) {
            let mut ceilings = ceilings(None);
            let mut ran_out = 0;
            for _ in 0..20_000 {
                let bytes = (wanted * MIB).min(ceilings.limit("m", 100));
                if bytes > truth {
                    ceilings.ran_out("m", 100, bytes, 0);
                    ran_out += 1;
                } else {
                    ceilings.fitted("m", 100, bytes, 0);
                }
            }
            prop_assert!(ran_out <= 40, "{ran_out} times");
            let held = (wanted * MIB).min(ceilings.limit("m", 100));
            prop_assert!(held <= truth && held * 10 >= truth.min(wanted * MIB) * 8, "{held} of {truth}");
        }
    }
}
