//! Reads whole dead queues without changing them.

use super::Common;
use super::dead_letter::DeadLetter;
use super::error::Error;
use super::plan::{Plan, Query, unmatched};
use super::queue_lock::QueueLock;
use super::reader::Reader;
use crate::output::text::safe;

/// Passes every dead letter of a model to `visit`, oldest first, until that fails.
pub(super) async fn scan(
    common: &Common,
    model: &str,
    mut visit: impl FnMut(DeadLetter) -> Result<(), Error>,
) -> Result<(), Error> {
    let lock = QueueLock::open(&common.broker, model).await?;
    let mut reader = Reader::open(&lock).await?;
    let mut visited = Ok(());
    while visited.is_ok()
        && let Some(unacked) = reader.next().await?
    {
        visited = visit(unacked.letter);
    }
    reader.give_back().await?;
    lock.close().await;
    visited
}

/// What an action would take, queue by queue, and whether every name matches.
pub(super) async fn plan(common: &Common, query: &Query) -> Result<(Vec<(String, Plan)>, bool), Error> {
    let mut plans = Vec::new();
    let mut before = 0;
    for model in common.models()? {
        let mut plan = Plan::default();
        scan(common, model, |letter| {
            plan.consider(&letter, query, before);
            Ok(())
        })
        .await?;
        plan.join();
        before += plan.selected.len() as u64;
        plans.push((model.clone(), plan));
    }
    let all_there = report_unmatched(plans.iter().map(|(_, plan)| plan), query)?;
    plans.retain(|(_, plan)| !plan.selected.is_empty());
    Ok((plans, all_there))
}

/// Prints names that match nothing; whether there are none.
pub(super) fn report_unmatched<'a>(
    plans: impl Iterator<Item = &'a Plan> + Clone,
    query: &'a Query,
) -> Result<bool, Error> {
    let missing = unmatched(plans, &query.names)?;
    for name in &missing {
        eprintln!("no letter has the id or fingerprint {}", safe(name));
    }
    Ok(missing.is_empty())
}
