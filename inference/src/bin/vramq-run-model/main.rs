//! Runs a process model without a broker: items on standard input, outputs on standard output. For developing models.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

mod arguments;
mod config;
mod ends;
mod items;
mod program;
mod trial;

use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use vramq_inference::process::keeper;
use vramq_inference::process::stderr::printable;
use vramq_program::{has_colours, write_error_line};

use arguments::{Asked, Source, Trial, USAGE};

/// In the static programs of a release, because musl's own allocator takes one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The worker's own exit codes.
const EXIT_USAGE: u8 = 2;
const EXIT_UNUSABLE: u8 = 4;

/// The reader of the outputs closed them: 128 + SIGPIPE, as shells have it.
const EXIT_BROKEN_PIPE: u8 = 141;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if arguments == [keeper::ARGUMENT] {
        return keeper::keeper_main();
    }
    let not_utf8 = |argument: std::ffi::OsString| format!("{argument:?} is not UTF-8");
    let arguments: Result<Vec<String>, String> =
        arguments.into_iter().map(|argument| argument.into_string().map_err(not_utf8)).collect();
    match arguments.and_then(Asked::read) {
        Ok(Asked::Help) => printed(USAGE),
        Ok(Asked::Version) => printed(concat!("vramq-run-model ", env!("CARGO_PKG_VERSION"))),
        Ok(Asked::Trial(trial)) => run(trial).into(),
        Err(fault) => {
            tell(format_args!("vramq-run-model: {fault}\n\n{USAGE}"));
            EXIT_USAGE.into()
        }
    }
}

fn run(trial: Trial) -> u8 {
    // The program's output is logged. Internal errors of the log are not printed: that panics if standard error is closed.
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(has_colours());
    lines.log_internal_errors(false).without_time().with_target(false).init();
    let config = match &trial.source {
        Source::Config { file, model } => config::read(Path::new(file), model.as_deref()),
        Source::Program(program) => program::read(program, trial.batch),
    };
    let config = match config {
        Ok(config) => config,
        Err(faults) => {
            faults.iter().for_each(|fault| tell(format_args!("vramq-run-model: {fault}")));
            return EXIT_USAGE;
        }
    };
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(trial::serve(config, trial)),
        Err(error) => {
            tell(format_args!("vramq-run-model: {error}"));
            EXIT_UNUSABLE
        }
    }
}

/// What a person asked for, on standard output.
fn printed(text: &str) -> ExitCode {
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => EXIT_BROKEN_PIPE.into(),
    }
}

/// A line for a person, on standard error, if somebody still reads it. The program's own words in it may have sequences that a terminal
/// would obey.
fn tell(line: impl Display) {
    write_error_line(format_args!("{}", printable(line.to_string().as_bytes())));
}
