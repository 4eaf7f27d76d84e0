//! Panics as lines of the log.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write as _;
use std::panic::PanicHookInfo;

/// From now on a panic is an error in the log, in the log's format, and not a text on standard error.
///
/// Its message is logged only if it is a constant: others may quote an input, such as a text that was to be cut within a character.
pub(crate) fn log_panics() {
    std::panic::set_hook(Box::new(log));
}

fn log(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    if !tracing::event_enabled!(tracing::Level::ERROR) {
        // The log's filter leaves out even this, or there is no log.
        let at = panic.location().map(ToString::to_string).unwrap_or_default();
        let _ = writeln!(
            std::io::stderr(),
            "panicked at {at}, thread {}",
            thread.name().unwrap_or("without a name")
        );
        return;
    }
    let backtrace = Backtrace::capture();
    tracing::error!(
        at = panic.location().map(tracing::field::display),
        panic = panic.payload().downcast_ref::<&'static str>(),
        thread = thread.name(),
        backtrace =
            (backtrace.status() == BacktraceStatus::Captured).then(|| tracing::field::display(backtrace)),
        "panicked: please report it, unless an error about a file follows"
    );
}
