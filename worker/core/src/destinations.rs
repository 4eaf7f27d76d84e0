//! Remembers reply queues that are full or silent, so that the jobs of their callers do not take the slots of other callers. What comes in
//! is how the broker took each reply; what goes out is whether a job has to wait unrun.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::event::PublicationOutcome;
use crate::sizes::Size;

/// The most jobs with the same full reply queue that a worker holds: one whose reply is published again, and one that follows
/// when there is room. Further ones wait unrun.
const HELD_MAX: usize = 2;

/// How long a reply queue counts as full after it refused a reply: jobs that waited that long may try it again.
const FULL_FOR: Duration = Duration::from_secs(10);

/// The same after it did not confirm one, in times of what a confirm may take, because that is how long it takes to notice again. From
/// the third time in a row on twice as long each time, up to [`SILENT_MAX`]: less than a job waits for a full queue before it is
/// dead-lettered, so that a queue that confirms again is noticed in time.
const SILENT_FOR: u32 = 4;
const SILENT_MAX: Duration = Duration::from_secs(600);

/// Such reply queues that are kept in mind.
const FULL_MAX: usize = 1024;

/// A reply queue that does not take replies.
#[derive(Clone, Copy, Debug)]
struct Closed {
    /// When that was noticed last.
    at: Instant,
    /// For how long it counts as full or silent.
    lasts: Duration,
    /// How often in a row it did not confirm a reply. 0: it refused one.
    silences: u32,
}

impl Closed {
    fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= self.lasts
    }

    /// A silent queue is remembered for as long again: then one job tries it.
    fn is_forgotten(&self, now: Instant) -> bool {
        let remembered = if self.silences > 0 { self.lasts.saturating_mul(2) } else { self.lasts };
        now.saturating_duration_since(self.at) >= remembered
    }

    /// How many jobs may try it. The first silence may have been the whole broker's. But RabbitMQ 3.10 holds up the whole channel for
    /// a first reply to a quorum queue without its majority, and each further try would hold up the replies of all other callers.
    fn tries(&self, now: Instant) -> usize {
        match (self.silences, self.is_over(now)) {
            (0 | 1, true) => usize::MAX,
            (0 | 1, false) => HELD_MAX,
            (_, true) => 1,
            (_, false) => 0,
        }
    }
}

/// What is known of reply queues.
#[derive(Debug)]
pub(crate) struct Destinations {
    /// How long a confirm may take.
    confirm_max: Duration,
    /// Those that are full or silent.
    closed: HashMap<String, Closed>,
    /// Unacknowledged jobs by reply queue. Bounded by the slots.
    held: HashMap<String, usize>,
}

impl Destinations {
    /// A confirm of a reply may take so long.
    pub(crate) fn new(confirm_max: Duration) -> Self {
        Self { confirm_max, closed: HashMap::new(), held: HashMap::new() }
    }

    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let full = Size::of("full reply queues", self.closed.len(), FULL_MAX);
        [full, Size::of("reply queues of jobs", self.held.len(), unacked)]
    }

    /// A session begins: no job is held.
    pub(crate) fn session_opened(&mut self) {
        self.held.clear();
    }

    pub(crate) fn delivered(&mut self, queue: Option<&str>) {
        let Some(queue) = queue else { return };
        match self.held.get_mut(queue) {
            Some(held) => *held += 1,
            None => drop(self.held.insert(queue.to_owned(), 1)),
        }
    }

    pub(crate) fn settled(&mut self, queue: Option<&str>) {
        let Some((queue, held)) = queue.and_then(|queue| Some((queue, self.held.get_mut(queue)?))) else {
            return;
        };
        *held -= 1;
        if *held == 0 {
            self.held.remove(queue);
        }
    }

    /// A reply was published to the queue.
    pub(crate) fn published(&mut self, queue: Option<&str>, outcome: &PublicationOutcome, now: Instant) {
        let Some(queue) = queue else { return };
        let closed = match outcome {
            PublicationOutcome::Refused { .. } => Closed { at: now, lasts: FULL_FOR, silences: 0 },
            PublicationOutcome::Unreachable { .. } => self.silent(queue, now),
            PublicationOutcome::Confirmed { .. } if !self.closed.is_empty() => {
                self.closed.remove(queue);
                return;
            }
            _ => return,
        };
        self.closed.retain(|_, closed| !closed.is_forgotten(now));
        if self.closed.len() < FULL_MAX || self.closed.contains_key(queue) {
            self.closed.insert(queue.to_owned(), closed);
        }
    }

    /// The queue did not confirm a reply.
    fn silent(&self, queue: &str, now: Instant) -> Closed {
        let known = self.closed.get(queue).filter(|closed| closed.silences > 0 && !closed.is_forgotten(now));
        // Replies that were on their way together are one silence.
        let is_same = |closed: &&Closed| now.saturating_duration_since(closed.at) < self.confirm_max;
        if let Some(closed) = known.filter(is_same) {
            return *closed;
        }
        let silences = known.map_or(0, |closed| closed.silences).saturating_add(1);
        let longer = 2_u32.saturating_pow(silences.saturating_sub(2));
        let lasts = self.confirm_max.saturating_mul(SILENT_FOR).saturating_mul(longer).min(SILENT_MAX);
        Closed { at: now, lasts, silences }
    }

    /// Whether the queue did not confirm what was sent to it, more than once, and is not to be tried now.
    pub(crate) fn is_silent(&self, queue: &str, now: Instant) -> bool {
        self.closed.get(queue).is_some_and(|closed| closed.tries(now) == 0)
    }

    /// Whether a job that was just delivered, with replies to this queue, has to wait unrun.
    pub(crate) fn must_wait(&self, queue: &str, now: Instant) -> bool {
        let Some(closed) = self.closed.get(queue).filter(|closed| !closed.is_forgotten(now)) else {
            return false;
        };
        self.held.get(queue).copied().unwrap_or(0) > closed.tries(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIRM: Duration = Duration::from_secs(30);

    fn silent() -> PublicationOutcome {
        PublicationOutcome::Unreachable { destination: "silent".to_owned(), why: "did not confirm" }
    }

    #[test]
    fn a_silent_queue_counts_as_full_until_it_would_be_noticed_again() {
        let (mut destinations, now) = (Destinations::new(CONFIRM), Instant::now());
        (0..3).for_each(|_| destinations.delivered(Some("silent")));
        destinations.published(Some("silent"), &silent(), now);
        assert!(destinations.must_wait("silent", now + FULL_FOR));
        destinations.settled(Some("silent"));
        assert!(!destinations.must_wait("silent", now + FULL_FOR), "two may try");
        (0..9).for_each(|_| destinations.delivered(Some("silent")));
        assert!(!destinations.must_wait("silent", now + CONFIRM * SILENT_FOR));
    }

    /// Each try may hold up the replies to other callers.
    #[test]
    fn a_queue_that_stays_silent_is_tried_less_and_less_often_by_one_job_at_a_time() {
        let (mut destinations, mut now) = (Destinations::new(CONFIRM), Instant::now());
        destinations.published(Some("silent"), &silent(), now);
        // Two that tried it.
        now += CONFIRM;
        destinations.published(Some("silent"), &silent(), now);
        destinations.published(Some("silent"), &silent(), now + CONFIRM / 2);
        let mut lasts = CONFIRM * SILENT_FOR;
        for _ in 0..9 {
            destinations.delivered(Some("silent"));
            let before = now + lasts - Duration::from_secs(1);
            assert!(destinations.must_wait("silent", before) && destinations.is_silent("silent", before));
            now += lasts;
            assert!(
                !destinations.must_wait("silent", now) && !destinations.is_silent("silent", now),
                "one tries it"
            );
            destinations.delivered(Some("silent"));
            assert!(destinations.must_wait("silent", now));
            (0..2).for_each(|_| destinations.settled(Some("silent")));
            now += CONFIRM;
            destinations.published(Some("silent"), &silent(), now);
            lasts = (lasts * 2).min(SILENT_MAX);
        }
        assert_eq!(lasts, SILENT_MAX, "at least every ten minutes");
        (0..9).for_each(|_| destinations.delivered(Some("silent")));
        destinations.published(Some("silent"), &PublicationOutcome::Confirmed { messages: 1 }, now);
        assert!(!destinations.must_wait("silent", now), "it confirms again");
    }

    #[test]
    fn further_jobs_of_a_full_queue_wait_and_others_do_not() {
        let (mut destinations, now) = (Destinations::new(CONFIRM), Instant::now());
        let refused = PublicationOutcome::Refused { destination: "full".to_owned() };
        (0..5).for_each(|_| destinations.delivered(Some("full")));
        destinations.delivered(Some("other"));
        assert!(!destinations.must_wait("full", now));
        destinations.published(Some("full"), &refused, now);
        assert!(destinations.must_wait("full", now) && !destinations.must_wait("other", now));
        assert!(!destinations.must_wait("full", now + FULL_FOR));
        (0..3).for_each(|_| destinations.settled(Some("full")));
        assert!(!destinations.must_wait("full", now), "two may try");
        (0..3).for_each(|_| destinations.delivered(Some("full")));
        destinations.published(Some("full"), &PublicationOutcome::Confirmed { messages: 1 }, now);
        assert!(!destinations.must_wait("full", now), "it has room again");
        (0..9).for_each(|_| destinations.settled(Some("full")));
        assert!(!destinations.held.contains_key("full"));
    }
}
