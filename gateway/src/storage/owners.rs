//! The owners' folders in a folder, and what was left there by gateways that were killed while they wrote.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::keys::is_name;

/// A file that has not grown for so long is left behind: its gateway was killed. The file of a slow upload grows by 64 KiB at a time, with
/// pauses that are much shorter.
const PAUSE_MAX: Duration = Duration::from_secs(24 * 3600);

/// What is in a folder.
#[derive(Debug, Default)]
pub(super) struct Owners {
    pub(super) names: Vec<String>,
    pub(super) unfinished: Vec<Unfinished>,
}

/// An object that is not whole, and is not written any more.
#[derive(Debug)]
pub(super) struct Unfinished {
    pub(super) owner: String,
    /// The object that it was to be.
    pub(super) name: String,
    pub(super) file: PathBuf,
}

/// Looks through a folder. What cannot be the name of an owner is left alone, such as `lost+found`. Blocks.
///
/// # Errors
/// The folder itself cannot be read.
pub(super) fn look(folder: &Path) -> io::Result<Owners> {
    let mut found = Owners::default();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let Some(owner) = entry.file_name().to_str().filter(|name| is_name(name)).map(str::to_owned) else {
            continue;
        };
        if !entry.path().is_dir() {
            continue;
        }
        // One that cannot be read is reported by the listing of its objects.
        for file in std::fs::read_dir(entry.path()).into_iter().flatten().flatten() {
            if let Some(name) = object_of(&file.file_name())
                && is_left(&file)
            {
                found.unfinished.push(Unfinished { owner: owner.clone(), name, file: file.path() });
            }
        }
        found.names.push(owner);
    }
    Ok(found)
}

/// The object that a file is to become: object_store writes `NAME#NUMBER`, and renames it when it is whole.
fn object_of(file: &OsStr) -> Option<String> {
    let (name, number) = file.to_str()?.rsplit_once('#')?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())).then(|| name.to_owned())
}

fn is_left(file: &std::fs::DirEntry) -> bool {
    let written = file.metadata().and_then(|metadata| metadata.modified());
    written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age >= PAUSE_MAX))
}
