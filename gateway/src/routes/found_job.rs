//! Finds a caller's job: in memory, in the store of results, or with another gateway. Claims the name of one that is to be published.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use crate::app::{App, Permits, draining};
use crate::drain::Drain;
use crate::followed;
use crate::jobs::Entry;
use crate::jobs::claim::{ABANDONED_AFTER, Claim, Claimant};
use crate::jobs::earlier::{self, JobName};
use crate::jobs::stored::{self, StoredJob, Unread};
use crate::keys::Caller;
use crate::problem::Problem;

/// The first interval between looks for a job that another gateway publishes. Short, because a publish takes milliseconds.
const CLAIM_LOOK_FIRST: Duration = Duration::from_millis(5);
const CLAIM_LOOK_EVERY: Duration = Duration::from_secs(1);

/// A caller's job.
#[derive(Debug)]
pub enum FoundJob {
    /// A job with a task on this gateway. The job may be another gateway's, which this one follows.
    Here(Arc<Entry>),
    /// A finished job, as stored.
    Stored(Bytes),
}

/// Like [`find_by_id`], for routes that answer without the results. Returns the permit under which a stored job's results are in memory.
///
/// # Errors
/// As for [`find_by_id`], or the gateway is full, or the caller has its share.
pub async fn find_admitted(
    app: &App,
    caller: &Caller,
    id: &str,
) -> Result<(FoundJob, Option<Permits>), Problem> {
    if let Some(entry) = app.jobs.find(&caller.name, id) {
        return Ok((FoundJob::Here(entry), None));
    }
    let reader = app.admit_reader(caller)?;
    Ok((find_by_id(app, caller, id).await?, Some(reader)))
}

/// The caller's job, in memory, in the result store, or at another gateway. A stored job comes with all of its results, so the caller of
/// this function holds a reader's permit, unless this gateway has the job.
///
/// # Errors
/// The job does not exist, or this gateway does not know it.
pub async fn find_by_id(app: &App, caller: &Caller, id: &str) -> Result<FoundJob, Problem> {
    if let Some(entry) = app.jobs.find(&caller.name, id) {
        return Ok(FoundJob::Here(entry));
    }
    if let Some(results) = &app.results {
        let damaged = match stored::read(results, &caller.name, id, &app.answers).await {
            Ok(Some(StoredJob { written, run })) => {
                let again = followed::find_again(app, caller, id, run).await?;
                return Ok(again.map_or(FoundJob::Stored(written), FoundJob::Here));
            }
            Ok(None) => None,
            // The job may be running again, at another gateway.
            Err(damaged @ Unread::Damaged) => Some(damaged),
            Err(unread) => return Err(unread.problem()),
        };
        if let Some(entry) = followed::find(app, caller, id).await? {
            return Ok(FoundJob::Here(entry));
        }
        if let Some(damaged) = damaged {
            return Err(damaged.problem());
        }
        // The job may have ended in the meantime.
        if let Some(stored) =
            stored::read(results, &caller.name, id, &app.answers).await.map_err(Unread::problem)?
        {
            return Ok(FoundJob::Stored(stored.written));
        }
    }
    Err(unknown(app, id))
}

/// A request that may be the same as an earlier one.
#[derive(Debug)]
pub struct RepeatedRequest<'a> {
    pub app: &'a App,
    pub caller: &'a Caller,
    /// `None`: the same job cannot be asked for again.
    pub name: Option<&'a JobName>,
    pub idempotency_key: Option<&'a str>,
    pub fingerprint: [u8; 32],
}

/// What the name of a request stands for once this gateway may publish its job.
#[derive(Debug)]
pub enum Claimed {
    /// Another gateway published the same request first.
    Found(FoundJob),
    /// No job. While the claim is held, no other gateway publishes a job of this name. `None` without a name or a store.
    New(Option<Claim>),
}

impl RepeatedRequest<'_> {
    /// The job that the same request started before, also one that failed. To answer with it, neither a worker nor the inputs are needed.
    ///
    /// # Errors
    /// The name stands for another request; or the job is another gateway's, and this one follows as many as it may.
    pub async fn find_earlier(&self) -> Result<Option<FoundJob>, Problem> {
        let Self { app, caller, name, idempotency_key, fingerprint } = *self;
        let Some(name) = name else { return Ok(None) };
        if let Some(entry) = app.jobs.same(&caller.name, &name.id, idempotency_key, &fingerprint)? {
            return Ok(Some(FoundJob::Here(entry)));
        }
        let followed = followed::find_same(app, caller, name, fingerprint).await?;
        // A followed job may have ended and been stored in the meantime.
        let stored =
            earlier::find_stored(app.results.as_ref(), &app.answers, caller, name, fingerprint).await?;
        Ok(match (stored, followed) {
            (Some(StoredJob { written, run }), followed) => {
                let again = followed.filter(|entry| run.yields_to(entry.created_ms));
                Some(again.map_or(FoundJob::Stored(written), FoundJob::Here))
            }
            (None, followed) => followed.map(FoundJob::Here),
        })
    }

    /// Claims the name at the gateways that share the store, so that the same request at two of them at the same moment is one job. Waits
    /// while another gateway publishes it. For a request that [`find_earlier`](Self::find_earlier) found no job of.
    ///
    /// # Errors
    /// As for [`find_earlier`](Self::find_earlier); or the other gateway has not published it within `http.request_s`, or this one stops.
    pub async fn claim(&self) -> Result<Claimed, Problem> {
        let Self { app, caller, name, .. } = *self;
        let Some((name, results)) = name.zip(app.results.as_ref()) else { return Ok(Claimed::New(None)) };
        let mut claimant = results.claimant(&caller.name, &name.id);
        let (since, mut pause) = (Instant::now(), CLAIM_LOOK_FIRST);
        loop {
            // The store hangs, so the job runs as without a store.
            let Some((again, claimed)) = claimant.claim_in_time().await else {
                return Ok(Claimed::New(None));
            };
            claimant = again;
            match claimed {
                Ok(claim @ Some(_)) => {
                    // Another gateway may have published and finished the job before the claim.
                    return Ok(self.find_earlier().await?.map_or(Claimed::New(claim), Claimed::Found));
                }
                Ok(None) => {}
                Err(error) => {
                    results.cannot_claim(&error);
                    return Ok(Claimed::New(None));
                }
            }
            if *app.drain.borrow() != Drain::Serving {
                return Err(draining());
            }
            if since.elapsed() + pause >= app.config.limits.request {
                return Err(claimed_elsewhere(name, &claimant, since.elapsed()));
            }
            sleep(pause).await;
            pause = (2 * pause).min(CLAIM_LOOK_EVERY);
            if let Some(found) = self.find_earlier().await? {
                return Ok(Claimed::Found(found));
            }
        }
    }
}

/// This request published nothing. Whether the other gateway has published the job is unknown.
fn claimed_elsewhere(name: &JobName, claimant: &Claimant, waited: Duration) -> Problem {
    // A gateway that is gone is noticed after this time; one that is there may need as long again.
    let left = ABANDONED_AFTER.saturating_sub(claimant.silent_for());
    Problem::claimed(&name.id, left.max(waited))
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
