//! Passes that failed: decides what happens to their jobs, and learns from passes that ran out of memory.

use vramq_schemas::headers::PROCESS_LOST;
use vramq_schemas::{JobHeaders, Reason};

use crate::Core;
use crate::action::Action;
use crate::backoff;
use crate::device::{Memory, OutOfMemory, PassError, told};
use crate::disposition::{
    AfterFailure, JobOutcome, PassFacts, after_failure, after_invalid_input, after_out_of_memory,
    delays_before,
};
use crate::event::{OutputSize, PassBytes};
use crate::ids::{ItemIndex, JobKey};
use crate::jobs::{Running, StopReason};
use crate::observation::{Cause, Observation};
use crate::rejection::Rejection;
use crate::scheduling::InFlight;
use crate::units::{FreeMib, Mib};

impl Core {
    /// A pass failed: decides about each of its jobs that lacks an output.
    pub(crate) fn pass_failed(
        &mut self,
        pass: InFlight,
        outputs: &[Option<OutputSize>],
        error: &PassError,
        leaked: u64,
    ) {
        let (jobs, model) = (pass.jobs(), &self.models[pass.model.0]);
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (worker, device, larger) =
            (self.settings.worker.clone(), self.settings.device.clone(), model.larger.clone());
        let name = model.name.clone();
        let facts = PassFacts {
            worker: &worker,
            device: &device,
            at_ms: self.now.unix_ms,
            items: count(pass.items.len()),
            longest: told(pass.shape.longest),
            jobs: jobs.len(),
            exclusive: pass.exclusive,
            overlapped: pass.overlapped,
            leaked,
            larger: larger.as_deref(),
        };
        match error {
            PassError::OutOfMemory { oom, said, by_text } => {
                self.ran_out(&pass, &facts, oom, said);
                if !by_text {
                    self.learn_from(&pass, &facts, oom);
                }
            }
            other => {
                let (items, jobs) = (facts.items, jobs.len());
                // As a text, which the log escapes: a caller's line end begins no line of the log.
                let error = other.to_string();
                tracing::warn!(model = name, items, jobs, error, "pass failed");
            }
        }
        let named = named_item(&pass, outputs, error);
        let mut is_undecided = false;
        for job in jobs {
            if !lacks_output(&pass, outputs, job) {
                // The failure came after the job's items were finished.
                self.advance(job);
            } else if let PassError::Crashed(text) = error {
                self.process_lost(job, text);
            } else {
                is_undecided |= !self.decide_after_failure(job, &pass, &facts, error, named);
            }
        }
        if is_undecided {
            // Unless one item is invalid, each job runs again alone.
            let is_isolated = named.is_none() || !matches!(error, PassError::InvalidInput { .. });
            self.put_back(pass, outputs, is_isolated);
        }
    }

    /// Decides about a job that lacks outputs of a failed pass, unless it was decided before. False if the job is to run again here,
    /// without the other jobs of the pass.
    fn decide_after_failure(
        &mut self,
        job: JobKey,
        pass: &InFlight,
        facts: &PassFacts<'_>,
        error: &PassError,
        named: Option<(JobKey, ItemIndex)>,
    ) -> bool {
        let undecided = |job: &&Running| {
            !job.is_decided() && matches!(job.stop_reason(), None | Some(StopReason::Requeued(_)))
        };
        let Some(running) = self.jobs.running(job).filter(undecided) else { return true };
        let headers = running.headers.clone();
        let outcome = match self.outcome_of_failure(job, &headers, pass, facts, error, named) {
            AfterFailure::Decided(outcome) => outcome,
            AfterFailure::RunAgainHere => return false,
        };
        self.scheduler.remove(pass.model, job);
        let is_probed = self.scheduler.is_probed(&self.models[pass.model.0]);
        if !is_probed || matches!(error, PassError::OutOfMemory { .. } | PassError::InvalidInput { .. }) {
            self.conclude_when_idle(job, outcome);
        } else {
            self.health.suspect(job, pass.model, outcome);
        }
        true
    }

    /// What follows for a job with these headers from its pass that failed.
    fn outcome_of_failure(
        &mut self,
        job: JobKey,
        headers: &JobHeaders,
        pass: &InFlight,
        facts: &PassFacts<'_>,
        error: &PassError,
        named: Option<(JobKey, ItemIndex)>,
    ) -> AfterFailure {
        match error {
            PassError::OutOfMemory { oom, said, .. } => {
                let items = pass.items.iter().filter(|(of, ..)| *of == job).map(|(_, item, _)| *item);
                let item = items.min().unwrap_or(ItemIndex(0));
                let delays = delays_before(headers, item).saturating_add(1);
                let delay_ms = backoff::for_memory(delays, &mut self.random);
                AfterFailure::Decided(after_out_of_memory(headers, item, facts, oom, said, delay_ms))
            }
            PassError::InvalidInput { text, .. } => after_invalid_input(headers, facts, job, named, text),
            // A disk that was too full for several jobs may have room for each alone, and for fewer items of one job.
            PassError::DiskFull(_) if facts.jobs > 1 => AfterFailure::RunAgainHere,
            PassError::DiskFull(_) if facts.items > 1 => {
                if let Some(running) = self.jobs.running_mut(job) {
                    running.limit_items(facts.items / 2);
                }
                AfterFailure::RunAgainHere
            }
            // A single item waits at the broker, so that it takes no slot from others. The disk may have room later, or another worker has
            // room.
            PassError::DiskFull(text) => {
                let rejection = Rejection::new(Reason::EngineFailed, text);
                let outcome = self.wait_for_room_or_store(headers.clone(), Cause::ScratchFull, rejection);
                AfterFailure::Decided(outcome)
            }
            PassError::TimedOut(text) => after_failure(headers, facts, Reason::TimedOut, text),
            other => {
                let text = match named.filter(|(of, _)| *of == job) {
                    Some((_, item)) => format!("inputs[{item}]: {other}"),
                    None => other.to_string(),
                };
                after_failure(headers, facts, Reason::EngineFailed, &text)
            }
        }
    }

    /// The process that ran a job died. That counts as a crash, and the job is requeued; its next delivery decides where it runs. A job
    /// that ran alone and has reached the crash limit is dead-lettered here, where the cause is known.
    fn process_lost(&mut self, job: JobKey, text: &str) {
        self.count_crash_as(job, PROCESS_LOST);
        let crashes_max = self.settings.poison.crashes_max;
        let Some(running) = self.jobs.running_mut(job).filter(|job| !job.is_decided()) else { return };
        let (headers, was_alone) = (running.headers.clone(), running.received.runs_alone());
        if was_alone && headers.crashes >= crashes_max {
            let crashes = headers.crashes;
            // If the dead letter is refused, the job is published again with these crashes, and must not run again.
            running.received.set_crashes(crashes);
            let model = running.received.delivery.model;
            let error = format!(
                "{crashes} processes or workers died while they held this job, the last ones while it ran alone: the job is \
                 probably the cause. The last time {text}"
            );
            self.scheduler.remove(model, job);
            let mut headers = headers;
            headers.crashes = self.redelivery.crashes_of_dead_letter();
            return self.conclude_when_idle(
                job,
                JobOutcome::dead_letter(headers, Rejection::new(Reason::Crashed, error)),
            );
        }
        self.requeue_unfinished(job);
    }

    /// A pass ran out of memory: logs one line with everything that is needed to find the cause, and asks for the memory that is left.
    fn ran_out(&mut self, pass: &InFlight, facts: &PassFacts<'_>, oom: &OutOfMemory, said: &str) {
        let (model, alone) = (&self.models[pass.model.0], facts.alone(oom));
        let longest_item = pass.items.first().map(|(job, item, _)| (*job, *item));
        let of_longest =
            longest_item.and_then(|(job, item)| Some((&self.jobs.get(job)?.received().delivery, item)));
        let (job, trace_id) =
            of_longest.map_or((None, None), |(job, _)| (job.id.as_ref(), job.trace_id.as_ref()));
        let item = of_longest.map(|(_, item)| item.0);
        let OutOfMemory { asked, free, total, foreign } = *oom;
        let (asked, free, total, foreign) = (Mib(asked), FreeMib(free), FreeMib(total), Mib(foreign));
        let PassFacts { device, items, jobs, longest, .. } = facts;
        let (name, cost) = (&model.name, told(pass.shape.cost));
        let said = Some(said).filter(|said| !said.is_empty());
        tracing::warn!(
            model = name, device, items, jobs, longest, cost, job, item, trace_id, %asked, %free, %total, %foreign, alone, said,
            "out of memory"
        );
        self.observe(Observation::OutOfMemory { model: pass.model, oom: *oom, alone });
        // The error's own figures do not tell what other passes held, and those of a program may be wrong.
        self.act(Action::ReadMemory);
    }

    /// Updates the learned limits after a pass ran out of memory.
    fn learn_from(&mut self, pass: &InFlight, facts: &PassFacts<'_>, oom: &OutOfMemory) {
        let (model, alone) = (&self.models[pass.model.0], facts.alone(oom));
        if self.memory.pass_ran_out(model, pass.shape, oom, alone, self.now.unix_ms) {
            self.act(Action::SaveLimits);
        }
    }

    /// The device's memory after a pass ran out of it. The next passes stay within it; otherwise each of them could run out of memory until
    /// the next second's reading. Only that one raises the budget. What programs hold is known with a delay, so the memory of a pass that
    /// has just ended may count twice here.
    pub(crate) fn memory_read(&mut self, memory: Memory, passes: PassBytes) {
        self.scheduler.lower_budget(passes.free_after(memory).saturating_sub(self.settings.reserve));
    }
}

/// Whether an item of a job in a pass has no output.
fn lacks_output(pass: &InFlight, outputs: &[Option<OutputSize>], job: JobKey) -> bool {
    let mut items = pass.items.iter().enumerate().filter(|(_, (of, ..))| *of == job);
    items.any(|(at, _)| outputs.get(at).is_none_or(Option::is_none))
}

/// The job and item index that an engine names; `None` if that item has an output and so was right.
fn named_item(
    pass: &InFlight,
    outputs: &[Option<OutputSize>],
    error: &PassError,
) -> Option<(JobKey, ItemIndex)> {
    let (PassError::InvalidInput { item: Some(at), .. } | PassError::FailedItem { item: at, .. }) = error
    else {
        return None;
    };
    let has_output = outputs.get(*at).is_some_and(Option::is_some);
    pass.items.get(*at).filter(|_| !has_output).map(|(job, item, _)| (*job, *item))
}

#[cfg(test)]
#[path = "failed_passes_tests.rs"]
mod tests;
