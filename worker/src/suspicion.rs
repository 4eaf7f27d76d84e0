//! Which jobs may be the reason why workers vanish. Pure.
//!
//! A worker that dies takes all jobs in its hands with it, one of which may have killed it. The broker only tells that
//! they come again. So a job that came back once runs on; one that came back twice moves to the suspects' queue, of which
//! a worker takes one job at a time and nothing else besides: what comes back from there was alone in the hands of a worker
//! that vanished.

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
    /// How often this process held it when it lost a session, or gave it back: it has not vanished.
    pub held_here: u32,
    /// From the suspects' queue.
    pub suspect: bool,
}

/// What is to be done with it. A number is that of workers that vanished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ruling {
    Run,
    /// In passes without other jobs.
    RunAlone,
    /// Back to where it came from, as a new message that says so.
    Mark(u32),
    /// To the suspects.
    Isolate(u32),
    /// To the dead letters.
    Condemn(u32),
}

impl Patience {
    pub fn rule(&self, arrival: Arrival) -> Ruling {
        let Arrival { crashes, returns, counted, held_here, suspect } = arrival;
        let charged = crashes.saturating_add(returns.saturating_sub(held_here));
        // Where the broker does not count, the next return could not be told from this one.
        let marked = counted || charged == crashes;
        match (suspect, marked) {
            (true, _) if charged >= self.crashes_max => Ruling::Condemn(charged),
            (false, _) if charged >= self.suspect_after => Ruling::Isolate(charged),
            (_, false) => Ruling::Mark(charged),
            (_, true) if returns >= RETURNS_MAX => Ruling::Mark(charged),
            (true, true) => Ruling::RunAlone,
            (false, true) => Ruling::Run,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience { suspect_after: 2, crashes_max: 5 };

    /// Quorum queues count.
    const COUNTED: Arrival = Arrival { crashes: 0, returns: 0, counted: true, held_here: 0, suspect: false };
    const CLASSIC: Arrival = Arrival { counted: false, ..COUNTED };

    #[test]
    fn every_row_of_the_table() {
        let suspect = |arrival: Arrival| Arrival { suspect: true, ..arrival };
        let held_here = |arrival: Arrival| Arrival { held_here: 1, ..arrival };
        let rows = [
            (COUNTED, Ruling::Run),
            (Arrival { returns: 1, ..COUNTED }, Ruling::Run),
            (Arrival { returns: 2, ..COUNTED }, Ruling::Isolate(2)),
            (Arrival { crashes: 1, returns: 1, ..COUNTED }, Ruling::Isolate(2)),
            (Arrival { crashes: 1, ..COUNTED }, Ruling::Run),
            // Another attempt of a suspect, after an out-of-memory say.
            (Arrival { crashes: 2, ..COUNTED }, Ruling::Isolate(2)),
            // This process lost its session, which is nobody's fault; until the broker would lose patience.
            (held_here(Arrival { returns: 1, ..COUNTED }), Ruling::Run),
            (held_here(Arrival { returns: 2, ..COUNTED }), Ruling::Run),
            (held_here(Arrival { returns: 3, ..COUNTED }), Ruling::Isolate(2)),
            (held_here(Arrival { crashes: 1, returns: 1, ..CLASSIC }), Ruling::Run),
            (Arrival { held_here: 9, returns: 9, ..COUNTED }, Ruling::Run),
            (Arrival { held_here: 10, returns: 10, ..COUNTED }, Ruling::Mark(0)),
            (CLASSIC, Ruling::Run),
            (Arrival { returns: 1, ..CLASSIC }, Ruling::Mark(1)),
            (Arrival { crashes: 1, ..CLASSIC }, Ruling::Run),
            (Arrival { crashes: 1, returns: 1, ..CLASSIC }, Ruling::Isolate(2)),
            (suspect(Arrival { crashes: 2, ..COUNTED }), Ruling::RunAlone),
            (suspect(Arrival { crashes: 2, returns: 2, ..COUNTED }), Ruling::RunAlone),
            (suspect(Arrival { crashes: 2, returns: 3, ..COUNTED }), Ruling::Condemn(5)),
            (suspect(held_here(Arrival { crashes: 2, returns: 3, ..COUNTED })), Ruling::RunAlone),
            (suspect(Arrival { crashes: 2, ..CLASSIC }), Ruling::RunAlone),
            (suspect(Arrival { crashes: 2, returns: 1, ..CLASSIC }), Ruling::Mark(3)),
            (suspect(Arrival { crashes: 4, returns: 1, ..CLASSIC }), Ruling::Condemn(5)),
            // Forged.
            (Arrival { crashes: u32::MAX, returns: u32::MAX, ..COUNTED }, Ruling::Isolate(u32::MAX)),
            (suspect(Arrival { crashes: u32::MAX, ..CLASSIC }), Ruling::Condemn(u32::MAX)),
        ];
        for (arrival, expected) in rows {
            assert_eq!(PATIENCE.rule(arrival), expected, "{arrival:?}");
        }
        let patient = Patience { suspect_after: 100, crashes_max: 200 };
        assert_eq!(patient.rule(Arrival { returns: RETURNS_MAX, ..COUNTED }), Ruling::Mark(RETURNS_MAX));
    }

    /// A job that kills every worker, on either kind of queue: how often it does, and how often it was alone then.
    fn victims(counted: bool) -> (u32, u32) {
        let (mut arrival, mut victims, mut alone) = (Arrival { counted, ..CLASSIC }, 0, 0);
        loop {
            match PATIENCE.rule(arrival) {
                Ruling::Condemn(_) => return (victims, alone),
                Ruling::Mark(crashes) => arrival = Arrival { crashes, returns: 0, ..arrival },
                Ruling::Isolate(crashes) => {
                    arrival = Arrival { crashes, returns: 0, suspect: true, ..arrival };
                }
                ruling => {
                    victims += 1;
                    alone += u32::from(ruling == Ruling::RunAlone);
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
