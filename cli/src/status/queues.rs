//! The table of queues. Pure.

use vramq_amqp::Depth;

use super::fleet::{Counted, Queue};
use super::severity::{Line, NAME_COLUMNS, Severity, rate, with_severities};
use crate::output::text::{Align, cut};

pub(super) fn queue_table(queues: &[Queue<'_>]) -> Vec<Line> {
    let head = [
        ("QUEUE", Align::Left),
        ("READY", Align::Right),
        ("BULK", Align::Right),
        ("UNACKED", Align::Right),
        ("SUSPECTS", Align::Right),
        ("DEAD", Align::Right),
        ("WORKERS", Align::Right),
        ("JOBS/S", Align::Right),
        ("ITEMS/S", Align::Right),
    ];
    let rows = queues.iter().flat_map(|queue| {
        let counts = queue.counted.map_or_else(
            || ["?".to_owned(), "?".to_owned(), "?".to_owned(), "?".to_owned()],
            |counted| {
                [counted.jobs, counted.bulk, counted.suspects, counted.dead].map(|depth| messages(&depth))
            },
        );
        let [ready, bulk, suspects, dead] = counts;
        let of_model = vec![
            cut(queue.key, NAME_COLUMNS),
            ready,
            bulk,
            queue.in_hand.to_string(),
            suspects,
            dead,
            queue.workers.to_string(),
            rate(queue.rates.map(|rates| rates.jobs_per_s)),
            rate(queue.rates.map(|rates| rates.items_per_s)),
        ];
        let row =
            |(name, depth): &(String, Depth)| vec![format!("  {}", cut(name, NAME_COLUMNS)), messages(depth)];
        std::iter::once(of_model).chain(further(queue.counted).iter().map(row))
    });
    let severities = queues.iter().flat_map(|queue| {
        let of_further =
            further(queue.counted).iter().map(|(_, depth)| severity_of_jobs(depth, queue.counted));
        std::iter::once(queue_severity(queue.counted)).chain(of_further)
    });
    with_severities(&head, rows.collect(), severities)
}

/// Where the jobs of a model come from besides its own queue.
fn further(counted: Option<&Counted>) -> &[(String, Depth)] {
    counted.map_or(&[], |counted| &counted.further)
}

/// The severity of jobs that nobody consumes. Only a warning if another queue of the model is consumed: workers with fewer slots than
/// queues consume these in turn.
fn severity_of_jobs(depth: &Depth, counted: Option<&Counted>) -> Severity {
    let is_consumed = |depth: &Depth| matches!(depth, Depth::Messages { consumers: 1.., .. });
    if !matches!(depth, Depth::Messages { ready: 1.., consumers: 0 }) {
        return Severity::Normal;
    }
    let is_any = counted.is_some_and(|counted| is_consumed(&counted.jobs))
        || further(counted).iter().any(|(_, depth)| is_consumed(depth));
    if is_any { Severity::Warning } else { Severity::Error }
}

fn queue_severity(counted: Option<&Counted>) -> Severity {
    let held = |depth: &Depth| matches!(depth, Depth::Messages { ready: 1.., .. });
    let Some(counted) = counted else { return Severity::Normal };
    match severity_of_jobs(&counted.jobs, Some(counted)) {
        Severity::Normal if held(&counted.dead) || held(&counted.suspects) => Severity::Warning,
        severity => severity,
    }
}

fn messages(depth: &Depth) -> String {
    match depth {
        Depth::Messages { ready, .. } => ready.to_string(),
        Depth::NoQueue => "no queue".to_owned(),
        Depth::NoPermission => "not ours".to_owned(),
    }
}
