//! Compiled kernels on disk: a start after the first one compiles nothing.
//!
//! A file begins with the SHA-256 of the rest; a file whose digest is wrong counts as missing. Files are written under another
//! name and then renamed, so that no reader sees an incomplete one. If processes start together, one compiles and the others wait
//! for a lock on a file, which ends with the process that holds it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

const DIGEST_BYTES: usize = 32;

/// A place on disk for one piece of code.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
}

impl Entry {
    /// `key` tells all that the code depends on; it becomes the file's name.
    pub fn new(folder: &Path, key: &str) -> Self {
        Self { path: folder.join(format!("{key}.bin")) }
    }

    /// The code, if it is there and whole.
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = fs::read(&self.path).ok()?;
        let (digest, code) = bytes.split_at_checked(DIGEST_BYTES)?;
        (Sha256::digest(code)[..] == *digest).then(|| code.to_vec())
    }

    /// Puts code there, whatever was there before.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn write(&self, code: &[u8]) -> io::Result<()> {
        let beside = self.path.with_extension(format!("{}.new", std::process::id()));
        let mut bytes = Sha256::digest(code).to_vec();
        bytes.extend_from_slice(code);
        let written = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, &self.path));
        if written.is_err() {
            // Best effort: the file may be missing. The write's error is returned.
            let _ = fs::remove_file(&beside);
        }
        written
    }

    /// Waits until no other process has the lock, and takes it until the file is dropped.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn lock(&self) -> io::Result<File> {
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder)?;
        }
        let lock = self.path.with_extension("lock");
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(lock)?;
        file.lock()?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_comes_back_and_what_is_broken_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let entry = Entry::new(&folder.path().join("kernels"), "f16-sm_90");
        assert_eq!(entry.read(), None);
        let _lock = entry.lock().unwrap();
        entry.write(b"code").unwrap();
        assert_eq!(entry.read().unwrap(), b"code");
        let path = &entry.path;
        let whole = fs::read(path).unwrap();
        for broken in [&whole[..whole.len() - 1], &whole[..20], b"", &[&whole[..], b"x"].concat()] {
            fs::write(path, broken).unwrap();
            assert_eq!(entry.read(), None);
        }
        entry.write(b"again").unwrap();
        assert_eq!(entry.read().unwrap(), b"again");
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 2, "the code and the lock: {left:?}");
    }

    #[test]
    fn a_folder_that_cannot_be_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let entry = Entry::new(&file.path().join("kernels"), "f16");
        assert!(entry.lock().is_err() && entry.write(b"code").is_err() && entry.read().is_none());
    }
}
