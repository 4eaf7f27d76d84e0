//! Finds steps whose order does not matter. The check against a real broker then follows one order instead of many.

use super::message::Name;
use super::protocol::{ChannelId, Command, Overflow, QueueKind};
use super::queue::Queue;
use super::{Broker, Sender, ToChannel};

impl Broker {
    /// Whether a channel's next command has the same effect now and later: it only passes messages or acks on to queues, and no other step
    /// can change what it passes on.
    pub fn only_hands_on(&self, channel: ChannelId) -> bool {
        let hands_on = |command: &Command| {
            matches!(command, Command::Publish { .. } | Command::Ack { .. } | Command::Nack { .. })
        };
        // All other commands create, delete or query queues.
        if !self.channels.values().flat_map(|channel| &channel.inbox).all(hands_on) {
            return false;
        }
        let Some(state) = self.channels.get(&channel) else { return false };
        match state.inbox.front() {
            // An unknown tag closes the channel.
            Some(Command::Ack { tag, .. } | Command::Nack { tag, .. }) => state.unacked.contains_key(tag),
            Some(Command::Publish { exchange, routing_key, .. }) => {
                let Some(queues) = self.route(exchange, routing_key) else { return false };
                let is_known = |name: &Name| state.refusing.contains_key(name);
                let takes = |name: &Name| match self.queues.get(name) {
                    Some(Queue::Classic(_)) => true,
                    Some(queue @ Queue::Quorum(_)) => is_known(name) && !may_refuse(queue),
                    None => false,
                };
                queues.iter().all(takes)
            }
            _ => false,
        }
    }

    /// Whether nothing else that is waiting, or follows from it, can arrive at a queue before the channel's next request there.
    pub fn is_only_sender(&self, channel: ChannelId, queue: &Name) -> bool {
        let own = Sender::Channel(channel);
        let is_dead_letter = |sender: &Sender| *sender == Sender::Queue(queue.clone());
        // A queue that dead-letters gets an answer for each dead letter.
        let is_asked_by_others = self
            .to_queues
            .keys()
            .any(|(sender, to)| (to == queue && *sender != own) || is_dead_letter(sender));
        // A channel acks messages of a quorum queue for such consumers immediately.
        let is_sent_acks = self.from_queues.iter().any(|((_, source), waiting)| {
            let acks = |sent: &ToChannel| matches!(sent, ToChannel::Deliver { no_ack: true, .. });
            source.queue == *queue && waiting.iter().any(acks)
        });
        let may_be_sent_dead_letters = self.queues.iter().any(|(name, from)| {
            let is_busy = self.to_queues.keys().any(|(_, to)| to == name)
                || from.next_expiry().is_some()
                || from.unsent_discards().next().is_some();
            name != queue && is_busy && self.dead_letters_into(from, queue)
        });
        !is_asked_by_others && !is_sent_acks && !may_be_sent_dead_letters
    }

    fn dead_letters_into(&self, from: &Queue, to: &Name) -> bool {
        let options = from.options();
        let Some(exchange) = &options.dead_letter_exchange else { return false };
        let key = options.dead_letter_routing_key.as_ref();
        match self.exchanges.get(exchange) {
            Some(exchange) => exchange.bindings.iter().any(|(queue, _)| queue == to),
            // The exchange without a name.
            None => key.is_none_or(|key| key == to),
        }
    }
}

/// Whether channels may be notified that the queue is full.
fn may_refuse(queue: &Queue) -> bool {
    let options = queue.options();
    options.kind == QueueKind::Quorum
        && options.max_length.is_some()
        && options.overflow == Overflow::RejectPublish
}
