//! Prints what commands say. The standard library's macros panic where a stream cannot be written.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, IsTerminal as _, Write};

/// Writes a line to standard error. Ignores failures: there is nowhere to report them, and the work goes on.
pub fn write_error_line(line: Arguments<'_>) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Whether the terminal takes no control sequences, such as an editor's: `TERM` names none, or says so.
pub fn is_dumb_terminal() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb")
}

/// Whether the user wants colours, where a terminal takes them. `NO_COLOR`: <https://no-color.org>.
pub fn wants_colours() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// Whether what goes to standard error may have colours.
pub fn has_colours() -> bool {
    wants_colours() && !is_dumb_terminal() && io::stderr().is_terminal()
}

/// Writes a text to standard output. A reader that closes the pipe early (`| head`) causes no error.
///
/// # Errors
/// Standard output cannot be written to.
pub fn write_output(text: &str) -> Result<(), String> {
    write_all(&mut io::stdout().lock(), text.as_bytes())
        .map_err(|error| format!("write to standard output: {error}"))
}

/// Writes to where somebody may read, or not.
pub(crate) fn write_all(output: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    match output.write_all(bytes).and_then(|()| output.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}
