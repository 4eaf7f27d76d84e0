//! Decides what happens to a job whose pass ended without its outputs. The job's headers and the end of the pass come in; a [`JobOutcome`]
//! goes out. Pure.

use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::{Attempt, JobHeaders, MinimumRequirement, Reason};

use crate::action::Route;
use crate::device::OutOfMemory;
use crate::ids::{ItemIndex, JobKey};
use crate::observation::Cause;
use crate::rejection::Rejection;
use crate::units::{FreeMib, Mib};

/// How often a job waits for memory that other processes hold, before it is dead-lettered. With the waits of `backoff.rs` that is about
/// three minutes, enough for the short peak of another process.
pub(crate) const DELAYS_MAX: u32 = 8;

/// How often a job waits for a full queue, its caller's or that of the workers that are to run it, before it is dead-lettered:
/// about half an hour in all.
pub(crate) const WAITS_MAX: u32 = 64;

/// The decision about a job. All policies return one of these; `settling.rs` carries it out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum JobOutcome {
    /// All outputs are there: the last reply is published.
    Reply,
    /// It is tried again.
    Requeue(Requeue),
    /// The job ends without all its results. `headers`: its state, if it could be read.
    DeadLetter { headers: Option<Box<JobHeaders>>, rejection: Rejection },
    /// An earlier delivery was settled, but its ack did not reach the broker.
    AckOnly,
    /// Its caller withdrew it: it ends with a `failed` reply, and without a dead letter.
    Withdrawn,
}

/// What follows for a job from a pass that failed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AfterFailure {
    Decided(JobOutcome),
    /// Undecided: the job runs again on this worker, without the other jobs of the pass or with fewer items, to find out which job is at
    /// fault.
    RunAgainHere,
}

/// Another attempt of a job.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Requeue {
    pub(crate) route: Route,
    pub(crate) headers: Box<JobHeaders>,
    pub(crate) cause: Cause,
    /// What happens if the target queue does not take it; only for a job that is sent to other workers.
    pub(crate) otherwise: Option<Box<Otherwise>>,
}

/// What becomes of a job if the queue of the workers that are to run it does not take it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Otherwise {
    /// Why the job is dead-lettered if the queue does not exist.
    pub(crate) no_queue: Rejection,
    /// The outcome if the queue is full.
    pub(crate) full: JobOutcome,
}

impl Otherwise {
    /// For a job that is sent to the workers with this routing key. If their queue is full, the job comes back later with the headers
    /// `back`, one wait added, as if it had not been sent. `rejection`: why it is dead-lettered if the queue stays full.
    pub(crate) fn new(key: &str, no_queue: Rejection, back: &JobHeaders, rejection: Rejection) -> Box<Self> {
        let mut headers = back.clone();
        headers.waits = headers.waits.saturating_add(1);
        let full = if headers.waits > WAITS_MAX {
            let error = format!("{}; the queue of the key `{key}` stayed full", rejection.error);
            JobOutcome::dead_letter(headers, Rejection { error, ..rejection })
        } else {
            let turn = (headers.waits as usize - 1).min(DELAYS_MS.len() - 1);
            JobOutcome::requeue(headers, Route::Later(DELAYS_MS[turn]), Cause::TargetQueueFull)
        };
        Box::new(Self { no_queue, full })
    }
}

impl JobOutcome {
    pub(crate) fn dead_letter(headers: JobHeaders, rejection: Rejection) -> Self {
        Self::DeadLetter { headers: Some(Box::new(headers)), rejection }
    }

    /// A job that was not run. Its headers stay as its publisher wrote them, unless crashes were counted: then the dead letter names these.
    pub(crate) fn dead_letter_unrun(headers: JobHeaders, rejection: Rejection) -> Self {
        let headers = (headers.crashes > 0).then(|| Box::new(headers));
        Self::DeadLetter { headers, rejection }
    }

    /// Another attempt with these headers, by this route.
    pub(crate) fn requeue(headers: JobHeaders, route: Route, cause: Cause) -> Self {
        Self::Requeue(Requeue { route, headers: Box::new(headers), cause, otherwise: None })
    }

    /// The unfinished job is requeued as it stands, with no attempt counted.
    pub(crate) fn unfinished(headers: JobHeaders, cause: Cause) -> Self {
        Self::requeue(headers, Route::Now, cause)
    }

    /// After this was decided, a worker, device or process was lost with the job. Adds the crash to the headers of the next attempt.
    pub(crate) fn count_crash(&mut self, incident: &Attempt) {
        let Self::Requeue(Requeue { headers, otherwise, .. }) = self else { return };
        count_crash(headers, incident.clone());
        if let Some(otherwise) = otherwise {
            otherwise.full.count_crash(incident);
        }
    }

    /// Sets how many items are answered when this outcome takes effect.
    pub(crate) fn set_items_done(&mut self, items_done: u32) {
        match self {
            Self::Requeue(requeue) => {
                requeue.headers.items_done = items_done;
                if let Some(otherwise) = &mut requeue.otherwise {
                    otherwise.full.set_items_done(items_done);
                }
            }
            Self::DeadLetter { headers: Some(headers), .. } => headers.items_done = items_done,
            Self::DeadLetter { headers: None, .. } | Self::Reply | Self::AckOnly | Self::Withdrawn => {}
        }
    }
}

/// Adds a crash to the headers: a worker, device or process was lost with the job.
pub(crate) fn count_crash(headers: &mut JobHeaders, incident: Attempt) {
    headers.crashes = headers.crashes.saturating_add(1);
    headers.history.push(incident);
}

/// What a decision needs to know of the pass.
#[derive(Clone, Debug)]
pub(crate) struct PassFacts<'a> {
    pub(crate) worker: &'a str,
    pub(crate) device: &'a str,
    /// Unix time in milliseconds.
    pub(crate) at_ms: u64,
    pub(crate) items: u32,
    /// Cost of its longest item, if it is known. Headers have 0 if it is not.
    pub(crate) longest: Option<u32>,
    /// Jobs with items in it.
    pub(crate) jobs: usize,
    /// It held the whole device.
    pub(crate) exclusive: bool,
    /// Another pass of this worker was on the device at some time during it.
    pub(crate) overlapped: bool,
    /// Bytes that this process holds beyond what it held when its models were loaded. A new process would have them free.
    pub(crate) leaked: u64,
    /// Routing key of jobs for larger devices, if the model has one.
    pub(crate) larger: Option<&'a str>,
}

impl PassFacts<'_> {
    /// Whether no other pass can have caused this out-of-memory: neither one of this worker (`overlapped`) nor one of another process,
    /// which an exclusive pass keeps out.
    pub(crate) fn alone(&self, oom: &OutOfMemory) -> bool {
        self.exclusive || (!self.overlapped && oom.foreign == 0)
    }
}

/// A pass ran out of device memory. The job is halved down to one item, then runs that alone on the device, then waits for memory of other
/// processes, then is dead-lettered or sent to a larger device. The same size is never tried twice under the same conditions. `item`: the
/// index of the job's first item in the pass; `said`: a program's own message; `delay_ms`: how long the job would wait for memory.
pub(crate) fn after_out_of_memory(
    headers: &JobHeaders,
    item: ItemIndex,
    pass: &PassFacts<'_>,
    oom: &OutOfMemory,
    said: &str,
    delay_ms: u64,
) -> JobOutcome {
    let mut next = with_attempt(headers, item, pass, oom);
    if pass.items > 1 {
        next.batch_hint = Some(pass.items / 2);
        return JobOutcome::requeue(next, Route::Now, Cause::Smaller);
    }
    next.batch_hint = Some(1);
    if !pass.alone(oom) {
        next.exclusive = true;
        return JobOutcome::requeue(next, Route::Now, Cause::Exclusive);
    }
    // Temporary causes, none of them the job's fault: other processes hold what is missing, this process has leaked it, or the device
    // counts enough free memory (another process was faster, or the free memory is fragmented).
    let in_time = oom.free.saturating_add(oom.foreign).saturating_add(pass.leaked);
    if oom.asked <= in_time && next.delays < DELAYS_MAX {
        next.delays += 1;
        return JobOutcome::requeue(next, Route::Later(delay_ms), Cause::Delayed);
    }
    after_all_attempts(next, item, pass, oom, said)
}

/// The headers with one attempt more: a pass that ran out of memory.
fn with_attempt(
    headers: &JobHeaders,
    item: ItemIndex,
    pass: &PassFacts<'_>,
    oom: &OutOfMemory,
) -> JobHeaders {
    let mut next = headers.clone();
    next.delays = delays_before(headers, item);
    if headers.attempt == 0 {
        next.batch_hint_max = headers.batch_hint;
    }
    next.attempt = next.attempt.saturating_add(1);
    next.history.push(Attempt {
        at_ms: pass.at_ms,
        worker: pass.worker.to_owned(),
        device: pass.device.to_owned(),
        outcome: Reason::OutOfMemory.as_str().to_owned(),
        item: item.0,
        items: pass.items,
        longest: pass.longest.unwrap_or_default(),
        asked: oom.asked,
        free: oom.free,
        total: oom.total,
        foreign: oom.foreign,
        alone: pass.alone(oom),
    });
    next
}

/// An item does not fit this device even alone: the job goes to larger devices, if there are some, or ends as a dead letter.
fn after_all_attempts(
    mut next: JobHeaders,
    item: ItemIndex,
    pass: &PassFacts<'_>,
    oom: &OutOfMemory,
    said: &str,
) -> JobOutcome {
    let cost = pass.longest.unwrap_or_default();
    let requirement = MinimumRequirement { item: item.0, cost, needs_bytes: oom.asked };
    let rejection = Rejection {
        requirement: Some(requirement),
        ..Rejection::new(Reason::OutOfMemory, explanation(item, pass, oom, said))
    };
    let Some(key) = pass.larger else { return JobOutcome::dead_letter(next, rejection) };
    let otherwise = Otherwise::new(key, rejection.clone(), &next, rejection);
    // A size that did not fit here says nothing about a larger device.
    (next.batch_hint, next.exclusive, next.delays) = (next.batch_hint_max, false, 0);
    JobOutcome::Requeue(Requeue {
        route: Route::OtherWorkers(key.to_owned()),
        headers: Box::new(next),
        cause: Cause::Larger,
        otherwise: Some(otherwise),
    })
}

/// How often a job has waited for memory for the item with this index. Zero if the last out-of-memory was for an earlier item, which has
/// run since.
pub(crate) fn delays_before(headers: &JobHeaders, item: ItemIndex) -> u32 {
    // A crash since then was no attempt at an item.
    let is_another = headers.last_out_of_memory().is_some_and(|last| item.0 > last.item);
    if is_another { 0 } else { headers.delays }
}

/// The engine failed on a pass, and the device is well. Jobs that shared the pass run again separately. So only the caller of a job that
/// was alone gets the error, which may contain what a program printed during the pass.
pub(crate) fn after_failure(
    headers: &JobHeaders,
    pass: &PassFacts<'_>,
    reason: Reason,
    error: &str,
) -> AfterFailure {
    if pass.jobs > 1 {
        return AfterFailure::RunAgainHere;
    }
    AfterFailure::Decided(JobOutcome::dead_letter(headers.clone(), Rejection::new(reason, error)))
}

/// The engine says that an item of a pass can never be run. `invalid`: that item and the rejection of its job, if the engine named one. The
/// other jobs run again without it.
pub(crate) fn after_invalid_input(
    headers: &JobHeaders,
    pass: &PassFacts<'_>,
    job: JobKey,
    invalid: Option<(JobKey, ItemIndex)>,
    text: &str,
) -> AfterFailure {
    let Some((invalid, item)) = invalid else {
        return after_failure(headers, pass, Reason::InvalidInput, text);
    };
    if job != invalid {
        return AfterFailure::RunAgainHere;
    }
    let rejection = Rejection::new(Reason::InvalidInput, format!("inputs[{item}]: {text}"));
    AfterFailure::Decided(JobOutcome::dead_letter(headers.clone(), rejection))
}

/// Why an item does not fit even alone, for a person.
fn explanation(item: ItemIndex, pass: &PassFacts<'_>, oom: &OutOfMemory, said: &str) -> String {
    let OutOfMemory { asked, free, total, foreign } = *oom;
    let device = pass.device;
    let of_cost = pass.longest.map(|cost| format!(", of cost {cost},")).unwrap_or_default();
    let mut text = format!(
        "out of memory at batch 1: item {item}{of_cost} asked for {} alone on {device}, which has {} free of {}",
        Mib(asked),
        FreeMib(free),
        FreeMib(total)
    );
    if foreign > 0 {
        text += &format!("; other processes hold {}", Mib(foreign));
    }
    if asked <= free {
        // The device's count says that there is room, its allocator says no.
        text += ". The free memory is fragmented: restart the processes on this device";
    } else if asked <= free.saturating_add(foreign) {
        text += ". Without them it would have fitted, and they held it at every attempt: reduce their memory, or move some of them to another device";
    } else if asked <= free.saturating_add(foreign).saturating_add(pass.leaked) {
        text += &format!("; the worker itself has leaked {}: restart it", Mib(pass.leaked));
    } else {
        text += &format!(
            ". It needs a device with at least {} free beside the model's weights, or a shorter item",
            Mib(asked)
        );
    }
    if !said.is_empty() {
        text += &format!(". The program said: {said}");
    }
    text
}

#[cfg(test)]
#[path = "disposition_tests.rs"]
mod tests;
