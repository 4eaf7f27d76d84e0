//! Which jobs may be the reason why workers vanish. Pure.
//!
//! A worker that dies takes all jobs in its hands with it, one of which may have killed it. The broker only tells that
//! they come again. So a job that came back once runs on; one that came back twice moves to the suspects' queue, of which
//! a worker takes one job at a time and nothing else besides: what comes back from there was alone in the hands of a worker
//! that vanished.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// When a job is a suspect, and when it is condemned; in workers that vanished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// At least 1. By default 2: once is what every job in hand suffers whenever a worker dies.
    pub suspect_after: u32,
    /// More than `suspect_after`. By default 5: three more, each while nothing else was suspected.
    pub crashes_max: u32,
}

/// Deliveries of one message after which it is published anew, although this worker knows why it came back: the broker
/// dead-letters it at its own limit (see `topology.rs`), whoever is to blame.
const RETURNS_MAX: u32 = 10;

/// How a job came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arrival {
    /// How often, by its headers, a worker vanished while it held the job.
    pub crashes: u32,
    /// How often this very message was delivered before, as far as the broker tells.
    pub returns: u32,
    /// The broker counts deliveries. If not, it says only that there were some: `returns` is 1.
    pub counted: bool,
    /// Returns that are this process's doing, which has not vanished: sessions that it lost lately, each of which may be
    /// the reason for one, and how often it gave the message back.
    pub explained: u32,
    /// From the suspects' queue.
    pub suspect: bool,
}

/// What is to be done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    /// With so many crashes on its account; a suspect in passes without other jobs.
    Run(u32),
    Divert(Diversion),
}

/// Where a job goes instead. The number is that of workers that vanished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Diversion {
    /// Back to where it came from, as a new message that says so.
    Mark(u32),
    /// To the suspects.
    Isolate(u32),
    /// To the dead letters.
    Condemn(u32),
}

impl Patience {
    pub fn rule(&self, arrival: Arrival) -> Ruling {
        let Arrival { crashes, returns, counted, explained, suspect } = arrival;
        let charged = crashes.saturating_add(returns.saturating_sub(explained));
        // Where the broker does not count, the next return could not be told from this one. And what was explained now
        // would not be for the next worker, or a while later.
        let marked = (counted || charged == crashes) && !(suspect && returns > 0 && explained > 0);
        if suspect && charged >= self.crashes_max {
            return Ruling::Divert(Diversion::Condemn(charged));
        }
        if !suspect && charged >= self.suspect_after {
            // Whatever the broker has counted: it takes more than that to be condemned, and from now on it is alone.
            return Ruling::Divert(Diversion::Isolate(crashes.max(self.suspect_after)));
        }
        if !marked || returns >= RETURNS_MAX {
            return Ruling::Divert(Diversion::Mark(charged));
        }
        Ruling::Run(charged)
    }
}

/// How long a lost session explains returns, from the next one on: until the broker has noticed it, too (two heartbeats), and
/// has delivered again what it puts before all else.
const EXPLAINS_FOR: Duration = Duration::from_secs(180);

/// Sessions that this process lost. What it had been sent came back, also what it had not looked at yet.
#[derive(Debug, Default)]
pub struct Losses(VecDeque<Instant>);

impl Losses {
    pub fn note(&mut self, now: Instant) {
        self.recent(now);
        self.0.push_back(now);
    }

    /// A session begins: before that nothing could come back. Whether it follows a lost one.
    pub fn begin(&mut self, now: Instant) -> bool {
        let last = self.0.back_mut();
        let follows = last.is_some();
        last.into_iter().for_each(|last| *last = now);
        follows
    }

    pub fn recent(&mut self, now: Instant) -> u32 {
        while self.0.front().is_some_and(|at| now.duration_since(*at) > EXPLAINS_FOR) {
            self.0.pop_front();
        }
        u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_explains_for_a_while() {
        let start = Instant::now();
        let mut losses = Losses::default();
        assert_eq!(losses.recent(start), 0);
        assert!(!losses.begin(start));
        losses.note(start);
        losses.note(start + EXPLAINS_FOR / 2);
        assert_eq!(losses.recent(start + EXPLAINS_FOR / 2), 2);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 5 / 4), 1);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 2), 0);
        // However long the broker was away.
        losses.note(start + EXPLAINS_FOR * 3);
        assert!(losses.begin(start + EXPLAINS_FOR * 5));
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 11 / 2), 1);
        assert_eq!(losses.recent(start + EXPLAINS_FOR * 7), 0);
    }

    const PATIENCE: Patience = Patience { suspect_after: 2, crashes_max: 5 };

    /// Quorum queues count.
    const COUNTED: Arrival = Arrival { crashes: 0, returns: 0, counted: true, explained: 0, suspect: false };
    const CLASSIC: Arrival = Arrival { counted: false, ..COUNTED };

    #[test]
    fn every_row_of_the_table() {
        use Diversion::{Condemn, Isolate, Mark};
        let suspect = |arrival: Arrival| Arrival { suspect: true, ..arrival };
        let explained = |arrival: Arrival| Arrival { explained: 1, ..arrival };
        let rows = [
            (COUNTED, Ruling::Run(0)),
            (Arrival { returns: 1, ..COUNTED }, Ruling::Run(1)),
            (Arrival { returns: 2, ..COUNTED }, Ruling::Divert(Isolate(2))),
            // However many: nobody knows what they were, and none of them was alone.
            (Arrival { returns: 9, ..COUNTED }, Ruling::Divert(Isolate(2))),
            (Arrival { crashes: 1, returns: 1, ..COUNTED }, Ruling::Divert(Isolate(2))),
            (Arrival { crashes: 1, ..COUNTED }, Ruling::Run(1)),
            // Another attempt of a suspect, after an out-of-memory say.
            (Arrival { crashes: 4, ..COUNTED }, Ruling::Divert(Isolate(4))),
            // This process lost its session, which is nobody's fault; until the broker would lose patience.
            (explained(Arrival { returns: 1, ..COUNTED }), Ruling::Run(0)),
            (explained(Arrival { returns: 2, ..COUNTED }), Ruling::Run(1)),
            (explained(Arrival { returns: 3, ..COUNTED }), Ruling::Divert(Isolate(2))),
            (explained(Arrival { crashes: 1, returns: 1, ..CLASSIC }), Ruling::Run(1)),
            (Arrival { explained: 9, returns: 9, ..COUNTED }, Ruling::Run(0)),
            (Arrival { explained: 10, returns: 10, ..COUNTED }, Ruling::Divert(Mark(0))),
            (CLASSIC, Ruling::Run(0)),
            (Arrival { returns: 1, ..CLASSIC }, Ruling::Divert(Mark(1))),
            (Arrival { crashes: 1, ..CLASSIC }, Ruling::Run(1)),
            (Arrival { crashes: 1, returns: 1, ..CLASSIC }, Ruling::Divert(Isolate(2))),
            (suspect(Arrival { crashes: 2, ..COUNTED }), Ruling::Run(2)),
            (suspect(Arrival { crashes: 2, returns: 2, ..COUNTED }), Ruling::Run(4)),
            (suspect(Arrival { crashes: 2, returns: 3, ..COUNTED }), Ruling::Divert(Condemn(5))),
            // The loss explains it today, and not tomorrow.
            (suspect(explained(Arrival { crashes: 2, returns: 3, ..COUNTED })), Ruling::Divert(Mark(4))),
            (suspect(explained(Arrival { crashes: 2, returns: 1, ..COUNTED })), Ruling::Divert(Mark(2))),
            (suspect(Arrival { crashes: 2, ..CLASSIC }), Ruling::Run(2)),
            (suspect(Arrival { crashes: 2, returns: 1, ..CLASSIC }), Ruling::Divert(Mark(3))),
            (suspect(Arrival { crashes: 4, returns: 1, ..CLASSIC }), Ruling::Divert(Condemn(5))),
            // Forged.
            (Arrival { crashes: u32::MAX, returns: 7, ..COUNTED }, Ruling::Divert(Isolate(u32::MAX))),
            (suspect(Arrival { crashes: u32::MAX, ..CLASSIC }), Ruling::Divert(Condemn(u32::MAX))),
        ];
        for (arrival, expected) in rows {
            assert_eq!(PATIENCE.rule(arrival), expected, "{arrival:?}");
        }
        let patient = Patience { suspect_after: 100, crashes_max: 200 };
        let ruling = patient.rule(Arrival { returns: RETURNS_MAX, ..COUNTED });
        assert_eq!(ruling, Ruling::Divert(Mark(RETURNS_MAX)));
    }

    /// A job that kills every worker, on either kind of queue: how often it does, and how often it was alone then.
    fn victims(counted: bool) -> (u32, u32) {
        let (mut arrival, mut victims, mut alone) = (Arrival { counted, ..CLASSIC }, 0, 0);
        loop {
            match PATIENCE.rule(arrival) {
                Ruling::Divert(Diversion::Condemn(_)) => return (victims, alone),
                Ruling::Divert(Diversion::Mark(crashes)) => {
                    arrival = Arrival { crashes, returns: 0, ..arrival }
                }
                Ruling::Divert(Diversion::Isolate(crashes)) => {
                    arrival = Arrival { crashes, returns: 0, suspect: true, ..arrival };
                }
                Ruling::Run(_) => {
                    victims += 1;
                    alone += u32::from(arrival.suspect);
                    arrival.returns = if counted { arrival.returns + 1 } else { 1 };
                }
            }
        }
    }

    #[test]
    fn a_killer_has_five_victims_and_takes_nobody_with_it_three_times() {
        assert_eq!(victims(true), (5, 3));
        assert_eq!(victims(false), (5, 3));
    }
}
