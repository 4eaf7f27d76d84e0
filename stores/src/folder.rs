//! A folder as a store: files are opened beneath its root without following links, so that no name leads out of it.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, fstat, fsync, openat, openat2, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;

use crate::Fault;

/// How a folder on the way to a file is opened: only to continue from there.
const STEP: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// How a file is opened: without waiting for a writer of a pipe, and without taking over a terminal.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// A folder.
#[derive(Debug)]
pub struct Folder {
    root: PathBuf,
}

impl Folder {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// Opens a file beneath the root, and returns its length. Links are not followed; only the root itself may be one.
    ///
    /// # Errors
    /// It is not there, is not a regular file, or there is a link on the way; or the file system fails.
    pub fn open(&self, segments: &[Vec<u8>]) -> Result<(File, u64), Fault> {
        let root = self.open_root()?;
        match at_once(&root, segments) {
            Some(file) => regular(file, segments),
            None => regular(step_by_step(root, segments)?, segments),
        }
    }

    /// Writes a file in the root folder, and replaces one of the same name. The file gets its name when it is complete and on disk.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let root =
            openat(CWD, &self.root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let partial = format!(".{name}.{}.partial", uuid::Uuid::new_v4().simple());
        let written = write_new(&root, &partial, bytes)
            .and_then(|()| Ok(renameat(&root, &partial, &root, name)?))
            .and_then(|()| Ok(fsync(&root)?));
        if written.is_err() {
            // Best effort: the partial file may not exist.
            let _ = unlinkat(&root, &partial, AtFlags::empty());
        }
        written
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A missing root means that a disk is not mounted: the job is not at fault.
    fn open_root(&self) -> Result<OwnedFd, Fault> {
        let root = openat(CWD, &self.root, STEP, Mode::empty());
        root.map_err(|error| unavailable(&self.root.display().to_string(), error))
    }
}

/// Opens a file in one step (`openat2`). `None` if the kernel does not have it (Linux before 5.6, gVisor), if a container's rules
/// forbid it, or if the file cannot be opened; opening it step by step then gives the error.
fn at_once(root: &OwnedFd, segments: &[Vec<u8>]) -> Option<OwnedFd> {
    let way = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(root, segments.join(&b'/'), READ, Mode::empty(), way).ok()
}

/// Opens a file folder by folder, and follows no link in any of them.
fn step_by_step(root: OwnedFd, segments: &[Vec<u8>]) -> Result<OwnedFd, Fault> {
    let (Some((name, steps)), shown) = (segments.split_last(), shown(segments)) else {
        return Err(Fault::Missing("the store itself is not a file".to_owned()));
    };
    let mut folder = root;
    for step in steps {
        let next = openat(&folder, &step[..], STEP | OFlags::NOFOLLOW, Mode::empty());
        folder = next.map_err(|error| fault(&folder, step, error, &shown))?;
    }
    openat(&folder, &name[..], READ, Mode::empty()).map_err(|error| fault(&folder, name, error, &shown))
}

/// A file that was opened, and its length, if it is a regular one.
fn regular(file: OwnedFd, segments: &[Vec<u8>]) -> Result<(File, u64), Fault> {
    let shown = shown(segments);
    let stat = fstat(&file).map_err(|error| unavailable(&shown, error))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Fault::Denied(format!("{shown} is not a regular file")));
    }
    Ok((file.into(), u64::try_from(stat.st_size).unwrap_or(0)))
}

fn write_new(folder: &OwnedFd, name: &str, bytes: &[u8]) -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
    let mut file = File::from(openat(folder.as_fd(), name, flags, mode)?);
    file.write_all(bytes)?;
    file.sync_all()
}

/// Why an entry of a folder cannot be opened.
fn fault(folder: &OwnedFd, name: &[u8], error: Errno, shown: &str) -> Fault {
    let is_link = || {
        let stat = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
        stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink)
    };
    match error {
        Errno::LOOP | Errno::NOTDIR if is_link() => {
            Fault::Denied(format!("the path of {shown} has a symbolic link, and links are not followed"))
        }
        Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => {
            Fault::Missing(format!("there is no file {shown}"))
        }
        Errno::ACCESS | Errno::PERM => Fault::Denied(format!("the worker may not read {shown}")),
        // A device without a driver, or a socket.
        Errno::NXIO | Errno::NODEV => Fault::Denied(format!("{shown} is not a regular file")),
        error => unavailable(shown, error),
    }
}

fn unavailable(shown: &str, error: Errno) -> Fault {
    Fault::Unavailable(format!("open {shown}: {error}"))
}

/// A path within the store, for errors.
fn shown(segments: &[Vec<u8>]) -> String {
    let path: PathBuf = segments.iter().map(|segment| std::ffi::OsStr::from_bytes(segment)).collect();
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn opened(folder: &Folder, path: &str) -> Result<String, Fault> {
        let segments: Vec<_> = path.split('/').map(|segment| segment.as_bytes().to_vec()).collect();
        let read = |(mut file, length): (File, u64)| {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text.len() as u64, length);
            text
        };
        let opened = folder.open(&segments).map(read);
        let slowly = folder.open_root().and_then(|root| step_by_step(root, &segments));
        let slowly = slowly.and_then(|file| regular(file, &segments)).map(read);
        assert_eq!(slowly, opened, "a kernel without openat2 does the same");
        opened
    }

    #[test]
    fn files_beneath_the_root_are_opened_and_no_others() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        std::fs::create_dir_all(root.join("deep/er")).unwrap();
        std::fs::write(root.join("a"), "at the top").unwrap();
        std::fs::write(root.join("deep/er/b"), "further down").unwrap();
        std::fs::write(place.path().join("secret"), "outside").unwrap();
        symlink(place.path().join("secret"), root.join("link")).unwrap();
        symlink(place.path(), root.join("way-out")).unwrap();
        symlink(root.join("a"), root.join("inner-link")).unwrap();
        rustix::fs::mknodat(CWD, root.join("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        let folder = Folder::new(root.clone());
        let at = folder.open_root().unwrap();
        let has_openat2 = openat2(&at, ".", STEP, Mode::empty(), ResolveFlags::BENEATH).is_ok();
        assert_eq!(at_once(&at, &[b"deep".to_vec(), b"er".to_vec(), b"b".to_vec()]).is_some(), has_openat2);
        assert_eq!(opened(&folder, "a").as_deref(), Ok("at the top"));
        assert_eq!(opened(&folder, "deep/er/b").as_deref(), Ok("further down"));
        for denied in ["link", "way-out/secret", "inner-link", "deep", "pipe"] {
            let fault = opened(&folder, denied).unwrap_err();
            assert!(matches!(fault, Fault::Denied(_)), "{denied}: {fault:?}");
        }
        for missing in ["b", "deep/b", "a/b", &"x".repeat(300)] {
            let fault = opened(&folder, missing).unwrap_err();
            assert!(matches!(fault, Fault::Missing(_)), "{missing}: {fault:?}");
        }
        // The root itself may be a link, and may come later.
        symlink(&root, place.path().join("root-link")).unwrap();
        assert!(opened(&Folder::new(place.path().join("root-link")), "a").is_ok());
        let unmounted = opened(&Folder::new(place.path().join("unmounted")), "a").unwrap_err();
        assert!(matches!(unmounted, Fault::Unavailable(_)), "{unmounted:?}");
    }

    #[test]
    fn a_file_is_written_whole_over_one_of_its_name_and_over_no_other() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let folder = Folder::new(root.clone());
        let victim = place.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        symlink(&victim, root.join("a")).unwrap();
        for text in ["first", "second"] {
            folder.write("a", text.as_bytes()).unwrap();
            assert_eq!(std::fs::read_to_string(root.join("a")).unwrap(), text);
        }
        assert_eq!(std::fs::read_to_string(victim).unwrap(), "precious");
        std::fs::create_dir(root.join("taken")).unwrap();
        assert!(folder.write("taken", b"x").is_err());
        let left: Vec<_> =
            std::fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }
}
