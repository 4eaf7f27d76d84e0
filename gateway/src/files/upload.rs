//! One upload on its way to the store, in parts. Nothing stays of one whose caller goes away before its end.

use std::sync::Arc;

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _, PutPayload, WriteMultipart};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::used::{Full, Reserved};

/// Parts that an upload has on their way to the store at a time.
const PARTS_IN_FLIGHT: usize = 2;

/// The size of a part that is written to a file. Larger ones only take memory while a slow client sends them.
pub const FOLDER_PART_BYTES: usize = 64 * 1024;

/// The least that an object store takes as a part of an upload, but for the last one.
pub const CLOUD_PART_BYTES: usize = 5 * 1024 * 1024;

/// The most bytes of a piece that the HTTP library gives: its buffer.
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// The most memory of an upload in parts of this size: while one is on its way, the next one is collected, and both are on their way when
/// the last piece of it has come.
pub fn buffer_bytes(part_bytes: usize) -> usize {
    PARTS_IN_FLIGHT * part_bytes + PIECE_BYTES_MAX
}

/// An upload in progress. Dropping it before its end aborts it, because an object store would keep its parts, and charge for them, for
/// ever. The store's own timeouts bound the abort.
pub struct Upload {
    objects: Arc<dyn ObjectStore>,
    path: Path,
    writer: Option<WriteMultipart>,
    /// `None` after the upload's end.
    held: Option<Held>,
}

/// What an upload holds until it is stored, or removed again. Its caller may be gone before.
pub struct Held {
    /// Its room in memory.
    pub _room: UploadRoom,
    /// Its bytes in the place.
    pub reserved: Reserved,
}

impl Held {
    /// The upload is removed, as far as the store answers.
    fn give_back(self) {
        self.reserved.give_back();
    }
}

/// An upload's room in memory, and what else its request holds until the upload is stored, or removed again.
pub type UploadRoom = Box<dyn Send + Sync>;

impl Upload {
    /// Begins an upload in a separate task. If the caller hangs up meanwhile, the task drops the upload, which aborts it.
    ///
    /// # Errors
    /// The store's.
    pub async fn begin(
        objects: &Arc<dyn ObjectStore>,
        path: Path,
        part_bytes: usize,
        held: Held,
    ) -> object_store::Result<Self> {
        let objects = Arc::clone(objects);
        let begun = tokio::spawn(async move {
            let parts = objects.put_multipart(&path).await?;
            let writer = Some(WriteMultipart::new_with_chunk_size(parts, part_bytes));
            Ok::<_, object_store::Error>(Self { objects, path, writer, held: Some(held) })
        });
        begun.await?
    }

    /// Reserves bytes of the place for the next piece.
    ///
    /// # Errors
    /// There is no room for so many more.
    pub fn reserve(&mut self, bytes: u64) -> Result<(), Full> {
        self.held.as_mut().map_or(Ok(()), |held| held.reserved.grow(bytes))
    }

    /// Adds a piece, as soon as the store has taken earlier parts.
    ///
    /// # Errors
    /// The store's.
    pub async fn put(&mut self, piece: &[u8]) -> object_store::Result<()> {
        if let Some(writer) = &mut self.writer {
            writer.wait_for_capacity(PARTS_IN_FLIGHT).await?;
            // Copied: a small piece may be the only part of its buffer that is still needed.
            writer.write(piece);
        }
        Ok(())
    }

    /// Ends the upload, and writes its description, in a separate task: if the caller hangs up now, parts in flight would stay in the
    /// store. If nobody waits any more, or a step fails, the complete upload is removed.
    ///
    /// # Errors
    /// The store's.
    pub async fn finish(mut self, description: Path, described: Vec<u8>) -> object_store::Result<()> {
        let (answer, answered) = oneshot::channel();
        tokio::spawn(async move {
            let stored = self.store(&description, described).await;
            let failed = stored.is_err();
            // An `Err`: nobody waits.
            if answer.send(stored).is_err() || failed {
                self.remove(&description).await;
                if let Some(held) = self.held.take() {
                    held.give_back();
                }
            }
        });
        answered
            .await
            .unwrap_or_else(|lost| Err(object_store::Error::Generic { store: "upload", source: lost.into() }))
    }

    async fn store(&mut self, description: &Path, described: Vec<u8>) -> object_store::Result<()> {
        if let Some(writer) = self.writer.take() {
            writer.finish().await?;
        }
        self.objects.put(description, PutPayload::from(described)).await.map(drop)
    }

    /// The description first: without it the gateway lists no such file.
    async fn remove(&mut self, description: &Path) {
        for path in [description, &self.path] {
            match self.objects.delete(path).await {
                Ok(()) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot remove what is left of an upload: a sweep removes it when it is old");
                }
            }
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let (Some(writer), Ok(runtime)) = (self.writer.take(), Handle::try_current()) else { return };
        let held = self.held.take();
        runtime.spawn(async move {
            if let Err(error) = writer.abort().await {
                tracing::warn!(%error, "cannot remove an incomplete upload");
            }
            if let Some(held) = held {
                held.give_back();
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use object_store::limit::LimitStore;
    use object_store::memory::InMemory;
    use tokio::task::yield_now;

    use super::*;
    use crate::until::until;
    use crate::used::{Sum, Used};

    #[tokio::test]
    async fn an_upload_without_its_caller_holds_memory_and_bytes_until_the_store_has_answered() {
        // One operation at a time.
        let objects: Arc<dyn ObjectStore> = Arc::new(LimitStore::new(InMemory::new(), 1));
        let other = Path::from("other");
        objects.put(&other, vec![1].into()).await.unwrap();
        for is_whole in [true, false] {
            let (memory, used) = (Arc::new(()), Arc::new(Used::new(1, 1)));
            let held = Held { _room: Box::new(Arc::clone(&memory)), reserved: used.reserve("a") };
            let begun = Upload::begin(&objects, Path::from("a/b"), FOLDER_PART_BYTES, held);
            let mut upload = begun.await.unwrap();
            upload.reserve(1).unwrap();
            upload.put(b"x").await.unwrap();
            let reading = objects.get(&other).await.unwrap();
            if is_whole {
                assert!(upload.finish(Path::from("a/b.json"), vec![2]).now_or_never().is_none());
            } else {
                drop(upload);
            }
            yield_now().await;
            assert_eq!(Arc::strong_count(&memory), 2, "the store has not answered");
            assert_eq!(used.sum(), Sum { stored: 0, coming: 1 });
            drop(reading);
            until("the upload has ended", || Arc::strong_count(&memory) == 1).await;
            assert_eq!(used.sum(), Sum::default());
        }
    }
}
