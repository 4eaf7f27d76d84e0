//! The worker's current status: the event loop writes it; heartbeats, `/livez`, `/readyz` and metrics read it.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use vramq_schemas::status::{CeilingStatus, WorkerState};

use crate::executor::ActivePass;

/// The event loop ticks every second. After so long without a tick it hangs.
const TICK_MISSED_MAX: Duration = Duration::from_secs(30);

/// A state, and why the worker takes no jobs in it. Must stay cheap to compare, because the event loop sets it whenever it is idle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    pub state: WorkerState,
    pub reason: Option<Cow<'static, str>>,
}

impl Status {
    pub fn new(state: WorkerState, reason: impl Into<Cow<'static, str>>) -> Self {
        Self { state, reason: Some(reason.into()) }
    }

    pub fn consuming() -> Self {
        Self { state: WorkerState::Consuming, reason: None }
    }
}

/// Written by the event loop, read by all others.
#[derive(Debug)]
pub struct StatusBoard {
    now: watch::Sender<Status>,
    /// When the event loop last ticked; `None` while there is no session.
    ticked: Mutex<Option<Instant>>,
    /// The passes that run, one for each executor, and how long a pass may take.
    passes: OnceLock<(Vec<ActivePass>, Duration)>,
    ceilings: Mutex<Vec<CeilingStatus>>,
}

impl Default for StatusBoard {
    fn default() -> Self {
        let loading = Status::new(WorkerState::Loading, "models are being loaded");
        Self {
            now: watch::Sender::new(loading),
            ticked: Mutex::default(),
            passes: OnceLock::new(),
            ceilings: Mutex::default(),
        }
    }
}

impl StatusBoard {
    pub fn now(&self) -> Status {
        self.now.borrow().clone()
    }

    /// Notifies about changes of the status.
    pub fn follow(&self) -> watch::Receiver<Status> {
        self.now.subscribe()
    }

    /// Sets the status. Followers are notified only of changes.
    pub fn set(&self, now: Status) {
        self.now.send_if_modified(|before| {
            let changed = *before != now;
            if changed {
                *before = now;
            }
            changed
        });
    }

    /// Records a tick of the event loop.
    pub fn ticked(&self) {
        *lock(&self.ticked) = Some(Instant::now());
    }

    /// There is no session, so the event loop does not tick.
    pub fn no_session(&self) {
        *lock(&self.ticked) = None;
    }

    /// Watches the executors from now on.
    pub fn watch_passes(&self, passes: Vec<ActivePass>, pass_limit: Duration) {
        // An `Err` means that they are already watched. They are set once, at start.
        let _ = self.passes.set((passes, pass_limit));
    }

    pub fn ceilings(&self) -> Vec<CeilingStatus> {
        lock(&self.ceilings).clone()
    }

    pub fn set_ceilings(&self, ceilings: Vec<CeilingStatus>) {
        *lock(&self.ceilings) = ceilings;
    }

    /// Why the worker makes no progress and cannot recover, if so. A missing broker is not a reason.
    pub fn stuck(&self) -> Option<String> {
        let silent = lock(&self.ticked).map(|at| at.elapsed());
        let busy = self
            .passes
            .get()
            .and_then(|(passes, limit)| Some((passes.iter().map(ActivePass::busy_for).max()?, *limit)));
        stuck(silent, busy)
    }
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `silent`: time since the event loop's last tick. `busy`: how long the longest pass has been running, and how long it may.
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
    fn only_a_hanging_event_loop_and_an_endless_pass_are_stuck() {
        let s = Duration::from_secs;
        assert_eq!(stuck(None, None), None);
        assert_eq!(stuck(Some(s(29)), Some((s(10), s(10)))), None);
        assert!(stuck(Some(s(31)), None).is_some_and(|why| why.contains("31 s")));
        assert!(stuck(None, Some((s(11), s(10)))).is_some_and(|why| why.contains("11 s")));
    }

    #[test]
    fn only_changes_are_reported() {
        let board = StatusBoard::default();
        let mut follower = board.follow();
        board.set(Status::consuming());
        assert!(follower.has_changed().unwrap());
        assert_eq!(*follower.borrow_and_update(), Status::consuming());
        board.set(Status::consuming());
        assert!(!follower.has_changed().unwrap());
    }
}
