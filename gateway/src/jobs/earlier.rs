//! Finds the job that the same request started before: on another gateway, or so long ago that this gateway has forgotten it.

use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use tokio::time::timeout;

use super::store::ResultStore;
use super::view::is_of_request;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// How long a look into the store may take: a store that hangs must not keep callers from new jobs.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// The name of a job that its caller gives it, as an id or by an idempotency key.
#[derive(Debug)]
pub struct JobName {
    pub id: String,
    pub message_id: String,
    /// The part of the request that has the name, for error messages.
    pub what: &'static str,
}

impl JobName {
    /// `None` if the request has neither: then the same job cannot be asked for again.
    pub fn of(caller: &Caller, id: Option<&str>, idempotency_key: Option<&str>) -> Option<Self> {
        if let Some(id) = id {
            let message_id = own_message_id(&caller.name, id);
            return Some(Self { id: id.to_owned(), message_id, what: "id" });
        }
        let id = keyed_id(&caller.name, idempotency_key?);
        Some(Self { message_id: id.clone(), id, what: "Idempotency-Key" })
    }
}

/// The message id of a job with an id of the caller's choice, which is unique only among that caller's jobs.
pub fn own_message_id(owner: &str, id: &str) -> String {
    format!("{owner}/{id}")
}

/// The id, and message id, of a job with an idempotency key: a hash of both, so that every gateway finds what is stored of it.
pub fn keyed_id(owner: &str, idempotency_key: &str) -> String {
    let mut hash = Sha256::new();
    // Hash the length as well, so that the boundary between both is unambiguous.
    hash.update((owner.len() as u64).to_le_bytes());
    hash.update(owner);
    hash.update(idempotency_key);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.finalize()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid().to_string()
}

/// The stored job of this name, as [`written`](super::view::written). `None` also if the store cannot be read: then the job runs as without
/// a store.
///
/// # Errors
/// The name stands for another request.
pub async fn find_stored(
    results: Option<&ResultStore>,
    caller: &Caller,
    name: &JobName,
    fingerprint: [u8; 32],
) -> Result<Option<Bytes>, Problem> {
    let Some(results) = results else { return Ok(None) };
    let Ok(found) = timeout(LOOK_MAX, results.get(&caller.name, &name.id)).await else {
        let (job, seconds) = (&name.message_id, LOOK_MAX.as_secs());
        tracing::warn!(
            job,
            seconds,
            "the store of results did not answer in time: running the job without looking for an earlier result"
        );
        return Ok(None);
    };
    let Some(written) = found else { return Ok(None) };
    let read = written.clone();
    match off_runtime(read.len(), move || is_of_request(&read, &fingerprint)).await {
        Some(true) => Ok(Some(written)),
        Some(false) => Err(Problem::reused(name.what)),
        // Stored by a version that did not write the digest.
        None => Ok(None),
    }
}
