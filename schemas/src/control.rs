//! Commands to workers on `vramq.control`, and their answers, in JSON.
//!
//! The routing key selects the workers: [`control_key`](crate::topology::control_key) of one worker, or
//! [`CONTROL_ALL`](crate::topology::CONTROL_ALL). Answers go to `reply_to` with the command's `correlation_id`; a worker
//! may send several, and marks the last.

use serde::{Deserialize, Serialize};

use crate::status::WorkerState;

/// The longest command, in bytes. Longer ones are refused unread.
pub const COMMAND_BYTES_MAX: usize = 4096;

/// A command to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Command {
    /// Stop consuming; unacknowledged jobs are finished.
    Pause,
    /// Consume again.
    Resume,
    /// As SIGTERM: stop consuming, finish or requeue unacknowledged jobs, exit with 0.
    Drain,
    /// Cancel an unacknowledged job: it is dead-lettered with the reason `cancelled`.
    Cancel {
        /// The job's id.
        job: String,
    },
    /// Change a setting until the process ends.
    Set {
        /// What to log: a level, or directives as in `info,lapin=debug`.
        log: String,
    },
}

impl Command {
    /// The name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Drain => "drain",
            Self::Cancel { .. } => "cancel",
            Self::Set { .. } => "set",
        }
    }
}

/// A worker's answer to a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub worker: String,
    /// Unix time in milliseconds.
    pub at_ms: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// What was done, or why not, as text for people.
    pub text: String,
    /// No other answer of this worker to this command follows.
    pub last: bool,
    /// The worker's state after the command.
    #[serde(default)]
    pub state: WorkerState,
}

/// The progress or the result of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// Carried out.
    Done,
    /// The command cannot be read or carried out.
    Refused,
    /// Of a cancellation: the worker has the job and will stop it.
    Requested,
    /// No item of the job waits or runs any more; results that were not sent are discarded.
    Stopped,
    /// The job's dead letter is confirmed, and its slot and memory are free. `free_bytes` is the device's free memory now.
    MemoryBack { device: String, free_bytes: u64 },
    /// The job ended before it could be stopped; the text says how.
    TooLate,
    /// The worker has no job with that id.
    NotHere,
    #[serde(other)]
    Unknown,
}

impl Outcome {
    /// Whether the command was carried out.
    pub fn is_success(&self) -> bool {
        matches!(self, Self::Done | Self::MemoryBack { .. })
    }

    /// The name on the wire and in metrics.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Refused => "refused",
            Self::Requested => "requested",
            Self::Stopped => "stopped",
            Self::MemoryBack { .. } => "memory-back",
            Self::TooLate => "too-late",
            Self::NotHere => "not-here",
            Self::Unknown => "unknown",
        }
    }
}
