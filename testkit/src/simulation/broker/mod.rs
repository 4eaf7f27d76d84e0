//! A model of RabbitMQ without network, disk and clock: actions of clients go in, frames come out, and a seed decides the order.
//!
//! The model has the same separate steps as the broker, because their order makes histories differ. A channel reads its commands one after
//! the other; its request arrives at a queue later; the queue's answer arrives at the channel later again. Each of these is a [`Step`].
//! [`Broker::steps`] lists the possible next steps, and [`Broker::perform`] performs one.
//!
//! Tests compare it with real brokers step by step (`tests/broker_model`). Comments mark where it allows more than a broker does: counts of
//! quorum queues may lack messages in transit.
//!
//! Not modelled: clusters with lagging replicas, `global: true` prefetch, streams, transactions, exclusive and auto-delete queues, sizes in
//! bytes (of messages and frames), and the network. The caller of the model decides when a command is sent and when a frame arrives.

mod channel;
mod exchange;
mod generation;
mod message;
mod mistake;
mod order;
mod protocol;
mod queue;
mod receive;
mod routing;
mod step;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use generation::Generation;
pub use message::{Death, DeathPlace, DeathReason, HeaderValue, Message, Millis, Name, Properties};
pub use mistake::Mistake;
pub use protocol::{
    ChannelId, Command, ConnectionId, Delivery, Emitted, ExchangeKind, Frame, Overflow, QueueKind,
    QueueOptions, code,
};
pub use step::Step;

use channel::Channel;
use exchange::Exchange;
use queue::{Effect, Queue, Taker, ToQueue};

/// Commands of a channel that wait to be read. A client that sends more is refused: a socket's buffers are finite, too.
const INBOX_MAX: usize = 8_192;
/// Messages in all queues, and on their way to them. A real broker would raise its memory alarm long before.
const MESSAGES_MAX: usize = 1_000_000;
/// How long a delivery may stay unacknowledged before its channel is closed: the default of both generations.
const CONSUMER_TIMEOUT: Millis = 30 * 60 * 1_000;

/// A model of one RabbitMQ node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Broker {
    generation: Generation,
    connections: BTreeMap<ConnectionId, Connection>,
    channels: BTreeMap<ChannelId, Channel>,
    queues: BTreeMap<Name, Queue>,
    exchanges: BTreeMap<Name, Exchange>,
    /// Requests to queues that have not arrived.
    to_queues: BTreeMap<(Sender, Name), VecDeque<ToQueue>>,
    /// What queues sent to channels and has not arrived.
    from_queues: BTreeMap<(ChannelId, Source), VecDeque<ToChannel>>,
    /// Queues without a leader. They do nothing until they have one.
    paused: BTreeSet<Name>,
    alarm: bool,
    consumer_timeout: Millis,
    next_connection: u32,
    next_channel: u32,
    mistake: Option<Mistake>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Connection {
    /// Whether it published during an alarm. The broker reads nothing more from it until the alarm is over.
    blocked: bool,
}

/// The sender of a request to a queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Sender {
    Channel(ChannelId),
    /// A queue that dead-letters.
    Queue(Name),
}

/// The messages to a channel that stay in order: everything from a classic queue, but only those of one consumer from a quorum queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Source {
    queue: Name,
    consumer: Option<Taker>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum ToChannel {
    Deliver { taker: Taker, taken: queue::Taken, no_ack: bool },
    Answered { confirm: u64, accepted: bool },
    Refuses(bool),
    ConsumerCancelled { tag: Name },
}

/// Why the broker does not accept a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendError {
    /// The channel or its connection is gone.
    Gone,
    /// `INBOX_MAX` commands wait.
    Full,
}

/// What a queue holds, for invariants and reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueCounts {
    pub ready: usize,
    pub unacked: usize,
    pub consumers: usize,
}

impl Broker {
    pub fn new(generation: Generation) -> Self {
        Self {
            generation,
            connections: BTreeMap::new(),
            channels: BTreeMap::new(),
            queues: BTreeMap::new(),
            exchanges: BTreeMap::new(),
            to_queues: BTreeMap::new(),
            from_queues: BTreeMap::new(),
            paused: BTreeSet::new(),
            alarm: false,
            consumer_timeout: CONSUMER_TIMEOUT,
            next_connection: 0,
            next_channel: 0,
            mistake: None,
        }
    }

    /// A model that is wrong on purpose.
    #[must_use]
    pub fn with_mistake(mut self, mistake: Mistake) -> Self {
        self.mistake = Some(mistake);
        self
    }

    #[must_use]
    pub fn with_consumer_timeout(mut self, timeout: Millis) -> Self {
        self.consumer_timeout = timeout;
        self
    }

    pub fn connect(&mut self) -> ConnectionId {
        let id = ConnectionId(self.next_connection);
        self.next_connection += 1;
        self.connections.insert(id, Connection { blocked: false });
        id
    }

    pub fn open_channel(&mut self, connection: ConnectionId) -> Option<ChannelId> {
        self.connections.get(&connection)?;
        let id = ChannelId(self.next_channel);
        self.next_channel += 1;
        self.channels.insert(id, Channel::new(connection));
        Some(id)
    }

    /// Sends a command. Nothing happens before a [`Step::Receive`] of the channel.
    ///
    /// # Errors
    /// The channel is gone, or too many commands wait.
    pub fn send(&mut self, channel: ChannelId, command: Command) -> Result<(), SendError> {
        let inbox = &mut self.channels.get_mut(&channel).ok_or(SendError::Gone)?.inbox;
        if inbox.len() >= INBOX_MAX {
            return Err(SendError::Full);
        }
        inbox.push_back(command);
        Ok(())
    }

    /// Breaks the connection. Commands that were not read are lost; those that were read continue.
    pub fn lose(&mut self, connection: ConnectionId) {
        self.connections.remove(&connection);
        let channels: Vec<ChannelId> = self.channels_of(connection);
        for channel in channels {
            self.end_channel(channel);
        }
    }

    /// A memory or disk alarm begins or ends. Connections are blocked when they publish.
    pub fn set_alarm(&mut self, alarm: bool) -> Vec<Emitted> {
        self.alarm = alarm;
        let mut emitted = Vec::new();
        for (id, connection) in &mut self.connections {
            if !alarm && std::mem::take(&mut connection.blocked) {
                emitted.push(Emitted { connection: *id, channel: None, frame: Frame::Unblocked });
            }
        }
        emitted
    }

    /// Takes away the queue's leader, or gives it one. Requests sent meanwhile wait and are not lost.
    pub fn set_leaderless(&mut self, queue: &Name, leaderless: bool) {
        if leaderless && self.queues.contains_key(queue) {
            self.paused.insert(queue.clone());
        } else {
            self.paused.remove(queue);
        }
    }

    /// Whether requests to the queue wait for a leader.
    pub fn is_leaderless(&self, queue: &Name) -> bool {
        self.paused.contains(queue)
    }

    /// Restarts the node. Connections, and messages that no queue has, are lost.
    pub fn restart(&mut self, now: Millis) {
        self.connections.clear();
        self.channels.clear();
        self.to_queues.clear();
        self.from_queues.clear();
        self.paused.clear();
        self.alarm = false;
        let names: Vec<Name> = self.queues.keys().cloned().collect();
        for name in names {
            let effects = self.queues.get_mut(&name).map(|queue| queue.restart(now)).unwrap_or_default();
            self.carry_out(&name, effects);
        }
    }

    pub fn queue(&self, name: &str) -> Option<QueueCounts> {
        let queue = self.queues.get(name)?;
        Some(QueueCounts {
            ready: queue.ready() as usize,
            unacked: queue.unacked(),
            consumers: queue.consumers().len(),
        })
    }

    pub fn queue_names(&self) -> impl Iterator<Item = &Name> {
        self.queues.keys()
    }

    pub fn is_connected(&self, connection: ConnectionId) -> bool {
        self.connections.contains_key(&connection)
    }

    pub fn is_open(&self, channel: ChannelId) -> bool {
        self.channels.contains_key(&channel)
    }

    /// How many deliveries a channel has not settled.
    pub fn unacked_of(&self, channel: ChannelId) -> usize {
        self.channels.get(&channel).map_or(0, |channel| channel.unacked.len())
    }

    /// The delivery tags that a channel has not settled, oldest first.
    pub fn unacked_tags(&self, channel: ChannelId) -> Vec<u64> {
        self.channels
            .get(&channel)
            .map(|channel| channel.unacked.keys().copied().collect())
            .unwrap_or_default()
    }

    /// Whether the channel has an ack that the broker has not read.
    pub fn is_sent_an_ack(&self, channel: ChannelId) -> bool {
        let is_ack = |command: &Command| matches!(command, Command::Ack { .. });
        self.channels.get(&channel).is_some_and(|channel| channel.inbox.iter().any(is_ack))
    }

    /// The publishes of a channel that some queue has not answered for, oldest first.
    pub fn unanswered(&self, channel: ChannelId) -> Vec<u64> {
        self.channels
            .get(&channel)
            .map(|channel| channel.unconfirmed.keys().copied().collect())
            .unwrap_or_default()
    }

    /// The consumers of a channel.
    pub fn consumer_tags(&self, channel: ChannelId) -> Vec<Name> {
        self.channels
            .get(&channel)
            .map(|channel| channel.consumers.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// Merges states that differ only in expirations that are over, or too far away to matter.
    pub fn round_expirations(&mut self, past: Millis, future: Millis) {
        self.queues.values_mut().for_each(|queue| queue.round_expirations(past, future));
    }

    fn channels_of(&self, connection: ConnectionId) -> Vec<ChannelId> {
        self.channels
            .iter()
            .filter(|(_, channel)| channel.connection == connection)
            .map(|(id, _)| *id)
            .collect()
    }

    /// Removes a channel. The queues that know it are notified after everything that the channel sent.
    fn end_channel(&mut self, id: ChannelId) {
        if self.channels.remove(&id).is_none() {
            return;
        }
        self.from_queues.retain(|(channel, _), _| *channel != id);
        let sender = Sender::Channel(id);
        for (name, queue) in &self.queues {
            let key = (sender.clone(), name.clone());
            if queue.knows(id) || self.to_queues.contains_key(&key) {
                self.to_queues.entry(key).or_default().push_back(ToQueue::Down);
            }
        }
    }

    fn message_count(&self) -> usize {
        self.queues.values().map(Queue::held).sum::<usize>()
            + self.to_queues.values().map(VecDeque::len).sum::<usize>()
    }

    /// Forwards the effects of a queue.
    fn carry_out(&mut self, queue: &Name, effects: Vec<Effect>) {
        let quorum = self.queues.get(queue).is_some_and(|queue| queue.options().kind == QueueKind::Quorum);
        for effect in effects {
            match effect {
                Effect::Deliver { channel, taker, taken, no_ack } => {
                    let consumer = quorum.then(|| taker.clone());
                    self.send_to_channel(
                        channel,
                        queue,
                        consumer,
                        ToChannel::Deliver { taker, taken, no_ack },
                    );
                }
                Effect::Refuses { channel, refuses } => {
                    self.send_to_channel(channel, queue, None, ToChannel::Refuses(refuses));
                }
                Effect::DeadLetter { message, reason } => self.dead_letter(queue, &message, reason),
                // The caller of `apply` gets this result itself.
                Effect::Settled { .. } => {}
            }
        }
    }

    fn send_to_channel(
        &mut self,
        channel: ChannelId,
        queue: &Name,
        consumer: Option<Taker>,
        what: ToChannel,
    ) {
        if self.channels.contains_key(&channel) {
            let source = Source { queue: queue.clone(), consumer };
            self.from_queues.entry((channel, source)).or_default().push_back(what);
        }
    }
}
