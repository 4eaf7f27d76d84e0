//! Routes published and dead-lettered messages from exchanges to queues.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::message::{DeathReason, Message, Name};
use super::mistake::Mistake;
use super::queue::ToQueue;
use super::{Broker, Sender};

impl Broker {
    /// The queues for a message, or `None` if the exchange does not exist. The exchange without a name leads to the queue named by the key.
    pub(super) fn route(&self, exchange: &Name, routing_key: &Name) -> Option<BTreeSet<Name>> {
        let mut queues = match &**exchange {
            "" => BTreeSet::from([routing_key.clone()]),
            _ => self.exchanges.get(exchange)?.route(routing_key),
        };
        queues.retain(|queue| self.queues.contains_key(queue));
        Some(queues)
    }

    /// Publishes a message that a queue gave up, at most once. Without a target queue it is lost.
    pub(super) fn dead_letter(&mut self, from: &Name, message: &Message, reason: DeathReason) {
        let Some((dead, queues)) = self.dead_letter_route(from, message, reason) else { return };
        let dead = Arc::new(dead);
        for queue in queues {
            let asked = ToQueue::Enqueue { message: dead.clone(), confirm: None };
            self.to_queues.entry((Sender::Queue(from.clone()), queue)).or_default().push_back(asked);
        }
    }

    /// The oldest message that waits to be dead-lettered and has a target: its number, its new form, and the target queues.
    pub(super) fn next_dead_letter(&self, from: &Name) -> Option<(u64, Message, BTreeSet<Name>)> {
        self.queues.get(from)?.unsent_discards().find_map(|(id, message, reason)| {
            let (dead, queues) = self.dead_letter_route(from, message, reason)?;
            (!queues.is_empty()).then_some((id, dead, queues))
        })
    }

    /// Sends that message to its target queues. It stays until all of them have stored it.
    pub(super) fn dead_letter_confirmed(&mut self, from: &Name) {
        let Some((id, dead, queues)) = self.next_dead_letter(from) else { return };
        let dead = Arc::new(dead);
        if let Some(queue) = self.queues.get_mut(from) {
            queue.discard_sent(id, queues.len());
        }
        for queue in queues {
            let asked = ToQueue::Enqueue { message: dead.clone(), confirm: Some(id) };
            self.to_queues.entry((Sender::Queue(from.clone()), queue)).or_default().push_back(asked);
        }
    }

    /// The new form of a message that `from` gives up, and its target queues.
    fn dead_letter_route(
        &self,
        from: &Name,
        message: &Message,
        reason: DeathReason,
    ) -> Option<(Message, BTreeSet<Name>)> {
        let options = self.queues.get(from)?.options();
        let exchange = options.dead_letter_exchange.as_ref()?;
        let key = options.dead_letter_routing_key.as_ref();
        let mut dead = message.died(from, reason, exchange, key, self.generation.last_death_headers());
        match self.mistake {
            Some(Mistake::KeepsExpiration) => dead.properties.expiration = message.properties.expiration,
            Some(Mistake::CountsDeathsOnce) => dead.deaths.iter_mut().for_each(|death| death.count = 1),
            _ => {}
        }
        let mut queues = self.route(exchange, &dead.routing_key)?;
        if reason != DeathReason::Rejected {
            queues.retain(|queue| !dead.goes_round(queue));
        }
        Some((dead, queues))
    }
}
