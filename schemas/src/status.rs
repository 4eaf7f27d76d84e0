//! Heartbeats of workers on the exchange `vramq.status`, in JSON.
//!
//! Fields are only ever added. A reader ignores unknown fields. A field that an older worker does not send has its default.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Missed heartbeats after which a reader considers a worker gone.
pub const HEARTBEATS_MISSED_MAX: u32 = 3;

/// The interval of a heartbeat that names none.
const INTERVAL_MS: u64 = 5_000;

/// The bounds of an interval that a reader waits for: anybody may publish a heartbeat.
const INTERVAL_MS_MIN: u64 = 100;
const INTERVAL_MS_MAX: u64 = 600_000;

/// A worker's status. Sent when its session is open, at each change of its state, and after each interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Heartbeat {
    /// Its name, as in replies and dead letters.
    pub worker: String,
    pub version: String,
    pub host: String,
    pub pid: u32,
    /// When the process started, and when this was sent: Unix time in milliseconds, by the worker's clock.
    pub started_at_ms: u64,
    pub sent_at_ms: u64,
    /// The next one comes within this. After [`HEARTBEATS_MISSED_MAX`] times as long without one, the worker is gone.
    pub interval_ms: u64,
    pub state: WorkerState,
    /// Why it does not consume, as text for people; absent while it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Sessions with the broker since the process started, and those of them that were lost.
    pub sessions_opened: u64,
    pub sessions_lost: u64,
    pub models: Vec<ModelStatus>,
    pub devices: Vec<DeviceStatus>,
    /// What was learned of the memory that passes may take.
    pub ceilings: Vec<CeilingStatus>,
}

impl Heartbeat {
    /// The time until the next one: the default if it says none, within bounds.
    pub fn interval(&self) -> Duration {
        let interval_ms = if self.interval_ms == 0 { INTERVAL_MS } else { self.interval_ms };
        Duration::from_millis(interval_ms.clamp(INTERVAL_MS_MIN, INTERVAL_MS_MAX))
    }

    /// How long a reader waits for the next one before it considers the worker gone: [`HEARTBEATS_MISSED_MAX`] intervals, but at least 0.3 s
    /// and at most half an hour.
    pub fn silence_max(&self) -> Duration {
        self.interval() * HEARTBEATS_MISSED_MAX
    }
}

/// The state of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum WorkerState {
    /// Its models are being loaded. Never in a heartbeat: there is no session yet.
    Loading,
    /// Not connected. Never in a heartbeat, for the same reason.
    NoSession,
    /// It consumes.
    Consuming,
    /// It runs jobs in quarantine, one at a time, and nothing else for a few seconds.
    Isolating,
    /// Paused by an operator.
    Paused,
    /// The device has no free memory for a single item of any model.
    NoRoom,
    /// The broker blocks publishers (a memory or disk alarm), so no job can be answered. Never in a heartbeat.
    Blocked,
    /// The device fails its health probe.
    Sick,
    /// Draining: it does not consume, and exits when its jobs are settled.
    Draining,
    /// The last heartbeat.
    Gone,
    /// One that this version does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

impl WorkerState {
    /// Those that a worker can be in.
    pub const ALL: [Self; 10] = [
        Self::Loading,
        Self::NoSession,
        Self::Consuming,
        Self::Isolating,
        Self::Paused,
        Self::NoRoom,
        Self::Blocked,
        Self::Sick,
        Self::Draining,
        Self::Gone,
    ];

    /// The name on the wire and in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::NoSession => "no-session",
            Self::Consuming => "consuming",
            Self::Isolating => "isolating",
            Self::Paused => "paused",
            Self::NoRoom => "no-room",
            Self::Blocked => "blocked",
            Self::Sick => "sick",
            Self::Draining => "draining",
            Self::Gone => "gone",
            Self::Unknown => "unknown",
        }
    }

    /// Whether it consumes; `/readyz` reports this.
    pub fn is_ready(self) -> bool {
        matches!(self, Self::Consuming | Self::Isolating)
    }
}

/// One model of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelStatus {
    pub model: String,
    /// Routing key of its jobs, and the end of its queues' names.
    pub key: String,
    /// Where its jobs come from, if that is more than its own queue: that one first, then the others.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub queues: Vec<QueueStatus>,
    /// The most unacknowledged jobs.
    pub slots: u32,
    /// Unacknowledged jobs, and those of them whose items wait for a pass.
    pub in_hand: u64,
    pub waiting: u64,
    /// Whether the broker may send more.
    pub consuming: bool,
    /// What tells its outputs apart from those of other weights or another element type; replies have the same in the header
    /// `vramq-model-revision`. Absent if the worker cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Of a model that runs in processes of its own: each place for one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<ProcessStatus>,
    pub counters: Counters,
}

/// A queue that a model's jobs come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueStatus {
    pub queue: String,
    /// Its share of passes and slots, in relation to those of the model's other queues.
    pub weight: u32,
    /// The worker cannot consume it: it was deleted, is not as workers declare it, or may not be read. The others have its slots.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub missing: bool,
}

/// A place for a process of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessStatus {
    /// Counts from 0.
    pub instance: u32,
    /// What it is at, in one word: `idle`, `running`, `loading`, `withheld`, …
    pub state: String,
    /// Of the process that is there, if one is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Bytes of the device that it holds, as of the last look.
    pub held: u64,
    /// Passes that this process ran.
    pub passes: u64,
    /// Processes that were started here: all but the first are restarts.
    pub starts: u64,
}

/// The outcomes of a model's jobs since the process started. The counters never decrease, so two heartbeats give rates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Deliveries. They include all counts below and the unacknowledged jobs.
    pub received: u64,
    pub answered: u64,
    pub dead_lettered: u64,
    /// Requeued for another attempt, for any cause.
    pub requeued: u64,
    /// Given back to the broker without being settled.
    pub handed_back: u64,
    /// Delivered again after they were settled, and only acknowledged.
    pub already_settled: u64,
    /// Withdrawn by their callers.
    pub withdrawn: u64,
    pub items: u64,
    pub passes: u64,
    /// Costs of all items run: tokens, for an encoder.
    pub cost: u64,
    /// Passes that ran out of memory: alone on the device, and while other processes used it.
    pub out_of_memory_alone: u64,
    pub out_of_memory_shared: u64,
    /// Of both, those where other processes held what was missing.
    pub out_of_memory_foreign: u64,
}

/// A device's memory, in bytes, and its sensors, if it has any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DeviceStatus {
    /// `cpu`, `cuda:0`.
    pub device: String,
    pub total: u64,
    pub free: u64,
    /// Held by other processes, and by this one.
    pub foreign: u64,
    pub own: u64,
    /// What passes may take together, and what those that run do.
    pub budget: u64,
    pub held: u64,
    /// Percent of the last moments in which it computed, for whichever process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub utilization_percent: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_celsius: Option<u32>,
    /// Why its clocks are lower than they could be, in NVML's words. Those that end in `slowdown` mean that it is too hot or
    /// short of power.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub throttled: Vec<String>,
}

/// What passes of a model may take whose longest item costs at most `longest_max`, and more than half of it. In bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CeilingStatus {
    pub model: String,
    pub device: String,
    pub longest_max: u64,
    pub limit: u64,
    /// The largest that fitted (0: none known), and the smallest that did not.
    pub fitted: u64,
    pub failed: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_waits_for_a_worker_no_shorter_and_no_longer_than_is_sensible() {
        let silence_max = |interval_ms| Heartbeat { interval_ms, ..Heartbeat::default() }.silence_max();
        assert_eq!(silence_max(2_000), Duration::from_secs(6));
        assert_eq!(silence_max(0), Duration::from_secs(15));
        assert_eq!(silence_max(1), Duration::from_millis(300));
        assert_eq!(silence_max(u64::MAX), Duration::from_secs(1_800));
    }
}
