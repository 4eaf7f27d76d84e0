//! `vramq submit`: publishes jobs with texts or JSON values, and writes their results.

mod chunks;
mod input;
mod interrupt;
mod job;
mod npy;
mod output;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use futures_util::{StreamExt as _, stream};
use tokio::sync::Notify;
use vramq_producer::{Client, ConnectError, Encoding};
use vramq_schemas::ITEMS_MAX;

use crate::broker::Broker;
use crate::output::progress::Progress;
use crate::output::text::{counted, safe, safe_lines};
use crate::output::write_line;
use crate::signals::{Signals, end_if_stuck};
use crate::{duration, exit};
use chunks::{Chunk, Chunks};
use input::{InputError, Kind, Source};
use interrupt::Interrupt;
use job::{Failure, JobResult, JobTemplate};
use output::Results;

/// Submit texts to a model, and write its outputs in the order of the input.
///
/// Inputs are texts, or JSON values with --json-inputs, and are grouped into jobs. Outputs are written as JSON lines `{"index": 0,
/// "embedding": […]}` or, for an output ending in .npy, as a NumPy array of f32 with one row per text.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq submit --model minilm 'a text' 'another'
  vramq submit --model minilm --file passages.txt -o vectors.npy
  head -n 100 passages.txt | vramq submit --model minilm --with-text - > vectors.jsonl
  vramq submit --model echo --json-inputs '[1, 2]' null

Interrupted, it withdraws the jobs that have no answer: they start no further pass. A second interrupt ends it at once.

Exit codes:
  0 all answered · 1 some jobs failed, the others are written · 2 usage or input · 3 broker unreachable
  4 refused by the broker (no queue for the model, queue full, no permission, also when it reconnects) · 130 interrupted
  141 the reader of the output has gone")]
pub(crate) struct Args {
    /// The model's name.
    #[arg(long, short)]
    model: String,
    /// The routing key of the jobs, where the model's workers set a `key`; by default the model's name.
    #[arg(long = "key", value_name = "KEY")]
    routing_key: Option<String>,
    /// The texts; with `-` or none, one per line of standard input.
    #[arg(value_name = "TEXT")]
    texts: Vec<String>,
    /// A file of texts: .jsonl (each line a string, or an object), anything else one per line. A line has at most 1 MiB; client libraries
    /// take jobs of 16 MiB.
    #[arg(long, short, value_name = "FILE", conflicts_with = "texts")]
    file: Option<PathBuf>,
    /// The field of .jsonl objects that holds the text. A field `id` is copied to the output.
    #[arg(long, default_value = "text", value_name = "NAME")]
    field: String,
    /// The inputs are JSON values, one per argument or line, for models that take JSON.
    #[arg(long, conflicts_with = "field")]
    json_inputs: bool,
    /// Where outputs are written; `-` is standard output. A file gets its name when it is complete.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write each text with its output (JSON lines only).
    #[arg(long)]
    with_text: bool,
    /// Publish without waiting: print the job ids; replies go to the model's default reply queue.
    #[arg(long, conflicts_with_all = ["output", "with_text"])]
    no_wait: bool,
    /// Texts per job.
    #[arg(long, default_value_t = 32, value_name = "N", value_parser = items_parser())]
    job_items: u32,
    /// The most jobs in flight; also the most outputs that wait for a slow job that comes before them.
    #[arg(long, default_value_t = 256, value_name = "N", value_parser = items_parser())]
    jobs: u32,
    /// The time limit of a job, from publishing to its last reply (30s, 5m; by default none).
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    timeout: Option<Duration>,
    /// How long a job may wait in its queue before it expires.
    #[arg(long, value_parser = duration::parse, value_name = "TIME")]
    expiration: Option<Duration>,
    /// The priority, on queues with priorities; higher goes first.
    #[arg(long, value_name = "0-255")]
    priority: Option<u8>,
    /// The most texts that may share a pass with this job (batch hint).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    batch_hint: Option<u32>,
    /// The type of the vectors' elements on the wire.
    #[arg(long, value_enum, default_value_t)]
    dtype: Dtype,
    /// Engine settings, as a JSON object.
    #[arg(long, value_name = "JSON", value_parser = job::parse_params)]
    params: Option<vramq_schemas::Params>,
    /// The revision of the model that must run the jobs, as `vramq status --json` shows it; workers with another one requeue
    /// them.
    #[arg(long, value_name = "REVISION")]
    model_revision: Option<String>,
    /// The application that publishes the jobs, as replies and dead letters repeat it.
    #[arg(long, value_name = "NAME")]
    app_id: Option<String>,
    /// Ask the model to report progress of its items, and show it; for models that take long.
    #[arg(long, conflicts_with = "no_wait")]
    progress: bool,
    /// The encoding of messages.
    #[arg(long, value_enum, default_value_t)]
    encoding: Wire,
    /// Leave the URL's user out of the jobs, by which workers share passes. Needed where the broker knows the connection by another
    /// name, as with OAuth 2.
    #[arg(long)]
    anonymous: bool,
    /// No progress on standard error.
    #[arg(long, short)]
    quiet: bool,
    #[command(flatten)]
    broker: Broker,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Dtype {
    #[default]
    F32,
    F16,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Wire {
    #[default]
    Bincode,
    Json,
    Msgpack,
}

fn items_parser() -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..=ITEMS_MAX as i64)
}

/// Counts of a run.
#[derive(Default)]
struct Totals {
    jobs_failed: u64,
    items_missing: u64,
    /// The first failure that every other job would have, too.
    fatal: Option<(u8, String)>,
}

/// Runs the command; its exit code.
pub(crate) async fn run(mut args: Args) -> u8 {
    let template = match JobTemplate::new(&args) {
        Ok(template) => template,
        Err(problem) => return usage(&problem),
    };
    let is_npy = args.output.as_deref().is_some_and(output::is_npy);
    if args.with_text && is_npy {
        return usage("--with-text needs JSON lines: a .npy file has room for the vectors only");
    }
    let texts = std::mem::take(&mut args.texts);
    let kind = match args.json_inputs {
        true => Kind::Json,
        false => Kind::Texts { field: std::mem::take(&mut args.field) },
    };
    let source = match Source::open(texts, args.file.as_deref(), kind) {
        Ok(Some(source)) => source,
        Ok(None) => return usage("no texts: give some as arguments, with --file, or on standard input"),
        Err(error) => return usage(&error.to_string()),
    };
    let total = source.total(args.file.as_deref());
    let mut chunks = Chunks::of(source, args.job_items as usize);
    // Before connecting: an empty input needs no broker.
    let first = match chunks.next().await {
        Ok(Some(first)) => first,
        Ok(None) => return usage("the input is empty"),
        Err(fault) => {
            eprintln!("error: {fault}");
            return fault.code();
        }
    };
    let mut options = args.broker.options("submit");
    options.anonymous = args.anonymous;
    options.encoding = match args.encoding {
        Wire::Bincode => Encoding::Bincode,
        Wire::Json => Encoding::Json,
        Wire::Msgpack => Encoding::MessagePack,
    };
    options.replies = !args.no_wait;
    options.jobs_in_flight = args.jobs as usize;
    let mut signals = match Signals::new().and_then(|signals| end_if_stuck().map(|()| signals)) {
        Ok(signals) => signals,
        Err(error) => return usage(&format!("listen for signals: {error}")),
    };
    let connected = tokio::select! {
        connected = Client::connect(options) => connected,
        (code, _) = signals.next() => return code,
    };
    let client = match connected {
        Ok(client) => client,
        Err(error) => {
            eprintln!("error: {}", safe(&error.to_string()));
            return match error {
                ConnectError::Url(_) | ConnectError::Credentials(_) => exit::USAGE,
                ConnectError::Refused { .. } => exit::REFUSED,
                ConnectError::Unreachable { .. } | ConnectError::Timeout { .. } => exit::UNREACHABLE,
            };
        }
    };
    // After connecting: if the broker is away, the output of an earlier run stays.
    let results = match open_output(args.output, args.with_text, &mut signals).await {
        Ok(results) => results,
        Err(code) => {
            client.close().await;
            return code;
        }
    };
    let progress = Progress::new("items", total, args.quiet);
    match work(&client, &template, first, chunks, results, &progress, signals).await {
        Ok((code, mut signals)) => tokio::select! {
            () = client.close() => code,
            (code, _) = signals.next() => code,
        },
        Err(interrupt) => interrupt.withdraw(&client).await,
    }
}

/// Opens the output on a thread of its own: a named pipe opens only when somebody reads from it, and a signal must end that wait.
///
/// # Errors
/// The exit code: the output cannot be opened, or a signal came first.
async fn open_output(output: Option<PathBuf>, with_text: bool, signals: &mut Signals) -> Result<Results, u8> {
    let path = output.clone();
    let opening = tokio::task::spawn_blocking(move || Results::create(path.as_deref(), with_text));
    let opened = tokio::select! {
        opened = opening => opened.map_err(io::Error::from).flatten(),
        (code, _) = signals.next() => return Err(code),
    };
    opened.map_err(|error| usage(&format!("write {}: {error}", output.unwrap_or_default().display())))
}

/// Submits chunks and writes outputs until the input ends, or something ends it early. Returns the exit code and the signals.
///
/// # Errors
/// A signal came.
async fn work(
    client: &Client,
    template: &JobTemplate,
    first: Chunk,
    chunks: Chunks,
    mut results: Results,
    progress: &Progress,
    mut signals: Signals,
) -> Result<(u8, Signals), Interrupt> {
    let stop = Notify::new();
    let input_fault = Cell::new(None);
    let chunks = stream::unfold((Some(first), chunks), |(first, mut chunks)| async {
        let next = match first {
            Some(first) => Ok(Some(first)),
            // The next line of a pipe may come late, or never.
            None => tokio::select! {
                biased;
                () = stop.notified() => Ok(None),
                next = chunks.next() => next,
            },
        };
        match next {
            Ok(chunk) => Some((chunk?, (None, chunks))),
            Err(fault) => {
                input_fault.set(Some(fault));
                None
            }
        }
    });
    let run = async |chunk| {
        let answer = template.run(client, chunk, progress).await;
        if matches!(answer.failure, Some(Failure::Fatal(..))) {
            // At once, although the answers of jobs before it may take long.
            stop.notify_one();
        }
        answer
    };
    let mut answers = std::pin::pin!(chunks.map(run).buffered(template.jobs));
    let mut totals = Totals::default();
    let mut ticks = progress.ticks();
    loop {
        tokio::select! {
            signal = signals.next() => {
                progress.clear();
                let interrupt = Interrupt::new(signal, signals, client, template);
                end_early(results, signal.0);
                return Err(interrupt);
            }
            _ = ticks.tick() => progress.tick(),
            answer = answers.next() => match answer {
                None => break,
                Some(answer) => {
                    if let Err(error) = totals.take(&answer, &mut results, template, progress) {
                        return Ok((written_off(&error, results, progress), signals));
                    }
                }
            },
        }
    }
    Ok((totals.finish(results, input_fault.take(), template, progress), signals))
}

impl Totals {
    /// Writes a job's outputs, and counts what is missing.
    fn take(
        &mut self,
        answer: &JobResult,
        results: &mut Results,
        template: &JobTemplate,
        progress: &Progress,
    ) -> io::Result<()> {
        let JobResult { id, chunk, failure, outputs } = answer;
        if template.no_wait && failure.is_none() {
            write_line(id)?;
            return Ok(());
        }
        for (n, item) in chunk.items.iter().enumerate() {
            let output = outputs.get(n).and_then(Option::as_ref);
            self.items_missing += u64::from(output.is_none());
            results.write(chunk.first + n, item, output)?;
        }
        results.flush()?;
        let Some(failure) = failure else {
            return Ok(());
        };
        self.jobs_failed += 1;
        match failure {
            Failure::Job(problem) => {
                let last = chunk.first + chunk.items.len() - 1;
                // A program's traceback has several lines.
                let problem = safe_lines(problem, "    ");
                progress.say(&format!("job {id} (items {} to {last}): {problem}", chunk.first));
            }
            Failure::Fatal(code, problem) if self.fatal.is_none() => {
                self.fatal = Some((*code, problem.clone()));
            }
            Failure::Fatal(..) => {}
        }
        Ok(())
    }

    fn finish(
        self,
        mut results: Results,
        fault: Option<InputError>,
        template: &JobTemplate,
        progress: &Progress,
    ) -> u8 {
        let what = if template.no_wait { "published" } else { "answered" };
        if let Some((code, problem)) = self.fatal {
            progress.clear();
            eprintln!("error: {}", safe(&problem));
            eprintln!("stopped: {} items {what}, {} not", progress.done(), self.items_missing);
            return end_early(results, code);
        }
        if let Some(fault) = fault {
            progress.clear();
            eprintln!("error: {fault}");
            eprintln!("stopped: {} items before it are {what}", progress.done());
            return end_early(results, fault.code());
        }
        if let Err(error) = results.flush() {
            return written_off(&error, results, progress);
        }
        if let Err(error) = results.finish() {
            progress.clear();
            eprintln!("error: write the output: {error}");
            return exit::FAILED;
        }
        progress.finish(what);
        if self.jobs_failed > 0 {
            let (jobs, items) = (counted(self.jobs_failed, "job"), counted(self.items_missing, "item"));
            eprintln!("{jobs} failed, {items} without an answer");
            return exit::FAILED;
        }
        exit::DONE
    }
}

fn written_off(error: &io::Error, results: Results, progress: &Progress) -> u8 {
    progress.clear();
    if error.kind() == io::ErrorKind::BrokenPipe {
        return end_early(results, exit::BROKEN_PIPE);
    }
    eprintln!("error: write the output: {error}");
    end_early(results, exit::FAILED)
}

fn end_early(results: Results, code: u8) -> u8 {
    if let Some((partial, is_whole)) = results.abandon() {
        let what = if is_whole { "what" } else { "a part of what" };
        eprintln!("{what} was answered is in {}", partial.display());
    }
    code
}

fn usage(problem: &str) -> u8 {
    eprintln!("error: {problem}");
    exit::USAGE
}
