//! Records when the process stood still: it was stopped by a signal, or the machine was paused. Nothing ran meanwhile, so this
//! time does not count as time of a pass.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Without any event for so long, the process was at a standstill. There is a tick each second, and a loaded machine delays it by far less.
const SILENCE_MIN: Duration = Duration::from_secs(5);

/// The most standstills that are remembered. A pass that ran through more of them counts as longer than it was.
const REMEMBERED_MAX: usize = 16;

/// The standstills of a process.
#[derive(Debug, Default)]
pub(crate) struct Standstills {
    /// When something last happened in the session.
    last: Option<Instant>,
    /// Each with its end, oldest first.
    past: VecDeque<(Instant, Duration)>,
}

impl Standstills {
    /// Records an event in a session. If the process stood still before it, returns for how long.
    pub(crate) fn event_came(&mut self, now: Instant) -> Option<Duration> {
        let silence = now.saturating_duration_since(self.last.replace(now)?);
        if silence < SILENCE_MIN {
            return None;
        }
        if self.past.len() == REMEMBERED_MAX {
            self.past.pop_front();
        }
        self.past.push_back((now, silence));
        Some(silence)
    }

    /// Without a session, the absence of events is no standstill.
    pub(crate) fn no_session(&mut self) {
        self.last = None;
    }

    /// How long the process has run since `since`, without standstills.
    pub(crate) fn running_since(&self, since: Instant, now: Instant) -> Duration {
        let stood = self.past.iter().filter(|(end, _)| *end > since);
        // A standstill may have begun before `since`.
        let stood = stood.map(|(end, lasted)| (*lasted).min(end.saturating_duration_since(since)));
        now.saturating_duration_since(since).saturating_sub(stood.sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_standstill_does_not_count_as_running() {
        let (start, mut standstills) = (Instant::now(), Standstills::default());
        for second in 0..=10 {
            assert_eq!(standstills.event_came(start + second * SECOND), None);
        }
        assert_eq!(standstills.event_came(start + 45 * SECOND), Some(35 * SECOND));
        assert_eq!(standstills.event_came(start + 46 * SECOND), None);
        assert_eq!(standstills.event_came(start + 106 * SECOND), Some(60 * SECOND));
        let now = start + 107 * SECOND;
        for (since, running) in [(4, 103 - 95), (20, 87 - 25 - 60), (45, 2), (46, 1), (106, 1), (107, 0)] {
            assert_eq!(
                standstills.running_since(start + since * SECOND, now),
                running * SECOND,
                "since {since}"
            );
        }
    }

    #[test]
    fn the_time_between_sessions_is_no_standstill() {
        let (start, mut standstills) = (Instant::now(), Standstills::default());
        assert_eq!(standstills.event_came(start), None);
        standstills.no_session();
        assert_eq!(standstills.event_came(start + 600 * SECOND), None);
        assert_eq!(standstills.running_since(start, start + 600 * SECOND), 600 * SECOND);
    }

    #[test]
    fn few_standstills_are_remembered() {
        let (start, mut standstills) = (Instant::now(), Standstills::default());
        for at in 0..100 {
            standstills.event_came(start + at * 10 * SECOND);
        }
        assert_eq!(standstills.past.len(), REMEMBERED_MAX);
    }
}
