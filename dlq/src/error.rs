//! The errors of reading dead letters, and of actions on them.

use lapin::ErrorKind;

use crate::stop::Stop;
use crate::text::safe;

/// Why an action ends early. Safe to print.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid arguments or input.
    #[error("{0}")]
    Usage(String),
    /// A file, of an archive or of the log, cannot be opened. Nothing was done.
    #[error("{0}")]
    File(String),
    /// Nothing was done, or not everything.
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    Unreachable(String),
    /// No worker has declared a dead queue for this model.
    #[error("{0}")]
    NoQueue(String),
    /// By the broker, or because another client uses the queue.
    #[error("{0}")]
    Refused(String),
    #[error("{}", match .0 { Stop::Interrupted => "interrupted", Stop::Terminated => "terminated" })]
    Stopped(Stop),
    /// The reader of the output has closed it.
    #[error("the output was closed")]
    BrokenPipe,
}

impl Error {
    /// A write to standard output or to a file failed.
    pub fn writing(what: &str, error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::Failed(format!("write {}: {error}", safe(what)))
    }
}

impl From<lapin::Error> for Error {
    fn from(error: lapin::Error) -> Self {
        let text = safe(&error.to_string());
        match error.kind() {
            ErrorKind::ProtocolError(_) if error.is_amqp_soft_error() => {
                Self::Refused(format!("refused by the broker: {text}"))
            }
            _ => Self::Unreachable(format!("connection to the broker lost: {text}")),
        }
    }
}
