//! One channel that delivers jobs: its consumers, and counts of its queues.

use std::num::NonZeroU16;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use lapin::message::Delivery;
use lapin::options::{
    BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Consumer};
use tokio::sync::Mutex;
use vramq_core::event::QueueCount;
use vramq_core::ids::ChannelId;

/// A channel of jobs. It stays open until its last delivery is settled, even after a new channel has replaced it.
#[derive(Debug)]
pub struct JobChannel {
    id: ChannelId,
    channel: Channel,
    /// Held while a consumer starts or stops. The prefetch is set on the channel, and the next consumer that starts takes it.
    starting: Mutex<()>,
}

impl JobChannel {
    pub fn new(id: ChannelId, channel: Channel) -> Arc<Self> {
        Arc::new(Self { id, channel, starting: Mutex::default() })
    }

    /// Acks must use the channel with the id of their delivery.
    pub fn id(&self) -> ChannelId {
        self.id
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Starts a consumer. `timeout` is how long it may hold a delivery, where the queue lets it say so.
    pub async fn consume(
        &self,
        queue: ShortString,
        tag: ShortString,
        prefetch: NonZeroU16,
        timeout: Option<Duration>,
    ) -> lapin::Result<Consumer> {
        let _starting = self.starting.lock().await;
        self.channel.basic_qos(prefetch.get(), BasicQosOptions { global: false }).await?;
        let mut arguments = FieldTable::default();
        if let Some(timeout) = timeout {
            let ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
            arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(ms));
        }
        self.channel.basic_consume(queue, tag, BasicConsumeOptions::default(), arguments).await
    }

    /// Asks the broker to send no more to a consumer. Earlier deliveries still arrive, then the stream ends. That may take a while, so this
    /// function has no time limit.
    pub async fn stop(&self, tag: ShortString) -> lapin::Result<()> {
        let starting = self.starting.lock().await;
        let mut cancelling = pin!(self.channel.basic_cancel(tag, BasicCancelOptions::default()));
        // The first poll sends the frame, so several consumers can be stopped in parallel. RabbitMQ returns deliveries in flight to a
        // stopped consumer and counts them; they must not go to the next consumer that is being stopped. lapin would drop a delivery for a
        // consumer that is gone, but none arrives: a classic queue answers the cancel after its deliveries, and the broker returns later
        // deliveries of a quorum queue (docs/rabbitmq.md).
        let first = poll!(&mut cancelling);
        drop(starting);
        match first {
            Poll::Ready(stopped) => stopped,
            Poll::Pending => cancelling.await,
        }
    }

    /// Asks how many messages of a queue wait for delivery. A missing queue closes the channel.
    pub async fn count(&self, queue: &ShortString) -> lapin::Result<QueueCount> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.clone(), options, FieldTable::default()).await?;
        Ok(QueueCount { waiting: queue.message_count(), consumers: queue.consumer_count() })
    }

    /// Takes one message from a queue.
    pub async fn get(&self, queue: &ShortString) -> lapin::Result<Option<Delivery>> {
        let message = self.channel.basic_get(queue.clone(), BasicGetOptions::default()).await?;
        Ok(message.map(|message| message.delivery))
    }
}
