//! Measures the device memory of a pass where the device does not report what processes hold: by what it loses meanwhile, if nothing else
//! on it moves.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::time::{Duration, sleep};

use super::claim::tolerance;
use super::memory::{DeviceAccount, Snapshot};

/// The interval of the snapshots, each of which reads all processes of the machine. Memory that is held for a shorter time is missed,
/// unless a caching allocator keeps it after the pass, as most do.
const EVERY: Duration = Duration::from_millis(100);

/// A measurement under way.
#[derive(Debug)]
pub(super) struct PeakDifference {
    account: Arc<DeviceAccount>,
    before: Snapshot,
    /// The device has less free than when the process had been loaded. A program that does not return what it keeps has it, or others do.
    may_keep: bool,
    /// The account's changes by then.
    changes: u64,
    most: u64,
}

impl PeakDifference {
    /// Before a pass that has been entered in the account. `loaded`: a snapshot from when its process had been loaded. Nothing, if
    /// something else moves.
    pub(super) async fn start(account: &Arc<DeviceAccount>, loaded: &Snapshot) -> Option<Self> {
        let changes = account.changes_beside_one_pass()?;
        let before = account.snapshot().await.filter(|before| !before.tells_apart)?;
        let may_keep = before.taken_since(loaded) > tolerance(before.reading.total);
        Some(Self { account: Arc::clone(account), before, may_keep, changes, most: 0 })
    }

    /// Takes snapshots again and again, until this is dropped.
    pub(super) async fn go_on(&mut self) -> Infallible {
        loop {
            sleep(EVERY).await;
            self.snapshot().await;
        }
    }

    pub(super) async fn snapshot(&mut self) {
        if let Some(snapshot) = self.account.snapshot().await {
            self.most = self.most.max(snapshot.taken_since(&self.before));
        }
    }

    /// The most that the pass took. `after`: a snapshot after the program has given back all that it keeps. The device must have as much
    /// free then as before the pass, because otherwise something else has taken or freed memory.
    pub(super) fn peak(&self, after: &Snapshot) -> Option<u64> {
        let tolerance = tolerance(after.reading.total);
        let moved = after.taken_since(&self.before).max(self.before.taken_since(after));
        let is_still = self.account.changes_beside_one_pass() == Some(self.changes);
        // A pass that runs in what its program keeps takes nothing more, and needs that all the same.
        let is_seen = self.most > tolerance || !self.may_keep;
        (is_still && is_seen && moved <= tolerance).then_some(self.most)
    }
}
