//! A classic queue. Requeued messages return to their places. A consumer without credit leaves the rotation when its turn comes, and joins
//! the end again after an ack.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::rotation::Rotation;
use super::{ConsumerKey, Effect, Entry, Subscription, Taken, Taker};
use crate::simulation::broker::message::{DeathReason, Message, Millis};
use crate::simulation::broker::mistake::Mistake;
use crate::simulation::broker::protocol::{ChannelId, Overflow, QueueOptions};

/// The order of delivery: higher priorities first, then by arrival.
type Place = (Reverse<u8>, u64);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Classic {
    options: QueueOptions,
    ready: BTreeMap<Place, Entry>,
    /// By number: the message and its consumer.
    unacked: BTreeMap<u64, (Entry, ConsumerKey)>,
    next_position: u64,
    /// Consumers that may have credit.
    active: Rotation,
    /// Consumers that had no credit at their turn, by channel.
    blocked: BTreeMap<ChannelId, Rotation>,
    /// How many more messages a consumer may get. Consumers without an entry have no limit.
    credit: BTreeMap<ConsumerKey, u32>,
    no_ack: BTreeSet<ConsumerKey>,
    /// When the queue checks its head for expiration. A message that comes to the head because of its priority does not set this: it
    /// expires only when the queue checks for another reason.
    looks_at: Option<Millis>,
    mistake: Option<Mistake>,
}

impl Classic {
    pub fn new(options: QueueOptions, mistake: Option<Mistake>) -> Self {
        Self {
            options,
            ready: BTreeMap::new(),
            unacked: BTreeMap::new(),
            next_position: 0,
            active: Rotation::default(),
            blocked: BTreeMap::new(),
            credit: BTreeMap::new(),
            no_ack: BTreeSet::new(),
            looks_at: None,
            mistake,
        }
    }

    pub fn options(&self) -> &QueueOptions {
        &self.options
    }

    pub fn ready(&self) -> usize {
        self.ready.len()
    }

    pub fn held(&self) -> usize {
        self.ready.len() + self.unacked.len()
    }

    pub fn unacked(&self) -> usize {
        self.unacked.len()
    }

    pub fn consumers(&self) -> Vec<ConsumerKey> {
        self.active.keys().chain(self.blocked.values().flat_map(Rotation::keys)).cloned().collect()
    }

    pub fn knows(&self, channel: ChannelId) -> bool {
        self.unacked.values().any(|(_, (holder, _))| *holder == channel)
            || self.consumers().iter().any(|(consumer, _)| *consumer == channel)
            || self.credit.keys().any(|(consumer, _)| *consumer == channel)
    }

    pub fn purge(&mut self, _: &mut Vec<Effect>) -> usize {
        std::mem::take(&mut self.ready).len()
    }

    pub fn enqueue(
        &mut self,
        message: Arc<Message>,
        confirm: Option<u64>,
        now: Millis,
        out: &mut Vec<Effect>,
    ) {
        let full = self.length_max().is_some_and(|max| self.ready.len() >= max);
        if full && self.overflow() == Overflow::RejectPublish {
            out.extend(confirm.map(|confirm| Effect::Settled { confirm, accepted: false }));
            return;
        }
        out.extend(confirm.map(|confirm| Effect::Settled { confirm, accepted: true }));
        let entry = Entry::new(message, self.next_position, &self.options, now);
        self.next_position += 1;
        let expires = entry.expires.is_some();
        self.ready.insert(self.place(&entry), entry);
        // Before this message, either the queue was empty or no consumer had credit.
        self.serve(now, out);
        let dropped = self.drop_overflow(out);
        let is_only_one = self.ready.len() == 1;
        if (dropped && (expires || !is_only_one)) || (!dropped && is_only_one) {
            self.expire(now, out);
        }
    }

    pub fn settle(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let (_, unblocked) = self.take_back(key, ids);
        if unblocked {
            self.serve(now, out);
        }
    }

    pub fn requeue(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let (entries, _) = self.take_back(key, ids);
        self.put_back(entries, now, out);
    }

    pub fn discard(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let (entries, unblocked) = self.take_back(key, ids);
        if self.mistake != Some(Mistake::RejectsSilently) {
            out.extend(entries.into_iter().map(|entry| dead(entry, DeathReason::Rejected)));
        }
        if unblocked {
            self.serve(now, out);
        }
    }

    pub fn down(&mut self, channel: ChannelId, now: Millis, out: &mut Vec<Effect>) {
        self.active.retain(|(consumer, _)| *consumer != channel);
        self.blocked.remove(&channel);
        self.credit.retain(|(consumer, _), _| *consumer != channel);
        self.no_ack.retain(|(consumer, _)| *consumer != channel);
        let ids: Vec<u64> =
            self.unacked.iter().filter(|(_, (_, key))| key.0 == channel).map(|(id, _)| *id).collect();
        let mut entries: Vec<Entry> =
            ids.iter().filter_map(|id| self.unacked.remove(id)).map(|(entry, _)| entry).collect();
        if self.mistake == Some(Mistake::LossLosesUnacked) {
            entries.clear();
        }
        self.put_back(entries, now, out);
    }

    pub fn consume(&mut self, asked: Subscription, now: Millis, out: &mut Vec<Effect>) {
        let key = (asked.channel, Taker::Consumer(asked.tag));
        if asked.no_ack {
            self.no_ack.insert(key.clone());
        } else if asked.prefetch > 0 {
            let more = u32::from(self.mistake == Some(Mistake::PrefetchOffByOne));
            self.credit.insert(key.clone(), u32::from(asked.prefetch) + more);
        }
        let priority =
            if self.mistake == Some(Mistake::IgnoresConsumerPriority) { 0 } else { asked.priority };
        self.active.push(priority, key);
        self.serve(now, out);
    }

    pub fn cancel(&mut self, key: &ConsumerKey, now: Millis, out: &mut Vec<Effect>) {
        self.active.retain(|other| other != key);
        if let Some(blocked) = self.blocked.get_mut(&key.0) {
            blocked.retain(|other| other != key);
        }
        self.credit.remove(key);
        self.no_ack.remove(key);
        if self.mistake == Some(Mistake::CancelReturnsUnacked) {
            let ids: Vec<u64> =
                self.unacked.iter().filter(|(_, (_, holder))| holder == key).map(|(id, _)| *id).collect();
            self.requeue(key, &ids, now, out);
        }
    }

    pub fn get(
        &mut self,
        key: ConsumerKey,
        no_ack: bool,
        now: Millis,
        out: &mut Vec<Effect>,
    ) -> Option<Taken> {
        let (_, entry) = self.ready.pop_first()?;
        // The new head is checked for expiration before the remaining messages are counted.
        self.expire(now, out);
        Some(self.hand_over(entry, key, no_ack))
    }

    pub fn expirations_mut(&mut self) -> impl Iterator<Item = &mut Option<Millis>> {
        let entries = self.ready.values_mut().chain(self.unacked.values_mut().map(|(entry, _)| entry));
        entries.map(|entry| &mut entry.expires).chain([&mut self.looks_at])
    }

    pub fn next_expiry(&self) -> Option<Millis> {
        self.looks_at
    }

    /// It is time to look at the head.
    pub fn look(&mut self, now: Millis, out: &mut Vec<Effect>) {
        self.looks_at = None;
        self.expire(now, out);
    }

    fn expire(&mut self, now: Millis, out: &mut Vec<Effect>) {
        // Messages behind an unexpired message stay, even with a lower priority.
        while let Some(head) = self.ready.first_entry()
            && head.get().expired(now)
        {
            let entry = head.remove();
            if self.mistake != Some(Mistake::ExpiresSilently) {
                out.push(dead(entry, DeathReason::Expired));
            }
        }
        if let Some(at) = self.ready.values().next().and_then(|entry| entry.expires) {
            self.looks_at = Some(self.looks_at.map_or(at, |looks_at| looks_at.min(at)));
        }
    }

    pub fn restart(&mut self, now: Millis, out: &mut Vec<Effect>) {
        let channels: BTreeSet<ChannelId> = self
            .consumers()
            .into_iter()
            .map(|(channel, _)| channel)
            .chain(self.unacked.values().map(|(_, (channel, _))| *channel))
            .collect();
        for channel in channels {
            self.down(channel, now, out);
        }
        self.ready.retain(|_, entry| entry.message.properties.persistent);
        self.look(now, out);
    }

    fn place(&self, entry: &Entry) -> Place {
        let highest = match self.mistake {
            Some(Mistake::IgnoresMessagePriority) => 0,
            _ => self.options.max_priority.unwrap_or(0),
        };
        (Reverse(entry.message.properties.priority.unwrap_or(0).min(highest)), entry.position)
    }

    fn length_max(&self) -> Option<usize> {
        let more = u32::from(self.mistake == Some(Mistake::LengthOffByOne));
        self.options.max_length.map(|max| (max + more) as usize)
    }

    fn overflow(&self) -> Overflow {
        if self.mistake == Some(Mistake::DropsInsteadOfRejecting) {
            Overflow::DropHead
        } else {
            self.options.overflow
        }
    }

    /// Drops messages beyond the length limit. Returns whether there were any.
    fn drop_overflow(&mut self, out: &mut Vec<Effect>) -> bool {
        let Some(max) = self.length_max() else { return false };
        let mut dropped = false;
        while self.overflow() == Overflow::DropHead && self.ready.len() > max {
            let Some((_, entry)) = self.ready.pop_first() else { break };
            out.push(dead(entry, DeathReason::MaxLength));
            dropped = true;
        }
        dropped
    }

    /// Delivers as long as there are messages and consumers with credit.
    fn serve(&mut self, now: Millis, out: &mut Vec<Effect>) {
        while !self.ready.is_empty() {
            let Some((priority, key)) = self.active.pop() else { return };
            match self.credit.get_mut(&key) {
                Some(0) => {
                    self.blocked.entry(key.0).or_default().push(priority, key);
                    continue;
                }
                Some(credit) => *credit -= 1,
                None => {}
            }
            let Some((_, entry)) = self.ready.pop_first() else { return };
            let no_ack = self.no_ack.contains(&key);
            // What comes to the head is looked at.
            self.expire(now, out);
            let taken = self.hand_over(entry, key.clone(), no_ack);
            out.push(Effect::Deliver { channel: key.0, taker: key.1.clone(), taken, no_ack });
            if self.mistake == Some(Mistake::NoRoundRobin) {
                self.active.push_front(priority, key);
            } else {
                self.active.push(priority, key);
            }
        }
    }

    fn hand_over(&mut self, entry: Entry, key: ConsumerKey, no_ack: bool) -> Taken {
        let taken = Taken {
            id: entry.position,
            message: entry.message.clone(),
            redelivered: entry.returns > 0 && self.mistake != Some(Mistake::ForgetsRedelivered),
            delivery_count: None,
        };
        if !no_ack {
            self.unacked.insert(entry.position, (entry, key));
        }
        taken
    }

    /// Takes messages back from a consumer and gives it credit for them. Also returns whether a consumer without credit has some again.
    fn take_back(&mut self, key: &ConsumerKey, ids: &[u64]) -> (Vec<Entry>, bool) {
        let entries: Vec<Entry> =
            ids.iter().filter_map(|id| self.unacked.remove(id)).map(|(entry, _)| entry).collect();
        let Some(credit) = self.credit.get_mut(key) else { return (entries, false) };
        let had_none = *credit == 0;
        *credit += entries.len() as u32;
        let unblocked = had_none && !entries.is_empty();
        if unblocked && let Some(blocked) = self.blocked.get_mut(&key.0) {
            let credit = &self.credit;
            for (priority, key) in blocked.split(|key| credit.get(key) != Some(&0)) {
                self.active.push(priority, key);
            }
        }
        (entries, unblocked)
    }

    fn put_back(&mut self, entries: Vec<Entry>, now: Millis, out: &mut Vec<Effect>) {
        for mut entry in entries {
            entry.returns += 1;
            if self.mistake == Some(Mistake::RequeuesElsewhere) {
                entry.position = self.next_position;
                self.next_position += 1;
            }
            self.ready.insert(self.place(&entry), entry);
        }
        self.drop_overflow(out);
        self.expire(now, out);
        self.serve(now, out);
    }
}

fn dead(entry: Entry, reason: DeathReason) -> Effect {
    Effect::DeadLetter { message: entry.message, reason }
}
