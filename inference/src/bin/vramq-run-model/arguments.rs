//! The command line of `vramq-run-model`.

use serde_json::{Map, Value};

pub(crate) const USAGE: &str = "usage: vramq-run-model [--batch N] [--params JSON] CONFIG [MODEL]

Starts MODEL of the worker's configuration file CONFIG (or its only process model), and runs each line of standard input as an item:
a JSON object {\"json\": …}, {\"bytes\": \"BASE64\"}, {\"uri\": \"…\"}, {\"file\": \"PATH\"} (its bytes), {\"text\": \"…\"}, or else the line as text.
Outputs go to standard output, one JSON object a line; progress, and what the program prints, to standard error.

  --batch N      N items that follow each other are one pass, as those of several jobs are in a worker; at most the model's items_max
  --params JSON  the parameters of all passes, as a JSON object
  --version      print the version
  --help         print this

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
    pub(crate) config: String,
    pub(crate) model: Option<String>,
}

impl Asked {
    /// Reads the arguments. Options may stand before and after the file's name, until `--`.
    pub(crate) fn read(arguments: Vec<String>) -> Result<Self, String> {
        let (mut batch, mut params, mut named) = (1, Map::new(), Vec::new());
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
                "--" => named.extend(rest.by_ref()),
                option if option.starts_with('-') => return Err(format!("`{argument}` is not known")),
                _ => named.push(argument),
            }
        }
        let mut named = named.into_iter();
        let config = named.next().ok_or("CONFIG is missing")?;
        let model = named.next();
        match named.next() {
            Some(more) => Err(format!("`{more}` is one argument too many")),
            None => Ok(Self::Trial(Trial { batch, params, config, model })),
        }
    }
}

fn read_batch(text: &str) -> Result<usize, String> {
    let items = text.parse::<usize>().ok().filter(|items| *items > 0);
    items.ok_or_else(|| format!("--batch is `{text}`; it must be a number from 1"))
}

fn read_params(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("--params is `{text}`, which is no JSON object: {error}"))
}
