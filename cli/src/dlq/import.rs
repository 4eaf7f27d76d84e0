//! `vramq dlq import` and `restore`: letters from a file back to their queues, those that are not there.

use std::collections::HashMap;
use std::path::PathBuf;

use serde_json::json;
use vramq_amqp::Verdict;
use vramq_schemas::topology::dead_queue;

use super::Common;
use super::archive::{Line, Lines};
use super::dead_letter::{Fingerprint, Letter};
use super::error::Trouble;
use super::outbox::Outbox;
use super::queue_lock::Desk;
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
struct Tally {
    published: u64,
    there: u64,
    other_models: u64,
    torn: u64,
    unfit: u64,
}

pub(super) async fn run(args: &Args, common: &Common) -> Result<u8, Trouble> {
    let mut journal = common.changing("import")?;
    let mut signals =
        Signals::new().map_err(|error| Trouble::Failed(format!("listen for signals: {error}")))?;
    let files: Vec<_> = args.files.iter().map(|file| file.to_string_lossy()).collect();
    journal
        .notes("begin", json!({"files": files, "models": common.models, "duplicates": args.duplicates}))?;
    let progress = Progress::new("letters", None, common.quiet);
    let mut tally = Tally::default();
    let mut import = Import { common, progress: &progress, tally: &mut tally, desks: HashMap::new() };
    let ended = tokio::select! {
        ended = import.files(args) => ended,
        (code, name) = signals.next() => Err(Trouble::Stopped(code, name.to_owned())),
    };
    for (_, target) in import.desks {
        target.desk.close().await;
    }
    let Tally { published, there, other_models, torn, unfit } = tally;
    journal.notes(
        "end",
        json!({
            "published": published, "there_already": there, "other_models": other_models, "torn": torn, "unfit": unfit,
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
    Ok(if unfit == 0 { exit::DONE } else { exit::FAILED })
}

struct Import<'a> {
    common: &'a Common,
    progress: &'a Progress,
    tally: &'a mut Tally,
    desks: HashMap<String, Target>,
}

/// A dead queue, and what it has.
struct Target {
    desk: Desk,
    /// Those that were published from here included.
    there: HashMap<Fingerprint, u32>,
    /// Of the file that is being read. A letter may be in several, when a `drop` was killed; one that is twice in a file is
    /// two letters.
    in_file: HashMap<Fingerprint, u32>,
    outbox: Outbox<()>,
}

impl Import<'_> {
    async fn files(&mut self, args: &Args) -> Result<(), Trouble> {
        for file in &args.files {
            let mut lines = Lines::open(file)?;
            self.desks.values_mut().for_each(|target| target.in_file.clear());
            loop {
                match lines.next()? {
                    Line::Letter(letter) => self.letter(*letter, args.duplicates).await?,
                    Line::Torn => self.tally.torn += 1,
                    Line::End => break,
                }
            }
        }
        for target in self.desks.values_mut() {
            while !target.outbox.is_empty() {
                judge(target, self.tally, self.progress).await?;
            }
        }
        Ok(())
    }

    async fn letter(&mut self, letter: Letter, duplicates: bool) -> Result<(), Trouble> {
        let Some(model) = letter.queue.strip_prefix(&dead_queue("")).map(str::to_owned) else {
            return Err(Trouble::Usage(format!("{} is no queue of dead letters", safe(&letter.queue))));
        };
        if !self.common.models.is_empty() && !self.common.models.contains(&model) {
            self.tally.other_models += 1;
            return Ok(());
        }
        if !self.desks.contains_key(&letter.queue) {
            let target = Target::open(self.common, &model, duplicates).await?;
            self.desks.insert(letter.queue.clone(), target);
        }
        let Some(target) = self.desks.get_mut(&letter.queue) else { return Ok(()) };
        let fingerprint = letter.fingerprint();
        let in_file = target.in_file.entry(fingerprint).or_default();
        *in_file += 1;
        let there = target.there.entry(fingerprint).or_default();
        if !duplicates && *there >= *in_file {
            self.tally.there += 1;
            return Ok(());
        }
        *there += 1;
        match republish::letter(letter) {
            Ok(message) => {
                while !target.outbox.has_room() {
                    judge(target, self.tally, self.progress).await?;
                }
                target.outbox.send((), message);
            }
            Err(unfit) => {
                self.tally.unfit += 1;
                self.progress.say(&format!("letter {fingerprint}: {unfit}"));
            }
        }
        Ok(())
    }
}

impl Target {
    /// At the desk until the end, so that nobody restores the same at the same time.
    async fn open(common: &Common, model: &str, duplicates: bool) -> Result<Self, Trouble> {
        let desk = Desk::open(&common.broker, model).await?;
        let mut there: HashMap<_, u32> = HashMap::new();
        if !duplicates {
            let mut reader = Reader::open(&desk).await?;
            while let Some(taken) = reader.next().await? {
                *there.entry(taken.letter.fingerprint()).or_default() += 1;
            }
            reader.give_back().await?;
        }
        let outbox = Outbox::open(&desk.connection).await?;
        Ok(Self { desk, there, in_file: HashMap::new(), outbox })
    }
}

async fn judge(target: &mut Target, tally: &mut Tally, progress: &Progress) -> Result<(), Trouble> {
    let queue = || safe(&target.desk.queue);
    for ((), verdict) in target.outbox.judged().await? {
        match verdict {
            Verdict::Accepted => {
                tally.published += 1;
                progress.add(1);
            }
            Verdict::Returned => return Err(Trouble::Refused(format!("{} was deleted", queue()))),
            Verdict::Rejected => return Err(Trouble::Refused(format!("{} is full", queue()))),
        }
    }
    Ok(())
}
