//! What happens to a job whose pass ended without its outputs. Pure: outcome and headers in, decision out.

use vramq_schemas::{Attempt, JobHeaders, Misfit, Reason};

use crate::action::Route;
use crate::device::OutOfMemory;
use crate::observation::Cause;
use crate::rejection::Rejection;
use crate::units::Mib;

/// How often a job waits for memory that other processes hold, before it is dead-lettered: with the waits of `backoff.rs`
/// about three minutes in all, in which a neighbour that only peaks has gone down again.
pub(crate) const DELAYS_MAX: u32 = 8;

/// The decision about a job. All policies return one of these; `settling.rs` carries it out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum JobOutcome {
    /// All outputs are there: the last reply goes out.
    Reply,
    /// It is tried again.
    Requeue(Requeue),
    /// It ends without all its results; with its state, if it could be read.
    DeadLetter { headers: Option<Box<JobHeaders>>, rejection: Rejection },
    /// It was settled before, and the broker did not know.
    AckOnly,
    /// Its caller withdrew it: it ends with a `failed` reply, and without a dead letter.
    Withdrawn,
}

/// Another attempt of a job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Requeue {
    pub(crate) route: Route,
    pub(crate) headers: Box<JobHeaders>,
    pub(crate) cause: Cause,
    /// What the job is dead-lettered as if the place where it should be tried does not take it.
    pub(crate) otherwise: Option<Rejection>,
}

impl JobOutcome {
    pub(crate) fn dead_letter(headers: JobHeaders, rejection: Rejection) -> Self {
        Self::DeadLetter { headers: Some(Box::new(headers)), rejection }
    }

    fn requeue(headers: JobHeaders, route: Route, cause: Cause) -> Self {
        Self::Requeue(Requeue { route, headers: Box::new(headers), cause, otherwise: None })
    }

    /// The unfinished job is requeued as it stands, with no attempt counted.
    pub(crate) fn unfinished(headers: JobHeaders) -> Self {
        Self::requeue(headers, Route::Now, Cause::HandedOver)
    }
}

/// What a decision needs to know of the pass.
#[derive(Clone, Debug)]
pub(crate) struct PassFacts<'a> {
    pub(crate) worker: &'a str,
    pub(crate) device: &'a str,
    /// Unix time in milliseconds.
    pub(crate) at_ms: u64,
    pub(crate) items: u32,
    /// Cost of its longest item.
    pub(crate) longest: u32,
    /// Jobs with items in it.
    pub(crate) jobs: usize,
    /// It held the whole device.
    pub(crate) exclusive: bool,
    /// Another pass of this worker was on the device at some time during it.
    pub(crate) overlapped: bool,
    /// Bytes that this process holds beyond what it held when it started: a new one would have them.
    pub(crate) leaked: u64,
    /// Routing key of jobs for larger devices, if the model has one.
    pub(crate) larger: Option<&'a str>,
    /// The milliseconds that the job would wait for memory.
    pub(crate) delay_ms: u64,
}

impl PassFacts<'_> {
    /// Whether no other pass can have had a part in an out-of-memory: none of this worker's by its permits, and none of
    /// other processes', which an exclusive pass keeps out.
    pub(crate) fn alone(&self, oom: &OutOfMemory) -> bool {
        self.exclusive || (!self.overlapped && oom.foreign == 0)
    }
}

/// A pass ran out of device memory: halve down to one item, then run that alone on the device, then wait for what others
/// hold, then give up. The same size is never tried twice under the same conditions. `item` is the index of
/// the job's first item in the pass.
pub(crate) fn after_out_of_memory(
    headers: &JobHeaders,
    item: u32,
    pass: &PassFacts<'_>,
    oom: &OutOfMemory,
) -> JobOutcome {
    let alone = pass.alone(oom);
    let mut next = headers.clone();
    if headers.history.last().is_some_and(|last| item > last.item) {
        // The item that it waited for before has run.
        next.delays = 0;
    }
    if headers.attempt == 0 {
        next.batch_hint_max = headers.batch_hint;
    }
    next.attempt = next.attempt.saturating_add(1);
    next.history.push(Attempt {
        at_ms: pass.at_ms,
        worker: pass.worker.to_owned(),
        device: pass.device.to_owned(),
        outcome: Reason::OutOfMemory.as_str().to_owned(),
        item,
        items: pass.items,
        longest: pass.longest,
        asked: oom.asked,
        free: oom.free,
        total: oom.total,
        foreign: oom.foreign,
        alone,
    });
    if pass.items > 1 {
        next.batch_hint = Some(pass.items / 2);
        return JobOutcome::requeue(next, Route::Now, Cause::Smaller);
    }
    next.batch_hint = Some(1);
    if !alone {
        next.exclusive = true;
        return JobOutcome::requeue(next, Route::Now, Cause::Exclusive);
    }
    // Other processes hold what is missing, or this process has leaked it; or nothing is missing by the device's own count:
    // another process was faster, or the free memory is in pieces. All of these are temporary, and the job causes none of them.
    let in_time = oom.free.saturating_add(oom.foreign).saturating_add(pass.leaked);
    if oom.asked <= in_time && next.delays < DELAYS_MAX {
        next.delays += 1;
        return JobOutcome::requeue(next, Route::Later(pass.delay_ms), Cause::Delayed);
    }
    let requirement = Misfit { item, cost: pass.longest, needs_bytes: oom.asked };
    let rejection = Rejection {
        requirement: Some(requirement),
        ..Rejection::new(Reason::OutOfMemory, explanation(item, pass, oom))
    };
    if let Some(key) = pass.larger {
        // A size that did not fit here says nothing about a larger device.
        (next.batch_hint, next.exclusive, next.delays) = (next.batch_hint_max, false, 0);
        return JobOutcome::Requeue(Requeue {
            route: Route::LargerDevice(key.to_owned()),
            headers: Box::new(next),
            cause: Cause::Larger,
            otherwise: Some(rejection),
        });
    }
    JobOutcome::dead_letter(next, rejection)
}

/// The engine failed on a pass, and the device is well. Nothing is decided yet about jobs that shared the pass: each is
/// to run again on this worker without the others, to learn whose fault it was.
pub(crate) fn after_failure(
    headers: &JobHeaders,
    pass: &PassFacts<'_>,
    reason: Reason,
    error: &str,
) -> Option<JobOutcome> {
    let rejection = || Rejection::new(reason, error);
    (pass.jobs == 1).then(|| JobOutcome::dead_letter(headers.clone(), rejection()))
}

/// Why an item does not fit even alone, for a person.
fn explanation(item: u32, pass: &PassFacts<'_>, oom: &OutOfMemory) -> String {
    let OutOfMemory { asked, free, total, foreign } = *oom;
    let (longest, device) = (pass.longest, pass.device);
    let mut text = format!(
        "out of memory at batch 1: item {item}, of cost {longest}, asked for {} alone on {device}, which has {} free \
         of {}",
        Mib(asked),
        Mib(free),
        Mib(total)
    );
    if foreign > 0 {
        text += &format!("; other processes hold {}", Mib(foreign));
    }
    if asked <= free {
        // The device's count says that there is room, its allocator says no.
        text += ". The free memory is in pieces: restart what runs on the device";
    } else if asked <= free.saturating_add(foreign) {
        text += ", which would have sufficed, and held it at every attempt: give them less, or this device fewer of them";
    } else if asked <= free.saturating_add(foreign).saturating_add(pass.leaked) {
        text += &format!("; the worker itself has leaked {}: restart it", Mib(pass.leaked));
    } else {
        text += &format!(
            ". It needs a device with at least {} free beside the model's weights, or a shorter item",
            Mib(asked)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const OOM: OutOfMemory = OutOfMemory { asked: 900 * MIB, free: 100 * MIB, total: 1000 * MIB, foreign: 0 };
    /// 850 MiB are with others, and would have sufficed.
    const CROWDED: OutOfMemory = OutOfMemory { foreign: 850 * MIB, ..OOM };
    /// What is asked for is free, in pieces.
    const PIECES: OutOfMemory = OutOfMemory { asked: MIB, ..OOM };
    /// Others hold some, but not as much as is missing.
    const SHARED: OutOfMemory = OutOfMemory { foreign: 50 * MIB, ..OOM };

    fn pass(items: u32, exclusive: bool) -> PassFacts<'static> {
        PassFacts {
            worker: "w",
            device: "cpu",
            at_ms: 7,
            items,
            longest: 512,
            jobs: 1,
            exclusive,
            leaked: 0,
            overlapped: false,
            larger: None,
            delay_ms: 1_000,
        }
    }

    /// The headers of another attempt, with its route in a word; or the dead letter.
    fn next_of(outcome: JobOutcome) -> (&'static str, JobHeaders, Option<Rejection>) {
        match outcome {
            JobOutcome::Requeue(Requeue { route, headers, otherwise, .. }) => {
                let kind = match route {
                    Route::Now => "requeue",
                    Route::Later(_) => "delay",
                    Route::LargerDevice(_) => "enlarge",
                    Route::Quarantine | Route::Bulk => "elsewhere",
                };
                (kind, *headers, otherwise)
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
            let decided = after_out_of_memory(&headers, 3, &facts, &oom);
            assert_eq!(outline(&decided), expected, "{facts:?}, {delays} delays, {oom:?}");
        }
    }

    #[test]
    fn a_pass_that_overlapped_another_of_this_worker_was_not_alone() {
        let facts = PassFacts { overlapped: true, ..pass(1, false) };
        assert_eq!(
            outline(&after_out_of_memory(&JobHeaders::default(), 0, &facts, &OOM)),
            ("requeue", Some(1), true, 0)
        );
        assert!(PassFacts { exclusive: true, ..facts }.alone(&CROWDED));
    }

    #[test]
    fn the_history_has_what_was_tried() {
        let headers = JobHeaders { items_done: 3, attempt: 1, ..JobHeaders::default() };
        let next = requeued(after_out_of_memory(&headers, 3, &pass(9, false), &CROWDED));
        assert_eq!((next.attempt, next.items_done), (2, 3));
        let attempt = &next.history[0];
        assert_eq!((attempt.items, attempt.longest, attempt.asked), (9, 512, OOM.asked));
        assert_eq!((attempt.free, attempt.total, attempt.foreign), (OOM.free, OOM.total, CROWDED.foreign));
        assert!(!attempt.alone);
    }

    #[test]
    fn the_next_item_may_wait_again() {
        let headers = JobHeaders { delays: DELAYS_MAX, ..JobHeaders::default() };
        let (kind, next, _) = next_of(after_out_of_memory(&headers, 3, &pass(1, true), &CROWDED));
        assert_eq!(kind, "dead letter");
        let again = after_out_of_memory(&next, 3, &pass(1, true), &CROWDED);
        assert_eq!(outline(&again), ("dead letter", Some(1), false, DELAYS_MAX));
        let further = after_out_of_memory(&next, 4, &pass(1, true), &CROWDED);
        assert_eq!(outline(&further), ("delay", Some(1), false, 1));
    }

    #[test]
    fn the_publishers_hint_is_kept() {
        let headers = JobHeaders { batch_hint: Some(20), ..JobHeaders::default() };
        let next = requeued(after_out_of_memory(&headers, 0, &pass(16, false), &OOM));
        assert_eq!((next.batch_hint, next.batch_hint_max), (Some(8), Some(20)));
        let next = requeued(after_out_of_memory(&next, 0, &pass(8, false), &OOM));
        assert_eq!((next.batch_hint, next.batch_hint_max), (Some(4), Some(20)));
    }

    #[test]
    fn the_dead_letter_says_what_would_fit() {
        let rejection_of = |oom: OutOfMemory, delays| {
            let headers = JobHeaders { delays, ..JobHeaders::default() };
            let (kind, _, rejection) = next_of(after_out_of_memory(&headers, 5, &pass(1, true), &oom));
            assert_eq!(kind, "dead letter");
            rejection.unwrap()
        };
        let rejection = rejection_of(OOM, 0);
        assert_eq!(rejection.reason, Reason::OutOfMemory);
        assert_eq!(rejection.requirement, Some(Misfit { item: 5, cost: 512, needs_bytes: OOM.asked }));
        assert!(rejection.error.contains("at least 900.0 MiB free"), "{}", rejection.error);
        let rejection = rejection_of(CROWDED, DELAYS_MAX);
        assert!(
            rejection.error.contains("other processes hold 850.0 MiB, which would"),
            "{}",
            rejection.error
        );
        let rejection = rejection_of(PIECES, DELAYS_MAX);
        assert!(rejection.error.contains("in pieces"), "{}", rejection.error);
    }

    #[test]
    fn a_failure_dead_letters_only_a_job_that_was_alone() {
        let headers = JobHeaders::default();
        let shared = PassFacts { jobs: 2, ..pass(5, false) };
        assert_eq!(after_failure(&headers, &shared, Reason::EngineFailed, "boom"), None);
        let rejection = Rejection::new(Reason::EngineFailed, "boom");
        let alone = after_failure(&headers, &pass(5, false), Reason::EngineFailed, "boom");
        assert_eq!(alone, Some(JobOutcome::dead_letter(headers, rejection)));
    }

    proptest! {
        /// Whatever others hold at each attempt, a job's path ends, and no size is tried twice but after a wait.
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
                let (kind, next, _) = next_of(after_out_of_memory(&headers, 0, &facts, &oom));
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
}
