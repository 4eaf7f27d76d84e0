//! `vramq`, the command for people and scripts. Submits jobs, downloads large outputs, shows and controls workers, handles dead letters,
//! tries programs as models.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

/// Replaces the standard library's macro in all modules of this program. That one panics when standard error cannot be written, so a line
/// of progress would end the work that it reports.
macro_rules! eprintln {
    ($($argument:tt)*) => { vramq_program::write_error_line(format_args!($($argument)*)) };
}

mod broker;
mod control;
mod dlq;
mod download;
mod duration;
mod exit;
mod output;
mod run_model;
mod signals;
mod status;
mod submit;

use std::env::VarError;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use tracing_subscriber::EnvFilter;
use vramq_program::{
    Completions, Manual, UnknownVariables, Vocabulary, completions_help, has_colours, log_filter, manual_help,
};

/// In the static programs of a release, because musl's own allocator takes one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The variable that says what is logged.
const LOG_VARIABLE: &str = "VRAMQ_LOG";

/// Publish jobs to vramq workers, and operate them.
#[derive(Debug, Parser)]
#[command(name = "vramq", version, propagate_version = true)]
#[command(after_help = "\
Example:
  vramq submit --model minilm 'a text'

Exit codes are the same for every command:
  0 done · 1 not everything succeeded · 2 usage or input · 3 broker unreachable · 4 refused by the broker
  130 interrupted (SIGINT) · 143 terminated (SIGTERM) · 141 the reader of the output has gone")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Submit(Box<submit::Args>),
    Download(Box<download::Args>),
    Status(status::Args),
    Control(control::Args),
    Dlq(Box<dlq::Args>),
    RunModel(run_model::Args),
    #[command(after_help = completions_help("vramq"))]
    Completions(Completions),
    #[command(after_help = manual_help("vramq"))]
    Man(Manual),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let (unknown, ignored) = unknown_variables();
    if let Some((name, meant)) = unknown.misspelt.first() {
        eprintln!("error: the environment variable {name} is unknown; did you mean {meant}?");
        return exit::USAGE.into();
    }
    // lapin logs several errors for every lost connection; the client logs one.
    let filter = match log_filter_of_environment() {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("error: {LOG_VARIABLE}: {error}");
            return exit::USAGE.into();
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // Otherwise the log would report on standard error that standard error cannot be written, and panic.
        .log_internal_errors(false)
        .without_time()
        .with_target(false)
        .with_ansi(has_colours())
        .init();
    for name in &unknown.unknown {
        eprintln!("warning: nothing of vramq reads the environment variable {name}");
    }
    for (name, read) in &ignored {
        eprintln!("warning: {name} is for workers; this program reads {read}");
    }
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: start the runtime: {error}");
            return exit::FAILED.into();
        }
    };
    let code = runtime.block_on(async {
        match cli.command {
            Command::Submit(args) => submit::run(*args).await,
            Command::Download(args) => download::run(*args).await,
            Command::Status(args) => status::run(args).await,
            Command::Control(args) => control::run(args).await,
            Command::Dlq(args) => dlq::run(*args).await,
            Command::RunModel(args) => run_model::run(args),
            Command::Completions(completions) => done(completions.write::<Cli>()),
            Command::Man(manual) => done(manual.write::<Cli>()),
        }
    });
    // A thread that waits for input from a terminal must not delay the exit.
    runtime.shutdown_background();
    code.into()
}

/// What the environment says is logged; warnings where it says nothing.
fn log_filter_of_environment() -> Result<EnvFilter, String> {
    let directives = match std::env::var(LOG_VARIABLE) {
        Ok(directives) if !directives.is_empty() => log_filter(&directives)?,
        Ok(_) | Err(VarError::NotPresent) => "warn,lapin=off".to_owned(),
        Err(error) => return Err(error.to_string()),
    };
    EnvFilter::builder().parse(directives).map_err(|error| error.to_string())
}

fn done(result: Result<(), String>) -> u8 {
    match result {
        Ok(()) => exit::DONE,
        Err(error) => {
            eprintln!("error: {error}");
            exit::USAGE
        }
    }
}

/// The variables that begin as vramq's do, and that nothing reads; and those of a worker for what this program reads from another variable.
fn unknown_variables() -> (UnknownVariables, Vec<(String, String)>) {
    let set = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())));
    let set: Vec<_> = set.collect();
    // Keys of a worker's configuration may be set, too: they are the worker's to check.
    let vocabulary =
        Vocabulary { variables: variables(), prefix: "VRAMQ__".to_owned(), ..Vocabulary::default() };
    let ignored = vocabulary.ignored(&set);
    (UnknownVariables::of(set, &vocabulary), ignored)
}

/// The variables of all flags.
fn variables() -> Vec<String> {
    [vec![LOG_VARIABLE.to_owned()], vramq_program::variables(&Cli::command())].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// clap checks the arguments of a subcommand only when it is called.
    #[test]
    fn no_two_arguments_have_one_name() {
        Cli::command().debug_assert();
    }
}
