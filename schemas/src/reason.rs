//! The reasons why jobs fail, in `failed` replies and dead letters.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kinds of failure, as operators group them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Reason {
    /// The body, a property or a header cannot be understood.
    Malformed,
    /// The content type or its version is not one that this worker reads.
    UnsupportedEncoding,
    /// The body is above the cap.
    TooLarge,
    /// The queue serves another model.
    WrongModel,
    /// The engine does not take this input or parameter.
    InvalidInput,
    /// The job's `expiration` passed before it ran.
    Expired,
    /// The reply queue does not exist.
    Unroutable,
    /// It does not fit the device, even alone.
    OutOfMemory,
    /// The engine failed on it.
    EngineFailed,
    /// Workers were lost while they held it, more often than chance explains.
    Crashed,
    /// The job exceeded its time limit, and none of its items was finished.
    TimedOut,
    /// An operator cancelled it.
    Cancelled,
    /// Its own caller withdrew it. Only in replies: a withdrawn job leaves no dead letter.
    Withdrawn,
    /// It demands another revision of the model than the workers have that took it.
    WrongRevision,
    /// An input's reference is outside the stores that the worker may read, or the store refuses to give it.
    ReferenceDenied,
    /// The store has nothing under an input's reference.
    ReferenceMissing,
    /// What the store has under an input's reference does not have the digest that the reference names.
    ReferenceMismatch,
    /// A store did not work for as long as the job may wait for it, or did not take an output that is too large for a reply.
    StoreUnavailable,
    /// One that this version does not know, of a later worker. Only read: it has no name on the wire. It stays the last variant, so that a new
    /// one before it has a number of its own in bincode.
    #[serde(other, skip_serializing)]
    Other,
}

impl Reason {
    /// Those of this version.
    pub const ALL: [Self; 18] = [
        Self::Malformed,
        Self::UnsupportedEncoding,
        Self::TooLarge,
        Self::WrongModel,
        Self::InvalidInput,
        Self::Expired,
        Self::Unroutable,
        Self::OutOfMemory,
        Self::EngineFailed,
        Self::Crashed,
        Self::TimedOut,
        Self::Cancelled,
        Self::Withdrawn,
        Self::WrongRevision,
        Self::ReferenceDenied,
        Self::ReferenceMissing,
        Self::ReferenceMismatch,
        Self::StoreUnavailable,
    ];

    /// The name on the wire; of [`Other`](Self::Other), which has none, a word for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::UnsupportedEncoding => "unsupported-encoding",
            Self::TooLarge => "too-large",
            Self::WrongModel => "wrong-model",
            Self::InvalidInput => "invalid-input",
            Self::Expired => "expired",
            Self::Unroutable => "unroutable",
            Self::OutOfMemory => "out-of-memory",
            Self::EngineFailed => "engine-failed",
            Self::Crashed => "crashed",
            Self::TimedOut => "timed-out",
            Self::Cancelled => "cancelled",
            Self::Withdrawn => "withdrawn",
            Self::WrongRevision => "wrong-revision",
            Self::ReferenceDenied => "reference-denied",
            Self::ReferenceMissing => "reference-missing",
            Self::ReferenceMismatch => "reference-mismatch",
            Self::StoreUnavailable => "store-unavailable",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A reason that this version does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a known reason")]
pub struct UnknownReason(String);

impl FromStr for Reason {
    type Err = UnknownReason;

    fn from_str(name: &str) -> Result<Self, UnknownReason> {
        Self::ALL.into_iter().find(|r| r.as_str() == name).ok_or_else(|| UnknownReason(name.to_owned()))
    }
}
