//! What happens to a job whose pass ended without outputs. Pure: outcome and headers in, decision out.

use vramq_schemas::{Attempt, JobHeaders, Misfit, Reason};

use crate::admission::Mib;
use crate::device::OutOfMemory;
use crate::refusal::Refusal;

/// How often a job waits for memory that other processes hold, before it is dead-lettered: with the waits of `retry.rs`
/// about three minutes in all, in which a neighbour that only peaks has gone down again.
pub const DELAYS_MAX: u32 = 8;

/// What is to happen with the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Back to the queue with these headers, at once.
    Requeue(JobHeaders),
    /// The same, with no attempt behind it: the job goes on elsewhere for no fault of its own.
    HandOver(JobHeaders),
    /// Back to the queue after a wait: others hold the memory.
    Delay(JobHeaders),
    /// To the queue for larger devices.
    Enlarge(JobHeaders, Refusal),
    DeadLetter(JobHeaders, Refusal),
}

/// What a decision needs to know of the pass.
#[derive(Clone, Debug)]
pub struct PassFacts<'a> {
    pub worker: &'a str,
    pub device: &'a str,
    /// Unix time in milliseconds.
    pub at_ms: u64,
    pub items: u32,
    /// Cost of its longest item.
    pub longest: u32,
    /// Jobs with items in it.
    pub jobs: usize,
    /// It held the whole device.
    pub exclusive: bool,
    /// Bytes that this process holds beyond what it held when it started: a new one would have them.
    pub leaked: u64,
    /// The model has a queue for larger devices.
    pub has_larger: bool,
}

impl PassFacts<'_> {
    /// Whether no other pass can have had a part in an out-of-memory. Passes of one process run one after the other, so
    /// only other processes can; an exclusive pass keeps theirs out too.
    pub fn alone(&self, oom: &OutOfMemory) -> bool {
        self.exclusive || oom.foreign == 0
    }
}

/// A pass ran out of device memory: halve down to one item, then run that alone on the device, then wait for what others
/// hold, then give up. The same size is never tried twice under the same conditions. `item` is the index of
/// the job's first item in the pass.
pub fn after_out_of_memory(
    headers: &JobHeaders,
    item: u32,
    pass: &PassFacts<'_>,
    oom: &OutOfMemory,
) -> Disposition {
    let alone = pass.alone(oom);
    let mut next = headers.clone();
    if headers.history.last().is_some_and(|last| item > last.item) {
        // What it waited for before, it got.
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
        return Disposition::Requeue(next);
    }
    next.batch_hint = Some(1);
    if !alone {
        next.exclusive = true;
        return Disposition::Requeue(next);
    }
    // Others hold what is missing, or this process has leaked it; or nothing is, by the device's own count: somebody was
    // faster, or the free memory is in pieces. All of it may pass, and none is the job's doing.
    let in_time = oom.free.saturating_add(oom.foreign).saturating_add(pass.leaked);
    if oom.asked <= in_time && next.delays < DELAYS_MAX {
        next.delays += 1;
        return Disposition::Delay(next);
    }
    let misfit = Misfit { item, cost: pass.longest, needs_bytes: oom.asked };
    let refusal =
        Refusal { misfit: Some(misfit), ..Refusal::new(Reason::OutOfMemory, told(item, pass, oom)) };
    if pass.has_larger {
        // What did not fit here says nothing about there.
        (next.batch_hint, next.exclusive, next.delays) = (next.batch_hint_max, false, 0);
        return Disposition::Enlarge(next, refusal);
    }
    Disposition::DeadLetter(next, refusal)
}

/// The engine failed on a pass, and the device is well. Nothing is decided yet about jobs that shared the pass: each is
/// to run again on this worker without the others, to learn whose fault it was.
pub fn after_failure(headers: &JobHeaders, pass: &PassFacts<'_>, error: &str) -> Option<Disposition> {
    let refusal = || Refusal::new(Reason::EngineFailed, error);
    (pass.jobs == 1).then(|| Disposition::DeadLetter(headers.clone(), refusal()))
}

/// Why an item has no room even alone, for a person.
fn told(item: u32, pass: &PassFacts<'_>, oom: &OutOfMemory) -> String {
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
            has_larger: false,
        }
    }

    /// The kind of a decision, and the headers that matter: hint, exclusive, delays.
    fn outline(disposition: &Disposition) -> (&'static str, Option<u32>, bool, u32) {
        let (kind, next) = match disposition {
            Disposition::Requeue(next) => ("requeue", next),
            Disposition::HandOver(next) => ("hand over", next),
            Disposition::Delay(next) => ("delay", next),
            Disposition::Enlarge(next, _) => ("enlarge", next),
            Disposition::DeadLetter(next, _) => ("dead letter", next),
        };
        (kind, next.batch_hint, next.exclusive, next.delays)
    }

    #[test]
    fn every_row_of_the_table() {
        let larger = |pass: PassFacts<'static>| PassFacts { has_larger: true, ..pass };
        let rows = [
            // More than one item: halved, whoever else is on the device.
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
    fn what_was_tried_is_told() {
        let headers = JobHeaders { items_done: 3, attempt: 1, ..JobHeaders::default() };
        let Disposition::Requeue(next) = after_out_of_memory(&headers, 3, &pass(9, false), &CROWDED) else {
            panic!()
        };
        assert_eq!((next.attempt, next.items_done), (2, 3));
        let attempt = &next.history[0];
        assert_eq!((attempt.items, attempt.longest, attempt.asked), (9, 512, OOM.asked));
        assert_eq!((attempt.free, attempt.total, attempt.foreign), (OOM.free, OOM.total, CROWDED.foreign));
        assert!(!attempt.alone);
    }

    #[test]
    fn an_item_further_on_may_wait_anew() {
        let headers = JobHeaders { delays: DELAYS_MAX, ..JobHeaders::default() };
        let Disposition::DeadLetter(next, _) = after_out_of_memory(&headers, 3, &pass(1, true), &CROWDED)
        else {
            panic!()
        };
        let again = after_out_of_memory(&next, 3, &pass(1, true), &CROWDED);
        assert_eq!(outline(&again), ("dead letter", Some(1), false, DELAYS_MAX));
        let further = after_out_of_memory(&next, 4, &pass(1, true), &CROWDED);
        assert_eq!(outline(&further), ("delay", Some(1), false, 1));
    }

    #[test]
    fn the_publishers_hint_is_kept() {
        let headers = JobHeaders { batch_hint: Some(20), ..JobHeaders::default() };
        let Disposition::Requeue(next) = after_out_of_memory(&headers, 0, &pass(16, false), &OOM) else {
            panic!()
        };
        assert_eq!((next.batch_hint, next.batch_hint_max), (Some(8), Some(20)));
        let Disposition::Requeue(next) = after_out_of_memory(&next, 0, &pass(8, false), &OOM) else {
            panic!()
        };
        assert_eq!((next.batch_hint, next.batch_hint_max), (Some(4), Some(20)));
    }

    #[test]
    fn a_misfit_says_what_would_fit() {
        let told = |oom: OutOfMemory, delays| {
            let headers = JobHeaders { delays, ..JobHeaders::default() };
            match after_out_of_memory(&headers, 5, &pass(1, true), &oom) {
                Disposition::DeadLetter(_, refusal) => refusal,
                other => panic!("{other:?}"),
            }
        };
        let refusal = told(OOM, 0);
        assert_eq!(refusal.reason, Reason::OutOfMemory);
        assert_eq!(refusal.misfit, Some(Misfit { item: 5, cost: 512, needs_bytes: OOM.asked }));
        assert!(refusal.error.contains("at least 900.0 MiB free"), "{}", refusal.error);
        let refusal = told(CROWDED, DELAYS_MAX);
        assert!(refusal.error.contains("other processes hold 850.0 MiB, which would"), "{}", refusal.error);
        let refusal = told(PIECES, DELAYS_MAX);
        assert!(refusal.error.contains("in pieces"), "{}", refusal.error);
    }

    #[test]
    fn a_failure_condemns_only_a_job_that_was_alone() {
        let headers = JobHeaders::default();
        let shared = PassFacts { jobs: 2, ..pass(5, false) };
        assert_eq!(after_failure(&headers, &shared, "boom"), None);
        let refusal = Refusal::new(Reason::EngineFailed, "boom");
        let alone = after_failure(&headers, &pass(5, false), "boom");
        assert_eq!(alone, Some(Disposition::DeadLetter(headers, refusal)));
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
                let facts = PassFacts { has_larger, ..pass(size, headers.exclusive) };
                match after_out_of_memory(&headers, 0, &facts, &oom) {
                    Disposition::Requeue(next) => {
                        let hint = next.batch_hint.unwrap();
                        prop_assert!(hint < size || (hint == 1 && next.exclusive && !headers.exclusive));
                        size = hint;
                        headers = next;
                    }
                    Disposition::Delay(next) => {
                        prop_assert_eq!((next.batch_hint, next.delays), (Some(1), headers.delays + 1));
                        headers = next;
                    }
                    end => {
                        prop_assert_eq!(size, 1);
                        prop_assert_eq!(matches!(end, Disposition::Enlarge(..)), has_larger);
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
