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
use lapin::{Channel, ConnectionStatus, Consumer};
use tokio::sync::{Mutex, watch};
use vramq_core::event::QueueCount;
use vramq_core::ids::ChannelId;

use super::deadline::{ANSWER_MAX, within_silence};

/// How long the broker may be silent before it answers a question about a queue. A channel that stays silent for longer settles nothing
/// either.
const SILENT_MAX: Duration = Duration::from_secs(60);

/// Why there is no answer about a queue.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    #[error(transparent)]
    Broker(#[from] lapin::Error),
    #[error(
        "the broker has sent neither a job nor an answer for {} s, or no answer for {} s",
        SILENT_MAX.as_secs(),
        ANSWER_MAX.as_secs()
    )]
    Silent,
}

/// A channel of jobs. It stays open until the last of its deliveries is settled, also if another one has taken its place.
#[derive(Debug)]
pub struct JobChannel {
    id: ChannelId,
    channel: Channel,
    connection: ConnectionStatus,
    /// Held while a consumer starts or stops. The prefetch is set on the channel, and the next consumer that starts takes it.
    starting: Mutex<()>,
    /// The broker does not answer on it, and nothing waits for its answers any more.
    is_given_up: watch::Sender<bool>,
}

impl JobChannel {
    /// `connection`: that of the channel.
    pub fn new(id: ChannelId, channel: Channel, connection: ConnectionStatus) -> Arc<Self> {
        let is_given_up = watch::Sender::new(false);
        Arc::new(Self { id, channel, connection, starting: Mutex::default(), is_given_up })
    }

    /// Acks must use the channel with the id of their delivery.
    pub fn id(&self) -> ChannelId {
        self.id
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Closes a channel on which the broker does not answer. Returns when the broker has confirmed the close, which it does after it has
    /// handled the pending requests.
    ///
    /// # Errors
    /// What ended the connection before.
    pub async fn give_up(&self) -> lapin::Result<()> {
        self.is_given_up.send_replace(true);
        self.channel.close(200, "bye".into()).await
    }

    /// Waits until the channel is given up.
    pub async fn given_up(&self) {
        // An `Err` only without a sender; `self` holds it.
        let _ = self.is_given_up.subscribe().wait_for(|is_given_up| *is_given_up).await;
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

    /// Asks how many messages of a queue wait to be delivered. A queue that is not there ends the channel.
    pub async fn count(&self, queue: &ShortString) -> Result<QueueCount, QueueError> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let counted = self.channel.queue_declare(queue.clone(), options, FieldTable::default());
        let queue = self.answered(counted).await?;
        Ok(QueueCount { waiting: queue.message_count(), consumers: queue.consumer_count() })
    }

    /// Takes one message from a queue.
    pub async fn get(&self, queue: &ShortString) -> Result<Option<Delivery>, QueueError> {
        let message = self.channel.basic_get(queue.clone(), BasicGetOptions::default());
        Ok(self.answered(message).await?.map(|message| message.delivery))
    }

    /// Waits for the broker's answer, but not for ever.
    async fn answered<T>(&self, request: impl Future<Output = lapin::Result<T>>) -> Result<T, QueueError> {
        Ok(self.answered_within(SILENT_MAX, request).await.ok_or(QueueError::Silent)??)
    }

    /// Waits for an answer of the broker as long as it is not silent. The answer comes after the deliveries of all channels that the broker
    /// has sent before, and on a slow network a large one takes minutes. So the time restarts with each frame of them, and ends after
    /// [`ANSWER_MAX`].
    pub async fn answered_within<T>(
        &self,
        silent_max: Duration,
        request: impl Future<Output = T>,
    ) -> Option<T> {
        within_silence(silent_max, ANSWER_MAX, || self.connection.body_frames(), request).await
    }

    /// The same, but gives up as well when no frame of a delivery has come on this channel for `own_silent_max`.
    pub async fn answered_within_own<T>(
        &self,
        silent_max: Duration,
        own_silent_max: Duration,
        request: impl Future<Output = T>,
    ) -> Option<T> {
        let answered = self.answered_within(silent_max, request);
        within_silence(own_silent_max, ANSWER_MAX, || self.channel.status().body_frames(), answered).await?
    }
}
