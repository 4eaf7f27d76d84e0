//! Remembers reply queues that are full or silent, so that the jobs of their callers do not take the slots of others. What comes in is how
//! each reply was taken; what goes out is whether a job has to wait unrun.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::event::PublishOutcome;
use crate::sizes::Size;

/// The most jobs with the same full reply queue that a worker holds: one whose reply is published again, and one that follows
/// when there is room. Further ones wait unrun.
const HELD_MAX: usize = 2;

/// How long a reply queue counts as full after it refused a reply: jobs that waited that long may try it again.
const FULL_FOR: Duration = Duration::from_secs(10);

/// The same after it did not confirm one. It takes half a minute to notice that again: in between, no more jobs than
/// [`HELD_MAX`] may wait for it.
const SILENT_FOR: Duration = Duration::from_secs(120);

/// Such reply queues that are kept in mind; more than a worker's slots can meet in that time.
const FULL_MAX: usize = 1024;

/// What is known of reply queues.
#[derive(Debug, Default)]
pub(crate) struct Destinations {
    /// Until when a queue counts as full.
    full_until: HashMap<String, Instant>,
    /// Unacknowledged jobs by reply queue. Bounded by the slots.
    held: HashMap<String, usize>,
}

impl Destinations {
    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let full = Size::of("full reply queues", self.full_until.len(), FULL_MAX);
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
    pub(crate) fn published(&mut self, queue: Option<&str>, outcome: &PublishOutcome, now: Instant) {
        let Some(queue) = queue else { return };
        let lasts = match outcome {
            PublishOutcome::Refused { .. } => FULL_FOR,
            PublishOutcome::Unreachable { .. } => SILENT_FOR,
            PublishOutcome::Confirmed { .. } if !self.full_until.is_empty() => {
                self.full_until.remove(queue);
                return;
            }
            _ => return,
        };
        self.full_until.retain(|_, until| now < *until);
        if self.full_until.len() < FULL_MAX {
            self.full_until.insert(queue.to_owned(), now + lasts);
        }
    }

    /// Whether a job that was just delivered, with replies to this queue, has to wait unrun.
    pub(crate) fn must_wait(&self, queue: &str, now: Instant) -> bool {
        let is_full = self.full_until.get(queue).is_some_and(|until| now < *until);
        is_full && self.held.get(queue).copied().unwrap_or(0) > HELD_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_queue_counts_as_full_until_it_would_be_noticed_again() {
        let (mut destinations, now) = (Destinations::default(), Instant::now());
        let silent = PublishOutcome::Unreachable { destination: "silent".to_owned(), why: "did not confirm" };
        (0..3).for_each(|_| destinations.delivered(Some("silent")));
        destinations.published(Some("silent"), &silent, now);
        assert!(destinations.must_wait("silent", now + FULL_FOR));
        assert!(!destinations.must_wait("silent", now + SILENT_FOR));
    }

    #[test]
    fn further_jobs_of_a_full_queue_wait_and_others_do_not() {
        let (mut destinations, now) = (Destinations::default(), Instant::now());
        let refused = PublishOutcome::Refused { destination: "full".to_owned() };
        (0..5).for_each(|_| destinations.delivered(Some("full")));
        destinations.delivered(Some("other"));
        assert!(!destinations.must_wait("full", now));
        destinations.published(Some("full"), &refused, now);
        assert!(destinations.must_wait("full", now) && !destinations.must_wait("other", now));
        assert!(!destinations.must_wait("full", now + FULL_FOR));
        (0..3).for_each(|_| destinations.settled(Some("full")));
        assert!(!destinations.must_wait("full", now), "two may try");
        (0..3).for_each(|_| destinations.delivered(Some("full")));
        destinations.published(Some("full"), &PublishOutcome::Confirmed { messages: 1 }, now);
        assert!(!destinations.must_wait("full", now), "it has room again");
        (0..9).for_each(|_| destinations.settled(Some("full")));
        assert!(!destinations.held.contains_key("full"));
    }
}
