//! Commands to workers on `vramq.control`, and their answers, in JSON.
//!
//! Whom a command is for is its routing key: [`control_key`](crate::topology::control_key) of one worker, or
//! [`CONTROL_ALL`](crate::topology::CONTROL_ALL). Answers go to `reply_to` with the command's `correlation_id`; there may be
//! several, of which the last says so.

use serde::{Deserialize, Serialize};

use crate::status::WorkerState;

/// The longest command, in bytes. Longer ones are refused unread.
pub const COMMAND_BYTES_MAX: usize = 4096;

/// What a worker is to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Command {
    /// Take no more jobs; those in hand go on.
    Pause,
    /// Take jobs again.
    Resume,
    /// As SIGTERM: take no more jobs, finish or hand over those in hand, exit with 0.
    Drain,
    /// End a job that is in hand: it becomes a dead letter with the reason `cancelled`.
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

/// A worker's word on a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    pub worker: String,
    /// Unix time in milliseconds.
    pub at_ms: u64,
    #[serde(flatten)]
    pub outcome: Outcome,
    /// What was done, or why not, in words.
    pub text: String,
    /// No other answer of this worker to this command follows.
    pub last: bool,
    /// What the worker does now.
    #[serde(default)]
    pub state: WorkerState,
}

/// How far a command came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Outcome {
    /// It is done.
    Done,
    /// It cannot be done, or understood.
    Refused,
    /// Of a cancellation: the job is in hand, and will be stopped.
    Requested,
    /// Nothing of the job waits or runs any more, and what it had computed and not sent is gone.
    Stopped,
    /// The job's dead letter is with the broker, its slot is free, and so is its memory: so much the device has now.
    MemoryBack { device: String, free_bytes: u64 },
    /// The job had ended before it could be stopped: how, is in the text.
    TooLate,
    /// No job of that id is in hand.
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
