//! Scratch folders: one for each program, removed when it ends. Folders that a crash of the machine left behind are removed at
//! start.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What the name of every scratch folder begins with.
const PREFIX: &str = "vramq-model-";

/// A folder as young as this may not have its lock yet.
const SETTLED: Duration = Duration::from_secs(60);

/// Makes a scratch folder in `root`. Its keeper removes it; if no keeper comes, it is swept up in a while.
///
/// # Errors
/// Of the file system.
pub fn create(root: &Path) -> io::Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // The time tells apart workers whose process ids are alike, as in containers that share the folder.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = root.join(format!("{PREFIX}{}-{now:x}-{number}", std::process::id()));
    DirBuilder::new().mode(0o700).create(&path)?;
    Ok(path)
}

/// Whether a folder's file system could hold so many bytes if nothing else were in it. What cannot be asked may.
pub(super) fn could_hold(folder: &Path, bytes: u64) -> bool {
    rustix::fs::statvfs(folder)
        .map_or(true, |system| bytes <= system.f_blocks.saturating_mul(system.f_frsize))
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
