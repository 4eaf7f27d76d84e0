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
#[path = "state_file_tests.rs"]
mod tests;
