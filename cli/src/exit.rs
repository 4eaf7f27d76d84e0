//! The exit codes of all commands.

/// Everything asked was done.
pub(crate) const DONE: u8 = 0;
/// Something failed; the rest is done.
pub(crate) const FAILED: u8 = 1;
/// Invalid arguments or input.
pub(crate) const USAGE: u8 = 2;
/// No connection to the broker.
pub(crate) const UNREACHABLE: u8 = 3;
/// Refused by the broker: no queue for the model, a full queue, no permission.
pub(crate) const REFUSED: u8 = 4;
/// Interrupted from the keyboard: 128 + SIGINT, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;
/// The reader of the output closed it: 128 + SIGPIPE.
pub(crate) const BROKEN_PIPE: u8 = 141;
/// Terminated: 128 + SIGTERM.
pub(crate) const TERMINATED: u8 = 143;
