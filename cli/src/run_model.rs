//! `vramq run-model`: starts `vramq-run-model`, which serves a program as a model without a broker.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::exit;

/// The program, beside this one or on the path.
const PROGRAM: &str = "vramq-run-model";

/// Run a program as a model without a broker; each line of standard input is an item.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  vramq run-model --python venv/bin/python serve.py < texts.txt
  vramq run-model worker.toml minilm-torch --batch 8 < texts.txt

`vramq-run-model --help` lists its options.")]
pub(crate) struct Args {
    /// What vramq-run-model takes: options, and a program, or the worker's configuration and the model's name.
    #[arg(
        value_name = "[OPTIONS] CONFIG [MODEL] | PROGRAM",
        trailing_var_arg = true,
        allow_hyphen_values = true,
        required = true
    )]
    arguments: Vec<OsString>,
}

/// Replaces this process by the program. Returns only if it cannot.
pub(crate) fn run(args: Args) -> u8 {
    let error = Command::new(program()).args(args.arguments).exec();
    eprintln!(
        "error: start {PROGRAM}: {error}; it comes with the worker's packages, or by `cargo install --locked --path inference`"
    );
    exit::USAGE
}

fn program() -> PathBuf {
    let beside = std::env::current_exe().map(|this| this.with_file_name(PROGRAM));
    beside.ok().filter(|path| path.exists()).unwrap_or_else(|| PROGRAM.into())
}
