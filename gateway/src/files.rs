//! Uploaded files: streamed to a store, owned by their caller, removed after a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use axum::http::StatusCode;
use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{GetResult, ObjectStore as _, PutPayload, WriteMultipart};
use serde::{Deserialize, Serialize};
use url::Url;
use uuid::Uuid;

use crate::config::Files;
use crate::problem::Problem;

/// Parts that an upload has on their way to the store at a time.
const PARTS_IN_FLIGHT: usize = 2;

/// The longest name of a file that is kept, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// How long one piece of an upload may take to come.
const PIECE_MAX: Duration = Duration::from_secs(30);

/// What the store tells of a file, in the shape of OpenAI's file object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileView {
    pub id: String,
    pub object: String,
    pub bytes: u64,
    pub created_at: u64,
    pub expires_at: u64,
    pub filename: String,
    pub purpose: String,
    pub media_type: String,
}

/// Files in a folder. Each caller has a folder in it, with a file and its description for each upload.
#[derive(Debug)]
pub struct FileStore {
    store: LocalFileSystem,
    settings: Files,
    /// Bytes of all files, those under way included.
    used: AtomicU64,
}

impl FileStore {
    /// Opens the folder; makes it, if it is missing.
    ///
    /// # Errors
    /// The file system's.
    pub async fn open(settings: Files) -> Result<Self, String> {
        let explain = |e: &dyn std::fmt::Display| format!("files.folder: {}: {e}", settings.folder.display());
        std::fs::create_dir_all(&settings.folder).map_err(|e| explain(&e))?;
        let store = LocalFileSystem::new_with_prefix(&settings.folder).map_err(|e| explain(&e))?;
        let used: u64 = store
            .list(None)
            .map_ok(|meta| meta.size)
            .try_fold(0, |sum, n| async move { Ok(sum + n) })
            .await
            .map_err(|e| explain(&e))?;
        Ok(Self { store, settings, used: AtomicU64::new(used) })
    }

    /// Stores an upload as it comes. Nothing stays of one that fails.
    ///
    /// # Errors
    /// It is too large, too slow, breaks off, or the store is full.
    pub async fn put<E: std::fmt::Display>(
        &self,
        owner: &str,
        filename: &str,
        media_type: &str,
        pieces: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<FileView, Problem> {
        let id = format!("file-{}", Uuid::new_v4().simple());
        let path = content_path(owner, &id);
        let upload = self.store.put_multipart(&path).await.map_err(|e| broken("store the file", &e))?;
        let mut writer = WriteMultipart::new(upload);
        match self.stream(&mut writer, pieces).await {
            Ok(bytes) => {
                writer.finish().await.map_err(|e| broken("store the file", &e))?;
                let created_at = now_s();
                let view = FileView {
                    id,
                    object: "file".to_owned(),
                    bytes,
                    created_at,
                    expires_at: created_at + self.settings.keep.as_secs(),
                    filename: filename[..filename.floor_char_boundary(NAME_BYTES_MAX)].to_owned(),
                    purpose: "user_data".to_owned(),
                    media_type: media_type[..media_type.floor_char_boundary(NAME_BYTES_MAX)].to_owned(),
                };
                // Plain texts and numbers: cannot fail.
                let described = serde_json::to_vec(&view).unwrap_or_default();
                let put =
                    self.store.put(&description_path(owner, &view.id), PutPayload::from(described)).await;
                put.map_err(|e| broken("store the file", &e))?;
                Ok(view)
            }
            Err(problem) => {
                if let Err(error) = writer.abort().await {
                    tracing::warn!(%error, "remove an upload that broke off");
                }
                Err(problem)
            }
        }
    }

    async fn stream<E: std::fmt::Display>(
        &self,
        writer: &mut WriteMultipart,
        pieces: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<u64, Problem> {
        let mut pieces = std::pin::pin!(pieces);
        let mut bytes = 0;
        let mut reserved = Reserved { used: &self.used, bytes: 0 };
        loop {
            let next = tokio::time::timeout(PIECE_MAX, pieces.next()).await;
            let next = next.map_err(|_| {
                Problem::new(StatusCode::REQUEST_TIMEOUT, "slow_body", "the file did not come in time")
            })?;
            let Some(piece) = next else { break };
            let piece = piece.map_err(|e| Problem::invalid(format!("the upload broke off: {e}")))?;
            bytes += piece.len() as u64;
            if bytes > self.settings.file_bytes {
                let message = format!("the file has more than {} bytes", self.settings.file_bytes);
                return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message));
            }
            if !reserved.grow(piece.len() as u64, self.settings.total_bytes) {
                let message = "the store of uploads is full";
                return Err(Problem::new(StatusCode::INSUFFICIENT_STORAGE, "store_full", message)
                    .with_retry(crate::problem::Retry::No));
            }
            writer.wait_for_capacity(PARTS_IN_FLIGHT).await.map_err(|e| broken("store the file", &e))?;
            writer.put(piece);
        }
        reserved.bytes = 0;
        Ok(bytes)
    }

    /// What is known of a file. One of another caller is not there.
    ///
    /// # Errors
    /// There is no such file.
    pub async fn view(&self, owner: &str, id: &str) -> Result<FileView, Problem> {
        check_id(id)?;
        let got = self.store.get(&description_path(owner, id)).await.map_err(|e| missing(id, &e))?;
        let bytes = got.bytes().await.map_err(|e| broken("read the file's description", &e))?;
        serde_json::from_slice(&bytes).map_err(|e| broken("read the file's description", &e))
    }

    /// A file's bytes, as a stream.
    ///
    /// # Errors
    /// There is no such file.
    pub async fn content(&self, owner: &str, id: &str) -> Result<GetResult, Problem> {
        check_id(id)?;
        self.store.get(&content_path(owner, id)).await.map_err(|e| missing(id, &e))
    }

    /// # Errors
    /// There is no such file.
    pub async fn delete(&self, owner: &str, id: &str) -> Result<(), Problem> {
        let view = self.view(owner, id).await?;
        self.remove(owner, &view).await.map_err(|e| broken("remove the file", &e))
    }

    /// The reference that workers get for a file.
    ///
    /// # Errors
    /// There is no such file.
    pub async fn reference(&self, owner: &str, id: &str) -> Result<String, Problem> {
        self.view(owner, id).await?;
        let path = self
            .store
            .path_to_filesystem(&content_path(owner, id))
            .map_err(|e| broken("name the file", &e))?;
        let reference = Url::from_file_path(&path);
        Ok(reference.map_err(|()| broken("name the file", &path.display()))?.into())
    }

    /// Removes what is too old.
    pub async fn sweep(&self) {
        let now = now_s();
        let mut listed = self.store.list(None);
        while let Some(Ok(meta)) = listed.next().await {
            let age = now.saturating_sub(u64::try_from(meta.last_modified.timestamp()).unwrap_or(0));
            if age > self.settings.keep.as_secs() {
                match self.store.delete(&meta.location).await {
                    Ok(()) => self.release(meta.size),
                    Err(error) => tracing::warn!(%error, "remove an old upload"),
                }
            }
        }
    }

    async fn remove(&self, owner: &str, view: &FileView) -> object_store::Result<()> {
        self.store.delete(&description_path(owner, &view.id)).await?;
        self.store.delete(&content_path(owner, &view.id)).await?;
        self.release(view.bytes);
        Ok(())
    }

    fn release(&self, bytes: u64) {
        let _ = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| Some(used.saturating_sub(bytes)));
    }
}

/// Bytes that an upload has taken of the store; given back unless it is finished.
struct Reserved<'a> {
    used: &'a AtomicU64,
    bytes: u64,
}

impl Reserved<'_> {
    fn grow(&mut self, bytes: u64, most: u64) -> bool {
        let grown = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(bytes).filter(|sum| *sum <= most)
        });
        self.bytes += if grown.is_ok() { bytes } else { 0 };
        grown.is_ok()
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        self.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Ids are the gateway's own: no other text becomes part of a path.
fn check_id(id: &str) -> Result<(), Problem> {
    let ours = id
        .strip_prefix("file-")
        .is_some_and(|rest| rest.len() == 32 && rest.bytes().all(|b| b.is_ascii_hexdigit()));
    if ours { Ok(()) } else { Err(Problem::not_found("such file")) }
}

/// Names of callers are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
fn content_path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, id])
}

fn description_path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}.json")])
}

fn missing(id: &str, error: &object_store::Error) -> Problem {
    match error {
        object_store::Error::NotFound { .. } => Problem::not_found(&format!("file `{id}`")),
        other => broken("read the file", other),
    }
}

fn broken(what: &'static str, error: &dyn std::fmt::Display) -> Problem {
    tracing::error!(%error, "{what}");
    Problem::new(StatusCode::BAD_GATEWAY, "store", "the store of uploads fails")
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn store(folder: &std::path::Path) -> FileStore {
        let settings = Files {
            folder: folder.to_owned(),
            file_bytes: 10,
            total_bytes: 16,
            keep: Duration::from_secs(60),
        };
        FileStore::open(settings).await.unwrap()
    }

    fn pieces(texts: &[&'static str]) -> impl Stream<Item = Result<Bytes, std::io::Error>> + use<> {
        let pieces: Vec<_> = texts.iter().map(|text| Ok(Bytes::from_static(text.as_bytes()))).collect();
        futures_util::stream::iter(pieces)
    }

    #[tokio::test]
    async fn a_file_is_its_owners() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path()).await;
        let view = store.put("a", "x.txt", "text/plain", pieces(&["ab", "cd"])).await.unwrap();
        assert_eq!(store.view("a", &view.id).await.unwrap(), view);
        let content = store.content("a", &view.id).await.unwrap().bytes().await.unwrap();
        assert_eq!((&content[..], view.bytes), (&b"abcd"[..], 4));
        assert_eq!(store.view("b", &view.id).await.unwrap_err().status, 404);
        for odd in ["../a/x", "file-", "file-../../../../../../etc/passwd00000", ""] {
            assert_eq!(store.view("a", odd).await.unwrap_err().status, 404, "{odd}");
        }
        store.delete("a", &view.id).await.unwrap();
        assert_eq!(store.view("a", &view.id).await.unwrap_err().status, 404);
        assert_eq!(store.used.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn too_much_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path()).await;
        let large = store.put("a", "x", "", pieces(&["01234", "567890"])).await;
        assert_eq!(large.unwrap_err().status, 413);
        let broken =
            futures_util::stream::iter([Ok(Bytes::from_static(b"0123")), Err(std::io::Error::other("gone"))]);
        assert_eq!(store.put("a", "x", "", broken).await.unwrap_err().status, 400);
        assert_eq!(store.used.load(Ordering::Relaxed), 0);
        store.put("a", "x", "", pieces(&["0123456789"])).await.unwrap();
        assert_eq!(store.put("a", "x", "", pieces(&["0123456789"])).await.unwrap_err().status, 507);
    }
}
