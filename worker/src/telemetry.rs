//! Logs, and what they show, which may change while the worker runs.

use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

use crate::config::cli::LogFormat;

/// What is logged.
#[derive(Clone, Debug)]
pub struct Logs(reload::Handle<EnvFilter, Registry>);

/// Why the logs stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error(transparent)]
    Filter(#[from] ParseError),
    #[error(transparent)]
    Gone(#[from] reload::Error),
}

/// Starts logging to standard error.
///
/// # Errors
/// A filter that cannot be read.
pub fn init(directives: &str, format: LogFormat) -> Result<Logs, ParseError> {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
        || !std::io::IsTerminal::is_terminal(&std::io::stderr());
    let lines =
        tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(!plain);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let (filter, handle) = reload::Layer::new(filter(directives)?);
    tracing_subscriber::registry().with(filter).with(lines).init();
    Ok(Logs(handle))
}

impl Logs {
    /// Logs something else from now on.
    ///
    /// # Errors
    /// A filter that cannot be read.
    pub fn set(&self, directives: &str) -> Result<(), LogsError> {
        Ok(self.0.reload(filter(directives)?)?)
    }
}

/// lapin logs what it also returns, and a returned message with its whole body; what matters of it is logged where it is
/// handled. Whoever asks for it by name has it.
fn filter(directives: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().with_regex(false).parse(format!("lapin=off,{directives}"))
}
