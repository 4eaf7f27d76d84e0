//! What the worker says of itself: its state with the reason, and the figures of heartbeats and of the state file.

use std::time::Duration;

use vramq_schemas::JobHeaders;
use vramq_schemas::control::Command;
use vramq_schemas::status::WorkerState;

use super::test_worker::{MEMORY, MODEL, Worker};
use crate::action::Action;
use crate::device::{Memory, OutOfMemory, PassError};
use crate::event::{DecodedJob, Event, PassBytes, PassResult, QueueCount, QueueCounts, Reading};
use crate::ids::{JobKey, RequestId};
use crate::observation::Observation;

impl Worker {
    fn state(&self) -> (WorkerState, &'static str) {
        let status = self.status();
        (status.state, status.reason.unwrap_or(""))
    }

    fn on_command(&mut self, command: Command) {
        self.apply(Event::Command { request: RequestId(1), command });
    }

    /// Seconds in which the device has so many bytes free.
    fn seconds_with_free(&mut self, free: u64, seconds: u64) {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            let memory = Memory { free, ..MEMORY };
            let passes = PassBytes::default();
            self.apply(Event::Tick(Reading { memory, passes, lost: None, on_device: None, culprit: None }));
        }
    }
}

#[test]
fn a_worker_says_why_it_takes_no_jobs() {
    let mut worker = Worker::new();
    assert_eq!(worker.state(), (WorkerState::Consuming, ""));
    worker.seconds_with_free(0, 10);
    assert_eq!(worker.state(), (WorkerState::NoRoom, "not even one item fits the device"));
    worker.seconds_with_free(MEMORY.free, 30);
    let jobs = vec![QueueCount { waiting: 0, consumers: 1 }];
    let counts = QueueCounts { jobs, quarantined: 1, ..QueueCounts::default() };
    worker.apply(Event::QueuesCounted { model: MODEL, counts });
    assert_eq!(worker.state(), (WorkerState::Isolating, "quarantined jobs run alone"));
    worker.on_command(Command::Pause);
    assert_eq!(worker.state(), (WorkerState::Paused, "an operator paused the worker"));
    worker.apply(Event::BrokerBlocked { reason: "low on disk".to_owned() });
    let blocked = (WorkerState::Blocked, "the broker blocks publishers: a memory or disk alarm");
    assert_eq!((worker.state(), worker.status().is_blocked), (blocked, true));
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert_eq!(worker.state(), (WorkerState::Draining, "asked to stop"));
}

#[test]
fn a_worker_on_a_sick_device_says_so_and_one_that_restarts_says_that() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    for _ in 0..2 {
        let pass = worker.pass();
        let failed = PassResult::Failed(PassError::Failed("no kernel".to_owned()));
        worker.ends(&pass, failed, vec![None; pass.items.len()]);
    }
    assert_eq!(worker.state(), (WorkerState::Sick, "the health probe fails on the device"));
    assert!(worker.status().is_sick);
    let lasted = Duration::from_secs(60);
    worker.apply(Event::MemoryWithheld { model: MODEL, bytes: 1, lasted, has_ended: true });
    assert_eq!(worker.state(), (WorkerState::Draining, "draining for a restart"));
}

#[test]
fn a_heartbeat_has_the_models_slots_and_jobs() {
    let mut worker = Worker::one_by_one();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.arrives(2, worker.source(), JobHeaders::default());
    let [model] = worker.status().models[..] else { panic!("one model") };
    assert_eq!((model.slots, model.unacked, model.waiting, model.is_consuming), (64, 2, 1, true));
    worker.pass();
    assert_eq!(worker.status().models[0].waiting, 0, "its only item is in a pass");
}

#[test]
fn jobs_that_a_lost_session_left_unacknowledged_are_counted() {
    let mut worker = Worker::new();
    (1..=3).for_each(|key| worker.job(key, 1, worker.source(), JobHeaders::default()));
    worker.apply(Event::SessionFailed("broken".to_owned()));
    worker.apply(Event::SessionClosed);
    assert_eq!((worker.unsettled(), worker.unacked(), worker.is_draining()), (3, 0, false));
}

#[test]
fn a_size_that_ran_out_of_memory_alone_is_in_the_state_file() {
    let mut worker = Worker::one_by_one();
    worker.job(1, 8, worker.source(), JobHeaders::default());
    let pass = worker.pass();
    let oom = OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 };
    let said = PassError::from(oom).to_string();
    assert_eq!(said, "out of device memory: asked for 9 bytes, 1 of 10 are free, other processes hold 0");
    let ended = worker.ends(&pass, PassResult::Failed(oom.into()), vec![None; 8]);
    assert!(saves(&ended), "{ended:?}");
    let limits: Vec<_> =
        worker.limits().known().map(|(key, limit)| (key.longest_max, limit.failed)).collect();
    assert_eq!(limits, [(1, 8)]);
    // Passes as large as the limit raise it in time. The state file is written only then.
    let mut saved = Vec::new();
    for job in 2..=40 {
        worker.job(job, 4, worker.source(), JobHeaders::default());
        let pass = worker.pass();
        if saves(&worker.ends(&pass, PassResult::Done, vec![Some(1); pass.items.len()])) {
            saved.push(job);
        }
    }
    assert_eq!(saved, [33]);
}

/// Whether the state file is to be written.
fn saves(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::SaveLimits))
}

#[test]
fn how_long_items_waited_for_memory_is_counted() {
    let mut worker = Worker::new();
    worker.seconds_with_free(0, 1);
    worker.arrives(1, worker.source(), JobHeaders::default());
    let read = DecodedJob { items_total: 1, costs: vec![4] };
    worker.apply(Event::Decoded { job: JobKey(1), result: Ok(read) });
    let mut waits = Vec::new();
    for _ in 0..5 {
        let blocked = worker.apply(Event::Idle).into_iter().filter_map(|action| match action {
            Action::Observe(Observation::BlockedOnMemory { lasted }) => Some(lasted.as_secs()),
            _ => None,
        });
        waits.extend(blocked);
        worker.seconds_with_free(0, 1);
    }
    // Then the pass runs, and the device decides.
    assert_eq!(waits, [2]);
}

#[test]
fn a_device_that_the_worker_keeps_nearly_full_for_five_minutes_needs_a_restart() {
    let mut worker = Worker::new();
    worker.seconds_with_free(MEMORY.free / 20, 300);
    assert!(!worker.wants_restart());
    worker.seconds_with_free(MEMORY.free / 20, 1);
    assert!(worker.wants_restart() && worker.is_draining());
}
