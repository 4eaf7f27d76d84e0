//! Model revisions: short names that distinguish versions of a model that compute different outputs under one name.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};

/// Hexadecimal digits of a revision: 64 bits, so that no two of a fleet's are alike by chance.
const DIGITS: usize = 16;

/// A digest of a file's content.
pub type ContentDigest = [u8; 32];

/// Reads a file. What a [`RevisionHash`] gets is this digest, so that the length need not be known before.
///
/// # Errors
/// The file cannot be read.
pub fn content_digest(path: &Path) -> io::Result<ContentDigest> {
    let mut file = File::open(path)?;
    let mut content = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(content.finalize().into()),
            Ok(read) => content.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Hashes what a model's outputs depend on.
#[derive(Debug, Default)]
pub struct RevisionHash(Sha256);

impl RevisionHash {
    /// Adds bytes under a name. Lengths are hashed too, so that different lists never hash the same bytes.
    pub fn add(&mut self, name: &str, bytes: &[u8]) {
        for part in [name.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// Adds a file's content under a name; nothing if there is no such file.
    ///
    /// # Errors
    /// The file is there and cannot be read.
    pub fn add_file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        match content_digest(path) {
            Ok(digest) => self.add(name, &digest),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The revision: `KIND-DIGITS`.
    pub fn finish(self, kind: &str) -> String {
        let digest = self.0.finalize();
        let digits: String = digest.iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
        format!("{kind}-{digits}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parts: &[(&str, &str)]) -> String {
        let mut hash = RevisionHash::default();
        parts.iter().for_each(|(name, text)| hash.add(name, text.as_bytes()));
        hash.finish("f32")
    }

    #[test]
    fn any_difference_gives_another_revision() {
        let one = of(&[("a", "x"), ("b", "y")]);
        assert_eq!(one, of(&[("a", "x"), ("b", "y")]));
        assert_eq!((one.len(), &one[..4]), (4 + DIGITS, "f32-"));
        for other in [of(&[("a", "xb"), ("", "y")]), of(&[("a", "x")]), of(&[("b", "y"), ("a", "x")])] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn files_count_by_their_content() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let revision = || {
            let mut hash = RevisionHash::default();
            hash.add_file("weights", &path).unwrap();
            hash.finish("f16")
        };
        let without = revision();
        std::fs::write(&path, vec![7; 3 << 20]).unwrap();
        let with = revision();
        std::fs::write(&path, [vec![7; (3 << 20) - 1], vec![8]].concat()).unwrap();
        let changed = revision();
        assert!(without != with && with != changed && without != changed);
        assert!(RevisionHash::default().add_file("folder", folder.path()).is_err());
    }
}
