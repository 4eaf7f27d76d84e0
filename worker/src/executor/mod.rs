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

use crate::engine::Item;
use crate::failpoint;
use crate::model::Model;
use crate::progress::ProgressSink;

/// Runs passes of the models that it is responsible for.
pub trait Executor: Send + Sync + fmt::Debug {
    /// What decisions depend on.
    fn facts(&self) -> ExecutorFacts;

    /// Takes a pass and calls `on_end` when it has ended, from any thread. Does not block.
    ///
    /// # Errors
    /// The end of a pass that it cannot take; `on_end` is not called.
    fn submit(&self, pass: Pass, on_end: OnEnd) -> Result<(), Box<CompletedPass>>;

    /// Tells which pass runs.
    fn active_pass(&self) -> &ActivePass;

    /// Ends a pass that it has as soon as it can, because nobody needs the outputs any more. Does not block; `on_end` of the pass is
    /// called as for any other. A pass that has ended is ignored.
    fn cancel(&self, pass: PassId);
}

/// A pass with all that its executor needs.
#[derive(Debug)]
pub struct Pass {
    pub order: PassOrder,
    pub model: Arc<Model>,
    /// In the order of `order.items`; of a health probe the model's own.
    pub items: Vec<Item>,
    /// What a failpoint does to it.
    pub failpoint: Option<failpoint::Action>,
    /// Hears how far items are, from executors that know.
    pub progress: ProgressSink,
}

/// A pass that has ended. The device is done with its memory.
#[derive(Debug)]
pub struct CompletedPass {
    pub pass: Pass,
    pub result: PassResult,
    /// The output of each item of the pass, in its order, as far as there is one.
    pub outputs: Vec<Option<Output>>,
    /// Failed passes of this executor so far.
    pub failures: u64,
    /// How long the pass was with the device, waiting for other processes included.
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

/// Takes the end of a pass away from the executor; must not block for long.
pub type OnEnd = Box<dyn FnOnce(CompletedPass) + Send>;

/// How a pass ends whose executor panicked: as failed, so that its jobs end, and its permit comes back.
fn panicked(who: &str, panic: &(dyn Any + Send)) -> PassError {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    PassError::Failed(format!("{who} panicked: {}", text.unwrap_or("no message")))
}

/// Tells which pass runs. Clones tell the same.
#[derive(Clone, Debug, Default)]
pub struct ActivePass(Arc<Mutex<Activity>>);

#[derive(Debug, Default)]
struct Activity {
    running: Option<OnDevice>,
    /// The device was lost in it.
    lost_in: Option<PassId>,
}

impl ActivePass {
    /// The pass that runs, or that is the next to; it may be one of an earlier session.
    pub fn now(&self) -> Option<OnDevice> {
        self.activity().running
    }

    /// The pass that the device was lost in, or that it may be stuck in.
    pub fn culprit(&self) -> Option<PassId> {
        let activity = self.activity();
        let running = activity.running.filter(|pass| !pass.waits).map(|pass| pass.pass);
        activity.lost_in.or(running)
    }

    /// How long the pass has been running; nothing while none does.
    pub fn busy_for(&self) -> Duration {
        self.now().filter(|pass| !pass.waits).map_or(Duration::ZERO, |pass| pass.since.elapsed())
    }

    /// A pass is the next to run, and waits until other processes let it onto the device.
    pub fn set_waiting(&self, pass: PassId) {
        self.activity().running = Some(OnDevice { pass, since: Instant::now(), waits: true });
    }

    /// It runs from now on.
    pub fn set_running(&self) {
        if let Some(pass) = &mut self.activity().running {
            (pass.since, pass.waits) = (Instant::now(), false);
        }
    }

    /// It has ended; `lost` says whether it took the device with it.
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
