//! The OS thread that owns a device: passes run on it one after the other, in the order in which they come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vramq_schemas::Output;

use super::{Device, Memory};
use crate::drill;
use crate::engine::PassError;
use crate::pass::Pass;

/// Passes that may be on the thread: one that runs, and one that is ready when it ends.
pub const PASSES_MAX: usize = 2;

/// Sessions whose passes may be here: those of lost ones wait as well if another process keeps the device. After so many
/// it is no use.
const SESSIONS_MAX: usize = 16;

/// Tells which pass runs. Clones tell the same.
#[derive(Clone, Debug, Default)]
pub struct Busy(Arc<Mutex<Doing>>);

#[derive(Debug, Default)]
struct Doing {
    runs: Option<OnDevice>,
    /// The device was lost in it.
    lost_in: Option<OnDevice>,
}

/// The pass that runs, or that is the next to.
#[derive(Clone, Debug)]
pub struct OnDevice {
    since: Instant,
    messages: Arc<[u64]>,
    /// Other processes have the device.
    waits: bool,
}

impl OnDevice {
    /// How long it has been running, or waiting.
    pub fn lasts(&self) -> Duration {
        self.since.elapsed()
    }

    /// Whether it still waits for other processes to let it onto the device: whatever becomes of it, it is not its fault.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Whether items of this message's job are in it, by its fingerprint.
    pub fn has(&self, message: u64) -> bool {
        self.messages.contains(&message)
    }

    /// Whether it is of one job.
    pub fn is_of_one(&self) -> bool {
        self.messages.len() == 1
    }
}

impl Busy {
    /// The pass that runs, whosever it is: it may be one of a session that was lost.
    pub fn now(&self) -> Option<OnDevice> {
        self.doing().runs.clone()
    }

    /// The pass that the device was lost in, or that it may be stuck in.
    pub fn culprit(&self) -> Option<OnDevice> {
        let doing = self.doing();
        doing.lost_in.as_ref().or(doing.runs.as_ref()).filter(|pass| !pass.waits).cloned()
    }

    /// How long it has been running; nothing while none does.
    pub fn busy_for(&self) -> Duration {
        self.now().filter(|pass| !pass.waits).map_or(Duration::ZERO, |pass| pass.lasts())
    }

    fn begins(&self, pass: OnDevice) {
        self.doing().runs = Some(pass);
    }

    /// It is the pass's turn.
    fn enters(&self) {
        if let Some(pass) = &mut self.doing().runs {
            (pass.since, pass.waits) = (Instant::now(), false);
        }
    }

    fn ends(&self, lost: bool) {
        let mut doing = self.doing();
        let ended = doing.runs.take();
        if lost {
            doing.lost_in = ended;
        }
    }

    fn doing(&self) -> MutexGuard<'_, Doing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pass and what became of it. Its permit is still held: the memory is free only when this is dropped.
#[derive(Debug)]
pub struct PassEnd {
    pub pass: Pass,
    pub result: Ran,
    /// Passes that failed on this thread so far.
    pub failures: u64,
    /// How long it was on the device, waiting for other processes included.
    pub took: Duration,
    /// The device's memory after the pass.
    pub memory: Memory,
}

/// How a pass ended.
#[derive(Debug)]
pub enum Ran {
    Done(Vec<Output>),
    Failed(PassError),
    /// Not at all: an earlier pass failed, and whoever made this one did not know it yet. Items that come after those
    /// of a failed pass must not run: their job goes on elsewhere, and they would be computed twice.
    Skipped,
    /// Not at all, or in vain: the device is gone, and not by this pass.
    Lost(String),
}

/// Takes the end of a pass away from the device's thread; must not block for long.
pub type OnEnd = Box<dyn FnOnce(PassEnd) + Send>;

/// A handle to the thread. Dropping it ends the thread after the passes that it has.
#[derive(Debug)]
pub struct DeviceThread {
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
    device: Arc<dyn Device>,
    busy: Busy,
}

struct Command {
    pass: Pass,
    /// Failures that the sender knew of.
    failures_known: u64,
    span: tracing::Span,
    on_end: OnEnd,
}

impl DeviceThread {
    /// # Errors
    /// The system has no thread to give.
    pub fn spawn(device: Arc<dyn Device>) -> std::io::Result<Self> {
        let (commands, receiver) = sync_channel(PASSES_MAX * SESSIONS_MAX);
        let name = format!("device {}", device.name());
        let served = Arc::clone(&device);
        let busy = Busy::default();
        let busy_there = busy.clone();
        let thread =
            std::thread::Builder::new().name(name).spawn(move || serve(&receiver, &*served, &busy_there))?;
        Ok(Self { commands: Some(commands), thread: Some(thread), device, busy })
    }

    pub fn busy(&self) -> &Busy {
        &self.busy
    }

    /// Hands a pass over, with the number of failures that the caller has heard of. Does not block.
    ///
    /// # Errors
    /// The end of a pass that the thread did not take.
    pub fn submit(&self, pass: Pass, failures_known: u64, on_end: OnEnd) -> Result<(), Box<PassEnd>> {
        let command = Command { pass, failures_known, span: tracing::Span::current(), on_end };
        let Some(commands) = &self.commands else { return Ok(()) };
        let (command, lost) = match commands.try_send(command) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Full(command)) => (command, "it takes no passes any more"),
            // The thread catches panics of engines; if it is gone all the same, so is the device.
            Err(TrySendError::Disconnected(command)) => (command, "its thread has ended"),
        };
        let result = Ran::Lost(lost.to_owned());
        let (pass, memory) = (command.pass, self.device.memory());
        Err(Box::new(PassEnd { pass, result, failures: failures_known, took: Duration::ZERO, memory }))
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // An `Err` is the panic of the thread, which its hook has already reported.
            let _ = thread.join();
        }
    }
}

fn serve(commands: &Receiver<Command>, device: &dyn Device, busy: &Busy) {
    let mut failures = 0;
    for Command { pass, failures_known, span, on_end } in commands {
        let began = Instant::now();
        busy.begins(OnDevice { since: began, messages: Arc::clone(&pass.messages), waits: true });
        let result = if failures_known < failures {
            Ran::Skipped
        } else if let Some(loss) = device.lost() {
            // Before this pass, so not by it.
            Ran::Lost(loss.error)
        } else {
            span.in_scope(|| match run(&pass, device, busy) {
                Ok(outputs) => Ran::Done(outputs),
                Err(error) => {
                    failures += 1;
                    let late = device.lost().filter(|loss| loss.is_late);
                    late.map_or(Ran::Failed(error), |loss| Ran::Lost(loss.error))
                }
            })
        };
        busy.ends(matches!(result, Ran::Failed(PassError::DeviceLost(_))));
        on_end(PassEnd { pass, result, failures, took: began.elapsed(), memory: device.memory() });
    }
}

/// Runs a pass. A panic of an engine ends the pass, not the worker: engines hold no state that a pass changes.
fn run(pass: &Pass, device: &dyn Device, busy: &Busy) -> Result<Vec<Output>, PassError> {
    let lost = |error| PassError::DeviceLost(format!("wait for the device: {error}"));
    let _leave = device.lane().enter(pass.exclusive).map_err(lost)?;
    busy.enters();
    drill::act(pass.drill).map_err(PassError::Failed)?;
    let outputs =
        catch_unwind(AssertUnwindSafe(|| pass.model.engine.run(&pass.items))).unwrap_or_else(|panic| {
            let text =
                panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
            Err(PassError::Failed(format!("the engine panicked: {}", text.unwrap_or("no message"))))
        })?;
    if outputs.len() != pass.items.len() {
        let (got, expected) = (outputs.len(), pass.items.len());
        return Err(PassError::Failed(format!("the engine gave {got} outputs for {expected} items")));
    }
    Ok(outputs)
}
