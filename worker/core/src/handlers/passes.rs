//! Passes: start them while the device has room, take their outputs, and decide about jobs whose pass failed.

use std::time::Duration;

use vramq_schemas::Reason;
use vramq_schemas::headers::PROCESS_LOST;

use crate::Core;
use crate::action::Action;
use crate::backoff;
use crate::device::{OutOfMemory, PassError};
use crate::device_health::ProbeResult;
use crate::disposition::{
    JobOutcome, PassFacts, after_failure, after_invalid_input, after_out_of_memory, delays_before,
};
use crate::event::{Delivery, PassEnd, PassResult, Source};
use crate::handlers::health::Blame;
use crate::ids::{JobKey, ModelIndex};
use crate::jobs::StopReason;
use crate::observation::{Observation, PassOutcome};
use crate::rejection::Rejection;
use crate::scheduling::{InFlight, PassJob};
use crate::units::Mib;

impl Core {
    /// No other event waits: sends acks and starts passes, for all that came in a burst together.
    pub(crate) fn idle(&mut self) {
        self.send_acks();
        if self.session.is_active() {
            self.start_passes();
        }
    }

    /// Gives passes to the executors while the device has room and anything waits.
    fn start_passes(&mut self) {
        let may_start = self.send_probe() && !self.health.is_sick() && !self.health.is_unclear();
        if !may_start || self.lifecycle.requeues_all() {
            return;
        }
        self.scheduler.set_doubtful(!self.health.is_well());
        self.scheduler.begin_round();
        while let Some((turn, job)) = self.scheduler.next_turn(&self.models, self.now.at) {
            if self.has_expired(job) {
                self.dead_letter(job, None, Rejection::expired());
                continue;
            }
            let (model, budget_max) = (&self.models[turn.model.0], self.budget_max());
            let pass = self.scheduler.admit(turn, model, self.memory.limits(), budget_max, self.now.at);
            if let Some(pass) = pass {
                self.start_pass(*pass);
            }
        }
        let lasted = self.scheduler.end_round(self.now.at);
        self.was_blocked(lasted);
    }

    /// Whether a job that has not started yet waited past its expiration.
    fn has_expired(&self, job: JobKey) -> bool {
        let expired =
            self.jobs.running(job).map(|job| !job.has_started() && job.received.is_expired(self.now.at));
        expired.unwrap_or(false)
    }

    fn was_blocked(&mut self, lasted: Option<Duration>) {
        if let Some(lasted) = lasted {
            self.observe(Observation::BlockedOnMemory { lasted });
        }
    }

    /// Starts the health probe that is wanted, when its executor runs nothing else. Whether other passes may start then: none while
    /// the probe waits for memory, which they would take.
    fn send_probe(&mut self) -> bool {
        let Some(index) = self.health.wanted_probe() else { return true };
        let model = &self.models[index.0];
        let is_alone = self.health.is_unclear();
        let others =
            if is_alone { self.scheduler.passes() } else { self.scheduler.passes_on(model.executor) };
        if others > 0 {
            return !is_alone;
        }
        // It may be a pass of a session that was lost that holds the memory.
        let Some(pass) = self.scheduler.probe(index, model, self.now.at) else { return false };
        self.health.probe_started();
        self.start_pass(pass);
        true
    }

    fn start_pass(&mut self, pass: InFlight) {
        let (model, now) = (pass.model, self.now.at);
        let (mut jobs, mut unprepared) = (Vec::new(), Vec::new());
        for job in pass.jobs() {
            let Some(running) = self.jobs.running_mut(job) else { continue };
            let Delivery { fingerprint: message, caller, .. } = &running.received.delivery;
            let (message, caller) = (*message, caller.clone());
            jobs.push(PassJob { key: job, message, caller: caller.clone() });
            if running.wants_items() {
                unprepared.push(job);
            }
            if let Some(waited) = running.pass_made(now) {
                self.observe(Observation::FirstPass { model, caller, waited });
            }
        }
        self.memory.pass_made();
        let (order, bytes, blocked) = self.scheduler.start(pass, &self.models[model.0], jobs, now);
        self.was_blocked(blocked);
        self.observe(Observation::Admitted { bytes });
        self.act(Action::Run(order));
        unprepared.into_iter().for_each(|job| self.prepare_more(job));
    }

    pub(crate) fn pass_ended(&mut self, end: PassEnd) {
        let PassEnd { pass, result, outputs, failures, took, memory } = end;
        let ended = self.scheduler.ended(pass, &self.models, failures, took, self.now.at);
        let Some((pass, is_ours)) = ended else { return };
        self.observe(Observation::DeviceBusy { took });
        if !is_ours {
            // Its jobs went with their session. They are redelivered.
            return;
        }
        if let PassResult::Lost(error) = result {
            return self.device_lost(&error, Blame::Nobody);
        }
        if pass.is_probe() {
            return self.probe_result(pass.model, &result);
        }
        let jobs = pass.jobs();
        for job in &jobs {
            if let Some(running) = self.jobs.running_mut(*job) {
                running.pass_ended();
            }
        }
        self.take_outputs(&pass, &outputs);
        let model = pass.model;
        match result {
            PassResult::Skipped => {
                self.scheduler.failed(&self.models[model.0]);
                self.give_back(pass, &outputs, false);
            }
            PassResult::Cancelled => {
                self.count(&pass, PassOutcome::Cancelled, took, &outputs);
                self.give_back(pass, &outputs, false);
            }
            PassResult::Done => {
                self.count(&pass, PassOutcome::Done, took, &outputs);
                self.credit[model.0].pass_ended(pass.shape.cost, took);
                let cost_max = self.models[model.0].pass_cost_max;
                self.scheduler.pass_fitted(model, pass.shape.cost, cost_max, took);
                self.memory.look_for_leak(&self.settings.device, memory);
                if self.memory.pass_fitted(&self.models[model.0], pass.shape, self.now.unix_ms) {
                    self.act(Action::SaveLimits);
                }
                self.pass_fitted(&pass, took);
            }
            PassResult::Failed(PassError::DeviceLost(error)) => {
                return self.device_lost(&error, Blame::Jobs(jobs));
            }
            PassResult::Unavailable(why) => return self.model_unavailable(pass, &outputs, &why),
            // Handled above.
            PassResult::Lost(_) => {}
            PassResult::Failed(error) => {
                self.scheduler.failed(&self.models[model.0]);
                let ran_out = matches!(error, PassError::OutOfMemory(_));
                let outcome = if ran_out { PassOutcome::OutOfMemory } else { PassOutcome::Failed };
                self.count(&pass, outcome, took, &outputs);
                self.pass_failed(pass, &outputs, &error, self.leaked(memory));
            }
        }
        // Jobs that were only waiting for this pass.
        for job in jobs {
            if self
                .jobs
                .running(job)
                .is_some_and(|running| running.stop_reason().is_some() || running.is_decided())
            {
                self.advance(job);
            }
        }
    }

    /// Counts a pass that ran, and what each caller had of it. Items count that are there after a pass that ended well.
    fn count(&mut self, pass: &InFlight, outcome: PassOutcome, took: Duration, outputs: &[Option<usize>]) {
        let (model, cost) = (pass.model, pass.shape.cost);
        let outputs = if outcome == PassOutcome::Done { outputs } else { &[] };
        let items = outputs.iter().flatten().count();
        self.observe(Observation::PassEnded { model, outcome, took, items, cost });
        for share in pass.shares(outputs, took) {
            self.observe(Observation::PassShare(share));
        }
    }

    /// Takes note of the outputs that are there.
    fn take_outputs(&mut self, pass: &InFlight, outputs: &[Option<usize>]) {
        for ((job, index, _), bytes) in pass.items.iter().zip(outputs) {
            // Jobs that ended meanwhile are no longer here.
            if let (Some(bytes), Some(running)) = (bytes, self.jobs.running_mut(*job)) {
                running.set_output(*index, *bytes);
            }
        }
    }

    fn pass_fitted(&mut self, pass: &InFlight, took: Duration) {
        let items = u32::try_from(pass.items.len()).unwrap_or(u32::MAX);
        for job in pass.jobs() {
            if let Some(running) = self.jobs.running_mut(job).filter(|running| running.is_of_bulk()) {
                running.add_device_time(pass.time_of(job, took));
            }
            if let Some(running) = self.jobs.running_mut(job).filter(|running| running.headers.attempt > 0) {
                running.pass_fitted(items);
                let hint = running.headers.batch_hint;
                self.scheduler.batcher_mut(pass.model).relax(job, hint);
            }
            self.advance(job);
        }
    }

    /// Puts the items of a pass that have no output back, those of jobs that still go on here.
    fn give_back(&mut self, pass: InFlight, outputs: &[Option<usize>], isolated: bool) {
        let mut waiting = Vec::new();
        for job in pass.jobs() {
            let running = self.jobs.running_mut(job);
            let Some(running) = running.filter(|job| !job.is_decided() && job.stop_reason().is_none()) else {
                continue;
            };
            if isolated {
                running.isolate();
            }
            waiting.push(running.waiting(Default::default()));
        }
        let has_output = |at: usize| outputs.get(at).is_some_and(Option::is_some);
        let items = pass.items.iter().enumerate().filter(|(at, _)| !has_output(*at)).map(|(_, item)| *item);
        self.scheduler.batcher_mut(pass.model).give_back(waiting, items);
    }

    fn pass_failed(&mut self, pass: InFlight, outputs: &[Option<usize>], error: &PassError, leaked: u64) {
        let (jobs, model) = (pass.jobs(), &self.models[pass.model.0]);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (worker, device, larger) =
            (self.settings.worker.clone(), self.settings.device.clone(), model.larger.clone());
        let (name, is_probed) = (model.name.clone(), self.scheduler.is_probed(model));
        let facts = PassFacts {
            worker: &worker,
            device: &device,
            at_ms: self.now.unix_ms,
            items: count(pass.items.len()),
            longest: count(pass.shape.longest),
            jobs: jobs.len(),
            exclusive: pass.exclusive,
            overlapped: pass.overlapped,
            leaked,
            larger: larger.as_deref(),
            delay_ms: 0,
        };
        match error {
            PassError::OutOfMemory(oom) => self.ran_out(&pass, &facts, oom),
            other => {
                let (items, jobs) = (facts.items, jobs.len());
                tracing::warn!(model = name, items, jobs, error = %other, "pass failed");
            }
        }
        let invalid = invalid_item(&pass, outputs, error);
        let mut is_undecided = false;
        for job in jobs {
            if !lacks_output(&pass, outputs, job) {
                // The failure came after the job's items were finished.
                self.advance(job);
                continue;
            }
            if let PassError::Crashed(text) = error {
                self.process_lost(job, text);
                continue;
            }
            let undecided = |job: &&crate::jobs::Running| {
                !job.is_decided() && matches!(job.stop_reason(), None | Some(StopReason::Requeued(_)))
            };
            let Some(running) = self.jobs.running(job).filter(undecided) else { continue };
            let outcome = match error {
                PassError::OutOfMemory(oom) => {
                    let items = pass.items.iter().filter(|(of, ..)| *of == job).map(|(_, item, _)| *item);
                    let item = items.min().unwrap_or(0);
                    let delays = delays_before(&running.headers, item).saturating_add(1);
                    let delay_ms = backoff::for_memory(delays, &mut self.random);
                    let facts = PassFacts { delay_ms, ..facts.clone() };
                    Some(after_out_of_memory(&running.headers, item, &facts, oom))
                }
                PassError::InvalidInput { text, .. } => {
                    after_invalid_input(&running.headers, &facts, job, invalid, text)
                }
                PassError::TimedOut(text) => after_failure(&running.headers, &facts, Reason::TimedOut, text),
                other => after_failure(&running.headers, &facts, Reason::EngineFailed, &other.to_string()),
            };
            let Some(outcome) = outcome else {
                is_undecided = true;
                continue;
            };
            self.scheduler.batcher_mut(pass.model).remove(job);
            if !is_probed || matches!(error, PassError::OutOfMemory(_) | PassError::InvalidInput { .. }) {
                self.decide(job, outcome);
            } else {
                self.health.suspect(job, pass.model, outcome);
            }
        }
        if is_undecided {
            // Where nobody is named, each job runs again alone.
            self.give_back(pass, outputs, invalid.is_none());
        }
    }

    /// The process that ran a job died: it counts as if a worker had crashed, and the job is requeued. Its next delivery decides
    /// where it runs; a job that was alone is dead-lettered here, where the reason is known.
    fn process_lost(&mut self, job: JobKey, text: &str) {
        self.count_crash_as(job, PROCESS_LOST);
        let Some(running) = self.jobs.running(job).filter(|job| !job.is_decided()) else { return };
        let (headers, source) = (running.headers.clone(), running.received.delivery.source);
        if source == Source::Quarantine && headers.crashes >= self.settings.poison.crashes_max {
            let crashes = headers.crashes;
            let error = format!(
                "{crashes} processes or workers died while they held this job, the last ones while it ran alone: the job is \
                 probably the cause. The last time {text}"
            );
            self.scheduler.batcher_mut(running.received.delivery.model).remove(job);
            let mut headers = headers;
            headers.crashes = self.redelivery.crashes_of_dead_letter();
            return self
                .decide(job, JobOutcome::dead_letter(headers, Rejection::new(Reason::Crashed, error)));
        }
        self.requeue_unfinished(job);
    }

    /// A model cannot be loaded: its jobs are requeued, with no attempt counted, and none are consumed until it can.
    fn model_unavailable(&mut self, pass: InFlight, outputs: &[Option<usize>], why: &str) {
        let model = pass.model;
        if self.scheduler.is_available(model) {
            let name = &self.models[model.0].name;
            tracing::error!(model = name, error = why, "the model cannot be loaded: not consuming its jobs");
            self.scheduler.set_available(model, false);
        }
        let jobs = pass.jobs();
        self.give_back(pass, outputs, false);
        let waiting = self.jobs.running_where(|_, running| running.received.delivery.model == model);
        for job in jobs.into_iter().chain(waiting) {
            self.requeue_unfinished(job);
        }
        self.adjust_consumers();
    }

    pub(crate) fn model_available(&mut self, model: ModelIndex) {
        if !self.scheduler.is_available(model) {
            tracing::info!(model = self.models[model.0].name, "the model can be loaded again: consuming");
            self.scheduler.set_available(model, true);
            self.adjust_consumers();
            self.requeue_waiting();
        }
    }

    /// A pass ran out of memory: logs one line with everything that is needed to find the cause, and updates the learned limits.
    fn ran_out(&mut self, pass: &InFlight, facts: &PassFacts<'_>, oom: &OutOfMemory) {
        let (model, alone) = (&self.models[pass.model.0], facts.alone(oom));
        let longest_item = pass.items.first().map(|(job, item, _)| (*job, *item));
        let of_longest =
            longest_item.and_then(|(job, item)| Some((&self.jobs.get(job)?.received().delivery, item)));
        let (job, trace_id) =
            of_longest.map_or((None, None), |(job, _)| (job.id.as_ref(), job.trace_id.as_ref()));
        let item = of_longest.map(|(_, item)| item);
        let OutOfMemory { asked, free, total, foreign } = *oom;
        let (asked, free, total, foreign) = (Mib(asked), Mib(free), Mib(total), Mib(foreign));
        let PassFacts { device, items, jobs, longest, .. } = facts;
        let (name, cost) = (&model.name, pass.shape.cost);
        tracing::warn!(
            model = name, device, items, jobs, longest, cost, job, item, trace_id, %asked, %free, %total, %foreign, alone,
            "out of memory"
        );
        if self.memory.pass_ran_out(model, pass.shape, oom, alone, self.now.unix_ms) {
            self.act(Action::SaveLimits);
        }
        self.observe(Observation::OutOfMemory { model: pass.model, oom: *oom, alone });
    }

    fn probe_result(&mut self, model: ModelIndex, result: &PassResult) {
        let result = match result {
            // Skipped for a failure that this session had not heard of.
            PassResult::Skipped | PassResult::Cancelled => return self.health.put_probe_back(model),
            PassResult::Done => ProbeResult::Passed,
            PassResult::Failed(PassError::OutOfMemory(_)) => ProbeResult::OutOfMemory,
            PassResult::Failed(_) | PassResult::Unavailable(_) | PassResult::Lost(_) => ProbeResult::Failed,
        };
        self.probe_ended(model, result);
    }
}

/// Whether an item of a job in a pass has no output.
fn lacks_output(pass: &InFlight, outputs: &[Option<usize>], job: JobKey) -> bool {
    let mut items = pass.items.iter().enumerate().filter(|(_, (of, ..))| *of == job);
    items.any(|(at, _)| outputs.get(at).is_none_or(Option::is_none))
}

/// The job and the item in it that an engine names as invalid. An item that has its output is not: it was valid.
fn invalid_item(pass: &InFlight, outputs: &[Option<usize>], error: &PassError) -> Option<(JobKey, u32)> {
    let PassError::InvalidInput { item: Some(at), .. } = error else { return None };
    let has_output = outputs.get(*at).is_some_and(Option::is_some);
    pass.items.get(*at).filter(|_| !has_output).map(|(job, item, _)| (*job, *item))
}
