//! A job whose items wait or run. Outputs and decisions come in; the job's next step goes out: a part, a requeue, or its end. Owns the
//! job's headers and progress.

mod ending;
mod passes;
mod preparation;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub(super) use ending::back_to;
use passes::Passes;
use preparation::Preparation;
use vramq_schemas::{Attempt, JobHeaders};

use super::progress::{FinishedItems, Progress, ReplyExcess};
use super::{PartInFlight, Received};
use crate::action::Run;
use crate::disposition::{self, JobOutcome};
use crate::event::{DecodedJob, OutputSize, Source};
use crate::ids::ItemIndex;
use crate::observation::Cause;
use crate::scheduling::Waiting;

/// A part is published once about this many bytes of a job are finished. That is large enough to make framing cheap, small enough to show
/// the caller progress every few hundred texts, and far below the largest body.
pub(crate) const PART_BYTES_MIN: usize = 1024 * 1024;

/// Once the last part is so old, a part is published for any finished item, so that the caller of a long job sees progress. The core looks
/// for such parts when a pass ends, and every second.
const PART_AFTER: Duration = Duration::from_secs(1);

/// Why a job takes part in no more passes here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// It is requeued unfinished.
    Requeued(Cause),
    /// An operator cancelled it.
    Cancelled,
    /// Its caller withdrew it.
    Withdrawn,
}

/// What a running job does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Nothing: a pass, a part, or the end of our consumers is waited for.
    Wait,
    /// It ends by the outcome that was decided.
    EndAsDecided,
    /// It ends for the reason for which it was stopped.
    End(StopReason),
    /// It is complete: its last reply goes out.
    Reply,
    /// A part of it goes out.
    PublishPart,
}

/// A job that was read. The scheduler has its items; this type knows which are finished.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) received: Received,
    pub(crate) headers: JobHeaders,
    progress: Progress,
    preparation: Preparation,
    passes: Passes,
    /// When the last part or, before it, the first pass was made.
    part_at: Instant,
    /// The most items of the job in a pass, after the disk had no room for more.
    items_max: Option<u32>,
    /// Whether it shares no pass with other jobs: because of crashes, or because a shared pass failed.
    is_isolated: bool,
    /// A health probe succeeded since the job was read.
    device_was_well: bool,
    stop_reason: Option<StopReason>,
    /// One part is published at a time. The end of the job waits for it.
    part: Option<PartInFlight>,
    /// The decided outcome. It waits for the part and the passes in flight.
    decision: Option<JobOutcome>,
}

impl Running {
    pub(super) fn new(received: Received, decoded: DecodedJob, reply_max: u64) -> Self {
        let headers = received.reached();
        let progress = Progress::new(decoded.items_total, headers.items_done, reply_max);
        let preparation = Preparation::new(decoded.items_total, headers.items_done, decoded.costs.len());
        let (part_at, is_isolated) = (received.at, received.runs_alone());
        Self {
            received,
            headers,
            progress,
            preparation,
            passes: Passes::default(),
            part_at,
            items_max: None,
            is_isolated,
            device_was_well: false,
            stop_reason: None,
            part: None,
            decision: None,
        }
    }

    /// The job as the batcher holds it, with prepared items given by index and cost.
    pub(crate) fn waiting(&self, items: VecDeque<(ItemIndex, usize)>) -> Waiting {
        Waiting {
            key: self.received.delivery.job,
            queue: self.received.queue,
            caller: self.received.delivery.caller.clone(),
            hint: self.hint(),
            exclusive: self.is_exclusive(),
            tried_at_ms: self.headers.history.first().map_or(0, |attempt| attempt.at_ms),
            isolated: self.is_isolated,
            items,
            more: self.has_unprepared(),
        }
    }

    /// The most items of a pass that this job joins.
    pub(crate) fn hint(&self) -> Option<u32> {
        [self.headers.batch_hint, self.items_max].into_iter().flatten().min()
    }

    /// Whether its passes need the device to themselves.
    pub(crate) fn is_exclusive(&self) -> bool {
        self.headers.exclusive || self.received.is_last_try()
    }

    /// The disk had no room for more items of it in a pass.
    pub(crate) fn limit_items(&mut self, items: u32) {
        self.items_max = Some(items.max(1));
    }

    /// Whether items of the job are still to be prepared.
    pub(crate) fn has_unprepared(&self) -> bool {
        self.preparation.has_more()
    }

    /// Whether more items are wanted: there are more, none are being prepared, and the job goes on here.
    pub(crate) fn wants_items(&self) -> bool {
        self.preparation.may_start() && self.goes_on()
    }

    /// Whether the job takes part in further passes here.
    pub(crate) fn goes_on(&self) -> bool {
        self.stop_reason.is_none() && self.decision.is_none()
    }

    pub(crate) fn start_preparing(&mut self) {
        self.preparation.start();
    }

    /// Records that `items` more are prepared. Returns the index of the first of them.
    pub(crate) fn prepared(&mut self, items: usize) -> u32 {
        self.preparation.end(items)
    }

    pub(crate) fn has_started(&self) -> bool {
        self.passes.first_at().is_some()
    }

    /// Records that a pass with items of the job was made. For the first such pass, returns how long the job had waited.
    pub(crate) fn enter_pass(&mut self, now: Instant) -> Option<Duration> {
        if !self.passes.enter(now) {
            return None;
        }
        self.part_at = now;
        Some(self.received.waited(now))
    }

    /// Records that a pass with items of the job has ended.
    pub(crate) fn leave_pass(&mut self) {
        self.passes.leave();
    }

    /// Stops waiting for passes that run.
    pub(crate) fn forget_passes(&mut self) {
        self.passes.forget();
    }

    pub(crate) fn is_in_a_pass(&self) -> bool {
        self.passes.are_in_flight()
    }

    pub(crate) fn is_of_bulk(&self) -> bool {
        matches!(self.received.delivery.source, Source::Bulk(_))
    }

    pub(crate) fn add_device_time(&mut self, time: Duration) {
        self.passes.add_device_time(time);
    }

    pub(crate) fn device_time(&self) -> Duration {
        self.passes.device_time()
    }

    /// A pass with so many items of the job fitted. A lowered batch hint may grow back.
    pub(crate) fn grow_hint(&mut self, items: u32) {
        let passes = self.passes.fitted();
        self.headers.fitted(items, passes);
    }

    pub(crate) fn isolate(&mut self) {
        self.is_isolated = true;
    }

    pub(crate) fn device_is_well(&mut self) {
        self.device_was_well = true;
    }

    /// Whether a device that is found to be sick after a pass of the job counts as a crash of the job. Outside the quarantine a crash can
    /// only quarantine it. From the quarantine a crash may dead-letter it, so the device must have been well before.
    pub(crate) fn is_charged_with_sickness(&self) -> bool {
        self.received.delivery.source != Source::Quarantine || self.device_was_well
    }

    pub(crate) fn set_output(&mut self, index: ItemIndex, size: OutputSize) {
        self.progress.set_output(index, size);
    }

    /// The first output for which the job's replies have no room.
    pub(crate) fn reply_excess(&self) -> Option<ReplyExcess> {
        self.progress.reply_excess()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.progress.is_complete()
    }

    /// Whether anything of the job was finished here.
    pub(crate) fn has_progress(&self) -> bool {
        self.progress.ready() > 0 || self.progress.items_done() > self.headers.items_done
    }

    pub(crate) fn items_done(&self) -> u32 {
        self.progress.items_done()
    }

    /// Items that are in no reply yet.
    pub(crate) fn items_left(&self) -> usize {
        self.progress.items_left()
    }

    pub(crate) fn out_of_order(&self) -> usize {
        self.progress.out_of_order()
    }

    /// Whether enough is finished for a part: by its size, or because the caller has seen nothing for a while.
    pub(crate) fn has_part(&self, now: Instant) -> bool {
        let is_overdue = now.saturating_duration_since(self.part_at) >= PART_AFTER;
        self.progress.ready_bytes() >= PART_BYTES_MIN || (self.progress.ready() > 0 && is_overdue)
    }

    /// Removes the finished items for a reply. `None` if there are none and more are to come.
    fn take_run(&mut self, now: Instant) -> Option<Run> {
        let FinishedItems { offset, items, bytes } = self.progress.take_ready();
        let is_last = self.progress.is_empty();
        let first_pass_at = self.passes.first_at().unwrap_or(self.received.at);
        self.part_at = now;
        (items > 0 || is_last).then(|| Run {
            offset,
            items,
            items_total: self.progress.items_total(),
            attempt: self.headers.attempt,
            queued: self.received.waited(first_pass_at),
            first_pass_at,
            is_last,
            bytes,
        })
    }

    /// Starts to publish a part. Returns its items.
    pub(crate) fn start_part(&mut self, now: Instant) -> Option<Run> {
        let run = self.take_run(now)?;
        self.part = Some(PartInFlight { run, tries: 0 });
        Some(run)
    }

    pub(crate) fn part_mut(&mut self) -> Option<&mut PartInFlight> {
        self.part.as_mut()
    }

    pub(crate) fn part_ended(&mut self) -> Option<PartInFlight> {
        self.part.take()
    }

    pub(crate) fn has_part_in_flight(&self) -> bool {
        self.part.is_some()
    }

    pub(crate) fn stop_reason(&self) -> Option<StopReason> {
        self.stop_reason
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.stop_reason == Some(StopReason::Withdrawn)
    }

    /// Whether nobody wants any more of its results: its caller withdrew it, or an operator cancelled it.
    pub(crate) fn is_given_up(&self) -> bool {
        matches!(self.stop_reason, Some(StopReason::Cancelled | StopReason::Withdrawn))
    }

    pub(crate) fn stop(&mut self, why: StopReason) {
        self.stop_reason = Some(why);
    }

    pub(crate) fn is_decided(&self) -> bool {
        self.decision.is_some()
    }

    /// Whether another attempt was decided.
    pub(crate) fn is_to_be_requeued(&self) -> bool {
        matches!(self.decision, Some(JobOutcome::Requeue(_)))
    }

    /// The headers with which the job would end now: those of the next attempt, if one was decided, with what happened in this one.
    pub(crate) fn headers_of_end(&self) -> JobHeaders {
        match &self.decision {
            Some(JobOutcome::Requeue(requeue)) => (*requeue.headers).clone(),
            _ => self.headers.clone(),
        }
    }

    /// Sets or clears the outcome that takes effect once the part and the passes in flight have ended.
    pub(crate) fn set_decision(&mut self, outcome: Option<JobOutcome>) {
        self.decision = outcome;
    }

    pub(crate) fn take_decision(&mut self) -> Option<JobOutcome> {
        self.decision.take()
    }

    /// The next step. `may_requeue`: whether an unfinished job may be requeued now.
    pub(crate) fn next_step(&self, may_requeue: bool, now: Instant) -> NextStep {
        if self.has_part_in_flight() {
            return NextStep::Wait;
        }
        let is_idle = !self.is_in_a_pass();
        if self.is_decided() {
            return if is_idle { NextStep::EndAsDecided } else { NextStep::Wait };
        }
        match self.stop_reason {
            Some(StopReason::Cancelled | StopReason::Withdrawn) if !is_idle => return NextStep::Wait,
            Some(why @ (StopReason::Cancelled | StopReason::Withdrawn)) => return NextStep::End(why),
            Some(why @ StopReason::Requeued(_)) if is_idle && !self.is_complete() => {
                return if may_requeue { NextStep::End(why) } else { NextStep::Wait };
            }
            // Items that its passes finish meanwhile are still published.
            Some(StopReason::Requeued(_)) | None => {}
        }
        if self.is_complete() {
            NextStep::Reply
        } else if self.has_part(now) {
            NextStep::PublishPart
        } else {
            NextStep::Wait
        }
    }

    /// A process or a device was lost, or found to be sick, while it ran the job. Counts one crash for each delivery: if several passes are
    /// lost in separate processes, they may have the same cause. A decision that waits for other passes has its own, earlier copy of the
    /// headers, which is updated too.
    pub(crate) fn count_crash(&mut self, incident: Attempt) {
        if self.headers.crashes > self.received.crashes() {
            return;
        }
        if let Some(decision) = &mut self.decision {
            decision.count_crash(&incident);
        }
        disposition::count_crash(&mut self.headers, incident);
    }
}
