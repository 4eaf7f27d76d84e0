//! Messages, what publishers say about them, and what dead-lettering adds.

use std::collections::BTreeMap;
use std::sync::Arc;

/// The name of a queue, an exchange, a routing key or a consumer tag.
pub type Name = Arc<str>;

/// Milliseconds on the simulation's clock.
pub type Millis = u64;

/// A message as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Message {
    /// The exchange that it was published to, or the dead-letter exchange that it came through.
    pub exchange: Name,
    pub routing_key: Name,
    pub properties: Properties,
    pub body: Arc<[u8]>,
    /// The `x-death` header: newest first, one entry for each queue and reason.
    pub deaths: Vec<Death>,
    /// The `x-first-death-*` headers.
    pub first_death: Option<DeathPlace>,
    /// The `x-last-death-*` headers, where the generation has them.
    pub last_death: Option<DeathPlace>,
    /// How often clients had failed with it when a quorum queue dead-lettered it, in generations that keep this number. Not part of any
    /// frame by itself: deliveries show it until the message has been returned to its next queue.
    pub carried_failures: Option<u32>,
}

/// The properties that brokers act on, and those that only clients use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Properties {
    pub priority: Option<u8>,
    pub expiration: Option<Millis>,
    /// Delivery mode 2: survives a restart of a classic queue.
    pub persistent: bool,
    pub message_id: Option<Name>,
    pub correlation_id: Option<Name>,
    pub reply_to: Option<Name>,
    pub content_type: Option<Name>,
    pub kind: Option<Name>,
    pub headers: BTreeMap<Name, HeaderValue>,
}

/// The values that vramq puts into headers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HeaderValue {
    Bool(bool),
    Int(i64),
    Text(Name),
}

/// Why a queue gave a message up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeathReason {
    Rejected,
    Expired,
    MaxLength,
    DeliveryLimit,
}

/// An entry of `x-death`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Death {
    pub queue: Name,
    pub reason: DeathReason,
    pub count: u32,
    pub exchange: Name,
    pub routing_key: Name,
    pub original_expiration: Option<Millis>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DeathPlace {
    pub reason: DeathReason,
    pub queue: Name,
    pub exchange: Name,
}

impl Message {
    /// A message as its publisher hands it over.
    pub fn new(exchange: Name, routing_key: Name, properties: Properties, body: Arc<[u8]>) -> Self {
        Self {
            exchange,
            routing_key,
            properties,
            body,
            deaths: Vec::new(),
            first_death: None,
            last_death: None,
            carried_failures: None,
        }
    }

    /// The same message on its way to a dead-letter exchange.
    pub fn died(
        &self,
        queue: &Name,
        reason: DeathReason,
        exchange: &Name,
        routing_key: Option<&Name>,
        keeps_last: bool,
    ) -> Self {
        let mut dead = self.clone();
        let place = DeathPlace { reason, queue: queue.clone(), exchange: self.exchange.clone() };
        let known = dead.deaths.iter().position(|death| death.queue == *queue && death.reason == reason);
        let death = match known {
            Some(at) => {
                let mut death = dead.deaths.remove(at);
                death.count += 1;
                death
            }
            None => Death {
                queue: queue.clone(),
                reason,
                count: 1,
                exchange: self.exchange.clone(),
                routing_key: self.routing_key.clone(),
                original_expiration: self.properties.expiration,
            },
        };
        dead.deaths.insert(0, death);
        dead.first_death.get_or_insert_with(|| place.clone());
        dead.last_death = keeps_last.then_some(place);
        // Otherwise it would expire again in the next queue.
        dead.properties.expiration = None;
        dead.exchange = exchange.clone();
        if let Some(key) = routing_key {
            dead.routing_key = key.clone();
        }
        dead
    }

    /// Whether it was in `queue` before and came back without a rejection by a client. Brokers drop messages in such a cycle.
    pub fn goes_round(&self, queue: &Name) -> bool {
        match self.deaths.iter().position(|death| death.queue == *queue) {
            Some(at) => self.deaths[..=at].iter().all(|death| death.reason != DeathReason::Rejected),
            None => false,
        }
    }
}
