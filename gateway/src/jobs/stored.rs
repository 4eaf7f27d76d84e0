//! Reads stored results for callers: in time, within the memory for answers, and whole.

use axum::http::StatusCode;
use bytes::Bytes;
use serde::Deserialize;

use super::in_time::in_time;
use super::shared_view::no_room;
use super::store::ResultStore;
use crate::byte_budget::{ByteBudget, NoRoom, Room};
use crate::folder_store::is_busy;
use crate::off_runtime::off_runtime;
use crate::problem::{Problem, Retry};

/// Why a stored job cannot be had. All but the last are in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unread {
    /// The store does not answer.
    Silent,
    /// The store fails.
    Failed,
    /// What is stored is not what a gateway has written.
    Damaged,
    NoRoom(NoRoom),
}

impl Unread {
    /// The problem of a request that reads the job.
    pub fn problem(self) -> Problem {
        let broken = |message| Problem::new(StatusCode::BAD_GATEWAY, "store", message);
        match self {
            Self::Silent => Problem::silent_store("the store of results does not answer"),
            Self::Failed => broken("the store of results cannot be read; the gateway's log says why"),
            Self::Damaged => {
                let message = "the stored result of this job is damaged: it is not what a gateway has written there. Send the same \
                               request again";
                broken(message).with_retry(Retry::No)
            }
            Self::NoRoom(none) => no_room(none),
        }
    }
}

/// A job that has ended, in the store.
#[derive(Debug)]
pub struct StoredJob {
    /// As [`written`](super::view::written). The bytes hold their room until they are dropped.
    pub written: Bytes,
    pub run: StoredRun,
}

/// The run of a job that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredRun {
    pub is_done: bool,
    created_at_ms: u64,
}

impl StoredRun {
    /// The run of a job as [`written`](super::view::written). `None` of another text: it is an object that says whose end it is, to its last byte.
    pub fn of(written: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Ended {
            #[serde(rename = "id")]
            _id: String,
            state: String,
            created_at_ms: u64,
        }
        let Ended { state, created_at_ms, .. } = serde_json::from_slice(written).ok()?;
        Some(Self { is_done: state == "done", created_at_ms })
    }

    /// Whether a run that was created then is the job by now. One that is done stays: the results are the same.
    pub fn yields_to(self, created_at_ms: u64) -> bool {
        !self.is_done && self.created_at_ms < created_at_ms
    }
}

/// Bytes with their room in the memory for answers.
struct Held {
    bytes: Bytes,
    _room: Room,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The stored job of a caller.
///
/// # Errors
/// The store is silent or fails, the job is damaged, or there was no room for it in time.
pub async fn read(
    results: &ResultStore,
    owner: &str,
    id: &str,
    answers: &ByteBudget,
) -> Result<Option<StoredJob>, Unread> {
    const WHAT: &str = "cannot read a stored result";
    let failed = |error| {
        if is_busy(&error) {
            return Unread::Silent;
        }
        tracing::error!(job = id, %error, "{WHAT}");
        Unread::Failed
    };
    let found = in_time(id, WHAT, results.find(owner, id)).await.ok_or(Unread::Silent)?;
    let Some(found) = found.map_err(failed)? else { return Ok(None) };
    let bytes = usize::try_from(found.meta.size).unwrap_or(usize::MAX);
    let room = answers.room(owner, bytes).await.map_err(Unread::NoRoom)?;
    let bytes = in_time(id, WHAT, found.bytes()).await.ok_or(Unread::Silent)?.map_err(failed)?;
    let size = bytes.len();
    let written = Bytes::from_owner(Held { bytes, _room: room });
    // The room is held for as long as this reads, also if the caller is dropped.
    let read = written.clone();
    let Some(run) = off_runtime(read.len(), move || StoredRun::of(&read)).await else {
        // Each reader of it finds it again, so that this is no ERROR.
        tracing::warn!(
            job = id,
            caller = owner,
            bytes = size,
            "a stored result is damaged: it is not a job as JSON"
        );
        return Err(Unread::Damaged);
    };
    Ok(Some(StoredJob { written, run }))
}
