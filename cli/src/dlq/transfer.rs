//! What `retry` and `drop` have in common: one transfer for each queue, with progress and a report.

use serde_json::Value;
use vramq_dlq::audit_log::AuditLog;
use vramq_dlq::destination::Target;
use vramq_dlq::plan::Plan;
use vramq_dlq::transfer::{Ended, Outcome, Transfers};

use super::Common;
use super::error::Error;
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::counted;
use crate::signals;

/// The most kept letters that are printed one by one.
const KEPT_SHOWN_MAX: usize = 10;

/// Moves the letters of all plans. Returns the exit code. `done` names the action for people: "retried".
///
/// # Errors
/// What ended one transfer early.
pub(super) async fn run(
    common: &Common,
    audit_log: AuditLog,
    done: &'static str,
    detail: Value,
    plans: Vec<(String, Plan)>,
    mut target: Target<'_>,
) -> Result<u8, Error> {
    let total = plans.iter().map(|(_, plan)| plan.selected.len() as u64).sum();
    let progress = Progress::new("dead letters", Some(total), common.quiet);
    let mut stops =
        signals::stops().map_err(|error| Error::Failed(format!("listen for signals: {error}")))?;
    let access = common.access()?;
    let on_moved = |letters| progress.add(letters);
    let mut transfers = Transfers { access: &access, audit_log, detail, on_moved: &on_moved };
    let mut code = exit::DONE;
    for (model, plan) in plans {
        let Ended { outcome, error } = transfers.run(&model, &plan, &mut target, &mut stops).await?;
        progress.suspended(|| print(&outcome, done, plan.selected.len(), error.as_ref()));
        error.map_or(Ok(()), Err)?;
        if !outcome.kept.is_empty() || outcome.gone > 0 {
            code = exit::FAILED;
        }
    }
    progress.finish(done);
    Ok(code)
}

/// Prints which letters stayed or were gone. After an error, the counts as well.
fn print(outcome: &Outcome, done: &str, selected: usize, error: Option<&Error>) {
    if let Some(error) = error {
        let delivered = outcome.delivered_and_there().len();
        for line in ended_early(outcome, delivered, done, selected, matches!(error, Error::Unreachable(_))) {
            eprintln!("{line}");
        }
    }
    for (fingerprint, reason) in outcome.kept.iter().take(KEPT_SHOWN_MAX) {
        eprintln!("{fingerprint} stays: {reason}");
    }
    let more = outcome.kept.len().saturating_sub(KEPT_SHOWN_MAX) as u64;
    if more > 0 {
        eprintln!("… and {} more: the action log lists all of them", counted(more, "dead letter"));
    }
    if outcome.gone > 0 {
        let gone = counted(outcome.gone as u64, "dead letter");
        eprintln!(
            "{gone} no longer in the queue: another client took them; {} were {done}",
            outcome.done.len()
        );
    }
}

/// How far an action came that ended early. So many results are delivered, and still in the queue. The broker may be lost.
fn ended_early(
    outcome: &Outcome,
    delivered: usize,
    done: &str,
    selected: usize,
    is_lost: bool,
) -> Vec<String> {
    let (moved, unknown) = (outcome.done.len(), outcome.unknown.len());
    let mut lines = vec![format!("{moved} of {} {done}", counted(selected as u64, "dead letter"))];
    if unknown > 0 {
        lines.push(format!(
            "{unknown} published without an answer of the broker: they may be {done}, and are still in the queue"
        ));
    }
    if delivered > 0 {
        lines.push(format!("{delivered} delivered, and still in the queue because their job stays"));
    }
    if selected > moved + unknown + delivered {
        lines.push("the others are still in the queue".to_owned());
    }
    if is_lost && moved > 0 {
        lines.push(format!(
            "the last of those {done} may still be in the queue as well: look with `vramq dlq list` before you repeat this"
        ));
    }
    lines
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use vramq_dlq::dead_letter::DeadLetter;

    use super::*;

    #[test]
    fn what_is_not_known_is_not_counted_as_done() {
        let letter = DeadLetter::new("vramq.dead.m", BasicProperties::default(), Vec::new());
        let fingerprints = |count| vec![letter.fingerprint(); count];
        let said = |done, unknown, delivered, selected, is_lost| {
            let mut outcome = Outcome::default();
            (outcome.done, outcome.unknown) = (fingerprints(done), fingerprints(unknown));
            ended_early(&outcome, delivered, "retried", selected, is_lost)
        };
        assert_eq!(said(2, 0, 0, 2, false), ["2 of 2 dead letters retried"]);
        assert_eq!(
            said(1, 0, 0, 2, false),
            ["1 of 2 dead letters retried", "the others are still in the queue"]
        );
        assert_eq!(
            said(1, 3, 0, 5, true),
            [
                "1 of 5 dead letters retried",
                "3 published without an answer of the broker: they may be retried, and are still in the queue",
                "the others are still in the queue",
                "the last of those retried may still be in the queue as well: look with `vramq dlq list` before you repeat this",
            ]
        );
        assert_eq!(
            said(0, 0, 2, 3, true),
            [
                "0 of 3 dead letters retried",
                "2 delivered, and still in the queue because their job stays",
                "the others are still in the queue",
            ]
        );
    }
}
