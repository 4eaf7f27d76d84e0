//! Reading whole queues, and giving everything back.

use super::Common;
use super::dead_letter::DeadLetter;
use super::error::Error;
use super::plan::{Plan, Query, uncalled};
use super::queue_lock::QueueLock;
use super::reader::Reader;
use crate::output::text::safe;

/// Shows every letter of a model to `see`, oldest first, until it fails.
pub(super) async fn scan(
    common: &Common,
    model: &str,
    mut see: impl FnMut(DeadLetter) -> Result<(), Error>,
) -> Result<(), Error> {
    let queue_lock = QueueLock::open(&common.broker, model).await?;
    let mut reader = Reader::open(&queue_lock).await?;
    let mut seen = Ok(());
    while seen.is_ok()
        && let Some(taken) = reader.next().await?
    {
        seen = see(taken.letter);
    }
    reader.give_back().await?;
    queue_lock.close().await;
    seen
}

/// What an action would take, queue by queue, and whether all that was named is there.
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
    let missing = uncalled(plans.iter().map(|(_, plan)| plan), &query.names)?;
    for name in &missing {
        eprintln!("no letter is called {}", safe(name));
    }
    let all_there = missing.is_empty();
    plans.retain(|(_, plan)| !plan.selected.is_empty());
    Ok((plans, all_there))
}
