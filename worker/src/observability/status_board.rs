//! What the worker does at this moment, for whoever asks from outside the loop: heartbeats, `/livez`, `/readyz`, metrics.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use vramq_schemas::status::{CeilingStatus, WorkerState};

use crate::device::thread::Busy;

/// The event loop ticks every second, and waits at most some seconds for the broker in between. After so long it hangs.
const TICK_MISSED_MAX: Duration = Duration::from_secs(30);

/// A state, and why the worker takes no jobs in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Now {
    pub state: WorkerState,
    pub reason: Option<String>,
}

impl Now {
    pub fn new(state: WorkerState, reason: impl Into<String>) -> Self {
        Self { state, reason: Some(reason.into()) }
    }

    pub fn consuming() -> Self {
        Self { state: WorkerState::Consuming, reason: None }
    }
}

/// Written by the loop, read by all others.
#[derive(Debug)]
pub struct Board {
    now: watch::Sender<Now>,
    /// When the loop last ticked; nothing while none runs.
    ticked: Mutex<Option<Instant>>,
    /// The device's thread, and how long a pass may take.
    thread: OnceLock<(Busy, Duration)>,
    ceilings: Mutex<Vec<CeilingStatus>>,
}

impl Default for Board {
    fn default() -> Self {
        let loading = Now::new(WorkerState::Loading, "models are being loaded");
        Self {
            now: watch::Sender::new(loading),
            ticked: Mutex::default(),
            thread: OnceLock::new(),
            ceilings: Mutex::default(),
        }
    }
}

impl Board {
    pub fn now(&self) -> Now {
        self.now.borrow().clone()
    }

    /// Follows the changes of what the worker does.
    pub fn follow(&self) -> watch::Receiver<Now> {
        self.now.subscribe()
    }

    /// The worker does something else, or the same.
    pub fn set(&self, now: Now) {
        self.now.send_if_modified(|before| {
            let changed = *before != now;
            if changed {
                *before = now;
            }
            changed
        });
    }

    /// The loop runs.
    pub fn ticked(&self) {
        *lock(&self.ticked) = Some(Instant::now());
    }

    /// No loop runs: there is no session.
    pub fn no_loop(&self) {
        *lock(&self.ticked) = None;
    }

    /// The device's thread is there from now on.
    pub fn watch_thread(&self, busy: Busy, pass_limit: Duration) {
        // An `Err` is a second thread, of which there is none.
        let _ = self.thread.set((busy, pass_limit));
    }

    pub fn ceilings(&self) -> Vec<CeilingStatus> {
        lock(&self.ceilings).clone()
    }

    pub fn set_ceilings(&self, ceilings: Vec<CeilingStatus>) {
        *lock(&self.ceilings) = ceilings;
    }

    /// Why the worker makes no progress and will not by itself, if so. A broker that is away is no such reason.
    pub fn stuck(&self) -> Option<String> {
        let silent = lock(&self.ticked).map(|at| at.elapsed());
        let busy = self.thread.get().map(|(busy, limit)| (busy.busy_for(), *limit));
        stuck(silent, busy)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `silent`: since the loop's last tick. `busy`: how long the pass that runs has been running, and how long it may.
fn stuck(silent: Option<Duration>, busy: Option<(Duration, Duration)>) -> Option<String> {
    if let Some(silent) = silent.filter(|silent| *silent > TICK_MISSED_MAX) {
        return Some(format!("the event loop has not ticked for {} s", silent.as_secs()));
    }
    let (busy, limit) = busy?;
    (busy > limit).then(|| {
        format!("a pass has been running for {} s, at most {} s are allowed", busy.as_secs(), limit.as_secs())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_that_hangs_and_a_pass_that_does_not_end_are_stuck_and_nothing_else_is() {
        let s = Duration::from_secs;
        assert_eq!(stuck(None, None), None);
        assert_eq!(stuck(Some(s(29)), Some((s(10), s(10)))), None);
        assert!(stuck(Some(s(31)), None).is_some_and(|why| why.contains("31 s")));
        assert!(stuck(None, Some((s(11), s(10)))).is_some_and(|why| why.contains("11 s")));
    }

    #[test]
    fn only_changes_are_told() {
        let board = Board::default();
        let mut follower = board.follow();
        board.set(Now::consuming());
        assert!(follower.has_changed().unwrap());
        assert_eq!(*follower.borrow_and_update(), Now::consuming());
        board.set(Now::consuming());
        assert!(!follower.has_changed().unwrap());
    }
}
