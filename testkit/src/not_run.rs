//! How a test says that it did not run, where only the machine or the broker decides whether it can.
//!
//! What is known before the test starts is an `#[ignore]` with its reason instead: the test runner lists these by itself.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::panic::Location;
use std::path::Path;

/// The variable that names the file to which [`not_run`] appends. `scripts/test` sets it, and lists and counts at its end what it finds
/// there.
pub const LIST: &str = "VRAMQ_TEST_NOT_RUN";

/// Says that the test that calls it did not run, or not all of it, and why: on standard error, past the capture of `cargo test`, and in
/// the file that [`LIST`] names, as a line with the test's name, a tab and the reason. Called on the test's own thread, it knows its name.
///
/// # Panics
/// The file cannot be written: a test that nobody knows did not run must not pass.
#[track_caller]
pub fn not_run(why: impl Display) {
    let test = name_of_test(Location::caller());
    let why = why.to_string().replace(['\n', '\t'], " ");
    // `eprintln!` would be captured, and thrown away because the test passes.
    let _ = writeln!(std::io::stderr(), "not run: {test}: {why}");
    if let Some(list) = std::env::var_os(LIST) {
        append(Path::new(&list), &format!("{test}\t{why}\n"));
    }
}

/// `BINARY::MODULE::TEST`; on a thread without a test's name, the place of the call.
fn name_of_test(caller: &Location<'_>) -> String {
    let program = std::env::current_exe().unwrap_or_default();
    let program = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Cargo puts a hash behind the name.
    let binary = program.rsplit_once('-').map_or(program.as_str(), |(name, _)| name);
    match std::thread::current().name() {
        Some(test) if test != "main" && !test.starts_with("tokio-") => format!("{binary}::{test}"),
        _ => format!("{binary}, at {caller}"),
    }
}

/// One write to a file that is opened for appending: lines of tests that run at the same time do not mix.
fn append(list: &Path, line: &str) {
    let written = OpenOptions::new()
        .create(true)
        .append(true)
        .open(list)
        .and_then(|mut file| file.write_all(line.as_bytes()));
    if let Err(error) = written {
        panic!("{LIST} is {}, which cannot be written: {error}", list.display());
    }
}
