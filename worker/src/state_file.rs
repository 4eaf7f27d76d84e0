//! The file that keeps learned limits, and the learned memory of programs, across restarts.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vramq_core::learned_limits::{LIMITS_MAX, LearnedLimit, LearnedLimits, LimitKey, keep_newest};
use vramq_inference::process::Learned;

const FILE_NAME: &str = "ceilings.json";

const VERSION: u32 = 1;

/// How long another process may keep the file locked; writing a few KiB takes less. Waiting blocks the caller, so it is limited. Values
/// that could not be written are written with the next limit.
const LOCK_MAX: Duration = Duration::from_millis(200);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// The most programs in the file. Each takes some hundred bytes to some hundred KiB.
const PROGRAMS_MAX: usize = 64;

/// Why the file cannot be read, or is not written.
#[derive(Debug, thiserror::Error)]
enum StateError {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error("it is damaged: {0}")]
    Damaged(#[from] serde_json::Error),
    #[error("it has version {0}, and this program knows version {VERSION}")]
    OtherVersion(u32),
}

/// The state file of a folder, or none. Workers that share a folder learn from each other.
#[derive(Clone, Debug)]
pub struct StateFile(Option<PathBuf>);

/// The file's content.
#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(rename = "ceilings")]
    limits: Vec<(LimitKey, LearnedLimit)>,
    #[serde(default)]
    programs: Vec<(ProgramKey, ProgramMemory)>,
}

/// What all versions of the file have.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

/// A model that is a program, on one device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProgramKey {
    pub model: String,
    pub device: String,
    /// Bytes of the whole device: another device may later have the same name.
    pub total: u64,
}

/// The measured memory of a program on its device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramMemory {
    /// Identifies the program and the unit of its costs. Values learned of another program do not apply.
    pub program: String,
    pub learned: Learned,
}

/// All that the file holds.
#[derive(Debug, Default)]
struct Known {
    limits: BTreeMap<LimitKey, LearnedLimit>,
    programs: BTreeMap<ProgramKey, ProgramMemory>,
}

impl StateFile {
    pub fn in_folder(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| folder.join(FILE_NAME)))
    }

    /// Logs if the folder cannot be written to: otherwise that would show only when there is something to save.
    pub fn check(&self) {
        let Some(file) = &self.0 else { return };
        if let Err(error) = could_write(file) {
            tracing::warn!(
                file = %file.display(),
                %error,
                "nothing that is learned can be saved, and the next start will learn it again: make the folder writable, or set worker.state"
            );
        }
    }

    /// The limits of all devices. A file that cannot be read counts as missing, and is logged.
    pub fn read(&self) -> BTreeMap<LimitKey, LearnedLimit> {
        self.known().limits
    }

    /// What programs were seen to take, on all devices.
    pub fn read_programs(&self) -> BTreeMap<ProgramKey, ProgramMemory> {
        self.known().programs
    }

    fn known(&self) -> Known {
        let Some(file) = &self.0 else { return Known::default() };
        read(file).unwrap_or_else(|error| {
            tracing::warn!(file = %file.display(), %error, "cannot read the file of learned limits: starting without them");
            Known::default()
        })
    }

    /// Writes a device's limits; those of other devices stay in the file. A failure is logged.
    pub fn write(&self, limits: &LearnedLimits) {
        let Some(file) = &self.0 else { return };
        let own: BTreeMap<_, _> = limits.known().map(|(key, limit)| (key.clone(), *limit)).collect();
        let change = |known: &mut Known| {
            known.limits.extend(own);
            keep_newest(&mut known.limits, LIMITS_MAX);
        };
        if let Err(error) = update(file, change) {
            tracing::warn!(file = %file.display(), %error, "learned limits cannot be saved: they are lost when this process ends");
        }
    }

    /// Writes how much memory programs took; the entries of other programs stay in the file. A failure is logged.
    pub fn write_programs(&self, own: BTreeMap<ProgramKey, ProgramMemory>) {
        let Some(file) = &self.0 else { return };
        let change = |known: &mut Known| {
            known.programs.retain(|key, _| !own.contains_key(key));
            let others = std::mem::take(&mut known.programs).into_iter();
            known.programs = others.take(PROGRAMS_MAX.saturating_sub(own.len())).chain(own).collect();
        };
        if let Err(error) = update(file, change) {
            tracing::warn!(file = %file.display(), %error, "the learned memory of programs cannot be saved: it is lost when this process ends");
        }
    }
}

/// The content of the file; nothing if it is missing.
fn read(file: &Path) -> Result<Known, StateError> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Known::default()),
        Err(error) => return Err(error.into()),
    };
    // Another version may have another form.
    let Version { version } = serde_json::from_slice(&text)?;
    if version != VERSION {
        return Err(StateError::OtherVersion(version));
    }
    let Content { limits, programs, .. } = serde_json::from_slice(&text)?;
    Ok(Known { limits: limits.into_iter().collect(), programs: programs.into_iter().collect() })
}

/// Changes the file atomically, even if the machine stops: written beside, flushed to disk, renamed. Rare, and a few KiB. Locked from
/// reading to renaming; otherwise one of two simultaneous workers would undo the other's change.
///
/// A file that cannot be read, or has another version, stays as it is, because it may hold what other workers learned. A damaged one is
/// kept under another name.
fn update(file: &Path, change: impl FnOnce(&mut Known)) -> Result<(), StateError> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let _lock = lock(&file.with_extension("lock"))?;
    let mut known = match read(file) {
        Err(StateError::Damaged(error)) => {
            let kept_as = file.with_extension("damaged");
            std::fs::rename(file, &kept_as)?;
            let (file, kept_as) = (file.display(), kept_as.display());
            tracing::warn!(%file, %kept_as, %error, "the file of learned limits was damaged: a new one is begun");
            Known::default()
        }
        known => known?,
    };
    change(&mut known);
    let content = Content {
        version: VERSION,
        limits: known.limits.into_iter().collect(),
        programs: known.programs.into_iter().collect(),
    };
    let text = serde_json::to_vec_pretty(&content).map_err(io::Error::from)?;
    let beside = file.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
    let written = write_through(&beside, file, &text);
    if written.is_err() {
        // Otherwise a full disk would get another such file each time a limit moves.
        let _ = std::fs::remove_file(&beside);
    }
    written.map_err(StateError::from)
}

/// Whether a file beside this one can be written.
fn could_write(file: &Path) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
    File::create(&beside)?;
    std::fs::remove_file(&beside)
}

/// Writes a file through a temporary file beside it.
fn write_through(beside: &Path, file: &Path, content: &[u8]) -> io::Result<()> {
    let mut new = File::create(beside)?;
    new.write_all(content)?;
    new.sync_all()?;
    std::fs::rename(beside, file)
}

/// Locks a separate file, because each write replaces the file with the limits. Closing it unlocks it.
fn lock(file: &Path) -> io::Result<File> {
    let lock = File::options().create(true).append(true).open(file)?;
    let until = Instant::now() + LOCK_MAX;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(lock),
            Err(TryLockError::WouldBlock) if Instant::now() < until => sleep(LOCK_RETRY),
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: &str = r#"{"version": 1, "ceilings": [[
        {"model": "m", "device": "cpu", "total": 1000, "longest_max": 128},
        {"fitted": 0, "failed": 80, "failed_at_ms": 7, "limit": 40}
    ], [
        {"model": "m", "device": "cuda:0", "total": 5000, "longest_max": 128},
        {"fitted": 1, "failed": 20, "failed_at_ms": 8, "limit": 10}
    ]]}"#;

    const OTHER_VERSION: &str = r#"{"version": 9, "ceilings": {}}"#;

    #[test]
    fn a_folder_that_cannot_be_written_to_is_noticed_without_a_change() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("state/ceilings.json");
        could_write(&file).unwrap();
        assert_eq!(std::fs::read_dir(file.parent().unwrap()).unwrap().count(), 0, "it leaves nothing");
        std::fs::write(&file, "damaged").unwrap();
        could_write(&file).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "damaged");
        assert!(could_write(&file.join("below/ceilings.json")).is_err(), "a file is in the way");
    }

    #[test]
    fn limits_outlive_the_process_and_those_of_other_devices_stay() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(&folder.path().join("made/for/it")));
        assert!(state.read().is_empty());
        let source = StateFile::in_folder(Some(folder.path()));
        std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
        let all = source.read();
        assert_eq!(all.len(), 2);
        for (device, total) in [("cpu", 1000), ("cuda:0", 5000)] {
            let limits = LearnedLimits::new(device, total, all.clone());
            assert_eq!(limits.known().count(), 1);
            state.write(&limits);
        }
        assert_eq!(state.read(), all);
        let left: Vec<_> = std::fs::read_dir(folder.path().join("made/for/it")).unwrap().collect();
        assert_eq!(left.len(), 2, "nothing is left beside the file and its lock: {left:?}");
    }

    #[test]
    fn needs_of_programs_are_saved_beside_the_limits() {
        let folder = tempfile::tempdir().unwrap();
        // As 0.2.0 wrote it.
        std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        assert!(state.read_programs().is_empty());
        let key = |model: &str| ProgramKey { model: model.to_owned(), device: "cpu".to_owned(), total: 1000 };
        let mut learned = Learned::default();
        learned.took(3.0, 70);
        learned.loaded(500);
        let memory = ProgramMemory { program: "program-1 items".to_owned(), learned };
        state.write_programs(BTreeMap::from([(key("a"), memory.clone())]));
        let other = ProgramMemory { program: "program-2 items".to_owned(), ..memory.clone() };
        state.write_programs(BTreeMap::from([(key("b"), other.clone())]));
        let limits = LearnedLimits::new("cpu", 1000, state.read());
        state.write(&limits);
        assert_eq!(state.read_programs(), BTreeMap::from([(key("a"), memory), (key("b"), other)]));
        assert_eq!(state.read().len(), 2);
    }

    #[test]
    fn workers_that_write_at_a_time_lose_nothing() {
        const WRITERS: u64 = 8;
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("source.json");
        std::fs::write(&source, LIMITS).unwrap();
        let (key, limit) = read(&source).unwrap().limits.pop_first().unwrap();
        let file = folder.path().join(FILE_NAME);
        std::thread::scope(|scope| {
            for device in 0..WRITERS {
                let own = BTreeMap::from([(LimitKey { device: device.to_string(), ..key.clone() }, limit)]);
                let file = &file;
                scope.spawn(move || while update(file, |known| known.limits.extend(own.clone())).is_err() {});
            }
        });
        assert_eq!(read(&file).unwrap().limits.len() as u64, WRITERS);
    }

    #[test]
    fn a_lock_that_is_not_given_back_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE_NAME);
        let held = lock(&file.with_extension("lock")).unwrap();
        let refused = update(&file, |_| {}).unwrap_err();
        assert!(
            matches!(&refused, StateError::File(error) if error.kind() == io::ErrorKind::WouldBlock),
            "{refused}"
        );
        drop(held);
        update(&file, |_| {}).unwrap();
    }

    #[test]
    fn a_write_that_fails_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        // A folder comes into the file's place: all but the renaming works.
        let file = folder.path().join(FILE_NAME);
        assert!(update(&file, |_| std::fs::create_dir_all(file.join("full")).unwrap()).is_err());
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the folder and the lock: {left:?}");
    }

    #[test]
    fn a_file_that_cannot_be_read_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        for text in ["", "{}", "[1", OTHER_VERSION] {
            std::fs::write(folder.path().join(FILE_NAME), text).unwrap();
            assert!(state.read().is_empty(), "{text}");
        }
        assert!(StateFile::in_folder(None).read().is_empty());
    }

    /// It may hold what other workers learned: those of another version, or all of them if the disk cannot read it at the moment.
    #[test]
    fn a_file_that_cannot_be_read_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE_NAME);
        std::fs::write(&file, OTHER_VERSION).unwrap();
        assert!(matches!(update(&file, |_| {}), Err(StateError::OtherVersion(9))));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), OTHER_VERSION);
        // A loop of links: even root cannot read it, and a rename would replace it.
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&file, &file).unwrap();
        assert!(matches!(update(&file, |_| {}), Err(StateError::File(_))));
        assert!(file.is_symlink(), "it was replaced");
    }

    #[test]
    fn a_damaged_file_is_kept_under_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE_NAME);
        for text in ["", r#"{"version": 1, "ceilings": 7}"#] {
            std::fs::write(&file, text).unwrap();
            update(&file, |_| {}).unwrap();
            assert!(read(&file).unwrap().limits.is_empty());
            let kept = std::fs::read_to_string(file.with_extension("damaged")).unwrap();
            assert_eq!(kept, text);
        }
    }

    #[test]
    fn a_full_file_keeps_the_newest_failures() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        std::fs::write(folder.path().join(FILE_NAME), LIMITS).unwrap();
        let (key, limit) = state.read().pop_first().unwrap();
        let all = (0..LIMITS_MAX as u64 + 76).map(|at| {
            let (key, mut limit) = (LimitKey { model: format!("{at:04}"), ..key.clone() }, limit);
            limit.failed_at_ms = at;
            (key, limit)
        });
        state.write(&LearnedLimits::new("cpu", 1000, all.collect()));
        let kept: Vec<_> = state.read().into_keys().map(|key| key.model).collect();
        assert_eq!(
            (kept.len(), kept[0].as_str(), kept[LIMITS_MAX - 1].as_str()),
            (LIMITS_MAX, "0076", "1099")
        );
        let learned = Learned::default();
        let program = |at: usize| {
            let key = ProgramKey { model: format!("{at:04}"), device: "cpu".to_owned(), total: 1000 };
            (key, ProgramMemory { program: "p".to_owned(), learned: learned.clone() })
        };
        (0..=PROGRAMS_MAX).for_each(|at| state.write_programs(BTreeMap::from([program(at)])));
        let kept = state.read_programs();
        assert_eq!(kept.len(), PROGRAMS_MAX);
        assert!(kept.contains_key(&program(PROGRAMS_MAX).0), "the new one is not kept");
    }
}
