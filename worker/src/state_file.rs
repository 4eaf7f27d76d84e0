//! The file that keeps learned limits, and the learned memory of programs, across restarts.

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vramq_core::learned_limits::{LIMITS_MAX, LearnedLimit, LearnedLimits, LimitKey};
use vramq_inference::process::Learned;

const FILE_NAME: &str = "ceilings.json";

const VERSION: u32 = 1;

/// How long another process may keep the file locked; writing a few KiB takes less. Waiting blocks the caller, so it is limited. Values
/// that could not be written are written with the next limit.
const LOCK_MAX: Duration = Duration::from_millis(200);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// The most programs in the file. Each takes some hundred bytes to some hundred KiB.
const PROGRAMS_MAX: usize = 64;

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
        self.0.as_deref().map(|file| read(file).limits).unwrap_or_default()
    }

    /// What programs were seen to take, on all devices.
    pub fn read_programs(&self) -> BTreeMap<ProgramKey, ProgramMemory> {
        self.0.as_deref().map(|file| read(file).programs).unwrap_or_default()
    }

    /// Writes a device's limits; those of other devices stay in the file. A failure is logged.
    pub fn write(&self, limits: &LearnedLimits) {
        let Some(file) = &self.0 else { return };
        let own: BTreeMap<_, _> = limits.known().map(|(key, limit)| (key.clone(), *limit)).collect();
        if let Err(error) = update(file, |known| known.limits.extend(own)) {
            tracing::warn!(file = %file.display(), %error, "learned limits cannot be saved: they are lost when this process ends");
        }
    }

    /// Writes how much memory programs took; the entries of other programs stay in the file. A failure is logged.
    pub fn write_programs(&self, own: BTreeMap<ProgramKey, ProgramMemory>) {
        let Some(file) = &self.0 else { return };
        if let Err(error) = update(file, |known| known.programs.extend(own)) {
            tracing::warn!(file = %file.display(), %error, "the learned memory of programs cannot be saved: it is lost when this process ends");
        }
    }
}

fn read(file: &Path) -> Known {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Known::default(),
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "cannot read the file of learned limits: starting without them");
            return Known::default();
        }
    };
    match serde_json::from_slice::<Content>(&text) {
        Ok(content) if content.version == VERSION => Known {
            limits: content.limits.into_iter().take(LIMITS_MAX).collect(),
            programs: content.programs.into_iter().take(PROGRAMS_MAX).collect(),
        },
        Ok(content) => {
            let version = content.version;
            tracing::warn!(file = %file.display(), version, "the file of learned limits has another version: starting without them");
            Known::default()
        }
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "the file of learned limits is damaged: starting without them");
            Known::default()
        }
    }
}

/// Changes the file atomically, even if the machine stops: written beside, flushed to disk, renamed. Rare, and a few KiB. Locked from
/// reading to renaming; otherwise one of two simultaneous workers would undo the other's change.
fn update(file: &Path, change: impl FnOnce(&mut Known)) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let _lock = lock(&file.with_extension("lock"))?;
    let mut known = read(file);
    change(&mut known);
    let content = Content {
        version: VERSION,
        limits: known.limits.into_iter().collect(),
        programs: known.programs.into_iter().collect(),
    };
    let beside = file.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
    let written = write_through(&beside, file, &serde_json::to_vec_pretty(&content)?);
    if written.is_err() {
        // Otherwise a full disk would get another such file each time a limit moves.
        let _ = std::fs::remove_file(&beside);
    }
    written
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
        let (key, limit) = read(&source).limits.pop_first().unwrap();
        let file = folder.path().join(FILE_NAME);
        std::thread::scope(|scope| {
            for device in 0..WRITERS {
                let own = BTreeMap::from([(LimitKey { device: device.to_string(), ..key.clone() }, limit)]);
                let file = &file;
                scope.spawn(move || while update(file, |known| known.limits.extend(own.clone())).is_err() {});
            }
        });
        assert_eq!(read(&file).limits.len() as u64, WRITERS);
    }

    #[test]
    fn a_lock_that_is_not_given_back_is_not_waited_for_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE_NAME);
        let held = lock(&file.with_extension("lock")).unwrap();
        assert_eq!(update(&file, |_| {}).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(held);
        update(&file, |_| {}).unwrap();
    }

    #[test]
    fn a_write_that_fails_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        // A folder in the file's place: all but the renaming works.
        let file = folder.path().join(FILE_NAME);
        std::fs::create_dir_all(file.join("full")).unwrap();
        assert!(update(&file, |_| {}).is_err());
        let left: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "the folder and the lock: {left:?}");
    }

    #[test]
    fn a_file_that_cannot_be_read_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        for text in ["", "{}", "[1", r#"{"version": 9, "ceilings": []}"#] {
            std::fs::write(folder.path().join(FILE_NAME), text).unwrap();
            assert!(state.read().is_empty(), "{text}");
        }
        assert!(StateFile::in_folder(None).read().is_empty());
    }
}
