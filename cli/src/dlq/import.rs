//! `vramq dlq import` and `restore`: publishes dead letters from files to their queues, except those that are there already.

use std::collections::HashMap;
use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::future::{join_all, select_all};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vramq_amqp::{Outcomes, PublishOutcome, PublishPipeline};
use vramq_dlq::Stops;
use vramq_dlq::archive::{Line, Lines};
use vramq_dlq::dead_letter::{DeadLetter, Fingerprint};
use vramq_dlq::destination::{TOO_LARGE, publisher};
use vramq_dlq::queue_lock::QueueLock;
use vramq_dlq::reader::Reader;
use vramq_dlq::republish;

use super::error::Error;
use super::{Common, key_of};
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::{counted, safe};
use crate::signals;

/// The longest wait for the confirms that are outstanding when the import ends early.
const CONFIRMS_MAX: Duration = Duration::from_secs(60);

/// Publish the dead letters of files to their queues again.
///
/// Dead letters that are in their queue already are left out, so an import can be repeated, also after it was killed. --model
/// limits it to some models.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq restore vramq-dropped-20261121T181500Z.jsonl
  vramq dlq import --model minilm letters.jsonl
  zcat letters.jsonl.gz | vramq dlq import -")]
pub(super) struct Args {
    /// Files written by `drop` or `export`; `-` is standard input.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Also import dead letters that are in their queue already: each line becomes a dead letter.
    #[arg(long)]
    duplicates: bool,
}

#[derive(Default)]
struct Counts {
    published: u64,
    there: u64,
    other_models: u64,
    /// Files whose end is missing.
    torn: u64,
    cannot_publish: u64,
    /// Published, but the broker did not answer.
    unknown: u64,
}

impl Counts {
    /// Counts a letter that cannot be published, and prints which one and why.
    fn cannot_publish(&mut self, progress: &Progress, letter: Fingerprint, why: &str) {
        self.cannot_publish += 1;
        progress.say(&format!("dead letter {letter}: {why}"));
    }
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let mut audit_log = common.changing("import")?;
    let mut stops =
        signals::stops().map_err(|error| Error::Failed(format!("listen for signals: {error}")))?;
    let files: Vec<_> = args.files.iter().map(|file| file.to_string_lossy()).collect();
    let detail = json!({"files": files, "models": common.models, "duplicates": args.duplicates});
    audit_log.log_note("begin", detail)?;
    let progress = Progress::new("dead letters", None, common.quiet);
    let mut counts = Counts::default();
    let mut import = Import { common, progress: &progress, counts: &mut counts, queues: HashMap::new() };
    let lines = read(args.files.clone());
    let mut ended = tokio::select! {
        ended = import.all(lines, args) => ended,
        stop = stops.next() => Err(Error::Stopped(stop)),
    };
    if let Err(first) = ended {
        ended = Err(import.settle_after(first, &mut stops).await);
    }
    import.close().await;
    let Counts { published, there, other_models, torn, cannot_publish, unknown } = counts;
    let logged = audit_log.log_note(
        "end",
        json!({
            "published": published, "there_already": there, "other_models": other_models, "torn": torn,
            "unfit": cannot_publish, "unknown": unknown, "error": ended.as_ref().err().map(ToString::to_string),
        }),
    );
    if ended.is_err() && published == 0 {
        progress.clear();
    } else {
        progress.finish("restored");
    }
    for (count, unit, what) in [
        (there, "dead letter", "in the queue already, left out"),
        (other_models, "dead letter", "of other models, left out"),
        (torn, "file", "cut off at the end; what is missing there was not removed from its queue"),
        (unknown, "dead letter", unknown_text(args.duplicates)),
    ] {
        if count > 0 {
            eprintln!("{} {what}", counted(count, unit));
        }
    }
    if let (Err(_), Err(unlogged)) = (&ended, &logged) {
        eprintln!("the action log does not say so: {unlogged}");
    }
    // After the counts: also where the disk is full, the user learns what was done.
    ended.and(logged)?;
    Ok(if cannot_publish == 0 { exit::DONE } else { exit::FAILED })
}

/// The words for dead letters that were published, and that the broker neither confirmed nor refused.
fn unknown_text(duplicates: bool) -> &'static str {
    if duplicates {
        "published without an answer of the broker: look with `vramq dlq list` before you import again, which with --duplicates publishes every line again"
    } else {
        "published without an answer of the broker: import again, and what is there is left out"
    }
}

/// Reads on a thread of its own, because a read from a pipe or a terminal may never return, and a signal must end the command all the
/// same. Reads two lines ahead at most, one of them in the channel: a line may be large.
fn read(files: Vec<PathBuf>) -> mpsc::Receiver<Result<Line, Error>> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for file in files {
            // Here, because opening a named pipe waits for its writer.
            let mut of_file = match Lines::open(&file) {
                Ok(lines) => lines,
                Err(error) => {
                    let _ = sender.blocking_send(Err(error));
                    return;
                }
            };
            loop {
                let line = of_file.next_line();
                let (is_end, is_error) = (matches!(line, Ok(Line::End)), line.is_err());
                // An `Err`: the command is ending.
                if sender.blocking_send(line).is_err() || is_error {
                    return;
                }
                if is_end {
                    break;
                }
            }
        }
    });
    lines
}

/// The thread that reads has ended before the files have, which only a fault of this program does.
fn reading_ended(read: usize, files: usize) -> Error {
    Error::Failed(format!(
        "reading ended after {read} of {}, by a fault of this program: please report it",
        counted(files as u64, "file")
    ))
}

struct Import<'a> {
    common: &'a Common,
    progress: &'a Progress,
    counts: &'a mut Counts,
    queues: HashMap<String, DeadQueue>,
}

/// A dead queue and its content. Locked until the end, so that no other import restores the same at the same time.
struct DeadQueue {
    lock: QueueLock,
    /// How often each dead letter is there, including those that this import published.
    there: HashMap<Fingerprint, u32>,
    /// How often each dead letter was read from the current file. Several files may contain the same letter, because a `drop` was killed
    /// and repeated. Within one file, two equal lines are two letters.
    in_file: HashMap<Fingerprint, u32>,
    publisher: PublishPipeline<Fingerprint>,
}

impl Import<'_> {
    /// Publishes the dead letters of all files, and waits until the broker has them.
    async fn all(&mut self, lines: mpsc::Receiver<Result<Line, Error>>, args: &Args) -> Result<(), Error> {
        self.publish(lines, args.files.len(), args.duplicates).await?;
        self.settle_all().await
    }

    /// Waits for the confirms of what was sent before the import ended with the error `first`. Returns the error that decides the exit code.
    async fn settle_after(&mut self, first: Error, stops: &mut Stops) -> Error {
        if !self.is_waiting() {
            return first;
        }
        self.progress.say(&format!(
            "waiting up to {} s for the broker to confirm what was sent; another signal ends this",
            CONFIRMS_MAX.as_secs()
        ));
        let settled = tokio::select! {
            settled = timeout(CONFIRMS_MAX, self.settle_all()) => settled.unwrap_or_else(|_| {
                Err(Error::Unreachable("the broker did not confirm all that was published".to_owned()))
            }),
            stop = stops.next() => Err(Error::Stopped(stop)),
        };
        let (decisive, other) = match settled {
            Ok(()) => return first,
            // A person ended the wait.
            Err(later @ Error::Stopped(_)) => (later, first),
            Err(later) => (first, later),
        };
        self.progress.say(&format!("error: {other}"));
        decisive
    }

    /// Counts what the broker has not answered, and releases the queues, all at a time: a broker that is silent delays each.
    async fn close(self) {
        let queues = self.queues.into_values();
        let closing = queues.map(|mut queue| {
            self.counts.unknown += queue.publisher.forget().len() as u64;
            async move { queue.lock.close().await }
        });
        join_all(closing).await;
    }

    /// Publishes the dead letters of so many files.
    async fn publish(
        &mut self,
        mut lines: mpsc::Receiver<Result<Line, Error>>,
        files: usize,
        duplicates: bool,
    ) -> Result<(), Error> {
        let mut files_read = 0;
        while files_read < files {
            // A publisher sends only while its outcomes are awaited, and the next line of a pipe may come late.
            let line = tokio::select! {
                line = lines.recv() => line,
                settled = self.settle_some() => {
                    settled?;
                    continue;
                }
            };
            match line {
                Some(line) => match line? {
                    Line::DeadLetter(letter) => self.letter(*letter, duplicates).await?,
                    Line::Torn => self.counts.torn += 1,
                    Line::End => {
                        files_read += 1;
                        self.queues.values_mut().for_each(|queue| queue.in_file.clear());
                    }
                },
                None => return Err(reading_ended(files_read, files)),
            }
        }
        Ok(())
    }

    /// Whether confirms are outstanding.
    fn is_waiting(&self) -> bool {
        self.queues.values().any(|queue| !queue.publisher.is_empty())
    }

    /// Waits for the confirms of some of what was published; without end if nothing is in flight.
    ///
    /// Cancel safety: no confirm is lost.
    async fn settle_some(&mut self) -> Result<(), Error> {
        let in_flight = self.queues.values_mut().filter(|queue| !queue.publisher.is_empty());
        let next = in_flight.map(|queue| {
            Box::pin(async {
                let settled = queue.publisher.next().await;
                (queue, settled)
            })
        });
        let next = next.collect::<Vec<_>>();
        if next.is_empty() {
            return pending().await;
        }
        let ((queue, settled), _, _) = select_all(next).await;
        queue.count(settled, self.counts, self.progress)
    }

    /// Waits for the confirms of what was published, of all queues at a time: a queue that confirms nothing holds up no other.
    async fn settle_all(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while self.is_waiting() {
            result = result.and(self.settle_some().await);
        }
        result
    }

    async fn letter(&mut self, letter: DeadLetter, duplicates: bool) -> Result<(), Error> {
        let Some(model) = key_of(&letter.queue) else {
            return Err(Error::Usage(format!("{} is not a queue of dead letters", safe(&letter.queue))));
        };
        if !self.common.models.is_empty() && !self.common.models.contains(&model) {
            self.counts.other_models += 1;
            return Ok(());
        }
        if !self.queues.contains_key(&letter.queue) {
            let queue = DeadQueue::open(self.common, &model, duplicates).await?;
            self.queues.insert(letter.queue.clone(), queue);
        }
        let Some(queue) = self.queues.get_mut(&letter.queue) else { return Ok(()) };
        let (name, fingerprint) = (letter.queue.clone(), letter.fingerprint());
        let in_file = queue.in_file.entry(fingerprint).or_default();
        *in_file += 1;
        let there = queue.there.entry(fingerprint).or_default();
        if !duplicates && *there >= *in_file {
            self.counts.there += 1;
            return Ok(());
        }
        *there += 1;
        match republish::unchanged(letter) {
            Ok(message) => {
                // The other queues are served meanwhile.
                while self.queues.get(&name).is_some_and(|queue| !queue.publisher.has_room()) {
                    self.settle_some().await?;
                }
                if let Some(queue) = self.queues.get_mut(&name) {
                    queue.publisher.publish(fingerprint, message);
                }
            }
            Err(why) => self.counts.cannot_publish(self.progress, fingerprint, &why.to_string()),
        }
        Ok(())
    }
}

impl DeadQueue {
    async fn open(common: &Common, model: &str, duplicates: bool) -> Result<Self, Error> {
        let lock = QueueLock::open(&common.access()?, model).await?;
        let mut there: HashMap<_, u32> = HashMap::new();
        if !duplicates {
            let mut reader = Reader::open(&lock).await?;
            while let Some(unacked) = reader.next().await? {
                *there.entry(unacked.letter.fingerprint()).or_default() += 1;
            }
            reader.give_back().await?;
        }
        let publisher = publisher(&lock.connection).await?;
        Ok(Self { lock, there, in_file: HashMap::new(), publisher })
    }

    fn count(
        &mut self,
        settled: lapin::Result<Outcomes<Fingerprint>>,
        counts: &mut Counts,
        progress: &Progress,
    ) -> Result<(), Error> {
        let queue = || safe(&self.lock.queue);
        let mut result = Ok(());
        let outcomes = settled.inspect_err(|_| counts.unknown += self.publisher.forget().len() as u64)?;
        for (fingerprint, outcome) in outcomes {
            match outcome {
                PublishOutcome::Confirmed => {
                    counts.published += 1;
                    progress.add(1);
                }
                PublishOutcome::Returned => result = Err(Error::Refused(format!("{} was deleted", queue()))),
                PublishOutcome::Refused => result = Err(Error::Refused(format!("{} is full", queue()))),
                PublishOutcome::TooLarge => {
                    counts.cannot_publish(progress, fingerprint, TOO_LARGE);
                }
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        common: Common,
    }

    /// As when it panics.
    #[tokio::test]
    async fn a_reader_that_ends_too_early_is_no_end_of_the_files() {
        let (sender, lines) = mpsc::channel(1);
        sender.send(Ok(Line::End)).await.unwrap();
        drop(sender);
        let common = Command::parse_from(["import"]).common;
        let (progress, mut counts) = (Progress::new("dead letters", None, true), Counts::default());
        let mut import =
            Import { common: &common, progress: &progress, counts: &mut counts, queues: HashMap::new() };
        let error = import.publish(lines, 2, false).await.unwrap_err();
        assert!(matches!(error, Error::Failed(_)), "{error:?}");
        assert!(error.to_string().contains("reading ended after 1 of 2 files"), "{error}");
    }
}
