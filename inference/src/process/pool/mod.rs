//! All processes of one model: started when there is work and memory, ended when others need the memory more.

mod backoff;
mod leak;
mod needs;
mod one_shot;
mod pass_watch;
mod passes;
mod room;
mod slot;
mod state;
mod status;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};

use super::accepts::Accepts;
use super::config::{Mode, ProcessConfig};
use super::cost::Costs;
use super::launch::Launcher;
use super::memory::DeviceAccount;
use super::need::{Learned, Need};
use super::pass::{PassHandle, PassJob, PassRequest};
use super::program_revision::Covers;
use super::protocol::PASS_ITEMS_MAX;
use super::revision_watch::RevisionWatch;
use super::warm::LoadError;
use state::{Slot, State};

pub use status::{SlotState, SlotStatus, Status, Unavailable};

/// Passes that may wait for a process. The worker gives a pass only when there is room for it; this limit protects against its
/// mistakes.
const WAITING_MAX: usize = 256;

/// The processes of one model. Dropping it ends them all; [`close`](Self::close) waits for that.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
}

/// What a pool is made of besides its configuration.
#[derive(Clone, Debug)]
pub struct PoolOptions {
    pub launcher: Launcher,
    /// The account of the device, shared with the other models on it.
    pub account: Arc<DeviceAccount>,
    /// Device bytes for this model's processes and their passes: what `instances = "auto"` divides.
    pub budget: u64,
    /// What was learned before.
    pub learned: Learned,
    /// Whether other models use the device: then an idle process soon gives back what it keeps for its next pass.
    pub shares_device: bool,
}

/// Why a pass was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotTaken {
    #[error("a pass of {0} items; the limit is {PASS_ITEMS_MAX}")]
    Items(usize),
    #[error("{WAITING_MAX} passes already wait for a process")]
    Full,
    #[error("no process can run the model: {0}")]
    Unavailable(String),
    #[error("the pool is closed")]
    Closed,
}

/// Device memory of a process that should have ended, and been free, long ago.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// What is missing, as far as is known.
    pub bytes: u64,
    pub lasted: Duration,
    /// Whether the process has ended, and only its memory is missing.
    pub has_ended: bool,
}

/// What the pool and the tasks of its slots share.
#[derive(Debug)]
struct Shared {
    config: ProcessConfig,
    options: PoolOptions,
    /// The files of a one-shot program. A warm one has them hashed at each load.
    watch: Option<RevisionWatch>,
    state: Mutex<State>,
    /// True: the pool is closing.
    closing: watch::Sender<bool>,
    /// Notified when a pass was cancelled, which may still wait.
    cancelled: Arc<Notify>,
    /// The number of the next pass.
    passes: std::sync::atomic::AtomicU64,
}

impl Pool {
    /// Starts the first process and waits until it is loaded; for a one-shot model there is nothing to wait for.
    ///
    /// # Errors
    /// The model cannot be loaded. Nothing is left running then, except what does not end although it was killed.
    pub async fn start(config: ProcessConfig, options: PoolOptions) -> Result<Self, LoadError> {
        super::scratch::sweep(&config.scratch);
        let (closing, _) = watch::channel(false);
        // A warm process hashes them when it is loaded.
        let watch = match config.mode {
            Mode::Once(_) => Some(RevisionWatch::start(&config).await.map_err(LoadError::Start)?),
            Mode::Warm => None,
        };
        let revision = match &watch {
            Some(watch) => watch.revision().to_owned(),
            None => program_revision(&config).await.map_err(LoadError::Start)?,
        };
        let state = State { learned: options.learned.clone(), revision, ..State::default() };
        let shared = Arc::new(Shared {
            config,
            options,
            watch,
            state: Mutex::new(state),
            closing,
            cancelled: Arc::default(),
            passes: std::sync::atomic::AtomicU64::new(1),
        });
        tokio::spawn(end_cancelled(Arc::clone(&shared), shared.closing.subscribe()));
        let pool = Self { shared };
        let (loaded, first) = oneshot::channel();
        pool.shared.add_slot(&mut pool.shared.state(), Some(loaded));
        match first.await {
            Ok(Ok(())) => {
                let (revision, covers) = (pool.revision(), pool.revision_covers());
                tracing::info!(model = pool.config().name, revision, %covers, "model revision");
                Ok(pool)
            }
            Ok(Err(error)) => {
                pool.close().await;
                Err(error)
            }
            Err(_) => Err(LoadError::Start("the task of the process ended".to_owned())),
        }
    }

    /// Runs a pass on the next process that is free. It always ends, also if the process dies.
    ///
    /// # Errors
    /// See [`NotTaken`].
    pub fn run(&self, request: PassRequest) -> Result<PassHandle, NotTaken> {
        let count = request.items.len();
        if count == 0 || count > PASS_ITEMS_MAX {
            return Err(NotTaken::Items(count));
        }
        let mut state = self.shared.state();
        if state.closed {
            return Err(NotTaken::Closed);
        }
        if let Some(unavailable) = &state.unavailable {
            return Err(NotTaken::Unavailable(unavailable.reason.clone()));
        }
        if state.waiting.len() >= WAITING_MAX {
            return Err(NotTaken::Full);
        }
        let (job, handle) = PassJob::new(request, &self.shared.cancelled);
        state.waiting.push_back(job);
        self.shared.call_for(&mut state);
        Ok(handle)
    }

    /// Device bytes that a pass with these items needs beyond what the processes hold.
    pub fn need(&self, items: &[Costs]) -> Need {
        self.shared.need(&self.shared.state(), items)
    }

    /// The same for a pass of this cost, in the unit that the configuration names.
    pub fn need_of(&self, cost: f64) -> Need {
        self.shared.need_of(&self.shared.state(), cost)
    }

    /// Device bytes that one more process takes by being loaded, as far as is known.
    pub fn resident(&self) -> Option<u64> {
        self.shared.resident(&self.shared.state())
    }

    /// What the model takes.
    pub fn accepts(&self) -> Accepts {
        self.shared.state().ready.as_ref().map(|ready| ready.accepts.clone()).unwrap_or_default()
    }

    /// The model's revision. All its processes have it.
    pub fn revision(&self) -> String {
        self.shared.state().revision.clone()
    }

    /// The revision that the program has by now, if it is another one. Only a pool that is started again can serve it.
    pub fn other_revision(&self) -> Option<String> {
        self.shared.state().other_revision.clone()
    }

    /// What the revision tells apart.
    pub fn revision_covers(&self) -> Covers {
        let is_said = self.shared.state().ready.as_ref().is_some_and(|ready| ready.revision.is_some());
        self.config().revision_covers(is_said)
    }

    /// What was learned, to be kept for the next start.
    pub fn learned(&self) -> Learned {
        self.shared.state().learned.clone()
    }

    pub fn config(&self) -> &ProcessConfig {
        &self.shared.config
    }

    /// How many processes there may be.
    pub fn instances(&self) -> usize {
        self.shared.instances(&self.shared.state())
    }

    pub fn status(&self) -> Status {
        let state = self.shared.state();
        Status {
            waiting: state.waiting.len(),
            instances: self.shared.instances(&state),
            slots: state.slots.iter().map(|slot| slot.status.clone()).collect(),
            unavailable: state.unavailable.clone(),
        }
    }

    /// Device bytes of processes that are still loading, if the device can tell. They stay in use.
    pub async fn loading_bytes(&self) -> u64 {
        let keepers: Vec<i32> =
            self.shared.state().slots.iter().filter_map(|slot| slot.status.loading_under).collect();
        let mut bytes = 0;
        for keeper in keepers {
            bytes += self.shared.options.account.held_under(keeper).await.unwrap_or_default();
        }
        bytes
    }

    /// Memory that has been withheld for longer than the configuration allows.
    pub fn overdue(&self) -> Option<Overdue> {
        let limit = self.shared.config.withheld_max?;
        let overdue = |slot: &Slot| {
            let (bytes, since, has_ended, limit) = match slot.status.state {
                SlotState::Withheld { bytes, since } => (bytes, since, true, limit),
                SlotState::Ending { since } => {
                    (slot.status.held_bytes, since, false, limit + self.shared.config.kill)
                }
                _ => return None,
            };
            let lasted = since.elapsed();
            (lasted > limit).then_some(Overdue { bytes, lasted, has_ended })
        };
        self.shared.state().slots.iter().find_map(overdue)
    }

    /// Asks the processes that have nothing to do to give cached device memory back.
    pub fn trim(&self) {
        let state = self.shared.state();
        let idle = state.slots.iter().filter(|slot| matches!(slot.status.state, SlotState::Idle { .. }));
        idle.for_each(|slot| slot.trim.notify_one());
    }

    /// Ends all processes, and returns when nothing is left of them. Waiting passes end without having run. Running passes end as
    /// if their process had been killed.
    pub async fn close(&self) {
        self.shared.close();
        // Each slot's task holds a receiver until it ends.
        self.shared.closing.closed().await;
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    /// A poisoned lock is usable: no panic leaves the state half changed.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        state.refuse_waiting("the pool is closed");
        drop(state);
        self.closing.send_replace(true);
    }

    fn add_slot(self: &Arc<Self>, state: &mut State, first: Option<oneshot::Sender<Result<(), LoadError>>>) {
        let wake = Arc::new(Notify::new());
        let index = state.slots.len();
        state.slots.push(Slot { status: SlotStatus::new(), wake: Arc::clone(&wake), trim: Arc::default() });
        tokio::spawn(slot::serve(Arc::clone(self), index, wake, first));
    }

    /// Ensures that a process takes the waiting passes: an idle one, one that is loading, or else a new one.
    fn call_for(self: &Arc<Self>, state: &mut State) {
        let has_room = self.has_room(state);
        let mut takers = 0;
        for slot in &state.slots {
            if matches!(slot.status.state, SlotState::Idle { .. }) {
                slot.wake.notify_one();
                takers += 1;
            } else if slot.status.state.is_coming() {
                takers += 1;
            }
        }
        if takers >= state.waiting.len() {
            return;
        }
        match state.slots.iter().position(|slot| slot.status.state == SlotState::Unloaded) {
            Some(at) if has_room => {
                state.slots[at].status.state = SlotState::Starting;
                state.slots[at].wake.notify_one();
            }
            None if state.slots.len() < self.instances(state) => self.add_slot(state, None),
            _ => {}
        }
    }
}

/// Off the runtime: scripts may be on a network.
async fn program_revision(config: &ProcessConfig) -> Result<String, String> {
    let config = config.clone();
    tokio::task::spawn_blocking(move || config.program_revision()).await.map_err(|error| error.to_string())
}

/// Ends passes that are cancelled while they wait. The slots that are about to start a process for them hear of it.
async fn end_cancelled(shared: Arc<Shared>, mut closing: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            () = shared.cancelled.notified() => {}
            () = slot::closed(&mut closing) => return,
        }
        let mut state = shared.state();
        state.drop_cancelled();
        if !state.wants_process() {
            let coming = state.slots.iter().filter(|slot| slot.status.state.is_coming());
            coming.for_each(|slot| slot.wake.notify_one());
        }
    }
}
