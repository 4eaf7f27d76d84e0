//! The device memory of a one-shot program: what must be back before the next program starts in its place.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::{Duration, sleep, timeout};

use super::memory::{Claim, DeviceAccount, Entry, Snapshot};
use super::peak::Sampler;

/// How often to take a snapshot of the device while a program runs. So what others take meanwhile does not count as the program's.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Snapshots that are kept.
const LOOKS_MAX: usize = 4;

/// How long the next item of a pass waits for the memory of the program before.
const BACK_LIMIT: Duration = Duration::from_secs(5);

/// Takes a snapshot of the device.
#[derive(Debug)]
pub(super) struct Snapshots {
    /// Bytes that were free before the program was started; 0 if that is not known.
    free_before: u64,
    /// The last that did not fail, the newest last.
    last: VecDeque<Snapshot>,
}

impl Snapshots {
    /// Snapshots before a program is started.
    pub(super) async fn before(account: &Arc<DeviceAccount>) -> Self {
        let snapshot = account.snapshot().await;
        Self {
            free_before: snapshot.map_or(0, |snapshot| snapshot.reading.free),
            last: snapshot.into_iter().collect(),
        }
    }

    /// Takes snapshots again and again, until this is dropped, and notes what the program holds: a snapshot of the device may fail to tell.
    pub(super) async fn go_on(
        &mut self,
        account: &Arc<DeviceAccount>,
        entry: &Entry,
        sampler: Option<&Sampler>,
    ) -> Infallible {
        loop {
            sleep(LOOK_EVERY).await;
            if let Some(sampler) = sampler {
                entry.holds(sampler.most(), false);
            }
            self.last.extend(account.snapshot().await);
            if self.last.len() > LOOKS_MAX {
                self.last.pop_front();
            }
        }
    }

    /// What is left of a program that held `held` bytes. `ending`: its processes, if they were killed and do not end.
    pub(super) fn left(&self, ending: Option<JoinHandle<()>>, held: u64) -> Left {
        Left { ending, claim: self.claim(held), free_before: self.free_before }
    }

    /// The memory that must return after a program that held `held` bytes.
    ///
    /// The newest snapshot may be from the moment of the program's death, so it does not count. Of the others, the one counts in which
    /// other processes hold the most. A driver that is read at intervals does not show yet what another program of ours has just
    /// taken, and that memory would later seem to be missing.
    fn claim(&self, held: u64) -> Claim {
        let count = self.last.len().saturating_sub(1).max(1);
        let alive = self.last.iter().take(count).copied().max_by_key(Snapshot::others);
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
    /// As in [`Snapshots`].
    free_before: u64,
}

impl Left {
    /// Waits a limited time. Returns whether its processes have ended and there is room for the next program, of which so much is declared.
    pub(super) async fn has_room(&self, account: &Arc<DeviceAccount>, declared: u64) -> bool {
        if self.ending.is_some() {
            return false;
        }
        let room = async {
            account.returning(self.claim).until_back(|_| ()).await;
            if !self.claim.alive.tells_apart {
                // Nobody can tell whose the missing memory is. Where less than the declaration was free, the program before was started all
                // the same.
                let needed = declared.min(self.free_before);
                while needed > 0
                    && account.snapshot().await.is_none_or(|snapshot| snapshot.reading.free < needed)
                {
                    sleep(LOOK_EVERY).await;
                }
            }
        };
        timeout(BACK_LIMIT, room).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::device_view::Reading;

    #[test]
    fn memory_of_other_processes_during_the_program_is_not_claimed() {
        let reading = |others: u64| Reading { free: 900 - others, total: 1000, own: 0 };
        let snapshot = |others: u64| Snapshot {
            reading: reading(others),
            ours: 100,
            staying: 100,
            tells_apart: true,
            ..Snapshot::default()
        };
        let alive = |others: &[u64]| {
            Snapshots { free_before: 0, last: others.iter().copied().map(snapshot).collect() }.claim(7).alive
        };
        assert_eq!(alive(&[50]), snapshot(50));
        assert_eq!(alive(&[50, 400]), snapshot(50));
        assert_eq!(alive(&[50, 300, 0, 400]), snapshot(300));
    }
}
