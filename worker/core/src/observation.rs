//! Observations that the core reports and the shell counts: for metrics, heartbeats and spans.

use std::time::{Duration, Instant};

use vramq_schemas::Reason;

use crate::device::OutOfMemory;
use crate::device_health::ProbeResult;
use crate::ids::{JobKey, ModelIndex, QueueIndex};

/// Something to count.
#[derive(Clone, Debug)]
pub enum Observation {
    Received {
        model: ModelIndex,
        /// The queue of jobs that it came from; `None` if that is the bulk queue or the quarantine.
        queue: Option<QueueIndex>,
        quarantined: bool,
    },
    /// A job's first pass was made. `waited` counts from publishing, or from delivery if the publisher gave no time.
    FirstPass {
        model: ModelIndex,
        caller: Option<String>,
        waited: Duration,
    },
    /// A pass was let on the device with so many bytes.
    Admitted {
        bytes: u64,
    },
    PassEnded {
        model: ModelIndex,
        outcome: PassOutcome,
        took: Duration,
        /// Items that count as computed.
        items: usize,
        cost: usize,
    },
    /// One caller's share of such a pass. The shares of all callers add up to the pass.
    PassShare(PassShare),
    /// The device's executor was busy with a pass of any kind for so long.
    DeviceBusy {
        took: Duration,
    },
    OutOfMemory {
        model: ModelIndex,
        oom: OutOfMemory,
        alone: bool,
    },
    HealthProbe(ProbeResult),
    /// Items waited for so long because no pass had memory.
    BlockedOnMemory {
        lasted: Duration,
    },
    /// Replies with some of a job's items were published.
    Parts {
        model: ModelIndex,
        count: u32,
    },
    /// Finished outputs were lost with their job and will be computed again.
    Recomputed {
        model: ModelIndex,
        items: usize,
    },
    /// A job has ended here.
    Settled(Settled),
    /// Whether a further queue of the model cannot be consumed.
    QueueMissing {
        model: ModelIndex,
        queue: QueueIndex,
        is_missing: bool,
    },
    /// Jobs that were unacknowledged when the session ended.
    Unsettled {
        model: ModelIndex,
        jobs: usize,
    },
}

/// One caller's share of a pass. The time of a shared pass is split by cost.
#[derive(Clone, Debug, PartialEq)]
pub struct PassShare {
    pub caller: Option<String>,
    /// Items that count as computed.
    pub items: usize,
    pub cost: usize,
    pub took: Duration,
}

/// A job that has ended here.
#[derive(Clone, Debug)]
pub struct Settled {
    pub job: JobKey,
    pub model: ModelIndex,
    pub caller: Option<String>,
    pub end: End,
    /// Whether the ack or the return was sent to the broker. If not, the job is redelivered.
    pub acked: bool,
    pub first_pass_at: Option<Instant>,
    /// When its outcome was decided.
    pub ready_at: Instant,
}

/// How a job ended on this worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its last reply is confirmed.
    Replied,
    /// Another attempt of it is confirmed.
    Requeued(Cause),
    /// Its dead letter is confirmed.
    DeadLettered(Reason),
    /// An earlier delivery was settled, but its ack did not reach the broker.
    AlreadySettled,
    /// Its dead letter is larger than the broker takes: the broker dead-letters the job itself.
    Rejected(Reason),
    /// Its caller withdrew it: there is no dead letter.
    Withdrawn,
    /// The broker takes neither a dead letter nor another attempt: the job was given back as it was.
    GivenBack,
}

impl End {
    /// Whether the job has ended with its results or a dead letter, and not only on this worker.
    pub fn counts_for_caller(self) -> bool {
        matches!(self, Self::Replied | Self::DeadLettered(_) | Self::Rejected(_))
    }
}

/// Why a job is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// With a halved batch hint.
    Smaller,
    /// With the device to itself.
    Exclusive,
    /// After a wait for memory that other processes hold, or, in quarantine, for room on the device.
    Delayed,
    /// On a larger device.
    Larger,
    /// Unfinished: at a drain, from a sick device, for a quarantined job, or after it was held for too long.
    Unfinished,
    /// One worker was lost while it held the job.
    Counted,
    /// Several workers were lost while they held the job: it goes to the quarantine.
    Quarantine,
    /// It is large: it goes to the queue of large jobs.
    Bulk,
    /// It is large, has had its device time, and others wait: the rest goes back to the queue of large jobs.
    Turn,
    /// Its reply queue is full: it waits.
    ReplyQueueFull,
    /// It demands another revision of the model: it waits for a worker that has it.
    WrongRevision,
    /// A rule of the model assigns it to other workers.
    Moved,
    /// A store does not return its inputs: it waits.
    StoreUnavailable,
    /// A disk has no room for its items, or for what the program writes: it waits.
    ScratchFull,
    /// The queue of the workers that are to run it is full: it waits.
    TargetQueueFull,
    /// The dead queue refuses its dead letter: it waits.
    DeadQueueFull,
}

impl Cause {
    pub const ALL: [Self; 16] = [
        Self::Smaller,
        Self::Exclusive,
        Self::Delayed,
        Self::Larger,
        Self::Unfinished,
        Self::Counted,
        Self::Quarantine,
        Self::Bulk,
        Self::Turn,
        Self::ReplyQueueFull,
        Self::WrongRevision,
        Self::Moved,
        Self::StoreUnavailable,
        Self::ScratchFull,
        Self::TargetQueueFull,
        Self::DeadQueueFull,
    ];

    /// The name in metrics and spans. It stays when a word of the code changes.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Smaller => "smaller",
            Self::Exclusive => "exclusive",
            Self::Delayed => "delayed",
            Self::Larger => "larger",
            Self::Unfinished => "handed-over",
            Self::Counted => "counted",
            Self::Quarantine => "suspect",
            Self::Bulk => "bulk",
            Self::Turn => "turn",
            Self::ReplyQueueFull => "reply-queue-full",
            Self::WrongRevision => "wrong-revision",
            Self::Moved => "moved",
            Self::StoreUnavailable => "store-unavailable",
            Self::ScratchFull => "scratch-full",
            Self::TargetQueueFull => "target-queue-full",
            Self::DeadQueueFull => "dead-queue-full",
        }
    }
}

/// How a pass ended, as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassOutcome {
    Done,
    OutOfMemory,
    Failed,
    Cancelled,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn metrics_tell_the_causes_of_another_attempt_apart() {
        let names: HashSet<_> = Cause::ALL.into_iter().map(Cause::as_str).collect();
        assert_eq!(names.len(), Cause::ALL.len());
        assert!(names.iter().all(|name| !name.is_empty()));
    }

    #[test]
    fn a_job_without_results_does_not_count_for_its_caller() {
        let (crashed, requeued) = (Reason::Crashed, End::Requeued(Cause::Delayed));
        let ends = [
            (End::Replied, true),
            (End::DeadLettered(crashed), true),
            (End::Rejected(crashed), true),
            (End::GivenBack, false),
            (requeued, false),
            (End::AlreadySettled, false),
            (End::Withdrawn, false),
        ];
        for (end, counts) in ends {
            assert_eq!(end.counts_for_caller(), counts, "{end:?}");
        }
    }
}
