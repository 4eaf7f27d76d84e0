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

    /// The rejection of a job whose `expiration` has passed. All times are in Unix milliseconds; `published_ms` is what the job's timestamp
    /// says. If the time was over when the job was received, a wrong clock may be the cause as well as a long wait.
    pub fn expired(published_ms: Option<u64>, received_ms: u64, expires_at_ms: Option<u64>) -> Self {
        let was_over = expires_at_ms.is_some_and(|at| at < received_ms);
        let by_clock = published_ms.filter(|_| was_over).map_or(String::new(), |published_ms| {
            format!(
                ": by its timestamp it was published {} s before this worker received it; if it did not wait for so long, the clock of its \
                 publisher or of the worker is wrong",
                received_ms.saturating_sub(published_ms) / 1000
            )
        });
        Self::new(Reason::Expired, format!("the job's expiration passed before it ran{by_clock}"))
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
