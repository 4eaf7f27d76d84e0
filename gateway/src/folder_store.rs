//! A folder as an object store, with a bounded number of operations at a time. What it has stored is on the disk.

use std::fmt;
use std::io;
use std::path::Path as FsPath;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::future::ready;
use futures_util::stream::{BoxStream, StreamExt as _, TryStreamExt as _};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
    UploadPart,
};
use tokio::runtime::Handle;

use crate::folder_threads::{Busy, FolderThreads, Turn, file_pieces};

/// What the names of claims end with. Nobody relies on the claim of a gateway that is gone, so a power cut may take it, or leave it empty.
pub const CLAIM_SUFFIX: &str = ".claim";

/// Objects that a sweep removes at a time.
const REMOVALS: usize = 10;

/// A folder whose operations are bounded.
#[derive(Debug)]
pub struct FolderStore {
    files: Arc<LocalFileSystem>,
    /// The same folder, for what need not outlive a power cut.
    unsynced: Arc<LocalFileSystem>,
    threads: Arc<FolderThreads>,
}

impl FolderStore {
    /// # Errors
    /// The folder is not there.
    pub fn new(folder: &FsPath) -> Result<Self> {
        // A gateway acknowledges replies, and answers uploads, when they are stored: a power cut must not take them then.
        let files = LocalFileSystem::new_with_prefix(folder)?.with_fsync(can_sync(folder));
        let unsynced = Arc::new(LocalFileSystem::new_with_prefix(folder)?);
        Ok(Self { files: Arc::new(files), unsynced, threads: FolderThreads::new(folder) })
    }

    /// Runs an operation, which goes on and keeps its turn if the caller is dropped: its thread may still block.
    async fn run<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        run(self.threads.turn().await, operation).await
    }
}

/// Whether the folder's entries can be written to the disk. Some file systems, such as FUSE's, cannot, and would fail each write.
fn can_sync(folder: &FsPath) -> bool {
    let synced = std::fs::File::open(folder).and_then(|folder| folder.sync_all());
    if let Err(error) = &synced {
        tracing::warn!(folder = %folder.display(), %error, "cannot write the folder to the disk (fsync): a power cut may take what was just stored");
    }
    synced.is_ok()
}

/// Whether an operation was not tried because none of the others ends.
pub fn is_busy(error: &Error) -> bool {
    matches!(error, Error::Generic { source, .. } if source.is::<Busy>())
}

async fn run<T: Send + 'static>(
    turn: std::result::Result<Turn, Busy>,
    operation: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let turn = turn.map_err(failed)?;
    let run = tokio::spawn(async move {
        let done = operation.await;
        drop(turn);
        done
    });
    run.await?
}

/// As [`failed`], with the error that says whether the folder is busy.
fn failed_io(error: io::Error) -> Error {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Busy>()) {
        Some(busy) => failed(*busy),
        None => failed(error),
    }
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "folder", source: error.into() }
}

impl fmt::Display for FolderStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.files.fmt(f)
    }
}

#[async_trait]
impl ObjectStore for FolderStore {
    async fn put_opts(&self, at: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        let at = at.clone();
        if at.as_ref().ends_with(CLAIM_SUFFIX) {
            let files = Arc::clone(&self.unsynced);
            return self.run(async move { files.put_opts(&at, payload, options).await }).await;
        }
        // Ends and records of jobs would be lost otherwise, so this waits also while the folder hangs. `jobs/in_time.rs` bounds the wait.
        let (files, turn) = (Arc::clone(&self.files), self.threads.turn_to_store().await);
        run(turn, async move { files.put_opts(&at, payload, options).await }).await
    }

    async fn put_multipart_opts(
        &self,
        at: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let (files, at) = (Arc::clone(&self.files), at.clone());
        // Its future creates the file itself, without a thread for what blocks.
        let begun = self.threads.run(move || files.put_multipart_opts(&at, options).now_or_never());
        let begun = begun.await.map_err(failed_io)?;
        let upload = begun.unwrap_or_else(|| Err(failed("the file is not created at once")))?;
        Ok(Box::new(FolderUpload { upload: Some(upload), threads: Arc::clone(&self.threads) }))
    }

    async fn get_opts(&self, at: &Path, options: GetOptions) -> Result<GetResult> {
        let (files, at) = (Arc::clone(&self.files), at.clone());
        let mut found = self.run(async move { files.get_opts(&at, options).await }).await?;
        if let GetResultPayload::File(file, _) = found.payload {
            let pieces = file_pieces(Arc::clone(&self.threads), file, found.range.clone());
            found.payload = GetResultPayload::Stream(pieces.map_err(failed_io).boxed());
        }
        Ok(found)
    }

    fn delete_stream(&self, at: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (files, threads) = (Arc::clone(&self.files), Arc::clone(&self.threads));
        let removed = at.map(move |at| {
            let (files, threads) = (Arc::clone(&files), Arc::clone(&threads));
            async move {
                let at = at?;
                run(threads.turn().await, async move { files.delete(&at).await.map(|()| at) }).await
            }
        });
        removed.buffered(REMOVALS).boxed()
    }

    /// One thread at a time: only a sweep lists.
    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.files.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let (files, prefix) = (Arc::clone(&self.files), prefix.cloned());
        self.run(async move { files.list_with_delimiter(prefix.as_ref()).await }).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        let (files, from, to) = (Arc::clone(&self.files), from.clone(), to.clone());
        self.run(async move { files.copy_opts(&from, &to, options).await }).await
    }
}

/// A file that is being written.
#[derive(Debug)]
struct FolderUpload {
    /// `None` while one of the last operations runs.
    upload: Option<Box<dyn MultipartUpload>>,
    threads: Arc<FolderThreads>,
}

#[async_trait]
impl MultipartUpload for FolderUpload {
    fn put_part(&mut self, part: PutPayload) -> UploadPart {
        let Some(upload) = &mut self.upload else {
            return ready(Err(failed("the upload has ended"))).boxed();
        };
        // Nothing is written before the future runs.
        let (written, threads) = (upload.put_part(part), Arc::clone(&self.threads));
        async move { run(threads.turn().await, written).await }.boxed()
    }

    async fn complete(&mut self) -> Result<PutResult> {
        let turn = self.threads.turn().await.map_err(failed)?;
        let mut upload = self.upload.take().ok_or_else(|| failed("the upload has ended"))?;
        run(Ok(turn), async move { upload.complete().await }).await
    }

    async fn abort(&mut self) -> Result<()> {
        let turn = self.threads.turn().await.map_err(failed)?;
        let Some(mut upload) = self.upload.take() else { return Ok(()) };
        run(Ok(turn), async move { upload.abort().await }).await
    }
}

impl Drop for FolderUpload {
    fn drop(&mut self) {
        let (Some(mut upload), Ok(runtime)) = (self.upload.take(), Handle::try_current()) else { return };
        let threads = Arc::clone(&self.threads);
        runtime.spawn(async move {
            // Not while the folder hangs: it removes its file, in a thread.
            let _turn = threads.turn_at_last().await;
            // An `Err`: a sweep removes the file.
            let _ = upload.abort().await;
        });
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Instant;

    use super::*;
    use crate::folder_threads::OPERATIONS_MAX;
    use crate::until::until;

    /// Opening a pipe that nobody writes to hangs, as a file of a network does that is gone.
    #[tokio::test]
    async fn a_folder_that_hangs_refuses_what_is_too_much_and_holds_up_no_other() {
        let [hangs, works] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let pipe = hangs.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let [store, other] =
            [&hangs, &works].map(|folder| Arc::new(FolderStore::new(folder.path()).unwrap()));
        for name in ["there", "pipe-2"] {
            store.put(&Path::from(name), vec![1].into()).await.unwrap();
        }
        let read = |name: &'static str| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.get(&Path::from(name)).await?.bytes().await })
        };
        let hanging: Vec<_> = (0..OPERATIONS_MAX).map(|_| read("pipe")).collect();
        until("all threads are taken", || store.threads.free() == 0).await;
        // Who gives up leaves the thread behind, which still counts.
        for caller in hanging {
            caller.abort();
        }
        assert!(is_busy(&read("there").await.unwrap().unwrap_err()));
        let written = tokio::spawn({
            let store = Arc::clone(&store);
            async move { store.put(&Path::from("written"), vec![2].into()).await }
        });
        let since = Instant::now();
        for _ in 0..1_000 {
            assert!(is_busy(&read("there").await.unwrap().unwrap_err()));
        }
        assert!(since.elapsed().as_secs() < 4, "nobody waits once it is known");
        other.put(&Path::from("a/b"), vec![1].into()).await.unwrap();
        assert_eq!(other.get(&Path::from("a/b")).await.unwrap().bytes().await.unwrap(), vec![1]);
        // A writer lets all of them go on.
        assert!(!written.is_finished(), "who writes waits");
        let _writer = std::fs::File::options().read(true).write(true).open(&pipe).unwrap();
        written.await.unwrap().unwrap();
        until("all threads are free", || store.threads.free() == OPERATIONS_MAX).await;
        assert_eq!(read("there").await.unwrap().unwrap(), vec![1]);
    }

    #[tokio::test]
    async fn an_upload_is_whole_or_nothing_and_a_range_of_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let store = FolderStore::new(folder.path()).unwrap();
        let mut upload = store.put_multipart(&Path::from("a/b")).await.unwrap();
        for part in [vec![1; 300_000], vec![2; 300_000]] {
            upload.put_part(part.into()).await.unwrap();
        }
        upload.complete().await.unwrap();
        let read = store.get_range(&Path::from("a/b"), 299_999..300_001).await.unwrap();
        assert_eq!((read, store.head(&Path::from("a/b")).await.unwrap().size), (vec![1, 2].into(), 600_000));
        let mut aborted = store.put_multipart(&Path::from("a/c")).await.unwrap();
        aborted.put_part(vec![1].into()).await.unwrap();
        aborted.abort().await.unwrap();
        let mut dropped = store.put_multipart(&Path::from("a/d")).await.unwrap();
        dropped.put_part(vec![1].into()).await.unwrap();
        drop(dropped);
        let files = || std::fs::read_dir(folder.path().join("a")).unwrap().count();
        until("one file is left", || files() == 1).await;
        store.delete(&Path::from("a/b")).await.unwrap();
        assert!(store.get(&Path::from("a/b")).await.is_err());
    }
}
