//! Reads whole dead queues without changing them.

use crate::access::Access;
use crate::dead_letter::DeadLetter;
use crate::error::Error;
use crate::plan::{Plan, PlanBuilder, Query, unmatched};
use crate::queue_lock::QueueLock;
use crate::reader::Reader;

/// Passes every dead letter of a model to `visit`, oldest first, until that fails.
///
/// # Errors
/// That of `visit`; or the queue cannot be read.
pub async fn scan(
    access: &Access,
    model: &str,
    visit: impl FnMut(DeadLetter) -> Result<(), Error>,
) -> Result<(), Error> {
    scan_first(access, model, u64::MAX, visit).await.map(drop)
}

/// Passes the oldest dead letters of a model to `visit`, `dead_letters_max` at most. Returns how many the queue holds.
///
/// # Errors
/// That of `visit`; or the queue cannot be read.
pub async fn scan_first(
    access: &Access,
    model: &str,
    dead_letters_max: u64,
    visit: impl FnMut(DeadLetter) -> Result<(), Error>,
) -> Result<u64, Error> {
    let lock = QueueLock::open(access, model).await?;
    let scanned = scan_locked(&lock, dead_letters_max, visit).await;
    lock.close().await;
    scanned
}

async fn scan_locked(
    lock: &QueueLock,
    dead_letters_max: u64,
    mut visit: impl FnMut(DeadLetter) -> Result<(), Error>,
) -> Result<u64, Error> {
    let there = lock.count().await?.ready;
    let mut reader = Reader::open(lock).await?;
    let (mut visited, mut seen) = (Ok(()), 0);
    while visited.is_ok()
        && seen < dead_letters_max
        && let Some(unacked) = reader.next().await?
    {
        seen += 1;
        visited = visit(unacked.letter);
    }
    reader.give_back().await?;
    visited.map(|()| there.max(seen))
}

/// What an action would take.
#[derive(Debug)]
pub struct Planned {
    /// By model; those without a selected letter are left out.
    pub plans: Vec<(String, Plan)>,
    /// The names of the query that match nothing.
    pub missing: Vec<String>,
}

/// Plans an action over the queues of some models.
///
/// # Errors
/// A queue cannot be read, or a name is ambiguous.
pub async fn plan(access: &Access, models: &[String], query: &Query) -> Result<Planned, Error> {
    let mut plans = Vec::new();
    let mut before = 0;
    for model in models {
        let mut builder = PlanBuilder::default();
        scan(access, model, |letter| {
            builder.consider(&letter, query, before);
            Ok(())
        })
        .await?;
        let plan = builder.finish();
        before += plan.selected.len() as u64;
        plans.push((model.clone(), plan));
    }
    let missing = unmatched(plans.iter().map(|(_, plan)| plan), &query.names)?;
    let missing = missing.into_iter().map(str::to_owned).collect();
    plans.retain(|(_, plan)| !plan.selected.is_empty());
    Ok(Planned { plans, missing })
}
