//! All consumers of a model in one session. What comes in is how many jobs are wanted, the slots, and what waits at the broker; what goes
//! out is which consumer starts or stops next. The queue of large jobs has a few slots of its own, and the queues that jobs come from
//! share the others by weight (`shares.rs`).
//!
//! Invariant: the jobs that the broker may send to live consumers, and the unsettled jobs of stopped consumers, together never exceed the
//! slots.

mod queue_consumers;
mod shares;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

pub(crate) use queue_consumers::Change;
use queue_consumers::QueueConsumers;
use shares::Shares;

use crate::action::JobQueue;
use crate::credit::Wanted;
use crate::event::{QueueCounts, Source};
use crate::ids::{ConsumerId, QueueIndex};

/// How long a slot serves one queue while other queues with jobs wait for it. Each change cancels a consumer, and jobs on their way to that
/// consumer go back to the broker.
const TURN: Duration = Duration::from_secs(10);

/// How many of a model's `slots` serve large jobs, if the worker wants to hold `wanted` of them. A model with a single slot reserves none:
/// its job queues and the queue of large jobs take turns while both have jobs.
fn bulk_slots(slots: u16, wanted: u16) -> u16 {
    (slots / 2).min(wanted)
}

/// `slots` without `taken`, at least 0.
fn remaining(slots: u16, taken: usize) -> u16 {
    u16::try_from(usize::from(slots).saturating_sub(taken)).unwrap_or(0)
}

/// A queue in which jobs wait although a consumer of this worker has room for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starved {
    /// The broker counts no other consumers of it.
    Alone,
    /// The broker counts other consumers too. One of them should have taken the jobs.
    BesideOthers,
}

/// All consumers of a model in one session: of its jobs, and of its large jobs.
#[derive(Debug)]
pub(crate) struct ModelConsumers {
    /// The consumers of each queue that jobs come from; the first queue is the model's own.
    queues: Vec<QueueConsumers>,
    shares: Shares,
    /// Further queues that cannot be consumed, and why.
    missing: BTreeMap<QueueIndex, String>,
    bulk: QueueConsumers,
    /// Unacknowledged deliveries from the quarantine.
    quarantined: usize,
    /// Whether the model's single slot now serves large jobs, and since when that has not changed.
    bulk_turn: bool,
    turn_since: Option<Instant>,
    /// Large jobs in their queue: the last count, plus those that this worker has moved there since.
    bulk_waiting: u32,
    /// The queue of large jobs was counted full and has not been counted a fifth below that since.
    bulk_is_full: bool,
}

impl ModelConsumers {
    /// `weights`: of the model's own queue first, then of its further queues.
    pub(crate) fn new(weights: impl IntoIterator<Item = NonZeroU32>) -> Self {
        let weights: Vec<_> = weights.into_iter().collect();
        Self {
            queues: weights.iter().map(|_| QueueConsumers::default()).collect(),
            shares: Shares::new(weights),
            missing: BTreeMap::new(),
            bulk: QueueConsumers::default(),
            quarantined: 0,
            bulk_turn: false,
            turn_since: None,
            bulk_waiting: 0,
            bulk_is_full: false,
        }
    }

    /// Whether the broker may send jobs.
    pub(crate) fn is_consuming(&self) -> bool {
        self.queues.iter().any(QueueConsumers::is_consuming) || self.bulk.is_consuming()
    }

    /// The broker has counted the jobs in each queue. Updates the queues' shares of the slots, and what a single slot serves.
    pub(crate) fn queues_counted(&mut self, counts: &QueueCounts, now: Instant) {
        let queues = &self.queues;
        self.shares.queues_counted(&counts.jobs, now, |at| queues[at].committed());
        self.give_single_slot(counts, now);
    }

    /// Decides whether the model's single slot serves large jobs from now on. Large jobs can wait even so: they were moved to their queue
    /// by a worker with more slots, or by this one when it had more.
    fn give_single_slot(&mut self, counts: &QueueCounts, now: Instant) {
        let is_over = self.turn_since.is_none_or(|since| now.saturating_duration_since(since) >= TURN);
        let has_jobs = counts.jobs.iter().any(|count| count.waiting > 0);
        let has_large = counts.bulk.waiting > 0;
        let bulk_turn = match (has_jobs, has_large) {
            (_, false) => false,
            (false, true) => true,
            (true, true) if is_over => !self.bulk_turn,
            (true, true) => self.bulk_turn,
        };
        if bulk_turn != self.bulk_turn || self.turn_since.is_none() {
            (self.bulk_turn, self.turn_since) = (bulk_turn, Some(now));
        }
    }

    /// Whether jobs wait in a queue of jobs although this worker consumes it and holds none of them.
    pub(crate) fn starved(&self, queue: QueueIndex, counts: &QueueCounts) -> Option<Starved> {
        let (queue, count) = (self.queues.get(queue.0)?, counts.jobs.get(queue.0)?);
        let holds_nothing = queue.unacked() == 0 && self.quarantined == 0;
        let is_starved = holds_nothing && count.waiting > 0 && queue.is_consuming();
        let has_others = count.consumers as usize > queue.live().max(1);
        is_starved.then_some(if has_others { Starved::BesideOthers } else { Starved::Alone })
    }

    /// Whether no consumer is left, not even one that is stopping.
    pub(crate) fn is_over(&self) -> bool {
        self.queues.iter().all(QueueConsumers::is_over) && self.bulk.is_over()
    }

    /// Consumers of the model's own queue that are not stopping.
    pub(crate) fn live(&self) -> usize {
        self.queues.first().map_or(0, QueueConsumers::live)
    }

    /// Consumers of large jobs that are not stopping.
    pub(crate) fn live_bulk(&self) -> usize {
        self.bulk.live()
    }

    /// Deliveries that are neither acknowledged nor given back.
    pub(crate) fn unacked(&self) -> usize {
        self.queues.iter().map(QueueConsumers::unacked).sum::<usize>()
            + self.bulk.unacked()
            + self.quarantined
    }

    /// Records how many large jobs wait in their queue. True if the queue has just become full, with `max` of them.
    pub(crate) fn bulk_counted(&mut self, waiting: u32, max: u32) -> bool {
        let was_full = self.bulk_is_full;
        self.bulk_waiting = waiting;
        self.bulk_is_full = waiting >= max || (was_full && waiting > max / 5 * 4);
        self.bulk_is_full && !was_full
    }

    /// Whether one more large job may wait in their queue.
    pub(crate) fn has_room_in_bulk(&self, max: u32) -> bool {
        !self.bulk_is_full && self.bulk_waiting < max
    }

    /// Counts a large job that this worker moves to the queue of large jobs.
    pub(crate) fn moved_to_bulk(&mut self) {
        self.bulk_waiting = self.bulk_waiting.saturating_add(1);
    }

    /// Whether a model with so many slots has a separate queue for large jobs.
    pub(crate) fn has_bulk(slots: u16) -> bool {
        bulk_slots(slots, 1) > 0
    }

    /// Counts a delivery. Returns its queue, unless that is the queue of large jobs or the quarantine.
    pub(crate) fn count_delivered(&mut self, source: Source) -> Option<QueueIndex> {
        match source {
            Source::Jobs(queue, consumer) => {
                self.queues[queue.0].count_delivered(consumer);
                return Some(queue);
            }
            Source::Bulk(consumer) => self.bulk.count_delivered(consumer),
            Source::Quarantine => self.quarantined += 1,
        }
        None
    }

    /// A delivery was acknowledged or given back.
    pub(crate) fn count_settled(&mut self, source: Source) {
        match source {
            Source::Jobs(queue, consumer) => self.queues[queue.0].count_settled(consumer),
            Source::Bulk(consumer) => self.bulk.count_settled(consumer),
            Source::Quarantine => self.quarantined = self.quarantined.saturating_sub(1),
        }
    }

    /// A consumer's stream has ended. Returns the consumer's queue if the core did not stop the consumer.
    pub(crate) fn end_consumer(&mut self, consumer: ConsumerId) -> Option<JobQueue> {
        if let Some(at) = self.queues.iter_mut().position(|queue| !queue.end_consumer(consumer)) {
            return Some(JobQueue::Jobs(QueueIndex(at)));
        }
        (!self.bulk.end_consumer(consumer)).then_some(JobQueue::Bulk)
    }

    /// The channel of a further queue is closed, and its consumers have ended with it. Jobs already delivered still run to their end.
    pub(crate) fn channel_closed(&mut self, queue: QueueIndex) {
        self.queues[queue.0].end_all();
    }

    /// A further queue cannot be consumed because of `why`; the other queues get its slots. True if that was not known, or for another
    /// reason.
    pub(crate) fn set_missing(&mut self, queue: QueueIndex, why: &str) -> bool {
        self.shares.set_missing(queue.0, true);
        self.missing.insert(queue, why.to_owned()).as_deref() != Some(why)
    }

    pub(crate) fn is_missing(&self, queue: QueueIndex) -> bool {
        self.missing.contains_key(&queue)
    }

    /// A further queue can be consumed again.
    pub(crate) fn set_found(&mut self, queue: QueueIndex) {
        self.shares.set_missing(queue.0, false);
        self.missing.remove(&queue);
    }

    /// The next start or stop of a consumer on the way to `wanted` jobs within the slots; `None` when no change is due.
    pub(crate) fn change(
        &mut self,
        wanted: Wanted,
        slots: u16,
        next: ConsumerId,
    ) -> Option<(JobQueue, Change)> {
        let has_turn = slots == 1 && self.bulk_turn;
        let of_bulk = if has_turn { wanted.large.min(1) } else { bulk_slots(slots, wanted.large) };
        // After a shrink of the slots, large jobs or other jobs may hold more than their share. The other kind then waits for free slots.
        let free = remaining(slots, self.committed());
        let bulk = self.bulk.change(of_bulk, 0, of_bulk, free, next).map(|change| (JobQueue::Bulk, change));
        bulk.or_else(|| {
            let of_jobs = remaining(slots, self.bulk.committed().max(usize::from(of_bulk)));
            let (change, at) = self.change_of_jobs(wanted, of_jobs, free, next)?;
            Some((JobQueue::Jobs(QueueIndex(at)), change))
        })
    }

    /// The same for the queues of jobs, each with its share.
    fn change_of_jobs(
        &mut self,
        wanted: Wanted,
        slots: u16,
        free: u16,
        next: ConsumerId,
    ) -> Option<(Change, usize)> {
        // Nearly every model has one queue.
        if let [queue] = &mut self.queues[..] {
            return queue.change(wanted.jobs, wanted.beside, slots, free, next).map(|change| (change, 0));
        }
        let present = self.queues.len() - self.missing.len();
        if usize::from(slots) >= present {
            self.shares.forget_turns();
        }
        let at_most = self.shares.divide(slots);
        let each = u16::try_from(present).unwrap_or(u16::MAX);
        let divided = |jobs: u16| match jobs {
            0 => vec![0; self.queues.len()],
            // Every queue gets at least one job. Otherwise a queue of which nothing is held would be seen to have jobs only once a second.
            jobs => self.shares.divide(jobs.max(each).min(slots)),
        };
        let (jobs, all) = (divided(wanted.jobs), divided(wanted.jobs.saturating_add(wanted.beside)));
        let mut queues = self.queues.iter_mut().enumerate();
        queues.find_map(|(at, queue)| {
            let beside = all[at].saturating_sub(jobs[at]);
            Some((queue.change(jobs[at], beside, at_most[at], free, next)?, at))
        })
    }

    /// The same as `QueueConsumers::committed` for all queues, and the unsettled quarantined jobs.
    fn committed(&self) -> usize {
        let of_jobs: usize = self.queues.iter().map(QueueConsumers::committed).sum();
        of_jobs + self.bulk.committed() + self.quarantined
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
