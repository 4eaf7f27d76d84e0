//! `vramq-gateway`: the command line, the configuration, the log and the exit code. The library runs the gateway (`lifecycle/`).

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]

use std::process::ExitCode;

use clap::Parser as _;
use vramq_gateway::config::cli::{Cli, Command, Options};
use vramq_gateway::config::{Config, Invalid};
use vramq_gateway::keys;
use vramq_gateway::lifecycle::{Exit, run, run_to_end};
use vramq_program::{close_log, start_log, write_error_line, write_output};

/// In the static programs of a release, because musl's own allocator takes one lock for all threads.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Ends the log when it is dropped, also by a panic of the main thread: the log then has the panic's line.
struct EndOfLog;

impl Drop for EndOfLog {
    fn drop(&mut self) {
        close_log(None);
    }
}

fn main() -> ExitCode {
    let _end = EndOfLog;
    let exit = match Cli::parse().command {
        Command::NewKey { name } => new_key(&name),
        Command::Completions(completions) => completions.write::<Cli>().map(|()| Exit::Drained),
        Command::Man(manual) => manual.write::<Cli>().map(|()| Exit::Drained),
        Command::CheckConfig(options) => prepare(&options).and_then(|config| {
            write_output(&format!(
                "the configuration is right: listening on {}, broker {}\n",
                config.http.listen, config.broker.address
            ))?;
            Ok(Exit::Drained)
        }),
        Command::Run(options) => {
            prepare(&options).and_then(|config| run_to_end(run(config)).map_err(|e| e.to_string())?)
        }
    };
    let (exit, failure) = match exit {
        Ok(exit) => (exit, None),
        Err(error) => (Exit::Usage, Some(format!("vramq-gateway: {error}"))),
    };
    close_log(failure);
    exit.into()
}

fn new_key(name: &str) -> Result<Exit, String> {
    if !keys::is_name(name) {
        return Err(format!(
            "`{name}` cannot name a caller: 1 to 64 characters of a-z, A-Z, 0-9, `-`, `_` and `.`"
        ));
    }
    let (key, entry) = keys::new_key(name);
    // Not on standard output, which may go to the file of keys.
    write_error_line(format_args!("The key, which only its caller should have: {key}"));
    write_output(&format!("{entry}\n"))?;
    Ok(Exit::Drained)
}

/// Reads the configuration and the files that it names.
fn prepare(options: &Options) -> Result<Config, String> {
    // Reading the configuration may log.
    start_log(&options.log, options.log_format, None).map_err(|e| format!("--log (VRAMQ_LOG): {e}"))?;
    options.read().map_err(|e: Invalid| e.to_string())
}
