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
        /// The queue that it came from, if it is one of those that jobs come from.
        queue: Option<QueueIndex>,
        quarantined: bool,
    },
    /// A job's first pass was made; how long it had waited, since it was published if the publisher says so.
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
    /// What a caller had of such a pass: the shares of all callers add up to it.
    PassShare(PassShare),
    /// The device's executor was busy for so long with a pass, of whatever kind.
    DeviceBusy {
        took: Duration,
    },
    OutOfMemory {
        model: ModelIndex,
        oom: OutOfMemory,
        alone: bool,
    },
    HealthProbe(ProbeResult),
    /// For so long items waited and no pass had room.
    BlockedOnMemory {
        lasted: Duration,
    },
    /// Replies with some of a job's items were published.
    Parts {
        model: ModelIndex,
        count: u32,
    },
    /// Outputs were lost with their job, and will be computed again.
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

/// What a caller had of a pass. The time of a pass that several share is split by cost.
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
    /// The broker was sent the ack, or the job back. If not, the job is redelivered.
    pub acked: bool,
    pub first_pass_at: Option<Instant>,
    /// When it was decided what happens to it.
    pub ready_at: Instant,
}

/// How a job ended here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Its last reply is confirmed.
    Replied,
    /// Another attempt of it is confirmed.
    Requeued(Cause),
    /// Its dead letter is confirmed.
    DeadLettered(Reason),
    /// It had been settled before, and the broker did not know.
    AlreadySettled,
    /// Its dead letter is larger than the broker takes: the broker dead-letters the job itself.
    Rejected(Reason),
    /// Its caller withdrew it: there is no dead letter.
    Withdrawn,
    /// The broker takes neither replies nor dead letters: the job was given back as it was.
    Returned,
}

impl End {
    /// Whether it is the job's end, which its caller hears of, and not only its end here.
    pub fn is_of_caller(self) -> bool {
        matches!(self, Self::Replied | Self::DeadLettered(_) | Self::Rejected(_))
    }

    /// Whether the job ends with an ack.
    pub fn is_acked(self) -> bool {
        !matches!(self, Self::Returned | Self::Rejected(_))
    }
}

/// Why a job is tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// With a halved batch hint.
    Smaller,
    /// With the device to itself.
    Exclusive,
    /// After a wait for memory that other processes hold.
    Delayed,
    /// On a larger device.
    Larger,
    /// Unfinished: at a drain, from a sick device, for a quarantined job, or after it was held for too long.
    HandedOver,
    /// A worker was lost while it held the job.
    Counted,
    /// Several were: it goes to the quarantine.
    Suspect,
    /// It is large: it goes to the queue of large jobs.
    Bulk,
    /// It is large, has had the device for long, and others wait: its rest goes back to the queue of large jobs.
    Turn,
    /// Its reply queue is full: it waits.
    ReplyQueueFull,
    /// It demands another revision of the model: it waits for a worker that has it.
    WrongRevision,
    /// A rule of the model has other workers run it.
    Moved,
    /// A store does not give its inputs: it waits.
    StoreUnavailable,
    /// A disk has no room for its items, or for what the program writes: it waits.
    ScratchFull,
    /// The queue of the workers that are to run it is full: it waits.
    TargetQueueFull,
}

impl Cause {
    pub const ALL: [Self; 15] = [
        Self::Smaller,
        Self::Exclusive,
        Self::Delayed,
        Self::Larger,
        Self::HandedOver,
        Self::Counted,
        Self::Suspect,
        Self::Bulk,
        Self::Turn,
        Self::ReplyQueueFull,
        Self::WrongRevision,
        Self::Moved,
        Self::StoreUnavailable,
        Self::ScratchFull,
        Self::TargetQueueFull,
    ];

    /// Its name in metrics and spans.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Smaller => "smaller",
            Self::Exclusive => "exclusive",
            Self::Delayed => "delayed",
            Self::Larger => "larger",
            Self::HandedOver => "handed-over",
            Self::Counted => "counted",
            Self::Suspect => "suspect",
            Self::Bulk => "bulk",
            Self::Turn => "turn",
            Self::ReplyQueueFull => "reply-queue-full",
            Self::WrongRevision => "wrong-revision",
            Self::Moved => "moved",
            Self::StoreUnavailable => "store-unavailable",
            Self::ScratchFull => "scratch-full",
            Self::TargetQueueFull => "target-queue-full",
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
