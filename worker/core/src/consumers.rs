//! The consumers of a model's queues. A prefetch does not change under a live consumer, so a worker has several, each with a
//! share of its credit, and starts and stops them one by one: the first for one job, and each further one for as many as all
//! before it together.
//!
//! Invariant: what the live consumers may be sent, and what was sent to stopped ones and is not settled, never exceeds the slots.

use std::num::NonZeroU16;
use std::time::{Duration, Instant};

use crate::action::JobQueue;
use crate::event::Source;
use crate::ids::ConsumerId;

/// A consumer that was started.
#[derive(Clone, Copy, Debug)]
struct Lease {
    consumer: ConsumerId,
    prefetch: u16,
    /// The broker was asked to stop it; what it had sent before may still come.
    is_stopping: bool,
}

/// What to do about a model's consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Start { consumer: ConsumerId, prefetch: NonZeroU16 },
    Stop { consumer: ConsumerId },
}

/// The consumers of a model in one session.
#[derive(Debug, Default)]
struct Consumers {
    /// Oldest first.
    leases: Vec<Lease>,
    /// Unacknowledged deliveries, by the consumer that they came to.
    unacked: Vec<(ConsumerId, usize)>,
}

impl Consumers {
    /// The broker may send jobs.
    fn is_consuming(&self) -> bool {
        self.leases.iter().any(|lease| !lease.is_stopping)
    }

    /// No consumer is there, and none is stopping.
    fn is_over(&self) -> bool {
        self.leases.is_empty()
    }

    /// What the live consumers may be sent.
    fn prefetch(&self) -> u16 {
        self.leases.iter().filter(|lease| !lease.is_stopping).map(|lease| lease.prefetch).sum()
    }

    fn live(&self) -> usize {
        self.leases.iter().filter(|lease| !lease.is_stopping).count()
    }

    /// Deliveries that are neither acknowledged nor given back.
    fn unacked(&self) -> usize {
        self.unacked.iter().map(|(_, count)| count).sum()
    }

    fn delivered(&mut self, to: ConsumerId) {
        match self.unacked.iter_mut().find(|(consumer, _)| *consumer == to) {
            Some((_, count)) => *count += 1,
            None => self.unacked.push((to, 1)),
        }
    }

    fn settled(&mut self, from: ConsumerId) {
        if let Some(at) = self.unacked.iter().position(|(consumer, _)| *consumer == from) {
            let (_, count) = &mut self.unacked[at];
            *count -= 1;
            if *count == 0 {
                self.unacked.swap_remove(at);
            }
        }
    }

    /// The stream of a consumer has ended. False if the core did not ask for it.
    fn ended(&mut self, consumer: ConsumerId) -> bool {
        let Some(at) = self.leases.iter().position(|lease| lease.consumer == consumer) else { return true };
        self.leases.remove(at).is_stopping
    }

    /// Jobs that the broker may have under way to this worker or waits to hear about.
    fn committed(&self) -> usize {
        let leased: usize = self.leases.iter().map(|lease| usize::from(lease.prefetch)).sum();
        let of_lease = |to: &ConsumerId| self.leases.iter().any(|lease| lease.consumer == *to);
        let orphaned: usize =
            self.unacked.iter().filter(|(to, _)| !of_lease(to)).map(|(_, count)| count).sum();
        leased + orphaned
    }

    /// One step towards holding `wanted` jobs, of at most `slots`; nothing when no step is due. `free` is how many of the model's
    /// slots nobody takes. `next` is a consumer's number that was not used before.
    fn change(&mut self, wanted: u16, slots: u16, free: u16, next: ConsumerId) -> Option<Change> {
        let (wanted, live) = (wanted.min(slots), self.prefetch());
        if wanted == 0 || live > slots {
            return self.stop_newest();
        }
        // Twice as many as wanted are not worth a change: the load may come back.
        if self.live() > 1 && self.prefetch_without_newest() >= wanted.saturating_mul(2) {
            return self.stop_newest();
        }
        if live >= wanted {
            return None;
        }
        let room = remaining(slots, self.committed()).min(free);
        let step = live.max(1).min(slots - live);
        let prefetch = NonZeroU16::new(step.min(room))?;
        if prefetch.get() < step && !self.leases.is_empty() {
            // Slots are still taken by jobs of stopped consumers: wait rather than collect many small ones.
            return None;
        }
        self.leases.push(Lease { consumer: next, prefetch: prefetch.get(), is_stopping: false });
        Some(Change::Start { consumer: next, prefetch })
    }

    fn prefetch_without_newest(&self) -> u16 {
        let newest = self.leases.iter().rev().find(|lease| !lease.is_stopping);
        self.prefetch() - newest.map_or(0, |lease| lease.prefetch)
    }

    fn stop_newest(&mut self) -> Option<Change> {
        let newest = self.leases.iter_mut().rev().find(|lease| !lease.is_stopping)?;
        newest.is_stopping = true;
        Some(Change::Stop { consumer: newest.consumer })
    }
}

/// How long a single slot serves one of the two queues while both have jobs.
const TURN: Duration = Duration::from_secs(10);

/// Slots for large jobs, of those of a model: one that runs, and one that is ready when it ends, as soon as there are some to
/// spare. A model with a single slot has none: it runs large jobs like others, and takes turns where there are some already.
fn bulk_slots(slots: u16) -> u16 {
    (slots / 2).min(2)
}

/// What is left of some slots.
fn remaining(slots: u16, taken: usize) -> u16 {
    u16::try_from(usize::from(slots).saturating_sub(taken)).unwrap_or(0)
}

/// All consumers of a model in one session: of its jobs, and of its large jobs.
#[derive(Debug, Default)]
pub(crate) struct ModelConsumers {
    jobs: Consumers,
    bulk: Consumers,
    /// Unacknowledged deliveries from the quarantine.
    quarantined: usize,
    /// A single slot is for large jobs now, and since when it has been.
    bulk_turn: bool,
    turn_since: Option<Instant>,
}

impl ModelConsumers {
    /// The broker may send jobs.
    pub(crate) fn is_consuming(&self) -> bool {
        self.jobs.is_consuming() || self.bulk.is_consuming()
    }

    /// The broker may send jobs that are not large.
    pub(crate) fn is_consuming_jobs(&self) -> bool {
        self.jobs.is_consuming()
    }

    /// Decides which queue a single slot serves, from what waits in both: large jobs came there when there were more slots, or from
    /// workers that have more.
    pub(crate) fn take_turns(&mut self, jobs: u32, bulk: u32, now: Instant) {
        let is_over = self.turn_since.is_none_or(|since| now.saturating_duration_since(since) >= TURN);
        let bulk_turn = match (jobs > 0, bulk > 0) {
            (_, false) => false,
            (false, true) => true,
            (true, true) if is_over => !self.bulk_turn,
            (true, true) => self.bulk_turn,
        };
        if bulk_turn != self.bulk_turn || self.turn_since.is_none() {
            (self.bulk_turn, self.turn_since) = (bulk_turn, Some(now));
        }
    }

    /// No consumer is there, and none is stopping.
    pub(crate) fn is_over(&self) -> bool {
        self.jobs.is_over() && self.bulk.is_over()
    }

    /// Consumers of the model's jobs that live.
    pub(crate) fn live(&self) -> usize {
        self.jobs.live()
    }

    /// Deliveries that are neither acknowledged nor given back.
    pub(crate) fn unacked(&self) -> usize {
        self.jobs.unacked() + self.bulk.unacked() + self.quarantined
    }

    /// Whether large jobs have a queue of their own here.
    pub(crate) fn has_bulk(slots: u16) -> bool {
        bulk_slots(slots) > 0
    }

    pub(crate) fn delivered(&mut self, source: Source) {
        match source {
            Source::Jobs(consumer) => self.jobs.delivered(consumer),
            Source::Bulk(consumer) => self.bulk.delivered(consumer),
            Source::Quarantine => self.quarantined += 1,
        }
    }

    pub(crate) fn settled(&mut self, source: Source) {
        match source {
            Source::Jobs(consumer) => self.jobs.settled(consumer),
            Source::Bulk(consumer) => self.bulk.settled(consumer),
            Source::Quarantine => self.quarantined = self.quarantined.saturating_sub(1),
        }
    }

    /// The stream of a consumer has ended. False if the core did not ask for it.
    pub(crate) fn ended(&mut self, consumer: ConsumerId) -> bool {
        self.jobs.ended(consumer) && self.bulk.ended(consumer)
    }

    /// One step towards holding `wanted` jobs, and large ones beside them, within the slots.
    pub(crate) fn change(&mut self, wanted: u16, slots: u16, next: ConsumerId) -> Option<(JobQueue, Change)> {
        let of_bulk = if slots == 1 && self.bulk_turn { 1 } else { bulk_slots(slots) };
        let wanted_bulk = if wanted == 0 { 0 } else { of_bulk };
        // When there were more slots, either kind may have come by more than is its share now: the other one has to wait.
        let free = remaining(slots, self.committed());
        let bulk = self.bulk.change(wanted_bulk, of_bulk, free, next).map(|change| (JobQueue::Bulk, change));
        bulk.or_else(|| {
            let of_jobs = remaining(slots, self.bulk.committed().max(usize::from(of_bulk)));
            let change = self.jobs.change(wanted, of_jobs, free, next)?;
            Some((JobQueue::Jobs, change))
        })
    }

    /// Jobs that the broker may have under way to this worker or waits to hear about.
    fn committed(&self) -> usize {
        self.jobs.committed() + self.bulk.committed() + self.quarantined
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// Steps until nothing is to be done; the prefetches of the live consumers.
    fn settle(consumers: &mut Consumers, wanted: u16, slots: u16, next: &mut u64) -> Vec<u16> {
        while consumers.change(wanted, slots, slots, ConsumerId(*next)).is_some() {
            *next += 1;
        }
        consumers.leases.iter().filter(|lease| !lease.is_stopping).map(|lease| lease.prefetch).collect()
    }

    #[test]
    fn consumers_double_up_to_what_is_wanted_and_never_exceed_the_slots() {
        let (mut consumers, mut next) = (Consumers::default(), 0);
        assert_eq!(settle(&mut consumers, 1, 104, &mut next), [1]);
        assert_eq!(settle(&mut consumers, 4, 104, &mut next), [1, 1, 2]);
        assert_eq!(settle(&mut consumers, 4096, 104, &mut next), [1, 1, 2, 4, 8, 16, 32, 40]);
        assert_eq!(settle(&mut consumers, 4096, 104, &mut next).iter().sum::<u16>(), 104);
    }

    #[test]
    fn fewer_wanted_jobs_stop_the_newest_consumers_and_keep_the_rest() {
        let (mut consumers, mut next) = (Consumers::default(), 0);
        settle(&mut consumers, 64, 64, &mut next);
        assert_eq!(settle(&mut consumers, 40, 64, &mut next).iter().sum::<u16>(), 64, "not worth a change");
        assert_eq!(settle(&mut consumers, 1, 64, &mut next), [1, 1]);
        // What the stopped ones may still be sent takes slots.
        assert_eq!(settle(&mut consumers, 64, 64, &mut next), [1, 1]);
        for lease in consumers.leases.clone() {
            assert!(!lease.is_stopping || consumers.ended(lease.consumer));
        }
        assert_eq!(settle(&mut consumers, 64, 64, &mut next).iter().sum::<u16>(), 64);
    }

    #[test]
    fn large_jobs_have_slots_of_their_own_and_both_together_stay_within() {
        let (mut consumers, mut started) = (ModelConsumers::default(), HashMap::new());
        for next in 0.. {
            match consumers.change(64, 8, ConsumerId(next)) {
                Some((queue, Change::Start { consumer, prefetch })) => {
                    *started.entry(queue == JobQueue::Bulk).or_insert(0) += prefetch.get();
                    let source =
                        if queue == JobQueue::Bulk { Source::Bulk(consumer) } else { Source::Jobs(consumer) };
                    (0..prefetch.get()).for_each(|_| consumers.delivered(source));
                }
                Some((_, Change::Stop { .. })) => panic!("nothing is to be stopped"),
                None => break,
            }
        }
        assert_eq!((started[&true], started[&false], consumers.unacked()), (2, 6, 8));
        assert!(!ModelConsumers::has_bulk(1) && ModelConsumers::has_bulk(2));
    }

    #[test]
    fn a_single_slot_takes_turns_while_both_queues_have_jobs() {
        let (mut consumers, mut next, start) = (ModelConsumers::default(), 0, Instant::now());
        let mut serves = |consumers: &mut ModelConsumers, jobs, bulk, seconds| {
            consumers.take_turns(jobs, bulk, start + Duration::from_secs(seconds));
            while let Some((_, change)) = consumers.change(64, 1, ConsumerId(next)) {
                next += 1;
                if let Change::Stop { consumer } = change {
                    assert!(consumers.ended(consumer));
                }
            }
            assert_eq!(consumers.committed(), 1);
            if consumers.is_consuming_jobs() { JobQueue::Jobs } else { JobQueue::Bulk }
        };
        let (jobs, bulk) = (JobQueue::Jobs, JobQueue::Bulk);
        assert_eq!(serves(&mut consumers, 5, 0, 0), jobs);
        assert_eq!(serves(&mut consumers, 0, 5, 1), bulk);
        assert_eq!(serves(&mut consumers, 5, 5, 2), bulk);
        assert_eq!(serves(&mut consumers, 5, 5, 11), jobs);
        assert_eq!(serves(&mut consumers, 5, 5, 20), jobs);
        assert_eq!(serves(&mut consumers, 5, 5, 21), bulk);
        assert_eq!(serves(&mut consumers, 5, 0, 22), jobs);
        // Nothing waits: jobs come to their own queue first.
        assert_eq!(serves(&mut consumers, 0, 0, 23), jobs);
    }

    #[test]
    fn consumers_of_large_jobs_wait_while_jobs_of_more_slots_take_theirs() {
        let (mut consumers, stopped) = (ModelConsumers::default(), ConsumerId(99));
        (0..15).for_each(|_| consumers.delivered(Source::Jobs(stopped)));
        assert_eq!(consumers.change(64, 13, ConsumerId(1)), None, "the slots were more when the jobs came");
        (0..3).for_each(|_| consumers.settled(Source::Jobs(stopped)));
        let started = Change::Start { consumer: ConsumerId(1), prefetch: NonZeroU16::MIN };
        assert_eq!(consumers.change(64, 13, ConsumerId(1)), Some((JobQueue::Bulk, started)));
        assert_eq!(consumers.change(64, 13, ConsumerId(2)), None);
    }

    #[test]
    fn a_consumer_that_ends_by_itself_is_noticed() {
        let mut consumers = Consumers::default();
        settle(&mut consumers, 1, 1, &mut 7);
        assert!(!consumers.ended(ConsumerId(7)));
    }

    /// All that a model's live consumers may be sent is there.
    fn fill(consumers: &mut ModelConsumers, sources: &HashMap<ConsumerId, (Source, u16)>) {
        for (consumer, (source, prefetch)) in sources {
            let of = if matches!(source, Source::Bulk(_)) { &consumers.bulk } else { &consumers.jobs };
            let held = of.unacked.iter().find(|(to, _)| to == consumer).map_or(0, |(_, count)| *count);
            (held..usize::from(*prefetch)).for_each(|_| consumers.delivered(*source));
        }
    }

    proptest! {
        /// Slots come and go. What a consumer that starts may be sent has its slots, whatever both kinds of consumers hold.
        #[test]
        fn nobody_starts_beyond_the_slots(steps in prop::collection::vec((0u16..40, 1u16..40, 0usize..30), 1..40)) {
            let (mut consumers, mut live, mut next) = (ModelConsumers::default(), HashMap::new(), 0);
            for (wanted, slots, acks) in steps {
                while let Some((queue, change)) = consumers.change(wanted, slots, ConsumerId(next)) {
                    next += 1;
                    match change {
                        Change::Start { consumer, prefetch } => {
                            prop_assert!(consumers.committed() <= usize::from(slots));
                            let source =
                                if queue == JobQueue::Bulk { Source::Bulk(consumer) } else { Source::Jobs(consumer) };
                            live.insert(consumer, (source, prefetch.get()));
                        }
                        Change::Stop { consumer } => {
                            live.remove(&consumer);
                            prop_assert!(consumers.ended(consumer));
                        }
                    }
                }
                fill(&mut consumers, &live);
                for _ in 0..acks {
                    let bulk = consumers.bulk.unacked.first().map(|(consumer, _)| Source::Bulk(*consumer));
                    let jobs = consumers.jobs.unacked.first().map(|(consumer, _)| Source::Jobs(*consumer));
                    jobs.or(bulk).into_iter().for_each(|source| consumers.settled(source));
                }
            }
        }

        /// A broker that sends as much as it may: unacknowledged jobs never exceed the largest of the slots since they were sent.
        #[test]
        fn unacked_never_exceeds_the_slots(steps in prop::collection::vec((0u16..40, 1u16..40, 0usize..30), 1..40), slots in 1u16..40) {
            let (mut consumers, mut next) = (Consumers::default(), 0);
            for (wanted, _, acks) in steps {
                while let Some(change) = consumers.change(wanted, slots, slots, ConsumerId(next)) {
                    next += 1;
                    if let Change::Stop { consumer } = change {
                        prop_assert!(consumers.ended(consumer));
                    }
                }
                let leases = consumers.leases.clone();
                for lease in leases {
                    let held = |consumers: &Consumers| consumers.unacked.iter().find(|(to, _)| *to == lease.consumer).map_or(0, |(_, count)| *count);
                    while held(&consumers) < usize::from(lease.prefetch) {
                        consumers.delivered(lease.consumer);
                    }
                }
                prop_assert!(consumers.unacked() <= usize::from(slots));
                for _ in 0..acks {
                    if let Some((consumer, _)) = consumers.unacked.first().copied() {
                        consumers.settled(consumer);
                    }
                }
            }
        }
    }
}
