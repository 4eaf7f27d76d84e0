//! Follows unfinished jobs of other gateways. Gateways with a common store of results record their jobs there. A gateway that is asked
//! for a job of another one follows it by this record, and takes the replies if the other gateway is gone.

mod life;

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::json;

use crate::adoption::FollowPermit;
use crate::app::App;
use crate::folder_store::is_busy;
use crate::job_task::{Task, callers};
use crate::jobs::earlier::JobName;
use crate::jobs::in_time::in_time;
use crate::jobs::record::Record;
use crate::jobs::registry::Added;
use crate::jobs::stored::StoredRun;
use crate::jobs::{Entry, State};
use crate::keys::Caller;
use crate::problem::Problem;

/// Finds the caller's unfinished job of this name at another gateway. From then on this gateway follows the job.
///
/// # Errors
/// This gateway follows as many jobs as it may, or as many of this caller's.
pub async fn find(app: &App, caller: &Caller, id: &str) -> Result<Option<Arc<Entry>>, Problem> {
    match record(app, caller, id).await {
        Some(record) => follow(app, caller, record),
        None => Ok(None),
    }
}

/// Like [`find`], if the job runs again after the run that is stored. A record that is left of that run is none of an unfinished job.
///
/// # Errors
/// As for [`find`].
pub async fn find_again(
    app: &App,
    caller: &Caller,
    id: &str,
    stored: StoredRun,
) -> Result<Option<Arc<Entry>>, Problem> {
    if stored.is_done {
        return Ok(None);
    }
    match record(app, caller, id).await {
        Some(record) if stored.yields_to(record.created_at_ms) => follow(app, caller, record),
        _ => Ok(None),
    }
}

/// Like [`find`], for a request that names the job. Call this before [`find_stored`](crate::jobs::earlier::find_stored): a gateway stores
/// the end before it removes the record, so one of the two calls finds a job that ends meanwhile.
///
/// # Errors
/// As for [`find`]; or the name stands for another request.
pub async fn find_same(
    app: &App,
    caller: &Caller,
    name: &JobName,
    fingerprint: [u8; 32],
) -> Result<Option<Arc<Entry>>, Problem> {
    match record(app, caller, &name.id).await {
        Some(record) if record.request_sha256 == fingerprint => follow(app, caller, record),
        Some(_) => Err(Problem::reused(name.what)),
        None => Ok(None),
    }
}

/// The record. `None` also if the store cannot be read, or if the record is so old that it must have been left behind.
async fn record(app: &App, caller: &Caller, id: &str) -> Option<Record> {
    let results = app.results.as_ref()?;
    let read =
        in_time(id, "cannot read a job's record", Record::find(results.storage(), &caller.name, id)).await?;
    let record = read
        .inspect_err(|error| {
            if is_busy(error) {
                // The log says so once.
                return;
            }
            tracing::error!(
                job = id, %error,
                "cannot read a job's record: this gateway does not follow the job"
            );
        })
        .ok()??;
    (!life::left(&record).is_zero()).then_some(record)
}

/// Follows a job from its record on, until its end.
fn follow(app: &App, caller: &Caller, record: Record) -> Result<Option<Arc<Entry>>, Problem> {
    let Some(adoption) = &app.adoption else { return Ok(None) };
    let before = app.jobs.find(&caller.name, &record.id);
    if let Some(before) = before.filter(|before| before.fingerprint == record.request_sha256) {
        // The entry has its permit already. It is known by its id only, even to requests that name it by an idempotency key.
        return Ok(Some(before));
    }
    if record.withdrawn {
        // Its end has expired in the store, and it may still be in its queue: nothing is left to follow.
        let entry = entry_of(app, caller, record);
        entry.happened("withdrawn", json!({}), Some(State::Withdrawn));
        return Ok(Some(Arc::new(entry)));
    }
    let permit = adoption.permit(&caller.name).map_err(|after| {
        let message = "this gateway follows as many jobs of other gateways as it may";
        Problem::busy(StatusCode::SERVICE_UNAVAILABLE, "overloaded", message, after)
    })?;
    let entry = Arc::new(entry_of(app, caller, record.clone()));
    if let Added::Existing(before) = app.jobs.add(&entry, None)? {
        // Another request for the same job was faster.
        return Ok(Some(before));
    }
    let task = Task { app: app.clone(), entry: Arc::clone(&entry), idempotency_key: None, kept: true };
    entry.happened("queued", task.estimate(), Some(State::Queued));
    tokio::spawn(run(task, record, permit));
    Ok(Some(entry))
}

/// The entry of another gateway's job.
fn entry_of(app: &App, caller: &Caller, record: Record) -> Entry {
    let Record { id, message_id, model, items, created_at_ms, request_sha256, secret, .. } = record;
    Entry::new(id, message_id, caller.name.clone(), model, items, request_sha256)
        .called_by(&callers(&app.config.broker, caller))
        .taken_elsewhere(created_at_ms, secret)
}

async fn run(task: Task, record: Record, permit: FollowPermit) {
    task.run(life::life(&task, &record), None, None).await;
    drop(permit);
}
