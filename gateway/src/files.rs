//! Uploaded files: streamed to a store, owned by their caller, removed after a time.

mod limits;
mod names;
mod problems;
mod removal;
mod upload;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _, TryStreamExt as _, stream};
use object_store::{GetOptions, GetRange, GetResult, ObjectMeta, ObjectStore as _, ObjectStoreExt as _};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use uuid::Uuid;

use crate::background_work::Work;
use crate::config::Files;
use crate::problem::Problem;
use crate::storage::{Place, Storage};
use crate::used::Used;
pub(crate) use names::is_id;
use names::{check_id, content_path, description_path, is_ours};
use problems::{broken, failed, missing, not_there, silent};
use removal::Removals;
pub(crate) use upload::UploadRoom;
use upload::{Held, Upload};

/// Files that are looked up at a time for one job: it has up to 65,536 inputs, and an object store takes some 20 ms for each.
const LOOKUPS_MAX: usize = 32;

/// How long the place may take to give a file's description, which has some hundred bytes, or to open its content.
const OPENED_WITHIN: Duration = Duration::from_secs(10);

/// A stored file, in the shape of OpenAI's file object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileView {
    pub id: String,
    pub object: String,
    pub bytes: u64,
    pub created_at: u64,
    /// `None`: the gateway does not remove the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<u64>,
    pub filename: String,
    pub purpose: String,
    /// OpenAI's clients wait for `processed`. Descriptions of older versions lack it.
    #[serde(default)]
    pub status: FileStatus,
    pub media_type: String,
}

/// The status in OpenAI's API. Here a file gets its id only when it is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileStatus {
    #[default]
    Processed,
}

/// Files in a folder or an object store. Each caller has a folder in it, with a file and its description for each upload.
#[derive(Debug)]
pub struct FileStore {
    storage: Storage,
    settings: Files,
    /// Recounted at each sweep. In between, only this gateway's own changes are added.
    used: Arc<Used>,
    removals: Removals,
}

impl FileStore {
    /// Opens the store, and sweeps a folder. An object store is not contacted, because one that is down must not keep the gateway from
    /// starting. The first periodic sweep reads it.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn open(settings: Files) -> Result<Self, String> {
        let place = settings.place.clone();
        if let (Place::Folder(folder), true) = (&place, settings.is_own) {
            if folder.as_os_str().is_empty() {
                return Err("files: neither XDG_STATE_HOME nor HOME has an absolute path".to_owned());
            }
            make_private(folder).map_err(|error| format!("files: {place}: {error}"))?;
        }
        let storage = Storage::open(&place).map_err(|error| format!("files: {error}"))?;
        let used = Arc::new(Used::new(settings.total_bytes, settings.owner_bytes));
        let this = Self { storage, settings, used, removals: Removals::default() };
        if let Place::Folder(_) = place {
            this.sweep().await.map_err(|error| format!("files: {place}: {error}"))?;
        }
        Ok(this)
    }

    /// How long an upload may take.
    pub fn upload_max(&self) -> Duration {
        limits::upload_max(self.settings.file_bytes)
    }

    /// The most memory that an upload takes on its way to the place. `form`: the bytes of the whole request, if they are known.
    pub fn buffer_bytes(&self, form: Option<u64>) -> usize {
        let most = upload::buffer_bytes(self.part_bytes());
        form.and_then(|form| usize::try_from(form).ok()).map_or(most, |form| form.min(most))
    }

    fn part_bytes(&self) -> usize {
        match self.settings.place {
            Place::Folder(_) => upload::FOLDER_PART_BYTES,
            Place::Cloud(_) => upload::CLOUD_PART_BYTES,
        }
    }

    /// Whether workers do not have the place as a store, so that jobs take the bytes of uploads along.
    pub fn is_own(&self) -> bool {
        self.settings.is_own
    }

    /// Where the files are.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Stores an upload while it is received. A failed upload leaves nothing behind. `room` is dropped when the upload is no longer in memory.
    ///
    /// # Errors
    /// It is too large, too slow, cannot be read, or the store is full.
    pub async fn put(
        &self,
        owner: &str,
        filename: &str,
        media_type: &str,
        pieces: impl Stream<Item = Result<Bytes, Problem>>,
        room: UploadRoom,
    ) -> Result<FileView, Problem> {
        let id = format!("file-{}", Uuid::new_v4().simple());
        let held = Held { _room: room, reserved: self.used.reserve(owner) };
        let begun = Upload::begin(&self.storage.objects, content_path(owner, &id), self.part_bytes(), held);
        let mut upload = begun.await.map_err(|e| failed(&self.settings.place, "store the file", &e))?;
        let bytes = self.stream(&mut upload, pieces).await?;
        let created_at = seconds_of(SystemTime::now());
        let view = FileView {
            id,
            object: "file".to_owned(),
            bytes,
            created_at,
            expires_at: Some(created_at + self.settings.keep.as_secs()),
            filename: limits::cut(filename).to_owned(),
            purpose: "user_data".to_owned(),
            status: FileStatus::Processed,
            media_type: limits::cut(media_type).to_owned(),
        };
        // Plain texts and numbers: cannot fail.
        let described = serde_json::to_vec(&view).unwrap_or_default();
        let finished = upload.finish(description_path(owner, &view.id), described).await;
        finished.map_err(|e| failed(&self.settings.place, "store the file", &e))?;
        Ok(view)
    }

    /// Adds the pieces to the upload. Returns how many bytes they have.
    async fn stream(
        &self,
        upload: &mut Upload,
        pieces: impl Stream<Item = Result<Bytes, Problem>>,
    ) -> Result<u64, Problem> {
        let mut pieces = std::pin::pin!(pieces);
        let mut bytes = 0;
        while let Some(piece) = limits::next_piece(&mut pieces).await? {
            bytes += piece.len() as u64;
            limits::check_size(bytes, self.settings.file_bytes)?;
            upload.reserve(piece.len() as u64).map_err(limits::full)?;
            upload.put(&piece).await.map_err(|e| failed(&self.settings.place, "store the file", &e))?;
        }
        Ok(bytes)
    }

    /// The description of a file. A file of another caller counts as missing.
    ///
    /// # Errors
    /// There is no such file.
    pub async fn view(&self, owner: &str, id: &str) -> Result<FileView, Problem> {
        check_id(id)?;
        let read = async {
            let found = self.storage.objects.get(&description_path(owner, id)).await;
            let bytes = found.map_err(|e| missing(&self.settings.place, id, &e))?.bytes().await;
            bytes.map_err(|e| failed(&self.settings.place, "read the file's description", &e))
        };
        let bytes = timeout(OPENED_WITHIN, read).await.unwrap_or_else(|_| Err(silent()))?;
        serde_json::from_slice(&bytes)
            .map_err(|e| broken(&self.settings.place, "read the file's description", &e))
    }

    /// A file's bytes, or a part of them, as a stream.
    ///
    /// # Errors
    /// There is no such file, or the place does not open it in time.
    pub async fn content(
        &self,
        owner: &str,
        id: &str,
        part: Option<Range<u64>>,
    ) -> Result<GetResult, Problem> {
        check_id(id)?;
        let options = GetOptions::new().with_range(part.map(GetRange::Bounded));
        let path = content_path(owner, id);
        let found = timeout(OPENED_WITHIN, self.storage.objects.get_opts(&path, options)).await;
        found.map_err(|_| silent())?.map_err(|e| missing(&self.settings.place, id, &e))
    }

    /// Removes a file. `work` is dropped when that has ended, also if the caller hangs up before.
    ///
    /// # Errors
    /// There is no such file, or another request is removing it.
    pub async fn delete(&self, owner: &str, id: &str, work: Work) -> Result<(), Problem> {
        check_id(id)?;
        // Before the description is read: once this request may remove the file, it sees what the one before has left.
        let removal = self.removals.begin(owner, id).ok_or_else(|| not_there(id))?;
        let view = self.view(owner, id).await?;
        let removed = removal.run(&self.storage.objects, &self.used, view.bytes, work).await;
        removed.map_err(|e| failed(&self.settings.place, "remove the file", &e))
    }

    /// The references that workers get for files, by their ids.
    ///
    /// # Errors
    /// One of the files does not exist.
    pub async fn references(
        &self,
        owner: &str,
        ids: BTreeSet<String>,
    ) -> Result<HashMap<String, String>, Problem> {
        let found = stream::iter(ids).map(|id| async move {
            self.view(owner, &id).await?;
            let reference: String = self.storage.url_of(&content_path(owner, &id)).into();
            Ok::<_, Problem>((id, reference))
        });
        found.buffered(LOOKUPS_MAX).try_collect().await
    }

    /// The sizes of files in bytes, by their ids.
    ///
    /// # Errors
    /// One of the files does not exist.
    pub async fn sizes(&self, owner: &str, ids: BTreeSet<String>) -> Result<HashMap<String, u64>, Problem> {
        let found = stream::iter(ids).map(|id| async move {
            let bytes = self.view(owner, &id).await?.bytes;
            Ok::<_, Problem>((id, bytes))
        });
        found.buffered(LOOKUPS_MAX).try_collect().await
    }

    /// The bytes of files, by their ids.
    ///
    /// # Errors
    /// One of the files does not exist.
    pub async fn bytes(
        &self,
        owner: &str,
        ids: impl IntoIterator<Item = String>,
    ) -> Result<HashMap<String, Bytes>, Problem> {
        let found = stream::iter(ids).map(|id| async move {
            let content = self.content(owner, &id, None).await?;
            let bytes =
                content.bytes().await.map_err(|e| failed(&self.settings.place, "read the file", &e))?;
            Ok::<_, Problem>((id, bytes))
        });
        found.buffered(LOOKUPS_MAX).try_collect().await
    }

    /// Removes what is too old, and counts the rest. What has no name of an upload belongs to others, and is left alone.
    ///
    /// # Errors
    /// The listing ended early. What it had listed so far was handled.
    pub async fn sweep(&self) -> object_store::Result<()> {
        let now = seconds_of(SystemTime::now());
        let is_old = |meta: &ObjectMeta| {
            let stored_at = u64::try_from(meta.last_modified.timestamp()).unwrap_or(0);
            now.saturating_sub(stored_at) > self.settings.keep.as_secs()
        };
        self.used.counted(self.storage.sweep(is_ours, is_old).await?);
        Ok(())
    }
}

/// Makes a folder that only this user can look into. One that is there already must be this user's.
fn make_private(folder: &std::path::Path) -> std::io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))
}

/// Seconds since 1970.
pub fn seconds_of(at: SystemTime) -> u64 {
    at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
