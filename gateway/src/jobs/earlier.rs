//! Finds the job that the same request started before: on another gateway, or so long ago that this gateway has forgotten it.

use sha2::{Digest as _, Sha256};

use super::store::ResultStore;
use super::stored::{self, StoredJob, Unread};
use super::view::is_of_request;
use crate::byte_budget::ByteBudget;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

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
fn own_message_id(owner: &str, id: &str) -> String {
    format!("{owner}/{id}")
}

/// The id, and message id, of a job with an idempotency key: a hash of both, so that every gateway finds what is stored of it.
fn keyed_id(owner: &str, idempotency_key: &str) -> String {
    let mut hash = Sha256::new();
    // Hash the length as well, so that the boundary between both is unambiguous.
    hash.update((owner.len() as u64).to_le_bytes());
    hash.update(owner);
    hash.update(idempotency_key);
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.finalize()[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid().to_string()
}

/// The stored job of this name. `None` also if the store cannot be read, or the stored job is damaged: then the job runs as without a store.
///
/// # Errors
/// The name stands for another request, or there is no room in the memory for answers.
pub async fn find_stored(
    results: Option<&ResultStore>,
    answers: &ByteBudget,
    caller: &Caller,
    name: &JobName,
    fingerprint: [u8; 32],
) -> Result<Option<StoredJob>, Problem> {
    let Some(results) = results else { return Ok(None) };
    let stored = match stored::read(results, &caller.name, &name.id, answers).await {
        Ok(Some(stored)) => stored,
        Ok(None) => return Ok(None),
        Err(full @ Unread::NoRoom(_)) => return Err(full.problem()),
        // The log says why. The job runs, and replaces a damaged end by its own.
        Err(Unread::Silent | Unread::Failed | Unread::Damaged) => return Ok(None),
    };
    let read = stored.written.clone();
    match off_runtime(read.len(), move || is_of_request(&read, &fingerprint)).await {
        Some(true) => Ok(Some(stored)),
        Some(false) => Err(Problem::reused(name.what)),
        // Stored by a version that did not write the digest.
        None => Ok(None),
    }
}
