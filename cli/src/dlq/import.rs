//! `vramq dlq import` and `restore`: letters from a file back to their queues, those that are not there.

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::json;
use vramq_amqp::Verdict;
use vramq_schemas::topology::dead_queue;

use super::Common;
use super::archive::{Line, Lines};
use super::dead_letter::{DeadLetter, Fingerprint};
use super::error::Error;
use super::outbox::Outbox;
use super::queue_lock::QueueLock;
use super::reader::Reader;
use super::republish;
use crate::exit;
use crate::output::progress::Progress;
use crate::output::text::{counted, safe};
use crate::signals::Signals;

/// Put letters of a file back into the dead queues that they name.
///
/// Letters that are in their queue already are left out, so it may be repeated, also after it was killed. --model limits it
/// to some models.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  vramq dlq restore vramq-dropped-20261121T181500Z.jsonl
  vramq dlq import --model minilm letters.jsonl
  zcat letters.jsonl.gz | vramq dlq import -")]
pub(super) struct Args {
    /// Files that `drop` or `export` wrote; `-` is standard input.
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Letters that are there already, too: each line becomes a letter.
    #[arg(long)]
    duplicates: bool,
}

/// What an import came to.
#[derive(Default)]
struct Counts {
    published: u64,
    there: u64,
    other_models: u64,
    torn: u64,
    cannot_publish: u64,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Error> {
    let mut audit_log = common.changing("import")?;
    let mut signals =
        Signals::new().map_err(|error| Error::Failed(format!("listen for signals: {error}")))?;
    let files: Vec<_> = args.files.iter().map(|file| file.to_string_lossy()).collect();
    audit_log
        .log_note("begin", json!({"files": files, "models": common.models, "duplicates": args.duplicates}))?;
    let progress = Progress::new("letters", None, common.quiet);
    let mut counts = Counts::default();
    let mut import = Import { common, progress: &progress, counts: &mut counts, targets: HashMap::new() };
    let ended = tokio::select! {
        ended = import.files(args) => ended,
        (code, name) = signals.next() => Err(Error::Stopped(code, name.to_owned())),
    };
    for (_, target) in import.targets {
        target.queue_lock.close().await;
    }
    let Counts { published, there, other_models, torn, cannot_publish } = counts;
    audit_log.log_note(
        "end",
        json!({
            "published": published, "there_already": there, "other_models": other_models, "torn": torn, "unfit": cannot_publish,
            "error": ended.as_ref().err().map(ToString::to_string),
        }),
    )?;
    progress.finish("restored");
    for (count, what) in [
        (there, "in the queue already, left out"),
        (other_models, "of other models, left out"),
        (torn, "cut off at the end of a file; it was not removed from its queue"),
    ] {
        if count > 0 {
            eprintln!("{} {what}", counted(count, "letter"));
        }
    }
    ended?;
    Ok(if cannot_publish == 0 { exit::DONE } else { exit::FAILED })
}

struct Import<'a> {
    common: &'a Common,
    progress: &'a Progress,
    counts: &'a mut Counts,
    targets: HashMap<String, Target>,
}

/// A dead queue, and what it has.
struct Target {
    queue_lock: QueueLock,
    /// Those that were published from here included.
    there: HashMap<Fingerprint, u32>,
    /// Of the file that is being read. A letter may be in several, when a `drop` was killed; one that is twice in a file is
    /// two letters.
    in_file: HashMap<Fingerprint, u32>,
    outbox: Outbox<()>,
}

impl Import<'_> {
    async fn files(&mut self, args: &Args) -> Result<(), Error> {
        for file in &args.files {
            let mut lines = Lines::open(file)?;
            self.targets.values_mut().for_each(|target| target.in_file.clear());
            loop {
                match lines.next()? {
                    Line::DeadLetter(letter) => self.letter(*letter, args.duplicates).await?,
                    Line::Torn => self.counts.torn += 1,
                    Line::End => break,
                }
            }
        }
        for target in self.targets.values_mut() {
            while !target.outbox.is_empty() {
                judge(target, self.counts, self.progress).await?;
            }
        }
        Ok(())
    }

    async fn letter(&mut self, letter: DeadLetter, duplicates: bool) -> Result<(), Error> {
        let Some(model) = letter.queue.strip_prefix(&dead_queue("")).map(str::to_owned) else {
            return Err(Error::Usage(format!("{} is no queue of dead letters", safe(&letter.queue))));
        };
        if !self.common.models.is_empty() && !self.common.models.contains(&model) {
            self.counts.other_models += 1;
            return Ok(());
        }
        if !self.targets.contains_key(&letter.queue) {
            let target = Target::open(self.common, &model, duplicates).await?;
            self.targets.insert(letter.queue.clone(), target);
        }
        let Some(target) = self.targets.get_mut(&letter.queue) else { return Ok(()) };
        let fingerprint = letter.fingerprint();
        let in_file = target.in_file.entry(fingerprint).or_default();
        *in_file += 1;
        let there = target.there.entry(fingerprint).or_default();
        if !duplicates && *there >= *in_file {
            self.counts.there += 1;
            return Ok(());
        }
        *there += 1;
        match republish::letter(letter) {
            Ok(message) => {
                while !target.outbox.has_room() {
                    judge(target, self.counts, self.progress).await?;
                }
                target.outbox.send((), message);
            }
            Err(cannot_publish) => {
                self.counts.cannot_publish += 1;
                self.progress.say(&format!("letter {fingerprint}: {cannot_publish}"));
            }
        }
        Ok(())
    }
}

impl Target {
    /// At the queue_lock until the end, so that nobody restores the same at the same time.
    async fn open(common: &Common, model: &str, duplicates: bool) -> Result<Self, Error> {
        let queue_lock = QueueLock::open(&common.broker, model).await?;
        let mut there: HashMap<_, u32> = HashMap::new();
        if !duplicates {
            let mut reader = Reader::open(&queue_lock).await?;
            while let Some(taken) = reader.next().await? {
                *there.entry(taken.letter.fingerprint()).or_default() += 1;
            }
            reader.give_back().await?;
        }
        let outbox = Outbox::open(&queue_lock.connection).await?;
        Ok(Self { queue_lock, there, in_file: HashMap::new(), outbox })
    }
}

async fn judge(target: &mut Target, counts: &mut Counts, progress: &Progress) -> Result<(), Error> {
    let queue = || safe(&target.queue_lock.queue);
    for ((), verdict) in target.outbox.judged().await? {
        match verdict {
            Verdict::Accepted => {
                counts.published += 1;
                progress.add(1);
            }
            Verdict::Returned => return Err(Error::Refused(format!("{} was deleted", queue()))),
            Verdict::Rejected => return Err(Error::Refused(format!("{} is full", queue()))),
        }
    }
    Ok(())
}
