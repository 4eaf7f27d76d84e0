//! The JSON that `vramq status --json` prints. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::Serialize;
use vramq_amqp::Depth;
use vramq_schemas::status::Heartbeat;

use super::fleet::Fleet;
use super::worker_snapshot::{Presence, Rates};

/// The whole report.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    broker: &'a str,
    /// Why there is no connection: what follows is what was known before. Null while there is one.
    error: Option<&'a str>,
    queues: Vec<QueueReport<'a>>,
    workers: Vec<WorkerReport<'a>>,
    /// Messages on `vramq.status` that are not heartbeats.
    unreadable: u64,
}

/// Counts are null if the queue does not exist or may not be read.
#[derive(Debug, Serialize)]
struct QueueReport<'a> {
    key: &'a str,
    ready: Option<u32>,
    bulk: Option<u32>,
    suspects: Option<u32>,
    dead: Option<u32>,
    /// Where its jobs come from besides its own queue.
    further: Vec<FurtherQueue<'a>>,
    /// The broker's count, of which a worker has several.
    consumers: Option<u32>,
    /// Workers that consume it, by their heartbeats.
    workers: usize,
    in_hand: u64,
    rates: Option<Rates>,
}

#[derive(Debug, Serialize)]
struct FurtherQueue<'a> {
    queue: &'a str,
    ready: Option<u32>,
    consumers: Option<u32>,
}

#[derive(Debug, Serialize)]
struct WorkerReport<'a> {
    presence: Presence,
    heard_ms_ago: u64,
    /// By model; empty until the second heartbeat.
    rates: &'a BTreeMap<String, Rates>,
    heartbeat: &'a Heartbeat,
}

impl<'a> Report<'a> {
    pub(super) fn new(broker: &'a str, error: Option<&'a str>, fleet: &'a Fleet, now: Instant) -> Self {
        let queues = fleet.queues(now).into_iter().map(|queue| {
            let jobs = queue.counted.and_then(|counted| messages(counted.jobs));
            QueueReport {
                key: queue.key,
                ready: jobs.map(|(ready, _)| ready),
                bulk: queue.counted.and_then(|counted| messages(counted.bulk)).map(|(ready, _)| ready),
                suspects: queue
                    .counted
                    .and_then(|counted| messages(counted.suspects))
                    .map(|(ready, _)| ready),
                dead: queue.counted.and_then(|counted| messages(counted.dead)).map(|(ready, _)| ready),
                further: queue
                    .counted
                    .into_iter()
                    .flat_map(|counted| &counted.further)
                    .map(further)
                    .collect(),
                consumers: jobs.map(|(_, consumers)| consumers),
                workers: queue.workers,
                in_hand: queue.in_hand,
                rates: queue.rates,
            }
        });
        let workers = fleet.workers(now).map(|(snapshot, presence)| WorkerReport {
            presence,
            heard_ms_ago: u64::try_from(now.saturating_duration_since(snapshot.heard).as_millis())
                .unwrap_or(u64::MAX),
            rates: &snapshot.rates,
            heartbeat: &snapshot.last,
        });
        Self {
            broker,
            error,
            queues: queues.collect(),
            workers: workers.collect(),
            unreadable: fleet.unreadable,
        }
    }
}

fn further((queue, depth): &(String, Depth)) -> FurtherQueue<'_> {
    let counts = messages(*depth);
    let (ready, consumers) = (counts.map(|(ready, _)| ready), counts.map(|(_, consumers)| consumers));
    FurtherQueue { queue, ready, consumers }
}

fn messages(depth: Depth) -> Option<(u32, u32)> {
    match depth {
        Depth::Messages { ready, consumers } => Some((ready, consumers)),
        Depth::NoQueue | Depth::NoPermission => None,
    }
}
