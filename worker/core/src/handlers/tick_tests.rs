//! What the core does every second: memory that is kept, memory that stays missing, and jobs that wait for the broker.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::test_worker::{MEMORY, MODEL, Worker, consumers};
use crate::action::Action;
use crate::device::Memory;
use crate::event::{Event, PassResult};

/// The seconds, of so many, at which kept memory goes back to the system.
fn trims(worker: &mut Worker, seconds: u64) -> Vec<u64> {
    let trims_at = |_: &u64| {
        worker.now += Duration::from_secs(1);
        let actions = worker.quiet_tick();
        actions.iter().any(|action| matches!(action, Action::TrimDevice))
    };
    (1..=seconds).filter(trims_at).collect()
}

#[test]
fn memory_kept_for_the_next_pass_goes_back_once_after_ten_quiet_seconds() {
    let mut worker = Worker::new();
    assert_eq!(trims(&mut worker, 25), [10]);

    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    assert_eq!(trims(&mut worker, 25), [0; 0], "a pass runs");
    worker.ends(&order, PassResult::Done, vec![Some(1)]);
    assert_eq!(trims(&mut worker, 25), [10]);
}

/// As while each of them has a reply queue of its own that is full: other callers' jobs keep the device busy meanwhile.
#[test]
fn jobs_whose_replies_are_not_taken_make_room_for_others() {
    for is_blocked in [false, true] {
        let mut worker = Worker::new();
        (1..=3).for_each(|key| worker.job(key, 8, worker.source(), JobHeaders::default()));
        for order in worker.passes() {
            let outputs = vec![Some(1); order.items.len()];
            worker.ends(&order, PassResult::Done, outputs);
        }
        if is_blocked {
            worker.apply(Event::BrokerBlocked { reason: "low on memory".to_owned() });
        }
        worker.now += Duration::from_secs(1);
        let started = consumers(&worker.quiet_tick());
        assert_eq!(started.is_empty(), is_blocked, "blocked: {is_blocked}");
    }
}

#[test]
fn memory_that_stays_missing_ends_in_a_restart_unless_the_worker_ends_anyway() {
    let missing = || Event::MemoryWithheld { model: MODEL, bytes: 1 << 20, lasted: Duration::from_secs(60) };
    let mut worker = Worker::new();
    worker.apply(missing());
    assert!(worker.is_draining() && worker.wants_restart());
    // Asked to stop meanwhile, it ends for good.
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(worker.is_draining() && !worker.wants_restart());

    let mut worker = Worker::new();
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    worker.apply(missing());
    assert!(worker.is_draining() && !worker.wants_restart());
}

#[test]
fn what_the_device_thread_holds_while_a_pass_of_a_program_ends_is_no_leak() {
    const RESIDENT: u64 = 80 << 20;
    const PASS: u64 = 20 << 20;
    let holding = |bytes| Memory { free: MEMORY.free - bytes, ..MEMORY };
    let mut worker = Worker::beside_a_program();
    let mut round = |of_program: u64, after: u64| {
        worker.job_of_program(of_program);
        let program = worker.pass();
        worker.job(of_program + 1, 1, worker.source(), JobHeaders::default());
        let pass = worker.pass();
        assert_eq!((program.model == MODEL, pass.model), (false, MODEL));
        worker.ends_with(&program, PassResult::Done, vec![Some(1)], holding(RESIDENT + PASS));
        let beside = worker.leaked();
        worker.ends_with(&pass, PassResult::Done, vec![Some(1)], holding(after));
        (beside, worker.leaked())
    };
    for job in (1..60).step_by(2) {
        assert_eq!(round(job, RESIDENT), (0, 0), "job {job}");
    }
    // What stays after a pass of the device thread is one.
    assert_eq!(round(61, RESIDENT + PASS), (0, PASS));
}
