//! Changes events and actions between a core and its world, to imitate a fault that a test puts in on purpose.

use std::sync::Arc;

use vramq_core::action::{Action, Answer, JobQueue, Publication, Route};
use vramq_core::device::PassError;
use vramq_core::event::{Delivery, Event, PassEnd, PassResult, PublicationOutcome, Source, Withdrawn};
use vramq_core::ids::{ConsumerId, Fingerprint, JobKey, QueueIndex};
use vramq_core::observation::Observation;
use vramq_schemas::topology::DELAYS_MS;
use vramq_schemas::withdrawal::Digest;
use vramq_schemas::{JobHeaders, Reason};

use super::Shell;
use super::frames::id_of;
use super::sabotage::{Sabotage, Verdict};
use crate::simulation::ledger::secret_of;

impl Shell {
    /// Tampers with an event before the core hears of it.
    pub(super) fn tamper_event(&mut self, event: &mut Event) -> Verdict {
        let Some(sabotage) = self.sabotage else { return Verdict::Happens };
        match (sabotage, event) {
            (
                Sabotage::ReturnTakenForConfirm,
                Event::Published { outcome: outcome @ PublicationOutcome::Unroutable { .. }, .. },
            )
            | (
                Sabotage::NackTakenForConfirm,
                Event::Published { outcome: outcome @ PublicationOutcome::Refused { .. }, .. },
            ) => {
                *outcome = PublicationOutcome::Confirmed { messages: 1 };
            }
            (
                Sabotage::SilenceTakenForConfirm,
                Event::Published { outcome: outcome @ PublicationOutcome::Unreachable { .. }, .. },
            )
            | (
                Sabotage::CutTakenForConfirm,
                Event::Published { outcome: outcome @ PublicationOutcome::Cut { .. }, .. },
            ) => *outcome = PublicationOutcome::Confirmed { messages: 1 },
            (Sabotage::RevisionNotWaitedFor, Event::Decoded { result: Err(rejection), .. })
                if rejection.reason == Reason::WrongRevision =>
            {
                rejection.reason = Reason::Malformed;
            }
            (Sabotage::WithheldMemoryIgnored, Event::MemoryWithheld { .. })
            | (Sabotage::ShortageNotRead, Event::MemoryRead { .. })
            | (Sabotage::LostTimer, Event::Timer)
            | (Sabotage::RepliesTakenLost, Event::RepliesTaken { .. }) => return Verdict::IsLost,
            (_, Event::Delivered(delivery)) => self.tamper_delivery(sabotage, delivery),
            (_, Event::PassEnded(end)) => return self.tamper_pass_end(sabotage, end),
            (_, Event::Withdrawn(withdrawn)) => return self.tamper_withdrawal(sabotage, withdrawn),
            (Sabotage::FurtherQueueNotFound, Event::QueueLookedFor { result, .. }) => {
                *result = Err("it is lost".to_owned());
            }
            (Sabotage::HungPassNotNoticed, Event::Tick(reading)) => reading.on_device = None,
            _ => {}
        }
        Verdict::Happens
    }

    fn tamper_delivery(&self, sabotage: Sabotage, delivery: &mut Delivery) {
        match sabotage {
            Sabotage::FingerprintsCollide => delivery.fingerprint = Fingerprint(7),
            Sabotage::CrashesForgotten => {
                (delivery.redelivered, delivery.delivery_count) = (false, None);
            }
            Sabotage::CrashCountedSeveralTimes if delivery.redelivered => {
                if let Some(headers) = &mut delivery.headers {
                    headers.crashes += 5;
                }
            }
            Sabotage::QuarantineShared if delivery.source == Source::Quarantine => {
                delivery.source = Source::Jobs(QueueIndex::OWN, ConsumerId(u64::MAX));
            }
            // Its id shows what it follows.
            Sabotage::NextAttemptNotHeld
                if self.jobs.get(&delivery.job).is_some_and(|stored| self.is_next_attempt(stored)) =>
            {
                delivery.id = None;
            }
            _ => {}
        }
    }

    fn tamper_pass_end(&self, sabotage: Sabotage, end: &mut PassEnd) -> Verdict {
        match sabotage {
            Sabotage::LostPassEnd if end.pass.0.is_multiple_of(50) => return Verdict::IsLost,
            Sabotage::OutOfMemoryTakenForFailure => {
                if matches!(end.result, PassResult::Failed(PassError::OutOfMemory { .. })) {
                    end.result = PassResult::Failed(PassError::Failed("out of memory".to_owned()));
                }
            }
            Sabotage::FullDiskTakenForFailure => {
                if matches!(end.result, PassResult::Failed(PassError::DiskFull(_))) {
                    end.result = PassResult::Failed(PassError::Failed("no space".to_owned()));
                }
            }
            Sabotage::SkipTakenForFailure if matches!(end.result, PassResult::Skipped) => {
                end.result = PassResult::Failed(PassError::Failed("skipped".to_owned()));
            }
            _ => {}
        }
        Verdict::Happens
    }

    fn tamper_withdrawal(&self, sabotage: Sabotage, withdrawn: &mut Withdrawn) -> Verdict {
        match sabotage {
            Sabotage::WithdrawalOfHeldJobIgnored if self.holds(&withdrawn.id) => return Verdict::IsLost,
            Sabotage::WithdrawalNotRemembered if !self.holds(&withdrawn.id) => return Verdict::IsLost,
            Sabotage::WithdrawalBelievedWithoutSecret => {
                let held = self.jobs.values().find(|stored| id_of(stored.job.0) == withdrawn.id);
                if let Some(stored) = held {
                    withdrawn.digest = Digest::of(&secret_of(stored.job));
                }
            }
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
                    let outcome = PublicationOutcome::Confirmed { messages: 1 };
                    self.ready.push_back(Event::Published { job: *job, outcome });
                }
            }
            (Sabotage::LostReject, Action::Reject { .. }) => return Verdict::IsLost,
            (Sabotage::PrefetchNotRestored, Action::Consume { .. }) if self.sessions > 1 => {
                return Verdict::IsLost;
            }
            (Sabotage::FurtherQueueNotConsumed, Action::Consume { queue: JobQueue::Jobs(queue), .. })
                if queue.is_further() =>
            {
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
        job: JobKey,
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
        match publication {
            Publication::Requeue { headers, route } => tamper_requeue(sabotage, headers, route),
            Publication::DeadLetter { rejection, .. } if sabotage == Sabotage::NeedMisstated => {
                if let Some(needs) = &mut Arc::make_mut(rejection).requirement {
                    needs.needs_bytes /= 2;
                }
            }
            _ => {}
        }
        let confirmed = Event::Published { job, outcome: PublicationOutcome::Confirmed { messages: 1 } };
        match (sabotage, publication) {
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

/// Tampers with another attempt.
fn tamper_requeue(sabotage: Sabotage, headers: &mut JobHeaders, route: &mut Route) {
    match (sabotage, route) {
        (Sabotage::HintNotLowered, _) if headers.attempt > 0 => headers.batch_hint = None,
        (Sabotage::HintLoweredByOne, _) => {
            let tried = headers.last_out_of_memory().map(|last| last.items);
            headers.batch_hint =
                tried.filter(|items| *items > 1).map(|items| items - 1).or(headers.batch_hint);
        }
        (Sabotage::ExclusiveForgotten, _) => headers.exclusive = false,
        (Sabotage::DelaysNotCounted, Route::Later(_)) => headers.delays = 0,
        (Sabotage::ItemsDoneNotMoved, _) => headers.items_done = 0,
        (Sabotage::ItemsDoneTooFar, _) => headers.items_done += 1,
        (Sabotage::HandOverCharged, Route::Bulk) if headers.items_done > 0 => headers.attempt += 1,
        (Sabotage::HandOverFromTheStart, Route::Bulk) => headers.items_done = 0,
        (Sabotage::CrashesForgottenByLargeJobs, Route::Bulk) => headers.crashes = 0,
        (Sabotage::LargeJobKept, route @ Route::Bulk) => *route = Route::Now,
        (Sabotage::HistoryNotWritten, _) => {
            headers.history.retain(|past| past.outcome != Reason::OutOfMemory.as_str());
        }
        (Sabotage::WaitsDoNotGrow, Route::Later(ms)) => *ms = DELAYS_MS[0],
        (Sabotage::MovedJobKept, route @ Route::OtherWorkers(_)) => *route = Route::Now,
        (Sabotage::RevisionWaitsNotCounted, _) => headers.revision_waits = 0,
        (Sabotage::QueueOfShareForgotten, _) => headers.queue = None,
        _ => {}
    }
}

const TWICE: std::num::NonZeroU16 = std::num::NonZeroU16::MIN.saturating_add(1);
