//! The one-shot program of one item: prepared, started, watched until it ends, and judged by its exit status and what it prints.

use std::path::Path;
use std::sync::Arc;

use futures_util::FutureExt as _;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Duration, Instant, sleep, sleep_until, timeout};
use vramq_schemas::Output;

use super::aside::Aside;
use super::child::{Child, Fate, GONE_LIMIT};
use super::config::{Once, ProcessConfig};
use super::keeper::Death;
use super::memory::Entry;
use super::once_memory::{Left, Snapshots};
use super::once_prepared::{Preparation, Prepared};
use super::once_printed::{OUTPUT_BYTES_MAX, Printed, TooMuch};
use super::oom::{MemoryVerdict, judge};
use super::outputs::PassOutputs;
use super::pass::{Cancellation, PassEnd, PassJob};
use super::peak::Sampler;
use super::pool::PoolOptions;
use super::protocol::{FailureKind, OutputHeader, OutputKind};
use super::revision_watch::{Exchange, RevisionWatch};
use super::scratch;
use super::warm::LoadError;

/// Names in the error of a missing output: enough to see how a program names its files.
const NAMES_MAX: usize = 8;

/// The longest part of a printed line in an error.
const LINE_BYTES_MAX: usize = 500;

/// How long the end of an item waits until the arguments that its program wrote are left out of the revision. They are in any case before
/// the next program starts.
const NOTED_LIMIT: Duration = Duration::from_secs(5);

/// What runs the program of one item.
pub(super) struct Runner<'a> {
    pub config: &'a ProcessConfig,
    pub options: &'a PoolOptions,
    pub once: &'a Once,
    pub revision: &'a RevisionWatch,
    pub aside: &'a Aside,
    /// The item's, in its pass.
    pub index: usize,
    /// Device bytes that are declared for the item.
    pub declared: u64,
}

/// How the program of one item ended.
pub(super) struct ItemRun {
    pub end: Result<Output, PassEnd>,
    /// Device bytes that it took, if that was measured.
    pub peak: Option<u64>,
    /// `None`: it was not started.
    pub left: Option<Left>,
    /// As in [`Ended`](super::once::Ended).
    pub other_revision: Option<String>,
}

impl ItemRun {
    /// No program was started.
    fn not(end: PassEnd) -> Self {
        Self { end: Err(end), peak: None, left: None, other_revision: None }
    }
}

impl Runner<'_> {
    /// Runs the program, and reads its output into `outputs`.
    pub async fn run(
        &self,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
        outputs: &mut PassOutputs,
    ) -> ItemRun {
        let prepared = match self.prepare(job, closing).await {
            Ok(prepared) => prepared,
            Err(end) => return ItemRun::not(end),
        };
        // As late as can be: to write the item may take long.
        if let Some(not_run) = self.exchanged(job, closing).await {
            prepared.remove().await;
            return not_run;
        }
        let running = self.revision.running();
        let account = &self.options.account;
        let mut snapshots = Snapshots::before(account).await;
        let started = Child::start(&self.options.launcher.keeper, &prepared.spec, &self.config.name).await;
        let (mut child, stdout) = match started {
            Ok(started) => started,
            Err(error) => {
                return ItemRun::not(PassEnd::NotRun { reason: LoadError::from(error).to_string() });
            }
        };
        let entry = account.enter_once(child.keeper_pid());
        // Needed even if nothing is learned: what the program held must return.
        let sampler = Sampler::start(account, child.keeper_pid(), 0).await;
        // Otherwise memory of the program and memory that others took meanwhile look the same.
        let is_claimed = sampler.is_some() && account.view().shows_what_is_left();
        let mut printed = Printed::new(stdout, prepared.file.is_some());
        let end = tokio::select! {
            end = self.watch(&mut child, &mut printed, job, closing) => end,
            never = snapshots.go_on(account, &entry, sampler.as_ref()) => match never {},
        };
        let peak = match sampler {
            Some(sampler) => Some(sampler.stop().await).filter(|peak| *peak > 0),
            None => None,
        };
        if let Some(peak) = peak {
            // A snapshot from before its end shows less free than there is.
            entry.holds(peak, false);
        }
        let end = match end {
            Ok(()) => tokio::select! {
                output = self.output(&child, &prepared, printed, outputs) => output,
                // It is there, and a disk that answers needs no longer.
                () = stopped(&mut job.cancellation, closing).then(|()| sleep(self.config.kill)) => {
                    Err(PassEnd::Cancelled { killed: false })
                }
            },
            Err(end) => Err(end),
        };
        let ending = self.finish(child, entry).await;
        tokio::select! {
            _ = self.revision.ended(running) => {}
            () = sleep(NOTED_LIMIT) => {}
            () = stopped(&mut job.cancellation, closing) => {}
        }
        let held = if is_claimed { peak.unwrap_or(self.declared) } else { 0 };
        let left = snapshots.left(ending, held);
        ItemRun { end, peak, left: Some(left), other_revision: None }
    }

    /// How the item ends if its program may not be started, because the files are of another revision or cannot be read.
    async fn exchanged(&self, job: &mut PassJob, closing: &mut watch::Receiver<bool>) -> Option<ItemRun> {
        // Files may be large, and on a file system that hangs.
        let other = tokio::select! {
            other = timeout(self.config.item, self.revision.other()) => other.unwrap_or_else(|_| {
                let limit = self.config.item.as_secs_f64();
                Err(format!("reading the files of the model's revision took longer than {limit} s (item_s)"))
            }),
            () = stopped(&mut job.cancellation, closing) => return Some(ItemRun::not(PassEnd::Cancelled { killed: false })),
        };
        match other {
            Ok(None) => None,
            Ok(Some(Exchange { found, files })) => {
                let served = self.revision.revision().to_owned();
                let error = LoadError::OtherRevision { found: found.clone(), served };
                let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
                let end = PassEnd::NotRun { reason: format!("{error}; exchanged: {}", files.join(", ")) };
                Some(ItemRun { other_revision: Some(found), ..ItemRun::not(end) })
            }
            Err(reason) => Some(ItemRun::not(PassEnd::NotRun { reason })),
        }
    }

    /// Prepares the program of an item. A disk that takes longer than an item may counts as full: the item may be too large for it, and
    /// other jobs are not held up.
    async fn prepare(
        &self,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
    ) -> Result<Prepared, PassEnd> {
        let preparation = Preparation {
            config: self.config.clone(),
            once: self.once.clone(),
            launcher: self.options.launcher.clone(),
            account: Arc::clone(&self.options.account),
            index: self.index,
            payload: job.request.items[self.index].payload(),
            params: job.request.params.clone(),
        };
        let limit = self.config.item;
        tokio::select! {
            prepared = timeout(limit, preparation.run(self.aside)) => prepared.unwrap_or_else(|_| {
                Err(PassEnd::slow_disk("write the item to the scratch folder", limit))
            }),
            () = stopped(&mut job.cancellation, closing) => Err(PassEnd::Cancelled { killed: false }),
        }
    }

    /// Waits for the program's end.
    async fn watch(
        &self,
        child: &mut Child,
        printed: &mut Printed<UnixStream>,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
    ) -> Result<(), PassEnd> {
        let deadline = Instant::now() + self.config.item;
        let ended = async {
            let ended = async {
                until_ended(child).await;
                Ok(())
            };
            tokio::try_join!(ended, printed.read())
        };
        let halt = tokio::select! {
            ended = ended => ended.err().map(|TooMuch| Halt::PrintedTooMuch),
            () = sleep_until(deadline) => Some(Halt::TimedOut),
            () = stopped(&mut job.cancellation, closing) => Some(Halt::Cancelled),
        };
        if let Some(halt) = halt {
            child.end_program(self.config.kill).await;
            return Err(self.halted(halt, printed.before(child.stderr_since(0).await)));
        }
        let (death, stderr) = (child.death().unwrap_or(Death::KeeperLost), child.stderr_since(0).await);
        let verdict = match judge(death, &stderr) {
            MemoryVerdict::Other => judge(death, &printed.text()),
            verdict => verdict,
        };
        let stderr = printed.before(stderr);
        match (verdict, death) {
            (MemoryVerdict::Device(report), _) => {
                Err(PassEnd::OutOfMemory { item: Some(self.index), report, stderr, by_text: true })
            }
            (MemoryVerdict::Host, death) => {
                Err(self.failed(FailureKind::HostMemory, format!("the program {death}"), stderr))
            }
            (MemoryVerdict::Other, Death::Exited(0)) => Ok(()),
            (MemoryVerdict::Other, Death::Exited(_)) => {
                Err(match line_of_full_disk(&stderr, child.scratch()) {
                    Some(line) => {
                        PassEnd::disk_full(&format!("the program {death}: {line}"), child.scratch())
                    }
                    None => self.failed(FailureKind::Model, format!("the program {death}"), stderr),
                })
            }
            (MemoryVerdict::Other, death) => Err(PassEnd::Crashed { death, stderr }),
        }
    }

    /// The end of a pass whose program was ended.
    fn halted(&self, halt: Halt, stderr: String) -> PassEnd {
        match halt {
            Halt::TimedOut => PassEnd::TimedOut { limit: self.config.item, killed: true, stderr },
            Halt::Cancelled => PassEnd::Cancelled { killed: true },
            Halt::PrintedTooMuch => {
                let detail = format!(
                    "the program was ended, because it printed more than {OUTPUT_BYTES_MAX} bytes to standard output; an \
                     argument {{output}} names a file for larger outputs"
                );
                self.failed(FailureKind::Output, detail, stderr)
            }
        }
    }

    /// What the program wrote, as an output. Read on another thread: it may be large, and in a file.
    async fn output(
        &self,
        child: &Child,
        prepared: &Prepared,
        printed: Printed<UnixStream>,
        outputs: &mut PassOutputs,
    ) -> Result<Output, PassEnd> {
        let is_json = self.once.media_type == "application/json";
        let kind = if is_json { OutputKind::Json } else { OutputKind::Bytes };
        let (path, scratch) = (prepared.file.clone(), child.scratch().to_owned());
        let name = path.as_ref().and_then(|path| path.file_name());
        let name = name.map(|name| name.to_string_lossy().into_owned());
        let said = printed.before(child.stderr_tail());
        let blobs = if name.is_some() { Vec::new() } else { vec![printed.into_output()] };
        let header =
            OutputHeader { kind, dtype: None, media_type: Some(self.once.media_type.clone()), file: name };
        let mut after = outputs.clone();
        let reading = spawn_blocking(move || {
            let output = after.read(&header, blobs, &scratch).map_err(|what| {
                let is_missing = path.is_some_and(|path| !path.exists());
                if is_missing { format!("{what}; {}", there(&scratch)) } else { what }
            });
            (after, output)
        });
        let limit = self.config.item;
        let read = timeout(limit, reading)
            .await
            .map_err(|_| PassEnd::slow_disk("read the output of the program", limit))?;
        let (after, output) = read.map_err(|error| {
            let what = format!("internal error: an output was not read: {error}");
            self.failed(FailureKind::Output, what, String::new())
        })?;
        *outputs = after;
        output.map_err(|what| self.failed(FailureKind::Output, what, said))
    }

    /// Waits until all processes of an ended program are gone, and drops its `entry` then. After [`GONE_LIMIT`] it returns the task that goes
    /// on waiting.
    async fn finish(&self, mut child: Child, entry: Entry) -> Option<JoinHandle<()>> {
        child.finish().await;
        let name = self.config.name.clone();
        let mut gone = tokio::spawn(async move {
            child.all_gone(&name).await;
            drop(entry);
        });
        let is_gone = timeout(GONE_LIMIT, &mut gone).await.is_ok();
        (!is_gone).then_some(gone)
    }

    fn failed(&self, kind: FailureKind, detail: String, stderr: String) -> PassEnd {
        PassEnd::Failed { kind, item: Some(self.index), detail, stderr }
    }
}

/// Waits until the job is cancelled or the pool closes.
async fn stopped(cancellation: &mut Cancellation, closing: &mut watch::Receiver<bool>) {
    tokio::select! {
        _ = cancellation.wait() => {}
        _ = closing.wait_for(|closing| *closing) => {}
    }
}

/// The last line in which a program says that it could not write for want of room, as the C library words it. A full disk is believed only
/// if the scratch folder's is full: others do not become free by waiting, and the words may be a caller's.
fn line_of_full_disk<'a>(stderr: &'a str, scratch: &Path) -> Option<&'a str> {
    let is_full = scratch::may_be_full(scratch);
    let says = |line: &&str| {
        line.contains("Disk quota exceeded") || (is_full && line.contains("No space left on device"))
    };
    let line = stderr.lines().rev().find(says)?.trim();
    Some(&line[..line.floor_char_boundary(LINE_BYTES_MAX)])
}

/// What a program left in its folder: some number their outputs, or choose another ending.
fn there(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().take(NAMES_MAX);
    let names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    format!("the folder has {}", names.join(", "))
}

/// Why a program is ended.
enum Halt {
    TimedOut,
    Cancelled,
    PrintedTooMuch,
}

/// Waits until the program and all its descendants are dead.
async fn until_ended(child: &mut Child) {
    while !matches!(child.fate().await, Fate::Ended | Fate::Gone) {}
}
