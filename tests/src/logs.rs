//! A worker's log as it grows, and the lines in it that a test must have announced.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::sync::watch;

use crate::wait::until;

/// One line, as JSON (workers under test log JSON) or, for panics and usage messages, as plain text.
#[derive(Clone, Debug)]
pub struct Line {
    text: String,
    fields: Option<Value>,
    /// When the test read it.
    at: Instant,
}

/// The lines so far. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Log {
    lines: Arc<Mutex<Vec<Line>>>,
    /// While it is set, nobody reads the stream.
    stands_still: Arc<watch::Sender<bool>>,
}

impl Line {
    fn new(text: String) -> Self {
        let fields = serde_json::from_str(&text).ok();
        Self { text, fields, at: Instant::now() }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn at(&self) -> Instant {
        self.at
    }

    /// A field of a JSON line.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.fields.as_ref()?.get(name)
    }

    /// Whether nobody should see this line unless the test is about it: WARN, ERROR, and all that is no log line.
    fn is_alarming(&self) -> bool {
        !matches!(self.field("level").and_then(Value::as_str), Some("INFO" | "DEBUG" | "TRACE"))
    }
}

impl Log {
    /// Reads a stream to its end.
    pub async fn collect(self, from: impl AsyncRead + Unpin) {
        let mut lines = BufReader::new(from).split(b'\n');
        let mut stands_still = self.stands_still.subscribe();
        // The sender lives as long as this.
        while stands_still.wait_for(|stands_still| !stands_still).await.is_ok()
            && let Ok(Some(line)) = lines.next_segment().await
        {
            self.lines().push(Line::new(String::from_utf8_lossy(&line).into_owned()));
        }
    }

    /// Whether the reader of the stream stands still. It may still take a line.
    pub fn stand_still(&self, stands_still: bool) {
        self.stands_still.send_replace(stands_still);
    }

    /// The first line that contains `text`, waiting for it.
    ///
    /// # Errors
    /// It does not come, with all lines that did.
    pub async fn wait_for(&self, text: &str) -> Result<Line> {
        until(&format!("a log line with `{text}`"), async || Ok(self.find(text)))
            .await
            .with_context(|| format!("the log:\n{}", self.text()))
    }

    /// Exactly so many lines contain `text`, waiting for those that are not written yet: what the worker does is seen before its log.
    ///
    /// # Errors
    /// There are fewer or more, with all lines.
    pub async fn counts(&self, text: &str, count: usize) -> Result<()> {
        until(&format!("{count} log lines with `{text}`"), async || {
            Ok((self.count(text) >= count).then_some(()))
        })
        .await
        .with_context(|| format!("the log:\n{}", self.text()))?;
        let found = self.count(text);
        ensure!(found == count, "{found} log lines with `{text}`, and not {count}:\n{}", self.text());
        Ok(())
    }

    /// The first line that contains `text`, if there is one yet.
    pub fn find(&self, text: &str) -> Option<Line> {
        self.lines().iter().find(|line| line.text.contains(text)).cloned()
    }

    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.text.contains(text)).count()
    }

    /// All lines with this text.
    pub fn find_all(&self, text: &str) -> Vec<Line> {
        self.lines().iter().filter(|line| line.text.contains(text)).cloned().collect()
    }

    /// Alarming lines that contain none of the `allowed` texts.
    pub fn unannounced(&self, allowed: &[String]) -> Vec<String> {
        self.lines()
            .iter()
            .filter(|line| line.is_alarming() && !allowed.iter().any(|text| line.text.contains(text)))
            .map(|line| line.text.clone())
            .collect()
    }

    pub fn text(&self) -> String {
        let lines = self.lines();
        let texts: Vec<_> = lines.iter().map(|line| line.text.as_str()).collect();
        texts.join("\n")
    }

    fn lines(&self) -> MutexGuard<'_, Vec<Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
