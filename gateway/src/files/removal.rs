//! Removes files: each as a whole, and by one request at a time.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use tokio::sync::oneshot;

use super::names::{content_path, description_path};
use crate::background_work::Work;
use crate::used::Used;

/// An owner, and the id of one of its files.
type Key = (String, String);

/// The files that requests are removing. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Removals(Arc<Mutex<HashSet<Key>>>);

/// The removal of a file. Until it is dropped, this gateway begins no other one of the same file.
#[derive(Debug)]
pub struct Removal {
    of: Removals,
    file: Key,
}

impl Removals {
    /// Begins to remove a file. `None` while another request removes it: an object store would tell both that they have removed the
    /// content, and its bytes would be given back twice.
    pub fn begin(&self, owner: &str, id: &str) -> Option<Removal> {
        let file = (owner.to_owned(), id.to_owned());
        let is_only = self.files().insert(file.clone());
        is_only.then(|| Removal { of: self.clone(), file })
    }

    fn files(&self) -> MutexGuard<'_, HashSet<Key>> {
        // Nothing panics while it holds the lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Removal {
    /// Removes the file. A sweep, or another gateway, may be removing it, too.
    ///
    /// In a separate task, which goes on if the caller hangs up: without its description nobody could remove the content, and it would take
    /// the owner's bytes until it is old. `work` is dropped at the end of the task.
    ///
    /// # Errors
    /// The place's. If the caller has hung up, the log has it.
    pub async fn run(
        self,
        objects: &Arc<dyn ObjectStore>,
        used: &Arc<Used>,
        bytes: u64,
        work: Work,
    ) -> object_store::Result<()> {
        let (objects, used) = (Arc::clone(objects), Arc::clone(used));
        let (answer, answered) = oneshot::channel();
        tokio::spawn(async move {
            let removed = self.remove(&objects, &used, bytes).await;
            // Before the answer: after an error the same request may come again at once.
            drop(self);
            if let Err(Err(error)) = answer.send(removed) {
                tracing::warn!(
                    %error,
                    "cannot remove a file whose caller has hung up: a sweep removes what is left of it when it is old"
                );
            }
            drop(work);
        });
        answered.await.unwrap_or_else(|lost| {
            Err(object_store::Error::Generic { store: "removal", source: lost.into() })
        })
    }

    async fn remove(
        &self,
        objects: &Arc<dyn ObjectStore>,
        used: &Used,
        bytes: u64,
    ) -> object_store::Result<()> {
        let (owner, id) = &self.file;
        remove_object(objects, &description_path(owner, id)).await?;
        if remove_object(objects, &content_path(owner, id)).await? {
            used.removed(owner, bytes);
        }
        Ok(())
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        self.of.files().remove(&self.file);
    }
}

/// Whether there was such an object, as far as the place says: an object store does not.
async fn remove_object(objects: &Arc<dyn ObjectStore>, path: &Path) -> object_store::Result<bool> {
    match objects.delete(path).await {
        Ok(()) => Ok(true),
        Err(object_store::Error::NotFound { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use object_store::memory::InMemory;
    use tokio::time::timeout;

    use super::*;
    use crate::background_work::BackgroundWork;
    use crate::folder_store::FolderStore;
    use crate::used::Sum;

    const DEADLINE: Duration = Duration::from_secs(90);

    const ID: &str = "file-1";

    /// A place with a file of 4 bytes, whose owner has 6.
    async fn place(objects: impl ObjectStore) -> (Arc<dyn ObjectStore>, Arc<Used>) {
        let objects: Arc<dyn ObjectStore> = Arc::new(objects);
        for path in [content_path("a", ID), description_path("a", ID)] {
            objects.put(&path, vec![1].into()).await.unwrap();
        }
        let used = Arc::new(Used::new(10, 10));
        used.counted(HashMap::from([("a".to_owned(), 6)]));
        (objects, used)
    }

    #[tokio::test]
    async fn a_file_whose_caller_hangs_up_is_removed_as_a_whole_before_the_gateway_ends() {
        let (objects, used) = place(InMemory::new()).await;
        let (removals, background) = (Removals::default(), BackgroundWork::default());
        let removal = removals.begin("a", ID).unwrap();
        assert!(removal.run(&objects, &used, 4, background.begin()).now_or_never().is_none());
        assert!(removals.begin("a", ID).is_none(), "it is being removed");
        timeout(DEADLINE, background.all_ended()).await.expect("the end of the removal");
        for path in [content_path("a", ID), description_path("a", ID)] {
            assert!(objects.get(&path).await.is_err(), "{path}");
        }
        assert_eq!(used.sum(), Sum { stored: 2, coming: 0 });
        assert!(removals.begin("a", ID).is_some());
    }

    #[tokio::test]
    async fn a_file_that_another_gateway_removes_too_gives_back_its_bytes_once() {
        let folder = tempfile::tempdir().unwrap();
        let (objects, used) = place(FolderStore::new(folder.path()).unwrap()).await;
        let background = BackgroundWork::default();
        let [one, other] = [(); 2].map(|()| Removals::default().begin("a", ID).unwrap());
        let both = tokio::join!(
            one.run(&objects, &used, 4, background.begin()),
            other.run(&objects, &used, 4, background.begin())
        );
        assert!(both.0.is_ok() && both.1.is_ok(), "{both:?}");
        assert_eq!(used.sum(), Sum { stored: 2, coming: 0 });
    }
}
