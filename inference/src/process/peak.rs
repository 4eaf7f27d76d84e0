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
    /// The device reports what processes hold.
    Told(Sampler),
    /// It does not.
    Lost(PeakDifference),
    Nothing,
}

impl Measuring {
    /// Before a pass of a process that held `base` bytes when it was loaded. `loaded`: a snapshot from then, if `base` is an estimate.
    pub(super) async fn start(
        account: &Arc<DeviceAccount>,
        keeper: i32,
        base: u64,
        loaded: Option<&Snapshot>,
    ) -> Self {
        if let Some(sampler) = Sampler::start(account, keeper, base).await {
            return Self::Told(sampler);
        }
        let Some(loaded) = loaded else { return Self::Nothing };
        PeakDifference::start(account, loaded).await.map_or(Self::Nothing, Self::Lost)
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

/// A measurement under way.
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
    pub async fn stop(self) -> Option<u64> {
        self.stop.store(true, Ordering::Release);
        let last = self.account.sample_under(self.keeper).await.unwrap_or(0);
        let _ = self.task.await;
        Some(self.most.load(Ordering::Acquire).max(last).saturating_sub(self.base))
    }
}
