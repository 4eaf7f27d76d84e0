//! Flags that the programs with a configuration file share.

use clap::{Args, Command, ValueEnum};

/// How to reach the broker.
#[derive(Clone, Debug, Args)]
pub struct BrokerOptions {
    /// The broker, amqp://USER:PASSWORD@HOST:5672/VHOST.
    #[arg(long, env = "VRAMQ_BROKER_URL", hide_env_values = true, value_name = "URL")]
    broker_url: Option<String>,
    /// Certificates of a private authority, in PEM, for amqps://.
    #[arg(long, env = "VRAMQ_BROKER_CA", value_name = "FILE")]
    broker_ca: Option<String>,
    /// This program's certificate, in PEM, for amqps://.
    #[arg(long, env = "VRAMQ_BROKER_CERTIFICATE", value_name = "FILE")]
    broker_certificate: Option<String>,
    /// The private key of the certificate, in PEM.
    #[arg(long, env = "VRAMQ_BROKER_KEY", value_name = "FILE")]
    broker_key: Option<String>,
    /// File with the password of the URL's user.
    #[arg(long, env = "VRAMQ_BROKER_PASSWORD_FILE", value_name = "FILE")]
    broker_password_file: Option<String>,
}

impl BrokerOptions {
    /// The keys of the configuration file that these flags override, each with its value if it is given.
    pub fn keys(&self) -> [(&'static str, &Option<String>); 5] {
        [
            ("broker.url", &self.broker_url),
            ("broker.ca", &self.broker_ca),
            ("broker.certificate", &self.broker_certificate),
            ("broker.key", &self.broker_key),
            ("broker.password_file", &self.broker_password_file),
        ]
    }
}

/// The variables that a command's flags and those of its subcommands read.
pub fn variables(command: &Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|flag| flag.get_env()?.to_str().map(str::to_owned));
    own.chain(command.get_subcommands().flat_map(variables)).collect()
}

/// Names of log levels. A filter may also give a level as a number, 0 to 5.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Checks a log filter: each word without `=`, and what follows a `=`, must be a level. The log takes any other word as a target and then
/// logs nothing else, so a misspelled level would silence it.
///
/// # Errors
/// A word is no level.
pub fn log_filter(directives: &str) -> Result<String, String> {
    let is_level = |word: &str| {
        LEVELS.iter().any(|level| word.eq_ignore_ascii_case(level)) || matches!(word.parse::<u8>(), Ok(0..=5))
    };
    let is_word_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let mut words =
        directives.split(',').map(str::trim).filter_map(|directive| match directive.rsplit_once('=') {
            Some((_, level)) => Some(level.trim()),
            None => Some(directive).filter(|word| !word.is_empty() && word.chars().all(is_word_char)),
        });
    // A filter with `[` may list fields of a span, which commas separate too. Its words are not checked.
    match words.find(|word| !directives.contains('[') && !is_level(word)) {
        None => Ok(directives.to_owned()),
        Some(word) => Err(format!(
            "`{word}` is not a log level; levels are {}; for one target write TARGET=LEVEL, as in lapin=debug",
            LEVELS.join(", ")
        )),
    }
}

/// The form of a line of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[cfg(test)]
mod tests {
    use super::log_filter;

    #[test]
    fn a_misspelt_level_is_no_filter() {
        for right in [
            "info",
            "WARN",
            "3",
            "",
            "info,lapin=debug",
            "lapin=off, debug",
            "vramq_worker::event_loop",
            "[span{a,b}]=debug",
        ] {
            assert_eq!(log_filter(right).as_deref(), Ok(right));
        }
        for (wrong, word) in [
            ("wran", "wran"),
            ("info,verbose", "verbose"),
            ("6", "6"),
            ("vramq_worker", "vramq_worker"),
            ("lapin=loud", "loud"),
            ("info,lapin=", ""),
        ] {
            let error = log_filter(wrong).unwrap_err();
            assert!(error.starts_with(&format!("`{word}` is not a log level")), "{error}");
        }
    }
}
