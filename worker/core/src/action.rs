//! The actions of a worker. [`Core::apply`](crate::Core::apply) answers an event with a list of these, and the shell carries them
//! out in their order. An action that has an answer names the event with the answer.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;

use crate::acks::AckFrame;
use crate::device::PassShape;
use crate::ids::{ChannelId, ConsumerId, ItemIndex, JobKey, ModelIndex, PassId, QueueIndex, RequestId};
use crate::observation::Observation;
use crate::rejection::Rejection;

/// Something to do.
#[derive(Debug)]
pub enum Action {
    /// Start a consumer of a model's jobs. No answer: deliveries come; or the session fails, or `QueueLost` follows.
    Consume {
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: NonZeroU16,
        hold_max: Duration,
    },
    /// Stop a consumer. Answer: `ConsumerEnded`.
    StopConsumer { model: ModelIndex, queue: JobQueue, consumer: ConsumerId },
    /// Ask the broker how many messages wait. Answer: `QueuesCounted`, and `QueueLost` for each further queue that cannot be counted.
    CountQueues { model: ModelIndex },
    /// Declare a further queue that was lost, or check that it is there, on a new channel. Answer: `QueueLookedFor`; if the queue is
    /// there, its consumers start on that channel.
    LookForQueue { model: ModelIndex, queue: QueueIndex },
    /// Take one job from the quarantine. Answer: `Delivered` or `QuarantineEmpty`.
    TakeQuarantined { model: ModelIndex },
    /// Read a job's body and prepare its first inputs until their costs reach `cost`, or all of them. Answer: `Decoded`; `Moved` if a rule
    /// sends the job to other workers; `Referring` if inputs must be fetched first.
    Decode { job: JobKey, cost: usize },
    /// Fetch the inputs that a job refers to from their stores, and give up at `until`. Answer: `Fetched`.
    Fetch { job: JobKey, until: Instant },
    /// Prepare a job's next inputs until their costs reach `cost`, or all that are left. Answer: `Prepared`.
    Prepare { job: JobKey, cost: usize },
    /// Run a pass. Answer: `PassEnded`.
    Run(PassOrder),
    /// End a pass early: nobody needs its outputs any more, a new session has begun, or half of a drain's time is over. The device's thread does not
    /// begin it; a program that runs it is asked to stop, and killed if it does not. `PassEnded` follows, with `Skipped`, with `Cancelled`,
    /// or as it ended by itself. May come more than once for a pass.
    CancelPass { pass: PassId, model: ModelIndex },
    /// Publish something about a job and wait for the confirm. Answer: `Published`.
    Publish { job: JobKey, publication: Publication },
    /// Acknowledge deliveries of a channel, in this order. Answer: `AcksSent`.
    Ack { channel: ChannelId, frames: Vec<AckFrame> },
    /// Give a delivery back to its queue. Answer: `NackSent`.
    GiveBack { job: JobKey },
    /// Have the broker dead-letter a delivery. Answer: `NackSent`.
    Reject { job: JobKey },
    /// Forget a job, which has ended here or is redelivered. No answer.
    Release { job: JobKey },
    /// Answer an operator's command with its progress. After the `last` answer the request is over. No answer event.
    Answer { request: RequestId, answer: Answer, text: String, last: bool },
    /// Change what is logged, and tell the operator. No answer.
    SetLog { request: RequestId, directives: String },
    /// Write the learned limits to their file. No answer.
    SaveLimits,
    /// Read the device's memory, of which a pass has run out. Answer: `MemoryRead`.
    ReadMemory,
    /// Give memory that is kept for the next pass back to the system. No answer.
    TrimDevice,
    /// Count something. No answer.
    Observe(Observation),
    /// Close the session; then `SessionClosed`.
    EndSession(SessionEnd),
}

impl Action {
    /// Whether it is worth nothing once the session is about to be closed: the broker will redeliver the job, or the queue is no longer
    /// consumed. Acks are sent until the session is closed, and passes still end.
    pub fn needs_open_session(&self) -> bool {
        match self {
            Self::Consume { .. }
            | Self::StopConsumer { .. }
            | Self::CountQueues { .. }
            | Self::LookForQueue { .. }
            | Self::TakeQuarantined { .. }
            | Self::Decode { .. }
            | Self::Fetch { .. }
            | Self::Prepare { .. }
            | Self::Publish { .. }
            | Self::GiveBack { .. }
            | Self::Reject { .. } => true,
            Self::Run(_)
            | Self::CancelPass { .. }
            | Self::Ack { .. }
            | Self::Release { .. }
            | Self::Answer { .. }
            | Self::SetLog { .. }
            | Self::SaveLimits
            | Self::ReadMemory
            | Self::TrimDevice
            | Self::Observe(_)
            | Self::EndSession(_) => false,
        }
    }
}

/// A pass to run, with its memory admitted.
#[derive(Clone, Debug)]
pub struct PassOrder {
    pub pass: PassId,
    pub model: ModelIndex,
    /// Job and index within the job of each item, in the order in which the engine gets them. Empty for a health probe.
    pub items: Vec<(JobKey, ItemIndex)>,
    pub shape: PassShape,
    /// No other pass may run on the device meanwhile, not even a pass of another process.
    pub exclusive: bool,
    /// How many failed passes of this executor the core knew of when it ordered this one.
    pub failures_known: u64,
}

/// Messages to publish about a job.
#[derive(Clone, Debug)]
pub enum Publication {
    /// Replies with consecutive outputs: `part`s, and a last `done` if nothing of the job follows.
    Reply(Run),
    /// Publish again the replies of the last `Reply` that the broker has not confirmed.
    ReplyAgain,
    /// The job, to be tried again.
    Requeue { headers: Box<JobHeaders>, route: Route },
    /// Publish to the dead letters the replies of the last `Reply` that the broker has not confirmed.
    DeadReplies(Arc<Rejection>),
    /// The job, to the dead letters; with its state (items done, attempts) if its headers could be read.
    DeadLetter { headers: Option<Box<JobHeaders>>, rejection: Arc<Rejection> },
    /// A `failed` reply to the caller.
    FailureNotice(Arc<Rejection>),
}

/// A run of finished items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first item.
    pub offset: u32,
    pub items: u32,
    pub items_total: u32,
    pub attempt: u32,
    /// Time from publishing (or from delivery, if the publisher gave no time) to the first pass.
    pub queued: Duration,
    pub first_pass_at: Instant,
    /// Nothing of the job follows this run.
    pub is_last: bool,
    /// Approximate bytes of the outputs in a reply.
    pub bytes: usize,
}

impl Run {
    /// Drops the items before `item`, which the caller has received. The rest is published again or goes to the dead letters.
    pub(crate) fn skip_to(&mut self, item: u32) {
        let taken = item.saturating_sub(self.offset).min(self.items);
        self.offset += taken;
        self.items -= taken;
    }
}

/// A queue of a model that jobs are consumed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobQueue {
    /// A queue that the model's jobs come from: its own or a further one.
    Jobs(QueueIndex),
    /// Large jobs.
    Bulk,
}

/// Where a job goes to be tried again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Route {
    /// To its queue.
    Now,
    /// To its queue after so many milliseconds: one of [`DELAYS_MS`](vramq_schemas::topology::DELAYS_MS).
    Later(u64),
    /// To the queue of large jobs.
    Bulk,
    /// To the quarantine.
    Quarantine,
    /// To the workers that take jobs with this routing key: those with larger devices, or those that a rule names.
    OtherWorkers(String),
}

/// How far an operator's command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    Refused,
    Requested,
    Stopped,
    MemoryBack,
    TooLate,
    NotHere,
}

/// Why a session ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    /// The worker stops, and no job is unacknowledged.
    Drained,
    /// The worker stops, out of time or asked twice.
    Killed,
    /// The session is unusable: a new one follows.
    Lost(String),
}
