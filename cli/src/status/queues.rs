//! The table of queues. Pure.

use vramq_amqp::Depth;

use super::fleet::{Counted, Queue};
use super::lines::{Line, NAME_COLUMNS, Severity, rate, with_severities};
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
    let rows = queues.iter().map(|queue| {
        let counts = queue.counted.map_or_else(
            || ["?".to_owned(), "?".to_owned(), "?".to_owned(), "?".to_owned()],
            |counted| {
                [counted.jobs, counted.bulk, counted.suspects, counted.dead].map(|depth| messages(&depth))
            },
        );
        let [ready, bulk, suspects, dead] = counts;
        vec![
            cut(queue.key, NAME_COLUMNS),
            ready,
            bulk,
            queue.in_hand.to_string(),
            suspects,
            dead,
            queue.workers.to_string(),
            rate(queue.rates.map(|rates| rates.jobs_per_s)),
            rate(queue.rates.map(|rates| rates.items_per_s)),
        ]
    });
    with_severities(&head, rows.collect(), queues.iter().map(|queue| queue_severity(queue.counted)))
}

fn queue_severity(counted: Option<Counted>) -> Severity {
    let held = |depth| matches!(depth, Depth::Messages { ready: 1.., .. });
    match counted {
        Some(counted) if matches!(counted.jobs, Depth::Messages { ready: 1.., consumers: 0 }) => {
            Severity::Error
        }
        Some(counted) if held(counted.dead) || held(counted.suspects) => Severity::Warning,
        _ => Severity::Normal,
    }
}

fn messages(depth: &Depth) -> String {
    match depth {
        Depth::Messages { ready, .. } => ready.to_string(),
        Depth::NoQueue => "no queue".to_owned(),
        Depth::NoPermission => "not ours".to_owned(),
    }
}
