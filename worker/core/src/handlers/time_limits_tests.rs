//! Tests of jobs that are held for too long because a pass does not end.

use super::*;
use crate::action::{Action, Publication};
use crate::event::Event;
use crate::handlers::test_worker::{Worker, requeued};
use vramq_schemas::JobHeaders;

/// The broker has shown a timeout of 100 s: of that, jobs are held for 80 s.
fn worker() -> Worker {
    let mut worker = Worker::one_by_one();
    worker.apply(Event::ConsumerTimeoutLearned { timeout: Duration::from_secs(100) });
    worker
}

/// The jobs' pass stays on the device. What the worker does about that, and the second at which it does.
fn stuck(worker: &mut Worker, jobs: &[u64], waits: bool) -> (u64, Vec<Action>) {
    jobs.iter().for_each(|job| worker.job(*job, 1, worker.source(), JobHeaders::default()));
    let on_device = OnDevice { pass: worker.pass().pass, since: worker.now, waits };
    for second in 1..=90 {
        worker.now += Duration::from_secs(1);
        let mut actions = worker.tick(on_device);
        actions.retain(|action| matches!(action, Action::Publish { .. }));
        if !actions.is_empty() {
            return (second, actions);
        }
    }
    panic!("nothing is done about it");
}

#[test]
fn a_job_that_is_alone_in_a_pass_that_does_not_end_is_dead_lettered_with_the_limit() {
    let (second, actions) = stuck(&mut worker(), &[1], false);
    let [Action::Publish { publication: Publication::DeadLetter { rejection, .. }, .. }] = &actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!((second, rejection.reason), (81, Reason::TimedOut));
    assert!(rejection.error.contains("held for 80 s"), "{}", rejection.error);
}

#[test]
fn jobs_that_share_a_pass_that_does_not_end_are_requeued_with_a_crash_each() {
    let (second, actions) = stuck(&mut worker(), &[1, 2], false);
    let crashes: Vec<_> = requeued(&actions).iter().map(|(_, headers, _)| headers.crashes).collect();
    assert_eq!((second, crashes), (81, vec![1, 1]));
}

#[test]
fn a_job_whose_pass_waits_for_another_process_is_requeued_without_blame() {
    let (second, actions) = stuck(&mut worker(), &[1], true);
    let crashes: Vec<_> = requeued(&actions).iter().map(|(_, headers, _)| headers.crashes).collect();
    assert_eq!((second, crashes), (81, vec![0]));
}
