//! Why a job ends without a result.

use vramq_schemas::{DecodeError, Misfit, Reason};

/// Why a job ends without a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: Reason,
    /// What, where and what to do, in words.
    pub error: String,
    /// Of a job that ran out of memory.
    pub misfit: Option<Misfit>,
}

impl Refusal {
    pub fn new(reason: Reason, error: impl Into<String>) -> Self {
        Self { reason, error: error.into(), misfit: None }
    }

    /// Of a job whose `expiration` passed.
    pub fn expired() -> Self {
        Self::new(Reason::Expired, "the job's expiration passed before it ran")
    }
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Self {
        let reason = match error {
            DecodeError::ContentType(_) | DecodeError::Version(_) => Reason::UnsupportedEncoding,
            DecodeError::TooLarge { .. } => Reason::TooLarge,
            DecodeError::Malformed(_) => Reason::Malformed,
        };
        Self::new(reason, error.to_string())
    }
}
