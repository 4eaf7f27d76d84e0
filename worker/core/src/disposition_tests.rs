//! Tests of the decision about a job whose pass ended without its outputs.

use super::*;
use proptest::prelude::*;
use vramq_schemas::headers::WORKER_LOST;

const MIB: u64 = 1 << 20;
const OOM: OutOfMemory = OutOfMemory { asked: 900 * MIB, free: 100 * MIB, total: 1000 * MIB, foreign: 0 };
/// Other processes hold 850 MiB; without them the pass would have fitted.
const CROWDED: OutOfMemory = OutOfMemory { foreign: 850 * MIB, ..OOM };
/// Enough is free, but fragmented.
const PIECES: OutOfMemory = OutOfMemory { asked: MIB, ..OOM };
/// Other processes hold some memory, but less than is missing.
const SHARED: OutOfMemory = OutOfMemory { foreign: 50 * MIB, ..OOM };

fn pass(items: u32, exclusive: bool) -> PassFacts<'static> {
    PassFacts {
        worker: "w",
        device: "cpu",
        at_ms: 7,
        items,
        longest: Some(512),
        jobs: 1,
        exclusive,
        leaked: 0,
        overlapped: false,
        larger: None,
    }
}

/// The outcome for a job after an out-of-memory about which no program said anything.
fn ran_out(headers: &JobHeaders, item: ItemIndex, pass: &PassFacts<'_>, oom: &OutOfMemory) -> JobOutcome {
    after_out_of_memory(headers, item, pass, oom, "", 1_000)
}

/// The outcome as a word (route or dead letter), the headers of the next attempt, and the rejection if there is none.
fn next_of(outcome: JobOutcome) -> (&'static str, JobHeaders, Option<Rejection>) {
    match outcome {
        JobOutcome::Requeue(Requeue { route, headers, otherwise, .. }) => {
            let kind = match route {
                Route::Now => "requeue",
                Route::Later(_) => "delay",
                Route::OtherWorkers(_) => "enlarge",
                Route::Quarantine | Route::Bulk => "elsewhere",
            };
            (kind, *headers, otherwise.map(|otherwise| otherwise.no_queue))
        }
        JobOutcome::DeadLetter { headers: Some(headers), rejection } => {
            ("dead letter", *headers, Some(rejection))
        }
        other => panic!("{other:?}"),
    }
}

fn requeued(outcome: JobOutcome) -> JobHeaders {
    let (kind, next, _) = next_of(outcome);
    assert_eq!(kind, "requeue");
    next
}

/// The kind of a decision, and the headers that matter: hint, exclusive, delays.
fn outline(outcome: &JobOutcome) -> (&'static str, Option<u32>, bool, u32) {
    let (kind, next, _) = next_of(outcome.clone());
    (kind, next.batch_hint, next.exclusive, next.delays)
}

#[test]
fn every_row_of_the_table() {
    let larger = |pass: PassFacts<'static>| PassFacts { larger: Some("xl"), ..pass };
    let rows = [
        // More than one item: halved, whether or not other processes use the device.
        (pass(9, false), 0, OOM, ("requeue", Some(4), false, 0)),
        (pass(2, false), 0, CROWDED, ("requeue", Some(1), false, 0)),
        (pass(3, true), 0, OOM, ("requeue", Some(1), false, 0)),
        // One item beside others: the whole device for it.
        (pass(1, false), 0, CROWDED, ("requeue", Some(1), true, 0)),
        (pass(1, false), 0, SHARED, ("requeue", Some(1), true, 0)),
        // One item with nobody else: an exclusive pass would be the same once more.
        (pass(1, false), 0, OOM, ("dead letter", Some(1), false, 0)),
        (larger(pass(1, false)), 0, OOM, ("enlarge", None, false, 0)),
        // Exclusive, and others hold what is missing: wait, but not for ever.
        (pass(1, true), 0, CROWDED, ("delay", Some(1), true, 1)),
        (pass(1, true), DELAYS_MAX - 1, CROWDED, ("delay", Some(1), true, DELAYS_MAX)),
        (pass(1, true), DELAYS_MAX, CROWDED, ("dead letter", Some(1), true, DELAYS_MAX)),
        (larger(pass(1, true)), DELAYS_MAX, CROWDED, ("enlarge", None, false, 0)),
        // This process has leaked what is missing.
        (PassFacts { leaked: 800 * MIB, ..pass(1, false) }, 0, OOM, ("delay", Some(1), false, 1)),
        (PassFacts { leaked: 799 * MIB, ..pass(1, false) }, 0, OOM, ("dead letter", Some(1), false, 0)),
        // The device says that there is room.
        (pass(1, false), 0, PIECES, ("delay", Some(1), false, 1)),
        (pass(1, true), DELAYS_MAX, PIECES, ("dead letter", Some(1), true, DELAYS_MAX)),
        // Exclusive, and it would not fit without them either.
        (pass(1, true), 0, SHARED, ("dead letter", Some(1), true, 0)),
        (pass(1, true), 0, OOM, ("dead letter", Some(1), true, 0)),
    ];
    for (facts, delays, oom, expected) in rows {
        let headers =
            JobHeaders { exclusive: facts.exclusive && facts.items == 1, delays, ..Default::default() };
        let decided = ran_out(&headers, ItemIndex(3), &facts, &oom);
        assert_eq!(outline(&decided), expected, "{facts:?}, {delays} delays, {oom:?}");
    }
}

#[test]
fn a_pass_that_overlapped_another_of_this_worker_was_not_alone() {
    let facts = PassFacts { overlapped: true, ..pass(1, false) };
    assert_eq!(
        outline(&ran_out(&JobHeaders::default(), ItemIndex(0), &facts, &OOM)),
        ("requeue", Some(1), true, 0)
    );
    assert!(PassFacts { exclusive: true, ..facts }.alone(&CROWDED));
}

#[test]
fn the_history_has_what_was_tried() {
    let headers = JobHeaders { items_done: 3, attempt: 1, ..JobHeaders::default() };
    let next = requeued(ran_out(&headers, ItemIndex(3), &pass(9, false), &CROWDED));
    assert_eq!((next.attempt, next.items_done), (2, 3));
    let attempt = &next.history[0];
    assert_eq!((attempt.items, attempt.longest, attempt.asked), (9, 512, OOM.asked));
    assert_eq!((attempt.free, attempt.total, attempt.foreign), (OOM.free, OOM.total, CROWDED.foreign));
    assert!(!attempt.alone);
}

#[test]
fn the_next_item_may_wait_again() {
    let headers = JobHeaders { delays: DELAYS_MAX, ..JobHeaders::default() };
    let (kind, next, _) = next_of(ran_out(&headers, ItemIndex(3), &pass(1, true), &CROWDED));
    assert_eq!(kind, "dead letter");
    let again = ran_out(&next, ItemIndex(3), &pass(1, true), &CROWDED);
    assert_eq!(outline(&again), ("dead letter", Some(1), false, DELAYS_MAX));
    let further = ran_out(&next, ItemIndex(4), &pass(1, true), &CROWDED);
    assert_eq!(outline(&further), ("delay", Some(1), false, 1));
    // The next item starts its waits from zero.
    assert_eq!((delays_before(&next, ItemIndex(3)), delays_before(&next, ItemIndex(4))), (DELAYS_MAX, 0));
    // A crash in between is an attempt at no item.
    let mut lost = next;
    count_crash(&mut lost, Attempt { outcome: WORKER_LOST.to_owned(), ..Attempt::default() });
    assert_eq!((delays_before(&lost, ItemIndex(3)), delays_before(&lost, ItemIndex(4))), (DELAYS_MAX, 0));
}

#[test]
fn the_publishers_hint_is_kept() {
    let headers = JobHeaders { batch_hint: Some(20), ..JobHeaders::default() };
    let next = requeued(ran_out(&headers, ItemIndex(0), &pass(16, false), &OOM));
    assert_eq!((next.batch_hint, next.batch_hint_max), (Some(8), Some(20)));
    let next = requeued(ran_out(&next, ItemIndex(0), &pass(8, false), &OOM));
    assert_eq!((next.batch_hint, next.batch_hint_max), (Some(4), Some(20)));
}

#[test]
fn the_dead_letter_says_what_would_fit() {
    let rejection_of = |oom: OutOfMemory, delays| {
        let headers = JobHeaders { delays, ..JobHeaders::default() };
        let (kind, _, rejection) = next_of(ran_out(&headers, ItemIndex(5), &pass(1, true), &oom));
        assert_eq!(kind, "dead letter");
        rejection.unwrap()
    };
    let rejection = rejection_of(OOM, 0);
    assert_eq!(rejection.reason, Reason::OutOfMemory);
    assert_eq!(
        rejection.requirement,
        Some(MinimumRequirement { item: 5, cost: 512, needs_bytes: OOM.asked })
    );
    assert!(rejection.error.contains("at least 900.0 MiB free"), "{}", rejection.error);
    assert!(!rejection.error.contains("other processes"), "{}", rejection.error);
    let rejection = rejection_of(CROWDED, DELAYS_MAX);
    assert!(rejection.error.contains("other processes hold 850.0 MiB. Without them"), "{}", rejection.error);
    let rejection = rejection_of(PIECES, DELAYS_MAX);
    assert!(rejection.error.contains("fragmented"), "{}", rejection.error);
    assert!(!rejection.error.contains("said"), "{}", rejection.error);
    let (headers, said) = (JobHeaders::default(), "CUDA error");
    let outcome = after_out_of_memory(&headers, ItemIndex(5), &pass(1, true), &OOM, said, 1_000);
    let (_, _, rejection) = next_of(outcome);
    assert!(rejection.unwrap().error.ends_with("The program said: CUDA error"));
}

#[test]
fn a_failure_dead_letters_only_a_job_that_was_alone() {
    let headers = JobHeaders::default();
    let shared = PassFacts { jobs: 2, ..pass(5, false) };
    assert_eq!(after_failure(&headers, &shared, Reason::EngineFailed, "boom"), AfterFailure::RunAgainHere);
    let rejection = Rejection::new(Reason::EngineFailed, "boom");
    let alone = after_failure(&headers, &pass(5, false), Reason::EngineFailed, "boom");
    assert_eq!(alone, AfterFailure::Decided(JobOutcome::dead_letter(headers, rejection)));
}

/// A job ran out of memory and was sent to larger devices, whose queue is full. It comes back with the headers of its next try here (a
/// smaller hint), a limited number of times.
#[test]
fn a_job_for_a_full_queue_of_larger_devices_comes_back_later_and_not_for_ever() {
    let mut headers =
        JobHeaders { attempt: 1, batch_hint: Some(1), batch_hint_max: Some(9), ..JobHeaders::default() };
    for waits in 1..=WAITS_MAX + 1 {
        let facts = PassFacts { larger: Some("xl"), ..pass(1, true) };
        let outcome = ran_out(&headers, ItemIndex(0), &facts, &OOM);
        let JobOutcome::Requeue(Requeue { headers: there, otherwise: Some(otherwise), .. }) = outcome else {
            panic!("{outcome:?}")
        };
        assert_eq!(there.batch_hint, Some(9), "a size that failed here says nothing of a larger device");
        let (kind, back, rejection) = next_of(otherwise.full);
        assert_eq!((back.waits, back.batch_hint), (waits, Some(1)));
        match rejection {
            None => assert_eq!(kind, "delay"),
            Some(rejection) => {
                assert_eq!((waits, rejection.reason), (WAITS_MAX + 1, Reason::OutOfMemory));
                assert!(
                    rejection.error.ends_with("the queue of the key `xl` stayed full"),
                    "{}",
                    rejection.error
                );
                assert_eq!(rejection.requirement, otherwise.no_queue.requirement);
            }
        }
        headers = back;
    }
}

proptest! {
    /// Whatever other processes hold at each attempt, a job's path ends, and a size is tried again only after a wait.
    #[test]
    fn every_path_ends_and_no_size_is_tried_twice(
        items in 1u32..=u32::MAX,
        crowd in proptest::collection::vec(0u64..2000 * MIB, 64),
        has_larger in any::<bool>(),
    ) {
        let mut headers = JobHeaders::default();
        let mut size = items;
        let mut tried = Vec::new();
        for foreign in crowd {
            let oom = OutOfMemory { foreign, ..OOM };
            let attempt = (size, headers.exclusive, headers.delays);
            prop_assert!(!tried.contains(&attempt), "again {attempt:?}");
            tried.push(attempt);
            let facts = PassFacts { larger: has_larger.then_some("xl"), ..pass(size, headers.exclusive) };
            let (kind, next, _) = next_of(ran_out(&headers, ItemIndex(0), &facts, &oom));
            match kind {
                "requeue" => {
                    let hint = next.batch_hint.unwrap();
                    prop_assert!(hint < size || (hint == 1 && next.exclusive && !headers.exclusive));
                    size = hint;
                    headers = next;
                }
                "delay" => {
                    prop_assert_eq!((next.batch_hint, next.delays), (Some(1), headers.delays + 1));
                    headers = next;
                }
                end => {
                    prop_assert_eq!(size, 1);
                    prop_assert_eq!(end == "enlarge", has_larger);
                    let attempts = tried.len() as u32;
                    prop_assert!(attempts <= 32 + 1 + DELAYS_MAX + 1, "{attempts} attempts");
                    return Ok(());
                }
            }
        }
        prop_assert!(false, "the path does not end: {tried:?}");
    }
}
