//! The command line of `vramq-run-model`.

use serde_json::{Map, Value};

use crate::program::{self, Program};

pub(crate) const USAGE: &str = "usage: vramq-run-model [--batch N] [--params JSON] CONFIG [MODEL]
       vramq-run-model [--batch N] [--params JSON] [--python PATH] [--env NAME=VALUE]... PROGRAM [ARGUMENT...]

Starts MODEL of the worker's configuration file CONFIG (or its only process model); or PROGRAM, such as serve.py, in its own folder.
Then it runs each line of standard input as an item:
a JSON object {\"json\": …}, {\"bytes\": \"BASE64\"}, {\"uri\": \"…\"}, {\"file\": \"PATH\"} (its bytes), {\"text\": \"…\"}, or else the line as text,
unless it begins with {.
Outputs go to standard output, one JSON object a line; progress, and what the program prints, to standard error.

  --batch N      N items that follow each other are one pass, as those of several jobs are in a worker; at most the model's items_max
  --params JSON  the parameters of all passes, as a JSON object
  --python PATH  what runs PROGRAM, as the python of its virtual environment. Without it an executable file with #! runs by itself, and
                 another file whose name ends in .py by the python3 of PATH
  --env NAME=VALUE  a variable for PROGRAM, which has few others: as in a worker, it does not inherit those of the shell
  --version      print the version
  --help         print this

A file is a PROGRAM if its name ends in .py, or if it is executable, but never if its name ends in .toml. Options of the program itself
come after --.

Items that a worker would refuse, by a rule or because the model does not accept them, do not run. The exit status is 1 if an item did not
run or failed, 2 if arguments or configuration have faults, 4 if the model cannot be loaded, 141 if the reader of the outputs went away.";

/// What the command line asks for.
pub(crate) enum Asked {
    Help,
    Version,
    Trial(Trial),
}

/// A model to be tried, and how.
pub(crate) struct Trial {
    /// Items of a pass.
    pub(crate) batch: usize,
    pub(crate) params: Map<String, Value>,
    pub(crate) source: Source,
}

/// What starts the model.
pub(crate) enum Source {
    Config { file: String, model: Option<String> },
    Program(Program),
}

impl Asked {
    /// Reads the arguments. Options may stand before and after the file's name, until `--`.
    pub(crate) fn read(arguments: Vec<String>) -> Result<Self, String> {
        let (mut batch, mut params, mut named) = (1, Map::new(), Vec::new());
        let (mut interpreter, mut variables) = (None, Vec::new());
        let mut rest = arguments.into_iter();
        while let Some(argument) = rest.next() {
            let (option, given) = match argument.split_once('=') {
                Some((option, value)) if option.starts_with("--") => (option, Some(value.to_owned())),
                _ => (argument.as_str(), None),
            };
            let mut value = || given.clone().or_else(|| rest.next()).ok_or(format!("{option} has no value"));
            match option {
                "--help" | "-h" => return Ok(Self::Help),
                "--version" | "-V" => return Ok(Self::Version),
                "--batch" => batch = read_batch(&value()?)?,
                "--params" => params = read_params(&value()?)?,
                "--python" => interpreter = Some(value()?),
                "--env" => variables.push(read_variable(&value()?)?),
                "--" => named.extend(rest.by_ref()),
                option if option.starts_with('-') => return Err(format!("`{argument}` is not known")),
                _ => named.push(argument),
            }
        }
        let mut named = named.into_iter();
        let file = named.next().ok_or("CONFIG or PROGRAM is missing")?;
        if program::is_program(&file) || (interpreter.is_some() && !file.ends_with(".toml")) {
            let source =
                Source::Program(Program { file, interpreter, variables, arguments: named.collect() });
            return Ok(Self::Trial(Trial { batch, params, source }));
        }
        if interpreter.is_some() || !variables.is_empty() {
            return Err(format!("--python and --env are for a program; {file} is taken for a configuration"));
        }
        let model = named.next();
        match named.next() {
            Some(more) => Err(format!("`{more}` is one argument too many")),
            None => Ok(Self::Trial(Trial { batch, params, source: Source::Config { file, model } })),
        }
    }
}

fn read_variable(text: &str) -> Result<(String, String), String> {
    let (name, value) =
        text.split_once('=').ok_or_else(|| format!("--env is `{text}`; it must be NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn read_batch(text: &str) -> Result<usize, String> {
    let items = text.parse::<usize>().ok().filter(|items| *items > 0);
    items.ok_or_else(|| format!("--batch is `{text}`; it must be a number from 1"))
}

fn read_params(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("--params is `{text}`, which is no JSON object: {error}"))
}
