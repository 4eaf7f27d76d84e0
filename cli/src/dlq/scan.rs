//! Reading whole queues, and giving everything back.

use super::Common;
use super::dead_letter::Letter;
use super::error::Trouble;
use super::plan::{Choice, Plan, uncalled};
use super::queue_lock::Desk;
use super::reader::Reader;
use crate::output::text::safe;

/// Shows every letter of a model to `see`, oldest first, until it fails.
pub(super) async fn look(
    common: &Common,
    model: &str,
    mut see: impl FnMut(Letter) -> Result<(), Trouble>,
) -> Result<(), Trouble> {
    let desk = Desk::open(&common.broker, model).await?;
    let mut reader = Reader::open(&desk).await?;
    let mut seen = Ok(());
    while seen.is_ok()
        && let Some(taken) = reader.next().await?
    {
        seen = see(taken.letter);
    }
    reader.give_back().await?;
    desk.close().await;
    seen
}

/// What an action would take, queue by queue, and whether all that was named is there.
pub(super) async fn plan(common: &Common, choice: &Choice) -> Result<(Vec<(String, Plan)>, bool), Trouble> {
    let mut plans = Vec::new();
    let mut before = 0;
    for model in common.models()? {
        let mut plan = Plan::default();
        look(common, model, |letter| {
            plan.consider(&letter, choice, before);
            Ok(())
        })
        .await?;
        plan.join();
        before += plan.chosen.len() as u64;
        plans.push((model.clone(), plan));
    }
    let missing = uncalled(plans.iter().map(|(_, plan)| plan), &choice.names)?;
    for name in &missing {
        eprintln!("no letter is called {}", safe(name));
    }
    let all_there = missing.is_empty();
    plans.retain(|(_, plan)| !plan.chosen.is_empty());
    Ok((plans, all_there))
}
