//! Tests of jobs and passes: a model that cannot be loaded, clocks, jobs that must not run here, and passes that others join.

use std::time::{Duration, Instant};

use vramq_schemas::{JobHeaders, Reason};

use super::test_worker::{MODEL, Worker, consumers, replied, requeued};
use crate::action::{Action, Publication, Route};
use crate::event::{Event, OnDevice, PassResult, PublicationOutcome};
use crate::ids::{ItemIndex, JobKey};
use crate::rejection::Rejection;

#[test]
fn a_model_that_cannot_be_loaded_is_not_consumed_and_costs_no_attempt() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let actions = worker.ends(&order, PassResult::Unavailable("no weights".to_owned()), vec![None]);
    assert!(requeued(&actions).is_empty(), "one of its own consumers could be sent them: {actions:?}");
    let stopped: Vec<_> = actions
        .iter()
        .filter_map(|action| match action {
            Action::StopConsumer { consumer, .. } => Some(*consumer),
            _ => None,
        })
        .collect();
    assert!(!stopped.is_empty() && consumers(&actions).is_empty(), "{actions:?}");
    assert!(consumers(&worker.apply(Event::Idle)).is_empty());
    let ended = stopped.into_iter().map(|consumer| Event::ConsumerEnded { consumer });
    let actions: Vec<_> = ended.flat_map(|event| worker.apply(event)).collect();
    let requeued = requeued(&actions);
    assert_eq!(requeued.iter().map(|(job, ..)| *job).collect::<Vec<_>>(), [JobKey(1), JobKey(2)]);
    assert!(requeued.iter().all(|(_, headers, _)| (headers.crashes, headers.attempt) == (0, 0)));
    let actions = worker.apply(Event::ModelAvailable { model: MODEL });
    assert!(!consumers(&actions).is_empty(), "{actions:?}");
}

/// A program ran the first job's item. No process could be started for the other job's item.
#[test]
fn a_job_that_a_skipped_pass_completed_is_answered() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    assert_eq!(order.items.len(), 2);
    let actions = worker.ends(&order, PassResult::Skipped, vec![Some(10), None]);
    assert_eq!(replied(&actions), [(order.items[0].0, 1, true)], "{actions:?}");
    assert_eq!(worker.pass().items, order.items[1..]);
}

#[test]
fn a_pass_is_not_given_up_for_the_time_for_which_the_process_stood_still() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let on_device = OnDevice { pass: order.pass, since: worker.now, waits: false };
    assert!(!worker.seconds(10, on_device));
    // The process stood still for an hour; the limit for a pass is ten minutes.
    worker.now += Duration::from_secs(3600);
    worker.tick(on_device);
    assert!(!worker.wants_restart());
    assert!(!worker.seconds(589, on_device));
    assert!(worker.seconds(2, on_device), "600 s of its own are too many");
}

#[test]
fn a_clock_that_is_set_forward_ends_no_job_that_has_time() {
    let mut worker = Worker::new();
    worker.expires_at_ms = Some(60_000);
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.job(2, 1, worker.source(), JobHeaders::default());
    worker.unix_ms += 365 * 24 * 3_600_000;
    let order = worker.pass();
    assert_eq!(order.items.len(), 2);
    // A minute by the clock that only goes forward.
    let mut worker = Worker::new();
    worker.expires_at_ms = Some(60_000);
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.now += Duration::from_secs(61);
    let actions = worker.apply(Event::Idle);
    let expired = |action: &Action| match action {
        Action::Publish { publication: Publication::DeadLetter { rejection, .. }, .. } => {
            rejection.reason == Reason::Expired
        }
        _ => false,
    };
    assert!(actions.iter().any(expired), "{actions:?}");
}

/// The job waits sixteen times for another worker, and is then dead-lettered with its state.
#[test]
fn a_job_that_demands_another_revision_waits_for_another_worker_and_not_for_ever() {
    let mut worker = Worker::new();
    let source = worker.source();
    let mut headers = JobHeaders::default();
    for key in 1..=17 {
        worker.arrives(key, source, headers.clone());
        let rejection = Rejection::new(Reason::WrongRevision, "the job demands revision `x`");
        let actions = worker.apply(Event::Decoded { job: JobKey(key), result: Err(rejection) });
        if let Some((job, next, route)) = requeued(&actions).pop() {
            assert_eq!((job, next.revision_waits, next.attempt), (JobKey(key), key as u32, 0));
            assert!(matches!(route, Route::Later(_)), "{route:?}");
            headers = next;
            continue;
        }
        assert_eq!(key, 17, "given up too early: {actions:?}");
        let letter = actions.iter().find_map(|action| match action {
            Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
                Some((headers.clone(), rejection.clone()))
            }
            _ => None,
        });
        let (reached, rejection) = letter.expect("a dead letter");
        assert_eq!(rejection.reason, Reason::WrongRevision);
        assert_eq!(reached.map(|reached| reached.revision_waits), Some(17));
    }
}

/// The broker counts deliveries per message. A job that waits or moves is published as a new message.
#[test]
fn a_job_that_was_lost_with_a_worker_keeps_that_crash_when_it_waits_unrun() {
    let mut worker = Worker::new();
    let source = worker.source();
    worker.is_silent("replies");
    let mut comes_again = |key: u64, reply_queue: Option<&str>| {
        // One such job may try the queue.
        let delivery = crate::event::Delivery {
            redelivered: true,
            delivery_count: Some(1),
            reply_queue: reply_queue.map(str::to_owned),
            ..Worker::delivery(key, source, JobHeaders::default())
        };
        worker.apply(Event::Delivered(Box::new(delivery)))
    };
    let waits = (1..=3).flat_map(|key| requeued(&comes_again(key, Some("replies")))).collect::<Vec<_>>();
    assert!(!waits.is_empty());
    for (_, headers, _) in waits {
        assert_eq!((headers.waits, headers.crashes), (1, 1));
    }
    comes_again(4, None);
    comes_again(5, None);
    let rejection = Rejection::new(Reason::WrongRevision, "the job demands revision `x`");
    let actions = worker.apply(Event::Decoded { job: JobKey(4), result: Err(rejection) });
    assert_eq!(requeued(&actions)[0].1.crashes, 1);
    let actions = worker.apply(Event::Moved { job: JobKey(5), key: "large".to_owned() });
    assert_eq!(requeued(&actions)[0].1.crashes, 1);
}

#[test]
fn each_crash_is_in_the_history_once() {
    let mut worker = Worker::new();
    let source = worker.source();
    let lost = crate::event::Delivery {
        redelivered: true,
        delivery_count: Some(2),
        ..Worker::delivery(1, source, JobHeaders::default())
    };
    let actions = worker.apply(Event::Delivered(Box::new(lost)));
    let (_, counted, route) = requeued(&actions).pop().expect("it is published again");
    assert_eq!((counted.crashes, route), (2, Route::Quarantine));
    let outcomes =
        |headers: &JobHeaders| headers.history.iter().map(|entry| entry.outcome.clone()).collect::<Vec<_>>();
    assert_eq!(outcomes(&counted), ["worker-lost"]);
    // It comes to another queue of jobs, and no worker was lost with it again.
    let (_, moved, route) =
        requeued(&worker.arrives(2, source, counted)).pop().expect("it is published again");
    assert_eq!((moved.crashes, route), (2, Route::Quarantine));
    assert_eq!(outcomes(&moved), ["worker-lost"]);
}

#[test]
fn a_rule_moves_a_job_unrun_and_says_so_in_its_headers() {
    let mut worker = Worker::new();
    let source = worker.source();
    worker.arrives(1, source, JobHeaders { items_done: 3, ..JobHeaders::default() });
    let actions = worker.apply(Event::Moved { job: JobKey(1), key: "large".to_owned() });
    let moved = requeued(&actions).pop().expect("it is published again");
    assert_eq!(moved.2, Route::OtherWorkers("large".to_owned()));
    assert_eq!((moved.1.moved, moved.1.items_done, moved.1.attempt), (true, 3, 0));
}

/// While the queue of those workers is full, the job waits in a delay queue of its own model. It was not moved, so the rule applies again.
#[test]
fn a_job_that_a_rule_moves_to_a_full_queue_comes_back_and_moves_later() {
    let mut worker = Worker::new();
    let source = worker.source();
    worker.arrives(1, source, JobHeaders { items_done: 3, ..JobHeaders::default() });
    worker.apply(Event::Moved { job: JobKey(1), key: "large".to_owned() });
    let full = || PublicationOutcome::Refused { destination: "vramq.retry with the key large".to_owned() };
    let mut tries = 1;
    let back = loop {
        let actions = worker.apply(Event::Published { job: JobKey(1), outcome: full() });
        if let Some(back) = requeued(&actions).pop() {
            break back;
        }
        worker.now += Duration::from_secs(2);
        let again = worker.apply(Event::Timer);
        let Some((_, _, Route::OtherWorkers(_))) = requeued(&again).pop() else { panic!("{again:?}") };
        tries += 1;
    };
    assert_eq!(tries, 4, "a slot is not held for long for a queue that stays full");
    assert_eq!(back.2, Route::Later(1_000));
    assert_eq!((back.1.moved, back.1.waits, back.1.items_done, back.1.attempt), (false, 1, 3, 0));
}

/// The device runs one pass at a time. The next pass is formed when a quarter of the running one is left.
#[test]
fn a_job_that_arrives_while_a_pass_runs_joins_the_next_one() {
    let (mut worker, start) = (Worker::on_device(), Instant::now());
    worker.now = start;
    let (source, second) = (worker.source(), worker.pass_takes);
    let done = || (PassResult::Done, vec![Some(10); 8]);
    worker.job(1, 32, source, JobHeaders::default());
    let both = worker.passes();
    assert_eq!(both.len(), 2, "nobody knows how long a pass takes");
    for order in both {
        worker.now += second;
        let (result, outputs) = done();
        worker.ends(&order, result, outputs);
    }
    let third = worker.passes();
    assert_eq!(third.len(), 1, "it runs for a second from now on");
    worker.job(2, 1, source, JobHeaders::default());
    worker.now += second / 2;
    assert!(worker.passes().is_empty());
    let due = start + second * 11 / 4;
    assert_eq!(worker.next_timer(), Some(due));
    worker.now = due;
    worker.apply(Event::Timer);
    let fourth = worker.passes();
    assert!(fourth.len() == 1 && fourth[0].items.contains(&(JobKey(2), ItemIndex(0))), "{fourth:?}");
    assert_eq!(worker.next_timer(), None);
    // A pass that ends early lets the next one start at once, without a timer.
    let (result, outputs) = done();
    worker.ends(&third[0], result, outputs);
    let (result, outputs) = done();
    worker.ends(&fourth[0], result, outputs);
    assert_eq!(worker.passes().len(), 1);
}

#[test]
fn memory_that_stays_missing_drains_the_worker_for_a_restart() {
    let mut worker = Worker::new();
    let withheld = || Event::MemoryWithheld {
        model: MODEL,
        bytes: 7,
        lasted: Duration::from_secs(900),
        has_ended: true,
    };
    let actions = worker.apply(withheld());
    assert!(worker.wants_restart() && worker.is_draining());
    assert!(actions.iter().any(|action| matches!(action, Action::StopConsumer { .. })), "{actions:?}");
    // The event comes every second. A stop request still ends the worker for good.
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(!worker.wants_restart());
    worker.apply(withheld());
    assert!(!worker.wants_restart());
}
