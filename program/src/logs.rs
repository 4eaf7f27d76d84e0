//! The log of a program on standard error. A thread of its own writes the lines, so that a reader that stands still stops nothing else.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use tracing::{Level, Metadata};
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{ParseError, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, reload};

use crate::options::{LogFormat, log_filter};
use crate::panics::log_panics;
use crate::print::has_colours;

/// The most bytes of lines that wait to be written: some seconds of a worker that logs at `debug`. Later lines are dropped and counted.
const WAITING_BYTES_MAX: usize = 8 << 20;

/// The least that a line counts, for its place in the queue. Most lines are shorter.
const LINE_BYTES_LEAST: usize = 512;

/// The places in the queue: one for each line, and one for the end of the log.
const PLACES: usize = WAITING_BYTES_MAX / LINE_BYTES_LEAST + 1;

/// How long the last lines may take at the end: as long as the library waits for its thread.
const LAST_LINES_MAX: Duration = Duration::from_millis(1100);

/// The log of this process. As a process has one standard error and one subscriber of events, it has one of these.
static LOG: Mutex<Option<OpenLog>> = Mutex::new(None);

thread_local! {
    /// Where lines of this thread go that it writes itself. Only the log's thread has such lines: queued, its last one would never be
    /// written.
    static OWN_LINES: RefCell<Option<Vec<u8>>> = const { RefCell::new(None) };
}

#[derive(Debug)]
struct OpenLog {
    queued: Arc<QueuedLines>,
    /// Waits for the thread's last lines when it is dropped.
    thread: Option<WorkerGuard>,
}

/// What is logged. It may change while the program runs.
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

/// Starts logging to standard error, panics included. `gpu` is the ordinal of this process's GPU if several processes log to the same
/// place: each line then names it.
///
/// The program calls [`close_log`] before it ends, or its last lines may be missing.
///
/// # Errors
/// The filter cannot be read.
pub fn start_log(directives: &str, format: LogFormat, gpu: Option<usize>) -> Result<Logs, ParseError> {
    let (filter, handle) = reload::Layer::new(filter(directives)?);
    let queued = Arc::new(QueuedLines::default());
    let thread = NonBlockingBuilder::default().lossy(true).buffered_lines_limit(PLACES).thread_name("log");
    let output = Output { to: io::stderr(), queued: Arc::clone(&queued), dropped_reported: 0 };
    let (queue, thread) = thread.finish(output);
    *log() = Some(OpenLog { queued: Arc::clone(&queued), thread: Some(thread) });
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(Lines { queue, queued, gpu, format })
        .with_target(false)
        .with_ansi(has_colours());
    let lines = match format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let lines = lines.with_filter(filter_fn(|metadata| !tells_passwords(metadata)));
    tracing_subscriber::registry().with(filter).with(lines).init();
    log_panics();
    Ok(Logs(handle))
}

/// Writes the lines that wait, then why the program failed, if it did, and ends the log. If nobody reads standard error, it gives up after a
/// second.
pub fn close_log(failure: Option<String>) {
    let thread = log().as_mut().and_then(|log| log.thread.take());
    if thread.is_none() && failure.is_none() {
        return;
    }
    let (closed, is_closed) = mpsc::channel();
    // In a thread, because who prints to standard error waits for the thread of the log, which may write for ever.
    let closing = thread::Builder::new().name("log-end".to_owned()).spawn(move || {
        drop(thread);
        if let Some(failure) = failure {
            // An `Err`: nobody reads it any more.
            let _ = writeln!(io::stderr(), "{failure}");
        }
        let _ = closed.send(());
    });
    if closing.is_ok() {
        let _ = is_closed.recv_timeout(LAST_LINES_MAX);
    }
}

/// How many lines of the log were dropped since the start, because standard error was not read fast enough.
pub fn dropped_log_lines() -> u64 {
    log().as_ref().map_or(0, |log| log.queued.dropped.load(Ordering::Relaxed))
}

fn log() -> MutexGuard<'static, Option<OpenLog>> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The lines that wait to be written. Counted here and not by the queue, whose bound is in lines: one line may have any length.
#[derive(Debug, Default)]
struct QueuedLines {
    bytes: AtomicUsize,
    /// Lines that found no room.
    dropped: AtomicU64,
}

impl QueuedLines {
    /// Whether there is room for a line. Counts it as waiting, or as dropped.
    fn takes(&self, line: &[u8]) -> bool {
        let bytes = line.len().max(LINE_BYTES_LEAST);
        let is_taken = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes <= WAITING_BYTES_MAX;
        if !is_taken {
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        is_taken
    }

    /// A line that was taken waits no more.
    fn written(&self, line: &[u8]) {
        self.bytes.fetch_sub(line.len().max(LINE_BYTES_LEAST), Ordering::Relaxed);
    }
}

/// Passes events to the thread. If several processes log, one for each GPU, every line starts with the GPU.
#[derive(Clone, Debug)]
struct Lines {
    queue: NonBlocking,
    queued: Arc<QueuedLines>,
    gpu: Option<usize>,
    format: LogFormat,
}

impl Write for Lines {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let line = written(event, self.gpu, self.format);
        if !is_own(&line) && self.queued.takes(&line) {
            self.queue.write_all(&line)?;
        }
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Where the thread writes.
#[derive(Debug)]
struct Output<W> {
    to: W,
    queued: Arc<QueuedLines>,
    /// How many dropped lines the log has reported.
    dropped_reported: u64,
}

impl<W: Write> Write for Output<W> {
    /// Writes an event in a single call, because other processes write to the same place.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let written = self.to.write_all(event);
        self.queued.written(event);
        written.map(|()| event.len())
    }

    /// The thread flushes when no line waits any more, and when the log ends. Then it writes how many lines were dropped before.
    fn flush(&mut self) -> io::Result<()> {
        let dropped = self.queued.dropped.load(Ordering::Relaxed);
        if dropped > self.dropped_reported {
            let lines = dropped - self.dropped_reported;
            let report = own_lines(|| {
                tracing::warn!(
                    lines,
                    "lines of the log were dropped: standard error was not read fast enough"
                );
            });
            self.dropped_reported = dropped;
            // An `Err`: nobody reads it any more. Returned, it would keep the thread from ending.
            let _ = self.to.write_all(&report);
        }
        self.to.flush()
    }
}

/// The lines that `log` logs in this thread, in the log's format; they are not queued.
fn own_lines(log: impl FnOnce()) -> Vec<u8> {
    OWN_LINES.set(Some(Vec::new()));
    log();
    OWN_LINES.take().unwrap_or_default()
}

/// Whether a line is one of those that [`own_lines`] returns. Takes it if so.
fn is_own(line: &[u8]) -> bool {
    // An `Err`: the thread is ending.
    let is_own = OWN_LINES.try_with(|own| match &mut *own.borrow_mut() {
        Some(lines) => {
            lines.extend_from_slice(line);
            true
        }
        None => false,
    });
    is_own.unwrap_or(false)
}

/// An event as it is written.
fn written(event: &[u8], gpu: Option<usize>, format: LogFormat) -> Cow<'_, [u8]> {
    let event = indented(event);
    let Some(gpu) = gpu else { return event };
    Cow::Owned(match (format, &*event) {
        (LogFormat::Json, [b'{', rest @ ..]) => {
            [format!("{{\"gpu\":\"cuda:{gpu}\",").as_bytes(), rest].concat()
        }
        (_, event) => [format!("cuda:{gpu} ").as_bytes(), event].concat(),
    })
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
            String::from_utf8(written(event.as_bytes(), gpu, format).into_owned()).unwrap()
        };
        let forged = "T  WARN pass failed error=no\nT ERROR drive A: is full\n";
        let indented = "T  WARN pass failed error=no\n    T ERROR drive A: is full\n";
        assert_eq!(written(None, LogFormat::Text, forged), indented);
        assert_eq!(written(Some(1), LogFormat::Text, forged), format!("cuda:1 {indented}"));
        assert_eq!(written(None, LogFormat::Text, "T  INFO session open\n"), "T  INFO session open\n");
        assert_eq!(written(Some(1), LogFormat::Json, "{\"a\":1}\n"), "{\"gpu\":\"cuda:1\",\"a\":1}\n");
    }

    #[test]
    fn lines_that_wait_are_bounded_in_bytes_and_in_number() {
        for (line, most) in [(&[b'x'; 60 << 10][..], 136), (&b"short"[..], PLACES - 1)] {
            let queued = QueuedLines::default();
            for _ in 0..most {
                assert!(queued.takes(line));
            }
            assert!(!queued.takes(line) && !queued.takes(line));
            assert_eq!(queued.dropped.load(Ordering::Relaxed), 2);
            queued.written(line);
            assert!(queued.takes(line));
        }
    }

    #[test]
    fn the_last_line_says_how_many_were_dropped() {
        let queued = Arc::new(QueuedLines::default());
        queued.dropped.store(7, Ordering::Relaxed);
        // The log's thread has ended: a line that is queued now is never written.
        let (queue, thread) = NonBlocking::new(io::sink());
        drop(thread);
        let format = LogFormat::Json;
        let lines = Lines { queue, queued: Arc::clone(&queued), gpu: Some(1), format };
        let log = tracing_subscriber::fmt().json().flatten_event(true).with_writer(lines).finish();
        let mut output = Output { to: Vec::<u8>::new(), queued, dropped_reported: 2 };
        tracing::subscriber::with_default(log, || output.flush().unwrap());
        let written = String::from_utf8(output.to.clone()).unwrap();
        assert!(written.starts_with("{\"gpu\":\"cuda:1\",") && written.contains("\"lines\":5"), "{written}");
        assert!(written.ends_with("}\n") && written.lines().count() == 1, "{written}");
        // Each is reported once.
        output.flush().unwrap();
        assert_eq!(output.to, written.into_bytes());
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
