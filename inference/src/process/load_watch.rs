//! What a process holds while it loads: if the load fails, so much must return.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::time::{Duration, sleep};

use super::memory::{Claim, DeviceAccount, Snapshot};

/// How often to take a snapshot. So what others take meanwhile does not count as the program's.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Takes snapshots of a device while a process loads. Sees nothing where the device does not report what processes hold: there what a
/// neighbour takes meanwhile would be missing when the load fails.
#[derive(Debug)]
pub struct LoadWatch<F> {
    account: Arc<DeviceAccount>,
    /// A snapshot from before the process was started.
    before: Option<Snapshot>,
    /// The last snapshot that is surely from before the process's death.
    alive: Option<Snapshot>,
    newest: Option<Snapshot>,
    /// The most that the process held.
    held: u64,
    /// Gets the keeper, and what the process holds, at each snapshot.
    holds: F,
}

impl<F: Fn(i32, u64)> LoadWatch<F> {
    pub(super) fn new(account: &Arc<DeviceAccount>, before: Option<Snapshot>, holds: F) -> Self {
        Self { account: Arc::clone(account), before, alive: before, newest: None, held: 0, holds }
    }

    /// Takes snapshots again and again, until this is dropped.
    pub(super) async fn go_on(&mut self, keeper: i32) -> Infallible {
        loop {
            sleep(LOOK_EVERY).await;
            self.snapshot(keeper).await;
        }
    }

    /// The load has failed, and the process lives: it is ended next.
    pub(super) async fn ends(&mut self, keeper: i32) {
        self.snapshot(keeper).await;
        self.alive = self.newest.or(self.alive);
    }

    async fn snapshot(&mut self, keeper: i32) {
        let Some(held) = self.account.held_under(keeper).await else { return self.estimate(keeper).await };
        self.held = self.held.max(held);
        self.account.note_taken(keeper, held);
        (self.holds)(keeper, held);
        if let Some(snapshot) = self.account.snapshot().await {
            self.alive = self.newest.replace(snapshot).or(self.alive);
        }
    }

    /// Otherwise what it takes would be missing twice for passes: on the device, and as memory that it was promised.
    async fn estimate(&self, keeper: i32) {
        let snapshot = self.account.snapshot().await.filter(|snapshot| !snapshot.tells_apart);
        if let (Some(snapshot), Some(before)) = (snapshot, self.before) {
            self.account.note_taken(keeper, snapshot.taken_since(&before));
        }
    }

    /// What must return after the process.
    pub(super) fn claim(&self) -> Option<Claim> {
        self.alive.map(|alive| Claim { alive, held: self.held, sure: self.held })
    }
}
