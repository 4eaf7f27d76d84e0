//! `vramq submit`: publishes jobs with texts or JSON values, and writes their results.

mod args;
mod chunks;
mod input;
mod interrupt;
mod job;
mod npy;
mod output;
mod totals;

use std::cell::Cell;
use std::io;
use std::path::PathBuf;

use futures_util::{StreamExt as _, stream};
use tokio::sync::Notify;
use vramq_producer::{Client, ConnectError, Options};

use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::safe;
use crate::signals::{Signals, end_if_stuck};
pub(crate) use args::Args;
use chunks::{Chunk, Chunks};
use input::{Kind, Source};
use interrupt::Interrupt;
use job::{Failure, JobTemplate};
use output::Results;
use totals::{Totals, end_early, written_off};

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
    let options = args.client_options();
    let mut signals = match Signals::new().and_then(|signals| end_if_stuck().map(|()| signals)) {
        Ok(signals) => signals,
        Err(error) => return usage(&format!("listen for signals: {error}")),
    };
    let client = match connect(options, &mut signals).await {
        Ok(client) => client,
        Err(code) => return code,
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

/// # Errors
/// The exit code: there is no connection, or a signal came first.
async fn connect(options: Options, signals: &mut Signals) -> Result<Client, u8> {
    let connected = tokio::select! {
        connected = Client::connect(options) => connected,
        (code, _) = signals.next() => return Err(code),
    };
    connected.map_err(|error| {
        eprintln!("error: {}", safe(&error.to_string()));
        match error {
            ConnectError::Url(_) | ConnectError::Credentials(_) => exit::USAGE,
            ConnectError::Refused { .. } => exit::REFUSED,
            ConnectError::Unreachable { .. } | ConnectError::Timeout { .. } => exit::UNREACHABLE,
        }
    })
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

fn usage(problem: &str) -> u8 {
    eprintln!("error: {problem}");
    exit::USAGE
}
