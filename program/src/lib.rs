//! What all programs share of their command lines and configurations: `completions` writes shell completions, `man` writes manual pages,
//! `options` has the flags of programs with a configuration file, `environment` finds misspelt variables, `overrides` applies variables and
//! flags over the file, `files` reads the files that it names, `values` says what is wrong with them, `print` prints, `logs` writes the log,
//! and `panics` makes panics lines of it.

// Nothing that a message, a peer or a device does may panic.
#![cfg_attr(not(test), warn(clippy::expect_used, clippy::panic, clippy::unreachable))]
// What is `pub` can be used elsewhere.
#![warn(unreachable_pub)]

mod environment;
mod files;
mod logs;
mod options;
mod overrides;
mod panics;
mod print;
mod values;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

pub use environment::{NAME, UnknownVariables, Vocabulary, is_known_variable};
pub use files::{no_folder, no_folder_to_write, read_lasting_text, read_text};
pub use logs::{Logs, LogsError, close_log, dropped_log_lines, start_log};
pub use options::{BrokerOptions, LogFormat, log_filter, variables};
pub use overrides::Overrides;
pub use print::{has_colours, is_dumb_terminal, wants_colours, write_error_line, write_output};
pub use values::{line_at, shown, shown_number, toml_fault};

/// Write the completions of a shell to standard output.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    shell: Shell,
}

/// Write the manual pages of this program into a folder.
#[derive(Clone, Debug, Args)]
pub struct Manual {
    /// An existing folder.
    folder: PathBuf,
}

/// What follows the options in the help of `completions`. `program` is the name that users type.
pub fn completions_help(program: &str) -> String {
    format!("Example:\n  {program} completions bash > {program}.bash\n\nExit codes:\n  0 written · 2 usage")
}

/// What follows the options in the help of `man`.
pub fn manual_help(program: &str) -> String {
    format!(
        "Example:\n  {program} man .\n\nExit codes:\n  0 written · 2 usage, or the folder cannot be written to"
    )
}

impl Completions {
    /// Writes the shell completions of the program that `C` describes. A reader that closes the pipe early (`| head`) causes no
    /// error.
    ///
    /// # Errors
    /// Standard output cannot be written to.
    pub fn write<C: CommandFactory>(&self) -> Result<(), String> {
        self.write_to::<C>(&mut io::stdout().lock()).map_err(|error| format!("write completions: {error}"))
    }

    fn write_to<C: CommandFactory>(&self, output: &mut impl Write) -> io::Result<()> {
        let mut command = C::command();
        let name = command.get_name().to_owned();
        // Into memory first: clap_complete panics where it cannot write.
        let mut text = Vec::new();
        clap_complete::generate(self.shell, &mut command, name, &mut text);
        print::write_all(output, &text)
    }
}

impl Manual {
    /// Writes a page for the program, and one for each of its commands.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn write<C: CommandFactory>(&self) -> Result<(), String> {
        clap_mangen::generate_to(C::command(), &self.folder)
            .map_err(|error| format!("write manual pages to {}: {error}", self.folder.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    #[command(name = "a-program")]
    struct Cli {}

    /// Fails every write in one way.
    struct Failing(io::ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_goes_early_is_no_error_and_a_full_disk_is_one() {
        let completions = Completions { shell: Shell::Bash };
        let mut text = Vec::new();
        completions.write_to::<Cli>(&mut text).unwrap();
        assert!(String::from_utf8(text).unwrap().contains("a-program"));
        completions.write_to::<Cli>(&mut Failing(io::ErrorKind::BrokenPipe)).unwrap();
        let error = completions.write_to::<Cli>(&mut Failing(io::ErrorKind::StorageFull)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}
