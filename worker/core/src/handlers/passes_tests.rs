//! Tests of jobs and passes of programs: a process that dies, runs out of memory or cannot be loaded; and jobs that must not run
//! here.

use std::time::{Duration, Instant};

use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST, WORKER_LOST};
use vramq_schemas::{Attempt, JobHeaders, Reason};

use super::test_worker::{MODEL, Worker, consumers, replied, requeued};
use crate::action::{Action, Publication, Route};
use crate::device::{OutOfMemory, PassError};
use crate::event::{Event, OnDevice, PassResult, PublicationOutcome, Source};
use crate::ids::JobKey;
use crate::rejection::Rejection;

fn crashed() -> PassResult {
    PassResult::Failed(PassError::Crashed("the process was killed by signal 9".to_owned()))
}

#[test]
fn a_process_that_dies_costs_the_jobs_in_it_a_crash_and_asks_for_no_probe() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let first = worker.pass();
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let second = worker.pass();
    let actions = worker.ends(&first, crashed(), vec![None]);
    let requeued = requeued(&actions);
    let [(job, headers, Route::Now)] = &requeued[..] else { panic!("{actions:?}") };
    assert_eq!((*job, headers.crashes, headers.attempt), (JobKey(1), 1, 0));
    assert_eq!(headers.history.last().unwrap().outcome, "process-lost");
    // The other processes go on, and take new passes.
    worker.job(3, 1, worker.source(), JobHeaders::default());
    let third = worker.pass();
    assert_eq!(third.items, [(JobKey(3), 0)]);
    let actions = worker.ends(&second, PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(2), 1, true)]);
}

#[test]
fn what_was_finished_before_a_process_died_is_answered() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    worker.job(2, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    assert_eq!(order.items.len(), 4);
    let of = |job: u64| order.items.iter().map(move |(key, _)| (*key == JobKey(job)).then_some(10));
    let actions = worker.ends(&order, crashed(), of(1).collect());
    assert_eq!(replied(&actions), [(JobKey(1), 2, true)]);
    let requeued = requeued(&actions);
    assert_eq!(
        requeued.iter().map(|(job, headers, _)| (*job, headers.crashes)).collect::<Vec<_>>(),
        [(JobKey(2), 1)]
    );
}

#[test]
fn an_out_of_memory_costs_the_jobs_that_lack_an_output() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    worker.job(2, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let oom = OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 };
    let outputs = order.items.iter().map(|(key, index)| (*key == JobKey(1) || *index == 0).then_some(10));
    let actions = worker.ends(&order, PassResult::Failed(PassError::OutOfMemory(oom)), outputs.collect());
    // What is finished of the second job goes out before it is requeued.
    assert_eq!(replied(&actions), [(JobKey(1), 2, true), (JobKey(2), 1, false)]);
}

fn invalid(item: Option<usize>) -> PassResult {
    PassResult::Failed(PassError::InvalidInput { item, text: "no picture".to_owned() })
}

/// The dead letters that are published: job, reason and text.
fn dead_letters(actions: &[Action]) -> Vec<(JobKey, Reason, &str)> {
    let letters = actions.iter().filter_map(|action| match action {
        Action::Publish { job, publication: Publication::DeadLetter { rejection, .. } } => {
            Some((*job, rejection.reason, rejection.error.as_str()))
        }
        _ => None,
    });
    letters.collect()
}

#[test]
fn an_invalid_item_ends_its_job_and_the_others_run_again_together() {
    let mut worker = Worker::new();
    for job in 1..=3 {
        worker.job(job, 2, worker.source(), JobHeaders::default());
    }
    let order = worker.pass();
    let at = order.items.iter().position(|item| *item == (JobKey(2), 1)).unwrap();
    // What was finished before is kept.
    let outputs = order.items.iter().map(|(job, _)| (*job == JobKey(1)).then_some(10));
    let actions = worker.ends(&order, invalid(Some(at)), outputs.collect());
    assert_eq!(replied(&actions), [(JobKey(1), 2, true)]);
    assert_eq!(dead_letters(&actions), [(JobKey(2), Reason::InvalidInput, "inputs[1]: no picture")]);
    worker.job(4, 1, worker.source(), JobHeaders::default());
    let next = worker.pass();
    assert_eq!(next.items.len(), 3, "the third job may have company: {next:?}");
    let actions = worker.ends(&next, PassResult::Done, vec![Some(10); 3]);
    let mut replied = replied(&actions);
    replied.sort_by_key(|(job, ..)| job.0);
    assert_eq!(replied, [(JobKey(3), 2, true), (JobKey(4), 1, true)]);
}

#[test]
fn an_invalid_item_that_nobody_names_is_found_by_running_each_job_alone() {
    // Named by nobody; one that is not in the pass; one that has its output and so was valid.
    for named in [None, Some(99), Some(0)] {
        let mut worker = Worker::new();
        for job in 1..=3 {
            worker.job(job, 1, worker.source(), JobHeaders::default());
        }
        let order = worker.pass();
        assert_eq!(order.items.len(), 3);
        let actions = worker.ends(&order, invalid(named), vec![Some(10), None, None]);
        assert_eq!(replied(&actions), [(JobKey(1), 1, true)], "{named:?}");
        assert_eq!(dead_letters(&actions), [], "{named:?}");
        let alone = worker.passes();
        let items: Vec<_> = alone.iter().map(|order| order.items.clone()).collect();
        assert_eq!(items, [[(JobKey(2), 0)], [(JobKey(3), 0)]], "{named:?}");
        let actions = worker.ends(&alone[0], invalid(None), vec![None]);
        assert_eq!(dead_letters(&actions), [(JobKey(2), Reason::InvalidInput, "no picture")], "{named:?}");
        let actions = worker.ends(&alone[1], PassResult::Done, vec![Some(10)]);
        assert_eq!(replied(&actions), [(JobKey(3), 1, true)], "{named:?}");
    }
}

fn not_written() -> PassResult {
    PassResult::Failed(PassError::NotWritten("write the items: no space".to_owned()))
}

#[test]
fn jobs_that_the_disk_has_no_room_for_together_run_alone_and_one_without_room_alone_waits() {
    let mut worker = Worker::new();
    for job in 1..=2 {
        worker.job(job, 1, worker.source(), JobHeaders::default());
    }
    let order = worker.pass();
    assert_eq!(order.items.len(), 2);
    let actions = worker.ends(&order, not_written(), vec![None; 2]);
    assert!(requeued(&actions).is_empty() && dead_letters(&actions).is_empty(), "{actions:?}");
    let alone = worker.passes();
    let items: Vec<_> = alone.iter().map(|order| order.items.clone()).collect();
    assert_eq!(items, [[(JobKey(1), 0)], [(JobKey(2), 0)]]);
    let actions = worker.ends(&alone[0], not_written(), vec![None]);
    let waits = requeued(&actions);
    let [(job, headers, Route::Later(_))] = &waits[..] else { panic!("{actions:?}") };
    assert_eq!((*job, headers.store_waits, headers.attempt, headers.crashes), (JobKey(1), 1, 0, 0));
    let actions = worker.ends(&alone[1], PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(2), 1, true)]);
}

#[test]
fn a_job_does_not_wait_for_room_on_the_disk_for_ever() {
    let mut headers = JobHeaders::default();
    for waits in 1..=64 {
        let mut worker = Worker::new();
        worker.job(1, 1, worker.source(), headers);
        let order = worker.pass();
        let actions = worker.ends(&order, not_written(), vec![None]);
        let (_, next, route) = requeued(&actions).pop().expect("it waits");
        assert!(matches!(route, Route::Later(_)) && next.store_waits == waits, "{route:?} {next:?}");
        headers = next;
    }
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), headers);
    let order = worker.pass();
    let actions = worker.ends(&order, not_written(), vec![None]);
    let error = "write the items: no space; the job waited for it 64 times";
    assert_eq!(dead_letters(&actions), [(JobKey(1), Reason::EngineFailed, error)]);
}

#[test]
fn an_engine_that_calls_an_item_invalid_needs_no_health_probe() {
    let mut worker = Worker::on_device();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, invalid(Some(0)), vec![None]);
    assert_eq!(dead_letters(&actions), [(JobKey(1), Reason::InvalidInput, "inputs[0]: no picture")]);
}

#[test]
fn a_job_that_kills_its_process_alone_again_and_again_is_dead_lettered_with_the_reason() {
    let mut worker = Worker::new();
    let headers = JobHeaders { crashes: 4, ..JobHeaders::default() };
    worker.job(1, 1, Source::Quarantine, headers);
    let order = worker.pass();
    let actions = worker.ends(&order, crashed(), vec![None]);
    let letter = actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { rejection, .. }, .. } => Some(rejection),
        _ => None,
    });
    let letter = letter.unwrap_or_else(|| panic!("{actions:?}"));
    assert_eq!(letter.reason, Reason::Crashed);
    assert!(letter.error.contains("killed by signal 9"), "{}", letter.error);
}

/// Headers of a job that was lost with these.
fn lost_with(what: &[&str]) -> JobHeaders {
    let attempt = |what: &&str| Attempt { outcome: (*what).to_owned(), ..Attempt::default() };
    let crashes = u32::try_from(what.len()).unwrap();
    JobHeaders { crashes, history: what.iter().map(attempt).collect(), ..JobHeaders::default() }
}

/// A crash of a process ends none of the worker's other jobs. So the worker runs them beside a job that kills its process.
#[test]
fn a_job_that_kills_its_process_runs_alone_in_it_and_beside_other_jobs() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), lost_with(&[PROCESS_LOST; 2]));
    worker.job(2, 1, worker.source(), JobHeaders::default());
    worker.job(3, 1, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    let of_killer = |order: &&crate::action::PassOrder| order.items.contains(&(JobKey(1), 0));
    let killing = passes.iter().find(of_killer).expect("it is not quarantined");
    assert_eq!(killing.items.len(), 1);
    assert_eq!(passes.iter().map(|order| order.items.len()).sum::<usize>(), 3, "the others run, too");
    let actions = worker.ends(killing, crashed(), vec![None]);
    let back = requeued(&actions);
    let [(JobKey(1), headers, Route::Now)] = &back[..] else { panic!("{actions:?}") };
    assert_eq!((headers.crashes, headers.history.len()), (3, 3));

    worker.job(4, 1, worker.source(), lost_with(&[PROCESS_LOST; 4]));
    let order = worker.pass();
    assert_eq!(order.items, [(JobKey(4), 0)]);
    let actions = worker.ends(&order, crashed(), vec![None]);
    let letters: Vec<_> = dead_letters(&actions).into_iter().map(|(job, reason, _)| (job, reason)).collect();
    assert_eq!(letters, [(JobKey(4), Reason::Crashed)]);
}

#[test]
fn a_job_that_was_lost_with_a_worker_too_is_quarantined() {
    for what in [[PROCESS_LOST, WORKER_LOST], [DEVICE_LOST, PROCESS_LOST]] {
        let mut worker = Worker::new();
        let actions = worker.arrives(1, worker.source(), lost_with(&what));
        assert!(
            matches!(&requeued(&actions)[..], [(JobKey(1), _, Route::Quarantine)]),
            "{what:?}: {actions:?}"
        );
    }
    // The history does not name all of them.
    let mut worker = Worker::new();
    let headers = JobHeaders { crashes: 3, ..lost_with(&[PROCESS_LOST; 2]) };
    let actions = worker.arrives(1, worker.source(), headers);
    assert!(matches!(&requeued(&actions)[..], [(JobKey(1), _, Route::Quarantine)]), "{actions:?}");
}

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

#[test]
fn a_pass_is_not_given_up_for_the_time_for_which_the_process_stood_still() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let on_device = OnDevice { pass: order.pass, since: worker.now, waits: false };
    assert!(!worker.seconds(10, on_device));
    // An hour, with a limit of ten minutes for a pass.
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

/// Sixteen times the job waits for another worker, and then it is dead-lettered with where it stands.
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

/// The broker's count of deliveries ends with the message. A job that waits, or moves, is published again as another one.
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
fn a_rule_moves_a_job_unrun_and_says_so_in_its_headers() {
    let mut worker = Worker::new();
    let source = worker.source();
    worker.arrives(1, source, JobHeaders { items_done: 3, ..JobHeaders::default() });
    let actions = worker.apply(Event::Moved { job: JobKey(1), key: "large".to_owned() });
    let moved = requeued(&actions).pop().expect("it is published again");
    assert_eq!(moved.2, Route::LargerDevice("large".to_owned()));
    assert_eq!((moved.1.moved, moved.1.items_done, moved.1.attempt), (true, 3, 0));
}

/// While the queue of those workers is full the job waits in a delay queue of its own model, and the rule applies again: it has not
/// been moved.
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
        let Some((_, _, Route::LargerDevice(_))) = requeued(&again).pop() else { panic!("{again:?}") };
        tries += 1;
    };
    assert_eq!(tries, 4, "a slot is not held for long for a queue that stays full");
    assert_eq!(back.2, Route::Later(1_000));
    assert_eq!((back.1.moved, back.1.waits, back.1.items_done, back.1.attempt), (false, 1, 3, 0));
}

/// The device has one pass after the other, and the next one is formed when a quarter of the one that runs is left.
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
    assert!(fourth.len() == 1 && fourth[0].items.contains(&(JobKey(2), 0)), "{fourth:?}");
    assert_eq!(worker.next_timer(), None);
    // A pass that ends before its time keeps the device waiting for no timer.
    let (result, outputs) = done();
    worker.ends(&third[0], result, outputs);
    let (result, outputs) = done();
    worker.ends(&fourth[0], result, outputs);
    assert_eq!(worker.passes().len(), 1);
}

#[test]
fn memory_that_stays_missing_drains_the_worker_for_a_restart() {
    let mut worker = Worker::new();
    let withheld = || Event::MemoryWithheld { model: MODEL, bytes: 7, lasted: Duration::from_secs(900) };
    let actions = worker.apply(withheld());
    assert!(worker.wants_restart() && worker.is_draining());
    assert!(actions.iter().any(|action| matches!(action, Action::StopConsumer { .. })), "{actions:?}");
    // It comes every second, and a person who asks for an end gets one.
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(!worker.wants_restart());
    worker.apply(withheld());
    assert!(!worker.wants_restart());
}
