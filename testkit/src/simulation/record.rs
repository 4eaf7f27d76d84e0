//! One job as seen from outside: what its caller published, what happened to it, and which duplicates are explained by that.

use std::sync::Arc;

use vramq_schemas::withdrawal::Digest;
use vramq_schemas::{JobHeaders, Reason};

use super::agenda::Micros;

/// A job's place in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct JobNumber(pub usize);

/// What a job does to the workers that take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nature {
    /// Nothing.
    Good,
    /// Its body or its headers cannot be read.
    Malformed,
    /// It is larger than any message that the broker takes back.
    Huge,
    /// It kills the process that decodes it.
    PoisonDecode,
    /// It kills the process that runs a pass with it: the worker, or a program.
    PoisonPass,
    /// A pass with it fails.
    Failing,
    /// The engine says that an item of it can never be run.
    Invalid,
    /// A pass with it never ends by itself.
    Hanging,
    /// The device is lost in a pass with it.
    DeviceKiller,
}

/// Where a job's replies go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyTo {
    Caller(usize),
    /// To a queue that does not exist.
    Nowhere,
}

/// What publishers know of a job.
#[derive(Clone, Debug)]
pub struct JobSpec {
    pub model: usize,
    /// The queue of the model that it is published to, by its place: 0 is the model's own.
    pub queue: usize,
    /// Whom it is from, as the broker verified it.
    pub identity: Option<Arc<str>>,
    pub costs: Arc<[usize]>,
    pub nature: Nature,
    /// The real bytes of its passes, in tenths of the bytes that the model declares.
    pub hunger_tenths: u64,
    pub reply_to: ReplyTo,
    pub headers: JobHeaders,
    pub ttl_ms: Option<u64>,
    pub published_ms: Option<u64>,
    /// Whether it has the digest of its caller's secret, with which the caller can withdraw it.
    pub is_withdrawable: bool,
    /// Its inputs lie in a store.
    pub refers: bool,
    /// Outputs that its replies may hold, of each attempt, if they have a limit.
    pub outputs_max: Option<u32>,
    /// No reply can hold its last output.
    pub is_unencodable: bool,
    /// Whether its last output fits no reply.
    pub moves: bool,
    /// Whether a rule of its model gives it to the workers with larger devices.
    pub revision: Option<u8>,
}

impl JobSpec {
    /// Whether its replies cannot hold all outputs from this item on.
    pub fn is_above_cap(&self, items_done: u32) -> bool {
        let left = self.costs.len().saturating_sub(items_done as usize);
        self.outputs_max.is_some_and(|most| left > most as usize)
    }
}

/// Events that explain how a job may end, and how often.
#[derive(Clone, Debug, Default)]
pub struct Excuses {
    /// Losses of sessions and processes that held the job. After each, everything may happen once more.
    pub repeats: u32,
    /// A pass of this job alone failed, ran out of memory at one item, hung, or killed a device or process.
    pub failed_alone: bool,
    pub out_of_memory_alone: bool,
    pub died_alone: u32,
    pub hung_alone: bool,
    pub cancelled: bool,
    /// A store did not have an input that the job refers to.
    pub reference_missing: bool,
    /// Its reply queue was missing or full at some time.
    pub replies_refused: bool,
    /// Last replies whose confirm was given up. Their caller may receive them nevertheless.
    pub unconfirmed: u32,
}

#[derive(Clone, Debug)]
pub struct JobRecord {
    pub spec: JobSpec,
    pub published_at: Micros,
    /// Copies that were published, and those that the broker confirmed.
    pub copies: u32,
    pub accepted: u32,
    pub ends: u32,
    /// Whether an operator deleted the queue that its end may have gone to.
    pub is_forgiven: bool,
    pub last_end: Option<End>,
    /// The digest that it carries, if it can be withdrawn.
    pub digest: Option<Digest>,
    /// Its caller has sent a withdrawal of it.
    pub is_withdrawn: bool,
    pub excuses: Excuses,
    /// For each item: how often it was computed, and how often that was in vain for a known reason.
    pub(super) computed: Box<[u16]>,
    pub(super) in_vain: Box<[u16]>,
    /// For each item: whether a reply or a dead letter beside it holds its output.
    pub(super) answered: Box<[bool]>,
    /// Messages that hold the job, of all attempts.
    pub attempts: u32,
    pub(super) kills: u32,
    /// How often a worker was lost with a message after it had sent the successor. Both then exist.
    pub(super) forks: u32,
}

impl JobRecord {
    pub(super) fn new(job: JobNumber, spec: JobSpec, published_at: Micros) -> Self {
        let items = spec.costs.len();
        Self {
            published_at,
            copies: 1,
            accepted: 0,
            ends: 0,
            is_forgiven: false,
            last_end: None,
            digest: spec.is_withdrawable.then(|| Digest::of(&secret_of(job))),
            is_withdrawn: false,
            excuses: Excuses::default(),
            computed: vec![0; items].into(),
            in_vain: vec![0; items].into(),
            answered: vec![false; items].into(),
            attempts: 0,
            kills: 0,
            forks: 0,
            spec,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.ends < self.accepted && !self.is_forgiven
    }

    /// Its caller still waits for the end of a copy.
    pub fn is_awaited(&self) -> bool {
        self.ends < self.copies && !self.is_forgiven
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Done,
    DeadLetter(Reason),
    /// The broker dead-lettered it.
    ByBroker,
    /// Workers with larger devices took it.
    Moved,
    /// A worker acknowledged it because its caller withdrew it.
    Withdrawn,
}

/// What the caller of a job keeps to itself until it withdraws the job.
pub fn secret_of(job: JobNumber) -> String {
    format!("the secret of job {}", job.0)
}
