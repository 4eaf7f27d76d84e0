//! The loop's way to the device and back: admit passes, take their outputs home, decide what failed.

use std::ops::ControlFlow;
use std::sync::Arc;

use vramq_schemas::Output;

use super::{Event, Loop, Outcome};
use crate::amqp::message;
use crate::amqp::settle::Verdict;
use crate::device::thread::{PASSES_MAX, PassEnd};
use crate::disposition::{Disposition, PassFacts, after_failure, after_out_of_memory};
use crate::engine::PassError;
use crate::job::{expired, unix_ms};
use crate::pass::Pass;

impl Loop<'_> {
    /// Hands passes to the device while it has room and anything waits.
    pub(super) fn start_passes(&mut self) {
        while self.passes < PASSES_MAX {
            let oldest = |model: usize| self.batchers[model].oldest().map(|key| (key, model));
            let Some((key, model)) = (0..self.batchers.len()).filter_map(oldest).min() else {
                return;
            };
            if self.jobs.get(&key).is_some_and(|(_, job)| !job.has_started() && job.received.expired()) {
                self.batchers[model].remove(key);
                self.end(key, |_| Verdict::Bury(expired()));
                continue;
            }
            // Behind a running pass only a full one is queued: another may still find company.
            if self.passes > 0 && !self.batchers[model].has_full_pass() {
                return;
            }
            let Some(pass) = self.admit(model) else { return };
            for key in pass.jobs() {
                if let Some((_, job)) = self.jobs.get_mut(&key) {
                    job.started();
                }
            }
            self.passes += 1;
            let sender = self.sender.clone();
            let on_end = move |end| drop(sender.blocking_send(Event::PassEnded(end)));
            self.host.device.submit(pass, Box::new(on_end));
        }
    }

    /// The next pass of a model with its permit, or nothing while the memory is in use.
    fn admit(&mut self, model_index: usize) -> Option<Pass> {
        let model = &self.host.models[model_index];
        let budget = &self.host.budget;
        let batcher = &mut self.batchers[model_index];
        let (first, exclusive) = batcher.first()?;
        let first_bytes = model.engine.pass_bytes(first);
        // What is larger than the device gets all of it, and the device's own word on what is missing.
        let (permit, room) = if exclusive || first_bytes > budget.limit() {
            (Some(budget.try_acquire_all()?), budget.limit())
        } else if first_bytes > budget.available() {
            return None;
        } else {
            (None, budget.available())
        };
        let draft = batcher.next_pass(|shape| model.engine.pass_bytes(shape) <= room)?;
        let permit = match permit {
            Some(all) => all,
            // Nobody else takes from the budget, so what was available a moment ago still is.
            None => budget.try_acquire(model.engine.pass_bytes(draft.shape))?,
        };
        Some(Pass::new(Arc::clone(model), model_index, draft, permit))
    }

    pub(super) fn pass_ended(&mut self, PassEnd { pass, result }: PassEnd) -> ControlFlow<Outcome> {
        self.host.totals.passes += 1;
        self.host.totals.cost += pass.shape.cost as u64;
        match result {
            Ok(outputs) => self.fill(&pass, outputs),
            Err(PassError::DeviceLost(error)) => {
                tracing::error!(device = self.host.device_name, error, "device lost");
                return ControlFlow::Break(Outcome::DeviceLost(error));
            }
            Err(error) => self.pass_failed(pass, &error),
        }
        ControlFlow::Continue(())
    }

    fn fill(&mut self, pass: &Pass, outputs: Vec<Output>) {
        for ((key, index), output) in pass.sources.iter().zip(outputs) {
            // Jobs that ended meanwhile (another pass of theirs failed) are no longer here.
            let Some((_, job)) = self.jobs.get_mut(key) else {
                continue;
            };
            job.fill(*index, output);
            if job.is_complete()
                && let Some((model, job)) = self.jobs.remove(key)
            {
                self.finish(model, job, *key);
            }
        }
    }

    fn pass_failed(&mut self, pass: Pass, error: &PassError) {
        let jobs = pass.jobs();
        let identity = Arc::clone(&self.host.identity);
        let device = self.host.device_name.clone();
        let facts = PassFacts {
            worker: &identity.worker,
            device: &device,
            at_ms: unix_ms(),
            items: u32::try_from(pass.items.len()).unwrap_or(u32::MAX),
            longest: pass.shape.longest,
            jobs: jobs.len(),
            exclusive: pass.exclusive,
        };
        if let PassError::OutOfMemory(oom) = error {
            self.host.totals.out_of_memory += 1;
            let (model, items, longest) = (&pass.model.name, facts.items, facts.longest);
            let (asked, free, total) = (oom.asked, oom.free, oom.total);
            tracing::warn!(
                model,
                device,
                items,
                longest,
                asked,
                free,
                total,
                jobs = jobs.len(),
                "out of memory"
            );
        } else {
            tracing::warn!(model = pass.model.name, items = facts.items, jobs = jobs.len(), %error, "pass failed");
        }
        let mut isolate = Vec::new();
        for key in jobs {
            let Some((_, job)) = self.jobs.get(&key) else {
                continue;
            };
            let disposition = match error {
                PassError::OutOfMemory(oom) => after_out_of_memory(&job.headers, &facts, oom),
                other => after_failure(&facts, &other.to_string()),
            };
            match disposition {
                Disposition::Isolate => isolate.push(key),
                Disposition::Requeue(next) => {
                    self.batchers[pass.model_index].remove(key);
                    self.end(key, |job| {
                        Verdict::Requeue(Box::new(message::requeue(&job.received, &pass.model, &next)))
                    });
                }
                Disposition::DeadLetter(refusal) => {
                    self.batchers[pass.model_index].remove(key);
                    self.end(key, |_| Verdict::Bury(refusal));
                }
            }
        }
        if !isolate.is_empty() {
            self.batchers[pass.model_index].isolate(&isolate, pass.sources.into_iter().zip(pass.items));
        }
    }
}
