//! What `retry` and `drop` have in common: one transfer for each queue, with progress and a report.

use serde_json::Value;
use vramq_dlq::audit_log::AuditLog;
use vramq_dlq::destination::Target;
use vramq_dlq::plan::Plan;
use vramq_dlq::transfer::{Ended, TransferReport, Transfers};

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
        let Ended { report, error } = transfers.run(&model, &plan, &mut target, &mut stops).await?;
        progress.suspended(|| print(&report, done, plan.selected.len(), error.is_some()));
        error.map_or(Ok(()), Err)?;
        if !report.kept.is_empty() || report.gone > 0 {
            code = exit::FAILED;
        }
    }
    progress.finish(done);
    Ok(code)
}

/// Prints which letters stayed or were gone. If the action ended early, the counts as well.
fn print(report: &TransferReport, done: &str, selected: usize, is_early: bool) {
    if is_early {
        for line in report.early_end(done, selected, "look with `vramq dlq list`") {
            eprintln!("{line}");
        }
    }
    for (fingerprint, reason) in report.kept.iter().take(KEPT_SHOWN_MAX) {
        eprintln!("{fingerprint} stays: {reason}");
    }
    let more = report.kept.len().saturating_sub(KEPT_SHOWN_MAX) as u64;
    if more > 0 {
        eprintln!("… and {} more: the action log lists all of them", counted(more, "dead letter"));
    }
    if report.gone > 0 {
        let gone = counted(report.gone as u64, "dead letter");
        eprintln!(
            "{gone} no longer in the queue: another client took them; {} were {done}",
            report.done.len()
        );
    }
}
