//! A quorum queue. Requeued messages are counted, and given up beyond the delivery limit; with a limit they go before
//! all others, without one to the tail. Length limits reach publishers late.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::rotation::Rotation;
use super::{ConsumerKey, Effect, Entry, Subscription, Taken, Taker};
use crate::simulation::broker::generation::Generation;
use crate::simulation::broker::message::{DeathReason, Message, Millis, Name};
use crate::simulation::broker::mistake::Mistake;
use crate::simulation::broker::protocol::{ChannelId, Overflow, QueueOptions};

/// What stands for "no prefetch".
const CREDIT_UNLIMITED: u32 = 2_000;
/// Messages above this priority go first, where the generation knows priorities.
const PRIORITY_NORMAL_MAX: u8 = 4;
/// After so many messages in a row one of normal priority goes first, if it came earlier.
const HIGH_IN_A_ROW: u8 = 2;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Quorum {
    options: QueueOptions,
    generation: Generation,
    high: VecDeque<Entry>,
    normal: VecDeque<Entry>,
    /// What came back, and goes before all others.
    returned: VecDeque<Entry>,
    /// Messages out of `high` and `normal` since one of normal priority was due.
    taken_in_a_row: u8,
    next_position: u64,
    next_consumer: u64,
    consumers: BTreeMap<ConsumerKey, Consumer>,
    /// May name consumers that have no credit, or are gone: they are left out when their turn comes.
    service: Rotation,
    /// Channels that publish, and whether they know that the queue is full.
    publishers: BTreeMap<ChannelId, bool>,
    discards: VecDeque<Discard>,
    next_discard: u64,
    mistake: Option<Mistake>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Consumer {
    credit: u32,
    /// Takes no credit back, and is gone with its last message: cancelled, or `basic.get`.
    once: bool,
    up: bool,
    no_ack: bool,
    next_id: u64,
    taken: BTreeMap<u64, Entry>,
    priority: i32,
    subscribed: u64,
}

/// How things stood when a command began.
#[derive(Clone, Copy, Debug)]
struct Before {
    is_below_low_mark: bool,
    /// The effects that there were.
    effects: usize,
}

/// A message on its way to a dead-letter exchange, kept until its queues have it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Discard {
    id: u64,
    message: Arc<Message>,
    reason: DeathReason,
    /// Queues that were sent it and have not answered. None: not sent.
    waits_for: Option<usize>,
    refused: bool,
}

impl Quorum {
    pub fn new(options: QueueOptions, generation: Generation, mistake: Option<Mistake>) -> Self {
        Self {
            options,
            generation,
            high: VecDeque::new(),
            normal: VecDeque::new(),
            returned: VecDeque::new(),
            taken_in_a_row: 0,
            next_position: 0,
            next_consumer: 0,
            consumers: BTreeMap::new(),
            service: Rotation::default(),
            publishers: BTreeMap::new(),
            discards: VecDeque::new(),
            next_discard: 0,
            mistake,
        }
    }

    pub fn options(&self) -> &QueueOptions {
        &self.options
    }

    pub fn ready(&self) -> usize {
        self.high.len() + self.normal.len() + self.returned.len()
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
        self.high.clear();
        self.normal.clear();
        self.returned.clear();
        self.taken_in_a_row = 0;
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
        let entry = Entry::new(message, self.next_position, &self.options, now);
        self.next_position += 1;
        let high = entry.message.properties.priority.is_some_and(|priority| priority > PRIORITY_NORMAL_MAX);
        if high
            && self.generation.quorum_priorities()
            && self.mistake != Some(Mistake::IgnoresMessagePriority)
        {
            self.high.push_back(entry);
        } else {
            self.normal.push_back(entry);
        }
        out.extend(confirm.map(|confirm| Effect::Settled { confirm, accepted: true }));
        self.serve(before, now, out);
    }

    pub fn settle(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.complete(key, ids);
        self.serve(before, now, out);
    }

    pub fn discard(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        let entries = self.complete(key, ids);
        if self.mistake != Some(Mistake::RejectsSilently) {
            for entry in entries {
                self.give_up(entry, DeathReason::Rejected, out);
            }
        }
        self.serve(before, now, out);
    }

    pub fn requeue(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let without_limit = self.generation.delivery_limit(self.options.delivery_limit).is_none();
        if without_limit != (self.mistake == Some(Mistake::RequeuesElsewhere)) {
            self.requeue_to_tail(key, ids, now, out);
            return;
        }
        let before = self.begin(out);
        let mut given_up = 0;
        let mut returned = 0;
        for id in ids {
            let Some(consumer) = self.consumers.get_mut(key) else { break };
            let Some(entry) = consumer.taken.remove(id) else { continue };
            returned += 1;
            given_up += u32::from(self.return_one(entry, out));
        }
        if let Some(consumer) = self.consumers.get_mut(key)
            && !consumer.once
        {
            let twice = if self.generation.credit_counted_twice() { given_up } else { 0 };
            consumer.credit += returned + twice;
        }
        self.update(key);
        self.serve(before, now, out);
    }

    pub fn down(&mut self, channel: ChannelId, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.publishers.remove(&channel);
        let mut keys: Vec<ConsumerKey> =
            self.consumers.keys().filter(|(consumer, _)| *consumer == channel).cloned().collect();
        if self.generation.returns_in_order_of_subscription() {
            keys.sort_by_key(|key| self.consumers.get(key).map(|consumer| consumer.subscribed));
        } else {
            // There, a get's tag is its number in digits.
            keys.sort_by_key(|(_, taker)| match taker {
                Taker::Get(number) => Name::from(number.to_string()),
                Taker::Consumer(tag) => tag.clone(),
            });
        }
        for key in keys {
            let Some(consumer) = self.consumers.remove(&key) else { continue };
            for (_, entry) in consumer.taken {
                if self.mistake != Some(Mistake::LossLosesUnacked) {
                    self.return_one(entry, out);
                }
            }
        }
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
        let consumer = self.consumers.entry(key.clone()).or_insert_with(|| Consumer {
            credit: 0,
            once: false,
            up: true,
            no_ack: false,
            next_id: 0,
            taken: BTreeMap::new(),
            priority: 0,
            subscribed: self.next_consumer,
        });
        self.next_consumer += 1;
        // A cancelled consumer of the same tag may still hold messages.
        consumer.credit = prefetch.saturating_sub(consumer.taken.len() as u32);
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
                    self.return_one(entry, out);
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
        let Some(entry) = self.take_next() else {
            self.keep_length(before, out);
            return None;
        };
        let mut consumer = Consumer {
            credit: 0,
            once: true,
            up: true,
            no_ack,
            next_id: 0,
            taken: BTreeMap::new(),
            priority: 0,
            subscribed: self.next_consumer,
        };
        self.next_consumer += 1;
        let mut taken = self.hand_over(&mut consumer, entry);
        if self.generation.counts_from_zero() {
            taken.delivery_count.get_or_insert(0);
        }
        if no_ack {
            // It is settled at once, and the queue looks at its head again.
            self.drop_expired(now, out);
        } else {
            self.consumers.insert(key, consumer);
        }
        self.keep_length(before, out);
        Some(taken)
    }

    pub fn expirations_mut(&mut self) -> impl Iterator<Item = &mut Option<Millis>> {
        let waiting = self.high.iter_mut().chain(&mut self.normal).chain(&mut self.returned);
        let taken = self.consumers.values_mut().flat_map(|consumer| consumer.taken.values_mut());
        waiting.chain(taken).map(|entry| &mut entry.expires)
    }

    pub fn next_expiry(&self) -> Option<Millis> {
        self.head().and_then(|entry| entry.expires)
    }

    pub fn look(&mut self, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.serve(before, now, out);
    }

    /// Gives up what is at the head and expired.
    fn drop_expired(&mut self, now: Millis, out: &mut Vec<Effect>) {
        while self.head().is_some_and(|entry| entry.expired(now)) {
            let Some(entry) = self.take_next() else { return };
            if self.mistake != Some(Mistake::ExpiresSilently) {
                self.give_up(entry, DeathReason::Expired, out);
            }
        }
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
        for discard in &mut self.discards {
            discard.waits_for = None;
        }
    }

    pub fn next_discard(&self) -> Option<(u64, &Arc<Message>, DeathReason)> {
        let discard = self.discards.iter().find(|discard| discard.waits_for.is_none())?;
        Some((discard.id, &discard.message, discard.reason))
    }

    pub fn discard_sent(&mut self, id: u64, targets: usize) {
        if let Some(discard) = self.discards.iter_mut().find(|discard| discard.id == id) {
            discard.waits_for = Some(targets);
            discard.refused = false;
        }
    }

    pub fn discard_settled(&mut self, id: u64, accepted: bool, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        let Some(discard) = self.discards.iter_mut().find(|discard| discard.id == id) else { return };
        discard.refused |= !accepted;
        let left = discard.waits_for.unwrap_or(0).saturating_sub(1);
        discard.waits_for = Some(left);
        if left == 0 {
            // What one queue refused is sent to all of them again.
            discard.waits_for = None;
            if !discard.refused {
                self.discards.retain(|discard| discard.id != id);
            }
        }
        self.keep_length(before, out);
    }

    /// Settles, gives credit, and returns what was settled.
    fn complete(&mut self, key: &ConsumerKey, ids: &[u64]) -> Vec<Entry> {
        let Some(consumer) = self.consumers.get_mut(key) else { return Vec::new() };
        let entries: Vec<Entry> = ids.iter().filter_map(|id| consumer.taken.remove(id)).collect();
        if !consumer.once {
            consumer.credit += entries.len() as u32;
        }
        self.update(key);
        entries
    }

    /// Without a limit each message is appended by itself.
    fn requeue_to_tail(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        for id in ids {
            let before = self.begin(out);
            let Some(consumer) = self.consumers.get_mut(key) else { return };
            let Some(mut entry) = consumer.taken.remove(id) else { continue };
            if !consumer.once {
                consumer.credit += 1;
            }
            entry.returns += 1;
            entry.position = self.next_position;
            self.next_position += 1;
            self.normal.push_back(entry);
            self.update(key);
            self.serve(before, now, out);
        }
    }

    /// Counts, and puts before all others or gives up; whether it was given up.
    fn return_one(&mut self, mut entry: Entry, out: &mut Vec<Effect>) -> bool {
        entry.returns += 1;
        let more = u32::from(self.mistake == Some(Mistake::LimitOffByOne));
        let limit = self.generation.delivery_limit(self.options.delivery_limit);
        if limit.is_some_and(|limit| entry.returns > limit + more) {
            self.give_up(entry, DeathReason::DeliveryLimit, out);
            true
        } else {
            self.returned.push_back(entry);
            false
        }
    }

    /// Removes a consumer that is done, and puts one with credit into the rotation.
    fn update(&mut self, key: &ConsumerKey) {
        let Some(consumer) = self.consumers.get(key) else { return };
        if consumer.once && consumer.credit == 0 {
            if consumer.taken.is_empty() {
                self.consumers.remove(key);
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
                // Whose turn it is keeps it until there is a message.
                Some(_) if self.ready() == 0 => break,
                Some(consumer) => consumer.credit > 0 && consumer.up,
            };
            self.service.pop();
            if !servable {
                continue;
            }
            let Some(entry) = self.take_next() else { break };
            let Some(mut consumer) = self.consumers.remove(&key) else { break };
            consumer.credit -= 1;
            let taken = self.hand_over(&mut consumer, entry);
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

    fn hand_over(&self, consumer: &mut Consumer, entry: Entry) -> Taken {
        let carried = entry.message.carried_count;
        let count = (entry.returns > 0).then_some(entry.returns).or(carried);
        let message = match carried {
            None => entry.message.clone(),
            Some(_) => Arc::new(Message { carried_count: None, ..(*entry.message).clone() }),
        };
        let id = consumer.next_id;
        consumer.next_id += 1;
        let taken = Taken {
            id,
            message,
            redelivered: count.is_some() && self.mistake != Some(Mistake::ForgetsRedelivered),
            delivery_count: match self.mistake {
                Some(Mistake::ForgetsDeliveryCount) => count.map(|_| 1),
                _ => count,
            },
        };
        // A quorum queue's `no_ack` is an ack that the channel sends.
        consumer.taken.insert(id, entry);
        taken
    }

    fn head(&self) -> Option<&Entry> {
        self.returned
            .front()
            .or_else(|| if self.normal_first() { self.normal.front() } else { self.high.front() })
    }

    fn take_next(&mut self) -> Option<Entry> {
        if let Some(entry) = self.returned.pop_front() {
            return Some(entry);
        }
        let next = if self.normal_first() { self.normal.pop_front() } else { self.high.pop_front() }?;
        self.taken_in_a_row = if self.taken_in_a_row == HIGH_IN_A_ROW { 0 } else { self.taken_in_a_row + 1 };
        Some(next)
    }

    fn normal_first(&self) -> bool {
        match (self.high.front(), self.normal.front()) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(high), Some(normal)) => {
                self.taken_in_a_row == HIGH_IN_A_ROW && high.position > normal.position
            }
        }
    }

    fn give_up(&mut self, mut entry: Entry, reason: DeathReason, out: &mut Vec<Effect>) {
        if self.options.dead_letter_exchange.is_none() {
            return;
        }
        if self.generation.dead_letters_keep_count() && entry.returns > 0 {
            Arc::make_mut(&mut entry.message).carried_count = Some(entry.returns);
        }
        if !self.options.dead_letters_at_least_once() {
            out.push(Effect::DeadLetter { message: entry.message, reason });
            return;
        }
        self.discards.push_back(Discard {
            id: self.next_discard,
            message: entry.message,
            reason,
            waits_for: None,
            refused: false,
        });
        self.next_discard += 1;
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

    /// Drops what is too much, or says to publishers whether the queue is full. What is dropped is dead-lettered before all else that
    /// the same command gave up, the last first.
    fn keep_length(&mut self, before: Before, out: &mut Vec<Effect>) {
        let drops = self.options.overflow == Overflow::DropHead
            || self.mistake == Some(Mistake::DropsInsteadOfRejecting);
        if drops {
            while self.over_limit() {
                let Some(entry) = self.take_next() else { return };
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
            // All channels learn that there is room again.
            if !(refuses && *knows) {
                *knows = refuses;
                out.push(Effect::Refuses { channel: *channel, refuses });
            }
        }
    }
}
