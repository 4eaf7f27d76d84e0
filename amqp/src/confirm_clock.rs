//! A clock that measures how long the broker has had for confirms.

use std::time::{Duration, Instant};

/// Counts the time that the broker has for confirms. Stops while the broker blocks publishers, because then it reads nothing of what was
/// sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ConfirmClock {
    /// The time counted before the last start or stop.
    before: Duration,
    /// When the clock was started; `None` while it is stopped.
    since: Option<Instant>,
}

impl ConfirmClock {
    pub(crate) fn running(now: Instant) -> Self {
        Self { before: Duration::ZERO, since: Some(now) }
    }

    pub(crate) fn read(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    pub(crate) fn stop(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: None };
    }

    pub(crate) fn start(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: Some(now) };
    }

    pub(crate) fn is_running(&self) -> bool {
        self.since.is_some()
    }
}
