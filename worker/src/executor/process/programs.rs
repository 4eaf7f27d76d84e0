//! Starts and ends the programs of all process models on a worker's device, and counts their device memory as the worker's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vramq_core::ids::ModelIndex;
use vramq_inference::process::cgroup::{Cgroups, NotDelegated};
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{DeviceBook, Learned, Pool, PoolOptions, ProcessConfig, WorkerDevice};

use crate::device::Device;
use crate::state_file::{ProgramKey, ProgramMemory, StateFile};

/// How often it is looked what the programs hold: several times for each look of the event loop.
const LOOK: Duration = Duration::from_millis(400);

/// How often what was learned of programs is written down, if there is anything new. What a crash loses is learned again.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// Besides `kill_s`, how long the end of a model's programs is waited for when the worker ends. What is left then is killed by its
/// keeper as soon as the worker is gone.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How long a pass waits for memory that idle programs keep, and how often it looks. A program that takes longer runs out of its own time.
const ROOM_LIMIT: Duration = Duration::from_secs(2);
const ROOM_LOOK: Duration = Duration::from_millis(50);

/// All programs of a worker.
#[derive(Debug)]
pub struct Programs {
    book: Arc<DeviceBook>,
    device: Arc<dyn Device>,
    pools: Vec<(ModelIndex, Arc<Pool>)>,
    /// Where what is learned outlives the process, and what of it is there.
    state_file: StateFile,
    /// Where programs have control groups of their own, or why they have none; known with the first program.
    cgroups: Option<Result<Cgroups, NotDelegated>>,
    saved: Mutex<BTreeMap<ProgramKey, ProgramMemory>>,
    /// Bytes of the device that the programs hold, passes included.
    held: AtomicU64,
    /// Those that they hold besides what passes take and what is kept for the next ones: what is loaded, or is being loaded.
    resident: AtomicU64,
    /// Whether the worker has several models.
    shares_device: bool,
}

impl Programs {
    /// None on a device yet.
    pub fn new(device: Arc<dyn Device>, state_file: StateFile, shares_device: bool) -> Self {
        let saved = Mutex::new(state_file.read_programs());
        Self {
            book: WorkerDevice::book(Arc::clone(&device)),
            device,
            pools: Vec::new(),
            state_file,
            cgroups: None,
            saved,
            held: AtomicU64::new(0),
            resident: AtomicU64::new(0),
            shares_device,
        }
    }

    /// Starts a model's first process, and waits until it is loaded.
    ///
    /// # Errors
    /// The model cannot be loaded; nothing of it is left, except what does not end although it was killed.
    pub async fn start(
        &mut self,
        model: ModelIndex,
        config: ProcessConfig,
        budget: u64,
    ) -> Result<Arc<Pool>, LoadError> {
        let (launcher, learned) = (self.launcher(), self.learned_before(&config));
        let (book, shares_device) = (Arc::clone(&self.book), self.shares_device);
        let options = PoolOptions { launcher, book, budget, learned, shares_device };
        let pool = Arc::new(Pool::start(config, options).await?);
        self.pools.push((model, Arc::clone(&pool)));
        self.look().await;
        Ok(pool)
    }

    /// How programs are started. Before the first one this process moves into the leaf of its control group, if it is delegated.
    fn launcher(&mut self) -> Launcher {
        let cgroups = self.cgroups.get_or_insert_with(|| {
            Cgroups::prepare()
                .inspect(|cgroups| tracing::info!(%cgroups, "each program runs in a cgroup of its own"))
                .inspect_err(|reason| tracing::info!(%reason, "programs run in the cgroup of the worker"))
        });
        Launcher { cgroups: cgroups.as_ref().ok().cloned(), ..Launcher::default() }
    }

    /// Where programs have control groups of their own, or why they have none; nothing without programs.
    pub fn cgroups(&self) -> Option<&Result<Cgroups, NotDelegated>> {
        self.cgroups.as_ref()
    }

    /// What an earlier worker learned of the same program on the same device.
    fn learned_before(&self, config: &ProcessConfig) -> Learned {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let known = saved.get(&self.key(config)).filter(|known| known.program == program(config));
        known.map(|known| known.learned.clone()).unwrap_or_default()
    }

    fn key(&self, config: &ProcessConfig) -> ProgramKey {
        let (device, total) = (self.device.name().to_owned(), self.device.memory().total);
        ProgramKey { model: config.name.clone(), device, total }
    }

    /// Writes down what was learned since the last time. Blocks for as long as the disk takes.
    fn save(&self) {
        let known = |(_, pool): &(ModelIndex, Arc<Pool>)| {
            let config = pool.config();
            let memory = ProgramMemory { program: program(config), learned: pool.learned() };
            config.vram.learn.then(|| (self.key(config), memory))
        };
        let now: BTreeMap<_, _> = self.pools.iter().filter_map(known).collect();
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let changed: BTreeMap<_, _> =
            now.into_iter().filter(|(key, memory)| saved.get(key) != Some(memory)).collect();
        if changed.is_empty() {
            return;
        }
        self.state_file.write_programs(changed.clone());
        saved.extend(changed);
    }

    /// The models and their processes.
    pub fn pools(&self) -> impl Iterator<Item = (ModelIndex, &Arc<Pool>)> {
        self.pools.iter().map(|(model, pool)| (*model, pool))
    }

    /// Bytes of the device that the programs hold. The device counts them as those of other processes.
    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Bytes of it that come back when the passes that run now end, or that programs keep for their next passes: they count as free.
    pub fn active_pass_bytes(&self) -> u64 {
        self.held().saturating_sub(self.resident.load(Ordering::Relaxed))
    }

    /// Bytes of it that are not in the way of a pass of this model which ran out of memory. What idle programs keep is in the way of an
    /// engine of the worker itself for a moment, like memory of other processes. A program's pass has them trimmed before it runs.
    pub fn needed(&self, model: ModelIndex) -> u64 {
        let is_program = self.pools.iter().any(|(of, _)| *of == model);
        let run = self.pools.iter().any(|(_, pool)| pool.status().is_running());
        if is_program || run { self.held() } else { self.resident.load(Ordering::Relaxed) }
    }

    /// Has the idle programs beside this one give back what they keep for their next passes, until so many bytes are free or there is
    /// nothing more to give. That memory counts as free, so a pass may be admitted to it.
    pub async fn make_room(&self, beside: &Arc<Pool>, bytes: u64) {
        let deadline = Instant::now() + ROOM_LIMIT;
        while self.device.memory().free < bytes && Instant::now() < deadline {
            let others = || self.pools.iter().map(|(_, pool)| pool).filter(|pool| !Arc::ptr_eq(pool, beside));
            if !others().any(|pool| pool.status().keeps_memory_idle()) {
                return;
            }
            others().for_each(|pool| pool.trim());
            tokio::time::sleep(ROOM_LOOK).await;
        }
    }

    /// Reads and saves what was learned, at intervals, until the runtime ends.
    pub fn watch(self: &Arc<Self>) {
        if self.pools.is_empty() {
            return;
        }
        let programs = Arc::clone(self);
        tokio::spawn(async move {
            let mut saved_at = Instant::now();
            loop {
                programs.look().await;
                tokio::time::sleep(LOOK).await;
                if saved_at.elapsed() >= SAVE_EVERY {
                    programs.save_off_the_runtime().await;
                    saved_at = Instant::now();
                }
            }
        });
    }

    /// Writes down what was learned.
    pub async fn save_off_the_runtime(self: &Arc<Self>) {
        let programs = Arc::clone(self);
        // An error: it panicked, which is in the log.
        let _ = tokio::task::spawn_blocking(move || programs.save()).await;
    }

    async fn look(&self) {
        let held = self.book.look().await.ours;
        let mut resident = 0;
        for (_, pool) in &self.pools {
            // A process that has just been loaded counts twice for a moment, rather than not at all: less counts as free.
            resident += pool.loading_bytes().await;
            resident += pool.status().resident_bytes();
        }
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
                tracing::warn!(
                    model = pool.config().name,
                    "processes of the model did not end in time: the worker ends without them, and their keepers go on killing them"
                );
            }
        };
        futures_util::future::join_all(self.pools.iter().map(|(_, pool)| close(pool))).await;
    }
}

/// What identifies a program whose peaks are learned: what it runs, and the unit that its memory goes by.
fn program(config: &ProcessConfig) -> String {
    format!("{} {}", config.program_revision(), config.vram.per.as_str())
}
