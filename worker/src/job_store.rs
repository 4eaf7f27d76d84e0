//! The jobs that the shell holds for the core: under each [`JobKey`] the delivery, the items, the outputs, and replies that are
//! not confirmed yet. The core knows their numbers only.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use lapin::Acker;
use vramq_core::action::Run;
use vramq_core::ids::{DeliveryTag, JobKey, ModelIndex};
use vramq_schemas::{Encoding, Output};

use crate::broker::message::{Message, ReplyAddress};
use crate::broker::received::{ReceivedJob, Summary};
use crate::decode::Decoded;
use crate::engine::Item;
use crate::progress::RateLimit;

/// All jobs of a session that are not settled. Bounded by the consumers' prefetch.
#[derive(Debug, Default)]
pub struct JobStore {
    jobs: HashMap<JobKey, StoredJob>,
    /// Of each model: deliveries that are neither acknowledged nor given back.
    unacked: HashMap<ModelIndex, BTreeMap<DeliveryTag, Unacked>>,
    last: u64,
}

/// A job.
#[derive(Debug)]
pub struct StoredJob {
    pub model: ModelIndex,
    pub tag: DeliveryTag,
    pub summary: Summary,
    /// Gone once the broker has all of it.
    pub payload: Option<Payload>,
}

/// What a job consists of.
#[derive(Debug)]
pub struct Payload {
    pub received: Arc<ReceivedJob>,
    /// Set when the job was read.
    pub address: Option<Arc<ReplyAddress>>,
    /// Index within the job of the first of `items` and of `outputs`.
    first: u32,
    items: Vec<Option<Item>>,
    outputs: Vec<Option<Output>>,
    /// Limits what its caller is told of its progress; none if the caller did not ask.
    pub progress: Option<Arc<RateLimit>>,
    /// Messages of the last reply that the broker has not confirmed.
    pub unconfirmed: Vec<Message>,
    /// How many messages the last reply consists of.
    pub reply_messages: u32,
}

/// A delivery that is still to be acknowledged or given back.
#[derive(Clone, Debug)]
pub struct Unacked {
    pub acker: Acker,
    /// The job's id, for failpoints.
    pub id: Option<String>,
}

impl JobStore {
    /// Takes in a delivery.
    pub fn add(&mut self, model: ModelIndex, received: ReceivedJob) -> (JobKey, Arc<ReceivedJob>) {
        self.last += 1;
        let key = JobKey(self.last);
        let (tag, summary) = (DeliveryTag(received.delivery.delivery_tag), received.summary.clone());
        let unacked = Unacked { acker: received.delivery.acker.clone(), id: summary.id.clone() };
        self.unacked.entry(model).or_default().insert(tag, unacked);
        let received = Arc::new(received);
        let payload = Payload {
            received: Arc::clone(&received),
            address: None,
            first: 0,
            items: Vec::new(),
            outputs: Vec::new(),
            progress: None,
            unconfirmed: Vec::new(),
            reply_messages: 0,
        };
        self.jobs.insert(key, StoredJob { model, tag, summary, payload: Some(payload) });
        (key, received)
    }

    pub fn get(&self, key: JobKey) -> Option<&StoredJob> {
        self.jobs.get(&key)
    }

    pub fn payload(&self, key: JobKey) -> Option<&Payload> {
        self.jobs.get(&key)?.payload.as_ref()
    }

    pub fn payload_mut(&mut self, key: JobKey) -> Option<&mut Payload> {
        self.jobs.get_mut(&key)?.payload.as_mut()
    }

    /// Drops all of a job but what is needed when it is settled.
    pub fn release(&mut self, key: JobKey) {
        if let Some(job) = self.jobs.get_mut(&key) {
            job.payload = None;
        }
    }

    /// Removes a job that is settled.
    pub fn remove(&mut self, key: JobKey) -> Option<StoredJob> {
        self.jobs.remove(&key)
    }

    /// The session is closed: the broker delivers again what was not acknowledged.
    pub fn clear(&mut self) {
        self.jobs.clear();
        self.unacked.clear();
    }

    /// Takes the deliveries that an ack covers out; the last of them is the one that the frame names.
    pub fn take_acked(&mut self, model: ModelIndex, tag: DeliveryTag, multiple: bool) -> Vec<Unacked> {
        let Some(unacked) = self.unacked.get_mut(&model) else { return Vec::new() };
        if !multiple {
            return unacked.remove(&tag).into_iter().collect();
        }
        let later = unacked.split_off(&DeliveryTag(tag.0 + 1));
        std::mem::replace(unacked, later).into_values().collect()
    }

    /// Takes a delivery out that is given back.
    pub fn take_given_back(&mut self, key: JobKey) -> Option<Unacked> {
        let StoredJob { model, tag, .. } = self.jobs.get(&key)?;
        self.unacked.get_mut(model)?.remove(tag)
    }
}

impl Payload {
    /// Takes in what reading the job gave.
    pub fn decoded(&mut self, decoded: Decoded) {
        self.address = Some(Arc::new(decoded.address));
        self.first = decoded.first;
        self.progress = decoded.wants_progress.then(Arc::default);
        self.outputs = decoded.items.iter().map(|_| None).collect();
        self.items = decoded.items.into_iter().map(Some).collect();
    }

    /// The encoding of its replies.
    pub fn encoding(&self) -> Encoding {
        self.address.as_ref().map(|address| address.encoding).unwrap_or_default()
    }

    /// Takes an item out for a pass.
    pub fn take_item(&mut self, index: u32) -> Option<Item> {
        let at = self.at(index)?;
        self.items.get_mut(at)?.take()
    }

    /// Puts an item of a pass back that gave no output for it.
    pub fn put_item_back(&mut self, index: u32, item: Item) {
        if let Some(slot) = self.at(index).and_then(|at| self.items.get_mut(at)) {
            *slot = Some(item);
        }
    }

    pub fn set_output(&mut self, index: u32, output: Output) {
        if let Some(slot) = self.at(index).and_then(|at| self.outputs.get_mut(at)) {
            *slot = Some(output);
        }
    }

    /// Takes the outputs of a run out; nothing if one of them is missing.
    pub fn take_outputs(&mut self, run: &Run) -> Option<Vec<Output>> {
        let first = self.at(run.offset)?;
        let slots = self.outputs.get_mut(first..first.checked_add(run.items as usize)?)?;
        if slots.iter().any(Option::is_none) {
            return None;
        }
        Some(slots.iter_mut().filter_map(Option::take).collect())
    }

    fn at(&self, index: u32) -> Option<usize> {
        index.checked_sub(self.first).map(|at| at as usize)
    }
}
