//! Fetches the bytes of a reference in a reply, from any kind of store. For programs that received the reply.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, openat};
use sha2::{Digest as _, Sha256};

use crate::Fault;
use crate::cloud::{CloudOptions, CloudStore};
use crate::folder_of;
use crate::http::HttpStore;
use crate::reference::{FILE, InvalidReference, Reference, is_cloud};

/// What is read at a time.
const PIECE_BYTES: usize = 64 * 1024;

/// What a download may do.
#[derive(Clone, Debug)]
pub struct Access {
    /// The most bytes that it may have.
    pub bytes_max: u64,
    /// Addresses of this machine and of private networks are allowed too. Only for http and https.
    pub is_private: bool,
    /// How object stores are reached. Its timeout is that of web servers, too.
    pub cloud: CloudOptions,
}

/// Why nothing, or not all, was downloaded.
#[derive(Debug, thiserror::Error)]
pub enum DownloadError {
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Missing(String),
    /// The bytes do not have the reference's digest. They were written all the same.
    #[error("{0}")]
    Mismatch(String),
    #[error("{0}")]
    TooLarge(String),
    /// The store does not work. It may work later.
    #[error("{0}")]
    Unavailable(String),
    #[error("write what was downloaded: {0}")]
    Write(#[source] io::Error),
}

impl From<Fault> for DownloadError {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Denied(what) => Self::Denied(what),
            Fault::Missing(what) => Self::Missing(what),
            Fault::Mismatch(what) => Self::Mismatch(what),
            Fault::TooLarge(what) => Self::TooLarge(what),
            Fault::Unavailable(what) => Self::Unavailable(what),
        }
    }
}

/// Writes the bytes of a reference as they arrive, then checks their digest if the reference has one. Returns the number of bytes.
/// Blocks: call it from a thread of a tokio runtime that may block.
///
/// # Errors
/// The text is not a reference, the store does not return the object, the object is too large or has another digest, or `to` fails.
pub fn download(text: &str, access: &Access, to: &mut impl Write) -> Result<u64, DownloadError> {
    let reference = Reference::parse(text).map_err(|error| match error {
        InvalidReference::Malformed(what) => DownloadError::Invalid(what),
        InvalidReference::Denied(what) => DownloadError::Denied(what),
    })?;
    let (mut from, length) = open(&reference, access)?;
    let too_large = |has: u64| {
        let (shown, most) = (reference.shown(), access.bytes_max);
        DownloadError::TooLarge(format!("{shown} has {has} bytes or more, at most {most} are taken"))
    };
    if let Some(length) = length.filter(|length| *length > access.bytes_max) {
        return Err(too_large(length));
    }
    let (mut bytes, mut hash, mut piece) = (0, Sha256::new(), vec![0; PIECE_BYTES]);
    loop {
        let count = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(DownloadError::Unavailable(format!("read {}: {error}", reference.shown())));
            }
        };
        bytes += count as u64;
        if bytes > access.bytes_max {
            return Err(too_large(bytes));
        }
        hash.update(&piece[..count]);
        to.write_all(&piece[..count]).map_err(DownloadError::Write)?;
    }
    to.flush().map_err(DownloadError::Write)?;
    reference.check_digest(hash.finalize().into()).map_err(DownloadError::Mismatch)?;
    Ok(bytes)
}

/// The bytes as they come, and how many if it is known.
fn open(
    reference: &Reference,
    access: &Access,
) -> Result<(Box<dyn Read + Send>, Option<u64>), DownloadError> {
    let shown = reference.shown();
    match reference.url.scheme() {
        FILE => {
            let file = open_file(&folder_of(&reference.segments)).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => DownloadError::Missing(format!("there is no file {shown}")),
                io::ErrorKind::PermissionDenied => DownloadError::Denied(format!("{shown}: {error}")),
                _ => DownloadError::Unavailable(format!("open {shown}: {error}")),
            })?;
            let length = file.metadata().map(|data| data.is_file().then_some(data.len()));
            match length.map_err(|error| DownloadError::Unavailable(format!("open {shown}: {error}")))? {
                Some(length) => Ok((Box::new(file), Some(length))),
                None => Err(DownloadError::Denied(format!("{shown} is not a regular file"))),
            }
        }
        "http" | "https" => Ok(HttpStore::new(access.is_private, access.cloud.timeout).get(reference)?),
        _ if is_cloud(&reference.url) => {
            let mut bucket = reference.url.clone();
            bucket.set_path("");
            let store = CloudStore::open(&bucket, &access.cloud)
                .map_err(|invalid| DownloadError::Invalid(invalid.to_string()))?;
            let (body, length) = store.get(reference)?;
            Ok((Box::new(body), Some(length)))
        }
        other => Err(DownloadError::Invalid(format!(
            "{shown} begins with {other}:, to which no worker writes outputs"
        ))),
    }
}

/// Opens a file for reading. Does not wait for a writer of a pipe, and does not take over a terminal.
fn open_file(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.union(OFlags::NOCTTY).union(OFlags::CLOEXEC);
    Ok(openat(CWD, path, OFlags::RDONLY.union(flags), Mode::empty())?.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn downloaded(text: &str, bytes_max: u64) -> Result<Vec<u8>, DownloadError> {
        let cloud = CloudOptions { timeout: Duration::from_secs(20), ..CloudOptions::default() };
        let mut bytes = Vec::new();
        let count = download(text, &Access { bytes_max, is_private: false, cloud }, &mut bytes)?;
        assert_eq!(count, bytes.len() as u64);
        Ok(bytes)
    }

    #[test]
    fn a_file_is_read_within_its_bound_and_compared_with_its_digest() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a b"), "test").unwrap();
        let url = format!("file://{}/a%20b", folder.path().display());
        // `printf test | sha256sum`
        let digest = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
        assert_eq!(downloaded(&format!("{url}#sha256={digest}&type=text/plain"), 4).unwrap(), b"test");
        let wrong = format!("{url}#sha256={}", "0".repeat(64));
        assert!(matches!(downloaded(&wrong, 4), Err(DownloadError::Mismatch(what)) if what.contains(digest)));
        assert!(matches!(downloaded(&url, 3), Err(DownloadError::TooLarge(_))));
        let none = format!("file://{}/none", folder.path().display());
        assert!(matches!(downloaded(&none, 4), Err(DownloadError::Missing(_))));
        let itself = format!("file://{}", folder.path().display());
        assert!(matches!(downloaded(&itself, 4), Err(DownloadError::Denied(_))));
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR, 0).unwrap();
        // The pipe has no writer, and `download` must not wait for one.
        let pipe = format!("file://{}", pipe.display());
        assert!(matches!(downloaded(&pipe, 4), Err(DownloadError::Denied(_))));
    }

    #[test]
    fn invalid_and_unusable_references_are_refused() {
        for text in ["", "a.png", "ftp://h/a", "s3:///key"] {
            assert!(matches!(downloaded(text, 4), Err(DownloadError::Invalid(_))), "{text}");
        }
        for text in ["http://127.0.0.1:1/a", "https://user@h/a", "s3://bucket/a?versionId=1"] {
            assert!(matches!(downloaded(text, 4), Err(DownloadError::Denied(_))), "{text}");
        }
    }
}
