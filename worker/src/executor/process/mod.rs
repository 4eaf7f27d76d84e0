//! Runs passes of process models: each pass in one of its model's processes, several at a time.

pub mod programs;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::watch;
use vramq_core::device::{OutOfMemory, PassError};
use vramq_core::event::PassResult;
use vramq_core::ids::PassId;
use vramq_core::settings::{ExecutorFacts, UNKNOWN_BYTES};
use vramq_inference::process::protocol::{FailureKind, OomReport};
use vramq_inference::process::{NotTaken, PassEnd, PassRequest, Pool};
use vramq_schemas::{Output, Params};

use super::{ActivePass, CompletedPass, Executor, OnEnd, Pass, enter, panicked};
use crate::device::Device;
use crate::engine::{Item, ProgramItem};
use crate::failpoint;
use programs::Programs;

/// The most bytes of a program's last output that go into a dead letter: enough for an error's traceback, but not for a log.
const STDERR_BYTES_MAX: usize = 2048;

/// The processes of one model, as an executor. They enforce their own time limits, so none of its passes is reported as stuck on the
/// device.
#[derive(Debug)]
pub struct ProcessExecutor {
    runner: Arc<Runner>,
    runtime: Handle,
    passes_max: usize,
    active: ActivePass,
    cancellations: Cancellations,
}

/// The passes that the executor has, each with the sender that cancels it.
#[derive(Clone, Debug, Default)]
struct Cancellations(Arc<Mutex<HashMap<PassId, watch::Sender<bool>>>>);

impl Cancellations {
    /// A pass begins. The receiver becomes true when the pass must be cancelled.
    fn begin(&self, pass: PassId) -> watch::Receiver<bool> {
        let (cancel, cancelled) = watch::channel(false);
        self.passes().insert(pass, cancel);
        cancelled
    }

    fn end(&self, pass: PassId) {
        self.passes().remove(&pass);
    }

    fn cancel(&self, pass: PassId) {
        if let Some(cancel) = self.passes().get(&pass) {
            cancel.send_replace(true);
        }
    }

    /// Nothing panics while it holds the lock.
    fn passes(&self) -> MutexGuard<'_, HashMap<PassId, watch::Sender<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Runner {
    pool: Arc<Pool>,
    device: Arc<dyn Device>,
    programs: Arc<Programs>,
    failures: AtomicU64,
}

impl ProcessExecutor {
    /// Must be called on the runtime that the pool was started on.
    pub fn new(pool: Arc<Pool>, device: Arc<dyn Device>, programs: Arc<Programs>) -> Self {
        let passes_max = pool.instances().max(1);
        let runner = Arc::new(Runner { pool, device, programs, failures: AtomicU64::new(0) });
        Self {
            runner,
            runtime: Handle::current(),
            passes_max,
            active: ActivePass::default(),
            cancellations: Cancellations::default(),
        }
    }
}

impl Executor for ProcessExecutor {
    fn facts(&self) -> ExecutorFacts {
        ExecutorFacts { passes_max: self.passes_max, is_serial: false }
    }

    fn submit(&self, pass: Pass, on_end: OnEnd) -> Result<(), Box<CompletedPass>> {
        let (runner, runtime, span) =
            (Arc::clone(&self.runner), self.runtime.clone(), tracing::Span::current());
        let (id, cancellations) = (pass.order.pass, self.cancellations.clone());
        let mut cancelled = cancellations.begin(id);
        // Uses a thread for the whole pass, because it may have to wait for the device lock.
        self.runtime.spawn_blocking(move || {
            let completed = span.in_scope(|| runner.run(pass, &runtime, &mut cancelled));
            cancellations.end(id);
            on_end(completed);
        });
        Ok(())
    }

    fn active_pass(&self) -> &ActivePass {
        &self.active
    }

    /// Ends a pass. A pass that waits for the device lock or for a process ends at once. A program that runs one is asked to stop, and gets
    /// SIGTERM if it does not: after `kill_s`, or after its model's load time if that is longer, but at the latest `kill_s` after the pass's own time limit.
    /// SIGKILL follows `kill_s` later.
    fn cancel(&self, pass: PassId) {
        self.cancellations.cancel(pass);
    }
}

impl Runner {
    /// Runs a pass. A panic fails the pass, because otherwise its end would not be reported and its permit not returned. Outputs of groups
    /// that ended before the panic are kept.
    fn run(&self, pass: Pass, runtime: &Handle, cancelled: &mut watch::Receiver<bool>) -> CompletedPass {
        let began = Instant::now();
        let mut outputs = vec![None; pass.items.len()];
        let run = || self.run_locked(&pass, runtime, &mut outputs, cancelled);
        let result = catch_unwind(AssertUnwindSafe(run))
            .unwrap_or_else(|panic| PassResult::Failed(panicked("the executor of programs", panic.as_ref())));
        if let PassResult::Failed(error) = &result {
            self.failures.fetch_add(1, Ordering::Relaxed);
            if matches!(error, PassError::OutOfMemory { .. }) {
                self.programs.trim();
            }
        }
        let failures = self.failures.load(Ordering::Relaxed);
        CompletedPass { pass, result, outputs, failures, took: began.elapsed(), memory: self.device.memory() }
    }

    /// Runs a pass under the device lock: shared with other passes, or exclusive.
    fn run_locked(
        &self,
        pass: &Pass,
        runtime: &Handle,
        outputs: &mut [Option<Output>],
        cancelled: &mut watch::Receiver<bool>,
    ) -> PassResult {
        if let Err(error) = failpoint::act(pass.failpoint) {
            return PassResult::Failed(PassError::Failed(error));
        }
        let _guard = match runtime.block_on(enter(&*self.device, &pass.order, asked(cancelled))) {
            Ok(guard) => guard,
            Err(result) => return result,
        };
        pass.progress.begin();
        runtime.block_on(self.run_groups(pass, outputs, cancelled))
    }

    /// Runs the items in groups with equal parameters, because a program gets one set of parameters for a run. All groups share the permit.
    /// A failed group does not affect the others; the first failure is the result.
    async fn run_groups(
        &self,
        pass: &Pass,
        outputs: &mut [Option<Output>],
        cancelled: &mut watch::Receiver<bool>,
    ) -> PassResult {
        let bytes = pass.model.engine.pass_bytes(pass.order.shape);
        let budget = (bytes != UNKNOWN_BYTES).then_some(bytes);
        if let Some(bytes) = budget {
            self.programs.make_room(&self.pool, bytes).await;
        }
        let mut result = PassResult::Done;
        for (params, places) in groups(&pass.items) {
            let items = places.iter().map(|(_, item)| item.item.clone()).collect();
            // A pass of unknown need has the permits of all.
            let exclusive = pass.order.exclusive || budget.is_none();
            let request = PassRequest { items, params: params.0.clone(), budget, exclusive, measure: false };
            let of_group = match self.pool.run(request) {
                Ok(handle) => {
                    let on_progress = |item: usize, fraction, note| {
                        if let Some((at, _)) = places.get(item) {
                            pass.progress.report(*at, fraction, note);
                        }
                    };
                    let (finished, end) = handle.finish_with(on_progress, asked(cancelled)).await;
                    for ((at, _), output) in places.iter().zip(finished) {
                        outputs[*at] = Some(output);
                    }
                    self.result(end, budget, &places)
                }
                Err(NotTaken::Unavailable(why)) => PassResult::Unavailable(why),
                Err(NotTaken::Closed | NotTaken::Full) => PassResult::Skipped,
                Err(error @ NotTaken::Items(_)) => PassResult::Failed(PassError::Failed(error.to_string())),
            };
            if matches!(result, PassResult::Done) {
                result = of_group;
            }
            if *cancelled.borrow() {
                return after_cancel(result, outputs);
            }
        }
        result
    }

    fn result(&self, end: PassEnd, budget: Option<u64>, places: &[(usize, &ProgramItem)]) -> PassResult {
        let error = match end {
            PassEnd::Done { .. } => return PassResult::Done,
            PassEnd::Cancelled { .. } => return PassResult::Skipped,
            PassEnd::NotRun { reason } => {
                let is_unavailable = self.pool.status().unavailable.is_some();
                return if is_unavailable { PassResult::Unavailable(reason) } else { PassResult::Skipped };
            }
            PassEnd::DiskFull { detail, .. } => PassError::DiskFull(detail),
            PassEnd::OutOfMemory { report, stderr, by_text, .. } => {
                let oom = self.out_of_memory(&report, budget);
                PassError::OutOfMemory { oom, said: said_of(&report, &stderr, places.len()), by_text }
            }
            PassEnd::Failed { kind: FailureKind::Device, detail, stderr, .. } => PassError::Crashed(
                with_stderr(format!("the process could not use the device any more: {detail}"), &stderr),
            ),
            // Without the program's printed output: it may be about other callers' items, and the program itself has named this item's
            // fault.
            PassEnd::Failed { kind: FailureKind::Input, item, detail, .. } => {
                PassError::InvalidInput { item: place_of(item, places), text: detail }
            }
            PassEnd::Failed { detail, stderr, item, .. } => {
                let text = with_stderr(format!("the model failed: {detail}"), &stderr);
                match place_of(item, places) {
                    Some(item) => PassError::FailedItem { item, text },
                    None => PassError::Failed(text),
                }
            }
            PassEnd::Protocol { fault, stderr } => PassError::Failed(with_stderr(fault, &stderr)),
            PassEnd::Crashed { death, stderr } => {
                PassError::Crashed(with_stderr(format!("the process {death}"), &stderr))
            }
            PassEnd::TimedOut { limit, stderr, .. } => {
                let text =
                    format!("the pass took longer than {} s (item_s for each item)", limit.as_secs_f64());
                PassError::TimedOut(with_stderr(text, &stderr))
            }
        };
        PassResult::Failed(error)
    }

    /// The program's report of an out-of-memory, completed with the device's figures.
    fn out_of_memory(&self, report: &OomReport, budget: Option<u64>) -> OutOfMemory {
        let memory = self.device.memory();
        let free = report.free.unwrap_or(memory.free);
        OutOfMemory {
            // If the program does not say how much it asked for: more than is free and than it was estimated to need. The device then
            // counts as too small.
            asked: report.asked.unwrap_or(free.max(budget.unwrap_or_default()).saturating_add(1)),
            free,
            total: report.total.unwrap_or(memory.total),
            foreign: memory.foreign,
        }
    }
}

/// Where in the pass an item of a program's run is: the one that the program names, or the only one.
fn place_of(item: Option<usize>, places: &[(usize, &ProgramItem)]) -> Option<usize> {
    let item = if places.len() == 1 { Some(0) } else { item };
    item.and_then(|item| places.get(item)).map(|(at, _)| *at)
}

/// A program's text about an out-of-memory. With several items its printed output is left out, because it may be about other callers'
/// items.
fn said_of(report: &OomReport, stderr: &str, items: usize) -> String {
    let OomReport { source, detail, .. } = report;
    let separator = if source.is_empty() || detail.is_empty() { "" } else { ": " };
    with_stderr(format!("{source}{separator}{detail}"), if items == 1 { stderr } else { "" })
}

/// Waits until the pass must be cancelled.
async fn asked(cancelled: &mut watch::Receiver<bool>) {
    let asked = cancelled.wait_for(|is_cancelled| *is_cancelled).await.is_ok();
    if !asked {
        // The sender is gone, so no cancellation can come.
        std::future::pending::<()>().await;
    }
}

/// The result of a pass whose cancellation was requested. It is cancelled if items are left; a pass that failed or was already complete
/// keeps its own result.
fn after_cancel(result: PassResult, outputs: &[Option<Output>]) -> PassResult {
    match result {
        PassResult::Done if outputs.iter().all(Option::is_some) => PassResult::Done,
        PassResult::Done | PassResult::Skipped => PassResult::Cancelled,
        result => result,
    }
}

/// The items of a pass grouped by parameters, with the index of each in the pass.
fn groups(items: &[Item]) -> Vec<(&Params, Vec<(usize, &ProgramItem)>)> {
    let mut groups: Vec<(&Params, Vec<(usize, &ProgramItem)>)> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        // This executor's model has only items of this kind.
        let Item::Program(item) = item else { continue };
        match groups.iter_mut().find(|(params, _)| **params == *item.params) {
            Some((_, group)) => group.push((at, item)),
            None => groups.push((&item.params, vec![(at, item)])),
        }
    }
    groups
}

/// A reason, followed by the program's last output.
fn with_stderr(reason: String, stderr: &str) -> String {
    let stderr = stderr.trim_end();
    if stderr.is_empty() {
        return reason;
    }
    let from = stderr.ceil_char_boundary(stderr.len().saturating_sub(STDERR_BYTES_MAX));
    format!("{reason}. The program printed last:\n{}", &stderr[from..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramq_inference::process::Item as ProcessItem;

    #[test]
    fn items_with_other_parameters_have_a_pass_of_their_own() {
        let item = |text: &str, width: u32| {
            let params = Params([("width".to_owned(), width.into())].into_iter().collect());
            let item = ProcessItem::Text(text.to_owned());
            Item::Program(Box::new(ProgramItem { item, params: Arc::new(params), cost: 1 }))
        };
        let items = [item("a", 1), item("b", 2), item("c", 1)];
        let places: Vec<Vec<usize>> =
            groups(&items).iter().map(|(_, group)| group.iter().map(|(at, _)| *at).collect()).collect();
        assert_eq!(places, [vec![0, 2], vec![1]]);
    }

    #[test]
    fn the_end_of_what_was_printed_is_kept() {
        assert_eq!(with_stderr("why".to_owned(), "\n"), "why");
        let long = format!("{}the cause", "\u{e4}".repeat(STDERR_BYTES_MAX));
        let text = with_stderr("why".to_owned(), &long);
        assert!(text.starts_with("why. ") && text.ends_with("the cause"));
        assert!(text.len() < STDERR_BYTES_MAX + 100);
    }
}
