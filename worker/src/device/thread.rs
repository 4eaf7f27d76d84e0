//! The OS thread that owns a device: passes run on it one after the other, in the order in which they come.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use vramq_schemas::Output;

use crate::engine::PassError;
use crate::pass::Pass;

/// Passes that may be on the thread: one that runs, and one that is ready when it ends.
pub const PASSES_MAX: usize = 2;

/// A pass and what became of it. Its permit is still held: the memory is free only when this is dropped.
#[derive(Debug)]
pub struct PassEnd {
    pub pass: Pass,
    pub result: Result<Vec<Output>, PassError>,
}

/// Takes the end of a pass away from the device's thread; must not block for long.
pub type OnEnd = Box<dyn FnOnce(PassEnd) + Send>;

/// A handle to the thread. Dropping it ends the thread after the passes that it has.
#[derive(Debug)]
pub struct DeviceThread {
    commands: Option<SyncSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

struct Command {
    pass: Pass,
    span: tracing::Span,
    on_end: OnEnd,
}

impl DeviceThread {
    /// # Errors
    /// The system has no thread to give.
    pub fn spawn(device: &str) -> std::io::Result<Self> {
        // Twice: passes of a session that was lost may still be here when the next one starts its own.
        let (commands, receiver) = sync_channel(2 * PASSES_MAX);
        let thread =
            std::thread::Builder::new().name(format!("device {device}")).spawn(move || serve(&receiver))?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    /// Hands a pass over. The caller has at most [`PASSES_MAX`] of them there, so this does not block.
    pub fn submit(&self, pass: Pass, on_end: OnEnd) {
        let command = Command { pass, span: tracing::Span::current(), on_end };
        let Some(commands) = &self.commands else { return };
        if let Err(error) = commands.send(command) {
            // The thread catches panics of engines; if it is gone all the same, so is the device.
            let Command { pass, on_end, .. } = error.0;
            on_end(PassEnd { pass, result: Err(PassError::DeviceLost("its thread has ended".to_owned())) });
        }
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

fn serve(commands: &Receiver<Command>) {
    for Command { pass, span, on_end } in commands {
        let result = span.in_scope(|| run(&pass));
        on_end(PassEnd { pass, result });
    }
}

/// Runs a pass. A panic of an engine ends the pass, not the worker: engines hold no state that a pass changes.
fn run(pass: &Pass) -> Result<Vec<Output>, PassError> {
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
