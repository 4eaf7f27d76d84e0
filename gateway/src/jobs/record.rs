//! Records of unfinished jobs in a result store. Gateways that share the store use them to answer for each other's jobs. A gateway removes
//! its job's record after it has stored the end.

use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStoreExt as _, PutPayload};
use serde::{Deserialize, Serialize};
use vramq_schemas::topology::CLIENT_REPLIES;

use crate::keys::is_name;
use crate::storage::Storage;

/// The least time for which a record is kept. Longer than any job is awaited.
pub const KEPT_LEAST: Duration = Duration::from_secs(2 * 3600);

/// An unfinished job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub id: String,
    pub message_id: String,
    pub model: String,
    pub items: usize,
    pub created_at_ms: u64,
    /// The digest of the request.
    pub request_sha256: [u8; 32],
    /// Withdraws the job. A program that may read the store may read the job's results as well.
    pub secret: String,
    /// Whether its caller has withdrawn the job, which may still be in its queue. Its stored end may expire before it ends.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withdrawn: bool,
    /// The queue that receives the replies, and keeps them until the job's end is stored.
    pub reply_queue: String,
}

impl Record {
    /// Stores the record of a caller's job.
    ///
    /// # Errors
    /// The store fails.
    pub async fn put(&self, storage: &Storage, owner: &str) -> object_store::Result<()> {
        // Texts and numbers: cannot fail.
        let written = serde_json::to_vec(self).unwrap_or_default();
        storage.objects.put(&path(owner, &self.id), PutPayload::from(written)).await.map(drop)
    }

    /// The record of a caller's job, if it is unfinished.
    ///
    /// # Errors
    /// The store fails.
    pub async fn find(storage: &Storage, owner: &str, id: &str) -> object_store::Result<Option<Self>> {
        // No other text becomes part of a path.
        if !is_name(id) {
            return Ok(None);
        }
        let found = match storage.objects.get(&path(owner, id)).await {
            Ok(found) => found.bytes().await?,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(read(&found))
    }
}

/// Removes a job's record: the job has ended.
///
/// # Errors
/// The store fails.
pub async fn remove(storage: &Storage, owner: &str, id: &str) -> object_store::Result<()> {
    match storage.objects.delete(&path(owner, id)).await {
        Err(object_store::Error::NotFound { .. }) => Ok(()),
        removed => removed,
    }
}

/// Reads a record. One is rejected unless its reply queue is a client's: otherwise whoever can write to the store could have any queue
/// emptied.
fn read(written: &Bytes) -> Option<Record> {
    let read = serde_json::from_slice::<Record>(written);
    let record =
        read.inspect_err(|error| tracing::error!(%error, "ignored a job's record: it is damaged")).ok()?;
    if !record.reply_queue.starts_with(CLIENT_REPLIES) {
        tracing::error!(
            job = record.message_id,
            queue = record.reply_queue,
            "ignored a job's record: its reply queue is not one of a gateway"
        );
        return None;
    }
    Some(record)
}

/// Names of callers and ids of jobs are made of letters, digits, `-`, `_` and `.`, and are not `.` or `..`.
pub(super) fn path(owner: &str, id: &str) -> Path {
    Path::from_iter([owner, &format!("{id}.open")])
}

/// The owner and id of the job whose record has this path, if it is the path of a record.
pub(super) fn named(path: &Path) -> Option<(&str, &str)> {
    let (owner, name) = path.as_ref().split_once('/')?;
    let id = name.strip_suffix(".open")?;
    (is_name(owner) && is_name(id)).then_some((owner, id))
}

#[cfg(test)]
pub(super) fn sample(id: &str) -> Record {
    let text = |text: &str| text.to_owned();
    Record {
        id: text(id),
        message_id: format!("a/{id}"),
        model: text("m"),
        items: 2,
        created_at_ms: 1,
        request_sha256: [7; 32],
        secret: text("s"),
        withdrawn: false,
        reply_queue: format!("{CLIENT_REPLIES}q"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::Place;

    #[tokio::test]
    async fn a_record_is_its_owners_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let place = Place::Folder(folder.path().to_owned());
        let [storage, other] = [(); 2].map(|()| Storage::open(&place).unwrap());
        let record = sample("job");
        record.put(&storage, "a").await.unwrap();
        assert_eq!(Record::find(&other, "a", "job").await.unwrap().as_ref(), Some(&record));
        for (owner, id) in [("b", "job"), ("a", "other"), ("a", "../a/job"), ("a", "")] {
            assert_eq!(Record::find(&other, owner, id).await.unwrap(), None, "{owner} {id}");
        }
        let withdrawn = Record { withdrawn: true, ..record.clone() };
        withdrawn.put(&storage, "a").await.unwrap();
        assert_eq!(Record::find(&other, "a", "job").await.unwrap().as_ref(), Some(&withdrawn));
        for _ in 0..2 {
            remove(&other, "a", "job").await.unwrap();
        }
        assert_eq!(Record::find(&storage, "a", "job").await.unwrap(), None);
        let of_others = Record { reply_queue: "vramq.jobs.m".to_owned(), ..record };
        of_others.put(&storage, "a").await.unwrap();
        assert_eq!(Record::find(&storage, "a", "job").await.unwrap(), None);
    }
}
