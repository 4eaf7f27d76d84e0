//! What commands print: text without control characters, tables, and progress.

pub(crate) mod progress;
pub(crate) mod text;

use std::io::{self, Write as _};

/// Writes a line to standard output. `println!` would panic when the reader has gone or the disk is full.
pub(crate) fn write_line(line: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Says that a flag has another name now. The next version does not know the old one.
pub(crate) fn warn_renamed(old: &str, new: &str) {
    eprintln!("warning: {old} is now {new}; the next version refuses {old}");
}
