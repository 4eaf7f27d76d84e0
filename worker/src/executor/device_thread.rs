//! The OS thread that owns a device: passes run on it one after the other, in the order in which they come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::watch;
use vramq_core::device::PassError;
use vramq_core::event::PassResult;
use vramq_core::ids::PassId;
use vramq_core::settings::ExecutorFacts;
use vramq_schemas::Output;

use super::{ActivePass, CompletedPass, Executor, OnEnd, Pass, enter, panicked};
use crate::device::Device;
use crate::failpoint;

/// The most passes on the thread: one that runs, and one that is ready when it ends.
const PASSES_MAX: usize = 2;

/// The number of sessions whose passes may be queued. Passes of lost sessions stay queued, to be skipped, while a pass runs. Beyond this the
/// thread accepts no more.
const SESSIONS_MAX: usize = 16;

/// A handle to the thread. On drop, the thread runs its remaining passes and ends.
#[derive(Debug)]
pub struct DeviceThread {
    /// `None` while the handle is dropped, so that the thread ends.
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
    device: Arc<dyn Device>,
    active: ActivePass,
    skips: Skips,
}

/// Passes that must be skipped if they have not begun. Entries of passes that have begun are dropped with the next pass, so there are never
/// more entries than passes.
#[derive(Clone, Debug, Default)]
struct Skips(watch::Sender<Vec<PassId>>);

impl Skips {
    fn add(&self, pass: PassId) {
        self.0.send_if_modified(|passes| {
            let is_new = !passes.contains(&pass);
            if is_new {
                passes.push(pass);
            }
            is_new
        });
    }

    /// Whether the next pass must be skipped. Passes come in the order of their ids.
    fn take(&self, next: PassId) -> bool {
        let mut is_skipped = false;
        self.0.send_modify(|passes| {
            is_skipped = passes.contains(&next);
            passes.retain(|pass| *pass > next);
        });
        is_skipped
    }

    /// Waits until the pass must be skipped.
    async fn asked(&self, pass: PassId) {
        // Not `Err`, because the sender is here.
        let _ = self.0.subscribe().wait_for(|passes| passes.contains(&pass)).await;
    }
}

struct Command {
    pass: Pass,
    span: tracing::Span,
    on_end: OnEnd,
}

impl DeviceThread {
    /// Must be called on a runtime. Only the wait for the device lock is on it.
    ///
    /// # Errors
    /// The system starts no thread.
    pub fn spawn(device: Arc<dyn Device>) -> std::io::Result<Self> {
        let (commands, receiver) = sync_channel(PASSES_MAX * SESSIONS_MAX);
        let name = format!("device {}", device.name());
        let (active, skips) = (ActivePass::default(), Skips::default());
        let serving = Serving {
            device: Arc::clone(&device),
            active: active.clone(),
            skips: skips.clone(),
            runtime: Handle::current(),
        };
        let thread = std::thread::Builder::new().name(name).spawn(move || serving.serve(&receiver))?;
        Ok(Self { commands: Some(commands), thread: Some(thread), device, active, skips })
    }
}

impl Executor for DeviceThread {
    fn facts(&self) -> ExecutorFacts {
        ExecutorFacts { passes_max: PASSES_MAX, is_serial: true }
    }

    fn submit(&self, pass: Pass, on_end: OnEnd) -> Result<(), Box<CompletedPass>> {
        let command = Command { pass, span: tracing::Span::current(), on_end };
        let sent = match &self.commands {
            Some(commands) => commands.try_send(command),
            None => Err(TrySendError::Disconnected(command)),
        };
        let (command, why) = match sent {
            Ok(()) => return Ok(()),
            Err(TrySendError::Full(command)) => (command, "its thread takes no more passes"),
            // The thread catches panics of engines; if it has ended anyway, the device is unusable.
            Err(TrySendError::Disconnected(command)) => (command, "its thread has ended"),
        };
        let result = PassResult::DeviceLostBefore(why.to_owned());
        Err(Box::new(CompletedPass::without_running(command.pass, result, self.device.memory())))
    }

    fn active_pass(&self) -> &ActivePass {
        &self.active
    }

    /// A pass that has begun continues: a running device cannot be interrupted. One that waits for the device lock has not begun.
    fn cancel(&self, pass: PassId) {
        self.skips.add(pass);
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

/// The thread's side of the handle.
struct Serving {
    device: Arc<dyn Device>,
    active: ActivePass,
    skips: Skips,
    runtime: Handle,
}

impl Serving {
    fn serve(self, commands: &Receiver<Command>) {
        let mut failures = 0;
        for Command { pass, span, on_end } in commands {
            let began = Instant::now();
            self.active.set_waiting(pass.order.pass);
            // A pass that was ordered before the core knew of a failure is skipped. Its jobs may be requeued by now, and their items would
            // be computed twice.
            let is_skipped = self.skips.take(pass.order.pass);
            let (result, outputs) = if is_skipped || pass.order.failures_known < failures {
                (PassResult::Skipped, Vec::new())
            } else if let Some(loss) = self.device.lost() {
                // The device was lost before this pass, which therefore did not cause it.
                (PassResult::DeviceLostBefore(loss.error), Vec::new())
            } else {
                span.in_scope(|| match self.run_locked(&pass) {
                    Ok(outputs) => (PassResult::Done, outputs.into_iter().map(Some).collect()),
                    Err(NotDone::NotBegun(result)) => (result, Vec::new()),
                    Err(NotDone::Failed(error)) => {
                        failures += 1;
                        let late = self.device.lost().filter(|loss| loss.is_late);
                        let result = late.map_or(PassResult::Failed(error), |loss| {
                            PassResult::DeviceLostBefore(loss.error)
                        });
                        (result, Vec::new())
                    }
                })
            };
            self.active.clear(matches!(result, PassResult::Failed(PassError::DeviceLost(_))));
            let (took, memory) = (began.elapsed(), self.device.memory());
            on_end(CompletedPass { pass, result, outputs, failures, took, memory });
        }
    }

    /// Runs a pass under the device lock.
    fn run_locked(&self, pass: &Pass) -> Result<Vec<Output>, NotDone> {
        let entered = enter(&*self.device, &pass.order, self.skips.asked(pass.order.pass));
        let _guard = self.runtime.block_on(entered).map_err(NotDone::NotBegun)?;
        self.active.set_running();
        run(pass).map_err(NotDone::Failed)
    }
}

/// Why a pass has no outputs.
enum NotDone {
    /// It did not get the device.
    NotBegun(PassResult),
    Failed(PassError),
}

/// Runs a pass. A panic of an engine fails only the pass: a pass changes no state of an engine.
fn run(pass: &Pass) -> Result<Vec<Output>, PassError> {
    pass.progress.begin();
    let run = || {
        failpoint::act(pass.failpoint).map_err(PassError::Failed)?;
        pass.model.engine.run(&pass.items)
    };
    let outputs = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|panic| Err(panicked("the engine", panic.as_ref())))?;
    if outputs.len() != pass.items.len() {
        let (got, expected) = (outputs.len(), pass.items.len());
        return Err(PassError::Failed(format!("the engine gave {got} outputs for {expected} items")));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_skipped_once_and_one_that_has_begun_is_forgotten() {
        let skips = Skips::default();
        skips.add(PassId(2));
        skips.add(PassId(2));
        assert!(!skips.take(PassId(1)) && skips.take(PassId(2)) && !skips.take(PassId(2)));
        // The pass began before its skip was requested.
        skips.add(PassId(2));
        assert!(!skips.take(PassId(3)) && skips.0.borrow().is_empty());
    }
}
