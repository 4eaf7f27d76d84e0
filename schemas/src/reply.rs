//! The bodies of replies: outputs of consecutive items, why there are none, or how far an item is; and the headers of the latter two.

use amq_protocol_types::FieldTable;
use serde::{Deserialize, Serialize};

use crate::fields;
use crate::headers::{ATTEMPT, WORKER};
use crate::output::{Output, outputs};
use crate::reading::text;
use crate::reason::Reason;

/// The body of a `part` or `done` reply. Which items these are is in its headers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outputs {
    #[serde(deserialize_with = "text")]
    pub model: String,
    #[serde(deserialize_with = "outputs")]
    pub outputs: Vec<Output>,
}

/// What a reply is; the message's `type` property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// Some of the job's items; more replies follow.
    Part,
    /// The last of the job's items.
    Done,
    /// There will be no further items.
    Failed,
    /// How far an item is. Only for jobs that asked for it ([`Params::ask_for_progress`](crate::Params::ask_for_progress)). Any of these
    /// replies may be missing.
    Progress,
}

impl ReplyKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Part => "part",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Progress => "progress",
        }
    }

    /// The kind that a `type` property names, if it is one of ours.
    pub fn of(name: &str) -> Option<Self> {
        [Self::Part, Self::Done, Self::Failed, Self::Progress].into_iter().find(|kind| kind.as_str() == name)
    }
}

/// The body of a `failed` reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub reason: Reason,
    /// What failed, where, and what to do, as text for people.
    #[serde(deserialize_with = "text")]
    pub error: String,
}

/// Headers of a `failed` reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailureHeaders {
    /// The worker that ended the job.
    pub worker: String,
}

impl FailureHeaders {
    pub fn to_table(&self) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert(WORKER.into(), fields::text(&self.worker));
        table
    }
}

/// The longest note of a [`ItemProgress`], in bytes: a line on a terminal, and no log.
pub const PROGRESS_NOTE_BYTES_MAX: usize = 256;

/// The body of a `progress` reply: how far one item is, as its model says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemProgress {
    /// Index within the job.
    pub item: u32,
    /// From 0 to 1.
    pub fraction: f64,
    /// What the model does, as text for people; may be empty. At most [`PROGRESS_NOTE_BYTES_MAX`].
    #[serde(deserialize_with = "text")]
    pub note: String,
}

/// Headers of a `progress` reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProgressHeaders {
    /// Attempts of the job before this one.
    pub attempt: u32,
    /// The worker that runs the job.
    pub worker: String,
}

impl ProgressHeaders {
    pub fn to_table(&self) -> FieldTable {
        let mut table = FieldTable::default();
        table.insert(ATTEMPT.into(), fields::long(self.attempt.into()));
        table.insert(WORKER.into(), fields::text(&self.worker));
        table
    }
}
