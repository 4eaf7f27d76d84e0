//! Scratch folders: one for each program, removed when it ends. Folders that a crash of the machine left behind are removed at
//! start.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What the name of every scratch folder begins with.
const PREFIX: &str = "vramq-model-";

/// A folder younger than this, or its control group, may not be locked by its keeper yet.
pub(super) const SETTLED: Duration = Duration::from_secs(60);

/// Makes a scratch folder in `root`. Its keeper removes it. If no keeper starts, a later `sweep` removes it.
///
/// # Errors
/// Of the file system.
pub fn create(root: &Path) -> io::Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // The time distinguishes workers with equal process ids, as in containers that share the folder.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = root.join(format!("{PREFIX}{}-{now:x}-{number}", std::process::id()));
    DirBuilder::new().mode(0o700).create(&path)?;
    Ok(path)
}

/// A file system is full if less than this part of it is free, and less than these bytes.
const FREE_PART: u64 = 20;
const FREE_MAX: u64 = 8 << 30;

/// Whether a folder's file system could hold this many bytes if it were empty. True if it cannot be asked, or is in memory without
/// a limit (ramfs, or tmpfs with `size=0`), which reports no blocks.
pub(super) fn could_hold(folder: &Path, bytes: u64) -> bool {
    rustix::fs::statvfs(folder).map_or(true, |system| {
        system.f_blocks == 0 || bytes <= system.f_blocks.saturating_mul(system.f_frsize)
    })
}

/// Bytes that are free in a folder's file system, where it tells.
pub(super) fn free(folder: &Path) -> Option<u64> {
    let system = rustix::fs::statvfs(folder).ok().filter(|system| system.f_blocks > 0)?;
    Some(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Whether a program that had no room can have meant a folder's file system: no inode is free there, or little of it. What it had written
/// when there was no more room, it may have removed. The SDK has the same rule.
pub(super) fn may_be_full(folder: &Path) -> bool {
    rustix::fs::statvfs(folder).is_ok_and(|system| {
        let total = system.f_blocks.saturating_mul(system.f_frsize);
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        let has_no_inode = system.f_files > 0 && system.f_favail == 0;
        has_no_inode || free < (total / FREE_PART).min(FREE_MAX)
    })
}

/// Whether a new folder in the place of this one gives room for so many bytes: the files in this one take as much, or it is gone.
pub(super) fn is_to_be_replaced(folder: &Path, bytes: u64) -> bool {
    let mut left = vec![folder.to_owned()];
    let mut held = 0_u64;
    while let Some(path) = left.pop() {
        let entries = match std::fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if path == folder && error.kind() == io::ErrorKind::NotFound => return true,
            // The program changes them meanwhile.
            Err(_) => continue,
        };
        for entry in entries.flatten() {
            // Of the link itself, not of its target.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                left.push(entry.path());
            }
            // The unit of `st_blocks`.
            held = held.saturating_add(metadata.blocks().saturating_mul(512));
        }
        if held >= bytes {
            return true;
        }
    }
    false
}

/// The process id of the worker that made the scratch folder of this name.
pub(super) fn worker_of(name: &str) -> Option<i32> {
    name.strip_prefix(PREFIX)?.split('-').next()?.parse().ok()
}

/// Keeps a scratch folder from being swept up, for as long as the lock is held.
///
/// # Errors
/// Of the file system.
pub(super) fn hold(path: &Path) -> io::Result<File> {
    let lock = File::open(path)?;
    lock.lock()?;
    Ok(lock)
}

/// Removes the folders in `root` that no keeper holds any more; how many there were.
pub fn sweep(root: &Path) -> usize {
    let Ok(entries) = std::fs::read_dir(root) else { return 0 };
    let paths = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    paths.filter(|entry| is_abandoned(&entry.path()) && std::fs::remove_dir_all(entry.path()).is_ok()).count()
}

fn is_abandoned(path: &Path) -> bool {
    let is_settled = |folder: &File| {
        let age = folder.metadata()?.modified()?.elapsed().unwrap_or_default();
        io::Result::Ok(age > SETTLED)
    };
    File::open(path).is_ok_and(|folder| is_settled(&folder).unwrap_or(false) && folder.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_old_folders_without_a_keeper_are_swept_up() {
        let root = tempfile::tempdir().unwrap();
        let [held, young, old] = [(); 3].map(|()| create(root.path()).unwrap());
        let age = |path: &Path| {
            let past = SystemTime::now() - SETTLED * 2;
            File::open(path).unwrap().set_modified(past).unwrap();
        };
        let lock = hold(&held).unwrap();
        drop(hold(&young).unwrap());
        std::fs::create_dir(root.path().join("somebody-else")).unwrap();
        age(&held);
        age(&old);
        age(&root.path().join("somebody-else"));
        assert_eq!(sweep(root.path()), 1);
        assert!(held.exists() && young.exists() && !old.exists());
        assert!(root.path().join("somebody-else").exists());
        drop(lock);
        assert_eq!(sweep(root.path()), 1);
        assert!(!held.exists());
    }

    #[test]
    fn a_disk_holds_what_it_is_large_enough_for() {
        let root = tempfile::tempdir().unwrap();
        assert!(could_hold(root.path(), 1));
        assert!(!could_hold(root.path(), u64::MAX));
        assert!(could_hold(Path::new("/no/such/folder"), u64::MAX), "it may come back");
        // It reports no blocks, like a file system in memory without a limit.
        assert!(could_hold(Path::new("/proc"), 1));
        assert!(free(root.path()).is_some());
        assert_eq!((free(Path::new("/proc")), free(Path::new("/no/such/folder"))), (None, None));
    }

    #[test]
    fn a_folder_is_replaced_if_that_gives_room() {
        let root = tempfile::tempdir().unwrap();
        let folder = create(root.path()).unwrap();
        assert!(!is_to_be_replaced(&folder, 1 << 20));
        let below = folder.join("cache");
        std::fs::create_dir(&below).unwrap();
        std::fs::write(below.join("file"), vec![1; 2 << 20]).unwrap();
        // Somebody else's files, which stay.
        let other = create(root.path()).unwrap();
        std::os::unix::fs::symlink(below.join("file"), other.join("link")).unwrap();
        std::os::unix::fs::symlink(&below, other.join("folder")).unwrap();
        assert!(is_to_be_replaced(&folder, 1 << 20));
        assert!(!is_to_be_replaced(&folder, 8 << 20), "what fills the disk is something else");
        assert!(!is_to_be_replaced(&other, 1 << 20));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(is_to_be_replaced(&folder, 1 << 20));
    }

    #[test]
    fn the_name_says_whose_a_folder_is() {
        let root = tempfile::tempdir().unwrap();
        let path = create(root.path()).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(worker_of(name), Some(std::process::id().try_into().unwrap()));
        assert_eq!(worker_of("vramq-model-x-1"), None);
        assert_eq!(worker_of("system.slice"), None);
    }

    #[test]
    fn a_folder_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let root = tempfile::tempdir().unwrap();
        let path = create(root.path()).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
}
