//! What a command's exit code says.

/// Everything asked was done.
pub(crate) const DONE: u8 = 0;
/// Some jobs failed; the others are done.
pub(crate) const FAILED: u8 = 1;
/// The arguments or the input cannot be understood.
pub(crate) const USAGE: u8 = 2;
/// No connection to the broker.
pub(crate) const UNREACHABLE: u8 = 3;
/// The broker does not take the jobs: no queue for the model, a full queue, no permission.
pub(crate) const REFUSED: u8 = 4;
/// Interrupted from the keyboard: 128 + SIGINT, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;
/// Nobody reads the output any more: 128 + SIGPIPE.
pub(crate) const BROKEN_PIPE: u8 = 141;
/// Told to end: 128 + SIGTERM.
pub(crate) const TERMINATED: u8 = 143;
