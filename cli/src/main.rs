//! `vramq`, the command for people and scripts: submits jobs, shows and controls workers, handles dead letters.

mod broker;
mod control;
mod dlq;
mod duration;
mod exit;
mod output;
mod shell;
mod signals;
mod status;
mod submit;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// Publish jobs to vramq workers, and operate them.
#[derive(Debug, Parser)]
#[command(name = "vramq", version, propagate_version = true)]
#[command(after_help = "\
Example:
  vramq submit --model minilm 'a text'

Exit codes are the same for every command:
  0 done · 1 not everything succeeded · 2 usage or input · 3 broker unreachable · 4 refused by the broker
  130 interrupted (SIGINT) · 143 terminated (SIGTERM)")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Submit(Box<submit::Args>),
    Status(status::Args),
    Control(control::Args),
    Dlq(Box<dlq::Args>),
    Completions(shell::CompletionsArgs),
    Man(shell::ManArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // lapin logs every lost connection as errors of its own; the client logs it once.
    let filter = EnvFilter::try_from_env("VRAMQ_LOG").unwrap_or_else(|_| EnvFilter::new("warn,lapin=off"));
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .with_ansi(!plain && std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
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
            Command::Status(args) => status::run(args).await,
            Command::Control(args) => control::run(args).await,
            Command::Dlq(args) => dlq::run(*args).await,
            Command::Completions(args) => shell::completions(&args),
            Command::Man(args) => shell::manual(&args),
        }
    });
    // A thread that waits for input from a terminal must not delay the exit.
    runtime.shutdown_background();
    code.into()
}
