//! The programs of all process models on a worker's device: started, their memory counted as the worker's, ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vramq_core::ids::ModelIndex;
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{DeviceBook, Learned, Pool, PoolOptions, ProcessConfig, WorkerDevice};

use crate::device::Device;

/// How often it is looked what the programs hold: several times for each look of the event loop.
const LOOK: Duration = Duration::from_millis(400);

/// Besides `kill_s`, how long the end of a model's programs is waited for when the worker ends. What is left then is killed by its
/// keeper as soon as the worker is gone.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// All programs of a worker.
#[derive(Debug)]
pub struct Programs {
    book: Arc<DeviceBook>,
    pools: Vec<(ModelIndex, Arc<Pool>)>,
    /// Bytes of the device that the programs hold, passes included.
    held: AtomicU64,
    /// Those that they held between passes.
    resident: AtomicU64,
}

impl Programs {
    /// None on a device yet.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self {
            book: WorkerDevice::book(device),
            pools: Vec::new(),
            held: AtomicU64::new(0),
            resident: AtomicU64::new(0),
        }
    }

    /// Starts a model's first process, and waits until it is loaded.
    ///
    /// # Errors
    /// The model cannot be loaded; nothing of it is left.
    pub async fn start(
        &mut self,
        model: ModelIndex,
        config: ProcessConfig,
        budget: u64,
    ) -> Result<Arc<Pool>, LoadError> {
        let options = PoolOptions {
            launcher: Launcher::default(),
            book: Arc::clone(&self.book),
            budget,
            learned: Learned::default(),
        };
        let pool = Arc::new(Pool::start(config, options).await?);
        self.pools.push((model, Arc::clone(&pool)));
        self.look().await;
        Ok(pool)
    }

    /// The models and their processes.
    pub fn pools(&self) -> impl Iterator<Item = (ModelIndex, &Arc<Pool>)> {
        self.pools.iter().map(|(model, pool)| (*model, pool))
    }

    /// Bytes of the device that the programs hold. The device counts them as those of other processes.
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes of it that come back when the passes that run now end.
    pub fn active_pass_bytes(&self) -> u64 {
        self.held().saturating_sub(self.resident.load(Ordering::Relaxed))
    }

    /// Looks again and again, for as long as the runtime lives.
    pub fn watch(self: &Arc<Self>) {
        if self.pools.is_empty() {
            return;
        }
        let programs = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                programs.look().await;
                tokio::time::sleep(LOOK).await;
            }
        });
    }

    async fn look(&self) {
        let held = self.book.look().await.ours;
        let resident = self.pools.iter().map(|(_, pool)| pool.status().held_bytes()).sum();
        self.held.store(held, Ordering::Relaxed);
        self.resident.store(resident, Ordering::Relaxed);
    }

    /// Has programs without work give cached memory back.
    pub fn trim(&self) {
        self.pools.iter().for_each(|(_, pool)| pool.trim());
    }

    /// Ends all of them.
    pub async fn close(&self) {
        let close = async |pool: &Pool| {
            let limit = pool.config().kill + CLOSE_LIMIT;
            if tokio::time::timeout(limit, pool.close()).await.is_err() {
                tracing::warn!(model = pool.config().name, "processes of the model did not end in time");
            }
        };
        futures_util::future::join_all(self.pools.iter().map(|(_, pool)| close(pool))).await;
    }
}
