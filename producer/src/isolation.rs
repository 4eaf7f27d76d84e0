//! Finds the job over which the broker closes a channel or the connection, so that it is not published again for ever. Pure.
//!
//! The broker does not say which of the jobs in flight it was. So all of them are isolated: each is published again while no other job is in
//! flight. When the broker closes the channel or the connection again, the job in flight is the faulty one.
//!
//! The queue of an isolated job may not answer. Such a job holds up all others for a limited time, and then only the jobs of its key.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::time::Instant;
use vramq_amqp::ConfirmTime;

/// How long a job that is published alone may hold up the others, beside the time for its bytes. The broker closes a channel or connection
/// over a small job at once.
const ALONE_S: u32 = 5;

#[derive(Debug, Default)]
pub(crate) struct Isolation {
    /// The isolated jobs, by number, with their routing keys.
    keys: BTreeMap<u64, ShortString>,
    /// The isolated job that was published last in this session, and until when its outcome is awaited.
    last: Option<(u64, Instant)>,
    /// Isolated jobs that were published in this session, and had no outcome in time.
    unconfirmed: BTreeSet<u64>,
}

/// Which jobs may be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// All whose key has no isolated jobs.
    Others,
    /// Only this isolated job.
    Isolated(u64),
    /// None until the outcome of an isolated job is known; this time at most.
    Nobody { until: Instant },
}

impl Isolation {
    pub(crate) fn add(&mut self, number: u64, key: ShortString) {
        self.keys.insert(number, key);
    }

    /// The outcome of the job of this number is known.
    pub(crate) fn remove(&mut self, number: u64) {
        self.keys.remove(&number);
        self.unconfirmed.remove(&number);
    }

    pub(crate) fn contains(&self, number: u64) -> bool {
        self.keys.contains_key(&number)
    }

    /// Whether a routing key has isolated jobs.
    pub(crate) fn has_key(&self, key: &ShortString) -> bool {
        self.keys.values().any(|of_isolated| of_isolated == key)
    }

    pub(crate) fn begin_session(&mut self) {
        self.last = None;
        self.unconfirmed.clear();
    }

    /// Notes that an isolated job with so many bytes is published.
    pub(crate) fn published(&mut self, number: u64, bytes: usize, now: Instant) {
        let alone_s = ConfirmTime::new(ALONE_S, bytes as u64).seconds();
        self.last = Some((number, now + Duration::from_secs(alone_s.into())));
    }

    /// Which of the jobs in flight may be the faulty one.
    pub(crate) fn possible_causes(&self, in_flight: impl Iterator<Item = u64>, now: Instant) -> Vec<u64> {
        // Isolated jobs before it had their outcome, or the time for it.
        let alone = self.awaits_outcome().filter(|(_, until)| now < *until);
        in_flight
            .filter(|number| alone.is_none_or(|(alone, _)| *number == alone || !self.contains(*number)))
            .collect()
    }

    pub(crate) fn turn(&mut self, now: Instant) -> Turn {
        if let Some((number, until)) = self.awaits_outcome() {
            if now < until {
                return Turn::Nobody { until };
            }
            self.unconfirmed.insert(number);
        }
        let silent =
            self.unconfirmed.iter().filter_map(|number| self.keys.get(number)).collect::<BTreeSet<_>>();
        let next = self.keys.iter().find(|(_, key)| !silent.contains(key));
        next.map_or(Turn::Others, |(number, _)| Turn::Isolated(*number))
    }

    fn awaits_outcome(&self) -> Option<(u64, Instant)> {
        self.last.filter(|(number, _)| self.contains(*number) && !self.unconfirmed.contains(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Duration = Duration::from_secs(ALONE_S as u64);

    fn isolated(jobs: &[(u64, &str)]) -> Isolation {
        let mut isolation = Isolation::default();
        jobs.iter().for_each(|(number, key)| isolation.add(*number, (*key).into()));
        isolation
    }

    #[test]
    fn isolated_jobs_go_one_at_a_time_before_all_others() {
        let (mut isolation, now) = (isolated(&[(1, "a"), (2, "b")]), Instant::now());
        for number in [1, 2] {
            assert_eq!(isolation.turn(now), Turn::Isolated(number));
            isolation.published(number, 1, now);
            assert_eq!(isolation.turn(now), Turn::Nobody { until: now + ALONE });
            isolation.remove(number);
        }
        assert_eq!(isolation.turn(now), Turn::Others);
    }

    #[test]
    fn an_isolated_job_without_an_outcome_holds_up_only_those_of_its_key() {
        let (mut isolation, now) = (isolated(&[(1, "silent"), (2, "silent"), (3, "b")]), Instant::now());
        isolation.published(1, 1, now);
        let later = now + ALONE;
        assert_eq!(isolation.turn(later), Turn::Isolated(3));
        isolation.published(3, 1, later);
        isolation.remove(3);
        assert_eq!(isolation.turn(later), Turn::Others);
        assert!(isolation.has_key(&"silent".into()) && !isolation.has_key(&"b".into()));
        isolation.remove(1);
        assert_eq!(isolation.turn(later), Turn::Isolated(2), "its queue answers again");
    }

    #[test]
    fn a_new_session_publishes_every_isolated_job_again() {
        let (mut isolation, now) = (isolated(&[(1, "silent"), (2, "b")]), Instant::now());
        isolation.published(1, 1, now);
        assert_eq!(isolation.turn(now + ALONE), Turn::Isolated(2));
        isolation.begin_session();
        assert_eq!(isolation.turn(now + ALONE), Turn::Isolated(1));
    }

    #[test]
    fn a_large_isolated_job_has_the_time_to_arrive() {
        let (mut isolation, now) = (isolated(&[(1, "a"), (2, "b")]), Instant::now());
        isolation.published(1, 16 * 1024 * 1024, now);
        let until = now + ALONE + Duration::from_secs(256);
        assert_eq!(isolation.turn(now + Duration::from_secs(200)), Turn::Nobody { until });
        assert_eq!(isolation.turn(until), Turn::Isolated(2));
    }

    #[test]
    fn the_faulty_job_is_the_isolated_one_that_was_published_last_or_not_isolated() {
        let (mut isolation, now) = (isolated(&[(1, "silent"), (2, "b")]), Instant::now());
        isolation.published(1, 1, now);
        let later = now + ALONE;
        assert_eq!(isolation.turn(later), Turn::Isolated(2));
        isolation.published(2, 1, later);
        assert_eq!(isolation.possible_causes([1, 2].into_iter(), later), [2]);
        assert_eq!(isolation.possible_causes([1, 2, 3].into_iter(), later), [2, 3], "not isolated before");
        assert_eq!(isolation.possible_causes([1, 2].into_iter(), later + ALONE), [1, 2], "it had its time");
    }
}
