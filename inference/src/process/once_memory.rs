//! The device memory of a one-shot program: what must be back before the next program starts in its place.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::{Duration, sleep, timeout};

use super::memory::{Claim, DeviceAccount, Look};

/// How often to look at the device while a program runs. So what others take meanwhile does not count as the program's.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Looks that are kept.
const LOOKS_MAX: usize = 4;

/// How long the next item of a pass waits for the memory of the program before.
const BACK_LIMIT: Duration = Duration::from_secs(5);

/// The last looks at the device that did not fail, the newest last.
#[derive(Debug)]
pub(super) struct Looks(VecDeque<Look>);

impl Looks {
    /// Looks before a program is started.
    pub(super) async fn before(account: &Arc<DeviceAccount>) -> Self {
        Self(account.look().await.into_iter().collect())
    }

    /// Looks again and again, until this is dropped.
    pub(super) async fn go_on(&mut self, account: &Arc<DeviceAccount>) -> Infallible {
        loop {
            sleep(LOOK_EVERY).await;
            self.0.extend(account.look().await);
            if self.0.len() > LOOKS_MAX {
                self.0.pop_front();
            }
        }
    }

    /// The memory that must return after a program that held `held` bytes.
    ///
    /// The newest look may be from the moment of the program's death, so it does not count. Of the others, the one counts in which
    /// other processes hold the most. A driver that is read at intervals does not show yet what another program of ours has just
    /// taken, and that memory would later seem to be missing.
    pub(super) fn claim(&self, held: u64) -> Claim {
        let count = self.0.len().saturating_sub(1).max(1);
        let alive = self.0.iter().take(count).copied().max_by_key(Look::others);
        // Where the device was never read, nobody knows what is missing.
        let held = if alive.is_some() { held } else { 0 };
        Claim { alive: alive.unwrap_or_default(), held, sure: held }
    }
}

/// What a program leaves when it has ended.
#[derive(Debug)]
pub(super) struct Left {
    /// Its processes, if they were killed and do not end.
    pub(super) ending: Option<JoinHandle<()>>,
    pub(super) claim: Claim,
}

impl Left {
    /// Waits a limited time. Returns whether its processes have ended and its memory is back.
    pub(super) async fn is_back(&self, account: &Arc<DeviceAccount>) -> bool {
        if self.ending.is_some() {
            return false;
        }
        timeout(BACK_LIMIT, account.returning(self.claim).until_back(|_| ())).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::device_view::Reading;

    #[test]
    fn what_others_held_while_the_program_ran_is_not_claimed() {
        let reading = |others: u64| Reading { free: 900 - others, total: 1000, own: 0 };
        let look = |others: u64| Look {
            reading: reading(others),
            ours: 100,
            staying: 100,
            tells_apart: true,
            ..Look::default()
        };
        let alive = |others: &[u64]| Looks(others.iter().copied().map(look).collect()).claim(7).alive;
        assert_eq!(alive(&[50]), look(50));
        assert_eq!(alive(&[50, 400]), look(50));
        assert_eq!(alive(&[50, 300, 0, 400]), look(300));
    }
}
