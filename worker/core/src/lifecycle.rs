//! Whether the worker takes jobs, is paused, drains, or requeues its unfinished jobs. Owns the deadline of a drain.

use std::time::{Duration, Instant};

/// The state of the worker. A pause and a drain outlive sessions.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    is_paused: bool,
    /// Asked to stop: no session is opened any more.
    is_draining: bool,
    /// A signal asked the process to stop. A drain can also start without a signal.
    is_asked_to_stop: bool,
    /// The process ends in order to be started again.
    restarts: bool,
    /// The device is unusable until the process restarts.
    device_lost: bool,
    /// No pass starts any more: all jobs are requeued.
    requeues_all: bool,
    /// When the drain of this session is out of time.
    deadline: Option<Instant>,
}

impl Lifecycle {
    /// A session begins. On an unusable device it requeues every job that it receives.
    pub(crate) fn session_opened(&mut self, is_sick: bool) {
        (self.requeues_all, self.device_lost, self.deadline) = (is_sick, false, None);
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(crate) fn set_paused(&mut self, paused: bool) -> bool {
        std::mem::replace(&mut self.is_paused, paused)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Whether a drain of this session has begun.
    pub(crate) fn has_deadline(&self) -> bool {
        self.deadline.is_some()
    }

    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Begins a drain. Returns its half time and its deadline.
    pub(crate) fn drain(&mut self, now: Instant, within: Duration) -> (Instant, Instant) {
        self.is_draining = true;
        self.deadline = Some(now + within);
        (now + within / 2, now + within)
    }

    pub(crate) fn requeues_all(&self) -> bool {
        self.requeues_all
    }

    pub(crate) fn requeue_all(&mut self) {
        self.requeues_all = true;
    }

    /// The device works again: jobs may run, unless the worker drains.
    pub(crate) fn device_recovered(&mut self) {
        self.requeues_all = self.is_draining;
    }

    pub(crate) fn restarts(&self) -> bool {
        self.restarts
    }

    /// The process ends in order to be restarted, unless it was asked to stop before.
    pub(crate) fn restart(&mut self) {
        self.restarts |= !self.is_draining;
    }

    /// Records a signal to stop. True if there was one before.
    pub(crate) fn ask_to_stop(&mut self) -> bool {
        std::mem::replace(&mut self.is_asked_to_stop, true)
    }

    /// The process was asked to stop, so it must not be restarted. True if a restart was planned.
    pub(crate) fn cancel_restart(&mut self) -> bool {
        std::mem::take(&mut self.restarts)
    }

    /// Records that the device is lost. False if that was known.
    pub(crate) fn lose_device(&mut self) -> bool {
        !std::mem::replace(&mut self.device_lost, true)
    }
}
