//! Starts and ends the programs of all process models on a worker's device, and counts their device memory as the worker's.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use vramq_core::ids::ModelIndex;
use vramq_inference::process::cgroup::{Cgroups, NotDelegated};
use vramq_inference::process::launch::Launcher;
use vramq_inference::process::warm::LoadError;
use vramq_inference::process::{DeviceAccount, Learned, Pool, PoolOptions, ProcessConfig, WorkerDevice};

use crate::device::Device;
use crate::state_file::{ProgramKey, ProgramMemory, StateFile};

/// How often the programs' memory is read: several times for each tick of the event loop.
const LOOK: Duration = Duration::from_millis(400);

/// How often new learned values are saved. Values lost in a crash are learned again.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// How long, besides `kill_s`, the worker waits at its end for a model's programs to end. Their keepers kill the remaining ones as soon as
/// the worker is gone.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// How long a pass waits for memory that idle programs keep, and how often it checks. A slower program uses up the pass's own time.
const ROOM_LIMIT: Duration = Duration::from_secs(2);
const ROOM_LOOK: Duration = Duration::from_millis(50);

/// All programs of a worker.
#[derive(Debug)]
pub struct Programs {
    account: Arc<DeviceAccount>,
    device: Arc<dyn Device>,
    served: Vec<Served>,
    /// The file for learned values, and its content at start.
    state_file: StateFile,
    /// How programs get control groups, or why they get none. Set by the first program.
    cgroups: Option<Result<Cgroups, NotDelegated>>,
    saved: Mutex<BTreeMap<ProgramKey, ProgramMemory>>,
    /// Bytes of the device that the programs hold, passes included.
    held: AtomicU64,
    /// The part of `held` without passes and kept memory: models that are loaded or being loaded.
    resident: AtomicU64,
    /// Whether the worker has several models.
    shares_device: bool,
}

/// A model's processes.
#[derive(Debug)]
struct Served {
    model: ModelIndex,
    pool: Arc<Pool>,
    /// Its [`program`] at the start: what the processes learn is saved as of this one, also if its files are exchanged later.
    program: String,
}

impl Programs {
    /// No programs on a device yet.
    pub fn new(device: Arc<dyn Device>, state_file: StateFile, shares_device: bool) -> Self {
        let saved = Mutex::new(state_file.read_programs());
        Self {
            account: WorkerDevice::account(Arc::clone(&device)),
            device,
            served: Vec::new(),
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
    /// The model cannot be loaded. Nothing of it is left, unless it survives being killed.
    pub async fn start(
        &mut self,
        model: ModelIndex,
        config: ProcessConfig,
        budget: u64,
    ) -> Result<Arc<Pool>, LoadError> {
        let program = program(&config);
        let (launcher, learned) = (self.launcher(), self.learned_before(&config, &program));
        let (account, shares_device) = (Arc::clone(&self.account), self.shares_device);
        let options = PoolOptions { launcher, account, budget, learned, shares_device };
        let pool = Arc::new(Pool::start(config, options).await?);
        self.served.push(Served { model, pool: Arc::clone(&pool), program });
        self.read_memory().await;
        Ok(pool)
    }

    /// The launcher of programs. For the first program this process moves into the leaf of its control group, if the group is delegated.
    fn launcher(&mut self) -> Launcher {
        let cgroups = self.cgroups.get_or_insert_with(|| {
            Cgroups::prepare()
                .inspect(|cgroups| tracing::info!(%cgroups, "each program runs in a cgroup of its own"))
                .inspect_err(|reason| tracing::info!(%reason, "programs run in the cgroup of the worker"))
        });
        Launcher { cgroups: cgroups.as_ref().ok().cloned(), ..Launcher::default() }
    }

    /// How programs get control groups, or why they get none. `None` without programs.
    pub fn cgroups(&self) -> Option<&Result<Cgroups, NotDelegated>> {
        self.cgroups.as_ref()
    }

    /// Values that an earlier worker learned of the same program on the same device.
    fn learned_before(&self, config: &ProcessConfig, program: &str) -> Learned {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let known = saved.get(&self.key(config)).filter(|known| known.program == program);
        known.map(|known| known.learned.clone()).unwrap_or_default()
    }

    fn key(&self, config: &ProcessConfig) -> ProgramKey {
        let (device, total) = (self.device.name().to_owned(), self.device.memory().total);
        ProgramKey { model: config.name.clone(), device, total }
    }

    /// Saves what was learned since the last save. Blocks while the disk writes.
    fn save(&self) {
        let known = |Served { pool, program, .. }: &Served| {
            let config = pool.config();
            let memory = ProgramMemory { program: program.clone(), learned: pool.learned() };
            config.vram.learn.then(|| (self.key(config), memory))
        };
        let now: BTreeMap<_, _> = self.served.iter().filter_map(known).collect();
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
        self.served.iter().map(|served| (served.model, &served.pool))
    }

    /// Bytes of the device that the programs hold. The device counts them as those of other processes.
    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// The part of `held` that counts as free: it comes back when the running passes end, or programs keep it for their next
    /// passes.
    pub fn active_pass_bytes(&self) -> u64 {
        self.held().saturating_sub(self.resident.load(Ordering::Relaxed))
    }

    /// Bytes of the device that are promised to programs which are loading, and not taken yet.
    pub fn promised(&self) -> u64 {
        self.account.promised()
    }

    /// The part of `held` that did not cause an out-of-memory of this model's pass. Memory that idle programs keep can be in
    /// the way of the worker's own engines, like memory of other processes. For a program's pass it is trimmed first.
    pub fn needed(&self, model: ModelIndex) -> u64 {
        let is_program = self.pools().any(|(of, _)| of == model);
        let run = self.pools().any(|(_, pool)| pool.status().is_running());
        if is_program || run { self.held() } else { self.resident.load(Ordering::Relaxed) }
    }

    /// Asks other idle programs to free kept memory, until so many bytes are free or nothing is left to free. That memory counts as free,
    /// so a pass may have been admitted to it.
    pub async fn make_room(&self, beside: &Arc<Pool>, bytes: u64) {
        let deadline = Instant::now() + ROOM_LIMIT;
        while self.device.memory().free < bytes && Instant::now() < deadline {
            let others = || self.pools().map(|(_, pool)| pool).filter(|pool| !Arc::ptr_eq(pool, beside));
            if !others().any(|pool| pool.status().keeps_memory_idle()) {
                return;
            }
            others().for_each(|pool| pool.trim());
            tokio::time::sleep(ROOM_LOOK).await;
        }
    }

    /// Reads the memory and saves learned values at intervals, until the runtime ends.
    pub fn watch(self: &Arc<Self>) {
        if self.served.is_empty() {
            return;
        }
        let programs = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                programs.read_memory().await;
                tokio::time::sleep(LOOK).await;
            }
        });
        // On its own: a disk that hangs does not stop the readings.
        let programs = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(SAVE_EVERY).await;
                programs.save_off_the_runtime().await;
            }
        });
    }

    /// Writes down what was learned.
    pub async fn save_off_the_runtime(self: &Arc<Self>) {
        let programs = Arc::clone(self);
        // An `Err` is a panic, which was logged.
        let _ = tokio::task::spawn_blocking(move || programs.save()).await;
    }

    async fn read_memory(&self) {
        // What was seen last stays if the device cannot be read.
        let Some(snapshot) = self.account.snapshot().await else { return };
        let mut resident = 0;
        for (_, pool) in self.pools() {
            // A process that has just been loaded counts twice for a moment. Counting it too low would make too much memory count as free.
            resident += pool.loading_bytes().await;
            resident += pool.status().resident_bytes();
        }
        self.held.store(snapshot.ours, Ordering::Relaxed);
        self.resident.store(resident, Ordering::Relaxed);
    }

    /// Asks programs without work to free cached memory.
    pub fn trim(&self) {
        self.pools().for_each(|(_, pool)| pool.trim());
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
        futures_util::future::join_all(self.pools().map(|(_, pool)| close(pool))).await;
    }
}

/// Identifies a program whose memory is learned: its revision, and the unit that its memory depends on. Reads the program's scripts.
fn program(config: &ProcessConfig) -> String {
    format!("{} {}", config.program_revision(), config.vram.per.as_str())
}
