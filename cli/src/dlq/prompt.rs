//! Asks the operator at the terminal for confirmation.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use super::error::Error;

/// # Errors
/// There is no terminal, or the answer is not yes.
pub(super) fn yes(question: &str) -> Result<(), Error> {
    let answer = answer(&format!("{question} [y/N] "), "--yes")?.to_ascii_lowercase();
    if matches!(answer.as_str(), "y" | "yes") { Ok(()) } else { Err(nothing_done()) }
}

/// # Errors
/// There is no terminal, or the answer is another number.
pub(super) fn count(question: &str, count: u64) -> Result<(), Error> {
    let answer = answer(&format!("{question} "), &format!("--yes-drop {count}"))?;
    if answer == count.to_string() { Ok(()) } else { Err(nothing_done()) }
}

fn nothing_done() -> Error {
    Error::Failed("nothing was done".to_owned())
}

fn answer(question: &str, flag: &str) -> Result<String, Error> {
    let mut input = std::io::stdin().lock();
    if !input.is_terminal() {
        return Err(Error::Usage(format!("standard input is not a terminal: confirm with {flag}")));
    }
    let mut terminal = std::io::stderr();
    // A prompt that cannot be written must not panic, as `eprint!` would.
    let _ = write!(terminal, "{question}").and_then(|()| terminal.flush());
    let mut line = String::new();
    input.read_line(&mut line).map_err(|error| Error::Usage(format!("read the answer: {error}")))?;
    Ok(line.trim().to_owned())
}
