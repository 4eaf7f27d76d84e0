//! Questions to whoever sits at the terminal.

use std::io::{BufRead as _, IsTerminal as _, Write as _};

use super::error::Error;

/// # Errors
/// There is nobody to ask, or the answer is not yes.
pub(super) fn yes(question: &str) -> Result<(), Error> {
    match answer(&format!("{question} [y/N] "), "--yes")?.to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Error::Failed("nothing was done".to_owned())),
    }
}

/// # Errors
/// There is nobody to ask, or the answer is another number.
pub(super) fn count(question: &str, count: u64) -> Result<(), Error> {
    if answer(&format!("{question} "), &format!("--yes-drop {count}"))? == count.to_string() {
        return Ok(());
    }
    Err(Error::Failed("nothing was done".to_owned()))
}

fn answer(question: &str, instead: &str) -> Result<String, Error> {
    let mut input = std::io::stdin().lock();
    if !input.is_terminal() {
        return Err(Error::Usage(format!(
            "standard input is no terminal, so nobody can be asked: say {instead}"
        )));
    }
    eprint!("{question}");
    let _ = std::io::stderr().flush();
    let mut line = String::new();
    input.read_line(&mut line).map_err(|error| Error::Usage(format!("read the answer: {error}")))?;
    Ok(line.trim().to_owned())
}
