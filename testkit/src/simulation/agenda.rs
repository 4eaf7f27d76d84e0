//! The simulation's only clock: what happens next, and when. Events of the same time happen in the order in which they were
//! scheduled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use vramq_core::event::QueueCounts;
use vramq_core::ids::{ChannelId, JobKey, ModelIndex, PassId, QueueIndex};

use super::broker::Emitted;

/// Microseconds since the history began.
pub type Micros = u64;

pub const MILLI: Micros = 1_000;
pub const SECOND: Micros = 1_000_000;
pub const MINUTE: Micros = 60 * SECOND;
pub const HOUR: Micros = 60 * MINUTE;

/// One run of a worker's process. Events that an earlier life caused are ignored in a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Life {
    pub worker: usize,
    pub number: u32,
}

/// A withdrawal: the job that it names and the secret that it contains. It is genuine if the secret is the job's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The job's number.
    pub job: usize,
    /// The number of the job whose secret it contains; `None` for a guessed secret.
    pub secret_of: Option<usize>,
}

/// A scheduled event.
#[derive(Debug)]
pub enum Happening {
    /// The broker performs its next steps.
    Broker,
    /// A frame reaches a client.
    Frame(Box<Emitted>),
    /// The broker notices that a connection is lost.
    ConnectionNoticed(super::broker::ConnectionId),
    /// A process is started.
    Start { worker: usize },
    /// A worker tries to open a session.
    Connect(Life),
    /// A second has passed for a worker.
    Tick(Life),
    /// A timer of a worker's core may be due.
    Timer(Life),
    /// A worker's event loop has no other event waiting.
    Idle(Life),
    /// A job's body was read.
    Decoded { life: Life, job: JobKey },
    /// The next inputs of a job were prepared.
    Prepared { life: Life, job: JobKey },
    /// A store answered for the inputs of a job.
    Fetched { life: Life, job: JobKey },
    /// The broker counted a model's queues for a session.
    Counted { life: Life, session: u32, model: ModelIndex, counts: QueueCounts },
    /// The broker answers a worker that looks for a further queue.
    LookedFor { life: Life, session: u32, model: ModelIndex, queue: QueueIndex },
    /// Acks were written to the session's socket, or could not be.
    AcksSent { life: Life, session: u32, channel: ChannelId, sent: Vec<bool> },
    /// A delivery was given back.
    NackSent { life: Life, session: u32, job: JobKey, sent: bool },
    /// A pass on a device comes to its end.
    PassEnds { device: usize, ticket: u64 },
    /// A pass that did not reach the device comes back from its executor.
    PassReturns { life: Life, pass: PassId },
    /// A caller publishes its next job.
    Publish { caller: usize },
    /// Someone tries to withdraw a job, and repeats that until the job has ended, at most `repeats` times.
    Withdraw { claim: Claim, repeats: u32 },
    /// A withdrawal reaches a worker's session.
    Withdrawal { life: Life, session: u32, claim: Claim },
    /// A fault of the plan begins or ends.
    Fault { number: usize, ends: bool },
}

#[derive(Debug)]
struct Entry {
    at: Micros,
    number: u64,
    what: Happening,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// The scheduled events, soonest first.
#[derive(Debug, Default)]
pub struct Agenda {
    entries: BinaryHeap<Reverse<Entry>>,
    last: u64,
}

impl Agenda {
    pub fn at(&mut self, at: Micros, what: Happening) {
        self.last += 1;
        self.entries.push(Reverse(Entry { at, number: self.last, what }));
    }

    pub fn pop(&mut self) -> Option<(Micros, Happening)> {
        self.entries.pop().map(|Reverse(entry)| (entry.at, entry.what))
    }
}
