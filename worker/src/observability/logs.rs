//! Logs to standard error. The filter may change while the worker runs.

use std::borrow::Cow;
use std::io::{self, IsTerminal as _};

use tracing::{Level, Metadata};
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};
use vramq_program::{LogFormat, log_filter, log_panics};

use crate::config::Gpu;

/// What is logged.
#[derive(Clone, Debug)]
pub struct Logs(reload::Handle<EnvFilter, Registry>);

/// Why the filter was not changed.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    #[error(transparent)]
    Filter(#[from] ParseError),
    #[error("{0}")]
    Level(String),
    #[error(transparent)]
    Gone(#[from] reload::Error),
}

/// Starts logging to standard error, panics included. With several processes, lines name their GPU.
///
/// # Errors
/// The filter cannot be read.
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
    log_panics();
    Ok(Logs(handle))
}

impl Logs {
    /// Changes the filter.
    ///
    /// # Errors
    /// The filter cannot be read.
    pub fn set(&self, directives: &str) -> Result<(), LogsError> {
        let directives = log_filter(directives).map_err(LogsError::Level)?;
        Ok(self.0.reload(filter(&directives)?)?)
    }
}

/// At this level lapin logs the frames that it sends, including those with its credentials.
fn tells_passwords(metadata: &Metadata<'_>) -> bool {
    metadata.target().starts_with("lapin") && *metadata.level() == Level::TRACE
}

/// lapin is off by default: it logs errors that it also returns, and returned messages with their bodies. vramq logs these where it handles
/// them. A directive that names lapin overrides this.
fn filter(directives: &str) -> Result<EnvFilter, ParseError> {
    EnvFilter::builder().with_regex(false).parse(format!("lapin=off,{directives}"))
}

/// Standard error. If several processes log, one for each GPU, every line starts with the GPU.
#[derive(Clone, Debug)]
struct Lines {
    gpu: Option<usize>,
    format: LogFormat,
}

impl Lines {
    /// An event as it is written.
    fn written<'a>(&self, event: &'a [u8]) -> Cow<'a, [u8]> {
        let event = indented(event);
        let Some(gpu) = self.gpu else { return event };
        Cow::Owned(match (self.format, &*event) {
            (LogFormat::Json, [b'{', rest @ ..]) => {
                [format!("{{\"gpu\":\"cuda:{gpu}\",").as_bytes(), rest].concat()
            }
            (_, event) => [format!("cuda:{gpu} ").as_bytes(), event].concat(),
        })
    }
}

impl io::Write for Lines {
    /// Writes an event in a single call, because other processes write to the same place.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        io::stderr().write_all(&self.written(event))?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// Indents the further lines of an event, so that text from a job or a program cannot look like an event.
fn indented(event: &[u8]) -> Cow<'_, [u8]> {
    let text = event.strip_suffix(b"\n").unwrap_or(event);
    if !text.contains(&b'\n') {
        return Cow::Borrowed(event);
    }
    let mut lines = text.split(|byte| *byte == b'\n').collect::<Vec<_>>().join(&b"\n    "[..]);
    lines.extend(&event[text.len()..]);
    Cow::Owned(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_event_begins_a_line() {
        let written = |gpu, format, event: &str| {
            String::from_utf8(Lines { gpu, format }.written(event.as_bytes()).into_owned()).unwrap()
        };
        let forged = "T  WARN pass failed error=no\nT ERROR drive A: is full\n";
        let indented = "T  WARN pass failed error=no\n    T ERROR drive A: is full\n";
        assert_eq!(written(None, LogFormat::Text, forged), indented);
        assert_eq!(written(Some(1), LogFormat::Text, forged), format!("cuda:1 {indented}"));
        assert_eq!(written(None, LogFormat::Text, "T  INFO session open\n"), "T  INFO session open\n");
        assert_eq!(written(Some(1), LogFormat::Json, "{\"a\":1}\n"), "{\"gpu\":\"cuda:1\",\"a\":1}\n");
    }

    #[test]
    fn a_filter_that_names_no_level_leaves_the_logs_as_they_are() {
        // Kept alive: the handle changes this layer.
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
