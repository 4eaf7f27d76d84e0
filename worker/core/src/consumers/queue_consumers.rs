//! The consumers of one queue. What comes in is how many jobs the worker wants to hold and may hold; what goes out is which consumer
//! starts or stops next. Owns the started consumers with their prefetch, and counts their unacknowledged deliveries.
//!
//! A prefetch does not change under a live consumer. So a worker has several, each with a part of its credit, and starts and stops them
//! one by one: the first consumer is for one job, and each further one for as many as all before it together. A new one never brings the
//! sum above twice the credit.
//!
//! Invariant: the jobs that the broker may send to live consumers, and the unsettled jobs of stopped consumers, together never exceed the
//! slots.

use std::num::NonZeroU16;

use super::remaining;
use crate::ids::ConsumerId;

/// The least size of a consumer for jobs beside the wanted ones, as a part of what all other consumers may be sent. The number of wanted
/// jobs varies, and many small consumers must not result.
const BESIDE_STEP_MIN: u16 = 4;

/// A consumer that was started and has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct StartedConsumer {
    pub(super) consumer: ConsumerId,
    pub(super) prefetch: u16,
    /// The broker was asked to stop it; what it had sent before may still come.
    pub(super) is_stopping: bool,
}

/// What to do about a model's consumers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Start { consumer: ConsumerId, prefetch: NonZeroU16 },
    Stop { consumer: ConsumerId },
}

/// The consumers of a queue in one session.
#[derive(Debug, Default)]
pub(super) struct QueueConsumers {
    /// Oldest first.
    pub(super) started: Vec<StartedConsumer>,
    /// Unacknowledged deliveries, by the consumer that they came to.
    pub(super) unacked: Vec<(ConsumerId, usize)>,
}

impl QueueConsumers {
    /// The broker may send jobs.
    pub(super) fn is_consuming(&self) -> bool {
        self.started.iter().any(|one| !one.is_stopping)
    }

    /// Whether no consumer is left, not even one that is stopping.
    pub(super) fn is_over(&self) -> bool {
        self.started.is_empty()
    }

    /// How many jobs the live consumers may be sent in total.
    fn prefetch(&self) -> u16 {
        self.started.iter().filter(|one| !one.is_stopping).map(|one| one.prefetch).sum()
    }

    pub(super) fn live(&self) -> usize {
        self.started.iter().filter(|one| !one.is_stopping).count()
    }

    /// Deliveries that are neither acknowledged nor given back.
    pub(super) fn unacked(&self) -> usize {
        self.unacked.iter().map(|(_, count)| count).sum()
    }

    pub(super) fn count_delivered(&mut self, to: ConsumerId) {
        match self.unacked.iter_mut().find(|(consumer, _)| *consumer == to) {
            Some((_, count)) => *count += 1,
            None => self.unacked.push((to, 1)),
        }
    }

    pub(super) fn count_settled(&mut self, from: ConsumerId) {
        if let Some(at) = self.unacked.iter().position(|(consumer, _)| *consumer == from) {
            let (_, count) = &mut self.unacked[at];
            *count -= 1;
            if *count == 0 {
                self.unacked.swap_remove(at);
            }
        }
    }

    /// A consumer's stream has ended. False if the core did not stop the consumer.
    pub(super) fn end_consumer(&mut self, consumer: ConsumerId) -> bool {
        let Some(at) = self.started.iter().position(|one| one.consumer == consumer) else { return true };
        self.started.remove(at).is_stopping
    }

    /// All consumers have ended, with their channel.
    pub(super) fn end_all(&mut self) {
        self.started.clear();
    }

    /// Slots taken: what consumers that have not ended may be sent, and the unsettled jobs of consumers that have.
    pub(super) fn committed(&self) -> usize {
        let of_started: usize = self.started.iter().map(|one| usize::from(one.prefetch)).sum();
        let has_ended = |consumer: ConsumerId| self.started.iter().all(|one| one.consumer != consumer);
        let of_ended = self.unacked.iter().filter(|(consumer, _)| has_ended(*consumer));
        of_started + of_ended.map(|(_, count)| count).sum::<usize>()
    }

    /// The next start or stop on the way to `wanted` jobs and some `beside` them, with at most `slots` jobs; `None` when no change is due.
    /// `free`: slots of the model that nothing takes. `next`: a consumer number that was not used before.
    pub(super) fn change(
        &mut self,
        wanted: u16,
        beside: u16,
        slots: u16,
        free: u16,
        next: ConsumerId,
    ) -> Option<Change> {
        let (wanted, live) = (wanted.min(slots), self.prefetch());
        let most = wanted.saturating_mul(2);
        if wanted == 0 || live > slots {
            return self.stop_newest();
        }
        // Up to twice as many as wanted is not worth a change: the load may come back.
        if self.prefetch_without_newest() >= most {
            return self.stop_newest();
        }
        if live >= wanted.saturating_add(beside).min(slots) {
            return None;
        }
        let room = remaining(slots, self.committed()).min(free);
        let step = live.max(1).min(slots - live).min(most.saturating_sub(live));
        if live >= wanted && step < live.div_ceil(BESIDE_STEP_MIN) {
            return None;
        }
        let prefetch = NonZeroU16::new(step.min(room))?;
        if prefetch.get() < step {
            // Jobs of stopped consumers still take slots. Wait for these, rather than start many small consumers.
            return None;
        }
        self.started.push(StartedConsumer { consumer: next, prefetch: prefetch.get(), is_stopping: false });
        Some(Change::Start { consumer: next, prefetch })
    }

    fn prefetch_without_newest(&self) -> u16 {
        let newest = self.started.iter().rev().find(|one| !one.is_stopping);
        self.prefetch() - newest.map_or(0, |one| one.prefetch)
    }

    fn stop_newest(&mut self) -> Option<Change> {
        let newest = self.started.iter_mut().rev().find(|one| !one.is_stopping)?;
        newest.is_stopping = true;
        Some(Change::Stop { consumer: newest.consumer })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Steps until nothing is to be done; the prefetches of the live consumers.
    fn settle(consumers: &mut QueueConsumers, wanted: u16, slots: u16, next: &mut u64) -> Vec<u16> {
        settle_beside(consumers, (wanted, 0), slots, next)
    }

    fn settle_beside(
        consumers: &mut QueueConsumers,
        (wanted, beside): (u16, u16),
        slots: u16,
        next: &mut u64,
    ) -> Vec<u16> {
        while consumers.change(wanted, beside, slots, slots, ConsumerId(*next)).is_some() {
            *next += 1;
        }
        consumers.started.iter().filter(|one| !one.is_stopping).map(|one| one.prefetch).collect()
    }

    #[test]
    fn consumers_double_up_to_what_is_wanted_and_never_exceed_the_slots() {
        let (mut consumers, mut next) = (QueueConsumers::default(), 0);
        assert_eq!(settle(&mut consumers, 1, 104, &mut next), [1]);
        assert_eq!(settle(&mut consumers, 4, 104, &mut next), [1, 1, 2]);
        assert_eq!(settle(&mut consumers, 4096, 104, &mut next), [1, 1, 2, 4, 8, 16, 32, 40]);
        assert_eq!(settle(&mut consumers, 4096, 104, &mut next).iter().sum::<u16>(), 104);
    }

    #[test]
    fn fewer_wanted_jobs_stop_the_newest_consumers_and_keep_the_rest() {
        let (mut consumers, mut next) = (QueueConsumers::default(), 0);
        settle(&mut consumers, 64, 64, &mut next);
        assert_eq!(settle(&mut consumers, 40, 64, &mut next).iter().sum::<u16>(), 64, "not worth a change");
        assert_eq!(settle(&mut consumers, 1, 64, &mut next), [1, 1]);
        // What the stopped ones may still be sent takes slots.
        assert_eq!(settle(&mut consumers, 64, 64, &mut next), [1, 1]);
        for one in consumers.started.clone() {
            assert!(!one.is_stopping || consumers.end_consumer(one.consumer));
        }
        assert_eq!(settle(&mut consumers, 64, 64, &mut next).iter().sum::<u16>(), 64);
    }

    #[test]
    fn jobs_beside_those_that_are_wanted_come_up_to_twice_as_many() {
        for wanted in 1..100 {
            let (mut consumers, mut next) = (QueueConsumers::default(), 0);
            let before: u16 = settle(&mut consumers, wanted, 1000, &mut next).iter().sum();
            for beside in 1..=wanted {
                let live = settle_beside(&mut consumers, (wanted, beside), 1000, &mut next);
                let (held, most) = (live.iter().sum::<u16>(), 2 * wanted);
                assert!(held <= most, "{live:?} for {wanted} and {beside}");
                assert!(held >= (wanted + beside).min(most - most / 5), "{live:?} for {wanted} and {beside}");
            }
            // Once the jobs beside them have ended, the extra consumers are not worth a change.
            let after = settle(&mut consumers, wanted, 1000, &mut next);
            assert!((before..=2 * wanted).contains(&after.iter().sum()), "{after:?} for {wanted}");
            assert!(after.len() <= 9, "{after:?} for {wanted}");
        }
        let (mut consumers, mut next) = (QueueConsumers::default(), 0);
        assert_eq!(settle_beside(&mut consumers, (8, 8), 11, &mut next), [1, 1, 2, 4, 3], "within the slots");
    }

    #[test]
    fn while_jobs_of_a_stopped_consumer_take_slots_no_small_consumer_starts() {
        let (mut consumers, mut next) = (QueueConsumers::default(), 0);
        assert_eq!(settle(&mut consumers, 4, 8, &mut next), [1, 1, 2]);
        let stopped = ConsumerId(99);
        (0..3).for_each(|_| consumers.count_delivered(stopped));
        assert_eq!(settle(&mut consumers, 8, 8, &mut next), [1, 1, 2], "one slot is free");
        (0..3).for_each(|_| consumers.count_settled(stopped));
        assert_eq!(settle(&mut consumers, 8, 8, &mut next), [1, 1, 2, 4]);
    }

    #[test]
    fn a_consumer_that_ends_by_itself_is_noticed() {
        let mut consumers = QueueConsumers::default();
        settle(&mut consumers, 1, 1, &mut 7);
        assert!(!consumers.end_consumer(ConsumerId(7)));
    }

    proptest! {
        /// A broker that sends as much as it may: unacknowledged jobs never exceed the largest of the slots since they were sent.
        #[test]
        fn unacked_never_exceeds_the_slots(steps in prop::collection::vec((0u16..40, 0u16..40, 0usize..30), 1..40), slots in 1u16..40) {
            let (mut consumers, mut next) = (QueueConsumers::default(), 0);
            for (wanted, beside, acks) in steps {
                while let Some(change) = consumers.change(wanted, beside, slots, slots, ConsumerId(next)) {
                    next += 1;
                    if let Change::Stop { consumer } = change {
                        prop_assert!(consumers.end_consumer(consumer));
                    }
                }
                let started = consumers.started.clone();
                for one in started {
                    let held = |consumers: &QueueConsumers| {
                        let unacked = consumers.unacked.iter().find(|(to, _)| *to == one.consumer);
                        unacked.map_or(0, |(_, count)| *count)
                    };
                    while held(&consumers) < usize::from(one.prefetch) {
                        consumers.count_delivered(one.consumer);
                    }
                }
                prop_assert!(consumers.unacked() <= usize::from(slots));
                for _ in 0..acks {
                    if let Some((consumer, _)) = consumers.unacked.first().copied() {
                        consumers.count_settled(consumer);
                    }
                }
            }
        }
    }
}
