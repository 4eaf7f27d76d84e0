//! Faults put between a core and its world on purpose, so that tests can show that the invariants see them. Each makes the worker as
//! a whole behave as if its core had that fault.

use serde::{Deserialize, Serialize};

macro_rules! sabotages {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A fault of a worker.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
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
    /// A permit of one byte never comes back.
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
    /// What the broker took of a reply, before it refused the rest, is not noted.
    RepliesTakenLost,
    /// A part is left out.
    PartSkipped,
    /// A part begins where the last one began.
    PartRepeated,
    /// Every message looks like the one before.
    FingerprintsCollide,
    /// Nobody counts the workers that a job has killed.
    CrashesForgotten,
    /// A large job that moves to its queue forgets the workers that it has killed.
    CrashesForgottenByLargeJobs,
    /// One return of a job counts as if it had killed five workers.
    CrashCountedSeveralTimes,
    /// Quarantined jobs run among others.
    QuarantineShared,
    /// A next attempt is read while the message before it is still here.
    NextAttemptNotHeld,
    /// A full disk counts as the engine's failure.
    FullDiskTakenForFailure,
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
    /// The free memory after an out-of-memory is not read.
    ShortageNotRead,
    /// A learned limit is not saved.
    LimitNotSaved,
    /// An operator's command is not answered.
    AnswerLost,
    /// A consumer is asked for with a shorter time to hold jobs than the worker takes.
    HeldTooShort,
    /// A cancelled job counts as one that ended before.
    CancelMisreported,
    /// Requeued jobs lose the name of the queue that they came from.
    QueueOfShareForgotten,
    /// What a silent queue may have counts as confirmed.
    SilenceTakenForConfirm,
    /// A reply that cannot be encoded counts as confirmed.
    CutTakenForConfirm,
    /// A job that a rule moves goes back to its own queue.
    MovedJobKept,
    /// Nobody counts how often a job waited for its revision.
    RevisionWaitsNotCounted,
    /// A job that demands another revision is dead-lettered at once.
    RevisionNotWaitedFor,
    /// Nobody remembers that a store did not answer.
    SilentStoreForgotten,
    /// Memory that stays missing ends in nothing.
    WithheldMemoryIgnored,
    /// A further queue that was lost is never found again.
    FurtherQueueNotFound,
    /// A worker does not consume a model's further queues.
    FurtherQueueNotConsumed,
    /// All queues of a model have the same weight.
    QueueWeightsIgnored,
    /// All models have the same weight on their device.
    ModelWeightsIgnored,
    /// All callers of a queue count as one.
    CallersCountAsOne,
    /// A job whose replies cannot hold all outputs runs, although that is known when it is read.
    ReplyCapNotRead,
    /// Outputs leave in replies although the replies are full.
    ReplyCapIgnored,
}

/// Whether something still happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Happens,
    IsLost,
}
