//! Tests of large jobs: they move to their own queue unrun, as long as it has room.

use vramq_schemas::JobHeaders;

use super::test_worker::{BULK_JOBS_MAX, MODEL, Worker, requeued};
use crate::action::Route;
use crate::device::UNKNOWN_COST;
use crate::event::{DecodedJob, Delivery, Event, PublicationOutcome, QueueCount, QueueCounts};
use crate::ids::JobKey;

/// More than four passes of eight items.
const LARGE: u32 = 33;

/// Whether a large job that arrives moves to the queue of large jobs.
fn moves(worker: &mut Worker, key: u64) -> bool {
    let source = worker.source();
    worker.arrives(key, source, JobHeaders::default());
    let actions = worker.decoded(key, LARGE);
    let moves = matches!(&requeued(&actions)[..], [(_, _, Route::Bulk)]);
    if moves {
        let outcome = PublicationOutcome::Confirmed { messages: 1 };
        worker.apply(Event::Published { job: JobKey(key), outcome });
    }
    moves
}

fn counted(worker: &mut Worker, bulk: u32) {
    let count = |waiting| QueueCount { waiting, consumers: 1 };
    let counts = QueueCounts { jobs: vec![count(0)], bulk: count(bulk), quarantined: 0 };
    worker.apply(Event::QueuesCounted { model: MODEL, counts });
}

#[test]
fn large_jobs_run_like_others_while_their_queue_is_full() {
    let mut worker = Worker::new();
    counted(&mut worker, BULK_JOBS_MAX);
    assert!(!moves(&mut worker, 1));
    assert_eq!(worker.pass().items[0].0, JobKey(1));
    // One job less is not enough to open the queue again.
    counted(&mut worker, BULK_JOBS_MAX - 1);
    worker.arrives(2, worker.source(), JobHeaders::default());
    assert!(requeued(&worker.decoded(2, LARGE)).is_empty());
    counted(&mut worker, 0);
    assert!(moves(&mut worker, 3));
}

/// Such an item has a pass to itself, so a job of a few of them is not large.
#[test]
fn an_item_of_unknown_cost_counts_as_one_pass() {
    let mut worker = Worker::new();
    let mut read = |key, items: usize| {
        worker.arrives(key, worker.source(), JobHeaders::default());
        let decoded = DecodedJob { items_total: items as u32, costs: vec![UNKNOWN_COST; items] };
        requeued(&worker.apply(Event::Decoded { job: JobKey(key), result: Ok(decoded) })).len()
    };
    assert_eq!((read(1, 4), read(2, 5)), (0, 1));
}

/// The job moves as a new message, whose count of deliveries starts at zero.
#[test]
fn a_large_job_that_was_lost_with_a_worker_keeps_that_crash() {
    let mut worker = Worker::new();
    let first = Worker::delivery(1, worker.source(), JobHeaders::default());
    let lost = Delivery { redelivered: true, delivery_count: Some(1), ..first };
    worker.apply(Event::Delivered(Box::new(lost)));
    let actions = worker.decoded(1, LARGE);
    let moved = requeued(&actions);
    let [(JobKey(1), headers, Route::Bulk)] = &moved[..] else { panic!("{actions:?}") };
    assert_eq!(headers.crashes, 1);
}

#[test]
fn a_worker_counts_what_it_moved_since_the_queue_was_counted() {
    let mut worker = Worker::new();
    counted(&mut worker, 0);
    for key in 0..u64::from(BULK_JOBS_MAX) {
        assert!(moves(&mut worker, key), "{key}");
    }
    assert!(!moves(&mut worker, 99));
}
