//! The command line.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use clap::{Args, Parser, Subcommand};
use vramq_program::{
    BrokerOptions, Completions, LogFormat, Manual, Overrides, Vocabulary, completions_help, log_filter,
    manual_help, read_text, variables,
};

use super::{Config, ConfigFault, Gpu, Invalid};

/// Environment variables with this prefix set any key of the file: `VRAMQ__DEVICE__CPU__MEMORY_MIB=512` is
/// `device.cpu.memory_mib`.
const ENVIRONMENT_PREFIX: &str = "VRAMQ__";

/// A GPU-inference worker for RabbitMQ.
///
/// Takes as many jobs as the device's memory has room for, runs them, and answers on their reply queues.
#[derive(Debug, Parser)]
#[command(name = "vramq-worker", version, max_term_width = 100)]
#[command(after_help = "\
Example:
  vramq-worker run --model minilm=models/all-MiniLM-L6-v2

Exit codes:
  0 drained, or done · 1 killed while draining · 2 usage or configuration
  3 broker unreachable, or refuses the login, at start · 4 device or model unusable · 5 restart wanted")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve jobs until SIGTERM or SIGINT.
    #[command(after_help = "\
Examples:
  vramq-worker run --model minilm=models/all-MiniLM-L6-v2
  vramq-worker run --config worker.toml --set model.minilm.slots_max=8

Exit codes:
  0 drained · 1 killed while draining · 2 usage or configuration, or queues with other arguments
  3 broker unreachable, or refuses the login, at start · 4 device or model unusable, or no job fits
  5 restart wanted")]
    Run(Options),
    /// Load the models, run some passes, and show devices, memory, weights, bytes per job, slots and jobs per second; does not
    /// consume.
    #[command(after_help = "\
Examples:
  vramq-worker doctor --model minilm=models/all-MiniLM-L6-v2
  vramq-worker doctor --config worker.toml --memory-mib 1024 --json

Exit codes:
  0 every model has a slot · 2 usage or configuration · 4 device or model unusable, or no job fits")]
    Doctor {
        #[command(flatten)]
        options: Options,
        /// Print JSON instead of tables.
        #[arg(long)]
        json: bool,
    },
    /// Read the configuration, report all faults, and do nothing else.
    #[command(after_help = "\
Example:
  vramq-worker check-config --config worker.toml

Exit codes:
  0 the configuration is right · 2 it has faults")]
    CheckConfig(Options),
    #[command(after_help = completions_help("vramq-worker"))]
    Completions(Completions),
    #[command(after_help = manual_help("vramq-worker"))]
    Man(Manual),
}

/// Where the configuration comes from. The environment overrides the file, flags override both.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// TOML file.
    #[arg(long, env = "VRAMQ_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub broker: BrokerOptions,
    /// This worker's name [default: host and process id].
    #[arg(long, env = "VRAMQ_WORKER_NAME", value_name = "NAME")]
    pub name: Option<String>,
    /// Serve a model from a folder; may be repeated.
    #[arg(long, value_name = "NAME=FOLDER")]
    pub model: Vec<String>,
    /// Memory of the CPU device.
    #[arg(long, env = "VRAMQ_MEMORY_MIB", value_name = "MIB")]
    pub memory_mib: Option<String>,
    /// Where to serve /livez, /readyz and /metrics: IP:PORT, IP:FIRST-LAST, or `off`.
    #[arg(long, env = "VRAMQ_HTTP_LISTEN", value_name = "ADDRESS")]
    pub http_listen: Option<String>,
    /// Set any key of the file, such as model.minilm.slots_max=8; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// What to log: a level, or directives as in `info,lapin=debug`.
    #[arg(long, env = "VRAMQ_LOG", default_value = "info", value_name = "FILTER", value_parser = log_filter)]
    pub log: String,
    /// Text, or one JSON object a line.
    #[arg(long, env = "VRAMQ_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
    /// Which of several GPUs. The process that runs a worker on each GPU sets this.
    #[arg(long, hide = true, value_name = "ORDINAL:UUID")]
    pub gpu: Option<Gpu>,
}

impl Options {
    /// Reads the file, the environment and the flags.
    ///
    /// # Errors
    /// All faults of the configuration.
    pub fn read(&self) -> Result<Config, Invalid> {
        let mut faults = Vec::new();
        let name = self.config.as_ref().map_or(String::new(), |file| format!("file {}", file.display()));
        let text = self.config.as_ref().and_then(|file| {
            read_text(file).map_err(|what| faults.push(ConfigFault { key: name.clone(), what })).ok()
        });
        let Overrides { values, faults: more, unknown } = self.overrides();
        for name in unknown {
            tracing::warn!("nothing of vramq reads the environment variable {name}");
        }
        faults.extend(more.into_iter().map(|(key, what)| ConfigFault { key, what }));
        let folder = self.config.as_deref().map_or(Path::new("."), folder_of);
        match Config::read_in(folder, &name, text.as_deref(), &values) {
            Ok(config) if faults.is_empty() => Ok(match &self.gpu {
                Some(gpu) => config.on(gpu),
                None => config,
            }),
            Ok(_) => Err(Invalid(faults)),
            Err(Invalid(more)) => Err(Invalid([faults, more].concat())),
        }
    }

    fn overrides(&self) -> Overrides {
        let vocabulary = Vocabulary {
            variables: variables(&Self::augment_args(clap::Command::new(""))),
            prefix: ENVIRONMENT_PREFIX.to_owned(),
            keys: super::keys(),
        };
        let mut overrides = Overrides::of_environment(&vocabulary);
        let own = [
            ("worker.name", &self.name),
            ("device.cpu.memory_mib", &self.memory_mib),
            ("http.listen", &self.http_listen),
        ];
        for (key, value) in self.broker.keys().into_iter().chain(own) {
            overrides.flag(key, value.as_ref());
        }
        let mut named = HashSet::new();
        for pair in &self.model {
            let name = pair.split_once('=').map_or(pair.as_str(), |(name, _)| name);
            if !named.insert(name) {
                overrides
                    .faults
                    .push((format!("--model {pair}"), "names the model a second time".to_owned()));
            }
            overrides.pair("--model", pair, |name| format!("model.{name}.path"));
        }
        for pair in &self.set {
            overrides.pair("--set", pair, str::to_owned);
        }
        overrides
    }
}

/// The folder of a file. For a bare name that is the current folder: its parent is the empty path, which is not a folder.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use vramq_testkit::keys_of_page::keys_of_page;

    use super::*;
    use crate::config::EngineConfig;

    /// A key of the page that the reader never asks for would not be recognised in a misspelt variable.
    #[test]
    fn the_keys_of_the_page_are_known() {
        let of_page = keys_of_page(include_str!("../../../docs/configuration.md"));
        let known = crate::config::keys();
        let unknown: Vec<_> = of_page.iter().filter(|key| !known.contains(*key)).collect();
        assert!(unknown.is_empty(), "{unknown:?} are not in {known:?}");
        assert!(of_page.len() > 50, "{of_page:?}");
    }

    #[test]
    fn a_model_that_is_named_twice_is_a_fault() {
        let faults = |models: &[&str]| {
            let flags = models.iter().flat_map(|model| ["--model", model]);
            let cli = Cli::try_parse_from(["vramq-worker", "check-config"].into_iter().chain(flags));
            let Command::CheckConfig(options) = cli.unwrap().command else { panic!("another command") };
            options.overrides().faults
        };
        let said = ("--model minilm=/x".to_owned(), "names the model a second time".to_owned());
        assert!(faults(&["minilm=/a", "minilm=/x"]).contains(&said));
        assert!(!faults(&["minilm=/a", "other=/x"]).iter().any(|(what, _)| what.starts_with("--model")));
    }

    #[test]
    fn programs_run_in_the_folder_of_the_file_also_if_that_is_a_bare_name() {
        let here = std::env::current_dir().unwrap();
        let folders = [
            ("worker.toml", here.clone()),
            ("src/worker.toml", here.join("src")),
            ("/etc/w.toml", "/etc".into()),
        ];
        for (file, folder) in folders {
            let text = "[model.m]\nengine = \"process\"\ncommand = [\"/bin/sh\"]";
            let config = Config::read_in(folder_of(Path::new(file)), "file", Some(text), &[]);
            let config = config.unwrap_or_else(|faults| panic!("{file}: {faults}"));
            let EngineConfig::Process(program) = &config.models[0].engine else { panic!("{config:?}") };
            assert_eq!(program.folder, folder, "{file}");
        }
    }
}
