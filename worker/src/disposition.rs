//! What happens to a job whose pass ended without outputs. Pure: outcome and headers in, decision out.

use vramq_schemas::{Attempt, JobHeaders, Reason};

use crate::admission::Mib;
use crate::device::OutOfMemory;
use crate::job::Refusal;

/// What is to happen with the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// Back to the queue with these headers.
    Requeue(JobHeaders),
    /// Again on this worker, in a pass without other jobs, to learn whose fault it was.
    Isolate,
    DeadLetter(Refusal),
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
    pub longest: usize,
    /// Jobs with items in it.
    pub jobs: usize,
    /// It held the whole device.
    pub exclusive: bool,
}

/// A pass ran out of device memory: halve down to one item, then run that alone on the device, then give up.
/// The same size is never tried twice.
pub fn after_out_of_memory(headers: &JobHeaders, pass: &PassFacts<'_>, oom: &OutOfMemory) -> Disposition {
    let mut next = headers.clone();
    next.attempt = next.attempt.saturating_add(1);
    next.history.push(Attempt {
        at_ms: pass.at_ms,
        worker: pass.worker.to_owned(),
        device: pass.device.to_owned(),
        outcome: Reason::OutOfMemory.as_str().to_owned(),
        items: pass.items,
        asked: oom.asked,
        free: oom.free,
        total: oom.total,
        alone: pass.exclusive,
    });
    if pass.items > 1 {
        next.batch_hint = Some((pass.items / 2).max(1));
    } else if !pass.exclusive {
        next.batch_hint = Some(1);
        next.exclusive = true;
    } else {
        let (asked, free, total) = (Mib(oom.asked), Mib(oom.free), Mib(oom.total));
        return Disposition::DeadLetter(Refusal::new(
            Reason::OutOfMemory,
            format!(
                "out of memory at batch 1: one item of cost {} asked for {asked} alone on {}, which has {free} free \
                 of {total}; it needs a device with at least {asked} free",
                pass.longest, pass.device
            ),
        ));
    }
    Disposition::Requeue(next)
}

/// The engine failed on a pass, and the device is well.
pub fn after_failure(pass: &PassFacts<'_>, error: &str) -> Disposition {
    if pass.jobs > 1 {
        return Disposition::Isolate;
    }
    Disposition::DeadLetter(Refusal::new(Reason::EngineFailed, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const OOM: OutOfMemory = OutOfMemory { asked: 900 << 20, free: 100 << 20, total: 1000 << 20 };

    fn pass(items: u32, exclusive: bool) -> PassFacts<'static> {
        PassFacts { worker: "w", device: "cpu", at_ms: 7, items, longest: 512, jobs: 1, exclusive }
    }

    #[test]
    fn out_of_memory_halves_then_isolates_then_gives_up() {
        let headers = JobHeaders { items_done: 3, ..JobHeaders::default() };
        let Disposition::Requeue(next) = after_out_of_memory(&headers, &pass(9, false), &OOM) else {
            panic!()
        };
        assert_eq!((next.batch_hint, next.exclusive, next.attempt, next.items_done), (Some(4), false, 1, 3));
        assert_eq!((next.history[0].items, next.history[0].asked), (9, OOM.asked));

        let Disposition::Requeue(next) = after_out_of_memory(&headers, &pass(1, false), &OOM) else {
            panic!()
        };
        assert_eq!((next.batch_hint, next.exclusive), (Some(1), true));

        let Disposition::DeadLetter(refusal) = after_out_of_memory(&next, &pass(1, true), &OOM) else {
            panic!()
        };
        assert_eq!(refusal.reason, Reason::OutOfMemory);
        assert!(refusal.error.contains("at least 900.0 MiB"), "{}", refusal.error);
    }

    #[test]
    fn a_failure_condemns_only_a_job_that_was_alone() {
        assert_eq!(after_failure(&PassFacts { jobs: 2, ..pass(5, false) }, "boom"), Disposition::Isolate);
        let refusal = Refusal::new(Reason::EngineFailed, "boom");
        assert_eq!(after_failure(&pass(5, false), "boom"), Disposition::DeadLetter(refusal));
    }

    proptest! {
        #[test]
        fn every_path_ends_and_no_size_is_tried_twice(items in 1u32..100_000) {
            let mut headers = JobHeaders::default();
            let mut size = items;
            let mut tried = Vec::new();
            loop {
                prop_assert!(!tried.contains(&(size, headers.exclusive)), "again {size}");
                tried.push((size, headers.exclusive));
                match after_out_of_memory(&headers, &pass(size, headers.exclusive), &OOM) {
                    Disposition::Requeue(next) => {
                        size = next.batch_hint.unwrap();
                        headers = next;
                    }
                    Disposition::DeadLetter(_) => break,
                    Disposition::Isolate => prop_assert!(false),
                }
                prop_assert!(tried.len() <= 20);
            }
            prop_assert_eq!(tried.last(), Some(&(1, true)));
        }
    }
}
