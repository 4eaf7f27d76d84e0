//! The loop's way to the device and back: admit passes, take their outputs home, decide what failed.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use vramq_schemas::Output;

use super::deliveries::waits;
use super::leaving::Blame;
use super::{Event, Loop, Outcome};
use crate::admission::Mib;
use crate::amqp::settle::{Burial, Verdict};
use crate::batcher::JobKey;
use crate::device::OutOfMemory;
use crate::device::thread::{PASSES_MAX, PassEnd, Ran};
use crate::disposition::{PassFacts, after_failure, after_out_of_memory};
use crate::drill::{self, Point};
use crate::engine::PassError;
use crate::health::Canary;
use crate::job::{Decoded, Leaving, Received, unix_ms};
use crate::metrics::PassOutcome;
use crate::pass::Pass;
use crate::refusal::Refusal;

/// How long passes that would fit without other processes wait for them, before the device decides. Slots follow the
/// memory within as much; then the jobs in hand should go where there is room.
const PATIENCE: Duration = Duration::from_secs(2);

impl Loop<'_> {
    /// Hands passes to the device while it has room and anything waits.
    pub(super) fn start_passes(&mut self) {
        if !self.host.health.is_well() || self.canary.is_some() {
            return self.send_canary();
        }
        if self.leaving {
            return;
        }
        // After a failure, or what was skipped because of one, nothing is made before all that was made in ignorance of it
        // has come back: its items go first.
        if self.passes > 0 && self.failed_since_idle {
            return;
        }
        self.failed_since_idle = false;
        while self.passes < PASSES_MAX {
            let oldest = |model: usize| self.batchers[model].oldest().map(|key| (key, model));
            let Some((key, model)) = (0..self.batchers.len()).filter_map(oldest).min() else {
                self.short_since = None;
                return self.unblocked();
            };
            if self.jobs.get(&key).is_some_and(|(_, job)| !job.has_started() && job.received.expired()) {
                self.batchers[model].remove(key);
                self.end(key, |_| Verdict::Bury(Box::new(Burial::of(Refusal::expired()))));
                continue;
            }
            // Behind a running pass only a full one is queued: another may still find company.
            if self.passes > 0 && !self.batchers[model].has_full_pass() {
                return;
            }
            let Some(pass) = self.admit(model) else {
                if self.passes == 0 {
                    self.blocked_since.get_or_insert_with(Instant::now);
                }
                return;
            };
            self.unblocked();
            self.submit(pass);
        }
    }

    /// Starts the canary that is asked for, when nothing else runs.
    fn send_canary(&mut self) {
        if self.passes > 0 {
            return;
        }
        let Some(index) = self.canary.take() else { return };
        self.canary_model = index;
        let model = Arc::clone(&self.host.models[index]);
        let bytes = model.engine.pass_bytes(model.canary.iter().collect());
        let budget = &self.host.budget;
        match budget.try_acquire(bytes).or_else(|| budget.try_acquire_all()) {
            Some(permit) => self.submit(Pass::canary(model, permit)),
            // A pass of a session that was lost still runs: later.
            None => self.canary = Some(index),
        }
    }

    /// Nothing waits for memory any more.
    fn unblocked(&mut self) {
        if let Some(since) = self.blocked_since.take() {
            self.host.meters.device.blocked_seconds.inc_by(since.elapsed().as_secs_f64());
        }
    }

    fn submit(&mut self, mut pass: Pass) {
        let jobs = pass.jobs();
        for key in &jobs {
            if let Some((_, job)) = self.jobs.get_mut(key) {
                if let Some(waited) = job.started() {
                    self.host.meters.models[pass.model.index].queued_seconds.observe(waited.as_secs_f64());
                }
                job.running += 1;
            }
        }
        let received = || jobs.iter().filter_map(|key| self.jobs.get(key)).map(|(_, job)| &job.received);
        pass.messages = received().map(|received| received.fingerprint).collect();
        pass.drill = drill::reach(Point::Pass, received().map(Received::id));
        self.passes += 1;
        self.idle_ticks = 0;
        self.host.meters.device.admitted_bytes.inc_by(pass.permit.bytes());
        let sender = self.sender.clone();
        let on_end = move |end| drop(sender.blocking_send(Event::PassEnded(end)));
        if let Err(end) = self.host.thread.submit(pass, self.host.failures_known, Box::new(on_end)) {
            let sender = self.sender.clone();
            tokio::spawn(async move { drop(sender.send(Event::PassEnded(*end)).await) });
        }
    }

    /// The next pass of a model with its permit, or nothing while the memory is in use.
    fn admit(&mut self, model: usize) -> Option<Pass> {
        let host = &*self.host;
        let (model, budget) = (&host.models[model], &host.budget);
        let batcher = &mut self.batchers[model.index];
        let (first, exclusive) = batcher.first()?;
        let first_bytes = model.engine.pass_bytes(first);
        // What others hold may come back within moments; until then it would only run out of memory.
        if first_bytes <= budget.limit() {
            self.short_since = None;
        } else if !exclusive && first_bytes <= host.budget_max() {
            let since = *self.short_since.get_or_insert_with(Instant::now);
            if since.elapsed() < PATIENCE {
                return None;
            }
        }
        // What is larger than the device, or waited in vain, gets all there is, and the device's own word on what is
        // missing.
        let (permit, room) = if exclusive || first_bytes > budget.limit() {
            (Some(budget.try_acquire_all()?), budget.limit())
        } else if first_bytes > budget.available() {
            return None;
        } else {
            (None, budget.available())
        };
        let draft = batcher.next_pass(|shape| {
            model.engine.pass_bytes(shape) <= room.min(host.ceilings.limit(&model.name, shape.longest))
        })?;
        let permit = match permit {
            Some(all) => all,
            // Nobody else takes from the budget, so what was available a moment ago still is.
            None => budget.try_acquire(model.engine.pass_bytes(draft.shape))?,
        };
        Some(Pass::new(Arc::clone(model), draft, permit))
    }

    pub(super) async fn pass_ended(&mut self, end: PassEnd) -> ControlFlow<Outcome> {
        let PassEnd { pass, result, failures, took, memory } = end;
        self.host.failures_known = failures;
        self.host.meters.device.busy_seconds.inc_by(took.as_secs_f64());
        if let Ran::Lost(error) = result {
            return self.device_lost(&error, Blame::Nobody).await;
        }
        if pass.is_canary() {
            if matches!(result, Ran::Skipped) {
                // For a failure that this session had not heard of.
                self.canary = Some(pass.model.index);
                return ControlFlow::Continue(());
            }
            let canary = match result {
                Ran::Done(_) => Canary::Lived,
                Ran::Failed(PassError::OutOfMemory(_)) => Canary::RanOut,
                _ => Canary::Died,
            };
            return self.canary_ended(&pass, canary).await;
        }
        let jobs = pass.jobs();
        for key in &jobs {
            if let Some((_, job)) = self.jobs.get_mut(key) {
                job.running = job.running.saturating_sub(1);
            }
        }
        match result {
            Ran::Skipped => {
                self.failed_since_idle = true;
                self.give_back(pass, false);
            }
            Ran::Done(outputs) => {
                self.count(&pass, PassOutcome::Done, took);
                self.host.meters.models[pass.model.index].items.inc_by(outputs.len() as u64);
                self.watch_leak(memory);
                self.taught_by(&pass, None);
                self.fill(&pass, outputs);
            }
            Ran::Failed(PassError::DeviceLost(error)) => {
                return self.device_lost(&error, Blame::Jobs(jobs)).await;
            }
            // Told above.
            Ran::Lost(_) => {}
            Ran::Failed(error) => {
                self.failed_since_idle = true;
                let ran_out = matches!(error, PassError::OutOfMemory(_));
                let outcome = if ran_out { PassOutcome::OutOfMemory } else { PassOutcome::Failed };
                self.count(&pass, outcome, took);
                let leaked = memory.own().saturating_sub(self.host.resident);
                self.pass_failed(pass, &error, leaked);
            }
        }
        // Those that were only waiting for this pass.
        let leaving = |key: &JobKey| self.jobs.get(key).is_some_and(|(_, job)| job.leaving.is_some());
        let leaving: Vec<_> = jobs.into_iter().filter(leaving).collect();
        leaving.into_iter().for_each(|key| self.advance(key));
        ControlFlow::Continue(())
    }

    fn count(&self, pass: &Pass, outcome: PassOutcome, took: Duration) {
        let meters = &self.host.meters.models[pass.model.index];
        meters.passes.inc(outcome);
        meters.pass_seconds.observe(took.as_secs_f64());
        meters.cost.inc_by(pass.shape.cost as u64);
    }

    /// Lets the ceilings learn, from what fitted and from what ran out of memory without anybody else's doing.
    fn taught_by(&mut self, pass: &Pass, ran_out: Option<(&OutOfMemory, bool)>) {
        let (name, longest) = (&pass.model.name, pass.shape.longest);
        let bytes = pass.model.engine.pass_bytes(pass.shape);
        match ran_out {
            None => self.host.ceilings.fitted(name, longest, bytes, unix_ms()),
            // One that had room by the device's own count says nothing about the size.
            Some((oom, true)) if oom.foreign == 0 && oom.asked > oom.free => {
                self.host.ceilings.ran_out(name, longest, bytes, unix_ms());
            }
            Some(_) => {}
        }
    }

    fn fill(&mut self, pass: &Pass, outputs: Vec<Output>) {
        for ((key, index), output) in pass.sources.iter().zip(outputs) {
            // Jobs that ended meanwhile are no longer here.
            if let Some((_, job)) = self.jobs.get_mut(key) {
                job.fill(*index, output);
            }
        }
        let items = u32::try_from(pass.items.len()).unwrap_or(u32::MAX);
        for key in pass.jobs() {
            if let Some((model, job)) = self.jobs.get_mut(&key).filter(|(_, job)| job.headers.attempt > 0) {
                job.fitted += 1;
                job.headers.fitted(items, job.fitted);
                self.batchers[*model].relax(key, job.headers.batch_hint);
            }
            self.advance(key);
        }
    }

    /// Puts the items of a pass that did not run back, those of jobs that still go on here.
    fn give_back(&mut self, pass: Pass, isolated: bool) {
        let mut shell = |key: JobKey| {
            let (_, job) =
                self.jobs.get_mut(&key).filter(|(_, job)| job.ending.is_none() && job.leaving.is_none())?;
            job.isolated |= isolated;
            Some(waits(key, job))
        };
        let jobs: Vec<_> = pass.jobs().into_iter().filter_map(&mut shell).collect();
        self.batchers[pass.model.index].give_back(jobs, pass.sources.into_iter().zip(pass.items));
    }

    fn pass_failed(&mut self, pass: Pass, error: &PassError, leaked: u64) {
        let jobs = pass.jobs();
        let identity = Arc::clone(&self.host.identity);
        let device = Arc::clone(&self.host.device);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let facts = PassFacts {
            worker: &identity.worker,
            device: device.name(),
            at_ms: unix_ms(),
            items: count(pass.items.len()),
            longest: count(pass.shape.longest),
            jobs: jobs.len(),
            exclusive: pass.exclusive,
            leaked,
            has_larger: pass.model.larger.is_some(),
        };
        match error {
            PassError::OutOfMemory(oom) => {
                self.taught_by(&pass, Some((oom, facts.alone(oom))));
                self.host.meters.models[pass.model.index].ran_out(oom, facts.alone(oom));
                warn_of(&pass, &facts, oom);
            }
            other => {
                let (model, items) = (&pass.model.name, facts.items);
                tracing::warn!(model, items, jobs = jobs.len(), error = %other, "pass failed");
            }
        }
        let mut undecided = false;
        for key in jobs {
            let undecided_yet =
                |job: &Decoded| job.ending.is_none() && job.leaving != Some(Leaving::Cancelled);
            let Some((_, job)) = self.jobs.get(&key).filter(|(_, job)| undecided_yet(job)) else {
                continue;
            };
            let item = pass.sources.iter().filter(|(job, _)| *job == key).map(|(_, item)| *item).min();
            let disposition = match error {
                PassError::OutOfMemory(oom) => {
                    Some(after_out_of_memory(&job.headers, item.unwrap_or(0), &facts, oom))
                }
                other => after_failure(&job.headers, &facts, &other.to_string()),
            };
            if let Some(disposition) = disposition {
                self.batchers[pass.model.index].remove(key);
                if matches!(error, PassError::OutOfMemory(_)) {
                    self.decided(key, disposition);
                } else {
                    self.accuse(key, pass.model.index, disposition);
                }
            } else {
                undecided = true;
            }
        }
        if undecided {
            self.give_back(pass, true);
        }
    }
}

/// The one line on an out-of-memory, with all that its cause can be found by.
fn warn_of(pass: &Pass, facts: &PassFacts<'_>, oom: &OutOfMemory) {
    let OutOfMemory { asked, free, total, foreign } = *oom;
    let (asked, free, total, foreign) = (Mib(asked), Mib(free), Mib(total), Mib(foreign));
    let (model, device, items, jobs) = (&pass.model.name, facts.device, facts.items, facts.jobs);
    let (longest, cost, alone) = (facts.longest, pass.shape.cost, facts.alone(oom));
    tracing::warn!(
        model, device, items, jobs, longest, cost, %asked, %free, %total, %foreign, alone,
        "out of memory"
    );
}
