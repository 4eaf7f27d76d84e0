//! A drain: what is finished, what is requeued, and when it ends.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::test_worker::{Worker, replied, requeued};
use crate::action::{Action, Route, SessionEnd};
use crate::event::{Event, PassResult, PublicationOutcome};
use crate::ids::{JobKey, PassId};

impl Worker {
    fn stop(&mut self) -> Vec<Action> {
        self.apply(Event::StopRequested { signal: "SIGTERM" })
    }

    /// Lets time pass, and has the timers that are due handled.
    fn wait(&mut self, wait: Duration) -> Vec<Action> {
        self.now += wait;
        self.apply(Event::Timer)
    }
}

fn end(actions: &[Action]) -> Option<&SessionEnd> {
    actions.iter().find_map(|action| match action {
        Action::EndSession(end) => Some(end),
        _ => None,
    })
}

fn cancelled(actions: &[Action]) -> Vec<PassId> {
    let passes = actions.iter().filter_map(|action| match action {
        Action::CancelPass { pass, .. } => Some(*pass),
        _ => None,
    });
    passes.collect()
}

fn requeued_jobs(actions: &[Action]) -> Vec<JobKey> {
    requeued(actions).into_iter().map(|(job, ..)| job).collect()
}

#[test]
fn a_worker_without_jobs_ends_when_the_broker_sends_no_more() {
    let mut worker = Worker::new();
    let stopping = worker.stop();
    assert_eq!(end(&stopping), None, "{stopping:?}");
    let ended = worker.consumers_end(&stopping);
    assert_eq!(end(&ended), Some(&SessionEnd::Drained));
    assert!(worker.is_draining() && !worker.wants_restart());
}

#[test]
fn a_second_signal_stops_at_once() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    assert_eq!(end(&worker.stop()), None);
    assert_eq!(end(&worker.stop()), Some(&SessionEnd::Killed));
}

#[test]
fn small_jobs_are_requeued_at_half_time_and_large_ones_at_once() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    // A pass takes 8 items at most.
    worker.job(2, 9, worker.source(), JobHeaders::default());
    let stopping = worker.stop();
    assert!(requeued(&stopping).is_empty(), "{stopping:?}");
    let ended = worker.consumers_end(&stopping);
    assert_eq!(requeued_jobs(&ended), [JobKey(2)]);
    let (_, headers, route) = requeued(&ended).remove(0);
    assert_eq!((headers.attempt, headers.items_done, route), (0, 0, Route::Now));

    assert!(requeued(&worker.wait(Duration::from_millis(4_999))).is_empty());
    assert_eq!(requeued_jobs(&worker.wait(Duration::from_millis(1))), [JobKey(1)]);
}

#[test]
fn passes_that_run_at_half_time_are_cancelled_and_their_jobs_requeued_with_what_is_finished() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let pass = worker.pass();
    let stopping = worker.stop();
    worker.consumers_end(&stopping);
    assert!(cancelled(&worker.wait(Duration::from_millis(4_999))).is_empty());
    let at_half_time = worker.wait(Duration::from_millis(1));
    assert_eq!(cancelled(&at_half_time), [pass.pass]);
    assert!(requeued(&at_half_time).is_empty(), "{at_half_time:?}");
    // The program has finished one of the two items, and ends.
    let ended = worker.ends(&pass, PassResult::Cancelled, vec![Some(10), None]);
    assert_eq!(replied(&ended), [(JobKey(1), 1, false)]);
    let outcome = PublicationOutcome::Confirmed { messages: 1 };
    let published = worker.apply(Event::Published { job: JobKey(1), outcome });
    let (job, headers, _) = requeued(&published).remove(0);
    assert_eq!((job, headers.items_done, headers.crashes, headers.attempt), (JobKey(1), 1, 0, 0));
}

#[test]
fn a_drain_ends_at_its_deadline_whatever_still_runs() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.pass();
    let stopping = worker.stop();
    worker.consumers_end(&stopping);
    assert_eq!(end(&worker.wait(Duration::from_millis(9_999))), None);
    assert_eq!(end(&worker.wait(Duration::from_millis(1))), Some(&SessionEnd::Killed));
}

#[test]
fn a_full_queue_is_offered_a_job_until_a_fifth_of_the_drain_is_left() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let until = worker.now + Duration::from_secs(8);
    let stopping = worker.stop();
    worker.consumers_end(&stopping);
    let mut actions = worker.wait(Duration::from_secs(5));
    let mut offered = 0;
    while let Some((_, _, Route::Now)) = requeued(&actions).pop() {
        assert!(worker.now <= until, "offered {offered} times, and once more too late");
        offered += 1;
        let outcome = PublicationOutcome::Refused { destination: "m".to_owned() };
        actions = worker.apply(Event::Published { job: JobKey(1), outcome });
        if requeued(&actions).is_empty() {
            actions = worker.until_next_timer();
        }
    }
    // The refused reply was published again while there was time.
    assert!(offered >= 3 && worker.now <= until, "{offered} times");
    assert_eq!(requeued(&actions).pop().map(|(.., route)| route), Some(Route::Later(1_000)));
}

/// An output that is not written and fits no reply makes its job a dead letter. After a drain the job would be redelivered.
#[test]
fn a_drain_leaves_outputs_the_time_that_they_have_without_it() {
    let mut worker = Worker::new();
    let received_at = worker.now;
    // Of the 750 s that the broker lets the worker hold jobs.
    let until = received_at + Duration::from_millis(712_500);
    assert_eq!(worker.write_until(received_at), until);
    worker.stop();
    assert_eq!(worker.write_until(received_at), until);
    worker.apply(Event::ConsumerTimeoutLearned { timeout: Duration::from_secs(100) });
    assert_eq!(worker.write_until(received_at), received_at + Duration::from_secs(95));
}

#[test]
fn jobs_are_requeued_before_the_consumer_timeout_that_the_broker_has_shown() {
    let mut worker = Worker::new();
    worker.apply(Event::ConsumerTimeoutLearned { timeout: Duration::from_secs(100) });
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.now += Duration::from_secs(80);
    assert!(requeued(&worker.quiet_tick()).is_empty());
    worker.now += Duration::from_secs(1);
    assert_eq!(requeued_jobs(&worker.quiet_tick()), [JobKey(1)]);

    // A longer timeout changes nothing: jobs are held for 600 s at most.
    let mut worker = Worker::new();
    worker.apply(Event::ConsumerTimeoutLearned { timeout: Duration::from_secs(1_800) });
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.now += Duration::from_secs(600);
    assert!(requeued(&worker.quiet_tick()).is_empty());
    worker.now += Duration::from_secs(1);
    assert_eq!(requeued_jobs(&worker.quiet_tick()), [JobKey(1)]);
}
