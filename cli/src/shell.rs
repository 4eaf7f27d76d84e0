//! `vramq completions` and `vramq man`: generates shell completions and manual pages.

use std::path::PathBuf;

use clap::CommandFactory as _;
use clap_complete::Shell;

use crate::{Cli, exit};

/// Write completions for a shell to standard output.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  vramq completions bash > vramq.bash

Exit codes:
  0 written · 2 usage")]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

/// Write the manual pages into a folder.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  vramq man .

Exit codes:
  0 written · 2 usage, or the folder cannot be written to")]
pub(crate) struct ManArgs {
    /// An existing folder.
    folder: PathBuf,
}

pub(crate) fn completions(args: &CompletionsArgs) -> u8 {
    clap_complete::generate(args.shell, &mut Cli::command(), "vramq", &mut std::io::stdout());
    exit::DONE
}

pub(crate) fn manual(args: &ManArgs) -> u8 {
    match clap_mangen::generate_to(Cli::command(), &args.folder) {
        Ok(()) => exit::DONE,
        Err(error) => {
            eprintln!("error: write manual pages to {}: {error}", args.folder.display());
            exit::USAGE
        }
    }
}
