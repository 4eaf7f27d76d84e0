//! Tests of a model's consumers: prefetches, slots, and who has them.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::event::QueueCount;

fn consumers(weights: &[u32]) -> ModelConsumers {
    ModelConsumers::new(weights.iter().filter_map(|weight| NonZeroU32::new(*weight)))
}

/// So much waits in each queue of jobs, and in that of large ones.
fn counts(jobs: &[u32], bulk: u32) -> QueueCounts {
    let count = |waiting: u32| QueueCount { waiting, consumers: 1 };
    let jobs = jobs.iter().map(|waiting| count(*waiting)).collect();
    QueueCounts { jobs, bulk: count(bulk), quarantined: 0 }
}

/// So many jobs are wanted, and two large ones beside them if there are any.
fn wanted(jobs: u16) -> Wanted {
    Wanted { jobs, beside: 0, large: jobs.min(2) }
}

fn source(queue: JobQueue, consumer: ConsumerId) -> Source {
    match queue {
        JobQueue::Jobs(queue) => Source::Jobs(queue, consumer),
        JobQueue::Bulk => Source::Bulk(consumer),
    }
}

/// A broker that has jobs without end in some queues and sends what it may.
#[derive(Default)]
struct Broker {
    live: HashMap<ConsumerId, (JobQueue, u16)>,
    started: u64,
}

impl Broker {
    /// Carries out the changes that are due; the broker confirms the end of consumers at once.
    fn change(
        &mut self,
        consumers: &mut ModelConsumers,
        wanted: Wanted,
        slots: u16,
    ) -> Result<(), TestCaseError> {
        while let Some((queue, change)) = consumers.change(wanted, slots, ConsumerId(self.started)) {
            self.started += 1;
            match change {
                Change::Start { consumer, prefetch } => {
                    prop_assert!(consumers.committed() <= usize::from(slots));
                    self.live.insert(consumer, (queue, prefetch.get()));
                }
                Change::Stop { consumer } => {
                    self.live.remove(&consumer);
                    prop_assert_eq!(consumers.end_consumer(consumer), None);
                }
            }
        }
        Ok(())
    }

    /// All that the live consumers may be sent is sent.
    fn fill(&self, consumers: &mut ModelConsumers, has_jobs: impl Fn(JobQueue) -> bool) {
        for (consumer, (queue, prefetch)) in self.live.iter().filter(|(_, (queue, _))| has_jobs(*queue)) {
            let held = held_by(consumers, *queue, *consumer);
            (held..usize::from(*prefetch)).for_each(|_| {
                consumers.count_delivered(source(*queue, *consumer));
            });
        }
    }
}

fn of(consumers: &ModelConsumers, queue: JobQueue) -> &QueueConsumers {
    match queue {
        JobQueue::Jobs(queue) => &consumers.queues[queue.0],
        JobQueue::Bulk => &consumers.bulk,
    }
}

fn held_by(consumers: &ModelConsumers, queue: JobQueue, consumer: ConsumerId) -> usize {
    let unacked = &of(consumers, queue).unacked;
    unacked.iter().find(|(to, _)| *to == consumer).map_or(0, |(_, count)| *count)
}

/// Settles one job of a queue, if it has one.
fn settle_one(consumers: &mut ModelConsumers, queue: JobQueue) -> bool {
    let QueueConsumers { started, unacked } = of(consumers, queue);
    let is_stopped = |consumer: &ConsumerId| started.iter().all(|one| one.consumer != *consumer);
    // What came to consumers that have stopped is the oldest.
    let mut held = unacked.iter().map(|(consumer, _)| *consumer);
    let oldest = held.clone().find(is_stopped).or_else(|| held.next());
    oldest.is_some_and(|consumer| {
        consumers.count_settled(source(queue, consumer));
        true
    })
}

const OWN: JobQueue = JobQueue::Jobs(QueueIndex(0));
const SECOND: JobQueue = JobQueue::Jobs(QueueIndex(1));

#[test]
fn large_jobs_have_slots_of_their_own_and_both_together_stay_within() {
    let (mut consumers, mut broker) = (consumers(&[1]), Broker::default());
    broker.change(&mut consumers, wanted(64), 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!((consumers.bulk.unacked(), consumers.queues[0].unacked(), consumers.unacked()), (2, 6, 8));
    let own = broker.live.iter().filter(|(_, (queue, _))| *queue == OWN).count();
    assert_eq!((consumers.live(), own > 0), (own, true));
    assert!(!ModelConsumers::has_bulk(1) && ModelConsumers::has_bulk(2));
}

#[test]
fn a_large_job_that_is_not_wanted_any_more_runs_and_none_follows_it() {
    let (mut consumers, mut broker) = (consumers(&[1]), Broker::default());
    let one = Wanted { jobs: 64, beside: 0, large: 1 };
    broker.change(&mut consumers, wanted(64), 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!(consumers.bulk.unacked(), 2);
    broker.change(&mut consumers, one, 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!((consumers.bulk.unacked(), consumers.bulk.live(), consumers.unacked()), (2, 1, 8));
    // The one of the stopped consumer ends first: its slot is for other jobs now.
    settle_one(&mut consumers, JobQueue::Bulk);
    broker.change(&mut consumers, one, 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!((consumers.bulk.unacked(), consumers.queues[0].unacked()), (1, 7));
    // Two again: other jobs have to end before.
    broker.change(&mut consumers, wanted(64), 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!(consumers.bulk.unacked(), 1);
    (0..3).for_each(|_| assert!(settle_one(&mut consumers, OWN)));
    broker.change(&mut consumers, wanted(64), 8).unwrap();
    broker.fill(&mut consumers, |_| true);
    assert_eq!((consumers.bulk.unacked(), consumers.unacked()), (2, 8));
}

#[test]
fn a_single_slot_takes_turns_while_both_queues_have_jobs() {
    let (mut consumers, mut broker, start) = (consumers(&[1]), Broker::default(), Instant::now());
    let mut serves = |jobs, bulk, seconds| {
        consumers.queues_counted(&counts(&[jobs], bulk), start + Duration::from_secs(seconds));
        broker.change(&mut consumers, wanted(64), 1).unwrap();
        assert_eq!(consumers.committed(), 1);
        if consumers.queues[0].is_consuming() { OWN } else { JobQueue::Bulk }
    };
    assert_eq!(serves(5, 0, 0), OWN);
    assert_eq!(serves(0, 5, 1), JobQueue::Bulk);
    assert_eq!(serves(5, 5, 2), JobQueue::Bulk);
    assert_eq!(serves(5, 5, 11), OWN);
    assert_eq!(serves(5, 5, 20), OWN);
    assert_eq!(serves(5, 5, 21), JobQueue::Bulk);
    assert_eq!(serves(5, 0, 22), OWN);
    // Nothing waits: jobs come to their own queue first.
    assert_eq!(serves(0, 0, 23), OWN);
}

#[test]
fn consumers_of_large_jobs_wait_while_jobs_of_more_slots_take_theirs() {
    let (mut consumers, stopped) = (consumers(&[1]), ConsumerId(99));
    for _ in 0..15 {
        consumers.count_delivered(source(OWN, stopped));
    }
    assert_eq!(
        consumers.change(wanted(64), 13, ConsumerId(1)),
        None,
        "the slots were more when the jobs came"
    );
    (0..3).for_each(|_| consumers.count_settled(source(OWN, stopped)));
    let started = Change::Start { consumer: ConsumerId(1), prefetch: std::num::NonZeroU16::MIN };
    assert_eq!(consumers.change(wanted(64), 13, ConsumerId(1)), Some((JobQueue::Bulk, started)));
    assert_eq!(consumers.change(wanted(64), 13, ConsumerId(2)), None);
}

#[test]
fn slots_move_between_queues_as_jobs_come_and_go() {
    let (mut consumers, mut broker, now) = (consumers(&[3, 1]), Broker::default(), Instant::now());
    let prefetch = |consumers: &ModelConsumers| {
        let of = |at: usize| {
            let live = consumers.queues[at].started.iter().filter(|one| !one.is_stopping);
            live.map(|one| one.prefetch).sum::<u16>()
        };
        [of(0), of(1)]
    };
    // 66 slots, of which two are for large jobs. Only the second queue has jobs, and it has them all.
    consumers.queues_counted(&counts(&[0, 999], 0), now);
    broker.change(&mut consumers, wanted(4096), 66).unwrap();
    assert_eq!(prefetch(&consumers), [1, 63]);
    broker.fill(&mut consumers, |queue| queue == SECOND);
    // Jobs come to the first. What the second holds stays until it is settled; then each has its share.
    consumers.queues_counted(&counts(&[999, 999], 0), now);
    for _ in 0..200 {
        broker.change(&mut consumers, wanted(4096), 66).unwrap();
        broker.fill(&mut consumers, |queue| queue != JobQueue::Bulk);
        settle_one(&mut consumers, SECOND);
    }
    broker.change(&mut consumers, wanted(4096), 66).unwrap();
    assert_eq!(prefetch(&consumers), [48, 16]);
}

#[test]
fn a_delivery_is_of_the_queue_of_its_consumer_also_after_that_has_stopped() {
    let (mut consumers, mut broker) = (consumers(&[1, 1]), Broker::default());
    broker.change(&mut consumers, wanted(8), 8).unwrap();
    let consumer = *broker.live.iter().find(|(_, (queue, _))| *queue == SECOND).unwrap().0;
    let source = source(SECOND, consumer);
    assert_eq!(consumers.count_delivered(source), Some(QueueIndex(1)));
    broker.change(&mut consumers, wanted(0), 8).unwrap();
    assert_eq!((consumers.unacked(), consumers.queues[1].unacked(), consumers.is_over()), (1, 1, true));
    consumers.count_settled(source);
    assert_eq!((consumers.unacked(), consumers.committed()), (0, 0));
}

#[test]
fn a_consumed_queue_that_delivers_nothing_is_noticed_even_if_it_is_not_the_first() {
    let (mut consumers, mut broker) = (consumers(&[1, 1]), Broker::default());
    broker.change(&mut consumers, wanted(8), 8).unwrap();
    let second = QueueIndex(1);
    assert_eq!(consumers.starved(second, &counts(&[0, 0], 9)), None);
    assert_eq!(consumers.starved(second, &counts(&[0, 5], 0)), Some(Starved::Alone));
    let mut beside_others = counts(&[0, 5], 0);
    beside_others.jobs[1].consumers = 100;
    assert_eq!(consumers.starved(second, &beside_others), Some(Starved::BesideOthers));
    // Another queue brings jobs.
    let consumer_of =
        |wanted| broker.live.iter().find(|(_, (queue, _))| *queue == wanted).map(|(consumer, _)| *consumer);
    consumers.count_delivered(source(OWN, consumer_of(OWN).unwrap()));
    let both = counts(&[5, 5], 0);
    assert_eq!(
        (consumers.starved(QueueIndex(0), &both), consumers.starved(second, &both)),
        (None, Some(Starved::Alone))
    );
    consumers.count_delivered(source(SECOND, consumer_of(SECOND).unwrap()));
    assert_eq!(consumers.starved(second, &both), None, "it holds something");
}

#[test]
fn a_queue_that_is_missing_has_no_consumers_and_lends_all_its_slots() {
    let (mut consumers, mut broker, now) = (consumers(&[3, 1]), Broker::default(), Instant::now());
    consumers.queues_counted(&counts(&[0, 999], 0), now);
    broker.change(&mut consumers, wanted(64), 10).unwrap();
    broker.fill(&mut consumers, |queue| queue == SECOND);
    let second = QueueIndex(1);
    assert!(consumers.set_missing(second, "gone") && !consumers.set_missing(second, "gone"));
    // Its consumers are stopped; what it has brought keeps its slots.
    broker.change(&mut consumers, wanted(64), 10).unwrap();
    assert!(!consumers.queues[1].is_consuming() && consumers.is_missing(second));
    assert_eq!((consumers.queues[1].unacked(), consumers.committed()), (7, 10));
    while settle_one(&mut consumers, SECOND) {}
    broker.change(&mut consumers, wanted(64), 10).unwrap();
    broker.fill(&mut consumers, |queue| queue == OWN);
    assert_eq!(consumers.queues[0].unacked(), 8, "all but those of large jobs");
    // A single slot is for the queues that are there.
    for second in 0..60 {
        consumers.queues_counted(&counts(&[5, 0], 0), now + Duration::from_secs(second));
        assert_eq!(consumers.shares.divide(1), [1, 0]);
    }
    // It is back, and has its share as soon as jobs wait in it.
    consumers.set_found(second);
    consumers.queues_counted(&counts(&[5, 5], 0), now);
    assert_eq!(consumers.shares.divide(8), [6, 2]);
    assert!(consumers.set_missing(second, "gone again"));
}

#[test]
fn consumers_end_with_the_channel_of_their_queue() {
    let (mut consumers, mut broker) = (consumers(&[1, 1]), Broker::default());
    broker.change(&mut consumers, wanted(8), 8).unwrap();
    consumers.channel_closed(QueueIndex(1));
    assert!(!consumers.queues[1].is_consuming() && consumers.queues[0].is_consuming());
    for (consumer, (queue, _)) in broker.live {
        // What lapin says of the same consumer comes later.
        let expected = (queue != SECOND).then_some(queue);
        assert_eq!(consumers.end_consumer(consumer), expected);
    }
}

#[test]
fn while_there_are_slots_for_all_queues_none_waits_for_its_turn() {
    let (mut consumers, mut broker, start) = (consumers(&[3, 1]), Broker::default(), Instant::now());
    let mut second_has = 0;
    for second in 0..1080 {
        consumers.queues_counted(&counts(&[5, 5], 0), start + Duration::from_secs(second));
        // Four slots, of which two are for large jobs; then one.
        broker.change(&mut consumers, wanted(64), if second < 1000 { 4 } else { 1 }).unwrap();
        second_has += u32::from(second >= 1000 && consumers.queues[1].is_consuming());
    }
    assert!((10..=35).contains(&second_has), "{second_has} of 80 seconds");
}

#[test]
fn a_full_queue_of_large_jobs_takes_more_only_once_a_fifth_of_it_is_gone() {
    let mut consumers = consumers(&[1]);
    let mut counted = |waiting| (consumers.bulk_counted(waiting, 10), consumers.has_room_in_bulk(10));
    assert_eq!([counted(8), counted(9)], [(false, true); 2]);
    assert_eq!(counted(10), (true, false), "it has just become full");
    assert_eq!([counted(11), counted(10), counted(9)], [(false, false); 3]);
    assert_eq!([counted(8), counted(9)], [(false, true); 2]);
    assert_eq!(counted(10), (true, false), "full again");
    assert_eq!(counted(8), (false, true));
    consumers.moved_to_bulk();
    assert!(consumers.has_room_in_bulk(10));
    consumers.moved_to_bulk();
    assert!(!consumers.has_room_in_bulk(10), "jobs that were moved since the count take room");
}

#[test]
fn a_worker_consumes_until_the_last_consumer_of_any_queue_has_stopped() {
    let (mut consumers, mut broker) = (consumers(&[1]), Broker::default());
    assert!(!consumers.is_consuming() && consumers.is_over());
    broker.change(&mut consumers, wanted(8), 8).unwrap();
    assert!(consumers.is_consuming() && !consumers.is_over());
    assert_eq!(consumers.live_bulk(), 2);
    // Only consumers of large jobs are left.
    consumers.channel_closed(QueueIndex(0));
    assert!(consumers.is_consuming() && !consumers.is_over());
    consumers.change(Wanted { jobs: 0, beside: 0, large: 0 }, 8, ConsumerId(100));
    assert_eq!((consumers.live_bulk(), consumers.is_over()), (1, false));
    consumers.change(Wanted { jobs: 0, beside: 0, large: 0 }, 8, ConsumerId(100));
    assert!(!consumers.is_consuming() && !consumers.is_over(), "they are stopping");
}

#[test]
fn as_many_consumers_as_this_worker_has_are_its_own() {
    let (mut consumers, mut broker) = (consumers(&[1]), Broker::default());
    broker.change(&mut consumers, wanted(8), 8).unwrap();
    let starved_beside = |consumers_of_all: usize| {
        let mut counts = counts(&[5], 0);
        counts.jobs[0].consumers = u32::try_from(consumers_of_all).unwrap();
        consumers.starved(QueueIndex(0), &counts)
    };
    let own = consumers.live();
    assert!(own > 1);
    assert_eq!(starved_beside(own), Some(Starved::Alone));
    assert_eq!(starved_beside(own + 1), Some(Starved::BesideOthers));
}

#[test]
fn a_quarantined_job_takes_a_slot_until_it_is_settled() {
    let mut consumers = consumers(&[1]);
    assert_eq!(consumers.count_delivered(Source::Quarantine), None);
    assert_eq!((consumers.unacked(), consumers.committed()), (1, 1));
    consumers.count_settled(Source::Quarantine);
    assert_eq!((consumers.unacked(), consumers.committed()), (0, 0));
}

#[test]
fn a_missing_queue_is_wanted_no_job_for() {
    let (mut consumers, mut broker) = (consumers(&[1, 1]), Broker::default());
    consumers.set_missing(QueueIndex(1), "gone");
    let one = Wanted { jobs: 1, beside: 0, large: 0 };
    broker.change(&mut consumers, one, 8).unwrap();
    let prefetches: Vec<_> = broker.live.values().copied().collect();
    assert_eq!(prefetches, [(OWN, 1)]);
}

proptest! {
    /// Slots, wishes and waiting jobs come and go. What a consumer that starts may be sent has its slots, whatever all queues hold.
    #[test]
    fn no_consumer_starts_beyond_the_slots(
        weights in prop::collection::vec(1u32..9, 1..5),
        steps in prop::collection::vec(
            ((0u16..40, 0u16..40, 0u16..3), 1u16..40, 0usize..30, prop::collection::vec(0u32..2, 4)),
            1..40,
        ),
    ) {
        let (mut consumers, mut broker, now) = (consumers(&weights), Broker::default(), Instant::now());
        for ((jobs, beside, large), slots, acks, waiting) in steps {
            consumers.queues_counted(&counts(&waiting[..weights.len()], waiting[0]), now);
            broker.change(&mut consumers, Wanted { jobs, beside, large }, slots)?;
            broker.fill(&mut consumers, |_| true);
            for at in 0..acks {
                let queue = JobQueue::Jobs(QueueIndex(at % weights.len()));
                if !settle_one(&mut consumers, queue) {
                    settle_one(&mut consumers, JobQueue::Bulk);
                }
            }
        }
    }

    /// While all queues have jobs, each comes to hold its share of the slots to within one job; a share below one is one.
    #[test]
    fn queues_that_are_full_hold_their_shares(
        weights in prop::collection::vec(1u32..9, 2..5),
        slots in 12u16..200,
        first in 0usize..5,
    ) {
        let (mut consumers, mut broker, now) = (consumers(&weights), Broker::default(), Instant::now());
        // One of them has had all slots before.
        let first = first % weights.len();
        let alone: Vec<_> = (0..weights.len()).map(|at| u32::from(at == first)).collect();
        consumers.queues_counted(&counts(&alone, 0), now);
        broker.change(&mut consumers, wanted(4096), slots)?;
        broker.fill(&mut consumers, |queue| queue == JobQueue::Jobs(QueueIndex(first)));
        let of_jobs = slots - bulk_slots(slots, 2);
        for _ in 0..2 * slots {
            consumers.queues_counted(&counts(&vec![9; weights.len()], 0), now);
            broker.change(&mut consumers, wanted(4096), slots)?;
            broker.fill(&mut consumers, |queue| queue != JobQueue::Bulk);
            for at in 0..weights.len() {
                settle_one(&mut consumers, JobQueue::Jobs(QueueIndex(at)));
            }
        }
        broker.change(&mut consumers, wanted(4096), slots)?;
        broker.fill(&mut consumers, |queue| queue != JobQueue::Bulk);
        let held: Vec<_> = consumers.queues.iter().map(QueueConsumers::unacked).collect();
        prop_assert_eq!(held.iter().sum::<usize>(), usize::from(of_jobs), "work is left at the broker: {:?}", held);
        let total: u32 = weights.iter().sum();
        let raised = held.iter().filter(|held| **held == 1).count() as f64;
        for (held, weight) in held.iter().zip(&weights) {
            let exact = f64::from(of_jobs) * f64::from(*weight) / f64::from(total);
            prop_assert!(*held == 1 || (*held as f64 - exact).abs() <= 1.0 + raised, "{held} of {exact}");
        }
    }
}
