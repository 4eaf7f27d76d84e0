//! Measures the device memory of a pass where the device does not report what processes hold: by what it loses meanwhile, if nothing else
//! on it moves.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::time::{Duration, sleep};

use super::claim::tolerance;
use super::memory::{DeviceAccount, Look};

/// The interval of the looks, each of which reads all processes of the machine. Memory that is held for a shorter time is missed, unless a
/// caching allocator keeps it after the pass, as most do.
const EVERY: Duration = Duration::from_millis(100);

/// A measurement under way.
#[derive(Debug)]
pub(super) struct PeakDifference {
    account: Arc<DeviceAccount>,
    before: Look,
    /// The account's changes by then.
    changes: u64,
    most: u64,
}

impl PeakDifference {
    /// Before a pass that has been entered in the account; nothing, if something else moves.
    pub(super) async fn start(account: &Arc<DeviceAccount>) -> Option<Self> {
        let changes = account.changes_beside_one_pass()?;
        let before = account.look().await?;
        Some(Self { account: Arc::clone(account), before, changes, most: 0 })
    }

    /// Looks again and again, until this is dropped.
    pub(super) async fn go_on(&mut self) -> Infallible {
        loop {
            sleep(EVERY).await;
            self.look().await;
        }
    }

    pub(super) async fn look(&mut self) {
        if let Some(look) = self.account.look().await {
            self.most = self.most.max(look.taken_since(&self.before));
        }
    }

    /// The most that the pass took. `after`: a look after the program has given back all that it keeps. The device must have as much free
    /// then as before the pass, because otherwise something else has taken or freed memory.
    pub(super) fn peak(&self, after: &Look) -> Option<u64> {
        let moved = after.taken_since(&self.before).max(self.before.taken_since(after));
        let is_still = self.account.changes_beside_one_pass() == Some(self.changes);
        (is_still && moved <= tolerance(after.reading.total)).then_some(self.most)
    }
}
