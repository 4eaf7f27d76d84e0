//! Tests of jobs from several queues: which queue's share their passes count to, also when the jobs are redelivered.

use vramq_schemas::JobHeaders;

use super::test_worker::{Worker, requeued};
use crate::action::Route;
use crate::device::{OutOfMemory, PassError};
use crate::event::PassResult;
use crate::ids::QueueIndex;

const FURTHER: &str = "team-a.jobs";

/// A worker of a model with a queue of weight 3 and a further one of weight 1. A pass has room for eight items.
fn worker() -> Worker {
    Worker::with_a_further_queue(FURTHER)
}

fn of_further() -> JobHeaders {
    JobHeaders { queue: Some(FURTHER.to_owned()), ..JobHeaders::default() }
}

/// Items of jobs from the further queue in the next pass; their keys are 100 and more.
fn of_further_in_a_pass(worker: &mut Worker) -> usize {
    worker.pass().items.iter().filter(|(job, _)| job.0 >= 100).count()
}

#[test]
fn a_pass_is_shared_by_the_weights_of_the_queues() {
    let mut worker = worker();
    let (own, further) = (worker.source(), worker.source_of(QueueIndex(1)));
    (1..20).for_each(|key| worker.job(key, 1, own, JobHeaders::default()));
    (100..120).for_each(|key| worker.job(key, 1, further, JobHeaders::default()));
    assert_eq!(of_further_in_a_pass(&mut worker), 2);
}

#[test]
fn a_job_that_comes_again_takes_the_share_of_the_queue_that_it_first_came_from() {
    let mut worker = worker();
    let further = worker.source_of(QueueIndex(1));
    worker.job(100, 2, further, JobHeaders::default());
    let order = worker.pass();
    let oom = OutOfMemory { asked: 10, free: 0, total: 10, foreign: 0 };
    let actions = worker.ends(&order, PassResult::Failed(PassError::from(oom)), vec![None; 2]);
    let [(_, headers, route)] = &requeued(&actions)[..] else { panic!("{actions:?}") };
    assert_eq!((headers.queue.as_deref(), route), (Some(FURTHER), &Route::Now));
    // Workers republish such a job to the model's own queue, where another worker takes it.
    let mut worker = self::worker();
    let own = worker.source();
    (1..20).for_each(|key| worker.job(key, 1, own, JobHeaders::default()));
    (101..120).for_each(|key| worker.job(key, 1, own, of_further()));
    assert_eq!(of_further_in_a_pass(&mut worker), 2);
}

#[test]
fn a_job_of_a_queue_that_this_worker_does_not_know_takes_the_share_of_the_models_own() {
    let mut worker = Worker::new();
    let own = worker.source();
    (1..20).for_each(|key| worker.job(key, 1, own, JobHeaders::default()));
    (100..120).for_each(|key| worker.job(key, 1, own, of_further()));
    assert_eq!(of_further_in_a_pass(&mut worker), 0, "in the order in which they came");
}
