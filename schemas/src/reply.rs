//! The bodies of replies: outputs of consecutive items, or why there are none.

use serde::{Deserialize, Serialize};

use crate::job::text;
use crate::output::{Output, outputs};
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
}

impl ReplyKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Part => "part",
            Self::Done => "done",
            Self::Failed => "failed",
        }
    }

    /// The kind that a `type` property names, if it is one of ours.
    pub fn of(name: &str) -> Option<Self> {
        [Self::Part, Self::Done, Self::Failed].into_iter().find(|kind| kind.as_str() == name)
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
