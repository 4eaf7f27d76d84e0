//! Tests of what ends with a session.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use crate::action::Action;
use crate::event::{Event, PassResult, PublicationOutcome, SessionFacts};
use crate::handlers::test_worker::Worker;
use crate::ids::{JobKey, PassId};

/// Jobs in all stages: being published, running, waiting, and being read.
#[test]
fn the_jobs_of_a_session_that_is_over_are_released_in_the_order_of_their_delivery() {
    let mut worker = Worker::one_by_one();
    (1..=24).for_each(|key| worker.job(key, 1, worker.source(), JobHeaders::default()));
    let order = worker.pass();
    worker.ends(&order, PassResult::Done, vec![Some(10); order.items.len()]);
    worker.pass();
    for key in 25..=32 {
        worker.arrives(key, worker.source(), JobHeaders::default());
    }
    assert_eq!(released_at_its_end(&mut worker), (1..=32).map(JobKey).collect::<Vec<_>>());
}

#[test]
fn a_job_whose_ack_was_not_sent_is_released_too() {
    let mut worker = Worker::one_by_one();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.ends(&order, PassResult::Done, vec![Some(10)]);
    let outcome = PublicationOutcome::Confirmed { messages: 1 };
    worker.apply(Event::Published { job: JobKey(1), outcome });
    assert_eq!(released_at_its_end(&mut worker), [JobKey(1)]);
}

/// Their jobs are redelivered, and would wait for programs that run long passes for nobody. During the outage nobody waits for them, and a
/// program that does not react to the end of its pass is killed.
#[test]
fn the_passes_of_a_session_are_cancelled_when_the_next_one_opens() {
    let mut worker = Worker::new();
    let alone = JobHeaders { batch_hint: Some(1), ..JobHeaders::default() };
    (1..=2).for_each(|key| worker.job(key, 1, worker.source(), alone.clone()));
    let made: Vec<PassId> = worker.passes().iter().map(|order| order.pass).collect();
    assert_eq!(made.len(), 2);
    assert_eq!(cancelled(&worker.apply(Event::SessionClosed)), []);
    worker.now += Duration::from_secs(100);
    let facts = SessionFacts { declares: true, missing: Vec::new() };
    assert_eq!(cancelled(&worker.apply(Event::SessionOpened(facts))), made);
}

fn cancelled(actions: &[Action]) -> Vec<PassId> {
    let passes = actions.iter().filter_map(|action| match action {
        Action::CancelPass { pass, .. } => Some(*pass),
        _ => None,
    });
    passes.collect()
}

/// The jobs that are released when the session is over.
fn released_at_its_end(worker: &mut Worker) -> Vec<JobKey> {
    let actions = worker.apply(Event::SessionClosed);
    let released = actions.iter().filter_map(|action| match action {
        Action::Release { job } => Some(*job),
        _ => None,
    });
    released.collect()
}
