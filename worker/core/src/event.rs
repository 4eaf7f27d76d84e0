//! The events of a worker. The shell creates them from what the broker, the device, the CPU pool, operators and signals do, and
//! passes them to [`Core::apply`](crate::Core::apply) one after the other.

use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;
use vramq_schemas::control::Command;
use vramq_schemas::withdrawal::Digest;

use crate::action::JobQueue;
use crate::device::{Loss, Memory, PassError};
use crate::ids::{
    ChannelId, ConsumerId, DeliveryTag, Fingerprint, JobKey, ModelIndex, PassId, QueueIndex, RequestId,
    StoreIndex,
};
use crate::rejection::Rejection;

/// The time of an event, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Never goes back: for waits and deadlines.
    pub at: Instant,
    /// Unix time in milliseconds: for comparison with the times of other processes.
    pub unix_ms: u64,
}

/// Something that happened.
#[derive(Debug)]
pub enum Event {
    /// A session with the broker stands; its channels have no consumers yet.
    SessionOpened(SessionFacts),
    /// A part of the session that jobs need is unusable, and why. The core answers with `EndSession`.
    SessionFailed(String),
    /// The session is closed. The broker requeues what was not acknowledged.
    SessionClosed,
    /// The broker delivered a job. The shell keeps its body and properties under `delivery.job`.
    Delivered(Box<Delivery>),
    /// A consumer has ended, and everything that the broker had sent to it was delivered. If the core did not stop the consumer, the broker
    /// did.
    ConsumerEnded {
        consumer: ConsumerId,
    },
    /// A further queue cannot be consumed. The broker closed the channel of the queue's jobs, and its consumers have ended.
    QueueLost {
        model: ModelIndex,
        queue: QueueIndex,
        error: String,
    },
    /// Whether a further queue is there, or why it cannot be consumed; the answer to `LookForQueue`.
    QueueLookedFor {
        model: ModelIndex,
        queue: QueueIndex,
        result: Result<(), String>,
    },
    /// How much waits at the broker; the answer to `CountQueues`.
    QueuesCounted {
        model: ModelIndex,
        counts: QueueCounts,
    },
    /// The quarantine was empty; the answer to `TakeQuarantined` if no delivery came.
    QuarantineEmpty,
    /// A job was read, or cannot be read; the answer to `Decode`.
    Decoded {
        job: JobKey,
        result: Result<DecodedJob, Rejection>,
    },
    /// A job was read, and a rule of its model has it run by the workers with this routing key; another answer to `Decode`.
    Moved {
        job: JobKey,
        key: String,
    },
    /// A job was read, and refers to inputs that have to be fetched first; another answer to `Decode`.
    Referring {
        job: JobKey,
        /// Where the inputs are; each store once.
        stores: Vec<StoreIndex>,
    },
    /// The inputs that a job refers to were fetched, so that it can be read again; or could not be. The answer to `Fetch`.
    Fetched {
        job: JobKey,
        result: Result<(), FetchFault>,
    },
    /// The costs of the next items of a job, in order; or why an item cannot be prepared. The answer to `Prepare`.
    Prepared {
        job: JobKey,
        result: Result<Vec<usize>, Rejection>,
    },
    /// A pass has ended, and the device is done with its memory; the answer to `Run`.
    PassEnded(PassEnd),
    /// The broker has confirmed a job's replies up to the item `up_to`. The reply after these was not taken, or its output fits no reply;
    /// `Published` follows with the reason.
    RepliesTaken {
        job: JobKey,
        up_to: u32,
    },
    /// The answer to `Publish`.
    Published {
        job: JobKey,
        outcome: PublicationOutcome,
    },
    /// The answer to `Ack`: for each frame, in order, whether it was sent.
    AcksSent {
        channel: ChannelId,
        sent: Vec<bool>,
    },
    /// The answer to `GiveBack` and `Reject`: whether the frame was sent.
    NackSent {
        job: JobKey,
        sent: bool,
    },
    /// The broker accepts no publishes (memory or disk alarm). The connection that consumes is not affected.
    BrokerBlocked {
        reason: String,
    },
    BrokerUnblocked,
    /// The broker closed a channel because a delivery was held for longer than `timeout`.
    ConsumerTimeoutLearned {
        timeout: Duration,
    },
    /// An operator's command.
    Command {
        request: RequestId,
        command: Command,
    },
    /// A caller withdrew a job, which this worker may hold, receive later, or never see.
    Withdrawn(Withdrawn),
    /// SIGTERM, SIGINT, or the parent process asks the worker to stop.
    StopRequested {
        signal: &'static str,
    },
    /// A model that a pass found unavailable can be run again.
    ModelAvailable {
        model: ModelIndex,
    },
    /// Device memory of a program's process has been missing for longer than the model's configuration allows, because the process left it
    /// behind or, if not `has_ended`, does not end. Repeated every second while that is so.
    MemoryWithheld {
        model: ModelIndex,
        bytes: u64,
        lasted: Duration,
        has_ended: bool,
    },
    /// The device's memory after a pass ran out of it; the answer to `ReadMemory`.
    MemoryRead {
        memory: Memory,
        passes: PassBytes,
    },
    /// A program has another revision than the one that the worker serves, which its new processes cannot join. Repeated every second.
    OtherRevision {
        model: ModelIndex,
        revision: String,
    },
    /// A second has passed; with new readings of the device.
    Tick(Reading),
    /// The time that [`Core::next_timer`](crate::Core::next_timer) named has come.
    Timer,
    /// No other event waits. The core now starts passes and sends acks for a whole burst of events at once.
    Idle,
}

/// Facts about a new session.
#[derive(Clone, Debug)]
pub struct SessionFacts {
    /// Whether sessions declare the queues. If they do, the broker dead-letters what the worker rejects, and the next session restores a
    /// deleted queue.
    pub declares: bool,
    /// Further queues that cannot be consumed, and why.
    pub missing: Vec<(ModelIndex, QueueIndex, String)>,
}

/// A job as the broker delivered it, without its body.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub job: JobKey,
    pub model: ModelIndex,
    pub source: Source,
    pub channel: ChannelId,
    pub tag: DeliveryTag,
    pub fingerprint: Fingerprint,
    /// The broker delivered this message before.
    pub redelivered: bool,
    /// How often the broker delivered it before, if the queue counts that (quorum queues).
    pub delivery_count: Option<u32>,
    /// The job's id: `message_id`, else `correlation_id`.
    pub id: Option<String>,
    /// Who published it, as far as the broker verified it.
    pub caller: Option<String>,
    /// The digest that a withdrawal of the job must match. `None`: the job cannot be withdrawn.
    pub withdrawal: Option<Digest>,
    /// The queue that its replies go to, if that queue can be full.
    pub reply_queue: Option<String>,
    pub trace_id: Option<String>,
    /// Length of the body.
    pub bytes: usize,
    /// What its headers say; nothing if they cannot be read, which decoding will explain.
    pub headers: Option<JobHeaders>,
    /// When its `expiration` ends, in Unix milliseconds.
    pub expires_at_ms: Option<u64>,
    /// When it was published, in Unix milliseconds, if the publisher says so.
    pub published_ms: Option<u64>,
}

/// A job that its caller does not want any more.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Withdrawn {
    /// The job's id.
    pub id: String,
    /// The digest of the secret in the withdrawal. It applies only to a job with the same digest.
    pub digest: Digest,
}

/// The queue that a delivery came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// One of the queues of the model's jobs, by a consumer.
    Jobs(QueueIndex, ConsumerId),
    /// The model's large jobs, which some worker took from the jobs and moved there unrun; by a consumer.
    Bulk(ConsumerId),
    /// The model's quarantine: jobs that may crash workers.
    Quarantine,
}

impl Source {
    /// The consumer that the delivery came to.
    pub fn consumer(self) -> Option<ConsumerId> {
        match self {
            Self::Jobs(_, consumer) | Self::Bulk(consumer) => Some(consumer),
            Self::Quarantine => None,
        }
    }

    /// The queue that it consumes.
    pub fn queue(self) -> Option<JobQueue> {
        match self {
            Self::Jobs(queue, _) => Some(JobQueue::Jobs(queue)),
            Self::Bulk(_) => Some(JobQueue::Bulk),
            Self::Quarantine => None,
        }
    }
}

/// Messages of a model that wait at the broker.
#[derive(Clone, Debug, Default)]
pub struct QueueCounts {
    /// Of each queue that its jobs come from, in their order: first its own.
    pub jobs: Vec<QueueCount>,
    /// Large jobs, in the queue of their own.
    pub bulk: QueueCount,
    pub quarantined: u32,
}

/// What the broker counts of a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCount {
    pub waiting: u32,
    /// Of all workers.
    pub consumers: u32,
}

/// What reading a job gave. The items themselves stay with the shell.
#[derive(Clone, Debug)]
pub struct DecodedJob {
    /// Items of the whole job; those before `items_done` of its headers were answered earlier.
    pub items_total: u32,
    /// The cost of each prepared item, in order, from the first that is still to run. The costs of the others come with `Event::Prepared`,
    /// when the core asks for them.
    pub costs: Vec<usize>,
}

/// Why an input that a job refers to is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchFault {
    pub rejection: Rejection,
    /// The input may be available later: the store failed or was too slow.
    pub is_transient: bool,
    /// The stores that failed, if that may pass, and how long reading took until then, without waits for other jobs' fetches, unless
    /// these hang.
    pub stores: Vec<StoreIndex>,
    pub took: Duration,
}

/// How a pass ended.
#[derive(Debug)]
pub struct PassEnd {
    pub pass: PassId,
    pub result: PassResult,
    /// For each item of the pass, in its order: the size of its output, if it has one. The outputs stay with the shell.
    pub outputs: Vec<Option<OutputSize>>,
    /// Failed passes of the same executor so far.
    pub failures: u64,
    /// How long the executor had the pass on the device, waiting for other processes included.
    pub took: Duration,
    /// The device's memory after the pass. Passes of other executors may hold some of it.
    pub memory: Memory,
}

/// Approximate bytes of an output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputSize {
    /// The whole output, encoded for a reply.
    pub bytes: usize,
    /// What the output takes in a reply: less than `bytes` if the reply holds only a reference to it.
    pub in_reply: u64,
}

impl OutputSize {
    /// An output that is in the reply itself.
    pub fn inline(bytes: usize) -> Self {
        Self { bytes, in_reply: bytes as u64 }
    }
}

/// The result of a pass.
#[derive(Clone, Debug)]
pub enum PassResult {
    /// Every item has its output.
    Done,
    Failed(PassError),
    /// The pass did not run to its end, and none of its items is to blame. Either an earlier pass failed before the core knew of it when it
    /// made this one, or the core cancelled the pass, or no process took it. Some items may have outputs.
    Skipped,
    /// The core cancelled the pass while a program ran it, and the program stopped or was killed. Some items may have outputs.
    Cancelled,
    /// The pass did not run: no process can run its model, for this reason. The executor keeps trying, and `ModelAvailable` follows.
    Unavailable(String),
    /// The device was lost before this pass, or for a cause that is older than it: the pass did not run, or its result is lost.
    DeviceLostBefore(String),
}

/// How the broker took a publication: all of its messages together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PublicationOutcome {
    /// The broker has all of its messages, this many: on disk, and for a quorum queue on a majority of nodes.
    Confirmed { messages: u32 },
    /// The broker found no queue for it.
    Unroutable { destination: String },
    /// The queue is full and rejects publishes.
    Refused { destination: String },
    /// The caller takes replies on its own channel and could not be reached, or its queue confirmed nothing.
    Unreachable { destination: String, why: &'static str },
    /// It is larger than the broker accepts, and was not sent.
    TooLarge,
    /// Replies to items before one whose output fits no reply: the broker has all of these, this many. The rest was not sent.
    Cut { confirmed: u32, rejection: Rejection },
}

/// A reading of the device.
#[derive(Clone, Debug)]
pub struct Reading {
    pub memory: Memory,
    pub passes: PassBytes,
    pub lost: Option<Loss>,
    /// The pass that runs, or the next one to run.
    pub on_device: Option<OnDevice>,
    /// The pass in which the device was lost or is stuck.
    pub culprit: Option<PassId>,
}

/// Bytes of the device that become free without any action of the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassBytes {
    /// Held by running passes of the worker's own engines; part of [`Memory::own`].
    pub own: u64,
    /// Held by running passes of programs, or kept by programs for their next ones; part of [`Memory::foreign`].
    pub programs: u64,
}

impl PassBytes {
    pub(crate) fn total(self) -> u64 {
        self.own.saturating_add(self.programs)
    }

    /// What is free of this memory once these bytes are.
    pub fn free_after(self, memory: Memory) -> u64 {
        memory.free.saturating_add(self.total())
    }
}

/// A pass on a device.
#[derive(Clone, Copy, Debug)]
pub struct OnDevice {
    pub pass: PassId,
    pub since: Instant,
    /// The pass waits for the device lock, which other processes hold: a long wait is not its fault.
    pub waits: bool,
}
