//! How passes ended, for a person who has seen what the program printed.

use vramq_inference::process::PassEnd;

/// The lines of a pass, which need not follow each other.
pub(crate) fn of_lines(lines: &[usize]) -> String {
    match lines {
        [line] => format!("line {line}"),
        lines => format!("lines {}", lines.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// Why a pass was not done.
pub(crate) fn told(end: &PassEnd, lines: &[usize]) -> String {
    let item = match end {
        PassEnd::OutOfMemory { item, .. } | PassEnd::Failed { item, .. } => *item,
        _ => None,
    };
    let of = item.and_then(|item| lines.get(item)).map_or_else(|| of_lines(lines), |line| of_lines(&[*line]));
    let voided = if end.voids_outputs() { "; none of the outputs of this pass counts" } else { "" };
    format!("{of}: {}{voided}", what_ended(end))
}

fn what_ended(end: &PassEnd) -> String {
    match end {
        PassEnd::Done { .. } => "done".to_owned(),
        PassEnd::OutOfMemory { report, .. } => format!("out of device memory: {}", report.detail),
        PassEnd::Failed { detail, .. } => format!("failed: {detail}"),
        PassEnd::Protocol { fault, .. } => fault.clone(),
        PassEnd::Crashed { death, .. } => format!("the process {death}"),
        PassEnd::TimedOut { limit, .. } => {
            format!("took longer than {} s (item_s for each item)", limit.as_secs_f64())
        }
        PassEnd::Cancelled { .. } => "cancelled".to_owned(),
        PassEnd::NotRun { reason } => format!("not run: {reason}"),
        PassEnd::DiskFull { detail, .. } => detail.clone(),
    }
}
