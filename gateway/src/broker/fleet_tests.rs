//! Tests of what heartbeats say: rates, queues, keys, and who is gone.

use vramq_amqp::Depth;
use vramq_schemas::status::{Counters, QueueStatus};

use super::super::outlook::Queues;
use super::*;

fn heartbeat(second: u64, answered: u64) -> Vec<u8> {
    heartbeat_with(second, answered, 0, 0)
}

/// With so many unacknowledged jobs, and so many that wait for a pass.
fn heartbeat_with(second: u64, answered: u64, in_hand: u64, waiting: u64) -> Vec<u8> {
    let counters = Counters { answered, ..Counters::default() };
    let model = ModelStatus {
        model: "m".to_owned(),
        key: "m".to_owned(),
        slots: 4,
        in_hand,
        waiting,
        consuming: true,
        counters,
        ..ModelStatus::default()
    };
    serde_json::to_vec(&Heartbeat {
        worker: "w".to_owned(),
        started_at_ms: 7_000,
        sent_at_ms: second * 1_000,
        interval_ms: 5_000,
        state: WorkerState::Consuming,
        models: vec![model],
        ..Heartbeat::default()
    })
    .unwrap()
}

#[test]
fn a_rate_is_measured_on_a_busy_worker_and_only_raised_by_an_idle_one() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    for (second, answered, in_hand, can, why) in [
        (10, 0, 0, None, "nothing was measured"),
        (20, 1, 0, None, "a single job says nothing of a wait"),
        (30, 2, 4, None, "busy at one end"),
        (40, 102, 4, Some(10.0), "busy at both"),
        (50, 102, 4, Some(8.0), "busy, and nothing answered"),
        (60, 102, 0, Some(10.0), "idle: it can still do as much"),
        (70, 102, 0, Some(10.0), "and still"),
        (80, 302, 1, Some(20.0), "it can do more than was known"),
        (90, 303, 1, Some(20.0), "an unacknowledged job, and no backlog: it can still do as much"),
    ] {
        // A backlog that was counted once says nothing of workers without jobs.
        fleet.hear(&heartbeat_with(second, answered, in_hand, 0), now, |_| in_hand == 0);
        assert_eq!(fleet.jobs_per_s("m", "m", now), can, "{second}: {why}");
    }
    assert_eq!(fleet.models(now)["m"].jobs_per_s, Some(20.0));
}

#[test]
fn the_longest_interval_of_live_workers_counts() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    assert_eq!(fleet.interval(now), None);
    fleet.hear(&heartbeat(1, 0), now, |_| false);
    assert_eq!(fleet.interval(now), Some(Duration::from_secs(5)));
    assert_eq!(fleet.interval(now + Duration::from_secs(60)), None);
}

#[test]
fn a_worker_is_busy_if_jobs_wait_in_it_or_for_it() {
    for (in_hand, waiting, backlog, is_busy) in [
        (4, 0, false, true),
        (2, 1, false, true),
        (2, 0, true, true),
        (2, 0, false, false),
        (0, 0, true, false),
    ] {
        let (mut fleet, now) = (Fleet::default(), Instant::now());
        for (second, answered) in [(10, 0), (20, 10)] {
            fleet.hear(&heartbeat_with(second, answered, in_hand, waiting), now, |_| backlog);
        }
        let can = fleet.jobs_per_s("m", "m", now);
        assert_eq!(
            can,
            is_busy.then_some(1.0),
            "{in_hand} unacknowledged, {waiting} wait, backlog: {backlog}"
        );
        assert_eq!(fleet.models(now)["m"].jobs_per_s, Some(1.0));
    }
}

#[test]
fn an_old_count_of_the_queue_makes_no_worker_busy() {
    let counted = Instant::now();
    let mut queues = Queues::default();
    queues.note("m", None, Depth::Messages { ready: 5, consumers: 1 }, counted);
    for (age_s, can) in [(0, Some(1.0)), (9, Some(1.0)), (10, None), (3_600, None)] {
        let (mut fleet, now) = (Fleet::default(), counted + Duration::from_secs(age_s));
        for (second, answered) in [(10, 0), (20, 10)] {
            let heartbeat = heartbeat_with(second, answered, 1, 0);
            fleet.hear(&heartbeat, now, |model| queues.has_backlog(model, now));
        }
        assert_eq!(fleet.jobs_per_s("m", "m", now), can, "counted {age_s} s ago");
    }
}

#[test]
fn busy_workers_are_estimated_together_with_others() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    let of = |worker: &str, heartbeat: Vec<u8>| {
        String::from_utf8(heartbeat).unwrap().replace("\"worker\":\"w\"", &format!("\"worker\":\"{worker}\""))
    };
    for (second, answered) in [(10, 0), (20, 10)] {
        fleet.hear(of("idle", heartbeat(second, answered)).as_bytes(), now, |_| false);
    }
    assert_eq!(fleet.jobs_per_s("m", "m", now), None);
    for (second, answered) in [(10, 0), (20, 40)] {
        fleet.hear(of("busy", heartbeat_with(second, answered, 4, 0)).as_bytes(), now, |_| false);
    }
    assert_eq!(fleet.jobs_per_s("m", "m", now), Some(5.0));
    assert_eq!(fleet.jobs_per_s("m", "m", now + Duration::from_secs(16)), None, "both are silent");
}

#[test]
fn further_queues_are_those_that_living_workers_name() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    fleet.hear(&heartbeat(10, 0), now, |_| false);
    assert!(fleet.further_queues("m", "m", now).is_empty());
    let mut with: Heartbeat = serde_json::from_slice(&heartbeat(20, 0)).unwrap();
    let queue = |name: &str| QueueStatus { queue: name.to_owned(), ..QueueStatus::default() };
    with.models[0].queues = vec![queue("vramq.jobs.m"), queue("b"), queue("a"), queue("b")];
    fleet.hear(&serde_json::to_vec(&with).unwrap(), now, |_| false);
    assert_eq!(fleet.further_queues("m", "m", now), ["a", "b"]);
    assert!(fleet.further_queues("other", "other", now).is_empty());
    assert!(fleet.further_queues("m", "m", now + Duration::from_secs(16)).is_empty());
    with.models[0].queues.extend((0..100).map(|at| queue(&at.to_string())));
    fleet.hear(&serde_json::to_vec(&with).unwrap(), now, |_| false);
    assert_eq!(fleet.further_queues("m", "m", now).len(), FURTHER_QUEUES_MAX);
}

#[test]
fn a_model_that_has_another_key_alone_is_reached_under_it() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    let mut hear = |worker: &str, key: &str| {
        let mut heartbeat: Heartbeat = serde_json::from_slice(&heartbeat(10, 0)).unwrap();
        heartbeat.worker = worker.to_owned();
        heartbeat.models[0].key = key.to_owned();
        fleet.hear(&serde_json::to_vec(&heartbeat).unwrap(), now, |_| false);
        let workers = fleet.models(now).get("m").map_or(0, |view| view.workers);
        (fleet.other_key("m", now), workers, fleet.takes("m", "m", now))
    };
    // Of a worker that names none, or none that a queue can have, nothing is known.
    assert_eq!(hear("odd", "~bulk.m"), (None, 0, false));
    assert_eq!(hear("b", "m-large"), (Some("m-large".to_owned()), 1, false));
    assert_eq!(hear("a", "m-huge"), (Some("m-huge".to_owned()), 1, false));
    // Who has it under its name gets its jobs; the others get what workers send on.
    assert_eq!(hear("c", "m"), (None, 1, true));
    assert!(fleet.takes("m", "m-large", now) && !fleet.takes("m", "other", now));
    assert_eq!(fleet.other_key("nobody", now), None);
    // A key is no model's name, unless a model has that name.
    assert_eq!(fleet.model_under("m-large", now).as_deref(), Some("m"));
    assert_eq!((fleet.model_under("m", now), fleet.model_under("nobody", now)), (None, None));
    assert_eq!(fleet.model_under("m-large", now + Duration::from_secs(16)), None);
}

#[test]
fn silent_and_ended_workers_have_no_models() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    fleet.hear(&heartbeat(10, 0), now, |_| false);
    assert_eq!(fleet.models(now)["m"].consuming, 1);
    assert!(fleet.serves("m", now) && !fleet.serves("other", now));
    assert!(fleet.models(now + Duration::from_secs(16)).is_empty());
    assert!(!fleet.serves("m", now + Duration::from_secs(16)));
    let workers = fleet.workers(now + Duration::from_secs(16));
    assert!(!workers[0].alive && workers[0].timeline.len() == 1);
    assert!(fleet.workers(now + Duration::from_secs(76)).is_empty());
}

#[test]
fn a_restart_starts_the_counting_again() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    fleet.hear(&heartbeat(10, 1_000), now, |_| false);
    let restarted = String::from_utf8(heartbeat(20, 3))
        .unwrap()
        .replace("\"started_at_ms\":7000", "\"started_at_ms\":15000");
    fleet.hear(restarted.as_bytes(), now, |_| false);
    assert_eq!(fleet.jobs_per_s("m", "m", now), None);
}

#[test]
fn made_up_workers_and_garbage_take_no_memory() {
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    for n in 0..WORKERS_MAX + 50 {
        let named = String::from_utf8(heartbeat(10, 0))
            .unwrap()
            .replace("\"worker\":\"w\"", &format!("\"worker\":\"w{n}\""));
        fleet.hear(named.as_bytes(), now, |_| false);
    }
    assert_eq!(fleet.workers.len(), WORKERS_MAX);
    fleet.hear(b"{", now, |_| false);
    fleet.hear(&vec![b' '; HEARTBEAT_BYTES_MAX + 1], now, |_| false);
    assert_eq!(fleet.workers.len(), WORKERS_MAX);
}

#[test]
fn figures_that_no_worker_can_have_are_added_up_without_an_overflow() {
    let counters = Counters {
        answered: u64::MAX,
        dead_lettered: u64::MAX,
        withdrawn: u64::MAX,
        out_of_memory_alone: u64::MAX,
        out_of_memory_shared: u64::MAX,
        ..Counters::default()
    };
    let model = ModelStatus {
        model: "m".to_owned(),
        key: "m".to_owned(),
        in_hand: u64::MAX,
        counters,
        ..ModelStatus::default()
    };
    let (mut fleet, now) = (Fleet::default(), Instant::now());
    for second in [10, 20] {
        let heartbeat = Heartbeat {
            worker: "w".to_owned(),
            sent_at_ms: second * 1_000,
            interval_ms: 5_000,
            state: WorkerState::Consuming,
            models: vec![model.clone(), model.clone()],
            ..Heartbeat::default()
        };
        fleet.hear(&serde_json::to_vec(&heartbeat).unwrap(), now, |_| true);
    }
    assert_eq!(fleet.models(now)["m"].unacknowledged, u64::MAX);
    assert_eq!(fleet.workers(now)[0].timeline[1].unacknowledged, u64::MAX);
}
