//! Tests of jobs that have several passes in flight, of which more than one fails.

use vramq_schemas::JobHeaders;
use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST};

use crate::action::{Action, PassOrder, Route};
use crate::device::{Loss, OutOfMemory, PassError};
use crate::event::{Event, PassBytes, PassResult, Reading};
use crate::handlers::test_worker::{MEMORY, Worker, requeued};
use crate::ids::JobKey;

/// A job of a program in two passes. One ran out of memory, so the job's outcome is decided; it takes effect after the other pass.
fn decided() -> (Worker, PassOrder) {
    let mut worker = Worker::new();
    worker.job(1, 16, worker.source(), JobHeaders::default());
    let mut passes = worker.passes();
    assert_eq!(passes.iter().map(|pass| pass.items.len()).collect::<Vec<_>>(), [8, 8]);
    let other = passes.pop().expect("two passes");
    let oom = OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 };
    let actions = worker.ends(&passes[0], PassResult::Failed(PassError::from(oom)), vec![None; 8]);
    assert!(requeued(&actions).is_empty(), "the other pass may finish items: {actions:?}");
    (worker, other)
}

/// The crashes and the history in the headers of the next attempt.
fn next_attempt(actions: &[Action]) -> (u32, Vec<String>) {
    let (job, headers, route) = requeued(actions).pop().expect("it is requeued");
    assert_eq!((job, route, headers.attempt), (JobKey(1), Route::Now, 1));
    (headers.crashes, headers.history.into_iter().map(|attempt| attempt.outcome).collect())
}

#[test]
fn a_process_that_dies_after_its_jobs_outcome_was_decided_still_counts_as_a_crash() {
    let (mut worker, other) = decided();
    let crashed = PassResult::Failed(PassError::Crashed("killed by signal 9".to_owned()));
    let actions = worker.ends(&other, crashed, vec![None; 8]);
    let history = vec!["out-of-memory".to_owned(), PROCESS_LOST.to_owned()];
    assert_eq!(next_attempt(&actions), (1, history));
}

#[test]
fn a_device_lost_after_its_jobs_outcome_was_decided_still_counts_as_a_crash() {
    let (mut worker, other) = decided();
    let loss = Loss { error: "illegal address".to_owned(), is_late: false };
    let reading = Reading {
        memory: MEMORY,
        passes: PassBytes::default(),
        lost: Some(loss),
        on_device: None,
        culprit: Some(other.pass),
    };
    let actions = worker.apply(Event::Tick(reading));
    let history = vec!["out-of-memory".to_owned(), DEVICE_LOST.to_owned()];
    assert_eq!(next_attempt(&actions), (1, history));
}
