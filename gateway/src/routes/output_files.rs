//! The route `/v1/files/output-INDEX-JOB`: downloads a job's output from the store.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use vramq_stores::reference::hex;

use super::found_job::{FoundJob, find_admitted};
use super::range::{DownloadRequest, FileFacts, Wanted, download, unsatisfiable};
use crate::app::App;
use crate::files::{FileStatus, FileView, seconds_of};
use crate::jobs::State;
use crate::jobs::output_files::{OutputId, own_uris};
use crate::jobs::view::stored_uris;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::outputs::{OutputStore, StoredOutput};
use crate::problem::Problem;

/// The digest of what is sent (RFC 9530).
const REPR_DIGEST: HeaderName = HeaderName::from_static("repr-digest");

/// The approximate cost of reading a reference, in bytes of JSON.
const URI_BYTES: usize = 256;

/// Describes an output as a file.
///
/// # Errors
/// The caller's jobs have no such output in a store, or this gateway does not find it.
pub async fn view(app: &App, caller: &Caller, id: &OutputId) -> Result<FileView, Problem> {
    let uri = uri(app, caller, id).await?;
    let stored = outputs(app, id)?.describe(&uri).await?;
    Ok(FileView {
        id: id.to_string(),
        object: "file".to_owned(),
        bytes: stored.bytes,
        created_at: seconds_of(stored.at),
        expires_at: None,
        filename: id.to_string(),
        purpose: "job_output".to_owned(),
        status: FileStatus::Processed,
        media_type: stored.media_type().to_owned(),
    })
}

/// The output's bytes, or a part of them. A whole download breaks off before its last piece if the bytes are not those that the worker
/// wrote. Parts are not checked: the client compares the digest when it has all of them.
///
/// # Errors
/// As for [`view`].
pub async fn content(
    app: &App,
    caller: &Caller,
    id: &OutputId,
    asked: &DownloadRequest,
) -> Result<Response, Problem> {
    let uri = uri(app, caller, id).await?;
    let outputs = outputs(app, id)?;
    if asked.has_range() {
        let stored = outputs.describe(&uri).await?;
        let (sent, sha256) = (sent(&stored, id), stored.sha256());
        match asked.of(&sent) {
            Wanted::Whole => {}
            Wanted::Nothing => return Ok(unsatisfiable(&sent)),
            Wanted::Part(part) => {
                let pieces = stored.part(part.clone()).await?;
                return Ok(with_digest(download(pieces, &sent, Some(part)), sha256));
            }
        }
    }
    let stored = outputs.open(&uri).await?;
    let (sent, sha256) = (sent(&stored, id), stored.sha256());
    Ok(with_digest(download(stored.checked(), &sent, None), sha256))
}

fn sent(stored: &StoredOutput, id: &OutputId) -> FileFacts {
    let validator = stored.sha256().map_or_else(|| id.to_string(), |sha256| hex(&sha256));
    FileFacts {
        media_type: stored.media_type().to_owned(),
        bytes: stored.bytes,
        etag: format!("\"{validator}\""),
    }
}

fn with_digest(mut response: Response, sha256: Option<[u8; 32]>) -> Response {
    let digest = sha256.map(|sha256| HeaderValue::try_from(format!("sha-256=:{}:", BASE64.encode(sha256))));
    if let Some(Ok(digest)) = digest {
        response.headers_mut().insert(REPR_DIGEST, digest);
    }
    response
}

/// Refuses to remove an output: only the store's own rules remove outputs.
pub fn delete(id: &OutputId) -> Problem {
    let message = format!("`{id}` is a job's output; outputs are removed by the rules of their store");
    Problem::new(StatusCode::CONFLICT, "output", message)
}

/// The store that holds an output, if this gateway reads one.
///
/// # Errors
/// There is none.
fn outputs<'a>(app: &'a App, id: &OutputId) -> Result<&'a OutputStore, Problem> {
    app.outputs.as_ref().ok_or_else(|| {
        let message = format!(
            "this gateway does not read outputs: outputs.folder and outputs.url are not set. `vramq download` reads the \
             reference in the outputs of GET /v1/jobs/{}",
            id.job
        );
        Problem::new(StatusCode::NOT_FOUND, "no_outputs", message)
    })
}

async fn uri(app: &App, caller: &Caller, id: &OutputId) -> Result<String, Problem> {
    let mut uris = uris(app, caller, &id.job).await?;
    let found = uris.get_mut(id.index as usize).and_then(Option::take);
    found.ok_or_else(|| not_stored(id))
}

/// The references of a job's outputs in a store, by index.
///
/// # Errors
/// The caller has no such job, or it has not ended.
async fn uris(app: &App, caller: &Caller, job: &str) -> Result<Vec<Option<String>>, Problem> {
    let entry = match find_admitted(app, caller, job).await? {
        (FoundJob::Here(entry), _) => entry,
        (FoundJob::Stored(written), _reader) => {
            return Ok(off_runtime(written.len(), move || stored_uris(&written)).await);
        }
    };
    let bytes = entry.items * URI_BYTES;
    match entry.state() {
        State::Done(answer) => {
            let own = move || own_uris(&entry.output_owners, answer.outputs.iter().map(Some));
            Ok(off_runtime(bytes, own).await)
        }
        State::Failed(failure) => {
            let own = move || own_uris(&entry.output_owners, failure.outputs.iter().map(Option::as_ref));
            Ok(off_runtime(bytes, own).await)
        }
        State::Withdrawn => Ok(Vec::new()),
        State::Publishing | State::Queued | State::Running { .. } => {
            let message = format!("the job `{job}` has not ended");
            Err(Problem::new(StatusCode::CONFLICT, "not_ended", message))
        }
    }
}

fn not_stored(OutputId { index, job }: &OutputId) -> Problem {
    Problem::not_found(&format!("output {index} of the job `{job}` in a store"))
}

/// The references that workers get for outputs that are inputs of one request. Reads each job once, however many of its outputs the request
/// names, and keeps those references alone: a job may have 65,536.
///
/// # Errors
/// The caller has no such job, it has not ended, or it has no such output in a store.
pub async fn references(
    app: &App,
    caller: &Caller,
    ids: Vec<OutputId>,
) -> Result<HashMap<OutputId, String>, Problem> {
    let mut by_job = BTreeMap::<String, BTreeSet<u32>>::new();
    for OutputId { index, job } in ids {
        by_job.entry(job).or_default().insert(index);
    }
    let mut found = HashMap::new();
    for (job, indices) in by_job {
        let mut uris = uris(app, caller, &job).await?;
        for index in indices {
            let id = OutputId { index, job: job.clone() };
            let uri = uris.get_mut(index as usize).and_then(Option::take).ok_or_else(|| not_stored(&id))?;
            found.insert(id, uri);
        }
    }
    Ok(found)
}
