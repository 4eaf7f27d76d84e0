//! Results in a folder or an object store that several gateways share. Each of them can answer for a finished job, even after the gateway
//! that published it is gone.

mod sweep;

use std::sync::{Arc, Once};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetResult, ObjectStoreExt as _, PutPayload};

use super::claim::Claimant;
use super::entry::{Entry, State};
use super::view;
use crate::config::ResultSettings;
use crate::folder_store::is_busy;
use crate::keys::is_name;
use crate::storage::{Place, Storage};
use crate::used::{Full, Used};
use sweep::is_ours;

/// Results of jobs that have ended, a file for each: in the folder of its caller, by the job's id.
#[derive(Debug)]
pub struct ResultStore {
    storage: Storage,
    settings: ResultSettings,
    /// Recounted at each sweep. In between, only this gateway's own changes are added.
    used: Arc<Used>,
    /// Logs once that the store cannot claim names.
    unclaimed: Once,
}

impl ResultStore {
    /// Opens the store, and sweeps a folder. An object store is not contacted, because one that is down must not keep the gateway from
    /// starting. The first periodic sweep reads it.
    ///
    /// # Errors
    /// The error of the file system.
    pub async fn open(settings: ResultSettings) -> Result<Self, String> {
        let place = settings.place.clone();
        let storage = Storage::open(&place).map_err(|error| format!("results: {error}"))?;
        let used = Arc::new(Used::new(settings.bytes_max, settings.owner_bytes_max));
        let this = Self { storage, settings, used, unclaimed: Once::new() };
        if let Place::Folder(_) = place {
            this.sweep().await.map_err(|error| format!("results: {place}: {error}"))?;
        }
        Ok(this)
    }

    /// Where the results are.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Claims the name of a caller's job.
    pub fn claimant(&self, owner: &str, id: &str) -> Claimant {
        Claimant::new(Arc::clone(&self.storage.objects), owner, id)
    }

    /// Logs that a name cannot be claimed, because the store fails or does not support claims. The job is then published without a claim.
    pub fn cannot_claim(&self, error: &object_store::Error) {
        if is_busy(error) {
            // The log says so already, and a real fault may still come.
            return;
        }
        self.unclaimed.call_once(|| {
            tracing::warn!(
                %error,
                "cannot claim the name of a job in the store of results: two gateways that get the same request at the same moment may \
                 both publish its job. This gateway does not log it again"
            );
        });
    }

    /// Stores a job's end. If that fails, the end is only in this gateway's memory. A folder may store it also after this is dropped.
    pub async fn put(&self, entry: &Entry, state: &State) {
        let path = path(&entry.owner, &entry.id);
        if !is_ours(&path) {
            // The caller chose an id in the form of an upload's. No sweep would remove its result.
            return;
        }
        let written = match view::written(entry, state).await {
            Ok(written) => written,
            Err(error) => {
                tracing::warn!(
                    job = entry.message_id, %error,
                    "cannot write a result as JSON for the store: only this gateway has it, in memory"
                );
                return;
            }
        };
        let bytes = written.len() as u64;
        let mut reserved = self.used.reserve(&entry.owner);
        if let Err(full) = reserved.grow(bytes) {
            let limit = match full {
                Full::All => "results.folder_mib_max",
                Full::Owner => "results.folder_mib_max_per_key",
            };
            tracing::warn!(
                job = entry.message_id,
                caller = entry.owner,
                bytes,
                limit,
                "the store of results has no room: not storing a result. Only this gateway has it, in memory"
            );
            return;
        }
        if let Err(error) = self.storage.objects.put(&path, PutPayload::from(written)).await {
            reserved.give_back();
            tracing::error!(job = entry.message_id, %error, "cannot store a result: only this gateway has it, in memory");
        }
    }

    /// The stored job of a caller, as JSON.
    ///
    /// # Errors
    /// The store fails; the error is already in the log.
    pub async fn read(&self, owner: &str, id: &str) -> object_store::Result<Option<Bytes>> {
        let read = async {
            match self.find(owner, id).await? {
                Some(found) => found.bytes().await.map(Some),
                None => Ok(None),
            }
        };
        read.await.inspect_err(|error| {
            // The log says once that the folder hangs.
            if !is_busy(error) {
                tracing::error!(%error, "cannot read a stored result");
            }
        })
    }

    /// Like [`read`](Self::read), before its bytes are read.
    ///
    /// # Errors
    /// The store fails.
    pub async fn find(&self, owner: &str, id: &str) -> object_store::Result<Option<GetResult>> {
        // Only valid names become part of a path.
        if !is_name(id) {
            return Ok(None);
        }
        match self.storage.objects.get(&path(owner, id)).await {
            Ok(found) if !self.is_old(&found.meta) => Ok(Some(found)),
            Ok(_) | Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Names of callers and ids of jobs are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
fn path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}.json")])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::jobs::record::{self, Record};

    pub(super) async fn store(folder: &std::path::Path, bytes_max: u64, keep_s: u64) -> ResultStore {
        shared(folder, [bytes_max, bytes_max], keep_s).await
    }

    /// With the bytes of all callers, and of each.
    async fn shared(
        folder: &std::path::Path,
        [bytes_max, owner_bytes_max]: [u64; 2],
        keep_s: u64,
    ) -> ResultStore {
        let (place, keep) = (Place::Folder(folder.to_owned()), Duration::from_secs(keep_s));
        ResultStore::open(ResultSettings { place, bytes_max, owner_bytes_max, keep }).await.unwrap()
    }

    pub(super) fn entry(id: &str) -> Entry {
        entry_of("a", id)
    }

    fn entry_of(owner: &str, id: &str) -> Entry {
        let text = |text: &str| text.to_owned();
        Entry::new(text(id), text(id), text(owner), text("m"), 1, [0; 32])
    }

    #[tokio::test]
    async fn a_result_is_its_owners_and_there_for_every_gateway() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (store(folder.path(), 1 << 20, 60).await, store(folder.path(), 1 << 20, 60).await);
        one.put(&entry("job"), &State::Withdrawn).await;
        let found: serde_json::Value =
            serde_json::from_slice(&other.read("a", "job").await.unwrap().unwrap()).unwrap();
        assert_eq!((&found["id"], &found["state"]), (&"job".into(), &"withdrawn".into()));
        for (owner, id) in [("b", "job"), ("a", "other"), ("a", "../a/job"), ("a", "")] {
            assert!(other.read(owner, id).await.unwrap().is_none(), "{owner} {id}");
        }
        // An unreadable store must not look like an empty one.
        std::fs::write(folder.path().join("file"), "no folder").unwrap();
        assert!(other.read("file", "job").await.is_err());
    }

    #[tokio::test]
    async fn the_record_of_an_unfinished_job_is_no_result_and_outlives_results() {
        let folder = tempfile::tempdir().unwrap();
        let one = store(folder.path(), 1 << 20, 60).await;
        let record = record::sample("job");
        record.put(one.storage(), "a").await.unwrap();
        assert!(
            one.read("a", "job").await.unwrap().is_none()
                && one.read("a", "job.open").await.unwrap().is_none()
        );
        // Opening the store swept it.
        let forgetful = store(folder.path(), 1 << 20, 0).await;
        assert_eq!(Record::find(forgetful.storage(), "a", "job").await.unwrap(), Some(record));
    }

    #[tokio::test]
    async fn it_is_bounded_in_bytes_and_in_time() {
        let folder = tempfile::tempdir().unwrap();
        let small = store(folder.path(), 300, 60).await;
        small.put(&entry("one"), &State::Withdrawn).await;
        small.put(&entry("two"), &State::Withdrawn).await;
        assert!(
            small.read("a", "one").await.unwrap().is_some()
                && small.read("a", "two").await.unwrap().is_none()
        );
        let forgetful = store(folder.path(), 200, 0).await;
        assert!(forgetful.read("a", "one").await.unwrap().is_none());
        assert_eq!(std::fs::read_dir(folder.path().join("a")).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn a_result_counts_that_the_folder_stores_after_everybody_has_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(folder.path(), 1 << 20, 60).await;
        assert!(store.put(&entry("job"), &State::Withdrawn).now_or_never().is_none());
        let given_up = store.used.sum();
        assert!(given_up.stored > 0 && given_up.coming == 0, "{given_up:?}");
        while store.read("a", "job").await.unwrap().is_none() {}
        store.sweep().await.unwrap();
        assert_eq!(store.used.sum(), given_up);
    }

    #[tokio::test]
    async fn a_caller_leaves_room_for_the_results_of_others() {
        let folder = tempfile::tempdir().unwrap();
        // Each result has some 200 bytes.
        let one = shared(folder.path(), [1000, 300], 60).await;
        for (owner, id) in [("a", "1"), ("a", "2"), ("b", "1")] {
            one.put(&entry_of(owner, id), &State::Withdrawn).await;
        }
        let is_there = async |owner: &str, id: &str| one.read(owner, id).await.unwrap().is_some();
        assert!(is_there("a", "1").await && is_there("b", "1").await && !is_there("a", "2").await);
        // Another gateway counts what it finds, by owner, and counts nothing for removed results.
        let other = shared(folder.path(), [1000, 300], 60).await;
        other.put(&entry_of("a", "2"), &State::Withdrawn).await;
        assert!(other.read("a", "2").await.unwrap().is_none());
        std::fs::remove_file(folder.path().join("a/1.json")).unwrap();
        other.sweep().await.unwrap();
        other.put(&entry_of("a", "2"), &State::Withdrawn).await;
        assert!(is_there("a", "2").await);
        let sum = other.used.sum();
        assert!(sum.coming == 0 && (300..600).contains(&sum.stored), "{sum:?}");
    }
}
