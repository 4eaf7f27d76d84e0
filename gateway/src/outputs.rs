//! Reads large outputs from the store that workers write them to, and checks their digests.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::stream::{self, BoxStream, Stream, StreamExt as _};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, GetResult, ObjectStore};
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;
use url::Url;
use vramq_stores::Fault;
use vramq_stores::folder::Folder;
use vramq_stores::reference::Reference;

use crate::folder_threads::{Busy, FolderThreads, file_pieces};
use crate::problem::Problem;
use crate::storage::{Place, covers};

/// How long the place may take to open an output.
const OPENED_WITHIN: Duration = Duration::from_secs(10);

/// A folder or an object store that workers have as `output_store`. The gateway only reads it.
pub struct OutputStore {
    source: Source,
    /// What its URLs begin with.
    base: Option<Url>,
    /// How long it may take to open an output.
    opened_within: Duration,
}

enum Source {
    /// Opened without following links, because programs as models may write to the folder too.
    Folder(Arc<Folder>, Arc<FolderThreads>),
    Cloud(Arc<dyn ObjectStore>),
}

/// Omits the cloud client, whose `Debug` would show its key.
impl std::fmt::Debug for OutputStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutputStore")
            .field("base", &self.base.as_ref().map(Url::as_str))
            .finish_non_exhaustive()
    }
}

/// An output that exists in the store.
pub struct StoredOutput {
    pub bytes: u64,
    /// When it was written.
    pub at: SystemTime,
    content: Content,
    reference: Reference,
    /// As of its store.
    opened_within: Duration,
}

/// Where its bytes are read.
enum Content {
    File(std::fs::File, Arc<FolderThreads>),
    Object(Arc<dyn ObjectStore>, Box<GetResult>),
}

/// Without its bytes.
impl std::fmt::Debug for StoredOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredOutput")
            .field("bytes", &self.bytes)
            .field("at", &self.at)
            .finish_non_exhaustive()
    }
}

impl OutputStore {
    /// Does not access the store: a folder may be mounted later.
    pub fn new(place: &Place) -> Self {
        match place {
            Place::Folder(folder) => {
                let threads = FolderThreads::new(folder);
                let source = Source::Folder(Arc::new(Folder::new(folder.clone())), threads);
                Self::of(source, Url::from_directory_path(folder).ok())
            }
            Place::Cloud(cloud) => Self::of(Source::Cloud(cloud.objects()), Some(cloud.url().clone())),
        }
    }

    fn of(source: Source, base: Option<Url>) -> Self {
        Self { source, base, opened_within: OPENED_WITHIN }
    }

    /// Whether a URL is inside this store, or the store itself.
    pub fn covers(&self, url: &Url) -> bool {
        self.base.as_ref().is_some_and(|base| covers(base, url))
    }

    /// Opens the object of a reference, by its name in this store. Workers may have mounted the folder elsewhere, or return references that
    /// begin with another URL; only the name has to match.
    ///
    /// # Errors
    /// The object is missing or was emptied, or the store cannot be read.
    pub async fn open(&self, uri: &str) -> Result<StoredOutput, Problem> {
        self.found(uri, false).await
    }

    /// Like [`open`](Self::open), without reading: [`StoredOutput::part`] reads a part of the bytes.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub async fn describe(&self, uri: &str) -> Result<StoredOutput, Problem> {
        self.found(uri, true).await
    }

    async fn found(&self, uri: &str, head: bool) -> Result<StoredOutput, Problem> {
        timeout(self.opened_within, self.opened(uri, head)).await.unwrap_or_else(|_| Err(silent()))
    }

    async fn opened(&self, uri: &str, head: bool) -> Result<StoredOutput, Problem> {
        let reference = Reference::parse(uri).map_err(|error| broken(uri, &format!("{error:?}")))?;
        // Names of outputs consist of ASCII letters, digits and hyphens.
        let name = reference.segments.last().cloned().unwrap_or_default();
        let opened_within = self.opened_within;
        match &self.source {
            Source::Folder(folder, threads) => {
                let folder = Arc::clone(folder);
                let opened = threads.run(move || {
                    let (file, bytes) = folder.open(&[name])?;
                    let at = file.metadata().and_then(|data| data.modified());
                    Ok((file, bytes, at.unwrap_or(SystemTime::UNIX_EPOCH)))
                });
                let opened = opened.await.map_err(|error| not_run(uri, &error))?;
                let (file, bytes, at) = opened.map_err(|fault| match fault {
                    Fault::Missing(_) => missing(),
                    fault => broken(uri, &format!("{fault:?}")),
                })?;
                not_emptied(uri, bytes, &reference)?;
                let content = Content::File(file, Arc::clone(threads));
                Ok(StoredOutput { bytes, at, content, reference, opened_within })
            }
            Source::Cloud(objects) => {
                let path = Path::from(String::from_utf8_lossy(&name).as_ref());
                let found = objects.get_opts(&path, GetOptions::new().with_head(head)).await;
                let found = found.map_err(|error| not_read(uri, &error))?;
                let (bytes, at) = (found.meta.size, found.meta.last_modified.into());
                not_emptied(uri, bytes, &reference)?;
                let content = Content::Object(Arc::clone(objects), Box::new(found));
                Ok(StoredOutput { bytes, at, content, reference, opened_within })
            }
        }
    }
}

impl StoredOutput {
    /// The media type in the reference.
    pub fn media_type(&self) -> &str {
        self.reference.media_type.as_deref().unwrap_or("application/octet-stream")
    }

    /// The SHA-256 in the reference, which the bytes must have.
    pub fn sha256(&self) -> Option<[u8; 32]> {
        self.reference.sha256
    }

    /// Streams the bytes. The last piece is sent only if the digest is right; otherwise the stream ends with an error, so that no client
    /// takes other bytes for the output.
    pub fn checked(self) -> impl Stream<Item = io::Result<Bytes>> + Send + use<> {
        let (pieces, reference) = (self.content.pieces(self.bytes).fuse(), self.reference);
        let start = (pieces, reference, Sha256::new(), None::<Bytes>);
        stream::try_unfold(start, |(mut pieces, reference, mut hash, mut held)| async move {
            while let Some(piece) = pieces.next().await {
                let piece = piece.inspect_err(|error| {
                    tracing::error!(
                        output = reference.shown(),
                        error = error.to_string(),
                        "cannot read an output: its download ends early"
                    );
                })?;
                hash.update(&piece);
                if let Some(before) = held.replace(piece) {
                    return Ok(Some((before, (pieces, reference, hash, held))));
                }
            }
            if let Err(error) = reference.check_digest(hash.clone().finalize().into()) {
                tracing::error!(
                    output = reference.shown(),
                    error,
                    "an output has changed since its worker wrote it: its download ends early"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            Ok(held.take().map(|last| (last, (pieces, reference, hash, None))))
        })
    }

    /// Streams a part of the bytes, unchecked: the digest covers all of them.
    ///
    /// # Errors
    /// The place cannot be read.
    pub async fn part(self, part: Range<u64>) -> Result<BoxStream<'static, io::Result<Bytes>>, Problem> {
        let uri = self.reference.shown();
        match self.content {
            Content::File(file, threads) => Ok(file_pieces(threads, file, part).boxed()),
            Content::Object(objects, described) => {
                let (path, options) = (described.meta.location.clone(), GetOptions::new());
                let options = options.with_range(Some(GetRange::Bounded(part)));
                let found = timeout(self.opened_within, objects.get_opts(&path, options)).await;
                let found = found.map_err(|_| silent())?.map_err(|error| not_read(&uri, &error))?;
                Ok(object_pieces(found))
            }
        }
    }
}

impl Content {
    fn pieces(self, bytes: u64) -> BoxStream<'static, io::Result<Bytes>> {
        match self {
            Self::File(file, threads) => file_pieces(threads, file, 0..bytes).boxed(),
            Self::Object(_, found) => object_pieces(*found),
        }
    }
}

fn object_pieces(found: GetResult) -> BoxStream<'static, io::Result<Bytes>> {
    found.into_stream().map(|piece| piece.map_err(io::Error::other)).boxed()
}

/// Checks the digest of an empty output in advance: it has no last piece that could be held back.
fn not_emptied(uri: &str, bytes: u64, reference: &Reference) -> Result<(), Problem> {
    if bytes > 0 {
        return Ok(());
    }
    reference.check(b"").map_err(|error| broken(uri, &error))
}

fn missing() -> Problem {
    Problem::not_found(
        "such output where this gateway looks for outputs: it was removed there, or its worker writes to another place",
    )
}

fn not_read(uri: &str, error: &object_store::Error) -> Problem {
    match error {
        object_store::Error::NotFound { .. } => missing(),
        error => broken(uri, error),
    }
}

fn not_run(uri: &str, error: &io::Error) -> Problem {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Busy>()) {
        Some(_) => silent(),
        None => broken(uri, error),
    }
}

fn silent() -> Problem {
    Problem::silent_store("the store that holds the output does not answer")
}

fn broken(uri: &str, error: &dyn std::fmt::Display) -> Problem {
    let shown = uri.split(['#', '?']).next().unwrap_or_default();
    tracing::error!(output = shown, error = error.to_string(), "cannot read an output");
    Problem::new(
        StatusCode::BAD_GATEWAY,
        "store",
        "the store that holds the output failed; the gateway's log says how",
    )
}

#[cfg(test)]
mod tests {
    use futures_util::TryStreamExt as _;
    use object_store::ObjectStoreExt as _;
    use object_store::memory::InMemory;
    use object_store::throttle::{ThrottleConfig, ThrottledStore};

    use super::*;

    /// `printf test | sha256sum`
    const SHA256_OF_TEST: &str = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";
    /// `printf '' | sha256sum`
    const SHA256_OF_NOTHING: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    async fn read(stored: StoredOutput) -> io::Result<Vec<u8>> {
        let pieces: Vec<Bytes> = stored.checked().try_collect().await?;
        Ok(pieces.concat())
    }

    #[tokio::test]
    async fn an_output_is_found_by_its_name_wherever_its_worker_has_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("name-0"), "test").unwrap();
        let store = OutputStore::new(&Place::Folder(folder.path().to_owned()));
        for place in ["file:///elsewhere", "https://files.example.com/out", "s3://bucket/out"] {
            let stored = store.open(&format!("{place}/name-0#sha256={SHA256_OF_TEST}&type=text/plain")).await;
            let stored = stored.unwrap();
            assert_eq!((stored.bytes, stored.media_type()), (4, "text/plain"));
            assert_eq!(read(stored).await.unwrap(), b"test");
        }
        let none = store.open(&format!("file:///elsewhere/name-1#sha256={SHA256_OF_TEST}")).await;
        assert_eq!(none.err().unwrap().status, 404);
    }

    /// A request that waited for such a store would hold its permits for as long.
    #[tokio::test]
    async fn a_place_that_does_not_open_an_output_is_not_waited_for() {
        let objects = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
        objects.put(&Path::from("name-0"), "test".into()).await.unwrap();
        let source = Source::Cloud(Arc::<ThrottledStore<InMemory>>::clone(&objects));
        let mut store = OutputStore::of(source, None);
        store.opened_within = Duration::from_millis(10);
        let uri = format!("s3://bucket/out/name-0#sha256={SHA256_OF_TEST}");
        // It is in memory, and so there at the first look.
        let described = store.describe(&uri).await.unwrap();
        objects.config_mut(|config| config.wait_get_per_call = Duration::from_secs(3600));
        let answers = async {
            let (opened, part) = (store.open(&uri).await, described.part(0..1).await);
            [opened.err().unwrap(), part.err().unwrap()]
        };
        let answers = timeout(Duration::from_secs(60), answers).await.expect("it waits for the store");
        assert_eq!(answers, [silent(), silent()]);
    }

    #[tokio::test]
    async fn a_part_of_an_output_is_read_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("name-0"), "test").unwrap();
        let store = OutputStore::new(&Place::Folder(folder.path().to_owned()));
        for (part, expected) in [(0..1, "t"), (1..3, "es"), (0..4, "test"), (3..4, "t")] {
            let stored = store.describe(&format!("file:///o/name-0#sha256={SHA256_OF_TEST}")).await.unwrap();
            let pieces: Vec<Bytes> = stored.part(part).await.unwrap().try_collect().await.unwrap();
            assert_eq!(pieces.concat(), expected.as_bytes());
        }
    }

    #[tokio::test]
    async fn a_download_fails_if_the_stored_bytes_have_changed() {
        let folder = tempfile::tempdir().unwrap();
        let store = OutputStore::new(&Place::Folder(folder.path().to_owned()));
        let large = vec![7; 1 << 20];
        for other in [&b"tess"[..], &large] {
            std::fs::write(folder.path().join("name-0"), other).unwrap();
            let stored = store.open(&format!("file:///o/name-0#sha256={SHA256_OF_TEST}")).await.unwrap();
            let pieces: Vec<_> = stored.checked().collect().await;
            let sent: usize = pieces.iter().flatten().map(Bytes::len).sum();
            assert!(pieces.last().unwrap().is_err() && sent < other.len(), "{sent} of {}", other.len());
        }
    }

    #[tokio::test]
    async fn an_output_that_was_emptied_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let (path, uri) = (folder.path().join("name-0"), format!("file:///o/name-0#sha256={SHA256_OF_TEST}"));
        let store = OutputStore::new(&Place::Folder(folder.path().to_owned()));
        std::fs::write(&path, "test").unwrap();
        let stored = store.open(&uri).await.unwrap();
        std::fs::write(&path, "").unwrap();
        assert!(read(stored).await.is_err(), "it was emptied after it was opened");
        assert_eq!(store.open(&uri).await.err().unwrap().status, 502);
        let empty = store.open(&format!("file:///o/name-0#sha256={SHA256_OF_NOTHING}")).await.unwrap();
        assert_eq!(read(empty).await.unwrap(), b"");
    }

    #[tokio::test]
    async fn a_link_is_not_followed() {
        let (folder, outside) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        std::os::unix::fs::symlink(outside.path(), folder.path().join("name-0")).unwrap();
        let store = OutputStore::new(&Place::Folder(folder.path().to_owned()));
        let link = store.open(&format!("file:///o/name-0#sha256={SHA256_OF_TEST}")).await;
        assert_eq!(link.err().unwrap().status, 502);
    }
}
