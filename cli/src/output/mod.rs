//! What commands print: text without control characters, tables, and progress.

pub(crate) mod progress;
pub(crate) mod text;

use std::fmt::Arguments;
use std::io::{self, Write as _};

/// Writes a line to standard output. `println!` panics when nobody reads it any more, or its disk is full.
pub(crate) fn write_line(line: &str) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

/// Writes a line to standard error, as `eprintln!` does in this program. When its reader has gone or its disk is full, nothing is left to say
/// that with, and the work goes on.
pub(crate) fn write_error_line(line: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}
