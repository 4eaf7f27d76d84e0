//! Faults put between a core and its world on purpose, so that tests can show that the invariants see them. Each makes the worker as
//! a whole behave as if its core had that fault.

use std::sync::Arc;

use vramq_core::action::{Action, Answer, Publication, Route};
use vramq_core::device::PassError;
use vramq_core::event::{Event, PassResult, PublishOutcome, Source};
use vramq_core::ids::{ConsumerId, Fingerprint, QueueIndex};
use vramq_core::observation::Observation;
use vramq_schemas::Reason;
use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::withdrawal::Digest;

use super::Shell;
use super::frames::id_of;
use crate::simulation::ledger::secret_of;

macro_rules! sabotages {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A fault of a worker.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Sabotage { $($(#[$doc])* $name,)* }

        impl Sabotage {
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

sabotages! {
    /// A job counts as answered when its reply is sent, not when it is confirmed.
    AckBeforeConfirm,
    /// A message that nobody takes counts as confirmed.
    ReturnTakenForConfirm,
    /// A message that a full queue refused counts as confirmed.
    NackTakenForConfirm,
    /// An ack covers all deliveries up to its own, also those that still run.
    MultipleOverGap,
    /// A job that the broker should dead-letter is neither rejected nor acknowledged.
    LostReject,
    /// A refused publication is never offered again.
    LostTimer,
    /// A pass's end does not reach the scheduler.
    LostPassEnd,
    /// A pass keeps its permit.
    LeakedPermit,
    /// A consumer that was stopped is not started again.
    PrefetchNotRestored,
    /// A consumer may be sent twice as many jobs as there are slots left.
    CreditAboveSlots,
    /// A consumer counts as ended while it still gets jobs.
    ConsumerEndedTooEarly,
    /// An exclusive pass shares the device.
    ExclusiveShared,
    /// A job that ran out of memory keeps its hint.
    HintNotLowered,
    /// A hint is lowered by one item only.
    HintLoweredByOne,
    /// A job that ran out of memory at one item does not ask for the device.
    ExclusiveForgotten,
    /// A job that waits for memory waits without limit.
    DelaysNotCounted,
    /// Another attempt starts from the first item.
    ItemsDoneNotMoved,
    /// Another attempt skips an item that was not answered.
    ItemsDoneTooFar,
    /// A part is left out.
    PartSkipped,
    /// A part begins where the last one began.
    PartRepeated,
    /// Every message looks like the one before.
    FingerprintsCollide,
    /// Nobody counts the workers that a job has killed.
    CrashesForgotten,
    /// One return of a job counts as if it had killed five workers.
    CrashCountedSeveralTimes,
    /// Quarantined jobs run among others.
    QuarantineShared,
    /// An out-of-memory counts as the engine's failure.
    OutOfMemoryTakenForFailure,
    /// A pass that was skipped counts as failed.
    SkipTakenForFailure,
    /// A drain does not wait for the jobs that are held.
    DrainDoesNotWait,
    /// An unreadable job is acknowledged without a dead letter.
    DeadLetterDropped,
    /// A requeued job is acknowledged without its new message.
    RequeueDropped,
    /// A withdrawal of a job that is held changes nothing.
    WithdrawalOfHeldJobIgnored,
    /// A withdrawal of a job that comes later is not remembered.
    WithdrawalNotRemembered,
    /// A withdrawal is believed whatever secret it shows.
    WithdrawalBelievedWithoutSecret,
    /// A withdrawn job's pass that the device has not begun runs anyway.
    WithdrawnPassNotSkipped,
    /// A withdrawn job is dead-lettered.
    WithdrawnJobDeadLettered,
    /// A withdrawn job is never settled.
    WithdrawnJobKept,
    /// The time of a job that is held for too long never comes.
    HungPassNotNoticed,
    /// A large job that is handed over counts an attempt.
    HandOverCharged,
    /// A large job that is handed over starts from the first item.
    HandOverFromTheStart,
    /// A large job that should make room goes back among the others.
    LargeJobKept,
    /// An attempt that ran out of memory is not written into the history.
    HistoryNotWritten,
    /// Waits between attempts do not grow.
    WaitsDoNotGrow,
    /// A dead letter asks for half of the memory that its job needs.
    NeedMisstated,
    /// A job's end is not counted.
    EndNotCounted,
    /// What a caller had of a pass counts twice.
    ShareCountedTwice,
    /// A learned limit is not saved.
    LimitNotSaved,
    /// An operator's command is not answered.
    AnswerLost,
    /// A consumer is asked for with a shorter time to hold jobs than the worker takes.
    HeldTooShort,
    /// A cancelled job counts as one that ended before.
    CancelMisreported,
}

/// Whether something still happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Happens,
    IsLost,
}

impl Shell {
    /// Tampers with an event before the core hears of it.
    pub(super) fn tamper_event(&mut self, event: &mut Event) -> Verdict {
        let Some(sabotage) = self.sabotage else { return Verdict::Happens };
        match (sabotage, event) {
            (
                Sabotage::ReturnTakenForConfirm,
                Event::Published { outcome: outcome @ PublishOutcome::Unroutable { .. }, .. },
            )
            | (
                Sabotage::NackTakenForConfirm,
                Event::Published { outcome: outcome @ PublishOutcome::Refused { .. }, .. },
            ) => {
                *outcome = PublishOutcome::Confirmed { messages: 1 };
            }
            (Sabotage::LostTimer, Event::Timer) => return Verdict::IsLost,
            (Sabotage::LostPassEnd, Event::PassEnded(end)) if end.pass.0.is_multiple_of(50) => {
                return Verdict::IsLost;
            }
            (Sabotage::LeakedPermit, Event::PassEnded(end)) if end.pass.0.is_multiple_of(50) => {
                std::mem::forget(self.budget.try_acquire(1));
            }
            (Sabotage::FingerprintsCollide, Event::Delivered(delivery)) => {
                delivery.fingerprint = Fingerprint(7);
            }
            (Sabotage::CrashesForgotten, Event::Delivered(delivery)) => {
                (delivery.redelivered, delivery.delivery_count) = (false, None);
            }
            (Sabotage::CrashCountedSeveralTimes, Event::Delivered(delivery)) if delivery.redelivered => {
                if let Some(headers) = &mut delivery.headers {
                    headers.crashes += 5;
                }
            }
            (Sabotage::QuarantineShared, Event::Delivered(delivery))
                if delivery.source == Source::Quarantine =>
            {
                delivery.source = Source::Jobs(QueueIndex::OWN, ConsumerId(u64::MAX));
            }
            (Sabotage::OutOfMemoryTakenForFailure, Event::PassEnded(end)) => {
                if matches!(end.result, PassResult::Failed(PassError::OutOfMemory(_))) {
                    end.result = PassResult::Failed(PassError::Failed("out of memory".to_owned()));
                }
            }
            (Sabotage::SkipTakenForFailure, Event::PassEnded(end))
                if matches!(end.result, PassResult::Skipped) =>
            {
                end.result = PassResult::Failed(PassError::Failed("skipped".to_owned()));
            }
            (Sabotage::WithdrawalOfHeldJobIgnored, Event::Withdrawn(withdrawn))
                if self.holds(&withdrawn.id) =>
            {
                return Verdict::IsLost;
            }
            (Sabotage::WithdrawalNotRemembered, Event::Withdrawn(withdrawn))
                if !self.holds(&withdrawn.id) =>
            {
                return Verdict::IsLost;
            }
            (Sabotage::WithdrawalBelievedWithoutSecret, Event::Withdrawn(withdrawn)) => {
                let held = self.jobs.values().find(|stored| id_of(stored.job.0) == withdrawn.id);
                if let Some(stored) = held {
                    withdrawn.digest = Digest::of(&secret_of(stored.job));
                }
            }
            (Sabotage::HungPassNotNoticed, Event::Tick(reading)) => reading.on_device = None,
            _ => {}
        }
        Verdict::Happens
    }

    pub(super) fn holds(&self, id: &str) -> bool {
        self.jobs.values().any(|stored| id_of(stored.job.0) == id)
    }

    /// Tampers with an action before it is carried out.
    pub(super) fn tamper_action(&mut self, action: &mut Action) -> Verdict {
        let Some(sabotage) = self.sabotage else { return Verdict::Happens };
        match (sabotage, action) {
            (Sabotage::AckBeforeConfirm, Action::Publish { job, publication }) => {
                if matches!(publication, Publication::Reply(run) if run.is_last) {
                    let outcome = PublishOutcome::Confirmed { messages: 1 };
                    self.ready.push_back(Event::Published { job: *job, outcome });
                }
            }
            (Sabotage::LostReject, Action::Reject { .. }) => return Verdict::IsLost,
            (Sabotage::PrefetchNotRestored, Action::Consume { .. }) if self.sessions > 1 => {
                return Verdict::IsLost;
            }
            (Sabotage::CreditAboveSlots, Action::Consume { prefetch, .. }) => {
                *prefetch = prefetch.saturating_mul(TWICE);
            }
            (Sabotage::ConsumerEndedTooEarly, Action::StopConsumer { consumer, .. }) => {
                self.ready.push_back(Event::ConsumerEnded { consumer: *consumer });
            }
            (Sabotage::WithdrawnPassNotSkipped, Action::CancelPass { .. })
            | (Sabotage::EndNotCounted, Action::Observe(Observation::Settled(_)))
            | (Sabotage::LimitNotSaved, Action::SaveLimits)
            | (Sabotage::AnswerLost, Action::Answer { .. }) => return Verdict::IsLost,
            (Sabotage::ShareCountedTwice, Action::Observe(Observation::PassShare(share))) => share.cost *= 2,
            (Sabotage::HeldTooShort, Action::Consume { hold_max, .. }) => *hold_max /= 2,
            (Sabotage::CancelMisreported, Action::Answer { answer: answer @ Answer::MemoryBack, .. }) => {
                *answer = Answer::TooLate;
            }
            (Sabotage::ExclusiveShared, Action::Run(order)) => order.exclusive = false,
            (Sabotage::DrainDoesNotWait, Action::StopConsumer { .. }) if self.core.is_draining() => {
                self.ending.get_or_insert(vramq_core::action::SessionEnd::Drained);
            }
            (_, Action::Publish { job, publication }) => {
                return self.tamper_publication(sabotage, *job, publication);
            }
            _ => {}
        }
        Verdict::Happens
    }

    fn tamper_publication(
        &mut self,
        sabotage: Sabotage,
        job: vramq_core::ids::JobKey,
        publication: &mut Publication,
    ) -> Verdict {
        if sabotage == Sabotage::WithdrawnJobDeadLettered
            && let Publication::FailureNotice(rejection) = publication
            && rejection.reason == Reason::Withdrawn
        {
            let rejection = Arc::clone(rejection);
            *publication = Publication::DeadLetter { headers: None, rejection };
            return Verdict::Happens;
        }
        let confirmed = Event::Published { job, outcome: PublishOutcome::Confirmed { messages: 1 } };
        match (sabotage, publication) {
            (Sabotage::HintNotLowered, Publication::Requeue { headers, .. }) if headers.attempt > 0 => {
                headers.batch_hint = None;
            }
            (Sabotage::HintLoweredByOne, Publication::Requeue { headers, .. }) => {
                let tried = headers.last_out_of_memory().map(|last| last.items);
                headers.batch_hint =
                    tried.filter(|items| *items > 1).map(|items| items - 1).or(headers.batch_hint);
            }
            (Sabotage::ExclusiveForgotten, Publication::Requeue { headers, .. }) => headers.exclusive = false,
            (Sabotage::DelaysNotCounted, Publication::Requeue { headers, route: Route::Later(_) }) => {
                headers.delays = 0;
            }
            (Sabotage::ItemsDoneNotMoved, Publication::Requeue { headers, .. }) => headers.items_done = 0,
            (Sabotage::ItemsDoneTooFar, Publication::Requeue { headers, .. }) => headers.items_done += 1,
            (Sabotage::HandOverCharged, Publication::Requeue { headers, route: Route::Bulk })
                if headers.items_done > 0 =>
            {
                headers.attempt += 1;
            }
            (Sabotage::HandOverFromTheStart, Publication::Requeue { headers, route: Route::Bulk }) => {
                headers.items_done = 0;
            }
            (Sabotage::LargeJobKept, Publication::Requeue { route: route @ Route::Bulk, .. }) => {
                *route = Route::Now;
            }
            (Sabotage::HistoryNotWritten, Publication::Requeue { headers, .. }) => {
                headers.history.retain(|past| past.outcome != Reason::OutOfMemory.as_str());
            }
            (Sabotage::WaitsDoNotGrow, Publication::Requeue { route: Route::Later(ms), .. }) => {
                *ms = DELAYS_MS[0];
            }
            (Sabotage::NeedMisstated, Publication::DeadLetter { rejection, .. }) => {
                if let Some(needs) = &mut Arc::make_mut(rejection).requirement {
                    needs.needs_bytes /= 2;
                }
            }
            (Sabotage::PartSkipped, Publication::Reply(run)) if !run.is_last => {
                self.ready.push_back(confirmed);
                return Verdict::IsLost;
            }
            (Sabotage::PartRepeated, Publication::Reply(run)) if run.offset > 0 => run.offset -= 1,
            (Sabotage::WithdrawnJobKept, Publication::FailureNotice(rejection))
                if rejection.reason == Reason::Withdrawn =>
            {
                return Verdict::IsLost;
            }
            (Sabotage::DeadLetterDropped, Publication::DeadLetter { .. })
            | (Sabotage::RequeueDropped, Publication::Requeue { .. }) => {
                self.ready.push_back(confirmed);
                return Verdict::IsLost;
            }
            _ => {}
        }
        Verdict::Happens
    }
}

const TWICE: std::num::NonZeroU16 = std::num::NonZeroU16::MIN.saturating_add(1);
