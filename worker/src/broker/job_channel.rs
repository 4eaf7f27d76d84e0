//! One channel that jobs are delivered on: its consumers, and counts of its queues.

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

/// A channel of jobs. It stays open until the last of its deliveries is settled, also if another one has taken its place.
#[derive(Debug)]
pub struct JobChannel {
    id: ChannelId,
    channel: Channel,
    /// Held while a consumer starts or stops: the prefetch is set on the channel and taken by the consumer that starts next.
    starting: Mutex<()>,
}

impl JobChannel {
    pub fn new(id: ChannelId, channel: Channel) -> Arc<Self> {
        Arc::new(Self { id, channel, starting: Mutex::default() })
    }

    /// Deliveries and acks belong together by it.
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

    /// Has the broker send no more to a consumer. What it already sent still comes, then the end of the stream: that may take
    /// a while, so it is not bounded here.
    pub async fn stop(&self, tag: ShortString) -> lapin::Result<()> {
        let starting = self.starting.lock().await;
        let mut cancelling = pin!(self.channel.basic_cancel(tag, BasicCancelOptions::default()));
        // Its first poll sends the frame. Several consumers are stopped without waiting for each other: what is on its way
        // to a stopped one, RabbitMQ returns and counts as delivered, and it must not reach the next that is to stop.
        // Nothing reaches lapin for a consumer that is gone, which would drop it: a classic queue answers the cancel after
        // what it sent, and the broker's side of a quorum queue returns what comes later (docs/rabbitmq.md).
        let first = poll!(&mut cancelling);
        drop(starting);
        match first {
            Poll::Ready(stopped) => stopped,
            Poll::Pending => cancelling.await,
        }
    }

    /// Asks how many messages of a queue wait to be delivered. A queue that is not there ends the channel.
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
