//! One-shot programs: started for each item, by [templates](Template) of arguments, and judged by their exit status and what they print.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Duration, Instant, sleep, sleep_until, timeout};
use vramq_schemas::Output;

use super::child::{Child, Fate, GONE_LIMIT};
use super::config::{Mode, Once, ProcessConfig};
use super::cost::{Costs, Unit};
use super::item::Item;
use super::keeper::{Death, OutputUse};
use super::once_memory::{Left, Snapshots};
use super::once_printed::{OUTPUT_BYTES_MAX, Printed, TooMuch};
use super::oom::{MemoryVerdict, judge};
use super::outputs::PassOutputs;
use super::pass::{PassEnd, PassJob};
use super::peak::Sampler;
use super::pool::PoolOptions;
use super::protocol::{FailureKind, OutputHeader, OutputKind};
use super::revision_watch::{Exchange, RevisionWatch};
use super::scratch;
use super::template::Template;
use super::warm::LoadError;

/// Names in the error of a missing output: enough to see how a program names its files.
const NAMES_MAX: usize = 8;

/// The longest part of a printed line in an error.
const LINE_BYTES_MAX: usize = 500;

/// How long the end of an item waits until the arguments that its program wrote are left out of the revision. They are in any case before
/// the next program starts.
const NOTED_LIMIT: Duration = Duration::from_secs(5);

/// How a pass of a one-shot program ended.
pub(super) struct Ended {
    pub end: PassEnd,
    /// How many programs were started.
    pub started: u64,
    pub learnt: Learnt,
    /// What the last program leaves, if one was started.
    pub left: Option<Left>,
    /// No program was started for an item, because its files have this revision by now, and the worker serves another one.
    pub other_revision: Option<String>,
}

/// Runs a pass, item by item. It stops after the first program that does not exit, or whose memory is not free soon.
pub(super) async fn run(
    config: &ProcessConfig,
    options: &PoolOptions,
    revision: Option<&RevisionWatch>,
    job: &mut PassJob,
    closing: &mut watch::Receiver<bool>,
) -> Ended {
    let ended = |end| Ended { end, started: 0, learnt: Vec::new(), left: None, other_revision: None };
    let (Mode::Once(once), Some(revision)) = (&config.mode, revision) else {
        return ended(PassEnd::NotRun { reason: "the model is not one-shot".to_owned() });
    };
    let (mut learnt, mut outputs) = (Vec::new(), PassOutputs::default());
    let (mut started, mut left) = (0, None::<Left>);
    for index in 0..job.request.items.len() {
        let cost = Costs::new(&job.request.items[index]).of(config.vram.per);
        let declared = config.vram.declared_bytes(cost.unwrap_or(0.0));
        if let Some(left) = &left
            && !left.has_room(&options.account, declared).await
        {
            break;
        }
        let runner = Runner { config, options, once, revision, index };
        let ran = runner.run(job, closing, &mut outputs).await;
        started += u64::from(ran.left.is_some());
        left = ran.left;
        match ran.end {
            Ok(output) => job.events.output(index, output),
            Err(end) => return Ended { end, started, learnt, left, other_revision: ran.other_revision },
        }
        learnt.extend(cost.zip(ran.peak).filter(|_| config.vram.learn));
        if index + 1 == job.request.items.len() {
            let peak = learnt.iter().map(|(_, peak)| *peak).max();
            return Ended { started, learnt, left, ..ended(PassEnd::Done { peak }) };
        }
    }
    // The items that are left run in another pass.
    let reason = "the last program, or device memory that it held, is still there".to_owned();
    Ended { started, learnt, left, ..ended(PassEnd::NotRun { reason }) }
}

/// What items cost, and what their programs took of the device.
pub(super) type Learnt = Vec<(f64, u64)>;

/// The cost of a pass of a one-shot program: that of its largest item, since they run one after the other.
pub(super) fn pass_cost(items: &[Costs], unit: Unit) -> Option<f64> {
    items.iter().map(|costs| costs.of(unit)).try_fold(0.0, |most: f64, cost| Some(most.max(cost?)))
}

struct Runner<'a> {
    config: &'a ProcessConfig,
    options: &'a PoolOptions,
    once: &'a Once,
    revision: &'a RevisionWatch,
    index: usize,
}

/// How the program of one item ended.
struct ItemRun {
    end: Result<Output, PassEnd>,
    /// Device bytes that it took, if that was measured.
    peak: Option<u64>,
    /// `None`: it was not started.
    left: Option<Left>,
    /// As in [`Ended`].
    other_revision: Option<String>,
}

impl ItemRun {
    /// No program was started.
    fn not(end: PassEnd) -> Self {
        Self { end: Err(end), peak: None, left: None, other_revision: None }
    }
}

impl Runner<'_> {
    async fn run(
        &self,
        job: &mut PassJob,
        closing: &mut watch::Receiver<bool>,
        outputs: &mut PassOutputs,
    ) -> ItemRun {
        let item = &job.request.items[self.index];
        let cost = Costs::new(item).of(self.config.vram.per);
        let prepared = match self.prepare(item, &job.request.params).await {
            Ok(prepared) => prepared,
            Err(end) => return ItemRun::not(end),
        };
        // As late as can be: to write the item may take long.
        if let Some(not_run) = self.exchanged(job, closing).await {
            let _ = std::fs::remove_dir_all(&prepared.spec.scratch);
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
            Ok(()) => self.output(&child, &prepared, printed, outputs).await,
            Err(end) => Err(end),
        };
        child.finish().await;
        let name = self.config.name.clone();
        // The pass does not wait for long for processes that were killed and do not end.
        let mut gone = tokio::spawn(async move {
            child.all_gone(&name).await;
            drop(entry);
        });
        let is_gone = timeout(GONE_LIMIT, &mut gone).await.is_ok();
        tokio::select! {
            _ = self.revision.ended(running) => {}
            () = sleep(NOTED_LIMIT) => {}
            () = stopped(job, closing) => {}
        }
        let held = peak.unwrap_or_else(|| self.config.vram.declared_bytes(cost.unwrap_or(0.0)));
        let held = if is_claimed { held } else { 0 };
        let left = snapshots.left((!is_gone).then_some(gone), held);
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
            () = stopped(job, closing) => return Some(ItemRun::not(PassEnd::Cancelled { killed: false })),
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

    /// Writes the item to the scratch folder and fills in the arguments.
    async fn prepare(&self, item: &Item, params: &Map<String, Value>) -> Result<Prepared, PassEnd> {
        let failed = |kind, detail: String| self.failed(kind, detail, String::new());
        let view = self.options.account.view();
        let launcher = &self.options.launcher;
        let mut spec = launcher
            .spec(self.config, view, Vec::new(), OutputUse::Stdout)
            .map_err(|error| PassEnd::NotRun { reason: format!("make the scratch folder: {error}") })?;
        let input = spec.scratch.join(format!("input{}", self.once.input_suffix));
        let output = spec.scratch.join(format!("output{}", self.once.output_suffix));
        let templates: Result<Vec<_>, _> =
            self.config.command.iter().map(|argument| Template::parse(argument)).collect();
        let filled = templates.map_err(|what| failed(FailureKind::Model, what)).and_then(|templates| {
            let arguments: Result<Vec<_>, _> =
                templates.iter().map(|template| template.fill(&input, &output, params)).collect();
            spec.command = arguments.map_err(|what| failed(FailureKind::Input, what))?;
            Ok(templates.iter().any(Template::has_output).then_some(output))
        });
        let prepared = match filled {
            Ok(file) => written(input, item, &spec.scratch).await.map(|()| file),
            Err(end) => Err(end),
        };
        if prepared.is_err() {
            let _ = std::fs::remove_dir_all(&spec.scratch);
        }
        prepared.map(|file| Prepared { spec, file })
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
            () = stopped(job, closing) => Some(Halt::Cancelled),
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

    /// What the program wrote, as an output.
    async fn output(
        &self,
        child: &Child,
        prepared: &Prepared,
        printed: Printed<UnixStream>,
        outputs: &mut PassOutputs,
    ) -> Result<Output, PassEnd> {
        let is_json = self.once.media_type == "application/json";
        let kind = if is_json { OutputKind::Json } else { OutputKind::Bytes };
        let name = prepared
            .file
            .as_ref()
            .and_then(|file| file.file_name())
            .map(|name| name.to_string_lossy().into_owned());
        let said = printed.before(child.stderr_tail());
        let blobs = if name.is_some() { Vec::new() } else { vec![printed.into_output()] };
        let header =
            OutputHeader { kind, dtype: None, media_type: Some(self.once.media_type.clone()), file: name };
        outputs.read_aside(header, blobs, child.scratch().to_owned()).await.map_err(|what| {
            let is_missing = prepared.file.as_ref().is_some_and(|file| !file.exists());
            let what = if is_missing { format!("{what}; {}", there(child.scratch())) } else { what };
            self.failed(FailureKind::Output, what, said)
        })
    }

    fn failed(&self, kind: FailureKind, detail: String, stderr: String) -> PassEnd {
        PassEnd::Failed { kind, item: Some(self.index), detail, stderr }
    }
}

/// Writes an item to a file, on another thread: the worker's event loop has the runtime's only one.
async fn written(to: PathBuf, item: &Item, scratch: &Path) -> Result<(), PassEnd> {
    let payload = item.payload();
    let written = spawn_blocking(move || {
        // Makes room: a partly written file has taken disk space.
        std::fs::write(&to, payload).inspect_err(|_| drop(std::fs::remove_file(&to)))
    });
    let written = written.await.unwrap_or_else(|error| Err(error.into()));
    written.map_err(|error| PassEnd::not_written(&error, std::slice::from_ref(item), scratch))
}

/// Waits until the job is cancelled or the pool closes.
async fn stopped(job: &mut PassJob, closing: &mut watch::Receiver<bool>) {
    tokio::select! {
        _ = job.cancellation.wait() => {}
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

/// A program that is ready to start.
struct Prepared {
    spec: super::keeper::Spec,
    /// The file that the program writes; `None`: its output is what it prints.
    file: Option<PathBuf>,
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
