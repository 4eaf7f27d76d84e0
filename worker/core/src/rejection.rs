//! A rejection: why a job will not run, or ends without all its results.

use vramq_schemas::{DecodeError, MinimumRequirement, Reason};

/// Why a job will not run, or ends without all its results.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub reason: Reason,
    /// What, where and what to do, in words.
    pub error: String,
    /// The smallest device that could run the job; only after an out-of-memory.
    pub requirement: Option<MinimumRequirement>,
}

impl Rejection {
    pub fn new(reason: Reason, error: impl Into<String>) -> Self {
        Self { reason, error: error.into(), requirement: None }
    }

    /// The rejection of a job that its caller withdrew.
    pub fn withdrawn() -> Self {
        Self::new(Reason::Withdrawn, "the caller withdrew the job")
    }

    /// The rejection of a job whose `expiration` has passed.
    pub fn expired() -> Self {
        Self::new(Reason::Expired, "the job's expiration passed before it ran")
    }
}

impl From<DecodeError> for Rejection {
    fn from(error: DecodeError) -> Self {
        let reason = match error {
            DecodeError::ContentType(_) | DecodeError::Version(_) => Reason::UnsupportedEncoding,
            DecodeError::TooLarge { .. } => Reason::TooLarge,
            DecodeError::Malformed(_) => Reason::Malformed,
        };
        Self::new(reason, error.to_string())
    }
}
