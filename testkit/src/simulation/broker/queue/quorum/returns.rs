//! How messages come back to a quorum queue or leave it for good: acks, rejections, requeues, clients that are gone,
//! expirations and the delivery limit.

use std::sync::Arc;

use super::super::{ConsumerKey, Effect, Entry, Taker};
use super::Quorum;
use crate::simulation::broker::message::{DeathReason, Millis, Name};
use crate::simulation::broker::mistake::Mistake;
use crate::simulation::broker::protocol::ChannelId;

/// Why a message comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Return {
    /// Its client asked for that.
    Requeued,
    /// Its client is gone.
    ClientLost,
}

impl Quorum {
    pub fn settle(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.complete(key, ids);
        self.serve(before, now, out);
    }

    pub fn discard(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        let entries = self.complete(key, ids);
        if self.mistake != Some(Mistake::RejectsSilently) {
            for mut entry in entries {
                entry.failures += 1;
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
            given_up += u32::from(self.return_one(entry, Return::Requeued, out));
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
                    self.return_one(entry, Return::ClientLost, out);
                }
            }
        }
        self.serve(before, now, out);
    }

    /// Gives up what is at the head and expired.
    pub(super) fn drop_expired(&mut self, now: Millis, out: &mut Vec<Effect>) {
        while self.backlog.head().is_some_and(|entry| entry.expired(now)) {
            let Some(entry) = self.backlog.take() else { return };
            if self.mistake != Some(Mistake::ExpiresSilently) {
                self.give_up(entry, DeathReason::Expired, out);
            }
        }
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
            entry.position = self.backlog.next_position();
            self.backlog.push(entry, false);
            self.update(key);
            self.serve(before, now, out);
        }
    }

    /// Counts, and puts before all others or gives up; whether it was given up.
    pub(super) fn return_one(&mut self, mut entry: Entry, why: Return, out: &mut Vec<Effect>) -> bool {
        entry.returns += 1;
        entry.failures += u32::from(why == Return::ClientLost);
        let more = u32::from(self.mistake == Some(Mistake::LimitOffByOne));
        let limit = self.generation.delivery_limit(self.options.delivery_limit);
        if limit.is_some_and(|limit| entry.returns > limit + more) {
            self.give_up(entry, DeathReason::DeliveryLimit, out);
            true
        } else {
            self.backlog.push_returned(entry);
            false
        }
    }

    pub(super) fn give_up(&mut self, mut entry: Entry, reason: DeathReason, out: &mut Vec<Effect>) {
        if self.options.dead_letter_exchange.is_none() {
            return;
        }
        if self.generation.dead_letters_keep_failures() && entry.failures > 0 {
            Arc::make_mut(&mut entry.message).carried_failures = Some(entry.failures);
        }
        if !self.options.dead_letters_at_least_once() {
            out.push(Effect::DeadLetter { message: entry.message, reason });
            return;
        }
        self.discards.push(entry.message, reason);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::broker::generation::Generation;
    use crate::simulation::broker::message::{Message, Properties};
    use crate::simulation::broker::protocol::QueueOptions;

    /// Takes the message of a queue by `basic.get`.
    fn get(queue: &mut Quorum, channel: u32) -> (ConsumerKey, u64) {
        let key = (ChannelId(channel), Taker::Get(1));
        let taken = queue.get(key.clone(), false, 0, &mut Vec::new()).expect("a message waits");
        (key, taken.id)
    }

    /// How often clients failed with a message, by its dead letter, after a requeue, a client that was lost, and a rejection. `before`:
    /// how often they had in other queues.
    fn failures(generation: Generation, before: Option<u32>) -> Option<u32> {
        let options = QueueOptions {
            dead_letter_exchange: Some("dead".into()),
            delivery_limit: Some(9),
            ..QueueOptions::default()
        };
        let mut queue = Quorum::new(options, generation, None);
        let message = Message::new("".into(), "q".into(), Properties::default(), Arc::from(&b"body"[..]));
        let message = Arc::new(Message { carried_failures: before, ..message });
        let mut effects = Vec::new();
        queue.enqueue(message, None, 0, &mut effects);
        let (key, id) = get(&mut queue, 1);
        queue.requeue(&key, &[id], 0, &mut effects);
        get(&mut queue, 2);
        queue.down(ChannelId(2), 0, &mut effects);
        let (key, id) = get(&mut queue, 3);
        queue.discard(&key, &[id], 0, &mut effects);
        let [Effect::DeadLetter { message, .. }] = effects.as_slice() else { panic!("{effects:?}") };
        message.carried_failures
    }

    #[test]
    fn dead_letters_of_rabbitmq_4_tell_how_often_clients_failed_and_requeues_do_not_count() {
        assert_eq!(failures(Generation::V4_0, None), Some(2));
        assert_eq!(failures(Generation::V4_0, Some(3)), Some(5));
        assert_eq!(failures(Generation::V3_10, None), None);
    }
}
