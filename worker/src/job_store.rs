//! The jobs that the shell holds for the core: for each [`JobKey`] the delivery, the items, the outputs, and unconfirmed replies. The core
//! sees only numbers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use lapin::Acker;
use vramq_core::action::Run;
use vramq_core::event::PublicationOutcome;
use vramq_core::ids::{ChannelId, DeliveryTag, ItemIndex, JobKey, ModelIndex};
use vramq_schemas::{Encoding, Output};

use crate::broker::job_channel::JobChannel;
use crate::broker::message::Message;
use crate::broker::received::ReceivedJob;
use crate::decode::Decoded;
use crate::engine::Item;
use crate::observability::summary::Summary;
use crate::preparation::Unprepared;
use crate::prepared_items::PreparedItems;
use crate::progress::RateLimit;
use crate::run_outputs::RunOutputs;
use crate::stores::Wanted;
use crate::stores::fetch::Fetched;

/// All unsettled jobs of a session. Bounded by the consumers' prefetch.
#[derive(Debug, Default)]
pub struct JobStore {
    jobs: HashMap<JobKey, StoredJob>,
    /// For each channel: deliveries that are neither acknowledged nor given back.
    unacked: ByChannel<Unacked>,
    last: u64,
}

/// A job.
#[derive(Debug)]
pub struct StoredJob {
    pub model: ModelIndex,
    channel: ChannelId,
    tag: DeliveryTag,
    pub summary: Arc<Summary>,
    pub payload: Payload,
}

/// The contents of a job.
#[derive(Debug)]
pub struct Payload {
    pub received: Arc<ReceivedJob>,
    /// The encoding of its replies; set once the job is read.
    pub encoding: Option<Encoding>,
    /// Inputs that are to be fetched.
    pub wanted: Vec<Wanted>,
    /// The fetch in progress; dropping the job cancels it.
    pub fetch: Option<Fetch>,
    /// Fetched inputs with the memory that they take, until the job is read again.
    pub fetched: Option<Fetched>,
    /// Inputs that are not prepared yet; `None` while some of them are being prepared.
    pub unprepared: Option<Unprepared>,
    items: PreparedItems,
    /// Index within the job of the first entry of `outputs` and `tokens`.
    first: u32,
    outputs: Vec<Option<Output>>,
    /// The tokens of each prepared item, if the engine counts tokens.
    tokens: Option<Vec<u32>>,
    /// Limits the progress replies; `None` if the caller did not ask for any.
    pub progress: Option<Arc<RateLimit>>,
    /// What the broker has not confirmed of the last reply.
    pub unconfirmed: Unconfirmed,
}

/// Messages of a publication that the broker has not confirmed.
#[derive(Debug)]
pub struct Unconfirmed {
    pub messages: Vec<Message>,
    /// The outcome of the whole publication once the broker has these messages too.
    pub once_confirmed: PublicationOutcome,
}

impl Default for Unconfirmed {
    fn default() -> Self {
        Self { messages: Vec::new(), once_confirmed: PublicationOutcome::Confirmed { messages: 0 } }
    }
}

/// The task of a fetch. Dropping this cancels it, because nothing waits for the result then.
#[derive(Debug)]
pub struct Fetch(pub tokio::task::AbortHandle);

impl Drop for Fetch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A delivery that is still to be acknowledged or given back.
#[derive(Clone, Debug)]
pub struct Unacked {
    pub acker: Acker,
    /// Keeps the channel open: an ack must use the channel of its delivery, even if a newer channel consumes.
    _channel: Arc<JobChannel>,
    pub summary: Arc<Summary>,
}

impl JobStore {
    /// Takes in a delivery.
    pub fn add(
        &mut self,
        model: ModelIndex,
        channel: &Arc<JobChannel>,
        received: ReceivedJob,
    ) -> (JobKey, Arc<ReceivedJob>) {
        self.last += 1;
        let key = JobKey(self.last);
        let (tag, summary) = (DeliveryTag(received.delivery.delivery_tag), Arc::clone(&received.summary));
        let unacked = Unacked {
            acker: received.delivery.acker.clone(),
            _channel: Arc::clone(channel),
            summary: Arc::clone(&summary),
        };
        let channel = channel.id();
        self.unacked.insert(channel, tag, unacked);
        let received = Arc::new(received);
        let payload = Payload {
            received: Arc::clone(&received),
            encoding: None,
            wanted: Vec::new(),
            fetch: None,
            fetched: None,
            unprepared: None,
            items: PreparedItems::default(),
            first: 0,
            outputs: Vec::new(),
            tokens: None,
            progress: None,
            unconfirmed: Unconfirmed::default(),
        };
        self.jobs.insert(key, StoredJob { model, channel, tag, summary, payload });
        (key, received)
    }

    pub fn get(&self, key: JobKey) -> Option<&StoredJob> {
        self.jobs.get(&key)
    }

    pub fn get_mut(&mut self, key: JobKey) -> Option<&mut StoredJob> {
        self.jobs.get_mut(&key)
    }

    pub fn payload(&self, key: JobKey) -> Option<&Payload> {
        Some(&self.get(key)?.payload)
    }

    pub fn payload_mut(&mut self, key: JobKey) -> Option<&mut Payload> {
        Some(&mut self.get_mut(key)?.payload)
    }

    /// Removes a job that has ended here.
    pub fn remove(&mut self, key: JobKey) {
        self.jobs.remove(&key);
    }

    /// The session is closed, and the broker redelivers what was not acknowledged.
    pub fn clear(&mut self) {
        self.jobs.clear();
        self.unacked = ByChannel::default();
    }

    /// Removes and returns the deliveries that an ack covers. The last one is the one that the frame names.
    pub fn take_acked(&mut self, channel: ChannelId, tag: DeliveryTag, multiple: bool) -> Vec<Unacked> {
        if multiple {
            self.unacked.take_up_to(channel, tag)
        } else {
            self.unacked.take(channel, tag).into_iter().collect()
        }
    }

    /// Removes and returns a delivery that is given back or rejected.
    pub fn take_nacked(&mut self, key: JobKey) -> Option<Unacked> {
        let StoredJob { channel, tag, .. } = self.jobs.get(&key)?;
        self.unacked.take(*channel, *tag)
    }
}

/// Deliveries by channel and number. A channel without deliveries has no entry: a further queue that is found again has a new channel, and
/// its old one delivers nothing more.
#[derive(Debug)]
struct ByChannel<T>(HashMap<ChannelId, BTreeMap<DeliveryTag, T>>);

impl<T> Default for ByChannel<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> ByChannel<T> {
    fn insert(&mut self, channel: ChannelId, tag: DeliveryTag, delivery: T) {
        self.0.entry(channel).or_default().insert(tag, delivery);
    }

    fn take(&mut self, channel: ChannelId, tag: DeliveryTag) -> Option<T> {
        let taken = self.0.get_mut(&channel)?.remove(&tag);
        self.drop_if_empty(channel);
        taken
    }

    /// Removes and returns the deliveries of a channel up to this one.
    fn take_up_to(&mut self, channel: ChannelId, last: DeliveryTag) -> Vec<T> {
        let Some(deliveries) = self.0.get_mut(&channel) else { return Vec::new() };
        let later = deliveries.split_off(&DeliveryTag(last.0 + 1));
        let taken = std::mem::replace(deliveries, later).into_values().collect();
        self.drop_if_empty(channel);
        taken
    }

    fn drop_if_empty(&mut self, channel: ChannelId) {
        if self.0.get(&channel).is_some_and(BTreeMap::is_empty) {
            self.0.remove(&channel);
        }
    }
}

impl Payload {
    /// Stores the result of reading the job.
    pub fn decoded(&mut self, decoded: Decoded) {
        let Decoded { encoding, items_total, first, items, rest, wants_progress, .. } = decoded;
        self.encoding = Some(encoding);
        self.first = first;
        self.progress = wants_progress.then(|| Arc::new(RateLimit::new(items_total)));
        self.outputs = std::iter::repeat_with(|| None).take(items.len() + rest.len()).collect();
        self.tokens = tokens(&items);
        self.items = PreparedItems::new(first, items);
        self.unprepared = Some(rest);
    }

    /// Stores the next prepared items.
    pub fn prepared(&mut self, items: Vec<Item>) {
        self.tokens = self.tokens.take().zip(tokens(&items)).map(|(mut tokens, more)| {
            tokens.extend(more);
            tokens
        });
        self.items.extend(items);
    }

    /// Removes and returns an item for a pass.
    pub fn take_item(&mut self, index: ItemIndex) -> Option<Item> {
        self.items.take(index.0)
    }

    /// Puts back an item for which its pass returned no output.
    pub fn put_item_back(&mut self, index: ItemIndex, item: Item) {
        self.items.put_back(index.0, item);
    }

    pub fn set_output(&mut self, index: ItemIndex, output: Output) {
        if let Some(slot) = self.at(index.0).and_then(|at| self.outputs.get_mut(at)) {
            *slot = Some(output);
        }
    }

    /// Removes and returns the outputs of a run; `None` if one is missing.
    pub fn take_outputs(&mut self, run: &Run) -> Option<RunOutputs> {
        let first = self.at(run.offset)?;
        let range = first..first.checked_add(run.items as usize)?;
        let tokens = self.tokens.as_ref().and_then(|tokens| Some(tokens.get(range.clone())?.to_vec()));
        let slots = self.outputs.get_mut(range)?;
        if slots.iter().any(Option::is_none) {
            return None;
        }
        Some(RunOutputs { outputs: slots.iter_mut().filter_map(Option::take).collect(), tokens })
    }

    fn at(&self, index: u32) -> Option<usize> {
        index.checked_sub(self.first).map(|at| at as usize)
    }
}

/// The tokens of each item, if the engine takes tokens.
fn tokens(items: &[Item]) -> Option<Vec<u32>> {
    let of = |item: &Item| match item {
        Item::Tokens { .. } | Item::Sparse(_) | Item::Scored(_) => u32::try_from(item.cost()).ok(),
        Item::Plain(_) | Item::Program(_) => None,
    };
    items.iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_is_forgotten_with_its_last_delivery() {
        let mut by_channel = ByChannel::default();
        let channel = |number| ChannelId { model: ModelIndex(0), number };
        for number in 0..100 {
            (1..=4).for_each(|tag| by_channel.insert(channel(number), DeliveryTag(tag), tag));
            assert_eq!(by_channel.take_up_to(channel(number), DeliveryTag(2)), [1, 2]);
            assert_eq!(by_channel.take(channel(number), DeliveryTag(4)), Some(4));
            assert_eq!(by_channel.take(channel(number), DeliveryTag(4)), None);
            assert_eq!(by_channel.0.len(), 1);
            assert_eq!(by_channel.take_up_to(channel(number), DeliveryTag(9)), [3]);
            assert!(by_channel.take_up_to(channel(number), DeliveryTag(9)).is_empty());
        }
        assert!(by_channel.0.is_empty());
    }
}
