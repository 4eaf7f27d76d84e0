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
use crate::jobs::earlier::{self, Name};
use crate::jobs::view::end_of;
use crate::keys::Caller;
use crate::off_runtime::off_runtime;
use crate::problem::Problem;

/// Between looks for the job that another gateway publishes: at first short, because a publish takes milliseconds.
const CLAIM_LOOK_FIRST: Duration = Duration::from_millis(5);
const CLAIM_LOOK_EVERY: Duration = Duration::from_secs(1);

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

/// A request that may be the same as an earlier one.
#[derive(Debug)]
pub struct SameAs<'a> {
    pub app: &'a App,
    pub caller: &'a Caller,
    /// `None`: nobody can ask for the same job again.
    pub name: Option<&'a Name>,
    pub idempotency_key: Option<&'a str>,
    pub fingerprint: [u8; 32],
    /// Whether a job that is stored as failed runs again.
    pub failed_runs_again: bool,
}

/// What the name of a request stands for when its job is to be published.
#[derive(Debug)]
pub enum Named {
    /// The same request at another gateway was first.
    Known(Known),
    /// Nothing, and no other gateway publishes a job of this name while the claim is held; `None` without a name or a store.
    New(Option<Claim>),
}

impl SameAs<'_> {
    /// The job that the same request started before: its answer needs no worker, and none of the inputs.
    ///
    /// # Errors
    /// The name stands for another request; or the job is another gateway's, and this one follows as many as it may.
    pub async fn find(&self) -> Result<Option<Known>, Problem> {
        let Self { app, caller, name, idempotency_key, fingerprint, failed_runs_again } = *self;
        let Some(name) = name else { return Ok(None) };
        if let Some(entry) = app.jobs.same(&caller.name, &name.id, idempotency_key, &fingerprint)? {
            return Ok(Some(Known::Here(entry)));
        }
        let followed = followed::find_same(app, caller, name, fingerprint).await?;
        // What has ended is stored also if it was another gateway's until now.
        let stored = earlier::find(app.results.as_ref(), caller, name, fingerprint).await?;
        if let Some(written) = stored
            && (!failed_runs_again || is_done(&written).await)
        {
            return Ok(Some(Known::Stored(written)));
        }
        Ok(followed.map(Known::Here))
    }

    /// Claims the name at the gateways that share the store, so that the same request at two of them at the same moment is one job. Waits
    /// while another gateway publishes it. For a request that [`find`](Self::find) found no job of.
    ///
    /// # Errors
    /// As for [`find`](Self::find); or the other gateway has not published it within `http.request_s`, or this one stops.
    pub async fn claim(&self) -> Result<Named, Problem> {
        let Self { app, caller, name, .. } = *self;
        let Some((name, results)) = name.zip(app.results.as_ref()) else { return Ok(Named::New(None)) };
        let mut claimant = results.claimant(&caller.name, &name.id);
        let (since, mut pause) = (Instant::now(), CLAIM_LOOK_FIRST);
        loop {
            // The store hangs: the job runs, as without a store.
            let Some((again, claimed)) = claimant.claim_in_time().await else { return Ok(Named::New(None)) };
            claimant = again;
            match claimed {
                Ok(claim @ Some(_)) => {
                    // Another gateway may have been through with it before the claim.
                    return Ok(self.find().await?.map_or(Named::New(claim), Named::Known));
                }
                Ok(None) => {}
                Err(error) => {
                    results.cannot_claim(&error);
                    return Ok(Named::New(None));
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
            if let Some(known) = self.find().await? {
                return Ok(Named::Known(known));
            }
        }
    }
}

async fn is_done(written: &Bytes) -> bool {
    let read = written.clone();
    let end = off_runtime(read.len(), move || end_of(&read)).await;
    end.is_some_and(|(state, _)| state == "done")
}

/// Nothing was published by this request; whether the other gateway has published the job is open.
fn claimed_elsewhere(name: &Name, claimant: &Claimant, waited: Duration) -> Problem {
    // One that is gone is known after some seconds; one that is there may need as long again.
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
