//! What the core does every second: memory that is kept, and memory that stays missing.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::test_worker::{MODEL, Worker};
use crate::action::Action;
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
