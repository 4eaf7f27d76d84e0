//! How messages come back to a quorum queue or leave it for good: acks, rejections, requeues, clients that are gone,
//! expirations and the delivery limit.

use std::sync::Arc;

use super::super::{ConsumerKey, Effect, Entry, Taker};
use super::Quorum;
use super::consumer::Consumer;
use crate::simulation::broker::message::{DeathReason, Millis, Name};
use crate::simulation::broker::mistake::Mistake;
use crate::simulation::broker::protocol::ChannelId;

/// Why a message comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Return {
    /// Its client requeued it.
    Requeued,
    /// Its client is gone.
    ClientLost,
}

/// A key of the queue's map of consumers within a channel, ordered as Erlang orders it: numbers come before tuples.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum KeyInMap {
    LogIndex(u64),
    /// A tuple of this tag and the channel.
    Tag(Name),
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
        if let Some(consumer) = self.consumers.get_mut(key) {
            let twice = if self.generation.credit_counted_twice() { given_up } else { 0 };
            consumer.give_credit(returned + twice);
        }
        self.update(key);
        self.serve(before, now, out);
    }

    pub fn down(&mut self, channel: ChannelId, now: Millis, out: &mut Vec<Effect>) {
        let before = self.begin(out);
        self.publishers.remove(&channel);
        for key in self.takers_of(channel) {
            let Some(consumer) = self.consumers.remove(&key) else { continue };
            for (_, entry) in consumer.taken {
                if self.mistake != Some(Mistake::LossLosesUnacked) {
                    self.return_one(entry, Return::ClientLost, out);
                }
            }
        }
        self.serve(before, now, out);
    }

    /// The consumers and gets of a channel, in the order in which their messages come back when the channel is gone: in the order of keys
    /// in the queue's map (`handle_down` of `rabbit_fifo.erl`).
    fn takers_of(&self, channel: ChannelId) -> Vec<ConsumerKey> {
        let in_map = |taker: &Taker, consumer: &Consumer| match taker {
            Taker::Consumer(_) if self.generation.consumers_have_log_indexes() => {
                KeyInMap::LogIndex(consumer.subscribed)
            }
            Taker::Consumer(tag) => KeyInMap::Tag(tag.clone()),
            // The tag of a get is its delivery tag as decimal digits.
            Taker::Get(number) => KeyInMap::Tag(number.to_string().into()),
        };
        let mut keys: Vec<(KeyInMap, ConsumerKey)> = self
            .consumers
            .iter()
            .filter(|((of, _), _)| *of == channel)
            .map(|(key, consumer)| (in_map(&key.1, consumer), key.clone()))
            .collect();
        keys.sort();
        keys.into_iter().map(|(_, key)| key).collect()
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
        consumer.give_credit(entries.len() as u32);
        self.update(key);
        entries
    }

    /// Without a delivery limit, each returned message is appended by itself.
    fn requeue_to_tail(&mut self, key: &ConsumerKey, ids: &[u64], now: Millis, out: &mut Vec<Effect>) {
        for id in ids {
            let before = self.begin(out);
            let Some(consumer) = self.consumers.get_mut(key) else { return };
            let Some(mut entry) = consumer.taken.remove(id) else { continue };
            consumer.give_credit(1);
            entry.returns += 1;
            entry.position = self.backlog.next_position();
            self.backlog.push(entry, false);
            self.update(key);
            self.serve(before, now, out);
        }
    }

    /// Counts a return, then puts the message before all others or gives it up. Returns whether it was given up.
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
    use crate::simulation::broker::queue::{Subscription, Taken};

    fn queue(generation: Generation) -> Quorum {
        let options = QueueOptions {
            dead_letter_exchange: Some("dead".into()),
            delivery_limit: Some(9),
            ..QueueOptions::default()
        };
        Quorum::new(options, generation, None)
    }

    fn message(body: &str) -> Message {
        Message::new("".into(), "q".into(), Properties::default(), Arc::from(body.as_bytes()))
    }

    /// Puts a message with each of these bodies into a queue, and says who got which of them.
    fn publish(queue: &mut Quorum, bodies: &[&str]) -> Vec<(String, String)> {
        let mut effects = Vec::new();
        for body in bodies {
            queue.enqueue(Arc::new(message(body)), None, 0, &mut effects);
        }
        deliveries(&effects)
    }

    /// The consumers' tags and the bodies of what they got.
    fn deliveries(effects: &[Effect]) -> Vec<(String, String)> {
        let delivery = |effect: &Effect| match effect {
            Effect::Deliver { taker: Taker::Consumer(tag), taken, .. } => {
                Some((tag.to_string(), body(taken)))
            }
            _ => None,
        };
        effects.iter().filter_map(delivery).collect()
    }

    fn body(taken: &Taken) -> String {
        String::from_utf8_lossy(&taken.message.body).into_owned()
    }

    /// Subscribes a consumer of channel 1, and says what it got.
    fn consume(queue: &mut Quorum, tag: &str, prefetch: u16) -> Vec<(String, String)> {
        let mut effects = Vec::new();
        let asked =
            Subscription { channel: ChannelId(1), tag: tag.into(), prefetch, no_ack: false, priority: 0 };
        queue.consume(asked, 0, &mut effects);
        deliveries(&effects)
    }

    fn cancel(queue: &mut Quorum, tag: &str) {
        queue.cancel(&consumer(tag), 0, &mut Vec::new());
    }

    fn consumer(tag: &str) -> ConsumerKey {
        (ChannelId(1), Taker::Consumer(tag.into()))
    }

    /// Takes a message by `basic.get`.
    fn get(queue: &mut Quorum, channel: u32, tag: u64) -> (ConsumerKey, Taken) {
        let key = (ChannelId(channel), Taker::Get(tag));
        let taken = queue.get(key.clone(), false, 0, &mut Vec::new()).expect("a message waits");
        (key, taken)
    }

    /// How often clients failed with a message, as its dead letter shows it, after a requeue, a lost client and a rejection. `before`: the
    /// failures in earlier queues.
    fn failures(generation: Generation, before: Option<u32>) -> Option<u32> {
        let mut queue = queue(generation);
        let message = Arc::new(Message { carried_failures: before, ..message("body") });
        let mut effects = Vec::new();
        queue.enqueue(message, None, 0, &mut effects);
        let (key, taken) = get(&mut queue, 1, 1);
        queue.requeue(&key, &[taken.id], 0, &mut effects);
        get(&mut queue, 2, 1);
        queue.down(ChannelId(2), 0, &mut effects);
        let (key, taken) = get(&mut queue, 3, 1);
        queue.discard(&key, &[taken.id], 0, &mut effects);
        let [Effect::DeadLetter { message, .. }] = effects.as_slice() else { panic!("{effects:?}") };
        message.carried_failures
    }

    /// The order in which messages come back when the channel of two gets and two consumers is gone.
    fn order_after_loss(generation: Generation) -> Vec<String> {
        let mut queue = queue(generation);
        publish(&mut queue, &["get 9", "get 10", "b", "a"]);
        get(&mut queue, 1, 9);
        get(&mut queue, 1, 10);
        consume(&mut queue, "b", 1);
        consume(&mut queue, "a", 1);
        queue.down(ChannelId(1), 0, &mut Vec::new());
        (1..=4).map(|tag| body(&get(&mut queue, 2, tag).1)).collect()
    }

    #[test]
    fn unacknowledged_messages_of_a_lost_channel_come_back_in_the_order_of_the_brokers_keys() {
        assert_eq!(order_after_loss(Generation::V3_10), ["get 10", "get 9", "a", "b"]);
        assert_eq!(order_after_loss(Generation::V4_0), ["b", "a", "get 10", "get 9"]);
    }

    /// Whose turn it is after the second of three idle consumers was cancelled and subscribed again.
    fn turns_after_a_second_subscription(generation: Generation) -> Vec<String> {
        let mut queue = queue(generation);
        for tag in ["a", "b", "c"] {
            consume(&mut queue, tag, 1);
        }
        cancel(&mut queue, "b");
        consume(&mut queue, "b", 1);
        publish(&mut queue, &["1", "2", "3"]).into_iter().map(|(tag, _)| tag).collect()
    }

    #[test]
    fn a_consumer_that_subscribes_again_waits_for_its_turn_on_rabbitmq_4() {
        assert_eq!(turns_after_a_second_subscription(Generation::V3_10), ["a", "b", "c"]);
        assert_eq!(turns_after_a_second_subscription(Generation::V4_0), ["a", "c", "b"]);
    }

    /// How many messages a consumer with a prefetch of 1 gets after it settled three that an earlier one of its tag held.
    fn credit_after_a_smaller_prefetch(generation: Generation) -> usize {
        let mut queue = queue(generation);
        consume(&mut queue, "a", 3);
        publish(&mut queue, &["1", "2", "3"]);
        cancel(&mut queue, "a");
        assert!(consume(&mut queue, "a", 1).is_empty(), "it still holds three");
        queue.settle(&consumer("a"), &[0, 1, 2], 0, &mut Vec::new());
        publish(&mut queue, &["4", "5", "6", "7"]).len()
    }

    #[test]
    fn settled_messages_raise_credit_above_the_prefetch_only_on_rabbitmq_3() {
        assert_eq!(credit_after_a_smaller_prefetch(Generation::V3_10), 3);
        assert_eq!(credit_after_a_smaller_prefetch(Generation::V4_0), 1);
    }

    #[test]
    fn dead_letters_of_rabbitmq_4_tell_how_often_clients_failed_and_requeues_do_not_count() {
        assert_eq!(failures(Generation::V4_0, None), Some(2));
        assert_eq!(failures(Generation::V4_0, Some(3)), Some(5));
        assert_eq!(failures(Generation::V3_10, None), None);
    }
}
