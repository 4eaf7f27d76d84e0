//! Finds the job over which the broker closes a channel or the connection, so that it is not published again for ever. Pure.
//!
//! The broker does not say which of the jobs in flight it was. So all of them become suspects, and are published again one at a time: the
//! next time, the one in flight is the one. A suspect without an answer may have a queue that does not answer. After some time it holds up
//! only the suspects for the same queue.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::time::Instant;

/// The broker reads a job and closes the connection over it within this time, on all but the slowest networks.
const ANSWERED_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct Suspects {
    /// The suspects, by number, with their routing keys.
    keys: BTreeMap<u64, ShortString>,
    /// The suspect that was published last in this session, and when.
    last: Option<(u64, Instant)>,
    /// Suspects that were published in this session, and had no answer in time.
    unanswered: BTreeSet<u64>,
}

/// Which jobs may be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All that are no suspects, and do not stand behind one.
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

    pub(crate) fn begin_session(&mut self) {
        self.last = None;
        self.unanswered.clear();
    }

    /// Notes that a suspect is published.
    pub(crate) fn published(&mut self, number: u64, now: Instant) {
        self.last = Some((number, now));
    }

    /// The suspect that awaits its answer, alone.
    pub(crate) fn alone(&self, now: Instant) -> Option<u64> {
        self.awaits_answer().filter(|(_, at)| now < *at + ANSWERED_WITHIN).map(|(number, _)| number)
    }

    pub(crate) fn turn(&mut self, now: Instant) -> Turn {
        if let Some((number, at)) = self.awaits_answer() {
            let until = at + ANSWERED_WITHIN;
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
            assert_eq!(suspects.alone(now), None, "it is not published yet");
            suspects.published(number, now);
            assert_eq!(suspects.turn(now), Turn::Nobody { until: now + ANSWERED_WITHIN });
            assert_eq!(suspects.alone(now), Some(number));
            suspects.remove(number);
        }
        assert_eq!(suspects.turn(now), Turn::Others);
    }

    #[test]
    fn a_suspect_without_an_answer_holds_up_only_those_of_its_key() {
        let (mut suspects, now) = (suspects(&[(1, "silent"), (2, "silent"), (3, "b")]), Instant::now());
        suspects.published(1, now);
        let later = now + ANSWERED_WITHIN;
        assert_eq!(suspects.turn(later), Turn::Suspect(3));
        assert_eq!(suspects.alone(later), None);
        suspects.published(3, later);
        assert_eq!(suspects.alone(later), Some(3));
        suspects.remove(3);
        assert_eq!(suspects.turn(later), Turn::Others);
        suspects.remove(1);
        assert_eq!(suspects.turn(later), Turn::Suspect(2), "its queue answers again");
    }

    #[test]
    fn a_new_session_publishes_every_suspect_again() {
        let (mut suspects, now) = (suspects(&[(1, "silent"), (2, "b")]), Instant::now());
        suspects.published(1, now);
        assert_eq!(suspects.turn(now + ANSWERED_WITHIN), Turn::Suspect(2));
        suspects.begin_session();
        assert_eq!(suspects.turn(now + ANSWERED_WITHIN), Turn::Suspect(1));
    }
}
