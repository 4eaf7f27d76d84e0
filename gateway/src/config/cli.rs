//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use vramq_program::{
    BrokerOptions, Completions, LogFormat, Manual, Overrides, Vocabulary, completions_help, log_filter,
    manual_help, read_text, variables,
};

use super::{Config, Fault, Invalid};

/// Environment variables with this prefix set any key of the file: `VRAMQ_GATEWAY__HTTP__REQUEST_S=60` is `http.request_s`.
const ENVIRONMENT_PREFIX: &str = "VRAMQ_GATEWAY__";

/// An HTTP gateway to vramq workers.
///
/// Takes requests in the forms of OpenAI's API and text-embeddings-inference, publishes them as jobs, and answers with the
/// results.
#[derive(Debug, Parser)]
#[command(name = "vramq-gateway", version, max_term_width = 100)]
#[command(after_help = "\
Example:
  vramq-gateway run --listen 127.0.0.1:8080 --broker-url amqp://guest:guest@localhost:5672/%2f

Exit codes:
  0 drained, or done · 1 requests were cut off at the end of the drain · 2 usage or configuration
  3 broker unreachable, or refuses the login, at start")]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve until SIGTERM or SIGINT.
    #[command(after_help = "\
Examples:
  vramq-gateway run --listen 127.0.0.1:8080
  vramq-gateway run --config gateway.toml --set http.request_s=60

Exit codes:
  0 drained, or stopped before it served · 1 requests were cut off at the end of the drain · 2 usage or configuration
  3 broker unreachable, or refuses the login, at start")]
    Run(Options),
    /// Read the configuration and the files that it names, report all faults, and do nothing else.
    #[command(after_help = "\
Example:
  vramq-gateway check-config --config gateway.toml

Exit codes:
  0 the configuration is right · 2 it has faults")]
    CheckConfig(Options),
    /// Make a new key: prints its entry for the file of keys on standard output, and the key on standard error.
    #[command(after_help = "\
Example:
  vramq-gateway new-key team-a >> keys.toml

Exit codes:
  0 done · 2 usage")]
    NewKey {
        /// The caller's name: 1 to 64 characters of a-z, A-Z, 0-9, `-`, `_` and `.`.
        name: String,
    },
    #[command(after_help = completions_help("vramq-gateway"))]
    Completions(Completions),
    #[command(after_help = manual_help("vramq-gateway"))]
    Man(Manual),
}

/// Where the configuration comes from. The environment overrides the file, flags override both.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// TOML file.
    #[arg(long, env = "VRAMQ_GATEWAY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub broker: BrokerOptions,
    /// Where to serve HTTP, IP:PORT [default: 127.0.0.1:8080].
    #[arg(long, env = "VRAMQ_GATEWAY_LISTEN", value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// The file of keys; without it the gateway listens only on loopback addresses.
    #[arg(long, env = "VRAMQ_GATEWAY_KEYS", value_name = "FILE")]
    pub keys: Option<String>,
    /// Set any key of the file, such as http.request_s=60; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// What to log: a level, or directives as in `info,lapin=debug`.
    #[arg(long, env = "VRAMQ_LOG", default_value = "info", value_name = "FILTER", value_parser = log_filter)]
    pub log: String,
    /// Text, or one JSON object a line.
    #[arg(long, env = "VRAMQ_LOG_FORMAT", value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
}

impl Options {
    /// Reads the file and everything over it.
    ///
    /// # Errors
    /// All faults of the configuration.
    pub fn read(&self) -> Result<Config, Invalid> {
        let mut faults = Vec::new();
        let (name, text) = match &self.config {
            None => (String::new(), Ok(String::new())),
            Some(file) => (format!("file {}", file.display()), read_text(file)),
        };
        let text = text.unwrap_or_else(|what| {
            faults.push(Fault { key: name.clone(), what });
            String::new()
        });
        let Overrides { values, faults: more, unknown } = self.overrides();
        for name in unknown {
            tracing::warn!("nothing of vramq reads the environment variable {name}");
        }
        faults.extend(more.into_iter().map(|(key, what)| Fault { key, what }));
        match Config::read_named(&name, &text, values) {
            Ok(config) if faults.is_empty() => Ok(config),
            Ok(_) => Err(Invalid(faults)),
            Err(Invalid(more)) => Err(Invalid([faults, more].concat())),
        }
    }

    fn overrides(&self) -> Overrides {
        let vocabulary = Vocabulary {
            variables: variables(&Self::augment_args(clap::Command::new(""))),
            prefix: ENVIRONMENT_PREFIX.to_owned(),
            keys: Config::keys(),
        };
        let mut overrides = Overrides::of_environment(&vocabulary);
        let own = [("http.listen", &self.listen), ("http.keys", &self.keys)];
        for (key, value) in self.broker.keys().into_iter().chain(own) {
            overrides.flag(key, value.as_ref());
        }
        for pair in &self.set {
            overrides.pair("--set", pair, str::to_owned);
        }
        overrides
    }
}

#[cfg(test)]
mod tests {
    use vramq_testkit::keys_of_page::keys_of_page;

    use super::*;

    #[test]
    fn the_keys_of_the_page_are_known() {
        let page = include_str!("../../../docs/http.md");
        let (_, configuration) = page.split_once("## Configuration").unwrap();
        let (of_page, known) = (keys_of_page(configuration), Config::keys());
        let unknown: Vec<_> = of_page.iter().filter(|key| !known.contains(*key)).collect();
        assert!(unknown.is_empty(), "{unknown:?} are not in {known:?}");
        assert!(of_page.len() > 35, "{of_page:?}");
    }
}
