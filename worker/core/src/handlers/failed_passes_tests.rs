//! Tests of passes that failed: a process that dies or runs out of memory, an invalid item, a full disk.

use std::time::Duration;

use vramq_schemas::headers::{DEVICE_LOST, PROCESS_LOST, WORKER_LOST};
use vramq_schemas::{Attempt, JobHeaders, Reason};

use crate::action::{Action, PassOrder, Publication, Route};
use crate::device::{Memory, OutOfMemory, PassError, UNKNOWN_COST};
use crate::event::{DecodedJob, Event, OnDevice, PassBytes, PassResult, PublicationOutcome, Source};
use crate::handlers::test_worker::{MEMORY, Worker, replied, requeued};
use crate::ids::{ItemIndex, JobKey};

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
    // The other processes continue, and take new passes.
    worker.job(3, 1, worker.source(), JobHeaders::default());
    let third = worker.pass();
    assert_eq!(third.items, [(JobKey(3), ItemIndex(0))]);
    let actions = worker.ends(&second, PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(2), 1, true)]);
}

#[test]
fn items_finished_before_a_process_died_are_answered() {
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
    let outputs = order.items.iter().map(|(key, index)| (*key == JobKey(1) || index.0 == 0).then_some(10));
    let actions = worker.ends(&order, PassResult::Failed(PassError::from(oom)), outputs.collect());
    // The finished item of the second job is published before the job is requeued.
    assert_eq!(replied(&actions), [(JobKey(1), 2, true), (JobKey(2), 1, false)]);
}

/// A program may print what a caller gave it: that may only lower the hint of the caller's own job.
#[test]
fn an_out_of_memory_that_only_a_text_tells_of_lowers_no_limit() {
    for (by_text, size_of_next) in [(false, 4), (true, 8)] {
        let mut worker = Worker::new();
        worker.job(1, 8, worker.source(), JobHeaders::default());
        let (order, oom) = (worker.pass(), OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 });
        let error = PassError::OutOfMemory { oom, said: "CUDA error: out of memory".to_owned(), by_text };
        let actions = worker.ends(&order, PassResult::Failed(error), vec![None; 8]);
        let requeued = requeued(&actions);
        let [(JobKey(1), headers, Route::Now)] = &requeued[..] else { panic!("{actions:?}") };
        assert_eq!((headers.batch_hint, headers.attempt), (Some(4), 1));
        worker.job(2, 8, worker.source(), JobHeaders::default());
        assert_eq!(sizes(&worker.passes()).first(), Some(&size_of_next));
    }
}

/// As that of an image without a known header.
#[test]
fn a_cost_that_is_unknown_is_in_no_dead_letter() {
    let mut worker = Worker::new();
    worker.arrives(1, worker.source(), JobHeaders::default());
    let decoded = DecodedJob { items_total: 1, costs: vec![UNKNOWN_COST] };
    worker.apply(Event::Decoded { job: JobKey(1), result: Ok(decoded) });
    let (order, oom) = (worker.pass(), OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 });
    let actions = worker.ends(&order, PassResult::Failed(PassError::from(oom)), vec![None]);
    let letter = actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
            Some((headers.as_deref()?.history.last()?.longest, rejection))
        }
        _ => None,
    });
    let (longest, rejection) = letter.expect("a dead letter with a history");
    assert_eq!((longest, rejection.requirement.map(|needs| needs.cost)), (0, Some(0)));
    assert!(rejection.error.contains("item 0 asked for"), "{}", rejection.error);
}

/// What the worker holds beyond its models is not the job's fault.
#[test]
fn an_item_for_which_the_workers_own_leak_leaves_too_little_waits() {
    for (leaked, waits) in [(7, true), (6, false)] {
        let mut worker = Worker::new();
        let alone = JobHeaders { exclusive: true, ..JobHeaders::default() };
        worker.job(1, 1, worker.source(), alone);
        let order = worker.pass();
        let oom = OutOfMemory { asked: 8, free: 1, total: 10, foreign: 0 };
        let memory = Memory { free: MEMORY.free - leaked, ..MEMORY };
        let actions = worker.ends_with(&order, PassResult::Failed(PassError::from(oom)), vec![None], memory);
        let is_later = requeued(&actions).iter().any(|(.., route)| matches!(route, Route::Later(_)));
        assert_eq!(is_later, waits, "{leaked} bytes: {actions:?}");
    }
}

/// A pass ran out of memory while another process held most of it. What the allocator reports as free is wrong.
fn ran_out_beside_others() -> PassResult {
    PassResult::Failed(PassError::from(OutOfMemory { asked: 8, free: 0, total: 10, foreign: 7 }))
}

fn sizes(passes: &[PassOrder]) -> Vec<usize> {
    passes.iter().map(|order| order.items.len()).collect()
}

#[test]
fn after_an_out_of_memory_passes_stay_within_what_is_free_until_the_next_second() {
    let mut worker = Worker::on_device();
    worker.job(1, 8, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, ran_out_beside_others(), vec![None; 8]);
    assert!(actions.iter().any(|action| matches!(action, Action::ReadMemory)), "{actions:?}");
    let memory = Memory { free: 3, ..MEMORY };
    worker.apply(Event::MemoryRead { memory, passes: PassBytes::default() });
    worker.job(2, 8, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    assert_eq!(sizes(&passes), [3]);
    worker.ends(&passes[0], PassResult::Done, vec![Some(10); 3]);
    worker.quiet_tick();
    assert_eq!(sizes(&worker.passes()), [5]);
}

#[test]
fn memory_of_passes_in_flight_counts_as_free_after_an_out_of_memory_and_the_budget_never_grows() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let beside = worker.pass();
    worker.job(2, 8, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.ends(&order, ran_out_beside_others(), vec![None; 8]);
    let memory = Memory { free: 3, ..MEMORY };
    worker.apply(Event::MemoryRead { memory, passes: PassBytes { own: 1, programs: 1 } });
    worker.job(3, 8, worker.source(), JobHeaders::default());
    assert_eq!(sizes(&worker.passes()), [3], "the pass beside holds two of five bytes");
    worker.apply(Event::MemoryRead { memory: MEMORY, passes: PassBytes::default() });
    assert!(worker.passes().is_empty());
    worker.ends(&beside, PassResult::Done, vec![Some(10); 2]);
    assert_eq!(sizes(&worker.passes()), [2]);
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

/// A pass of one item hangs. A job that has had replies is not known to be the cause.
#[test]
fn a_job_in_a_pass_that_hangs_is_dead_lettered_only_if_nothing_of_it_was_finished() {
    for items in [1, 2] {
        let mut worker = Worker::one_by_one();
        worker.apply(Event::ConsumerTimeoutLearned { timeout: Duration::from_secs(100) });
        let hint = JobHeaders { batch_hint: Some(1), ..JobHeaders::default() };
        worker.job(1, items, worker.source(), hint);
        let mut order = worker.pass();
        if items == 2 {
            worker.now += Duration::from_secs(2);
            worker.ends(&order, PassResult::Done, vec![Some(10)]);
            let outcome = PublicationOutcome::Confirmed { messages: 1 };
            worker.apply(Event::Published { job: JobKey(1), outcome });
            order = worker.pass();
        }
        let on_device = OnDevice { pass: order.pass, since: worker.now, waits: false };
        let mut letters = 0;
        for _ in 0..90 {
            worker.now += Duration::from_secs(1);
            letters += dead_letters(&worker.tick(on_device)).len();
        }
        assert_eq!(letters, usize::from(items == 1), "{items} items");
        assert!(!worker.goes_on(1));
    }
}

#[test]
fn a_failure_of_one_item_names_it_by_its_place_in_the_job() {
    let mut worker = Worker::new();
    worker.job(1, 8, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let at = order.items.iter().position(|item| *item == (JobKey(1), ItemIndex(5))).unwrap();
    let failed = PassError::FailedItem { item: at, text: "the model failed: NaN".to_owned() };
    let actions = worker.ends(&order, PassResult::Failed(failed), vec![None; 8]);
    let error = "inputs[5]: the model failed: NaN";
    assert_eq!(dead_letters(&actions), [(JobKey(1), Reason::EngineFailed, error)]);
}

#[test]
fn an_invalid_item_ends_its_job_and_the_others_run_again_together() {
    let mut worker = Worker::new();
    for job in 1..=3 {
        worker.job(job, 2, worker.source(), JobHeaders::default());
    }
    let order = worker.pass();
    let at = order.items.iter().position(|item| *item == (JobKey(2), ItemIndex(1))).unwrap();
    // Outputs from before the failure are kept.
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
    // No item is named; one that is not in the pass; one that has its output and so was valid.
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
        assert_eq!(items, [[(JobKey(2), ItemIndex(0))], [(JobKey(3), ItemIndex(0))]], "{named:?}");
        let actions = worker.ends(&alone[0], invalid(None), vec![None]);
        assert_eq!(dead_letters(&actions), [(JobKey(2), Reason::InvalidInput, "no picture")], "{named:?}");
        let actions = worker.ends(&alone[1], PassResult::Done, vec![Some(10)]);
        assert_eq!(replied(&actions), [(JobKey(3), 1, true)], "{named:?}");
    }
}

fn disk_full() -> PassResult {
    PassResult::Failed(PassError::DiskFull("write the items: no space".to_owned()))
}

#[test]
fn jobs_that_the_disk_has_no_room_for_together_run_alone_and_one_without_room_alone_waits() {
    let mut worker = Worker::new();
    for job in 1..=2 {
        worker.job(job, 1, worker.source(), JobHeaders::default());
    }
    let order = worker.pass();
    assert_eq!(order.items.len(), 2);
    let actions = worker.ends(&order, disk_full(), vec![None; 2]);
    assert!(requeued(&actions).is_empty() && dead_letters(&actions).is_empty(), "{actions:?}");
    let alone = worker.passes();
    let items: Vec<_> = alone.iter().map(|order| order.items.clone()).collect();
    assert_eq!(items, [[(JobKey(1), ItemIndex(0))], [(JobKey(2), ItemIndex(0))]]);
    let actions = worker.ends(&alone[0], disk_full(), vec![None]);
    let waits = requeued(&actions);
    let [(job, headers, Route::Later(_))] = &waits[..] else { panic!("{actions:?}") };
    assert_eq!((*job, headers.store_waits, headers.attempt, headers.crashes), (JobKey(1), 1, 0, 0));
    let actions = worker.ends(&alone[1], PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(2), 1, true)]);
}

#[test]
fn items_of_one_job_that_the_disk_has_no_room_for_together_run_in_smaller_passes() {
    let mut worker = Worker::new();
    worker.job(1, 8, worker.source(), JobHeaders::default());
    let whole = worker.passes();
    assert_eq!(sizes(&whole), [8]);
    let actions = worker.ends(&whole[0], disk_full(), vec![None; 8]);
    assert!(requeued(&actions).is_empty() && dead_letters(&actions).is_empty(), "{actions:?}");
    let halves = worker.passes();
    assert_eq!(sizes(&halves), [4, 4]);
    worker.ends(&halves[1], PassResult::Done, vec![Some(10); 4]);
    // One item was finished before the disk was full.
    let actions = worker.ends(&halves[0], disk_full(), vec![Some(10), None, None, None]);
    assert!(requeued(&actions).is_empty() && dead_letters(&actions).is_empty(), "{actions:?}");
    let rest = worker.passes();
    assert_eq!(sizes(&rest), [2, 1]);
    worker.ends(&rest[0], PassResult::Done, vec![Some(10); 2]);
    let actions = worker.ends(&rest[1], PassResult::Done, vec![Some(10)]);
    assert_eq!(replied(&actions), [(JobKey(1), 8, true)]);
}

#[test]
fn a_job_does_not_wait_for_room_on_the_disk_for_ever() {
    let mut headers = JobHeaders::default();
    for waits in 1..=64 {
        let mut worker = Worker::new();
        worker.job(1, 1, worker.source(), headers);
        let order = worker.pass();
        let actions = worker.ends(&order, disk_full(), vec![None]);
        let (_, next, route) = requeued(&actions).pop().expect("it waits");
        assert!(matches!(route, Route::Later(_)) && next.store_waits == waits, "{route:?} {next:?}");
        headers = next;
    }
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), headers);
    let order = worker.pass();
    let actions = worker.ends(&order, disk_full(), vec![None]);
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
    // If the dead letter is refused, the message that follows does not run again.
    let mut actions = Vec::new();
    while requeued(&actions).is_empty() {
        let outcome = PublicationOutcome::Refused { destination: "vramq.dead".to_owned() };
        actions = worker.apply(Event::Published { job: JobKey(1), outcome });
        while !actions.iter().any(|action| matches!(action, Action::Publish { .. })) {
            actions = worker.until_next_timer();
        }
    }
    let [(JobKey(1), headers, Route::Later(_))] = &requeued(&actions)[..] else { panic!("{actions:?}") };
    assert_eq!(headers.crashes, 5);
}

/// Headers of a job with these crashes in its history.
fn lost_with(what: &[&str]) -> JobHeaders {
    let attempt = |what: &&str| Attempt { outcome: (*what).to_owned(), ..Attempt::default() };
    let crashes = u32::try_from(what.len()).unwrap();
    JobHeaders { crashes, history: what.iter().map(attempt).collect(), ..JobHeaders::default() }
}

/// A process crash ends none of the worker's other jobs, so they may run at the same time as a job that kills its process.
#[test]
fn a_job_that_kills_its_process_runs_alone_in_it_and_beside_other_jobs() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), lost_with(&[PROCESS_LOST; 2]));
    worker.job(2, 1, worker.source(), JobHeaders::default());
    worker.job(3, 1, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    let of_killer = |order: &&PassOrder| order.items.contains(&(JobKey(1), ItemIndex(0)));
    let killing = passes.iter().find(of_killer).expect("it is not quarantined");
    assert_eq!(killing.items.len(), 1);
    assert_eq!(passes.iter().map(|order| order.items.len()).sum::<usize>(), 3, "the others run, too");
    let actions = worker.ends(killing, crashed(), vec![None]);
    let back = requeued(&actions);
    let [(JobKey(1), headers, Route::Now)] = &back[..] else { panic!("{actions:?}") };
    assert_eq!((headers.crashes, headers.history.len()), (3, 3));
}

/// With nothing else on the device, other passes cannot be the reason for this crash.
#[test]
fn the_last_try_of_a_job_that_kills_its_process_has_the_device_to_itself() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let beside = worker.pass();
    worker.job(2, 1, worker.source(), lost_with(&[PROCESS_LOST; 4]));
    assert!(worker.passes().is_empty(), "another pass runs");
    worker.ends(&beside, PassResult::Done, vec![Some(10)]);
    let order = worker.pass();
    assert!(order.exclusive && order.items == [(JobKey(2), ItemIndex(0))], "{order:?}");
    worker.job(3, 1, worker.source(), JobHeaders::default());
    assert!(worker.passes().is_empty(), "it would run beside the last try");
    let actions = worker.ends(&order, crashed(), vec![None]);
    let letters: Vec<_> = dead_letters(&actions).into_iter().map(|(job, reason, _)| (job, reason)).collect();
    assert_eq!(letters, [(JobKey(2), Reason::Crashed)]);
    let order = worker.pass();
    assert!(!order.exclusive && order.items == [(JobKey(3), ItemIndex(0))], "{order:?}");
}

/// It ran out of memory once, so each pass that fits lets its further passes grow. They still have the device to themselves.
#[test]
fn all_passes_of_a_last_try_have_the_device_to_themselves() {
    let mut worker = Worker::new();
    let headers = JobHeaders { attempt: 1, batch_hint: Some(1), ..lost_with(&[PROCESS_LOST; 4]) };
    worker.job(1, 2, worker.source(), headers);
    for item in 0..2 {
        let order = worker.pass();
        assert!(order.exclusive && order.items == [(JobKey(1), ItemIndex(item))], "{order:?}");
        worker.ends(&order, PassResult::Done, vec![Some(10)]);
    }
}

/// One cause, for example a reset of the GPU, may end several processes at once. The job gets one crash, however many of its passes were
/// running.
#[test]
fn processes_that_die_together_cost_a_job_one_crash() {
    let mut worker = Worker::new();
    worker.job(1, 24, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    assert_eq!(passes.len(), 3);
    let mut back = Vec::new();
    for order in &passes {
        let actions = worker.ends(order, crashed(), vec![None; order.items.len()]);
        back.extend(requeued(&actions));
    }
    let [(JobKey(1), headers, Route::Now)] = &back[..] else { panic!("{back:?}") };
    assert_eq!((headers.crashes, headers.history.len()), (1, 1));
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
    // The headers count more crashes than the history names.
    let mut worker = Worker::new();
    let headers = JobHeaders { crashes: 3, ..lost_with(&[PROCESS_LOST; 2]) };
    let actions = worker.arrives(1, worker.source(), headers);
    assert!(matches!(&requeued(&actions)[..], [(JobKey(1), _, Route::Quarantine)]), "{actions:?}");
}

#[test]
fn a_disk_that_is_full_for_several_jobs_makes_none_of_them_smaller() {
    let mut worker = Worker::one_by_one();
    worker.job(1, 6, worker.source(), JobHeaders::default());
    worker.job(2, 2, worker.source(), JobHeaders::default());
    let both = worker.pass();
    assert_eq!(both.items.len(), 8);
    worker.ends(&both, PassResult::Failed(PassError::DiskFull("no space left".to_owned())), vec![None; 8]);
    let mut alone = Vec::new();
    for _ in 0..2 {
        let pass = worker.pass();
        worker.ends(&pass, PassResult::Done, vec![Some(1); pass.items.len()]);
        alone.push(pass.items.len());
    }
    alone.sort_unstable();
    assert_eq!(alone, [2, 6]);
}

/// After an out-of-memory at eight items, passes of the retried job grow again from four, up to its publisher's own hint.
#[test]
fn passes_of_a_retried_job_grow_again_when_they_fit() {
    let mut worker = Worker::one_by_one();
    let failed = Attempt { items: 8, outcome: "out-of-memory".to_owned(), ..Attempt::default() };
    let headers =
        JobHeaders { attempt: 1, batch_hint: Some(1), history: vec![failed], ..JobHeaders::default() };
    worker.job(1, 24, worker.source(), headers);
    let mut sizes = Vec::new();
    for _ in 0..4 {
        let pass = worker.pass();
        worker.ends(&pass, PassResult::Done, vec![Some(1); pass.items.len()]);
        sizes.push(pass.items.len());
    }
    assert_eq!(sizes, [1, 2, 4, 4]);
}
