//! Decides which jobs may be the reason why workers crash. How a job arrived comes in; whether it runs, moves to the quarantine or is
//! dead-lettered goes out. Pure.
//!
//! A worker that dies loses all its unacknowledged jobs. One of them may have killed it, but the broker only reports that they are
//! redelivered. So a job that was redelivered once runs again. A job that was redelivered twice moves to the quarantine, from which a
//! worker takes one job at a time and runs nothing else meanwhile. If a job is redelivered from there, the worker that died held only this
//! job.
//!
//! If a process of a model dies, its worker survives and notes that in the job's headers. A job that was lost with processes only, not with
//! workers, needs no quarantine: from the second time on its passes contain no other jobs, but run beside passes of other jobs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How many workers must be lost with a job until it is quarantined, and until it is dead-lettered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoisonPolicy {
    /// At least 1. By default 2, because every unacknowledged job gets one loss whenever a worker dies.
    pub suspect_after: u32,
    /// More than `suspect_after`. By default 5: three more losses, each while the job was alone.
    pub crashes_max: u32,
}

/// After so many deliveries a message is published again as a new one, even if this worker knows why it came back. The broker dead-letters
/// a message at its own delivery limit, whatever the cause.
const RETURNS_MAX: u32 = 10;

/// How a job arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// How many workers, or processes of its model, were lost with the job, according to its headers.
    pub(crate) crashes: u32,
    /// All of these losses were processes whose workers survived.
    pub(crate) of_processes: bool,
    /// How often this message was delivered before, as far as the broker reports it.
    pub(crate) returns: u32,
    /// Whether the broker counts deliveries. If not, it reports only that there were some, and `returns` is 1.
    pub(crate) counted: bool,
    /// How many of these returns this process caused itself: it lost a session recently, or gave the message back.
    pub(crate) explained: u32,
    /// It comes from the quarantine.
    pub(crate) quarantined: bool,
}

/// What to do with a job that has arrived. The number: workers and processes that were lost with it so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RedeliveryDecision {
    /// Run it. A quarantined job shares no pass.
    Run(u32),
    /// Run it in passes without other jobs. The worker runs other jobs' passes beside these.
    RunAlone(u32),
    /// Publish it again to the queue that it came from, as a new message with this number in its headers.
    Count(u32),
    /// Move it to the quarantine.
    Quarantine(u32),
    /// Dead-letter it.
    DeadLetter(u32),
}

impl RedeliveryDecision {
    /// The number of losses.
    pub(crate) fn crashes(self) -> u32 {
        match self {
            Self::Run(crashes)
            | Self::RunAlone(crashes)
            | Self::Count(crashes)
            | Self::Quarantine(crashes)
            | Self::DeadLetter(crashes) => crashes,
        }
    }
}

impl PoisonPolicy {
    pub(crate) fn judge(&self, arrival: Arrival) -> RedeliveryDecision {
        let Arrival { crashes, of_processes, returns, counted, explained, quarantined } = arrival;
        let unexplained = returns.saturating_sub(explained);
        let charged = crashes.saturating_add(unexplained);
        let by_workers = if of_processes { unexplained } else { charged };
        let is_suspect = !quarantined && charged >= self.suspect_after;
        // In two cases the number must be written to the headers. If the broker does not count, the next return would look like this one.
        // If this worker can explain a return of a quarantined job, other workers cannot, and this one cannot either after a while.
        let is_uncounted = !counted && charged > crashes;
        let is_explained_here = quarantined && returns > 0 && explained > 0;
        if quarantined && charged >= self.crashes_max {
            return RedeliveryDecision::DeadLetter(charged);
        }
        if is_suspect && (by_workers >= self.suspect_after || charged >= self.crashes_max) {
            // Whatever the broker has counted, a job is dead-lettered only for losses that happened while it was alone.
            return RedeliveryDecision::Quarantine(crashes.max(self.suspect_after));
        }
        if is_uncounted || is_explained_here || returns >= RETURNS_MAX {
            return RedeliveryDecision::Count(charged);
        }
        if is_suspect { RedeliveryDecision::RunAlone(charged) } else { RedeliveryDecision::Run(charged) }
    }
}

/// For how long a lost session excuses redeliveries, from the opening of the next session on. In that time the broker notices the loss (two
/// heartbeats) and redelivers the jobs.
const EXPLAINS_FOR: Duration = Duration::from_secs(180);

/// Sessions that this process lost recently. Each may explain one redelivery of every job, even of jobs that the worker had not read yet.
/// Bounded by the pace of the reconnects.
#[derive(Debug, Default)]
pub(crate) struct SessionLosses(VecDeque<Instant>);

impl SessionLosses {
    pub(crate) fn note(&mut self, now: Instant) {
        self.recent(now);
        self.0.push_back(now);
    }

    /// When the last one was lost or, once the session after it has begun, when that was.
    pub(crate) fn last(&self) -> Option<Instant> {
        self.0.back().copied()
    }

    /// A session begins. Only from now on can jobs come back. True if it follows a lost session.
    pub(crate) fn begin(&mut self, now: Instant) -> bool {
        let last = self.0.back_mut();
        let follows = last.is_some();
        last.into_iter().for_each(|last| *last = now);
        follows
    }

    pub(crate) fn recent(&mut self, now: Instant) -> u32 {
        while self.0.front().is_some_and(|at| now.saturating_duration_since(*at) > EXPLAINS_FOR) {
            self.0.pop_front();
        }
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_session_explains_redeliveries_for_a_while() {
        let start = Instant::now();
        let mut losses = SessionLosses::default();
        assert_eq!(losses.recent(start), 0);
        assert!(!losses.begin(start));
        losses.note(start);
        losses.note(start + EXPLAINS_FOR / 2);
        assert_eq!(losses.recent(start + EXPLAINS_FOR / 2), 2);
        assert_eq!(losses.recent(start + EXPLAINS_FOR), 2);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 5 / 4), 1);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 2), 0);
        // The excuse starts with the new session, however long the broker was away.
        losses.note(start + EXPLAINS_FOR * 3);
        assert!(losses.begin(start + EXPLAINS_FOR * 5));
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 11 / 2), 1);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 7), 0);
    }

    const POLICY: PoisonPolicy = PoisonPolicy { suspect_after: 2, crashes_max: 5 };

    /// A quorum queue, which counts deliveries.
    const COUNTED: Arrival = Arrival {
        crashes: 0,
        of_processes: false,
        returns: 0,
        counted: true,
        explained: 0,
        quarantined: false,
    };
    const CLASSIC: Arrival = Arrival { counted: false, ..COUNTED };

    #[test]
    fn every_row_of_the_table() {
        use RedeliveryDecision::{Count, DeadLetter, Quarantine, Run, RunAlone};
        let with_processes = |arrival: Arrival| Arrival { of_processes: true, ..arrival };
        let quarantined = |arrival: Arrival| Arrival { quarantined: true, ..arrival };
        let explained = |arrival: Arrival| Arrival { explained: 1, ..arrival };
        let rows = [
            (COUNTED, Run(0)),
            (Arrival { returns: 1, ..COUNTED }, Run(1)),
            (Arrival { returns: 2, ..COUNTED }, Quarantine(2)),
            // However many returns: their cause is unknown, and the job was never alone.
            (Arrival { returns: 9, ..COUNTED }, Quarantine(2)),
            (Arrival { crashes: 1, returns: 1, ..COUNTED }, Quarantine(2)),
            (Arrival { crashes: 1, ..COUNTED }, Run(1)),
            // Another attempt of a quarantined job, for example after an out-of-memory.
            (Arrival { crashes: 4, ..COUNTED }, Quarantine(4)),
            // This process lost its session, so no job is to blame; until the broker's own limit comes near.
            (explained(Arrival { returns: 1, ..COUNTED }), Run(0)),
            (explained(Arrival { returns: 2, ..COUNTED }), Run(1)),
            (explained(Arrival { returns: 3, ..COUNTED }), Quarantine(2)),
            (explained(Arrival { crashes: 1, returns: 1, ..CLASSIC }), Run(1)),
            (Arrival { explained: 9, returns: 9, ..COUNTED }, Run(0)),
            (Arrival { explained: 10, returns: 10, ..COUNTED }, Count(0)),
            (CLASSIC, Run(0)),
            (Arrival { returns: 1, ..CLASSIC }, Count(1)),
            (Arrival { crashes: 1, ..CLASSIC }, Run(1)),
            (Arrival { crashes: 1, returns: 1, ..CLASSIC }, Quarantine(2)),
            (quarantined(Arrival { crashes: 2, ..COUNTED }), Run(2)),
            (quarantined(Arrival { crashes: 2, returns: 2, ..COUNTED }), Run(4)),
            (quarantined(Arrival { crashes: 2, returns: 3, ..COUNTED }), DeadLetter(5)),
            // The lost session excuses the job now, but would not a day later.
            (quarantined(explained(Arrival { crashes: 2, returns: 3, ..COUNTED })), Count(4)),
            (quarantined(explained(Arrival { crashes: 2, returns: 1, ..COUNTED })), Count(2)),
            (quarantined(explained(Arrival { crashes: 2, ..COUNTED })), Run(2)),
            (quarantined(Arrival { crashes: 2, ..CLASSIC }), Run(2)),
            (quarantined(Arrival { crashes: 2, returns: 1, ..CLASSIC }), Count(3)),
            (quarantined(Arrival { crashes: 4, returns: 1, ..CLASSIC }), DeadLetter(5)),
            // Lost with processes; then also with workers.
            (with_processes(Arrival { crashes: 1, ..COUNTED }), Run(1)),
            (with_processes(Arrival { crashes: 2, ..COUNTED }), RunAlone(2)),
            (with_processes(Arrival { crashes: 4, ..CLASSIC }), RunAlone(4)),
            (with_processes(Arrival { crashes: 2, returns: 1, ..COUNTED }), RunAlone(3)),
            (with_processes(Arrival { crashes: 2, returns: 2, ..COUNTED }), Quarantine(2)),
            (with_processes(Arrival { crashes: 2, returns: 1, ..CLASSIC }), Count(3)),
            (with_processes(Arrival { crashes: 0, returns: 2, ..COUNTED }), Quarantine(2)),
            (with_processes(Arrival { crashes: 5, ..COUNTED }), Quarantine(5)),
            (with_processes(Arrival { crashes: 4, returns: 1, ..COUNTED }), Quarantine(4)),
            (quarantined(with_processes(Arrival { crashes: 2, ..COUNTED })), Run(2)),
            (quarantined(with_processes(Arrival { crashes: 5, ..COUNTED })), DeadLetter(5)),
            // Forged headers.
            (Arrival { crashes: u32::MAX, returns: 7, ..COUNTED }, Quarantine(u32::MAX)),
            (quarantined(Arrival { crashes: u32::MAX, ..CLASSIC }), DeadLetter(u32::MAX)),
        ];
        for (arrival, expected) in rows {
            assert_eq!(POLICY.judge(arrival), expected, "{arrival:?}");
        }
        let patient = PoisonPolicy { suspect_after: 100, crashes_max: 200 };
        let decision = patient.judge(Arrival { returns: RETURNS_MAX, ..COUNTED });
        assert_eq!(decision, Count(RETURNS_MAX));
    }

    /// A job that crashes every worker. Returns its crashes until it is dead-lettered, and how many of them happened while it was alone.
    fn crashes_until_dead_letter(counted: bool) -> (u32, u32) {
        let (mut arrival, mut crashed, mut alone) = (Arrival { counted, ..CLASSIC }, 0, 0);
        loop {
            match POLICY.judge(arrival) {
                RedeliveryDecision::DeadLetter(_) => return (crashed, alone),
                RedeliveryDecision::Count(crashes) => arrival = Arrival { crashes, returns: 0, ..arrival },
                RedeliveryDecision::Quarantine(crashes) => {
                    arrival = Arrival { crashes, returns: 0, quarantined: true, ..arrival };
                }
                RedeliveryDecision::Run(_) | RedeliveryDecision::RunAlone(_) => {
                    crashed += 1;
                    alone += u32::from(arrival.quarantined);
                    arrival.returns = if counted { arrival.returns + 1 } else { 1 };
                }
            }
        }
    }

    #[test]
    fn a_job_that_crashes_every_worker_is_dead_lettered_after_five_crashes_the_last_three_alone() {
        assert_eq!(crashes_until_dead_letter(true), (5, 3));
        assert_eq!(crashes_until_dead_letter(false), (5, 3));
    }
}
