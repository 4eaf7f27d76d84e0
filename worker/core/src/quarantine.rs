//! Decides when a worker runs quarantined jobs. Jobs that may crash workers run alone, with no other job unacknowledged. A worker that
//! crashes then loses no other job, and no other job is blamed. Also detects consumers that the broker has forgotten.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::consumers::Starved;
use crate::event::QueueCounts;
use crate::ids::{ModelIndex, QueueIndex};
use crate::random::Random;
use crate::sizes::Size;

/// After so many checks, a second apart, at which jobs waited although this worker has slots for them, its consumer counts as dead.
/// RabbitMQ 3.10 forgets the consumer of a queue that is deleted and declared again at once.
const STARVED_CHECKS: u32 = 10;

/// The same while the broker counts other consumers of the queue. These may be other workers, one of which should have taken the jobs. Or
/// the queue allows a single active consumer. Or, on 3.10, they are consumers of a deleted quorum queue, which the broker counts with those
/// of its successor.
const STARVED_CHECKS_BESIDE_OTHERS: u32 = 30;

/// How long a worker takes only quarantined jobs before it takes other jobs for as long. This includes the wait for the jobs that it still
/// holds.
const ISOLATING_MAX: Duration = Duration::from_secs(10);

/// The least time until the next isolation, if this one interrupted fetches of inputs. Otherwise inputs that are fetched again each time
/// might never arrive.
const FETCHING_MIN: Duration = Duration::from_secs(60);

/// How long a session that follows a lost one must stay open before the worker takes quarantined jobs. If it were lost as well, other
/// workers would count a crash, and repeated disconnects alone could dead-letter an innocent job.
const POST_RECONNECT_DELAY: Duration = Duration::from_secs(10);

/// The quarantine's state for one session.
#[derive(Debug)]
pub(crate) struct Quarantine {
    isolation: Option<Isolation>,
    /// How long the next isolation may last. Doubled after an isolation whose time ended before the other jobs did.
    time: Duration,
    /// When the quarantine may be checked again.
    check_at: Instant,
    /// Models whose queues the broker was asked to count, without an answer yet.
    counting: Vec<ModelIndex>,
    /// A quarantined job was requested, and the answer is due.
    is_taking: bool,
    /// For each queue of jobs: consecutive checks at which jobs waited and none had been delivered.
    starved: HashMap<(ModelIndex, QueueIndex), u32>,
}

/// The worker takes quarantined jobs of a model, and nothing else.
#[derive(Clone, Copy, Debug)]
struct Isolation {
    model: ModelIndex,
    since: Instant,
    /// Nothing else is unacknowledged any more, and the first quarantined job was requested.
    has_begun: bool,
    /// It requeued jobs whose inputs were being fetched.
    cut_fetches: bool,
}

impl Quarantine {
    pub(crate) fn new(after_a_loss: bool, now: Instant) -> Self {
        let delay = if after_a_loss { POST_RECONNECT_DELAY } else { Duration::ZERO };
        Self {
            isolation: None,
            time: ISOLATING_MAX,
            check_at: now + delay,
            counting: Vec::new(),
            is_taking: false,
            starved: HashMap::new(),
        }
    }

    /// Given so many queues of all models.
    pub(crate) fn size(&self, queues: usize) -> Size {
        Size::of("queues that are watched", self.counting.len().max(self.starved.len()), queues)
    }

    pub(crate) fn is_isolating(&self) -> bool {
        self.isolation.is_some()
    }

    /// Whether quarantined jobs of this model wait until the worker holds no other jobs.
    pub(crate) fn is_waiting_for(&self, model: ModelIndex) -> bool {
        self.isolation.is_some_and(|isolation| isolation.model == model && !isolation.has_begun)
    }

    /// Whether a quarantined job was requested in this isolation.
    pub(crate) fn has_begun(&self) -> bool {
        self.isolation.is_some_and(|isolation| isolation.has_begun)
    }

    pub(crate) fn is_taking(&self) -> bool {
        self.is_taking
    }

    /// The models whose queues must be counted now; none while an answer is due. A consumer of the quarantine would be simpler, but would
    /// receive its jobs beside others.
    pub(crate) fn start_counting(&mut self, models: impl Iterator<Item = ModelIndex>) -> Vec<ModelIndex> {
        if !self.counting.is_empty() {
            return Vec::new();
        }
        self.counting = models.filter(|model| !self.is_isolating() || self.is_waiting_for(*model)).collect();
        self.counting.clone()
    }

    pub(crate) fn counted(&mut self, model: ModelIndex) {
        self.counting.retain(|other| *other != model);
    }

    /// Whether this worker takes its turn. Not all workers stop for one job: each second, by chance, about one worker stops for each
    /// quarantined job. `own`: this worker's consumers of the model's own queue; other workers are assumed to have as many.
    pub(crate) fn is_our_turn(
        &self,
        counts: &QueueCounts,
        own: usize,
        now: Instant,
        random: &mut Random,
    ) -> bool {
        if counts.quarantined == 0 || self.check_at > now {
            return false;
        }
        let consumers = counts.jobs.first().map_or(0, |own| own.consumers);
        let workers = (u64::from(consumers) / own.max(1) as u64).max(1);
        random.below(workers) < u64::from(counts.quarantined)
    }

    pub(crate) fn isolate(&mut self, model: ModelIndex, now: Instant) {
        self.isolation = Some(Isolation { model, since: now, has_begun: false, cut_fetches: false });
    }

    /// Records that fetches of inputs were interrupted: by the isolation, if there is one.
    pub(crate) fn cuts_fetches(&mut self) {
        if let Some(isolation) = &mut self.isolation {
            isolation.cut_fetches = true;
        }
    }

    /// The model of which to take a quarantined job now. The caller has checked that no other job is unacknowledged.
    pub(crate) fn take(&mut self, now: Instant) -> Option<ModelIndex> {
        if self.is_taking || self.is_time_over(now) {
            return None;
        }
        let isolation = self.isolation.as_mut()?;
        (isolation.has_begun, self.is_taking) = (true, true);
        Some(isolation.model)
    }

    pub(crate) fn taken(&mut self) {
        self.is_taking = false;
    }

    /// Ends the isolation: no quarantined jobs are left, or its time is over. Other jobs get as much time now.
    pub(crate) fn end_isolation(&mut self, now: Instant) {
        let is_outlasted = !self.has_begun() && self.is_time_over(now);
        let Some(isolation) = self.isolation.take() else { return };
        let for_others = if isolation.cut_fetches { FETCHING_MIN } else { Duration::ZERO };
        self.check_at = now + now.saturating_duration_since(isolation.since).max(for_others);
        // So that some later isolation is long enough, however long passes are.
        self.time = if is_outlasted { self.time.saturating_mul(2) } else { ISOLATING_MAX };
    }

    /// Whether the isolation has had its time.
    pub(crate) fn is_time_over(&self, now: Instant) -> bool {
        self.lasted(now).is_some_and(|lasted| lasted >= self.time)
    }

    /// Whether half of that time is over.
    pub(crate) fn is_half_time_over(&self, now: Instant) -> bool {
        self.lasted(now).is_some_and(|lasted| lasted >= self.time / 2)
    }

    fn lasted(&self, now: Instant) -> Option<Duration> {
        self.isolation.map(|isolation| now.saturating_duration_since(isolation.since))
    }

    /// A job of a queue was delivered: its consumer is alive.
    pub(crate) fn delivered(&mut self, model: ModelIndex, queue: QueueIndex) {
        self.starved.remove(&(model, queue));
    }

    /// Records one check of a queue. True once the consumer counts as dead.
    pub(crate) fn checked(&mut self, model: ModelIndex, queue: QueueIndex, starved: Option<Starved>) -> bool {
        let checks = self.starved.entry((model, queue)).or_default();
        let checks_max = match starved {
            None => {
                *checks = 0;
                return false;
            }
            Some(Starved::Alone) => STARVED_CHECKS,
            Some(Starved::BesideOthers) => STARVED_CHECKS_BESIDE_OTHERS,
        };
        *checks += 1;
        *checks >= checks_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::QueueCount;

    const MODEL: ModelIndex = ModelIndex(0);
    const QUEUE: QueueIndex = QueueIndex(0);

    fn counts(quarantined: u32, consumers: u32) -> QueueCounts {
        QueueCounts {
            jobs: vec![QueueCount { waiting: 0, consumers }],
            quarantined,
            ..QueueCounts::default()
        }
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
        assert!((60..140).contains(&some), "{some}");
        // Ten consumers, five of each of two workers.
        assert_eq!(turns(counts(2, 10), 5), 1000);
        assert!((400..600).contains(&turns(counts(1, 10), 5)), "one of the two is enough");
    }

    #[test]
    fn isolation_ends_and_others_get_as_much_time() {
        let start = Instant::now();
        let mut quarantine = Quarantine::new(true, start);
        let mut random = Random::new(1);
        assert!(!quarantine.is_our_turn(&counts(1, 1), 1, start, &mut random), "right after a lost session");
        let start = start + POST_RECONNECT_DELAY;
        assert!(quarantine.is_our_turn(&counts(1, 1), 1, start, &mut random));
        quarantine.isolate(MODEL, start);
        assert!(quarantine.is_waiting_for(MODEL));
        assert_eq!(quarantine.take(start), Some(MODEL));
        assert!(quarantine.has_begun() && !quarantine.is_waiting_for(MODEL));
        assert_eq!(quarantine.take(start), None, "one at a time");
        quarantine.taken();
        let late = start + ISOLATING_MAX;
        assert!(quarantine.take(late).is_none() && quarantine.is_time_over(late));
        quarantine.end_isolation(late);
        assert!(!quarantine.is_isolating());
        assert!(!quarantine.is_our_turn(&counts(1, 1), 1, late + ISOLATING_MAX / 2, &mut random));
        assert!(quarantine.is_our_turn(&counts(1, 1), 1, late + ISOLATING_MAX, &mut random));
    }

    #[test]
    fn an_isolation_that_passes_outlast_is_followed_by_a_longer_one() {
        let mut now = Instant::now();
        let mut quarantine = Quarantine::new(false, now);
        let mut random = Random::new(1);
        for time in [ISOLATING_MAX, ISOLATING_MAX * 2, ISOLATING_MAX * 4] {
            quarantine.isolate(MODEL, now);
            assert!(!quarantine.is_time_over(now + time - Duration::from_millis(1)));
            now += time;
            assert!(quarantine.is_time_over(now) && quarantine.take(now).is_none());
            quarantine.end_isolation(now);
            assert!(!quarantine.is_our_turn(&counts(1, 1), 1, now + time / 2, &mut random), "others' time");
            now += time;
            assert!(quarantine.is_our_turn(&counts(1, 1), 1, now, &mut random));
        }
        quarantine.isolate(MODEL, now);
        assert_eq!(quarantine.take(now + ISOLATING_MAX * 7), Some(MODEL));
        quarantine.taken();
        quarantine.end_isolation(now + ISOLATING_MAX * 7);
        quarantine.isolate(MODEL, now);
        assert!(quarantine.is_time_over(now + ISOLATING_MAX));
    }

    #[test]
    fn queues_are_counted_again_when_all_answers_have_come() {
        let (now, other) = (Instant::now(), ModelIndex(1));
        let mut quarantine = Quarantine::new(false, now);
        let count = |quarantine: &mut Quarantine| quarantine.start_counting([MODEL, other].into_iter());
        assert_eq!(count(&mut quarantine), [MODEL, other]);
        assert_eq!(count(&mut quarantine), []);
        quarantine.counted(MODEL);
        assert_eq!(count(&mut quarantine), []);
        quarantine.counted(other);
        assert_eq!(count(&mut quarantine), [MODEL, other]);
        // While it waits for its other jobs: only whether the quarantined ones are still there.
        [MODEL, other].into_iter().for_each(|model| quarantine.counted(model));
        quarantine.isolate(MODEL, now);
        assert_eq!(count(&mut quarantine), [MODEL]);
        quarantine.counted(MODEL);
        quarantine.take(now);
        assert_eq!(count(&mut quarantine), []);
    }

    #[test]
    fn an_isolation_takes_one_quarantined_job_after_the_other() {
        let now = Instant::now();
        let mut quarantine = Quarantine::new(false, now);
        quarantine.isolate(MODEL, now);
        for _ in 0..3 {
            assert_eq!((quarantine.take(now), quarantine.is_taking()), (Some(MODEL), true));
            quarantine.taken();
        }
        assert!(!quarantine.is_taking());
    }

    #[test]
    fn after_an_isolation_that_interrupted_fetches_they_have_a_minute() {
        let (now, mut random) = (Instant::now(), Random::new(1));
        let mut quarantine = Quarantine::new(false, now);
        quarantine.isolate(MODEL, now);
        quarantine.cuts_fetches();
        quarantine.end_isolation(now);
        let mut is_our_turn = |after| quarantine.is_our_turn(&counts(1, 1), 1, now + after, &mut random);
        assert!(!is_our_turn(FETCHING_MIN - Duration::from_millis(1)));
        assert!(is_our_turn(FETCHING_MIN));
    }

    #[test]
    fn an_isolation_that_other_workers_made_needless_does_not_make_the_next_one_longer() {
        let now = Instant::now();
        let mut quarantine = Quarantine::new(false, now);
        quarantine.isolate(MODEL, now);
        quarantine.end_isolation(now + ISOLATING_MAX / 2);
        quarantine.isolate(MODEL, now);
        assert!(quarantine.is_time_over(now + ISOLATING_MAX));
    }

    #[test]
    fn a_consumer_without_deliveries_counts_as_dead_only_after_some_checks() {
        let mut quarantine = Quarantine::new(false, Instant::now());
        let (other, alone, beside_others) =
            (QueueIndex(1), Some(Starved::Alone), Some(Starved::BesideOthers));
        assert!((1..STARVED_CHECKS).all(|_| !quarantine.checked(MODEL, QUEUE, alone)));
        quarantine.delivered(MODEL, other);
        assert!(!quarantine.checked(MODEL, QUEUE, beside_others));
        assert!(quarantine.checked(MODEL, QUEUE, alone));
        quarantine.delivered(MODEL, QUEUE);
        assert!(!quarantine.checked(MODEL, QUEUE, alone));
        quarantine.delivered(MODEL, QUEUE);
        assert!((1..STARVED_CHECKS_BESIDE_OTHERS).all(|_| !quarantine.checked(MODEL, QUEUE, beside_others)));
        assert!(quarantine.checked(MODEL, QUEUE, beside_others));
        assert!(!quarantine.checked(MODEL, QUEUE, None), "nothing waits any more");
    }
}
