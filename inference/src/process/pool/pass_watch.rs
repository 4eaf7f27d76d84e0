//! Keeps the claim on the memory of a process current while the process runs a pass.

use std::convert::Infallible;
use std::sync::Arc;

use tokio::time::{Duration, sleep};

use crate::process::memory::{Claim, DeviceAccount, Snapshot};

/// How often to take a snapshot of the device while a pass runs. So what others take meanwhile does not count as memory of a process that
/// dies in it.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Takes snapshots of the device again and again while a pass runs, until this is dropped, for the claim on the memory of its process. The
/// newest snapshot may be from the moment of the process's death, so it does not count. Nor do snapshots that show what the pass takes as
/// memory of others.
pub(super) async fn beside_pass(
    account: &Arc<DeviceAccount>,
    last: &mut Option<Claim>,
    is_told: bool,
    every: Duration,
) -> Infallible {
    let mut newest: Option<Snapshot> = None;
    loop {
        sleep(every).await;
        let Some(snapshot) = account.snapshot().await.filter(|snapshot| snapshot.tells_apart && is_told)
        else {
            continue;
        };
        if let (Some(claim), Some(before)) = (last.as_mut(), newest.replace(snapshot)) {
            claim.alive = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::process::device_view::{DeviceView, Reading};

    /// A device of which others take a byte before each snapshot. It can be read four times.
    #[derive(Debug, Default)]
    struct Shrinking(AtomicU64);

    impl DeviceView for Shrinking {
        fn name(&self) -> &str {
            "cuda:0"
        }

        fn memory(&self, _: &[i32]) -> Option<Reading> {
            let taken = self.0.fetch_add(1, Ordering::Relaxed);
            (taken < 4).then(|| Reading { free: 1000 - taken, total: 1000, own: 0 })
        }

        fn held_by(&self, _: &[i32]) -> Option<u64> {
            Some(0)
        }

        fn env(&self) -> Vec<(String, String)> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn memory_that_other_processes_take_in_a_long_pass_is_not_claimed() {
        for (is_told, free) in [(true, 998), (false, 1000)] {
            let device = Arc::new(Shrinking::default());
            let account = DeviceAccount::new(Arc::<Shrinking>::clone(&device));
            let alive = account.snapshot().await.unwrap();
            let mut last = Some(Claim { alive, held: 500, sure: 500 });
            let looked = async {
                while device.0.load(Ordering::Relaxed) < 6 {
                    sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::select! {
                never = beside_pass(&account, &mut last, is_told, Duration::from_millis(1)) => match never {},
                () = looked => {}
            }
            // The third snapshot of the pass may be from after the process's death.
            assert_eq!(last.unwrap().alive.reading.free, free, "{is_told}");
        }
    }
}
