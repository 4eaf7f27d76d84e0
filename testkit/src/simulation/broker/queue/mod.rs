//! A queue: requests come from channels, and its answers go back. It handles each request at once and completely, as a queue's process
//! does; only the way to and from the channels takes time (`Broker`).

mod classic;
mod quorum;
mod rotation;

use std::sync::Arc;

use super::generation::Generation;
use super::message::{DeathReason, Message, Millis, Name};
use super::mistake::Mistake;
use super::protocol::{ChannelId, QueueKind, QueueOptions};

use classic::Classic;
use quorum::Quorum;

/// The receiver of a message: a consumer, or a `basic.get` with this delivery tag. Sorted as the broker settles groups.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Taker {
    Get(u64),
    Consumer(Name),
}

/// The key of a consumer within a queue.
pub(super) type ConsumerKey = (ChannelId, Taker);

/// A request to a queue, from a channel or from a queue that dead-letters. The sender does not wait for an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ToQueue {
    /// `confirm`: the number under which the sender waits for the result.
    Enqueue {
        message: Arc<Message>,
        confirm: Option<u64>,
    },
    Settle {
        taker: Taker,
        ids: Vec<u64>,
    },
    Requeue {
        taker: Taker,
        ids: Vec<u64>,
    },
    Discard {
        taker: Taker,
        ids: Vec<u64>,
    },
    /// The sender is gone.
    Down,
}

/// What a queue does in answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Effect {
    Deliver {
        channel: ChannelId,
        taker: Taker,
        taken: Taken,
        no_ack: bool,
    },
    /// The message is stored, or (not `accepted`) refused.
    Settled {
        confirm: u64,
        accepted: bool,
    },
    /// From now on the channel must refuse publishes to this queue, or accept them again.
    Refuses {
        channel: ChannelId,
        refuses: bool,
    },
    /// Goes to the dead-letter exchange at once.
    DeadLetter {
        message: Arc<Message>,
        reason: DeathReason,
    },
}

/// A message that left the queue towards a client.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Taken {
    /// The queue's own number for it.
    pub id: u64,
    pub message: Arc<Message>,
    pub redelivered: bool,
    pub delivery_count: Option<u32>,
}

/// A message in a queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Entry {
    pub message: Arc<Message>,
    /// Its position. In classic queues requeued messages return to it; quorum queues compare priorities by it.
    pub position: u64,
    pub expires: Option<Millis>,
    /// How often it came back.
    pub returns: u32,
    /// How often a client failed with it (by a rejection or a lost connection), including earlier quorum queues. A requeue is not a
    /// failure.
    pub failures: u32,
}

impl Entry {
    fn new(message: Arc<Message>, position: u64, options: &QueueOptions, now: Millis) -> Self {
        let ttl = match (message.properties.expiration, options.message_ttl) {
            (Some(own), Some(queues)) => Some(own.min(queues)),
            (own, queues) => own.or(queues),
        };
        let failures = message.carried_failures.unwrap_or(0);
        Self { expires: ttl.map(|ttl| now.saturating_add(ttl)), message, position, returns: 0, failures }
    }

    fn expired(&self, now: Millis) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }
}

/// Consumers of a queue, as they were asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Subscription {
    pub channel: ChannelId,
    pub tag: Name,
    /// 0 is no limit.
    pub prefetch: u16,
    pub no_ack: bool,
    pub priority: i32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Queue {
    Classic(Classic),
    Quorum(Quorum),
}

/// Calls the same method of whichever type the queue has.
macro_rules! either {
    ($queue:expr, $inner:ident => $call:expr) => {
        match $queue {
            Queue::Classic($inner) => $call,
            Queue::Quorum($inner) => $call,
        }
    };
}

impl Queue {
    pub fn new(options: QueueOptions, generation: Generation, mistake: Option<Mistake>) -> Self {
        match options.kind {
            QueueKind::Classic => Self::Classic(Classic::new(options, mistake)),
            QueueKind::Quorum => Self::Quorum(Quorum::new(options, generation, mistake)),
        }
    }

    pub fn options(&self) -> &QueueOptions {
        either!(self, queue => queue.options())
    }

    /// Handles a request of `from`; `None` for a dead-lettered message.
    pub fn apply(&mut self, from: Option<ChannelId>, asked: ToQueue, now: Millis) -> Vec<Effect> {
        let mut effects = Vec::new();
        let (queue, out) = (self, &mut effects);
        match (asked, from) {
            (ToQueue::Enqueue { message, confirm }, _) => {
                either!(queue, inner => inner.enqueue(message, confirm, now, out));
            }
            (ToQueue::Settle { taker, ids }, Some(from)) => {
                either!(queue, inner => inner.settle(&(from, taker), &ids, now, out));
            }
            (ToQueue::Requeue { taker, ids }, Some(from)) => {
                either!(queue, inner => inner.requeue(&(from, taker), &ids, now, out));
            }
            (ToQueue::Discard { taker, ids }, Some(from)) => {
                either!(queue, inner => inner.discard(&(from, taker), &ids, now, out));
            }
            (ToQueue::Down, Some(from)) => either!(queue, inner => inner.down(from, now, out)),
            (_, None) => {}
        }
        effects
    }

    pub fn consume(&mut self, subscription: Subscription, now: Millis) -> Vec<Effect> {
        let mut effects = Vec::new();
        either!(self, queue => queue.consume(subscription, now, &mut effects));
        effects
    }

    pub fn cancel(&mut self, key: &ConsumerKey, now: Millis) -> Vec<Effect> {
        let mut effects = Vec::new();
        either!(self, queue => queue.cancel(key, now, &mut effects));
        effects
    }

    /// `basic.get`: the message, and how many are ready behind it.
    pub fn get(
        &mut self,
        (channel, tag): (ChannelId, u64),
        no_ack: bool,
        now: Millis,
    ) -> (Option<(Taken, u32)>, Vec<Effect>) {
        let mut effects = Vec::new();
        let key = (channel, Taker::Get(tag));
        let taken = either!(self, queue => queue.get(key, no_ack, now, &mut effects));
        (taken.map(|taken| (taken, self.ready())), effects)
    }

    /// Messages that wait.
    pub fn ready(&self) -> u32 {
        // Fits: a broker holds fewer messages (`MESSAGES_MAX`).
        either!(self, queue => queue.ready()) as u32
    }

    /// Messages that wait, are with clients or on their way to a dead-letter exchange.
    pub fn held(&self) -> usize {
        either!(self, queue => queue.held())
    }

    pub fn unacked(&self) -> usize {
        either!(self, queue => queue.unacked())
    }

    pub fn consumers(&self) -> Vec<ConsumerKey> {
        either!(self, queue => queue.consumers())
    }

    /// How many messages it lost.
    pub fn purge(&mut self) -> (u32, Vec<Effect>) {
        let mut effects = Vec::new();
        let lost = either!(self, queue => queue.purge(&mut effects)) as u32;
        (lost, effects)
    }

    /// When the next message expires, if one at the head may.
    pub fn next_expiry(&self) -> Option<Millis> {
        either!(self, queue => queue.next_expiry())
    }

    /// Replaces expirations before `past` by the earliest time, and those after `future` by the latest.
    pub fn round_expirations(&mut self, past: Millis, future: Millis) {
        let round = |expires: &mut Option<Millis>| {
            *expires = expires.map(|at| match at {
                at if at <= past => 0,
                at if at > future => Millis::MAX,
                at => at,
            });
        };
        either!(self, queue => queue.expirations_mut().for_each(round));
    }

    /// Removes expired messages from the head.
    pub fn expire(&mut self, now: Millis) -> Vec<Effect> {
        let mut effects = Vec::new();
        either!(self, queue => queue.look(now, &mut effects));
        effects
    }

    /// Whether the queue must be notified when this channel is gone.
    pub fn knows(&self, channel: ChannelId) -> bool {
        either!(self, queue => queue.knows(channel))
    }

    /// Registers a publishing channel with a quorum queue. Returns whether the channel must refuse publishes.
    pub fn register(&mut self, channel: ChannelId) -> bool {
        match self {
            Self::Classic(_) => false,
            Self::Quorum(queue) => queue.register(channel),
        }
    }

    /// Loses what a restart of the broker loses, and makes the other messages ready again.
    pub fn restart(&mut self, now: Millis) -> Vec<Effect> {
        let mut effects = Vec::new();
        either!(self, queue => queue.restart(now, &mut effects));
        effects
    }

    /// The messages that wait to be dead-lettered at least once, oldest first.
    pub fn unsent_discards(&self) -> impl Iterator<Item = (u64, &Arc<Message>, DeathReason)> {
        let quorum = match self {
            Self::Classic(_) => None,
            Self::Quorum(queue) => Some(queue),
        };
        quorum.into_iter().flat_map(Quorum::unsent_discards)
    }

    /// A discarded message was sent to so many queues.
    pub fn discard_sent(&mut self, id: u64, targets: usize) {
        if let Self::Quorum(queue) = self {
            queue.discard_sent(id, targets);
        }
    }

    /// One of these queues has stored or refused the message.
    pub fn discard_settled(&mut self, id: u64, accepted: bool) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let Self::Quorum(queue) = self {
            queue.discard_settled(id, accepted, &mut effects);
        }
        effects
    }
}
