//! Decides when a worker runs quarantined jobs. Jobs that may crash workers run alone, with no other job unacknowledged: a worker
//! that dies of one loses no other job, and no other job is blamed. Also notices consumers that the broker forgot.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::event::QueueCounts;
use crate::ids::{ModelIndex, QueueIndex};
use crate::random::Random;

/// Checks, a second apart, at which jobs waited that this worker has slots for, before it assumes that the broker does not
/// deliver to it. RabbitMQ 3.10 forgets the consumer of a queue that is deleted and declared again at once.
const STARVED_LOOKS: u32 = 10;

/// The same while the broker counts other consumers of the queue. They may be other workers, of which one should have taken the jobs;
/// or the broker lets only one consume at a time; or, on 3.10, they are consumers of a deleted quorum queue, which it counts beside
/// those of the queue's successor.
const STARVED_LOOKS_BESIDE_OTHERS: u32 = 30;

/// How long a worker takes quarantined jobs and nothing else, before it turns to other jobs for as long.
const ISOLATING_MAX: Duration = Duration::from_secs(10);

/// How long a session that follows a lost one has to stand before the worker takes quarantined jobs: if it is lost as well, others
/// would take that for a crash, and repeated disconnects alone could dead-letter an innocent job.
const POST_RECONNECT_DELAY: Duration = Duration::from_secs(10);

/// Workers that take quarantined jobs at the same time, for each such job.
const WORKERS_PER_JOB: u64 = 2;

/// The state over one session.
#[derive(Debug)]
pub(crate) struct Quarantine {
    /// The model whose quarantined jobs run, and nothing else.
    isolating: Option<ModelIndex>,
    /// When the first of them was asked for.
    since: Option<Instant>,
    /// When the quarantine may be checked again.
    look_at: Instant,
    /// Models whose queues the broker was asked to count, without an answer yet.
    counting: Vec<ModelIndex>,
    /// A quarantined job was asked for, without an answer yet.
    is_fetching: bool,
    /// For each queue of jobs: consecutive checks at which jobs waited and none had been delivered.
    starved: HashMap<(ModelIndex, QueueIndex), u32>,
}

impl Quarantine {
    pub(crate) fn new(after_a_loss: bool, now: Instant) -> Self {
        let delay = if after_a_loss { POST_RECONNECT_DELAY } else { Duration::ZERO };
        Self {
            isolating: None,
            since: None,
            look_at: now + delay,
            counting: Vec::new(),
            is_fetching: false,
            starved: HashMap::new(),
        }
    }

    pub(crate) fn isolating(&self) -> Option<ModelIndex> {
        self.isolating
    }

    pub(crate) fn is_fetching(&self) -> bool {
        self.is_fetching
    }

    /// The models whose queues are to be counted now; none while an answer is due. By asking each second rather than by a
    /// consumer, which would have quarantined jobs delivered beside others.
    pub(crate) fn start_counting(&mut self, models: impl Iterator<Item = ModelIndex>) -> Vec<ModelIndex> {
        if self.isolating.is_some() || !self.counting.is_empty() {
            return Vec::new();
        }
        self.counting = models.collect();
        self.counting.clone()
    }

    pub(crate) fn counted(&mut self, model: ModelIndex) {
        self.counting.retain(|other| *other != model);
    }

    /// Not all workers stop for one job: each second a few of those that consume the model's own queue do, by chance. `own`
    /// consumers of that queue are this worker's; others are taken to have as many.
    pub(crate) fn is_our_turn(
        &self,
        counts: &QueueCounts,
        own: usize,
        now: Instant,
        random: &mut Random,
    ) -> bool {
        if counts.quarantined == 0 || self.look_at > now {
            return false;
        }
        let consumers = counts.jobs.first().map_or(0, |own| own.consumers);
        let workers = (u64::from(consumers) / own.max(1) as u64).max(1);
        random.below(workers) < u64::from(counts.quarantined).saturating_mul(WORKERS_PER_JOB)
    }

    pub(crate) fn isolate(&mut self, model: ModelIndex) {
        (self.isolating, self.since) = (Some(model), None);
    }

    /// Whether to ask for a quarantined job now, given that no other job is unacknowledged.
    pub(crate) fn fetch(&mut self, now: Instant) -> Option<ModelIndex> {
        let model = self.isolating.filter(|_| !self.is_fetching)?;
        let since = *self.since.get_or_insert(now);
        if now.saturating_duration_since(since) >= ISOLATING_MAX {
            return None;
        }
        self.is_fetching = true;
        Some(model)
    }

    pub(crate) fn fetched(&mut self) {
        self.is_fetching = false;
    }

    /// None are left, or other jobs have waited for long enough: they have as much time now.
    pub(crate) fn end_isolation(&mut self, now: Instant) {
        let lasted = self.since.map_or(ISOLATING_MAX, |since| now.saturating_duration_since(since));
        self.look_at = now + lasted.min(ISOLATING_MAX);
        self.isolating = None;
    }

    /// Whether the time for quarantined jobs is over, given that none is unacknowledged.
    pub(crate) fn has_lasted_too_long(&self, now: Instant) -> bool {
        let is_long = self.since.is_some_and(|since| now.saturating_duration_since(since) >= ISOLATING_MAX);
        self.isolating.is_some() && is_long && !self.is_fetching
    }

    /// A job of a queue was delivered: its consumer is alive.
    pub(crate) fn delivered(&mut self, model: ModelIndex, queue: QueueIndex) {
        self.starved.remove(&(model, queue));
    }

    /// Records whether jobs waited at a check while the queue's consumer got none. True once the consumer counts as dead.
    /// `has_others`: the broker counts other consumers of the queue.
    pub(crate) fn looked(
        &mut self,
        model: ModelIndex,
        queue: QueueIndex,
        is_starved: bool,
        has_others: bool,
    ) -> bool {
        let looks = self.starved.entry((model, queue)).or_default();
        *looks = if is_starved { *looks + 1 } else { 0 };
        *looks >= if has_others { STARVED_LOOKS_BESIDE_OTHERS } else { STARVED_LOOKS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::QueueCount;

    const MODEL: ModelIndex = ModelIndex(0);
    const QUEUE: QueueIndex = QueueIndex(0);

    fn counts(quarantined: u32, consumers: u32) -> QueueCounts {
        QueueCounts { jobs: vec![QueueCount { waiting: 0, consumers }], bulk: 0, quarantined }
    }

    #[test]
    fn a_few_of_many_workers_take_a_turn() {
        let now = Instant::now();
        let (quarantine, mut random) = (Quarantine::new(false, now), Random::new(3));
        let mut turns = |counts: QueueCounts, own| {
            (0..1000).filter(|_| quarantine.is_our_turn(&counts, own, now, &mut random)).count()
        };
        assert_eq!(turns(counts(0, 10), 1), 0);
        assert_eq!(turns(counts(1, 1), 1), 1000);
        let some = turns(counts(1, 10), 1);
        assert!((150..250).contains(&some), "{some}");
        // Ten consumers of two workers.
        assert_eq!(turns(counts(1, 10), 5), 1000);
    }

    #[test]
    fn isolation_ends_and_others_get_as_much_time() {
        let start = Instant::now();
        let mut quarantine = Quarantine::new(true, start);
        let mut random = Random::new(1);
        assert!(!quarantine.is_our_turn(&counts(1, 1), 1, start, &mut random), "right after a lost session");
        let start = start + POST_RECONNECT_DELAY;
        assert!(quarantine.is_our_turn(&counts(1, 1), 1, start, &mut random));
        quarantine.isolate(MODEL);
        assert_eq!(quarantine.fetch(start), Some(MODEL));
        assert_eq!(quarantine.fetch(start), None, "one at a time");
        quarantine.fetched();
        let late = start + ISOLATING_MAX;
        assert!(quarantine.fetch(late).is_none() && quarantine.has_lasted_too_long(late));
        quarantine.end_isolation(late);
        assert_eq!(quarantine.isolating(), None);
        assert!(!quarantine.is_our_turn(&counts(1, 1), 1, late + ISOLATING_MAX / 2, &mut random));
        assert!(quarantine.is_our_turn(&counts(1, 1), 1, late + ISOLATING_MAX, &mut random));
    }

    #[test]
    fn a_consumer_without_deliveries_is_taken_for_dead_only_after_some_looks() {
        let mut quarantine = Quarantine::new(false, Instant::now());
        let other = QueueIndex(1);
        assert!((1..STARVED_LOOKS).all(|_| !quarantine.looked(MODEL, QUEUE, true, false)));
        quarantine.delivered(MODEL, other);
        assert!(!quarantine.looked(MODEL, QUEUE, true, true) && quarantine.looked(MODEL, QUEUE, true, false));
        quarantine.delivered(MODEL, QUEUE);
        assert!(!quarantine.looked(MODEL, QUEUE, true, false));
        quarantine.delivered(MODEL, QUEUE);
        assert!((1..STARVED_LOOKS_BESIDE_OTHERS).all(|_| !quarantine.looked(MODEL, QUEUE, true, true)));
        assert!(quarantine.looked(MODEL, QUEUE, true, true));
        assert!(!quarantine.looked(MODEL, QUEUE, false, true), "nothing waits any more");
    }
}
