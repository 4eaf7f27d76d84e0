//! Executors, which run passes: a device's own thread, or other processes.

pub mod device_thread;
pub mod process;

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vramq_core::action::PassOrder;
use vramq_core::device::{Memory, PassError};
use vramq_core::event::{OnDevice, PassResult};
use vramq_core::ids::PassId;
use vramq_core::settings::ExecutorFacts;
use vramq_schemas::Output;

use crate::device::Device;
use crate::device::lock::DeviceLockGuard;
use crate::engine::Item;
use crate::failpoint;
use crate::model::Model;
use crate::progress::ProgressSink;

/// Runs passes of the models that it is responsible for.
pub trait Executor: Send + Sync + fmt::Debug {
    /// The facts by which the core decides.
    fn facts(&self) -> ExecutorFacts;

    /// Accepts a pass. Calls `on_end` from any thread when the pass has ended. Does not block.
    ///
    /// # Errors
    /// The end of a pass that cannot be accepted; `on_end` is not called.
    fn submit(&self, pass: Pass, on_end: OnEnd) -> Result<(), Box<CompletedPass>>;

    /// Shows which pass runs.
    fn active_pass(&self) -> &ActivePass;

    /// Ends a pass as soon as possible; outputs that are finished by then count. Does not block; `on_end` is called as usual. Ignores a pass
    /// that has ended.
    fn cancel(&self, pass: PassId);
}

/// A pass with all that its executor needs.
#[derive(Debug)]
pub struct Pass {
    pub order: PassOrder,
    pub model: Arc<Model>,
    /// In the order of `order.items`; for a health probe, the model's own probe items.
    pub items: Vec<Item>,
    /// The action of a failpoint on this pass, if one applies.
    pub failpoint: Option<failpoint::Action>,
    /// Receives progress reports on items from executors that have them.
    pub progress: ProgressSink,
}

/// A pass that has ended. The device is done with its memory.
#[derive(Debug)]
pub struct CompletedPass {
    pub pass: Pass,
    pub result: PassResult,
    /// The outputs in the order of the items; `None` for items without output.
    pub outputs: Vec<Option<Output>>,
    /// Failed passes of this executor so far.
    pub failures: u64,
    /// How long the executor had the pass on the device, waiting for other processes included.
    pub took: Duration,
    /// The device's memory after the pass.
    pub memory: Memory,
}

impl CompletedPass {
    /// A pass that did not run.
    pub fn without_running(pass: Pass, result: PassResult, memory: Memory) -> Self {
        let failures = pass.order.failures_known;
        Self { pass, result, outputs: Vec::new(), failures, took: Duration::ZERO, memory }
    }
}

/// Receives the end of a pass from the executor. Must not block for long.
pub type OnEnd = Box<dyn FnOnce(CompletedPass) + Send>;

/// Waits for the device lock. The wait may take as long as a pass of another process.
///
/// # Errors
/// The result of a pass that must not begin: it was cancelled, or the lock fails, for which no job is to blame.
async fn enter(
    device: &dyn Device,
    pass: &PassOrder,
    cancelled: impl Future<Output = ()>,
) -> Result<DeviceLockGuard, PassResult> {
    let lost = |error| PassResult::DeviceLostBefore(format!("wait for the device: {error}"));
    tokio::select! {
        biased;
        () = cancelled => Err(PassResult::Skipped),
        guard = device.lock().enter(pass.exclusive) => guard.map_err(lost),
    }
}

/// The end of a pass whose executor panicked. It counts as failed, so that its jobs end and its permit is returned.
fn panicked(who: &str, panic: &(dyn Any + Send)) -> PassError {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    PassError::Failed(format!("{who} panicked: {}", text.unwrap_or("no message")))
}

/// Shows which pass runs. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct ActivePass(Arc<Mutex<Activity>>);

#[derive(Debug, Default)]
struct Activity {
    running: Option<OnDevice>,
    /// The pass in which the device was lost.
    lost_in: Option<PassId>,
}

impl ActivePass {
    /// The pass that runs, or the next one to run; possibly of an earlier session.
    pub fn now(&self) -> Option<OnDevice> {
        self.activity().running
    }

    /// The pass in which the device was lost, or in which it may be stuck.
    pub fn culprit(&self) -> Option<PassId> {
        let activity = self.activity();
        let running = activity.running.filter(|pass| !pass.waits).map(|pass| pass.pass);
        activity.lost_in.or(running)
    }

    /// How long the pass has been running; nothing while none does.
    pub fn busy_for(&self) -> Duration {
        self.now().filter(|pass| !pass.waits).map_or(Duration::ZERO, |pass| pass.since.elapsed())
    }

    /// A pass is next, and waits for the device lock of other processes.
    pub fn set_waiting(&self, pass: PassId) {
        self.activity().running = Some(OnDevice { pass, since: Instant::now(), waits: true });
    }

    /// The pass has the device and runs from now on.
    pub fn set_running(&self) {
        if let Some(pass) = &mut self.activity().running {
            (pass.since, pass.waits) = (Instant::now(), false);
        }
    }

    /// The pass has ended. `lost`: whether the device was lost in it.
    pub fn clear(&self, lost: bool) {
        let mut activity = self.activity();
        let ended = activity.running.take();
        if lost {
            activity.lost_in = ended.filter(|pass| !pass.waits).map(|pass| pass.pass);
        }
    }

    /// Nothing panics while it holds the lock.
    fn activity(&self) -> MutexGuard<'_, Activity> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_a_failed_pass_with_its_message() {
        let messages: [Box<dyn Any + Send>; 3] = [Box::new("a"), Box::new("b".to_owned()), Box::new(1)];
        let errors = messages.map(|panic| panicked("the engine", panic.as_ref()));
        let expected = ["a", "b", "no message"].map(|text| format!("the engine panicked: {text}"));
        assert_eq!(errors, expected.map(PassError::Failed));
    }

    #[test]
    fn a_pass_that_waits_for_the_device_lock_is_not_blamed_and_not_busy() {
        let active = ActivePass::default();
        active.set_waiting(PassId(1));
        assert!(active.now().is_some_and(|pass| pass.waits));
        assert_eq!((active.culprit(), active.busy_for()), (None, Duration::ZERO));
        active.set_running();
        assert_eq!(active.culprit(), Some(PassId(1)));
        active.clear(false);
        assert!(active.now().is_none() && active.culprit().is_none());
        active.set_waiting(PassId(2));
        active.set_running();
        active.clear(true);
        active.set_waiting(PassId(3));
        active.set_running();
        assert_eq!(active.culprit(), Some(PassId(2)), "the device was lost in it");
    }
}
