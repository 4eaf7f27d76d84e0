//! Finds a caller's job: in memory, in the store of results, or with another gateway.

use std::sync::Arc;

use bytes::Bytes;

use crate::app::{App, Permits};
use crate::followed;
use crate::jobs::Entry;
use crate::jobs::earlier::{self, Name};
use crate::keys::Caller;
use crate::problem::Problem;

/// A caller's job.
#[derive(Debug)]
pub enum Known {
    /// With its task on this gateway: it may belong to another one, and be followed here.
    Here(Arc<Entry>),
    /// Ended, as it is stored.
    Stored(Bytes),
}

/// As [`find`], for routes that answer without the results: with the permit to have them in memory, which a stored job needs.
///
/// # Errors
/// As for [`find`], or the gateway is full, or the caller has its share.
pub async fn find_admitted(
    app: &App,
    caller: &Caller,
    id: &str,
) -> Result<(Known, Option<Permits>), Problem> {
    if let Some(entry) = app.jobs.find(&caller.name, id) {
        return Ok((Known::Here(entry), None));
    }
    let reader = app.admit_reader(caller)?;
    Ok((find(app, caller, id).await?, Some(reader)))
}

/// The caller's job, in memory, in the store of results, or with another gateway. A stored one comes with all of its results: who calls
/// this holds a reader's permit, unless this gateway has the job.
///
/// # Errors
/// There is none, or this gateway does not know of it.
pub async fn find(app: &App, caller: &Caller, id: &str) -> Result<Known, Problem> {
    if let Some(entry) = app.jobs.find(&caller.name, id) {
        return Ok(Known::Here(entry));
    }
    if let Some(results) = &app.results {
        if let Some(written) = results.get(&caller.name, id).await {
            return Ok(Known::Stored(written));
        }
        if let Some(entry) = followed::find(app, caller, id).await? {
            return Ok(Known::Here(entry));
        }
        // It may have ended meanwhile.
        if let Some(written) = results.get(&caller.name, id).await {
            return Ok(Known::Stored(written));
        }
    }
    Err(unknown(app, id))
}

/// The job that the same request started before: its answer needs no worker, and none of the inputs.
///
/// # Errors
/// The name stands for another request; or the job is another gateway's, and this one follows as many as it may.
pub async fn find_same(
    app: &App,
    caller: &Caller,
    name: Option<&Name>,
    idempotency_key: Option<&str>,
    fingerprint: [u8; 32],
) -> Result<Option<Known>, Problem> {
    let Some(name) = name else { return Ok(None) };
    if let Some(entry) = app.jobs.same(&caller.name, &name.id, idempotency_key, &fingerprint)? {
        return Ok(Some(Known::Here(entry)));
    }
    let followed = followed::find_same(app, caller, name, fingerprint).await?;
    // What has ended is stored also if it was another gateway's until now.
    if let Some(written) = earlier::find(app.results.as_ref(), caller, name, fingerprint).await? {
        return Ok(Some(Known::Stored(written)));
    }
    Ok(followed.map(Known::Here))
}

/// The caller has no job of this name, as far as this gateway knows.
pub fn unknown(app: &App, id: &str) -> Problem {
    let keep = app.config.results.keep.as_secs();
    let (where_, limit) = match app.results {
        Some(_) => ("in the store of results", "results.folder_mib_max, results.folder_mib_max_per_key"),
        None => ("on this gateway, and only the gateway that took a job knows it", "results.mib_max"),
    };
    let id: String = id.chars().take(64).collect();
    Problem::not_found(&format!(
        "job `{id}` {where_}. Results are kept for {keep} s after a job's end, or less if there is no room ({limit})"
    ))
}
