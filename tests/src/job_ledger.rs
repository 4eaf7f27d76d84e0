//! The ledger of a soak test: what was published, how each job ended, and whether the two agree.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use vramq_schemas::{Output, Reason, ReplyKind};

use crate::client::Received;
use crate::losses::Duplicate;

/// The kind of a job, which decides how it has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// With so many items: each of them is answered.
    Good(usize),
    /// A body that is no job: dead-lettered as malformed.
    Malformed,
}

/// What the publisher knows of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Publish {
    UnderWay,
    Confirmed,
    /// The publish was not confirmed: the broker may have the job.
    Unsure,
}

/// One job.
#[derive(Debug)]
struct Entry {
    kind: Kind,
    publish: Publish,
    /// Of each item, whether its output came.
    came: Vec<bool>,
    done: bool,
    dead: Option<Reason>,
    told_failed: bool,
    /// Every worker that answered the job or some items, or dead-lettered it, with the time of collection.
    by: Vec<(String, Instant)>,
    /// An answer came from a later attempt: some worker had requeued the job.
    requeued: bool,
    duplicated: bool,
}

/// The ledger.
#[derive(Debug, Default)]
pub struct JobLedger {
    jobs: HashMap<String, Entry>,
    /// Identities of messages already recorded: a broker that loses the collector's ack delivers them again.
    seen: HashSet<String>,
    open: usize,
    faults: Vec<String>,
    pub came_again: usize,
    /// Replies without a new item, and letters of jobs that already had one.
    pub duplicates: Vec<Duplicate>,
    pub items: usize,
    /// Letters that a broker wrote: a job that was delivered too often.
    pub by_broker: usize,
    pub letters: BTreeMap<String, usize>,
}

/// The text of an item.
pub fn item(id: &str, at: usize) -> String {
    format!("{id}/{at}")
}

impl JobLedger {
    /// Enters a job before it is published.
    pub fn enter(&mut self, id: &str, kind: Kind) {
        let items = if let Kind::Good(items) = kind { items } else { 0 };
        let entry = Entry {
            kind,
            publish: Publish::UnderWay,
            came: vec![false; items],
            done: false,
            dead: None,
            told_failed: false,
            by: Vec::new(),
            requeued: false,
            duplicated: false,
        };
        self.jobs.insert(id.to_owned(), entry);
    }

    /// Records the confirm of a publish.
    pub fn published(&mut self, id: &str, confirmed: bool) {
        if let Some(entry) = self.jobs.get_mut(id) {
            entry.publish = if confirmed { Publish::Confirmed } else { Publish::Unsure };
            self.open += usize::from(confirmed && !entry.has_ended());
        }
    }

    /// Jobs that the broker has and that have not ended.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Takes in a message of the reply queue.
    pub fn reply(&mut self, reply: &Received) {
        self.take_in(reply, Self::add_reply);
    }

    /// Takes in a message of the dead-letter queue.
    pub fn letter(&mut self, letter: &Received) {
        self.take_in(letter, Self::add_letter);
    }

    fn take_in(&mut self, message: &Received, add: fn(&mut Self, &Received) -> Result<()>) {
        if !self.seen.insert(identity(message)) {
            self.came_again += 1;
            return;
        }
        let id = message.id();
        let was_open = self.is_open(id);
        if let Err(fault) = add(self, message) {
            self.faults.push(format!("job {id}: {fault:#}"));
        }
        self.open -= usize::from(was_open && !self.is_open(id));
    }

    fn is_open(&self, id: &str) -> bool {
        self.jobs.get(id).is_some_and(|entry| entry.publish == Publish::Confirmed && !entry.has_ended())
    }

    fn add_reply(&mut self, reply: &Received) -> Result<()> {
        let id = reply.id();
        let entry = self.jobs.get_mut(id).context("a reply to a job that nobody published")?;
        let kind = reply.kind()?;
        if kind == ReplyKind::Failed {
            entry.told_failed = true;
            return Ok(());
        }
        let headers = reply.reply()?;
        ensure!(
            headers.items_total as usize == entry.came.len(),
            "{headers:?} of {} items",
            entry.came.len()
        );
        let outputs = reply.outputs()?.outputs;
        ensure!(outputs.len() == headers.items as usize, "{} outputs, {headers:?}", outputs.len());
        let mut fresh = kind == ReplyKind::Done && !entry.done;
        for (at, output) in (headers.offset as usize..).zip(outputs) {
            ensure!(output == Output::Json(item(id, at).into()), "item {at} is {output:?}");
            let came = entry.came.get_mut(at).with_context(|| format!("no item {at}"))?;
            fresh |= !*came;
            self.items += usize::from(!*came);
            *came = true;
        }
        entry.done |= kind == ReplyKind::Done;
        entry.requeued |= headers.attempt > 0;
        if !fresh {
            self.duplicates.push(entry.duplicate(id));
        }
        entry.by.push((headers.worker, Instant::now()));
        Ok(())
    }

    fn add_letter(&mut self, letter: &Received) -> Result<()> {
        let id = letter.id();
        let entry = self.jobs.get_mut(id).context("a letter of a job that nobody published")?;
        let Ok(dossier) = letter.dead_letter() else {
            self.by_broker += 1;
            bail!("dead-lettered by the broker: {:?}", letter.properties);
        };
        *self.letters.entry(dossier.reason.to_string()).or_default() += 1;
        if entry.dead.replace(dossier.reason).is_some() {
            self.duplicates.push(entry.duplicate(id));
        }
        entry.by.push((dossier.worker, Instant::now()));
        ensure!(
            entry.kind == Kind::Malformed && dossier.reason == Reason::Malformed,
            "dead-lettered as {}: {}",
            dossier.reason,
            dossier.error
        );
        Ok(())
    }

    /// Jobs by what their publisher knows and how they ended.
    pub fn count(&self) -> Count {
        let mut count = Count::default();
        for entry in self.jobs.values() {
            count.duplicated += usize::from(entry.duplicated);
            let sure = entry.publish == Publish::Confirmed;
            let (ended, both) = (entry.has_ended(), entry.done && entry.dead.is_some());
            count.published += usize::from(sure);
            count.unsure += usize::from(!sure);
            count.unsure_ended += usize::from(!sure && ended);
            count.answered += usize::from(sure && entry.is_answered());
            count.dead += usize::from(sure && entry.dead.is_some());
            count.missing += usize::from(sure && !ended);
            count.both += usize::from(both);
            count.not_told += usize::from(entry.dead.is_some() && !entry.told_failed);
        }
        count
    }

    /// The ids of jobs that the broker has and that have not ended, some of them.
    pub fn missing(&self) -> Vec<String> {
        let open = self.jobs.iter().filter(|(id, _)| self.is_open(id));
        let tell = |(id, entry): (&String, &Entry)| {
            let came = entry.came.iter().filter(|came| **came).count();
            format!("{id}: {came} of {} items, done: {}", entry.came.len(), entry.done)
        };
        open.map(tell).take(20).collect()
    }

    /// What was wrong with a message.
    pub fn faults(&self) -> &[String] {
        &self.faults
    }
}

/// Jobs, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub published: usize,
    pub answered: usize,
    pub dead: usize,
    pub missing: usize,
    /// Answered and dead-lettered.
    pub both: usize,
    /// Dead-lettered, but the caller got no `failed` reply.
    pub not_told: usize,
    /// Some part of it came twice.
    pub duplicated: usize,
    /// Whose publish was never confirmed, and how many of them ended anyway.
    pub unsure: usize,
    pub unsure_ended: usize,
}

impl Entry {
    fn is_answered(&self) -> bool {
        self.done && self.came.iter().all(|came| *came)
    }

    /// The caller's `failed` reply comes after the dead letter, and is part of the end.
    fn has_ended(&self) -> bool {
        self.is_answered() || (self.dead.is_some() && self.told_failed)
    }

    fn duplicate(&mut self, id: &str) -> Duplicate {
        self.duplicated = true;
        let (before, requeued) = (self.by.clone(), self.requeued);
        Duplicate { job: id.to_owned(), before, requeued, again: Instant::now() }
    }
}

/// Identifies a message, even among several answers to the same job.
fn identity(message: &Received) -> String {
    let headers = message.headers();
    let shown = ["worker", "publish-seq", "offset", "items", "queued", "ran", "dead-at-ms"];
    let shown = shown.map(|name| headers.inner().get(name).cloned());
    format!("{} {:?} {shown:?}", message.id(), message.properties.kind())
}
