//! The status of a pool's processes, for the worker's decisions, heartbeats, metrics and `doctor`.

use tokio::time::Instant;
use vramq_schemas::status::ProcessStatus;

/// A model's processes now.
#[derive(Clone, Debug)]
pub struct Status {
    /// Passes that wait for a process.
    pub waiting: usize,
    /// How many processes there may be.
    pub instances: usize,
    pub slots: Vec<SlotStatus>,
    /// Why no process can run the model, if so. Attempts go on at growing intervals.
    pub unavailable: Option<Unavailable>,
}

impl Status {
    /// Device bytes that the processes hold, as of the last snapshot of each.
    pub fn held_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.held_bytes).sum()
    }

    /// Device bytes that the processes hold besides what their passes take and what they keep for the next ones.
    pub fn resident_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.resident_bytes).sum()
    }

    /// Device bytes of ended processes that have not come back.
    pub fn withheld_bytes(&self) -> u64 {
        let withheld = |slot: &SlotStatus| match slot.state {
            SlotState::Withheld { bytes, .. } => bytes,
            _ => 0,
        };
        self.slots.iter().map(withheld).sum()
    }

    /// Each place for a process, as heartbeats and metrics have it.
    pub fn processes(&self) -> Vec<ProcessStatus> {
        let process = |(at, slot): (usize, &SlotStatus)| ProcessStatus {
            instance: u32::try_from(at).unwrap_or(u32::MAX),
            state: slot.state.as_str().to_owned(),
            pid: slot.pid.and_then(|pid| u32::try_from(pid).ok()),
            held: slot.held_bytes,
            passes: slot.passes,
            starts: slot.starts,
        };
        self.slots.iter().enumerate().map(process).collect()
    }

    /// Processes that run a pass or could.
    pub fn loaded(&self) -> usize {
        self.slots.iter().filter(|slot| slot.state.is_loaded()).count()
    }

    /// Whether an idle process may keep memory for its next pass.
    pub fn keeps_memory_idle(&self) -> bool {
        let keeps = |slot: &SlotStatus| slot.keeps_memory && matches!(slot.state, SlotState::Idle { .. });
        self.slots.iter().any(keeps)
    }

    /// Whether a process runs a pass.
    pub fn is_running(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.state, SlotState::Running { .. }))
    }
}

/// One place for a process.
#[derive(Clone, Debug)]
pub struct SlotStatus {
    pub state: SlotState,
    /// The program's process id, while there is one.
    pub pid: Option<i32>,
    /// Passes that this process ran.
    pub passes: u64,
    /// Processes that were started here.
    pub starts: u64,
    /// Device bytes that it holds, as of the last snapshot.
    pub held_bytes: u64,
    /// The keeper of a process that is still loading.
    pub(super) loading_under: Option<i32>,
    /// What it held when it was loaded.
    pub loaded_bytes: u64,
    /// It has run a pass since it last returned its caches, so it may keep memory for the next one.
    pub(super) keeps_memory: bool,
    /// What it held without caches: when it was loaded, or when it last gave its caches back.
    pub resident_bytes: u64,
}

impl SlotStatus {
    pub(super) fn new() -> Self {
        Self {
            state: SlotState::Starting,
            pid: None,
            passes: 0,
            starts: 0,
            held_bytes: 0,
            loading_under: None,
            loaded_bytes: 0,
            keeps_memory: false,
            resident_bytes: 0,
        }
    }

    /// Takes note of a process that was loaded.
    pub(super) fn loaded(&mut self, pid: i32, held: u64) {
        (self.pid, self.passes) = (Some(pid), 0);
        (self.held_bytes, self.loaded_bytes, self.resident_bytes) = (held, held, held);
        (self.keeps_memory, self.loading_under) = (false, None);
        self.starts += 1;
    }

    /// Takes note that there is no process.
    pub(super) fn ended(&mut self) {
        self.pid = None;
        (self.held_bytes, self.loaded_bytes, self.resident_bytes) = (0, 0, 0);
        (self.keeps_memory, self.loading_under) = (false, None);
    }

    /// Takes note of what the process holds.
    pub(super) fn holds(&mut self, bytes: u64) {
        self.held_bytes = bytes;
        self.resident_bytes = self.resident_bytes.min(bytes);
    }

    /// Records that the process holds no caches now, because it has returned them.
    pub(super) fn gave_back(&mut self) {
        self.resident_bytes = self.held_bytes;
        self.keeps_memory = false;
    }

    /// Growth since it was loaded that is not cache, such as weights that the first pass loads.
    pub(super) fn grown_bytes(&self) -> u64 {
        self.resident_bytes.saturating_sub(self.loaded_bytes)
    }

    /// What it has returned for good since it was loaded, such as weights that it moved to the host's memory.
    pub(super) fn shrunk_bytes(&self) -> u64 {
        self.loaded_bytes.saturating_sub(self.resident_bytes)
    }
}

/// The state of a place for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// There is no process; one is started when there is work.
    Unloaded,
    /// A process will be started at once.
    Starting,
    /// The last process failed; the next one waits for a while.
    BackingOff {
        until: Instant,
    },
    /// The next process waits for the device to have so much free.
    WaitingForMemory {
        bytes: u64,
    },
    Loading,
    Idle {
        since: Instant,
    },
    Running {
        pass: u64,
    },
    /// The process is being ended.
    Ending {
        since: Instant,
    },
    /// The process is gone, and so many bytes that it held are not free. No other is started here until they are.
    Withheld {
        bytes: u64,
        since: Instant,
    },
}

impl SlotState {
    /// Whether a process is on its way that will take waiting passes.
    pub(super) fn is_coming(&self) -> bool {
        matches!(
            self,
            Self::Starting | Self::BackingOff { .. } | Self::WaitingForMemory { .. } | Self::Loading
        )
    }

    /// Whether a process is here, or comes, or its memory is still missing.
    pub(super) fn has_process(&self) -> bool {
        !matches!(self, Self::Unloaded)
    }

    /// A process that runs a pass or could.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Self::Idle { .. } | Self::Running { .. })
    }

    /// One word for it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Unloaded => "unloaded",
            Self::Starting => "starting",
            Self::BackingOff { .. } => "backing-off",
            Self::WaitingForMemory { .. } => "waiting-for-memory",
            Self::Loading => "loading",
            Self::Idle { .. } => "idle",
            Self::Running { .. } => "running",
            Self::Ending { .. } => "ending",
            Self::Withheld { .. } => "withheld",
        }
    }
}

/// A model that no process can run: it cannot be loaded, or its processes failed again and again.
#[derive(Clone, Debug)]
pub struct Unavailable {
    pub reason: String,
    /// The last that the program printed.
    pub stderr: String,
    pub since: Instant,
    /// How often in a row it was tried.
    pub attempts: u32,
}
