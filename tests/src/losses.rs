//! The jobs that workers lost in a soak test, and whether these losses explain the duplicates.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long after a loss the answer may still be collected that was given before it. A collector that hears nothing is replaced
/// after 10 s, and has to find its way back to a broker that was killed: in an hour on a busy machine, 16 of 15,000
/// duplicates had been answered more than 5 s before they were collected.
const LATE: Duration = Duration::from_secs(20);

/// Within this time a worker and the broker notice that the other one is silent: three heartbeats of 2 s.
pub const NOTICED: Duration = Duration::from_secs(6);

/// An event after which answered jobs may come again.
#[derive(Clone, Debug)]
pub struct Loss {
    pub what: &'static str,
    /// The worker that it hit; `None`: all of them.
    pub worker: Option<String>,
    pub from: Instant,
    pub to: Instant,
}

/// A job, or some items of it, that was answered or dead-lettered again.
#[derive(Clone, Debug)]
pub struct Duplicate {
    pub job: String,
    /// Who had answered before, and when.
    pub before: Vec<(String, Instant)>,
    /// One of the answers came from a later attempt, which some worker had published before it acknowledged its own message of the job.
    pub requeued: bool,
    pub again: Instant,
}

impl Loss {
    /// Whether this loss may have cost the worker what it held at that moment.
    pub fn covers(&self, worker: &str, at: Instant) -> bool {
        self.worker.as_deref().is_none_or(|hit| hit == worker) && self.from <= at && at <= self.to + NOTICED
    }
}

impl Duplicate {
    /// The last loss, between the earlier answer and this one, of a worker that had answered before. For a requeued job it may be any
    /// worker: one that was lost between the confirm of the next attempt and its ack leaves two messages of the job, and has answered
    /// nothing.
    fn cause<'a>(&self, losses: &'a [Loss]) -> Option<&'a Loss> {
        let explains = |loss: &&Loss| {
            self.before.iter().any(|(worker, answered)| {
                loss.worker.as_ref().is_none_or(|hit| self.requeued || hit == worker)
                    && loss.to + LATE >= *answered
                    && loss.from <= self.again
            })
        };
        losses.iter().rfind(explains)
    }
}

/// Counts duplicates by their cause, and returns those without one.
pub fn explain(duplicates: &[Duplicate], losses: &[Loss]) -> (BTreeMap<&'static str, usize>, Vec<Duplicate>) {
    let (mut by_cause, mut unexplained) = (BTreeMap::new(), Vec::new());
    for duplicate in duplicates {
        match duplicate.cause(losses) {
            Some(loss) => *by_cause.entry(loss.what).or_default() += 1,
            None => unexplained.push(duplicate.clone()),
        }
    }
    (by_cause, unexplained)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(worker: Option<&str>, at: Instant) -> Loss {
        Loss { what: "kill", worker: worker.map(str::to_owned), from: at, to: at }
    }

    #[test]
    fn a_duplicate_is_explained_only_by_a_lost_session_between_its_two_answers() {
        let start = Instant::now();
        let second = |seconds| start + Duration::from_secs(seconds);
        let before = vec![("a".to_owned(), second(22))];
        let once = Duplicate { job: "1".to_owned(), before, requeued: false, again: second(30) };
        let requeued = Duplicate { requeued: true, ..once.clone() };
        for (duplicate, worker, at, explained) in [
            (&once, Some("a"), 25, true),
            (&once, None, 25, true),
            (&once, Some("b"), 25, false),
            (&once, Some("a"), 15, true),
            (&once, Some("a"), 1, false),
            (&once, Some("a"), 31, false),
            (&requeued, Some("b"), 25, true),
            (&requeued, Some("b"), 1, false),
            (&requeued, Some("b"), 31, false),
        ] {
            let (by_cause, unexplained) =
                explain(std::slice::from_ref(duplicate), &[loss(worker, second(at))]);
            assert_eq!((by_cause.len(), unexplained.is_empty()), (usize::from(explained), explained));
        }
    }
}
