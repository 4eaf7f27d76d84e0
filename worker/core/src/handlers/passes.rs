//! Passes: starts them while the device has room, and takes their outputs. `failed_passes.rs` decides
//! what a failed pass means for its jobs.

use std::time::Duration;

use vramq_schemas::Reason;

use crate::Core;
use crate::action::Action;
use crate::device::{Memory, PassError, work};
use crate::device_health::ProbeResult;
use crate::disposition::JobOutcome;
use crate::event::{Delivery, OutputSize, PassEnd, PassResult};
use crate::handlers::health::Blame;
use crate::ids::{JobKey, ModelIndex};
use crate::jobs::ReplyExcess;
use crate::observation::{Observation, PassOutcome};
use crate::rejection::Rejection;
use crate::scheduling::{InFlight, PassJob, StartedPass};
use crate::units::Mib;

impl Core {
    /// No other event waits. Sends acks and starts passes for the whole burst of events before.
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
            if let Some(outcome) = self.outcome_of_expired(job) {
                self.dead_letter(job, outcome);
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

    /// The outcome of a job that has not started and whose expiration has passed; `None` for others.
    fn outcome_of_expired(&self, job: JobKey) -> Option<JobOutcome> {
        let running = self.jobs.running(job)?;
        let is_expired = !running.has_started() && running.received.is_expired(self.now.at);
        is_expired.then(|| JobOutcome::dead_letter_unrun(running.headers.clone(), running.received.expired()))
    }

    fn was_blocked(&mut self, lasted: Option<Duration>) {
        if let Some(lasted) = lasted {
            self.observe(Observation::BlockedOnMemory { lasted });
        }
    }

    /// Starts the wanted health probe, when its executor runs nothing else. False if no other pass may start now: other passes would take
    /// the memory that the probe waits for.
    fn send_probe(&mut self) -> bool {
        let Some(index) = self.health.wanted_probe() else { return true };
        let model = &self.models[index.0];
        let is_alone = self.health.is_unclear();
        let others =
            if is_alone { self.scheduler.passes() } else { self.scheduler.passes_on(model.executor) };
        if others > 0 {
            return !is_alone;
        }
        // A pass from a lost session may hold the memory.
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
            if let Some(waited) = running.enter_pass(now) {
                self.observe(Observation::FirstPass { model, caller, waited });
            }
        }
        self.memory.pass_made();
        let started = self.scheduler.start(pass, &self.models[model.0], jobs, now);
        let StartedPass { order, bytes, blocked } = started;
        self.was_blocked(blocked);
        self.observe(Observation::Admitted { bytes });
        self.act(Action::Run(order));
        unprepared.into_iter().for_each(|job| self.prepare_more(job));
    }

    /// A pass has ended: frees its memory, and does what its result means for its jobs.
    pub(crate) fn pass_ended(&mut self, end: PassEnd) {
        let PassEnd { pass, result, outputs, failures, took, memory } = end;
        let ended = self.scheduler.end_pass(pass, &self.models, failures, took, self.now.at);
        let Some((pass, is_ours)) = ended else { return };
        self.observe(Observation::DeviceBusy { took });
        if !is_ours {
            // Its jobs are gone with their session, and are redelivered.
            return;
        }
        if pass.is_probe() {
            return self.probe_result(pass.model, &result);
        }
        self.take_outputs(&pass, &outputs);
        if let Some(outcome) = outcome_of(&result) {
            self.count(&pass, outcome, took, &outputs);
        }
        self.apply_result(pass, result, &outputs, took, memory);
    }

    /// Does what the result of a pass means for its jobs and for later passes.
    fn apply_result(
        &mut self,
        pass: InFlight,
        result: PassResult,
        outputs: &[Option<OutputSize>],
        took: Duration,
        memory: Memory,
    ) {
        let (jobs, model) = (pass.jobs(), pass.model);
        match result {
            PassResult::Done => self.pass_fitted(&pass, took, memory),
            PassResult::Skipped => {
                self.scheduler.failed(&self.models[model.0]);
                self.put_back(pass, outputs, false);
            }
            PassResult::Cancelled => self.put_back(pass, outputs, false),
            PassResult::Failed(PassError::DeviceLost(error)) => {
                return self.device_lost(&error, Blame::Jobs(jobs));
            }
            PassResult::DeviceLostBefore(error) => return self.device_lost(&error, Blame::Nobody),
            PassResult::Unavailable(why) => return self.model_unavailable(pass, outputs, &why),
            PassResult::Failed(error) => {
                self.scheduler.failed(&self.models[model.0]);
                self.pass_failed(pass, outputs, &error, self.leaked(memory));
            }
        }
        // Advances jobs that were only waiting for this pass, and jobs that this pass completed although others failed.
        jobs.into_iter().for_each(|job| self.advance(job));
    }

    /// Looks for a leak, but only after a pass of the device's own thread. That thread runs one pass at a time, so no pass of this worker
    /// held device memory at the reading. A program's pass can end while the thread runs one.
    fn look_for_leak(&mut self, model: ModelIndex, memory: Memory) {
        if self.settings.executors[self.models[model.0].executor.0].is_serial {
            self.memory.look_for_leak(&self.settings.device, memory);
        }
    }

    /// Counts a pass that ran, and each caller's share of it. Items count only if they have an output and the pass ended well.
    fn count(
        &mut self,
        pass: &InFlight,
        outcome: PassOutcome,
        took: Duration,
        outputs: &[Option<OutputSize>],
    ) {
        let (model, cost) = (pass.model, pass.counted_cost());
        let outputs = if outcome == PassOutcome::Done { outputs } else { &[] };
        let items = outputs.iter().flatten().count();
        self.observe(Observation::PassEnded { model, outcome, took, items, cost });
        for share in pass.shares(outputs, took) {
            self.observe(Observation::PassShare(share));
        }
    }

    /// Records that a pass of the jobs has ended, and its outputs.
    fn take_outputs(&mut self, pass: &InFlight, outputs: &[Option<OutputSize>]) {
        let jobs = pass.jobs();
        for job in &jobs {
            if let Some(running) = self.jobs.running_mut(*job) {
                running.leave_pass();
            }
        }
        for ((job, index, _), size) in pass.items.iter().zip(outputs) {
            // Jobs that ended meanwhile are no longer here.
            if let (Some(size), Some(running)) = (size, self.jobs.running_mut(*job)) {
                running.set_output(*index, *size);
            }
        }
        jobs.into_iter().for_each(|job| self.check_reply_bytes(job));
    }

    /// Ends a job whose replies would exceed its model's limit; the outputs that fit are still published. Only now is it known how large a
    /// program's outputs are.
    fn check_reply_bytes(&mut self, job: JobKey) {
        let Some(running) = self.jobs.running(job) else { return };
        let Some(excess) = running.reply_excess() else { return };
        // Another attempt would compute again what has no room now.
        if running.is_given_up() || running.is_decided() && !running.is_to_be_requeued() {
            return;
        }
        let model = running.received.delivery.model;
        let rejection = replies_too_large(excess, self.models[model.0].reply_max);
        let outcome = JobOutcome::dead_letter(running.headers_of_end(), rejection);
        self.scheduler.remove(model, job);
        self.conclude_when_idle(job, outcome);
    }

    /// All items of a pass have outputs: learns from its time and memory.
    fn pass_fitted(&mut self, pass: &InFlight, took: Duration, memory: Memory) {
        let (index, shape) = (pass.model, pass.shape);
        let model = &self.models[index.0];
        self.credit[index.0].learn_speed(work(shape.cost, model.pass_cost_max), took);
        self.scheduler.learn_pace(index, shape.cost, model.pass_cost_max, took);
        self.look_for_leak(index, memory);
        if self.memory.learn_fit(&self.models[index.0], shape, self.now.unix_ms) {
            self.act(Action::SaveLimits);
        }
        let items = u32::try_from(pass.items.len()).unwrap_or(u32::MAX);
        for job in pass.jobs() {
            if let Some(running) = self.jobs.running_mut(job).filter(|running| running.is_of_bulk()) {
                running.add_device_time(pass.time_of(job, took));
            }
            if let Some(running) = self.jobs.running_mut(job).filter(|running| running.headers.attempt > 0) {
                running.grow_hint(items);
                let (hint, exclusive) = (running.hint(), running.is_exclusive());
                self.scheduler.relax(pass.model, job, hint, exclusive);
            }
            self.advance(job);
        }
    }

    /// Puts the items without output back to wait, if their jobs still continue here.
    pub(crate) fn put_back(&mut self, pass: InFlight, outputs: &[Option<OutputSize>], isolated: bool) {
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
        self.scheduler.put_back(pass.model, waiting, items);
    }

    /// No process can run a model: it cannot be loaded, or it failed repeatedly. Its jobs are requeued without counting an attempt, and
    /// none are consumed until the model is available again.
    fn model_unavailable(&mut self, pass: InFlight, outputs: &[Option<OutputSize>], why: &str) {
        let model = pass.model;
        if self.scheduler.is_available(model) {
            let name = &self.models[model.0].name;
            tracing::error!(
                model = name,
                error = why,
                "no process can run the model: not consuming its jobs until one can"
            );
            self.scheduler.set_available(model, false);
        }
        let jobs = pass.jobs();
        self.put_back(pass, outputs, false);
        let waiting = self.jobs.running_where(|_, running| running.received.delivery.model == model);
        for job in jobs.into_iter().chain(waiting) {
            self.requeue_unfinished(job);
        }
        self.adjust_consumers();
    }

    pub(crate) fn model_available(&mut self, model: ModelIndex) {
        if !self.scheduler.is_available(model) {
            tracing::info!(model = self.models[model.0].name, "a process can run the model again: consuming");
            self.scheduler.set_available(model, true);
            self.adjust_consumers();
            self.requeue_waiting();
        }
    }

    fn probe_result(&mut self, model: ModelIndex, result: &PassResult) {
        let result = match result {
            // Skipped because of an earlier failure that this session did not know of.
            PassResult::Skipped | PassResult::Cancelled => return self.health.put_probe_back(model),
            PassResult::Done => ProbeResult::Passed,
            PassResult::Failed(PassError::OutOfMemory { .. }) => ProbeResult::OutOfMemory,
            PassResult::DeviceLostBefore(error) => return self.device_lost(error, Blame::Nobody),
            PassResult::Failed(_) | PassResult::Unavailable(_) => ProbeResult::Failed,
        };
        self.probe_ended(model, result);
    }
}

/// What a pass of jobs counts as. `None`: it did not run, or the device is lost.
fn outcome_of(result: &PassResult) -> Option<PassOutcome> {
    match result {
        PassResult::Done => Some(PassOutcome::Done),
        PassResult::Cancelled => Some(PassOutcome::Cancelled),
        PassResult::Failed(PassError::OutOfMemory { .. }) => Some(PassOutcome::OutOfMemory),
        PassResult::Failed(PassError::DeviceLost(_))
        | PassResult::DeviceLostBefore(_)
        | PassResult::Skipped
        | PassResult::Unavailable(_) => None,
        PassResult::Failed(_) => Some(PassOutcome::Failed),
    }
}

fn replies_too_large(excess: ReplyExcess, reply_max: u64) -> Rejection {
    let ReplyExcess { item, bytes } = excess;
    let error = format!(
        "with the output of item {item} the replies take up to {}, the model's reply_mib_max allows {}. Publish the items as several \
         jobs, have the program answer less, or let it write large outputs to a store",
        Mib(bytes),
        Mib(reply_max),
    );
    Rejection::new(Reason::TooLarge, error)
}
