//! Logs to standard error. The filter may change while the worker runs.

use std::io::{self, IsTerminal as _};

use tracing::{Level, Metadata};
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};
use vramq_program::{LogFormat, log_filter};

use crate::config::Gpu;

/// What is logged.
#[derive(Clone, Debug)]
pub struct Logs(reload::Handle<EnvFilter, Registry>);

/// Why the logs stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error(transparent)]
    Filter(#[from] ParseError),
    #[error("{0}")]
    Level(String),
    #[error(transparent)]
    Gone(#[from] reload::Error),
}

/// Starts logging to standard error; with the name of the GPU where several processes do.
///
/// # Errors
/// A filter that cannot be read.
pub fn init(directives: &str, format: LogFormat, gpu: Option<&Gpu>) -> Result<Logs, ParseError> {
    let plain =
        std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) || !io::stderr().is_terminal();
    let writer = Lines { gpu: gpu.map(|gpu| gpu.ordinal), format };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || writer.clone())
        .with_target(false)
        .with_ansi(!plain);
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let lines = lines.with_filter(filter_fn(|metadata| !tells_passwords(metadata)));
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
        let directives = log_filter(directives).map_err(LogsError::Level)?;
        Ok(self.0.reload(filter(&directives)?)?)
    }
}

/// On this level lapin logs the frames that it sends, those with its credentials included.
fn tells_passwords(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("lapin") && *metadata.level() == Level::TRACE
}

/// lapin logs errors that it also returns, and returned messages with their bodies; what matters is logged where it is handled.
/// A directive that names lapin overrides this.
fn filter(directives: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().with_regex(false).parse(format!("lapin=off,{directives}"))
}

/// Standard error; where several processes log, each for a GPU, every line starts with its GPU.
#[derive(Clone, Debug)]
struct Lines {
    gpu: Option<usize>,
    format: LogFormat,
}

impl Lines {
    fn labelled(&self, event: &[u8]) -> Option<Vec<u8>> {
        let gpu = self.gpu?;
        Some(match (self.format, event) {
            (LogFormat::Json, [b'{', rest @ ..]) => {
                [format!("{{\"gpu\":\"cuda:{gpu}\",").as_bytes(), rest].concat()
            }
            _ => [format!("cuda:{gpu} ").as_bytes(), event].concat(),
        })
    }
}

impl io::Write for Lines {
    /// Writes an event, which arrives as a whole, as a whole: other processes write to the same place.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        match self.labelled(event) {
            None => io::stderr().write_all(event)?,
            Some(line) => io::stderr().write_all(&line)?,
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_filter_that_names_no_level_leaves_the_logs_as_they_are() {
        // The layer is what the handle changes.
        let (_layer, handle) = reload::Layer::<_, Registry>::new(filter("info").unwrap());
        let logs = Logs(handle);
        logs.set("warn,lapin=debug").unwrap();
        let before = logs.0.with_current(ToString::to_string).unwrap();
        for wrong in ["wran", "info,verbose", "["] {
            logs.set(wrong).unwrap_err();
        }
        assert_eq!(logs.0.with_current(ToString::to_string).unwrap(), before);
    }
}
