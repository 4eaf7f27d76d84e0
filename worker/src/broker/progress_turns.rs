//! Decides which `progress` replies are published, and when. Pure.
//!
//! Progress may be lost, and is of no use when it is old. So a job has one report that waits, which a newer one replaces, and no report waits
//! for long. A queue that confirms nothing holds up its own progress, and a caller with many such queues its own.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use vramq_core::ids::JobKey;

use super::message::Message;

/// The most reports on their way, each to another queue and on a channel of its own. A queue that confirms nothing keeps one of these places
/// for minutes. Others confirm within milliseconds, so that a few places suffice for the progress of a whole pass.
const ON_THEIR_WAY_MAX: usize = 16;

/// The most of one caller.
const OF_CALLER_MAX: usize = 8;

/// The same while half of all places are taken. So it needs nine callers, each with silent queues, to stop the progress of others.
const OF_CALLER_SCARCE: usize = 1;

/// How long a report may wait. A working broker confirms all that can be on its way in less, and an older report tells its reader nothing new.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// The most reports that wait: as many as the results that may wait for the event loop. Each job that runs has one at most.
const WAITING_MAX: usize = 1024;

/// How far a job is.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) job: JobKey,
    /// Empty if the caller is not known.
    pub(super) caller: String,
    pub(super) message: Message,
    pub(super) made_at: Instant,
}

impl Report {
    fn queue(&self) -> &ShortString {
        &self.message.routing_key
    }

    pub(super) fn is_old(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.made_at) > WAIT_MAX
    }
}

/// The reports that wait, and those that are on their way.
#[derive(Debug, Default)]
pub(super) struct ProgressTurns {
    /// One for each job, in the order in which the jobs began to wait.
    waiting: VecDeque<Report>,
    /// The queues to which a report is on its way.
    queues: HashSet<ShortString>,
    /// How many reports of each caller are on their way, if any are.
    of_callers: HashMap<String, usize>,
}

impl ProgressTurns {
    /// Takes a report. It has the place of the one before it on the same job, if that one still waits.
    pub(super) fn add(&mut self, report: Report) {
        self.remove_old(report.made_at);
        if let Some(before) = self.waiting.iter_mut().find(|before| before.job == report.job) {
            *before = report;
        } else if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(report);
        }
    }

    /// The next report to publish. It is on its way until [`ended`](Self::ended).
    pub(super) fn next(&mut self, now: Instant) -> Option<Report> {
        if self.queues.len() >= ON_THEIR_WAY_MAX {
            return None;
        }
        self.remove_old(now);
        let next = self.waiting.iter().position(|report| self.may_go(report))?;
        let report = self.waiting.remove(next)?;
        self.queues.insert(report.queue().clone());
        *self.of_callers.entry(report.caller.clone()).or_default() += 1;
        Some(report)
    }

    /// A report is no longer on its way.
    pub(super) fn ended(&mut self, report: &Report) {
        self.queues.remove(report.queue());
        if let Some(own) = self.of_callers.get_mut(&report.caller) {
            *own -= 1;
            if *own == 0 {
                self.of_callers.remove(&report.caller);
            }
        }
    }

    fn may_go(&self, report: &Report) -> bool {
        let is_scarce = self.queues.len() >= ON_THEIR_WAY_MAX / 2;
        let most = if is_scarce { OF_CALLER_SCARCE } else { OF_CALLER_MAX };
        let own = self.of_callers.get(&report.caller).copied().unwrap_or_default();
        own < most && !self.queues.contains(report.queue())
    }

    fn remove_old(&mut self, now: Instant) {
        self.waiting.retain(|report| !report.is_old(now));
    }
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::types::FieldTable;

    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    fn report(job: u64, caller: &str, queue: &str, body: u8, made_at: Instant) -> Report {
        let message = Message {
            exchange: "".into(),
            routing_key: queue.into(),
            properties: BasicProperties::default(),
            headers: FieldTable::default(),
            body: vec![body],
        };
        Report { job: JobKey(job), caller: caller.to_owned(), message, made_at }
    }

    /// Adds the first reports of so many jobs of a caller, each with a queue of its own.
    fn add_many(turns: &mut ProgressTurns, caller: &str, jobs: u64, now: Instant) {
        for job in 0..jobs {
            let queue = format!("{caller} {job}");
            turns.add(report(job, caller, &queue, 0, now));
        }
    }

    fn all_next(turns: &mut ProgressTurns, now: Instant) -> Vec<Report> {
        std::iter::from_fn(|| turns.next(now)).collect()
    }

    #[test]
    fn all_reports_of_a_burst_go_out_as_those_before_them_are_confirmed() {
        let now = Instant::now();
        let mut turns = ProgressTurns::default();
        add_many(&mut turns, "one", 20, now);
        let mut on_their_way = VecDeque::from(all_next(&mut turns, now));
        assert_eq!(on_their_way.len(), OF_CALLER_MAX);
        let mut sent = Vec::new();
        while let Some(report) = on_their_way.pop_front() {
            turns.ended(&report);
            on_their_way.extend(all_next(&mut turns, now + MOMENT));
            sent.push(report.job.0);
        }
        assert!(sent.into_iter().eq(0..20));
        assert!(turns.queues.is_empty() && turns.of_callers.is_empty());
    }

    #[test]
    fn a_queue_gets_one_report_at_a_time_and_the_newest_of_each_job_in_turn() {
        let now = Instant::now();
        let mut turns = ProgressTurns::default();
        let add = |turns: &mut ProgressTurns, job, body| turns.add(report(job, "one", "shared", body, now));
        add(&mut turns, 1, 10);
        let first = turns.next(now).unwrap();
        for (job, body) in [(2, 20), (1, 11), (3, 30), (2, 21), (1, 12)] {
            add(&mut turns, job, body);
        }
        assert!(turns.next(now).is_none(), "the first is on its way");
        turns.ended(&first);
        let mut bodies = Vec::new();
        while let Some(next) = turns.next(now) {
            assert!(turns.next(now).is_none());
            turns.ended(&next);
            bodies.push(next.message.body[0]);
        }
        assert_eq!(bodies, [21, 12, 30]);
    }

    #[test]
    fn an_old_report_is_dropped_and_a_newer_one_of_its_job_is_not() {
        let start = Instant::now();
        let later = start + WAIT_MAX + MOMENT;
        let mut turns = ProgressTurns::default();
        for job in [1, 2] {
            turns.add(report(job, "one", "shared", 0, start));
        }
        turns.add(report(2, "one", "shared", 1, start + WAIT_MAX));
        let next = turns.next(later).unwrap();
        assert_eq!((next.job, next.message.body[0]), (JobKey(2), 1));
        turns.ended(&next);
        assert!(turns.next(later).is_none());
    }

    #[test]
    fn the_silent_queues_of_eight_callers_leave_a_place_to_another() {
        let now = Instant::now();
        let mut turns = ProgressTurns::default();
        let silent = |turns: &mut ProgressTurns, caller: &str| {
            add_many(turns, caller, 100, now);
            all_next(turns, now).len()
        };
        assert_eq!(silent(&mut turns, "silent 0"), OF_CALLER_MAX);
        turns.waiting.clear();
        for caller in 1..8 {
            assert_eq!(silent(&mut turns, &format!("silent {caller}")), OF_CALLER_SCARCE);
            turns.waiting.clear();
        }
        turns.add(report(7, "neighbour", "replies", 0, now));
        assert_eq!(all_next(&mut turns, now).len(), 1);
        assert_eq!(silent(&mut turns, "silent 8"), 0);
    }

    #[test]
    fn not_too_many_reports_wait() {
        let now = Instant::now();
        let mut turns = ProgressTurns::default();
        add_many(&mut turns, "one", WAITING_MAX as u64 + 1, now);
        assert_eq!(turns.waiting.len(), WAITING_MAX);
        let later = now + WAIT_MAX + MOMENT;
        turns.add(report(7, "one", "queue", 0, later));
        assert_eq!(turns.waiting.len(), 1, "old ones make room");
    }
}
