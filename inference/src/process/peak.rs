//! Measures the device memory of a pass: the most that its process holds meanwhile, beyond what it held when it was loaded.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::task::JoinHandle;
use tokio::time::{Duration, sleep};

use super::memory::{DeviceAccount, Snapshot};
use super::peak_difference::PeakDifference;

/// The interval of the readings. Memory that is held for a shorter time is missed, unless a caching allocator keeps it after the
/// pass, as most do.
const EVERY: Duration = Duration::from_millis(20);

/// How a pass is measured.
#[derive(Debug)]
pub(super) enum Measuring {
    /// The device reports what its process holds.
    Told(Sampler),
    /// It does not.
    Lost(PeakDifference),
    Nothing,
}

impl Measuring {
    /// Before a pass of a process that held `base` bytes when it was loaded. `loaded`: a snapshot from then, if `base` is an estimate. Then
    /// the device does not report all that the process holds, and so not what its passes take either: the memory may be in a daemon.
    pub(super) async fn start(
        account: &Arc<DeviceAccount>,
        keeper: i32,
        base: u64,
        loaded: Option<&Snapshot>,
    ) -> Self {
        match loaded {
            None => Sampler::start(account, keeper, base).await.map_or(Self::Nothing, Self::Told),
            Some(loaded) => PeakDifference::start(account, loaded).await.map_or(Self::Nothing, Self::Lost),
        }
    }

    /// Measures until this is dropped.
    pub(super) async fn go_on(&mut self) -> Infallible {
        match self {
            Self::Lost(difference) => difference.go_on().await,
            // The sampler has a task of its own.
            Self::Told(_) | Self::Nothing => std::future::pending().await,
        }
    }
}

/// A measurement under way. It ends when this is dropped, as in a panic.
#[derive(Debug)]
pub struct Sampler {
    account: Arc<DeviceAccount>,
    keeper: i32,
    base: u64,
    most: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Sampler {
    /// Starts to measure; nothing, if the device cannot tell processes apart.
    pub async fn start(account: &Arc<DeviceAccount>, keeper: i32, base: u64) -> Option<Self> {
        let most = Arc::new(AtomicU64::new(account.sample_under(keeper).await?));
        let stop = Arc::new(AtomicBool::new(false));
        let task = tokio::spawn({
            let (account, most, stop) = (Arc::clone(account), Arc::clone(&most), Arc::clone(&stop));
            async move {
                // The first reading replaces the one from before the pass: memory that the pass returns first is not counted.
                let mut is_first = true;
                while !stop.load(Ordering::Acquire) {
                    sleep(EVERY).await;
                    let Some(held) = account.sample_under(keeper).await else { continue };
                    if std::mem::take(&mut is_first) {
                        most.store(held, Ordering::Release);
                    }
                    most.fetch_max(held, Ordering::AcqRel);
                }
            }
        });
        Some(Self { account: Arc::clone(account), keeper, base, most, stop, task })
    }

    /// The most bytes that the process has held until now.
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::Acquire)
    }

    /// Ends it with a last reading. Returns the most bytes beyond what the loaded process held.
    pub async fn stop(mut self) -> u64 {
        self.stop.store(true, Ordering::Release);
        let last = self.account.sample_under(self.keeper).await.unwrap_or(0);
        let _ = (&mut self.task).await;
        self.most().max(last).saturating_sub(self.base)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::device_view::{DeviceView, Reading};
    use crate::process::memory::RunningPass;

    /// A device that reports what processes hold, and that the program's hold nothing.
    #[derive(Debug)]
    struct HoldsNothing;

    impl DeviceView for HoldsNothing {
        fn name(&self) -> &str {
            "cuda:0"
        }

        fn memory(&self, _: &[i32]) -> Option<Reading> {
            Some(Reading { free: 600, total: 1000, own: 0 })
        }

        fn held_by(&self, _: &[i32]) -> Option<u64> {
            Some(0)
        }

        fn env(&self) -> Vec<(String, String)> {
            Vec::new()
        }
    }

    #[tokio::test]
    async fn a_program_whose_memory_is_in_a_daemon_is_not_measured() {
        let account = DeviceAccount::new(Arc::new(HoldsNothing));
        let keeper = std::process::id().cast_signed();
        let loaded = account.snapshot().await.unwrap();
        // One pass runs, and nothing else moves.
        let _pass =
            account.pass(RunningPass { keeper: None, resident: 0, budget: 0, exclusive: false }).await;
        let told = Measuring::start(&account, keeper, 0, None).await;
        assert!(matches!(told, Measuring::Told(_)), "{told:?}");
        // That it holds 400 is an estimate. To its passes the device would ascribe nothing.
        let estimated = Measuring::start(&account, keeper, 400, Some(&loaded)).await;
        assert!(matches!(estimated, Measuring::Nothing), "{estimated:?}");
    }

    #[tokio::test]
    async fn a_measurement_that_is_dropped_ends() {
        let account = DeviceAccount::new(Arc::new(HoldsNothing));
        let sampler = Sampler::start(&account, std::process::id().cast_signed(), 0).await.unwrap();
        let of_task = Arc::downgrade(&sampler.most);
        drop(sampler);
        let ended = async {
            while of_task.strong_count() > 0 {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), ended).await.expect("its task goes on");
    }
}
