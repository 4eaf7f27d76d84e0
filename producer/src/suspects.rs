//! Finds the job over which the broker closes a channel or the connection, so that it is not published again for ever. Pure.
//!
//! The broker does not say which of the jobs in flight it was. So all of them become suspects, and are published again one at a time: the
//! next time, the one in flight is the one. A suspect without an answer may have a queue that does not answer. After some time it holds up
//! only the suspects for the same queue.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::time::Instant;

/// Within this time the broker closes the connection over a small job, and over a large one when it has had it at the slowest rate.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);
const BYTES_PER_S_MIN: u64 = 64 * 1024;

#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// The suspects, by number, with their routing keys.
    keys: BTreeMap<u64, ShortString>,
    /// The suspect that was published last in this session, and until when its answer is awaited.
    last: Option<(u64, Instant)>,
    /// Suspects that were published in this session, and had no answer in time.
    unanswered: BTreeSet<u64>,
}

/// Which jobs may be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All whose key has no suspects.
    Others,
    /// Only this suspect.
    Suspect(u64),
    /// None until a suspect is answered; this time at most.
    Nobody { until: Instant },
}

impl Suspects {
    pub(crate) fn add(&mut self, number: u64, key: ShortString) {
        self.keys.insert(number, key);
    }

    /// The job of this number is answered.
    pub(crate) fn remove(&mut self, number: u64) {
        self.keys.remove(&number);
        self.unanswered.remove(&number);
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        self.keys.contains_key(&number)
    }

    /// Whether a routing key has suspects.
    pub(crate) fn has_key(&self, key: &ShortString) -> bool {
        self.keys.values().any(|of_suspect| of_suspect == key)
    }

    pub(crate) fn begin_session(&mut self) {
        self.last = None;
        self.unanswered.clear();
    }

    /// Notes that a suspect with so many bytes is published.
    pub(crate) fn published(&mut self, number: u64, bytes: usize, now: Instant) {
        let transfer = Duration::from_secs(bytes as u64 / BYTES_PER_S_MIN);
        self.last = Some((number, now + ANSWERED_WITHIN + transfer));
    }

    /// Which of the jobs in flight may be the faulty one.
    pub(crate) fn among(&self, in_flight: impl Iterator<Item = u64>, now: Instant) -> Vec<u64> {
        // Suspects before it had their answer, or the time for it.
        let alone = self.awaits_answer().filter(|(_, until)| now < *until);
        in_flight
            .filter(|number| alone.is_none_or(|(alone, _)| *number == alone || !self.contains(*number)))
            .collect()
    }

    pub(crate) fn turn(&mut self, now: Instant) -> Turn {
        if let Some((number, until)) = self.awaits_answer() {
            if now < until {
                return Turn::Nobody { until };
            }
            self.unanswered.insert(number);
        }
        let silent =
            self.unanswered.iter().filter_map(|number| self.keys.get(number)).collect::<BTreeSet<_>>();
        let next = self.keys.iter().find(|(_, key)| !silent.contains(key));
        next.map_or(Turn::Others, |(number, _)| Turn::Suspect(*number))
    }

    fn awaits_answer(&self) -> Option<(u64, Instant)> {
        self.last.filter(|(number, _)| self.contains(*number) && !self.unanswered.contains(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspects(jobs: &[(u64, &str)]) -> Suspects {
        let mut suspects = Suspects::default();
        jobs.iter().for_each(|(number, key)| suspects.add(*number, (*key).into()));
        suspects
    }

    #[test]
    fn suspects_go_one_at_a_time_before_all_others() {
        let (mut suspects, now) = (suspects(&[(1, "a"), (2, "b")]), Instant::now());
        for number in [1, 2] {
            assert_eq!(suspects.turn(now), Turn::Suspect(number));
            suspects.published(number, 1, now);
            assert_eq!(suspects.turn(now), Turn::Nobody { until: now + ANSWERED_WITHIN });
            suspects.remove(number);
        }
        assert_eq!(suspects.turn(now), Turn::Others);
    }

    #[test]
    fn a_suspect_without_an_answer_holds_up_only_those_of_its_key() {
        let (mut suspects, now) = (suspects(&[(1, "silent"), (2, "silent"), (3, "b")]), Instant::now());
        suspects.published(1, 1, now);
        let later = now + ANSWERED_WITHIN;
        assert_eq!(suspects.turn(later), Turn::Suspect(3));
        suspects.published(3, 1, later);
        suspects.remove(3);
        assert_eq!(suspects.turn(later), Turn::Others);
        assert!(suspects.has_key(&"silent".into()) && !suspects.has_key(&"b".into()));
        suspects.remove(1);
        assert_eq!(suspects.turn(later), Turn::Suspect(2), "its queue answers again");
    }

    #[test]
    fn a_new_session_publishes_every_suspect_again() {
        let (mut suspects, now) = (suspects(&[(1, "silent"), (2, "b")]), Instant::now());
        suspects.published(1, 1, now);
        assert_eq!(suspects.turn(now + ANSWERED_WITHIN), Turn::Suspect(2));
        suspects.begin_session();
        assert_eq!(suspects.turn(now + ANSWERED_WITHIN), Turn::Suspect(1));
    }

    #[test]
    fn a_large_suspect_has_the_time_to_arrive() {
        let (mut suspects, now) = (suspects(&[(1, "a"), (2, "b")]), Instant::now());
        suspects.published(1, 16 * 1024 * 1024, now);
        let until = now + ANSWERED_WITHIN + Duration::from_secs(256);
        assert_eq!(suspects.turn(now + Duration::from_secs(200)), Turn::Nobody { until });
        assert_eq!(suspects.turn(until), Turn::Suspect(2));
    }

    #[test]
    fn the_faulty_job_is_the_suspect_that_was_published_last_or_no_suspect() {
        let (mut suspects, now) = (suspects(&[(1, "silent"), (2, "b")]), Instant::now());
        suspects.published(1, 1, now);
        let later = now + ANSWERED_WITHIN;
        assert_eq!(suspects.turn(later), Turn::Suspect(2));
        suspects.published(2, 1, later);
        assert_eq!(suspects.among([1, 2].into_iter(), later), [2]);
        assert_eq!(suspects.among([1, 2, 3].into_iter(), later), [2, 3], "no suspect before");
        assert_eq!(suspects.among([1, 2].into_iter(), later + ANSWERED_WITHIN), [1, 2], "it had its time");
    }
}
