//! The steps that the broker could take next, and taking one.

use std::collections::VecDeque;

use super::channel::Unacked;
use super::message::{Millis, Name};
use super::mistake::Mistake;
use super::protocol::{ChannelId, Delivery, Emitted, Frame, code};
use super::queue::{Effect, Queue, Taken, Taker, ToQueue};
use super::{Broker, Sender, Source, ToChannel};
use crate::simulation::Random;

/// One thing that can happen inside the broker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// A channel reads its next command.
    Receive(ChannelId),
    /// The next request of a channel arrives at a queue.
    Apply { channel: ChannelId, queue: Name },
    /// An ack overtakes the channel's earlier requests to a classic queue: the queue's process takes acks first.
    ApplyAck { channel: ChannelId, queue: Name },
    /// The next dead letter of a queue arrives at another queue.
    ApplyDead { from: Name, queue: Name },
    /// The next message of a queue arrives at a channel. Deliveries of a quorum queue keep their order only within a consumer: `tag` is the
    /// consumer's. `None`: everything else from this queue, in order.
    Forward { channel: ChannelId, queue: Name, tag: Option<Name> },
    /// A channel confirms these publishes, possibly with others in the same frames.
    Confirm { channel: ChannelId, numbers: Vec<u64> },
    /// A queue gives up what expired at its head.
    Expire(Name),
    /// A queue sends its oldest discarded message to the dead-letter exchange (at least once).
    DeadLetter(Name),
    /// A channel is closed because it held a delivery too long.
    ConsumerTimeout(ChannelId),
}

impl Broker {
    /// All possible next steps, in an order that depends only on the state.
    pub fn steps(&self, now: Millis) -> Vec<Step> {
        let mut steps = Vec::new();
        for (id, channel) in &self.channels {
            let blocked =
                self.connections.get(&channel.connection).is_none_or(|connection| connection.blocked);
            if !channel.inbox.is_empty() && !blocked {
                steps.push(Step::Receive(*id));
            }
            if !channel.resolved.is_empty() {
                let all: Vec<u64> = channel.resolved.keys().copied().collect();
                if all.len() > 1 {
                    steps.push(Step::Confirm { channel: *id, numbers: vec![all[0]] });
                }
                steps.push(Step::Confirm { channel: *id, numbers: all });
            }
            let oldest = channel.unacked.values().map(|unacked| unacked.since).min();
            if oldest.is_some_and(|since| since.saturating_add(self.consumer_timeout) < now) {
                steps.push(Step::ConsumerTimeout(*id));
            }
        }
        let arriving = self.to_queues.iter().filter(|((_, queue), _)| !self.paused.contains(queue));
        for ((sender, queue), waiting) in arriving {
            match sender {
                Sender::Channel(channel) => {
                    let (channel, queue) = (*channel, queue.clone());
                    if self.overtaking_ack(&queue, waiting).is_some() {
                        steps.push(Step::ApplyAck { channel, queue: queue.clone() });
                    }
                    steps.push(Step::Apply { channel, queue });
                }
                Sender::Queue(from) => {
                    steps.push(Step::ApplyDead { from: from.clone(), queue: queue.clone() });
                }
            }
        }
        for (channel, source) in self.from_queues.keys() {
            let tag = match &source.consumer {
                Some(Taker::Consumer(tag)) => Some(tag.clone()),
                _ => None,
            };
            steps.push(Step::Forward { channel: *channel, queue: source.queue.clone(), tag });
        }
        for (name, queue) in self.queues.iter().filter(|(name, _)| !self.paused.contains(*name)) {
            if queue.next_expiry().is_some_and(|at| at <= now) {
                steps.push(Step::Expire(name.clone()));
            }
            if self.next_dead_letter(name).is_some() {
                steps.push(Step::DeadLetter(name.clone()));
            }
        }
        steps
    }

    /// When the next step becomes possible by time alone.
    pub fn next_time(&self) -> Option<Millis> {
        let expiries = self.queues.values().filter_map(Queue::next_expiry);
        let timeouts = self
            .channels
            .values()
            .filter_map(|channel| channel.unacked.values().map(|unacked| unacked.since).min())
            .map(|since| since.saturating_add(self.consumer_timeout).saturating_add(1));
        expiries.chain(timeouts).min()
    }

    /// Performs a step. If the step is not possible (any more), nothing happens.
    pub fn perform(&mut self, step: &Step, now: Millis) -> Vec<Emitted> {
        match step {
            Step::Receive(channel) => self.receive(*channel, now),
            Step::Apply { channel, queue } => {
                self.apply(&Sender::Channel(*channel), queue, now);
                Vec::new()
            }
            Step::ApplyAck { channel, queue } => {
                self.apply_ack(*channel, queue, now);
                Vec::new()
            }
            Step::ApplyDead { from, queue } => {
                self.apply(&Sender::Queue(from.clone()), queue, now);
                Vec::new()
            }
            Step::Forward { channel, queue, tag } => {
                let consumer = tag.clone().map(Taker::Consumer);
                self.forward(*channel, Source { queue: queue.clone(), consumer }, now)
            }
            Step::Confirm { channel, numbers } => {
                let frames = self.channels.get_mut(channel).map(|channel| channel.confirm(numbers));
                frames.into_iter().flatten().filter_map(|frame| self.emit(*channel, frame)).collect()
            }
            Step::Expire(queue) => {
                let effects = self.queues.get_mut(queue).map(|queue| queue.expire(now)).unwrap_or_default();
                self.carry_out(queue, effects);
                Vec::new()
            }
            Step::DeadLetter(queue) => {
                self.dead_letter_confirmed(queue);
                Vec::new()
            }
            Step::ConsumerTimeout(channel) => self.close(*channel, code::PRECONDITION_FAILED),
        }
    }

    /// Performs a random step; `None` if none is possible.
    pub fn step(&mut self, random: &mut Random, now: Millis) -> Option<(Step, Vec<Emitted>)> {
        let steps = self.steps(now);
        let step = random.one_of(&steps)?.clone();
        let emitted = self.perform(&step, now);
        Some((step, emitted))
    }

    /// The next of what `sender` asked of a queue arrives there.
    pub(super) fn apply(&mut self, sender: &Sender, name: &Name, now: Millis) -> bool {
        let key = (sender.clone(), name.clone());
        let Some(waiting) = self.to_queues.get_mut(&key) else { return false };
        let asked = waiting.pop_front();
        if waiting.is_empty() {
            self.to_queues.remove(&key);
        }
        asked.is_some_and(|asked| self.arrive(sender, name, asked, now))
    }

    /// The index of the first ack among the requests that wait for a classic queue, unless it is the next anyway.
    fn overtaking_ack(&self, name: &Name, waiting: &VecDeque<ToQueue>) -> Option<usize> {
        let is_classic = matches!(self.queues.get(name), Some(Queue::Classic(_)));
        let is_ack = |asked: &ToQueue| matches!(asked, ToQueue::Settle { .. });
        waiting.iter().position(is_ack).filter(|at| is_classic && *at > 0)
    }

    fn apply_ack(&mut self, channel: ChannelId, name: &Name, now: Millis) {
        let sender = Sender::Channel(channel);
        let key = (sender.clone(), name.clone());
        let at = self.to_queues.get(&key).and_then(|waiting| self.overtaking_ack(name, waiting));
        let ack = at.and_then(|at| self.to_queues.get_mut(&key)?.remove(at));
        if let Some(ack) = ack {
            self.arrive(&sender, name, ack, now);
        }
    }

    /// What `sender` asked of a queue has arrived there. False if there is no such queue.
    fn arrive(&mut self, sender: &Sender, name: &Name, asked: ToQueue, now: Millis) -> bool {
        let Some(queue) = self.queues.get_mut(name) else { return false };
        let from = match sender {
            Sender::Channel(channel) => Some(*channel),
            Sender::Queue(_) => None,
        };
        let effects = queue.apply(from, asked, now);
        let answers: Vec<(u64, bool)> = effects
            .iter()
            .filter_map(|effect| match effect {
                Effect::Settled { confirm, accepted } => Some((*confirm, *accepted)),
                _ => None,
            })
            .collect();
        for (confirm, accepted) in answers {
            match sender {
                Sender::Channel(channel) => {
                    self.send_to_channel(*channel, name, None, ToChannel::Answered { confirm, accepted });
                }
                Sender::Queue(from) => {
                    let effects = self
                        .queues
                        .get_mut(from)
                        .map(|queue| queue.discard_settled(confirm, accepted))
                        .unwrap_or_default();
                    self.carry_out(&from.clone(), effects);
                }
            }
        }
        self.carry_out(name, effects);
        true
    }

    fn forward(&mut self, id: ChannelId, source: Source, now: Millis) -> Vec<Emitted> {
        let name = source.queue.clone();
        let key = (id, source);
        let Some(waiting) = self.from_queues.get_mut(&key) else { return Vec::new() };
        let arrived = waiting.pop_front();
        if waiting.is_empty() {
            self.from_queues.remove(&key);
        }
        let (Some(arrived), Some(channel)) = (arrived, self.channels.get_mut(&id)) else { return Vec::new() };
        let frame = match arrived {
            ToChannel::Deliver { taker: Taker::Consumer(tag), taken, no_ack } => Some(Frame::Deliver {
                tag: tag.clone(),
                delivery: self.deliver(id, &name, Taker::Consumer(tag), taken, no_ack, now),
            }),
            ToChannel::Deliver { .. } => None,
            ToChannel::Answered { confirm, accepted } => {
                channel.answered(&name, confirm, accepted);
                None
            }
            ToChannel::Refuses(refuses) => {
                channel.refusing.insert(name, refuses);
                None
            }
            ToChannel::ConsumerCancelled { tag } => {
                channel.consumers.remove(&tag).map(|_| Frame::Cancelled { tag })
            }
        };
        frame.and_then(|frame| self.emit(id, frame)).into_iter().collect()
    }

    /// Numbers a message for a channel, and remembers it until it is settled.
    pub(super) fn deliver(
        &mut self,
        id: ChannelId,
        queue: &Name,
        taker: Taker,
        taken: Taken,
        no_ack: bool,
        now: Millis,
    ) -> Delivery {
        let mut delivery_tag = 0;
        if let Some(channel) = self.channels.get_mut(&id) {
            delivery_tag = channel.next_tag();
            if !no_ack {
                let unacked = Unacked { queue: queue.clone(), taker, id: taken.id, since: now };
                channel.unacked.insert(delivery_tag, unacked);
            } else if let (Some(Queue::Quorum(_)), Taker::Consumer(_)) = (self.queues.get(queue), &taker) {
                let settle = ToQueue::Settle { taker, ids: vec![taken.id] };
                self.to_queues.entry((Sender::Channel(id), queue.clone())).or_default().push_back(settle);
            }
        }
        Delivery {
            delivery_tag,
            redelivered: taken.redelivered,
            delivery_count: taken.delivery_count,
            message: taken.message,
        }
    }

    pub(super) fn emit(&self, id: ChannelId, frame: Frame) -> Option<Emitted> {
        let connection = self.channels.get(&id)?.connection;
        Some(Emitted { connection, channel: Some(id), frame })
    }

    /// The broker closes a channel.
    pub(super) fn close(&mut self, id: ChannelId, code: u16) -> Vec<Emitted> {
        let emitted = self.emit(id, Frame::Closed { code });
        self.end_channel(id);
        emitted.into_iter().collect()
    }

    pub(super) fn counted(&self, queue: &Queue) -> u32 {
        if self.mistake == Some(Mistake::CountsUnacked) {
            queue.ready() + queue.unacked() as u32
        } else {
            queue.ready()
        }
    }
}
