//! Gives passes to their executors, and stores their outputs.

use std::sync::Arc;

use vramq_core::action::PassOrder;
use vramq_core::device::PassError;
use vramq_core::event::{Event, OutputSize, PassEnd, PassResult};
use vramq_core::ids::{ItemIndex, JobKey};
use vramq_schemas::{Encoding, Output};

use crate::engine::Item;
use crate::event_loop::EventLoop;
use crate::event_loop::completion::Completion;
use crate::executor::{CompletedPass, Pass};
use crate::failpoint::{self, Site};
use crate::progress::{Followed, ProgressSink};
use crate::wire_size::wire_bytes;

impl EventLoop {
    /// Gives a pass to its executor. Its end is reported in any case, because the core has admitted its memory.
    pub(crate) fn run(&mut self, order: PassOrder) {
        let model = Arc::clone(&self.context.models[order.model.0]);
        let executor = self.context.executor_of[order.model.0];
        let items = match order.items.is_empty() {
            true => Some(model.probe.clone()),
            false => self.take_items(&order),
        };
        let Some(items) = items else {
            tracing::error!(pass = %order.pass, "internal error: an item of the pass is missing; please report it");
            let error = PassError::Failed(
                "internal error: an item of the pass is missing; please report it".to_owned(),
            );
            let pass =
                Pass { order, model, items: Vec::new(), failpoint: None, progress: Default::default() };
            return self.did_not_run(pass, PassResult::Failed(error));
        };
        let progress = self.progress_sink(&order);
        let mut pass = Pass { order, model, items, failpoint: None, progress };
        if !self.has_open_session() {
            return self.did_not_run(pass, PassResult::Skipped);
        }
        let jobs = pass.order.items.iter().filter_map(|(job, _)| self.jobs.get(*job));
        pass.failpoint = failpoint::reach(Site::Pass, jobs.map(|job| job.summary.id.as_deref()));
        let completions = self.completions.clone();
        // An `Err` means that the process ends.
        let on_end = move |end| drop(completions.blocking_send(Completion::PassEnded(Box::new(end))));
        if let Err(end) = self.context.executors[executor.0].submit(pass, Box::new(on_end)) {
            self.pass_ended(*end);
        }
    }

    /// The receiver of progress reports for a pass: for the items whose jobs asked for progress.
    fn progress_sink(&self, order: &PassOrder) -> ProgressSink {
        let followed = |(job, item): &(JobKey, ItemIndex)| {
            let limit = self.jobs.payload(*job)?.progress.clone()?;
            Some(Followed { job: *job, item: *item, limit })
        };
        let items = order.items.iter().map(followed).collect();
        let completion = |job, progress| Completion::Progress { job, progress };
        ProgressSink::new(items, self.completions.clone(), completion)
    }

    /// Removes and returns the items of a pass, in its order. `None`, with nothing removed, if one is missing.
    fn take_items(&mut self, order: &PassOrder) -> Option<Vec<Item>> {
        let mut items = Vec::with_capacity(order.items.len());
        for (job, index) in &order.items {
            match self.jobs.payload_mut(*job).and_then(|payload| payload.take_item(*index)) {
                Some(item) => items.push(item),
                None => {
                    for ((job, index), item) in order.items.iter().zip(items) {
                        if let Some(payload) = self.jobs.payload_mut(*job) {
                            payload.put_item_back(*index, item);
                        }
                    }
                    return None;
                }
            }
        }
        Some(items)
    }

    fn did_not_run(&mut self, pass: Pass, result: PassResult) {
        let memory = self.context.device.memory();
        self.pass_ended(CompletedPass::without_running(pass, result, memory));
    }

    /// Stores the outputs of a pass, and puts items without output back. Adds the core's event to `ready`.
    pub(crate) fn pass_ended(&mut self, completed: CompletedPass) {
        let CompletedPass { pass, mut result, outputs, failures, took, memory } = completed;
        if let PassResult::Failed(PassError::OutOfMemory { oom, .. }) = &mut result {
            // The device counts the worker's own programs as other processes.
            oom.foreign = oom.foreign.saturating_sub(self.context.programs.needed(pass.order.model));
            // Frees memory before the next try.
            self.context.programs.trim();
        }
        let store = pass.model.outputs.as_deref();
        let size = |output: &Output, encoding: Encoding| {
            let bytes = wire_bytes(output, encoding);
            let stored = store.and_then(|store| store.bytes_in_reply(output));
            OutputSize { bytes, in_reply: stored.unwrap_or(bytes as u64) }
        };
        let (mut items, mut outputs) = (pass.items.into_iter(), outputs.into_iter());
        let mut sizes = Vec::with_capacity(pass.order.items.len());
        for (job, index) in &pass.order.items {
            let (item, output) = (items.next(), outputs.next().flatten());
            // Jobs that ended meanwhile are not here any more.
            let payload = self.jobs.payload_mut(*job);
            sizes.push(match (output, payload) {
                (Some(output), Some(payload)) => {
                    let size = size(&output, payload.encoding.unwrap_or_default());
                    payload.set_output(*index, output);
                    Some(size)
                }
                (Some(output), None) => Some(size(&output, Encoding::default())),
                (None, Some(payload)) => {
                    if let Some(item) = item {
                        payload.put_item_back(*index, item);
                    }
                    None
                }
                (None, None) => None,
            });
        }
        let pass = pass.order.pass;
        self.ready.push_back(Event::PassEnded(PassEnd {
            pass,
            result,
            outputs: sizes,
            failures,
            took,
            memory,
        }));
    }
}
