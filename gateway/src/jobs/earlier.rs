//! The job that the same request was before: on another gateway, or so long ago that this one has forgotten it.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;

use super::run::{keyed_id, own_message_id};
use super::view::is_of_request;
use crate::app::App;
use crate::body::off_runtime;
use crate::keys::Caller;
use crate::problem::Problem;

/// How long a look into the store may take: a store that hangs must not keep callers from new jobs.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// What a caller, or its idempotency key, calls a job.
#[derive(Debug)]
pub struct Name {
    pub id: String,
    pub message_id: String,
    /// What it is of the request.
    what: &'static str,
}

impl Name {
    /// None if neither is given: nobody can ask for the same job again.
    pub fn of(caller: &Caller, id: Option<&str>, idempotency_key: Option<&str>) -> Option<Self> {
        if let Some(id) = id {
            let message_id = own_message_id(&caller.name, id);
            return Some(Self { id: id.to_owned(), message_id, what: "id" });
        }
        let id = keyed_id(&caller.name, idempotency_key?);
        Some(Self { message_id: id.clone(), id, what: "Idempotency-Key" })
    }
}

/// What is stored of a job of this name, as [`written`](super::view::written). If the store cannot be read there is nothing: the job
/// runs, as without a store.
///
/// # Errors
/// The name stands for another request.
pub async fn find(
    app: &App,
    caller: &Caller,
    name: &Name,
    fingerprint: [u8; 32],
) -> Result<Option<Bytes>, Problem> {
    let Some(results) = &app.results else { return Ok(None) };
    let Ok(found) = timeout(LOOK_MAX, results.get(&caller.name, &name.id)).await else {
        let (job, seconds) = (&name.message_id, LOOK_MAX.as_secs());
        tracing::warn!(job, seconds, "the store of results did not answer in time: the job runs");
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
