//! The exit codes of errors in `vramq dlq`.

pub(super) use vramq_dlq::Error;
use vramq_dlq::Stop;

use crate::exit;

/// The exit code of an error.
pub(super) fn code(error: &Error) -> u8 {
    match error {
        Error::Usage(_) | Error::File(_) => exit::USAGE,
        Error::Failed(_) => exit::FAILED,
        Error::Unreachable(_) => exit::UNREACHABLE,
        Error::NoQueue(_) | Error::Refused(_) => exit::REFUSED,
        Error::Stopped(Stop::Interrupted) => exit::INTERRUPTED,
        Error::Stopped(Stop::Terminated) => exit::TERMINATED,
        Error::BrokenPipe => exit::BROKEN_PIPE,
    }
}
