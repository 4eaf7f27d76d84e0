//! The file in which learned limits outlive the process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vramq_core::learned_limits::{LIMITS_MAX, LearnedLimit, LearnedLimits, LimitKey};

const FILE_NAME: &str = "ceilings.json";

const VERSION: u32 = 1;

/// The file of a folder, or none. Workers that share a folder learn from each other.
#[derive(Clone, Debug)]
pub struct StateFile(Option<PathBuf>);

/// The file's content.
#[derive(Serialize, Deserialize)]
struct Content {
    version: u32,
    #[serde(rename = "ceilings")]
    limits: Vec<(LimitKey, LearnedLimit)>,
}

impl StateFile {
    pub fn in_folder(folder: Option<&Path>) -> Self {
        Self(folder.map(|folder| folder.join(FILE_NAME)))
    }

    /// The limits of all devices. A file that cannot be read is as good as none, and logged.
    pub fn read(&self) -> BTreeMap<LimitKey, LearnedLimit> {
        self.0.as_deref().map(read).unwrap_or_default()
    }

    /// Writes a device's limits; those of other devices stay in the file. A failure is logged.
    pub fn write(&self, limits: &LearnedLimits) {
        let Some(file) = &self.0 else { return };
        let own = limits.known().map(|(key, limit)| (key.clone(), *limit)).collect();
        if let Err(error) = write(file, own) {
            tracing::warn!(file = %file.display(), %error, "learned limits will not outlive this process");
        }
    }
}

fn read(file: &Path) -> BTreeMap<LimitKey, LearnedLimit> {
    let text = match std::fs::read(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return BTreeMap::new(),
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "read learned limits");
            return BTreeMap::new();
        }
    };
    match serde_json::from_slice::<Content>(&text) {
        Ok(content) if content.version == VERSION => content.limits.into_iter().take(LIMITS_MAX).collect(),
        Ok(content) => {
            let version = content.version;
            tracing::warn!(file = %file.display(), version, "learned limits of another version, starting without");
            BTreeMap::new()
        }
        Err(error) => {
            tracing::warn!(file = %file.display(), %error, "learned limits cannot be read, starting without");
            BTreeMap::new()
        }
    }
}

/// Whole or not at all, also when the machine stops: written beside, flushed to disk, renamed. Rare, and a few KiB.
fn write(file: &Path, own: BTreeMap<LimitKey, LearnedLimit>) -> io::Result<()> {
    let mut all = read(file);
    all.extend(own);
    let content = Content { version: VERSION, limits: all.into_iter().collect() };
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension(format!("{}.new", uuid::Uuid::now_v7().simple()));
    let mut new = File::create(&beside)?;
    new.write_all(&serde_json::to_vec_pretty(&content)?)?;
    new.sync_all()?;
    std::fs::rename(&beside, file)
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
        assert_eq!(left.len(), 1, "nothing is left beside the file: {left:?}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let state = StateFile::in_folder(Some(folder.path()));
        for text in ["", "{}", "[1", r#"{"version": 9, "ceilings": []}"#] {
            std::fs::write(folder.path().join(FILE_NAME), text).unwrap();
            assert!(state.read().is_empty(), "{text}");
        }
        assert!(StateFile::in_folder(None).read().is_empty());
    }
}
