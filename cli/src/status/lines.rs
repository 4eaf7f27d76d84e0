//! The lines that `vramq status` prints: tables of queues, workers and processes, and remarks. Pure.

use std::time::{Duration, Instant};

use super::fleet::Fleet;
use super::models::{missing_queues, mixed_revisions, process_table};
use super::queues::queue_table;
use super::severity::{Line, Severity};
use super::worker_snapshot::{Down, Link};
use super::workers::{reasons, worker_table};
use crate::output::text::{age, safe};

/// A shorter time without a connection is not shown: it would be `0s`.
const AGE_MIN: Duration = Duration::from_secs(1);

/// All lines: those about a lost connection, then what is known.
pub(super) fn lines(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let known = known(fleet, now);
    let mut lines = link(fleet, !known.is_empty(), now);
    lines.extend(known);
    lines
}

/// What is known of queues and workers, also where the connection is lost.
pub(super) fn known(fleet: &Fleet, now: Instant) -> Vec<Line> {
    let mut lines = Vec::new();
    let queues = fleet.queues(now);
    if !queues.is_empty() {
        lines.extend(queue_table(&queues));
        lines.push(Line::new("", Severity::Normal));
    }
    if fleet.is_empty() {
        lines.extend(no_workers(fleet));
    } else {
        lines.extend(worker_table(fleet, now));
        lines.extend(process_table(fleet, now));
        lines.extend(reasons(fleet, now));
        lines.extend(missing_queues(fleet, now));
        lines.extend(mixed_revisions(fleet, now));
    }
    if fleet.unreadable > 0 {
        let text = format!(
            "{} messages on vramq.status were ignored: they were not heartbeats, or there were too many",
            fleet.unreadable
        );
        lines.push(Line::new(text, Severity::Warning));
    }
    lines
}

/// A lost connection, above what `is_known` of the time before.
fn link(fleet: &Fleet, is_known: bool, now: Instant) -> Vec<Line> {
    match &fleet.link {
        Link::Up { .. } => Vec::new(),
        Link::Down { why: Down::Connecting, .. } => vec![Line::new("connecting …", Severity::Dim)],
        Link::Down { since, why: Down::Unreachable(error) | Down::Refused(error) } => {
            let passed = now.saturating_duration_since(*since);
            let lasting = if passed < AGE_MIN { String::new() } else { format!(" for {}", age(passed)) };
            let text = format!("no connection to the broker{lasting}: {}", safe(error));
            let rest = if is_known { "the rest is the last known state; " } else { "" };
            let stale = format!("{rest}workers continue, and so do attempts to reconnect");
            vec![
                Line::new(text, Severity::Error),
                Line::new(stale, Severity::Dim),
                Line::new("", Severity::Normal),
            ]
        }
    }
}

/// States only what was observed: without heartbeats it is unknown whether workers run.
fn no_workers(fleet: &Fleet) -> Vec<Line> {
    if matches!(fleet.link, Link::Down { .. }) {
        return Vec::new();
    }
    let (why, severity) = match fleet.has_exchange {
        None => ("no worker was heard yet", Severity::Dim),
        Some(true) => (
            "no worker was heard: none is connected to this virtual host, or heartbeats are off or less frequent",
            Severity::Warning,
        ),
        Some(false) => (
            "no worker was heard: there is no exchange vramq.status, so no worker with heartbeats has used this virtual host",
            Severity::Warning,
        ),
    };
    let mut lines = vec![Line::new(why, severity)];
    if fleet.has_exchange == Some(true) {
        let alarm = "or the broker is short of memory or disk, and holds heartbeats back: then `/readyz` of a worker says `blocked`";
        lines.push(Line::new(alarm, Severity::Dim));
    }
    lines
}

#[cfg(test)]
mod tests {
    use vramq_amqp::Depth;
    use vramq_schemas::status::{
        CeilingStatus, Counters, DeviceStatus, Heartbeat, ModelStatus, ProcessStatus, WorkerState,
    };

    use super::super::fleet::Counted;
    use super::*;

    fn heartbeat(worker: &str) -> Heartbeat {
        Heartbeat {
            worker: worker.to_owned(),
            version: "0.1.0".to_owned(),
            sent_at_ms: 1_000,
            interval_ms: 5_000,
            state: WorkerState::Consuming,
            models: vec![ModelStatus {
                model: "minilm".to_owned(),
                key: "minilm".to_owned(),
                slots: 104,
                in_hand: 3,
                consuming: true,
                counters: Counters {
                    items: 480,
                    out_of_memory_alone: 1,
                    out_of_memory_shared: 2,
                    ..Counters::default()
                },
                ..ModelStatus::default()
            }],
            devices: vec![DeviceStatus {
                device: "cpu".to_owned(),
                total: 2 << 30,
                free: 3 << 29,
                ..DeviceStatus::default()
            }],
            ceilings: vec![CeilingStatus { limit: 9 << 20, ..CeilingStatus::default() }],
            ..Heartbeat::default()
        }
    }

    fn hear(fleet: &mut Fleet, heartbeat: &Heartbeat, now: Instant) {
        fleet.heard(&serde_json::to_vec(heartbeat).unwrap(), now);
    }

    fn texts(fleet: &Fleet, now: Instant) -> String {
        lines(fleet, now).iter().map(|line| line.text.clone() + "\n").collect()
    }

    fn severity(fleet: &Fleet, now: Instant, of: &str) -> Severity {
        lines(fleet, now).into_iter().find(|line| line.text.starts_with(of)).expect("a line").severity
    }

    #[test]
    fn models_and_workers_have_a_table_each() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&["other".to_owned()], start);
        fleet.connected(start);
        hear(&mut fleet, &heartbeat("worker-1"), start);
        let mut later = heartbeat("worker-1");
        later.sent_at_ms += 5_000;
        later.models[0].counters.items += 400;
        later.models[0].counters.answered += 10;
        hear(&mut fleet, &later, start);
        let some = |ready, consumers| Depth::Messages { ready, consumers };
        let counted = Counted {
            jobs: some(120, 4),
            bulk: some(2, 1),
            suspects: some(0, 0),
            dead: some(7, 0),
            further: vec![("team-a.jobs".to_owned(), some(30, 0))],
        };
        fleet.counted("minilm", counted);
        let none = Depth::NoQueue;
        let counted = Counted {
            jobs: none,
            bulk: none,
            suspects: none,
            dead: Depth::NoPermission,
            further: Vec::new(),
        };
        fleet.counted("other", counted);
        let now = start + Duration::from_secs(2);
        assert_eq!(
            texts(&fleet, now),
            "\
QUEUE             READY      BULK  UNACKED  SUSPECTS      DEAD  WORKERS  JOBS/S  ITEMS/S
minilm              120         2        3         0         7        1     2.0     80.0
  team-a.jobs        30
other          no queue  no queue        0  no queue  not ours        0       -        -

WORKER    STATE      DEVICE     FREE       OF  SLOTS  UNACKED  ITEMS/S  OOM           LIMITS  VERSION  HEARD
worker-1  consuming  cpu     1.5 GiB  2.0 GiB    104        3     80.0    3  1, from 9.0 MiB  0.1.0       2s
"
        );
        assert_eq!(severity(&fleet, now, "minilm"), Severity::Warning);
        assert_eq!(severity(&fleet, now, "  team-a.jobs"), Severity::Warning);
        assert_eq!(severity(&fleet, now, "worker-1"), Severity::Ok);
        fleet.counted(
            "minilm",
            Counted { jobs: some(1, 0), bulk: none, suspects: none, dead: none, further: Vec::new() },
        );
        assert_eq!(severity(&fleet, now, "minilm"), Severity::Error);
    }

    #[test]
    fn problems_are_explained() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        assert_eq!(texts(&fleet, start), "connecting …\n");
        fleet.connected(start);
        assert_eq!(texts(&fleet, start), "no worker was heard yet\n");
        fleet.has_exchange = Some(false);
        assert!(texts(&fleet, start).contains("there is no exchange vramq.status"));
        fleet.has_exchange = Some(true);
        let nobody = texts(&fleet, start);
        assert!(nobody.starts_with("no worker was heard: none is connected"), "{nobody}");
        assert!(
            nobody.contains("\nor the broker is short of memory or disk, and holds heartbeats back"),
            "{nobody}"
        );
        let mut paused = heartbeat("b");
        paused.state = WorkerState::Paused;
        paused.reason = Some("paused by an operator".to_owned());
        hear(&mut fleet, &paused, start);
        let mut gone = heartbeat("c");
        gone.state = WorkerState::Gone;
        hear(&mut fleet, &gone, start);
        let shown = texts(&fleet, start);
        assert!(shown.contains("\nb: paused: paused by an operator\n"), "{shown}");
        assert_eq!(severity(&fleet, start, "b"), Severity::Warning);
        assert_eq!(severity(&fleet, start, "c"), Severity::Dim);
        let later = start + Duration::from_secs(16);
        let shown = texts(&fleet, later);
        assert!(shown.contains("b: silent for 16s: it has died or is cut off"), "{shown}");
        assert_eq!(severity(&fleet, later, "b"), Severity::Error);
        fleet.lost(Down::Unreachable("reset by \u{1b}[2J peer".to_owned()), later);
        let at_once = texts(&fleet, later);
        assert!(at_once.starts_with("no connection to the broker: reset by"), "{at_once}");
        assert!(at_once.contains("\nthe rest is the last known state; workers continue"), "{at_once}");
        fleet.heard(b"nonsense", later);
        let shown = texts(&fleet, later + Duration::from_secs(3));
        assert!(
            shown.starts_with("no connection to the broker for 3s: reset by \\u{1b}[2J peer\n"),
            "{shown}"
        );
        assert!(shown.contains("1 messages on vramq.status were ignored"), "{shown}");
    }

    #[test]
    fn workers_with_one_name_are_named() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        fleet.connected(start);
        hear(&mut fleet, &heartbeat("twin"), start);
        hear(&mut fleet, &heartbeat("other"), start);
        assert!(!texts(&fleet, start).contains("have this name"));
        hear(&mut fleet, &Heartbeat { pid: 7, ..heartbeat("twin") }, start);
        assert!(texts(&fleet, start).contains("\ntwin: 2 workers have this name: commands"));
        assert_eq!(severity(&fleet, start, "twin: "), Severity::Warning);
        // One has ended, and the other took its name.
        hear(&mut fleet, &Heartbeat { state: WorkerState::Gone, ..heartbeat("twin") }, start);
        assert!(!texts(&fleet, start).contains("have this name"));
    }

    #[test]
    fn a_rest_is_named_only_where_there_is_one() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        fleet.lost(Down::Refused("ACCESS_REFUSED".to_owned()), start);
        let shown = texts(&fleet, start);
        assert!(shown.contains("\nworkers continue, and") && !shown.contains("the rest"), "{shown}");
        assert!(known(&fleet, start).is_empty());
    }

    #[test]
    fn a_gpu_shows_temperature_utilization_and_slowdowns() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&[], start);
        fleet.connected(start);
        let mut worker = heartbeat("g");
        worker.devices[0] = DeviceStatus {
            device: "cuda:0".to_owned(),
            temperature_celsius: Some(91),
            utilization_percent: Some(100),
            throttled: vec!["sw_power_cap".to_owned()],
            ..DeviceStatus::default()
        };
        hear(&mut fleet, &worker, start);
        let shown = texts(&fleet, start);
        assert!(shown.contains("  cuda:0 91°C 100%  ") && !shown.contains("slowed down"), "{shown}");
        worker.devices[0].throttled.push("hw_thermal_slowdown".to_owned());
        hear(&mut fleet, &worker, start);
        let shown = texts(&fleet, start);
        let slow = "\ng: cuda:0 is slowed down by heat or lack of power: hw_thermal_slowdown\n";
        assert!(shown.contains(slow), "{shown}");
        assert_eq!(severity(&fleet, start, "g: "), Severity::Warning);
    }

    #[test]
    fn foreign_text_is_escaped() {
        let start = Instant::now();
        let mut fleet = Fleet::new(&["\u{1b}[31mkey\n".to_owned()], start);
        fleet.connected(start);
        let evil = "\u{1b}]0;owned\u{7}\n\u{202e}".repeat(40);
        let mut stranger = heartbeat(&evil);
        stranger.version.clone_from(&evil);
        stranger.reason = Some(evil.clone());
        stranger.models[0].key.clone_from(&evil);
        stranger.models[0].slots = u32::MAX;
        stranger.models[0].in_hand = u64::MAX;
        stranger.models[0].counters.out_of_memory_alone = u64::MAX;
        stranger.models[0].revision = Some(evil.clone());
        stranger.models[0].processes =
            vec![ProcessStatus { state: evil.clone(), held: u64::MAX, ..ProcessStatus::default() }; 1000];
        stranger.models.push(stranger.models[0].clone());
        stranger.devices[0].device.clone_from(&evil);
        stranger.devices[0].throttled = vec![format!("{evil}slowdown")];
        stranger.devices[0].free = u64::MAX;
        hear(&mut fleet, &stranger, start);
        for line in lines(&fleet, start) {
            assert!(!line.text.chars().any(|c| c.is_control() || c == '\u{202e}'), "{:?}", line.text);
        }
    }
}
