//! Why a command of `vramq dlq` ends early, and with which exit code.

use lapin::ErrorKind;

use crate::broker::ConnectError;
use crate::exit;
use crate::output::text::safe;

/// What a person is told, by the code that a script gets.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// The arguments or the input cannot be understood, or a question has no answer.
    #[error("{0}")]
    Usage(String),
    /// Nothing was done because something is not as it was said to be.
    #[error("{0}")]
    Failed(String),
    #[error("{0}")]
    Unreachable(String),
    /// The broker answers, and says no; or somebody else is there.
    #[error("{0}")]
    Refused(String),
    /// By a signal.
    #[error("{1}")]
    Stopped(u8, String),
    /// Nobody reads the output any more.
    #[error("nobody reads the output")]
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

    /// Of something that was to be written to standard output or a file.
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
        let told = safe(&error.to_string());
        match error.kind() {
            ErrorKind::ProtocolError(_) if error.is_amqp_soft_error() => {
                Self::Refused(format!("the broker says: {told}"))
            }
            _ => Self::Unreachable(format!("the connection to the broker is lost: {told}")),
        }
    }
}
