//! How a channel handles each command of its client.

use std::collections::btree_map::Entry;
use std::sync::Arc;

use super::channel::ChannelConsumer;
use super::exchange::Exchange;
use super::message::{Message, Millis, Name};
use super::mistake::Mistake;
use super::protocol::{ChannelId, Command, Emitted, Frame, QueueKind, QueueOptions, code};
use super::queue::{Queue, Subscription, Taker, ToQueue};
use super::{Broker, MESSAGES_MAX, Sender, ToChannel};

/// Why the broker does not do what it was asked: it closes the channel, or the connection.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Channel(u16),
    Connection(u16),
}

type CommandResult = Result<Option<Frame>, Fault>;

impl Broker {
    /// The next command of a channel.
    pub(super) fn receive(&mut self, id: ChannelId, now: Millis) -> Vec<Emitted> {
        let Some(channel) = self.channels.get_mut(&id) else { return Vec::new() };
        let connection = channel.connection;
        if self.connections.get(&connection).is_none_or(|connection| connection.blocked) {
            return Vec::new();
        }
        let Some(command) = channel.inbox.pop_front() else { return Vec::new() };
        let closing = command == Command::Close;
        let publishes = matches!(command, Command::Publish { .. });
        let outcome = self.execute(id, command, now);
        let mut emitted: Vec<Emitted> = match outcome {
            Ok(frame) => frame.and_then(|frame| self.emit(id, frame)).into_iter().collect(),
            Err(Fault::Channel(code)) => return self.close(id, code),
            Err(Fault::Connection(code)) => {
                self.lose(connection);
                return vec![Emitted { connection, channel: None, frame: Frame::ConnectionClosed { code } }];
            }
        };
        if closing {
            self.end_channel(id);
        }
        // The publish that meets the alarm is the last one that the broker reads.
        if publishes
            && self.alarm
            && let Some(state) = self.connections.get_mut(&connection)
        {
            state.blocked = true;
            emitted.push(Emitted { connection, channel: None, frame: Frame::Blocked });
        }
        emitted
    }

    fn execute(&mut self, id: ChannelId, command: Command, now: Millis) -> CommandResult {
        match command {
            Command::Qos { prefetch } => {
                if let Some(channel) = self.channels.get_mut(&id) {
                    channel.prefetch = prefetch;
                }
                Ok(Some(Frame::QosOk))
            }
            Command::Consume { queue, tag, no_ack, priority } => {
                self.consume(id, queue, tag, no_ack, priority, now)
            }
            Command::Cancel { tag } => self.cancel(id, tag, now),
            Command::Get { queue, no_ack } => self.get(id, &queue, no_ack, now),
            Command::Ack { tag, multiple } => {
                self.settle(id, tag, multiple, |taker, ids| ToQueue::Settle { taker, ids })
            }
            Command::Nack { tag, multiple, requeue: true } => {
                self.settle(id, tag, multiple, |taker, ids| ToQueue::Requeue { taker, ids })
            }
            Command::Nack { tag, multiple, requeue: false } => {
                self.settle(id, tag, multiple, |taker, ids| ToQueue::Discard { taker, ids })
            }
            Command::ConfirmSelect => {
                if let Some(channel) = self.channels.get_mut(&id) {
                    channel.next_confirm.get_or_insert(1);
                }
                Ok(Some(Frame::ConfirmSelectOk))
            }
            Command::Publish { exchange, routing_key, mandatory, properties, body } => self.publish(
                id,
                &Arc::new(Message::new(exchange, routing_key, *properties, body)),
                mandatory,
                now,
            ),
            Command::Count { queue } => self.count(id, &queue, now),
            Command::Close => Ok(Some(Frame::CloseOk)),
            other => self.administer(id, other, now),
        }
    }

    /// Declaring, binding and deleting.
    fn administer(&mut self, id: ChannelId, command: Command, now: Millis) -> CommandResult {
        match command {
            Command::DeclareQueue { name, options } => self.declare_queue(id, name, *options, now),
            Command::DeleteQueue { name, if_unused, if_empty } => {
                self.delete_queue(id, &name, if_unused, if_empty, now)
            }
            Command::Purge { queue } => {
                self.drain_to(id, &queue, now);
                let target = self.queues.get_mut(&queue).ok_or(Fault::Channel(code::NOT_FOUND))?;
                let (messages, effects) = target.purge();
                self.carry_out(&queue, effects);
                Ok(Some(Frame::PurgeOk { messages }))
            }
            Command::DeclareExchange { name, kind } => {
                let exchange = self.exchanges.entry(name).or_insert_with(|| Exchange::new(kind));
                if exchange.kind != kind {
                    return Err(Fault::Channel(code::PRECONDITION_FAILED));
                }
                Ok(Some(Frame::ExchangeDeclareOk))
            }
            Command::Bind { queue, exchange, routing_key } => {
                let exchange = self.bindable(&queue, &exchange)?;
                exchange.bindings.insert((queue, routing_key));
                Ok(Some(Frame::BindOk))
            }
            Command::Unbind { queue, exchange, routing_key } => {
                if let Ok(exchange) = self.bindable(&queue, &exchange) {
                    exchange.bindings.remove(&(queue, routing_key));
                }
                Ok(Some(Frame::UnbindOk))
            }
            // `execute` handles all other commands.
            _ => Ok(None),
        }
    }

    fn bindable(&mut self, queue: &Name, exchange: &Name) -> Result<&mut Exchange, Fault> {
        if !self.queues.contains_key(queue) {
            return Err(Fault::Channel(code::NOT_FOUND));
        }
        self.exchanges.get_mut(exchange).ok_or(Fault::Channel(code::NOT_FOUND))
    }

    fn consume(
        &mut self,
        id: ChannelId,
        queue: Name,
        tag: Name,
        no_ack: bool,
        priority: i32,
        now: Millis,
    ) -> CommandResult {
        self.drain_to(id, &queue, now);
        let Some(channel) = self.channels.get_mut(&id) else { return Ok(None) };
        if channel.consumers.contains_key(&tag) {
            return Err(Fault::Connection(code::NOT_ALLOWED));
        }
        let Some(target) = self.queues.get_mut(&queue) else { return Err(Fault::Channel(code::NOT_FOUND)) };
        channel.consumers.insert(tag.clone(), ChannelConsumer { queue: queue.clone(), no_ack });
        let prefetch = channel.prefetch;
        let effects =
            target.consume(Subscription { channel: id, tag: tag.clone(), prefetch, no_ack, priority }, now);
        self.carry_out(&queue, effects);
        Ok(Some(Frame::ConsumeOk { tag }))
    }

    fn cancel(&mut self, id: ChannelId, tag: Name, now: Millis) -> CommandResult {
        let Some(channel) = self.channels.get_mut(&id) else { return Ok(None) };
        if let Some(consumer) = channel.consumers.remove(&tag) {
            self.drain_to(id, &consumer.queue, now);
            let key = (id, Taker::Consumer(tag.clone()));
            let effects =
                self.queues.get_mut(&consumer.queue).map(|queue| queue.cancel(&key, now)).unwrap_or_default();
            self.carry_out(&consumer.queue, effects);
        }
        Ok(Some(Frame::CancelOk { tag }))
    }

    fn get(&mut self, id: ChannelId, name: &Name, no_ack: bool, now: Millis) -> CommandResult {
        self.drain_to(id, name, now);
        let Some(channel) = self.channels.get(&id) else { return Ok(None) };
        let tag = channel.next_delivery_tag;
        let queue = self.queues.get_mut(name).ok_or(Fault::Channel(code::NOT_FOUND))?;
        let (taken, effects) = queue.get((id, tag), no_ack, now);
        self.carry_out(name, effects);
        let Some((taken, ready)) = taken else { return Ok(Some(Frame::GetEmpty)) };
        let delivery = self.deliver(id, name, Taker::Get(tag), taken, no_ack, now);
        Ok(Some(Frame::GetOk { delivery, ready }))
    }

    fn settle(
        &mut self,
        id: ChannelId,
        tag: u64,
        multiple: bool,
        make: impl Fn(Taker, Vec<u64>) -> ToQueue,
    ) -> CommandResult {
        let Some(channel) = self.channels.get_mut(&id) else { return Ok(None) };
        let multiple = multiple && self.mistake != Some(Mistake::IgnoresMultiple);
        let groups = channel.settled_by(tag, multiple).ok_or(Fault::Channel(code::PRECONDITION_FAILED))?;
        for ((queue, taker), ids) in groups {
            if self.queues.contains_key(&queue) {
                self.to_queues.entry((Sender::Channel(id), queue)).or_default().push_back(make(taker, ids));
            }
        }
        Ok(None)
    }

    fn publish(
        &mut self,
        id: ChannelId,
        message: &Arc<Message>,
        mandatory: bool,
        now: Millis,
    ) -> CommandResult {
        let queues =
            self.route(&message.exchange, &message.routing_key).ok_or(Fault::Channel(code::NOT_FOUND))?;
        let full = self.message_count() >= MESSAGES_MAX;
        let Some(channel) = self.channels.get_mut(&id) else { return Ok(None) };
        let confirm = channel.next_confirm;
        if let Some(number) = confirm {
            channel.next_confirm = Some(number + 1);
            channel.unconfirmed.insert(number, queues.clone());
            if queues.is_empty() {
                channel.answered(&message.routing_key, number, true);
            }
        }
        let unroutable = queues.is_empty() && mandatory && self.mistake != Some(Mistake::ForgetsReturn);
        for queue in queues {
            let refused = full || self.refuses(id, &queue, now);
            match (refused, confirm) {
                (false, _) => {
                    let asked = ToQueue::Enqueue { message: message.clone(), confirm };
                    self.to_queues.entry((Sender::Channel(id), queue)).or_default().push_back(asked);
                }
                (true, Some(number)) => {
                    if let Some(channel) = self.channels.get_mut(&id) {
                        channel.answered(&queue, number, false);
                    }
                }
                (true, None) => {}
            }
        }
        Ok(unroutable.then(|| Frame::Return { message: message.clone() }))
    }

    /// Whether a channel refuses a publish because it knows that the queue is full. The first publish registers the channel with the queue.
    fn refuses(&mut self, id: ChannelId, name: &Name, now: Millis) -> bool {
        let kind = self.queues.get(name).map(|queue| queue.options().kind);
        if kind != Some(QueueKind::Quorum) {
            return false;
        }
        if let Some(refusing) = self.channels.get(&id).and_then(|channel| channel.refusing.get(name)) {
            return *refusing;
        }
        self.drain_to(id, name, now);
        let refusing = self.queues.get_mut(name).is_some_and(|queue| queue.register(id));
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.refusing.insert(name.clone(), refusing);
        }
        refusing
    }

    fn count(&mut self, id: ChannelId, name: &Name, now: Millis) -> CommandResult {
        let kind = self.queues.get(name).map(|queue| queue.options().kind);
        // A quorum queue answers with what it has applied so far.
        if kind == Some(QueueKind::Classic) {
            self.drain_to(id, name, now);
        }
        let queue = self.queues.get(name).ok_or(Fault::Channel(code::NOT_FOUND))?;
        Ok(Some(Frame::DeclareOk {
            messages: self.counted(queue),
            consumers: queue.consumers().len() as u32,
        }))
    }

    fn declare_queue(
        &mut self,
        id: ChannelId,
        name: Name,
        options: QueueOptions,
        now: Millis,
    ) -> CommandResult {
        match self.queues.entry(name.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(Queue::new(options, self.generation, self.mistake));
                Ok(Some(Frame::DeclareOk { messages: 0, consumers: 0 }))
            }
            Entry::Occupied(known) if *known.get().options() != options => {
                Err(Fault::Channel(code::PRECONDITION_FAILED))
            }
            Entry::Occupied(_) => self.count(id, &name, now),
        }
    }

    fn delete_queue(
        &mut self,
        id: ChannelId,
        name: &Name,
        if_unused: bool,
        if_empty: bool,
        now: Millis,
    ) -> CommandResult {
        self.drain_to(id, name, now);
        let Some(queue) = self.queues.get(name) else { return Ok(Some(Frame::DeleteOk { messages: 0 })) };
        if queue.options().kind == QueueKind::Quorum && (if_unused || if_empty) {
            return Err(Fault::Connection(code::NOT_IMPLEMENTED));
        }
        if (if_unused && !queue.consumers().is_empty()) || (if_empty && queue.ready() > 0) {
            return Err(Fault::Channel(code::PRECONDITION_FAILED));
        }
        let messages = queue.ready();
        self.queues.remove(name);
        self.paused.remove(name);
        self.to_queues.retain(|(_, queue), _| queue != name);
        for exchange in self.exchanges.values_mut() {
            exchange.bindings.retain(|(queue, _)| queue != name);
        }
        let mut ended: Vec<(ChannelId, Name)> = Vec::new();
        for (channel, state) in &mut self.channels {
            let tags = state.consumers.iter().filter(|(_, consumer)| consumer.queue == *name);
            ended.extend(tags.map(|(tag, _)| (*channel, tag.clone())));
        }
        for (channel, tag) in ended {
            self.send_to_channel(channel, name, None, ToChannel::ConsumerCancelled { tag });
        }
        for channel in self.channels.values_mut() {
            channel.queue_deleted(name);
        }
        Ok(Some(Frame::DeleteOk { messages }))
    }

    /// A command that waits for a queue's answer arrives after everything that the channel sent there before.
    fn drain_to(&mut self, id: ChannelId, queue: &Name, now: Millis) {
        let sender = Sender::Channel(id);
        while self.apply(&sender, queue, now) {}
    }
}
