//! Remembers reply queues that are full, so that the jobs of their callers do not take the slots of others.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::event::PublishOutcome;

/// The most jobs with the same full reply queue that a worker holds: one whose reply is published again, and one that follows
/// when there is room. Further ones wait unrun.
const HELD_MAX: usize = 2;

/// How long a reply queue counts as full after it refused a reply: jobs that waited that long may try it again.
const FULL_FOR: Duration = Duration::from_secs(10);

/// Full reply queues that are remembered; more than a worker's slots can meet in that time.
const FULL_MAX: usize = 1024;

/// What is known of reply queues.
#[derive(Debug, Default)]
pub(crate) struct Destinations {
    /// When a queue last refused a reply.
    full_since: HashMap<String, Instant>,
    /// Unacknowledged jobs by reply queue. Bounded by the slots.
    held: HashMap<String, usize>,
}

impl Destinations {
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
        match outcome {
            PublishOutcome::Refused { .. } => {
                self.full_since.retain(|_, since| now.saturating_duration_since(*since) < FULL_FOR);
                if self.full_since.len() < FULL_MAX {
                    self.full_since.insert(queue.to_owned(), now);
                }
            }
            PublishOutcome::Confirmed { .. } if !self.full_since.is_empty() => {
                self.full_since.remove(queue);
            }
            _ => {}
        }
    }

    /// Whether a job that was just delivered, with replies to this queue, has to wait unrun.
    pub(crate) fn must_wait(&self, queue: &str, now: Instant) -> bool {
        let since = self.full_since.get(queue);
        let is_full = since.is_some_and(|since| now.saturating_duration_since(*since) < FULL_FOR);
        is_full && self.held.get(queue).copied().unwrap_or(0) > HELD_MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
