//! Errors of `vramq dlq`, with their exit codes.

use lapin::ErrorKind;

use crate::broker::ConnectError;
use crate::exit;
use crate::output::text::safe;

/// Why a command ends early. Safe to print.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// Invalid arguments or input, or no terminal to ask for a confirmation.
    #[error("{0}")]
    Usage(String),
    /// Nothing was done, or not everything.
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    Unreachable(String),
    /// By the broker, or because another client uses the queue.
    #[error("{0}")]
    Refused(String),
    /// By a signal: the exit code, and the signal's name.
    #[error("{1}")]
    Stopped(u8, String),
    /// The reader of the output has closed it.
    #[error("the output was closed")]
    BrokenPipe,
}

impl Error {
    pub(super) fn code(&self) -> u8 {
        match self {
            Self::Usage(_) => exit::USAGE,
            Self::Failed(_) => exit::FAILED,
            Self::Unreachable(_) => exit::UNREACHABLE,
            Self::Refused(_) => exit::REFUSED,
            Self::Stopped(code, _) => *code,
            Self::BrokenPipe => exit::BROKEN_PIPE,
        }
    }

    /// A write to standard output or to a file failed.
    pub(super) fn writing(what: &str, error: &std::io::Error) -> Self {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Self::BrokenPipe;
        }
        Self::Failed(format!("write {}: {error}", safe(what)))
    }
}

impl From<ConnectError> for Error {
    fn from(error: ConnectError) -> Self {
        let text = error.to_string();
        match error {
            ConnectError::Url(_) => Self::Usage(text),
            ConnectError::Unreachable(_) => Self::Unreachable(text),
            ConnectError::Refused(_) => Self::Refused(text),
        }
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
