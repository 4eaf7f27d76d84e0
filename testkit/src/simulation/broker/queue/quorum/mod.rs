//! A quorum queue. It counts returns of messages, and gives a message up beyond the delivery limit. With a limit, returned messages go
//! before all others; without one, to the tail. Publishers learn late that the queue is full.

mod backlog;
mod consumer;
mod discards;
mod returns;

use std::collections::BTreeMap;
use std::sync::Arc;

use backlog::Backlog;
use consumer::Consumer;
use discards::Discards;
use returns::Return;

use super::rotation::Rotation;
use super::{ConsumerKey, Effect, Entry, Subscription, Taken, Taker};
use crate::simulation::broker::generation::Generation;
use crate::simulation::broker::message::{DeathReason, Message, Millis};
use crate::simulation::broker::mistake::Mistake;
use crate::simulation::broker::protocol::{ChannelId, Overflow, QueueOptions};

/// The credit of a consumer without a prefetch.
const CREDIT_UNLIMITED: u32 = 2_000;
/// Messages above this priority go first, where the generation knows priorities.
const PRIORITY_NORMAL_MAX: u8 = 4;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Quorum {
    options: QueueOptions,
    generation: Generation,
    backlog: Backlog,
    next_consumer: u64,
    consumers: BTreeMap<ConsumerKey, Consumer>,
    /// May contain consumers without credit or that are gone. They are skipped at their turn.
    service: Rotation,
    /// Channels that publish, and whether they know that the queue is full.
    publishers: BTreeMap<ChannelId, bool>,
    discards: Discards,
    mistake: Option<Mistake>,
}

/// The state before a command.
#[derive(Clone, Copy, Debug)]
struct Before {
    is_below_low_mark: bool,
    /// The number of effects at that time.
    effects: usize,
}

impl Quorum {
    pub fn new(options: QueueOptions, generation: Generation, mistake: Option<Mistake>) -> Self {
        Self {
            options,
            generation,
            backlog: Backlog::default(),
            next_consumer: 0,
            consumers: BTreeMap::new(),
            service: Rotation::default(),
            publishers: BTreeMap::new(),
            discards: Discards::default(),
            mistake,
        }
    }

    pub fn options(&self) -> &QueueOptions {
        &self.options
    }

    pub fn ready(&self) -> usize {
        self.backlog.len()
    }

    pub fn held(&self) -> usize {
        self.ready() + self.unacked() + self.discards.len()
    }

    pub fn unacked(&self) -> usize {
        self.consumers.values().map(|consumer| consumer.taken.len()).sum()
    }

    pub fn consumers(&self) -> Vec<ConsumerKey> {
        self.consumers.keys().cloned().collect()
    }

    pub fn knows(&self, channel: ChannelId) -> bool {
        self.publishers.contains_key(&channel)
            || self.consumers.keys().any(|(consumer, _)| *consumer == channel)
    }

    pub fn purge(&mut self, out: &mut Vec<Effect>) -> usize {
        let (before, ready) = (self.begin(out), self.ready());
        self.backlog.clear();
        self.keep_length(before, out);
        ready
    }

    pub fn register(&mut self, channel: ChannelId) -> bool {
        self.publishers.entry(channel).or_insert(false);
        self.options.overflow == Overflow::RejectPublish && self.over_limit()
    }

    pub fn enqueue(
        &mut self,
        message: Arc<Message>,
        confirm: Option<u64>,
        now: Millis,
        out: &mut Vec<Effect>,
    ) {
        let before = self.begin(out);
        let entry = Entry::new(message, self.backlog.next_position(), &self.options, now);
        let is_high =
            entry.message.properties.priority.is_some_and(|priority| priority > PRIORITY_NORMAL_MAX);
        let has_priorities =
            self.generation.quorum_priorities() && self.mistake != Some(Mistake::IgnoresMessagePriority);
        self.backlog.push(entry, is_high && has_priorities);
        out.extend(confirm.map(|confirm| Effect::Settled { confirm, accepted: true }));
        self.serve(before, now, out);
    }

    pub fn consume(&mut self, asked: Subscription, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        let key = (asked.channel, Taker::Consumer(asked.tag));
        let more = u32::from(self.mistake == Some(Mistake::PrefetchOffByOne));
        let prefetch = match asked.prefetch {
            0 => CREDIT_UNLIMITED,
            limit => u32::from(limit) + more,
        };
        let ignored = self.mistake == Some(Mistake::IgnoresConsumerPriority);
        let number = self.next_consumer;
        let consumer = self.consumers.entry(key.clone()).or_insert_with(|| Consumer::new(number));
        self.next_consumer += 1;
        // A cancelled consumer of the same tag may still hold messages.
        consumer.credit = prefetch.saturating_sub(consumer.taken.len() as u32);
        consumer.credit_max = self.generation.credit_ends_at_prefetch().then_some(prefetch);
        consumer.once = false;
        consumer.up = true;
        consumer.no_ack = asked.no_ack;
        consumer.priority = if ignored { 0 } else { asked.priority };
        self.update(&key);
        self.serve(before, now, out);
    }

    pub fn cancel(&mut self, key: &ConsumerKey, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        if let Some(consumer) = self.consumers.get_mut(key) {
            consumer.once = true;
            consumer.up = false;
            consumer.credit = 0;
            if self.mistake == Some(Mistake::CancelReturnsUnacked) {
                for (_, entry) in std::mem::take(&mut consumer.taken) {
                    self.return_one(entry, Return::Requeued, out);
                }
            }
        }
        self.update(key);
        self.serve(before, now, out);
    }

    pub fn get(
        &mut self,
        key: ConsumerKey,
        no_ack: bool,
        now: Millis,
        out: &mut Vec<Effect>,
    ) -> Option<Taken> {
        let before = self.begin(out);
        self.drop_expired(now, out);
        let Some(entry) = self.backlog.take() else {
            self.keep_length(before, out);
            return None;
        };
        let mut consumer = Consumer::new(self.next_consumer);
        (consumer.once, consumer.no_ack) = (true, no_ack);
        self.next_consumer += 1;
        let mut taken = consumer.take(entry, self.mistake);
        if self.generation.counts_from_zero() {
            taken.delivery_count.get_or_insert(0);
        }
        if no_ack {
            // It is settled at once, so the queue checks its head again.
            self.drop_expired(now, out);
        } else {
            self.consumers.insert(key, consumer);
        }
        self.keep_length(before, out);
        Some(taken)
    }

    pub fn expirations_mut(&mut self) -> impl Iterator<Item = &mut Option<Millis>> {
        let taken = self.consumers.values_mut().flat_map(|consumer| consumer.taken.values_mut());
        self.backlog.entries_mut().chain(taken).map(|entry| &mut entry.expires)
    }

    pub fn next_expiry(&self) -> Option<Millis> {
        self.backlog.head().and_then(|entry| entry.expires)
    }

    pub fn look(&mut self, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.serve(before, now, out);
    }

    pub fn restart(&mut self, now: Millis, out: &mut Vec<Effect>) {
        let channels: Vec<ChannelId> = self
            .consumers
            .keys()
            .map(|(channel, _)| *channel)
            .chain(self.publishers.keys().copied())
            .collect();
        for channel in channels {
            self.down(channel, now, out);
        }
        self.discards.restart();
    }

    pub fn unsent_discards(&self) -> impl Iterator<Item = (u64, &Arc<Message>, DeathReason)> {
        self.discards.unsent()
    }

    pub fn discard_sent(&mut self, id: u64, targets: usize) {
        self.discards.sent(id, targets);
    }

    pub fn discard_settled(&mut self, id: u64, accepted: bool, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        if self.discards.settled(id, accepted) {
            self.keep_length(before, out);
        }
    }

    /// Removes a finished consumer, and adds one that has credit to the rotation.
    fn update(&mut self, key: &ConsumerKey) {
        let Some(consumer) = self.consumers.get(key) else { return };
        if consumer.once && consumer.credit == 0 {
            if consumer.taken.is_empty() {
                self.consumers.remove(key);
                if self.generation.consumers_have_log_indexes() {
                    // If a consumer subscribes again under this tag, it has another key and does not get the old place.
                    self.service.retain(|other| other != key);
                }
            }
        } else if consumer.credit > 0 && consumer.up && !self.service.contains(key) {
            self.service.push(consumer.priority, key.clone());
        }
    }

    /// Delivers as long as there are messages and consumers with credit. What one consumer gets stays in order.
    fn serve(&mut self, before: Before, now: Millis, out: &mut Vec<Effect>) {
        self.drop_expired(now, out);
        while let Some(key) = self.service.first().cloned() {
            let servable = match self.consumers.get(&key) {
                None => false,
                // A consumer keeps its turn until there is a message.
                Some(_) if self.ready() == 0 => break,
                Some(consumer) => consumer.credit > 0 && consumer.up,
            };
            self.service.pop();
            if !servable {
                continue;
            }
            let Some(entry) = self.backlog.take() else { break };
            let Some(mut consumer) = self.consumers.remove(&key) else { break };
            consumer.credit -= 1;
            let taken = consumer.take(entry, self.mistake);
            let (no_ack, priority) = (consumer.no_ack, consumer.priority);
            let again = consumer.credit > 0 && self.mistake == Some(Mistake::NoRoundRobin);
            self.consumers.insert(key.clone(), consumer);
            if again {
                self.service.push_front(priority, key.clone());
            }
            self.update(&key);
            self.drop_expired(now, out);
            out.push(Effect::Deliver { channel: key.0, taker: key.1, taken, no_ack });
        }
        self.keep_length(before, out);
    }

    fn over_limit(&self) -> bool {
        let more = u32::from(self.mistake == Some(Mistake::LengthOffByOne));
        self.options.max_length.is_some_and(|max| self.ready() + self.discards.len() > (max + more) as usize)
    }

    /// At 80 % of the limit publishers may publish again.
    fn below_low_mark(&self) -> bool {
        self.options.max_length.is_some_and(|max| self.ready() + self.discards.len() <= max as usize * 4 / 5)
    }

    fn begin(&self, out: &[Effect]) -> Before {
        Before { is_below_low_mark: self.below_low_mark(), effects: out.len() }
    }

    /// Drops messages beyond the limit, or notifies publishers whether the queue is full. Dropped messages are dead-lettered before
    /// everything else that the same command gave up, the last one first.
    fn keep_length(&mut self, before: Before, out: &mut Vec<Effect>) {
        let drops = self.options.overflow == Overflow::DropHead
            || self.mistake == Some(Mistake::DropsInsteadOfRejecting);
        if drops {
            while self.over_limit() {
                let Some(entry) = self.backlog.take() else { return };
                let mut dropped = Vec::new();
                self.give_up(entry, DeathReason::MaxLength, &mut dropped);
                out.splice(before.effects..before.effects, dropped);
            }
        } else if self.over_limit() {
            self.refuse(true, out);
        } else if !before.is_below_low_mark && self.below_low_mark() {
            self.refuse(false, out);
        }
    }

    fn refuse(&mut self, refuses: bool, out: &mut Vec<Effect>) {
        for (channel, knows) in &mut self.publishers {
            // All channels are notified that the queue has room again.
            if !(refuses && *knows) {
                *knows = refuses;
                out.push(Effect::Refuses { channel: *channel, refuses });
            }
        }
    }
}
