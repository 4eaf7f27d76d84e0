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

/// How long a slot serves a queue that has jobs, while others that have some wait for it: each change cancels a consumer, and what
/// was on its way to that comes back to the broker.
const TURN: Duration = Duration::from_secs(10);

/// How many of a model's `slots` serve large jobs, if the worker wants to hold `wanted` of them. A model with a single slot has none for
/// them: it runs large jobs like others, and its queues take turns while both have jobs.
fn bulk_slots(slots: u16, wanted: u16) -> u16 {
    (slots / 2).min(wanted)
}

/// What is left of some slots.
fn remaining(slots: u16, taken: usize) -> u16 {
    u16::try_from(usize::from(slots).saturating_sub(taken)).unwrap_or(0)
}

/// A queue in which jobs wait, although a consumer of this worker could have been sent some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starved {
    /// The broker counts no other consumers of it.
    Alone,
    /// The broker counts others, too, which should have taken the jobs.
    BesideOthers,
}

/// All consumers of a model in one session: of its jobs, and of its large jobs.
#[derive(Debug)]
pub(crate) struct ModelConsumers {
    /// Of each queue that jobs come from; the first is the model's own.
    queues: Vec<QueueConsumers>,
    shares: Shares,
    /// Further queues that cannot be consumed, and why.
    missing: BTreeMap<QueueIndex, String>,
    bulk: QueueConsumers,
    /// Unacknowledged deliveries from the quarantine.
    quarantined: usize,
    /// A single slot is for large jobs now, and since when it has been.
    bulk_turn: bool,
    turn_since: Option<Instant>,
    /// Large jobs that wait in their queue: as it was counted last, and those that this worker has moved there since.
    bulk_waiting: u32,
    /// That queue was counted full, and has not been emptied by a fifth since.
    bulk_is_full: bool,
}

impl ModelConsumers {
    /// Of queues with these weights: the model's own, and further ones.
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

    /// The broker may send jobs.
    pub(crate) fn is_consuming(&self) -> bool {
        self.queues.iter().any(QueueConsumers::is_consuming) || self.bulk.is_consuming()
    }

    /// The broker has counted what waits in each queue: this decides the queues' shares of the slots, and what a single slot serves.
    pub(crate) fn queues_counted(&mut self, counts: &QueueCounts, now: Instant) {
        let queues = &self.queues;
        self.shares.queues_counted(&counts.jobs, now, |at| queues[at].committed());
        self.give_single_slot(counts, now);
    }

    /// Whether a single slot is for large jobs from now on. Large jobs came to their queue when there were more slots, or from workers
    /// that have more.
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

    /// No consumer is there, and none is stopping.
    pub(crate) fn is_over(&self) -> bool {
        self.queues.iter().all(QueueConsumers::is_over) && self.bulk.is_over()
    }

    /// Consumers of the model's own queue that live.
    pub(crate) fn live(&self) -> usize {
        self.queues.first().map_or(0, QueueConsumers::live)
    }

    /// Consumers of large jobs that live.
    pub(crate) fn live_bulk(&self) -> usize {
        self.bulk.live()
    }

    /// Deliveries that are neither acknowledged nor given back.
    pub(crate) fn unacked(&self) -> usize {
        self.queues.iter().map(QueueConsumers::unacked).sum::<usize>()
            + self.bulk.unacked()
            + self.quarantined
    }

    /// So many large jobs wait in their queue. Whether it has become full, with `max` of them.
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

    /// A large job goes to the queue of large jobs.
    pub(crate) fn moved_to_bulk(&mut self) {
        self.bulk_waiting = self.bulk_waiting.saturating_add(1);
    }

    /// Whether large jobs have a queue of their own here.
    pub(crate) fn has_bulk(slots: u16) -> bool {
        bulk_slots(slots, 1) > 0
    }

    /// A delivery came; the queue that it came from, if it is one of jobs.
    pub(crate) fn delivered(&mut self, source: Source) -> Option<QueueIndex> {
        match source {
            Source::Jobs(queue, consumer) => {
                self.queues[queue.0].delivered(consumer);
                return Some(queue);
            }
            Source::Bulk(consumer) => self.bulk.delivered(consumer),
            Source::Quarantine => self.quarantined += 1,
        }
        None
    }

    pub(crate) fn settled(&mut self, source: Source) {
        match source {
            Source::Jobs(queue, consumer) => self.queues[queue.0].settled(consumer),
            Source::Bulk(consumer) => self.bulk.settled(consumer),
            Source::Quarantine => self.quarantined = self.quarantined.saturating_sub(1),
        }
    }

    /// The stream of a consumer has ended. The queue that it consumed, if the core did not ask for its end.
    pub(crate) fn ended(&mut self, consumer: ConsumerId) -> Option<JobQueue> {
        if let Some(at) = self.queues.iter_mut().position(|queue| !queue.ended(consumer)) {
            return Some(JobQueue::Jobs(QueueIndex(at)));
        }
        (!self.bulk.ended(consumer)).then_some(JobQueue::Bulk)
    }

    /// The channel of a further queue's jobs is closed: its consumers have ended. What they brought runs to its end.
    pub(crate) fn channel_closed(&mut self, queue: QueueIndex) {
        self.queues[queue.0].all_ended();
    }

    /// A further queue cannot be consumed, for this reason: the others have its slots. Whether that is news.
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

    /// One step towards holding the `wanted` jobs within the slots.
    pub(crate) fn change(
        &mut self,
        wanted: Wanted,
        slots: u16,
        next: ConsumerId,
    ) -> Option<(JobQueue, Change)> {
        let has_turn = slots == 1 && self.bulk_turn;
        let of_bulk = if has_turn { wanted.large.min(1) } else { bulk_slots(slots, wanted.large) };
        // When there were more slots, either kind may have come by more than is its share now: the other one has to wait.
        let free = remaining(slots, self.committed());
        let bulk = self.bulk.change(of_bulk, 0, of_bulk, free, next).map(|change| (JobQueue::Bulk, change));
        bulk.or_else(|| {
            let of_jobs = remaining(slots, self.bulk.committed().max(usize::from(of_bulk)));
            let (change, at) = self.change_of_jobs(wanted, of_jobs, free, next)?;
            Some((JobQueue::Jobs(QueueIndex(at)), change))
        })
    }

    /// One step towards holding `wanted` jobs, of each queue its share.
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
            // A queue of which nothing is held cannot be seen to have jobs, but once a second.
            jobs => self.shares.divide(jobs.max(each).min(slots)),
        };
        let (jobs, all) = (divided(wanted.jobs), divided(wanted.jobs.saturating_add(wanted.beside)));
        let mut queues = self.queues.iter_mut().enumerate();
        queues.find_map(|(at, queue)| {
            let beside = all[at].saturating_sub(jobs[at]);
            Some((queue.change(jobs[at], beside, at_most[at], free, next)?, at))
        })
    }

    /// Jobs that the broker may have under way to this worker or waits to hear about.
    fn committed(&self) -> usize {
        let of_jobs: usize = self.queues.iter().map(QueueConsumers::committed).sum();
        of_jobs + self.bulk.committed() + self.quarantined
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
