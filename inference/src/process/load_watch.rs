//! What a process holds while it loads: if the load fails, so much must return.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::time::{Duration, sleep};

use super::memory::{Claim, DeviceAccount, Look};

/// How often to look. So what others take meanwhile does not count as the program's.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Looks at a device while a process loads. Sees nothing where the device does not report what processes hold: there what a neighbour takes
/// meanwhile would be missing when the load fails.
#[derive(Debug)]
pub struct LoadWatch<F> {
    account: Arc<DeviceAccount>,
    /// A look from before the process was started.
    before: Option<Look>,
    /// The last look that is surely from before the process's death.
    alive: Option<Look>,
    newest: Option<Look>,
    /// The most that the process held.
    held: u64,
    /// Gets the keeper, and what the process holds, at each look.
    holds: F,
}

impl<F: Fn(i32, u64)> LoadWatch<F> {
    pub(super) fn new(account: &Arc<DeviceAccount>, before: Option<Look>, holds: F) -> Self {
        Self { account: Arc::clone(account), before, alive: before, newest: None, held: 0, holds }
    }

    /// Looks again and again, until this is dropped.
    pub(super) async fn go_on(&mut self, keeper: i32) -> Infallible {
        loop {
            sleep(LOOK_EVERY).await;
            self.look(keeper).await;
        }
    }

    /// The load has failed, and the process lives: it is ended next.
    pub(super) async fn ends(&mut self, keeper: i32) {
        self.look(keeper).await;
        self.alive = self.newest.or(self.alive);
    }

    async fn look(&mut self, keeper: i32) {
        let Some(held) = self.account.held_under(keeper).await else { return self.estimate(keeper).await };
        self.held = self.held.max(held);
        self.account.note_taken(keeper, held);
        (self.holds)(keeper, held);
        if let Some(look) = self.account.look().await {
            self.alive = self.newest.replace(look).or(self.alive);
        }
    }

    /// Otherwise what it takes would be missing twice for passes: on the device, and as memory that it was promised.
    async fn estimate(&self, keeper: i32) {
        let look = self.account.look().await.filter(|look| !look.tells_apart);
        if let (Some(look), Some(before)) = (look, self.before) {
            self.account.note_taken(keeper, look.taken_since(&before));
        }
    }

    /// What must return after the process.
    pub(super) fn claim(&self) -> Option<Claim> {
        self.alive.map(|alive| Claim { alive, held: self.held, sure: self.held })
    }
}
