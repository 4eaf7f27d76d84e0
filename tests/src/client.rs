//! The test's own side of the broker: publish anything, collect what comes back.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::stream::{Stream, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions, BasicPublishOptions,
    BasicRejectOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
    QueuePurgeOptions,
};
use lapin::types::FieldTable;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ErrorKind, ExchangeKind,
    PublisherConfirm,
};
use tokio::time::timeout;
use vramq_schemas::{DeadLetter, Encoding, Failure, Outputs, ReplyHeaders, ReplyKind, codec};

use crate::job::Message;
use crate::wait::{DEADLINE, until};

/// How long the close of a connection may take: as for the worker's own, which is far more than it ever needs.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// A consumer without a delivery for so long is cancelled and created again.
const QUIET_MAX: Duration = Duration::from_secs(10);

/// A connection of the test.
pub struct Client {
    connection: Connection,
    /// In confirm mode.
    channel: Channel,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

/// Messages of one queue. Messages that are read are acknowledged. Others go back to the queue, where the harness finds them.
pub struct Mailbox {
    queue: String,
    stream: Pin<Box<dyn Stream<Item = lapin::Result<Delivery>> + Send>>,
}

impl std::fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mailbox").field("queue", &self.queue).finish_non_exhaustive()
    }
}

/// A message that came out of a queue.
#[derive(Clone, Debug)]
pub struct Received {
    pub properties: BasicProperties,
    pub body: Vec<u8>,
}

impl Client {
    /// # Errors
    /// No connection.
    pub async fn connect(url: &str) -> Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default())
            .await
            .with_context(|| format!("connect to {url}"))?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { connection, channel })
    }

    /// Publishes a job to a model.
    ///
    /// # Errors
    /// The broker does not take it or has no queue for it.
    pub async fn publish(&self, model: &str, message: Message) -> Result<()> {
        self.publish_all(model, vec![message]).await
    }

    /// Publishes jobs, all confirms in flight.
    ///
    /// # Errors
    /// The broker does not take one or has no queue for it.
    pub async fn publish_all(&self, model: &str, messages: Vec<Message>) -> Result<()> {
        let mut confirms = Vec::with_capacity(messages.len());
        for message in messages {
            confirms.push(self.send(message.exchange(), model, message).await?);
        }
        for confirm in confirms {
            let confirmation = timeout(DEADLINE, confirm).await.context("no confirm")??;
            ensure!(
                matches!(confirmation, Confirmation::Ack(None)),
                "the broker answered {confirmation:?} for a job"
            );
        }
        Ok(())
    }

    /// Publishes straight to a queue, all confirms in flight; returns the confirm of each.
    ///
    /// # Errors
    /// The channel is gone.
    pub async fn publish_to_queue(&self, queue: &str, messages: &[Message]) -> Result<Vec<Confirmation>> {
        let mut confirms = Vec::with_capacity(messages.len());
        for message in messages {
            confirms.push(self.send("", queue, message.clone()).await?);
        }
        let confirmation = futures_util::future::try_join_all(confirms);
        Ok(timeout(DEADLINE, confirmation).await.context("no confirm")??)
    }

    /// Publishes to an exchange; returns the confirm, with the message itself if no queue takes it.
    ///
    /// # Errors
    /// The channel is gone, by the broker's will if there is no such exchange.
    pub async fn publish_to(&self, exchange: &str, key: &str, message: Message) -> Result<Confirmation> {
        let confirmation = self.send(exchange, key, message).await?;
        Ok(timeout(DEADLINE, confirmation).await.context("no confirm")??)
    }

    /// Declares a durable exchange.
    ///
    /// # Errors
    /// It exists as another kind.
    pub async fn declare_exchange(&self, name: &str, kind: ExchangeKind) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await?;
        Ok(channel.close(200, "declared".into()).await?)
    }

    /// Publishes jobs, with all confirms in flight. Returns for each whether the broker certainly has it.
    pub async fn offer(&self, model: &str, messages: Vec<Message>) -> Vec<bool> {
        let mut confirms = Vec::with_capacity(messages.len());
        for message in messages {
            confirms.push(self.send(message.exchange(), model, message).await);
        }
        let mut taken = Vec::with_capacity(confirms.len());
        for confirm in confirms {
            let confirmation = match confirm {
                Ok(confirm) => confirm.await.ok(),
                Err(_) => None,
            };
            taken.push(matches!(confirmation, Some(Confirmation::Ack(None))));
        }
        taken
    }

    async fn send(&self, exchange: &str, key: &str, message: Message) -> Result<PublisherConfirm> {
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let Message { properties, body, .. } = message;
        Ok(self.channel.basic_publish(exchange.into(), key.into(), options, &body, properties).await?)
    }

    /// Declares a durable queue.
    ///
    /// # Errors
    /// It exists with other arguments.
    pub async fn declare_queue(&self, name: &str, arguments: FieldTable) -> Result<()> {
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        // On a channel of its own, because a refusal closes it.
        let channel = self.connection.create_channel().await?;
        channel.queue_declare(name.into(), options, arguments).await?;
        channel.close(200, "declared".into()).await?;
        Ok(())
    }

    /// Messages in a queue that wait for a consumer, at this moment.
    ///
    /// # Errors
    /// No such queue.
    pub async fn ready(&self, queue: &str) -> Result<u32> {
        Ok(self.look_at(queue).await?.message_count())
    }

    /// Consumers of a queue, at this moment.
    ///
    /// # Errors
    /// No such queue.
    pub async fn consumers(&self, queue: &str) -> Result<u32> {
        Ok(self.look_at(queue).await?.consumer_count())
    }

    async fn look_at(&self, queue: &str) -> Result<lapin::Queue> {
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        let channel = self.connection.create_channel().await?;
        let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        channel.close(200, "looked".into()).await?;
        Ok(queue)
    }

    /// Removes all messages of a queue that wait for a consumer.
    ///
    /// # Errors
    /// No such queue.
    pub async fn purge(&self, queue: &str) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        channel.queue_purge(queue.into(), QueuePurgeOptions::default()).await?;
        Ok(channel.close(200, "purged".into()).await?)
    }

    /// Binds a queue.
    ///
    /// # Errors
    /// Neither queue nor exchange of these names.
    pub async fn bind_queue(&self, queue: &str, exchange: &str, key: &str) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        let options = QueueBindOptions::default();
        channel.queue_bind(queue.into(), exchange.into(), key.into(), options, FieldTable::default()).await?;
        Ok(channel.close(200, "bound".into()).await?)
    }

    /// Takes the first message of a queue and gives it back, several times.
    ///
    /// # Errors
    /// It is not there any more.
    pub async fn look_and_give_back(&self, queue: &str, times: usize) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        for time in 0..times {
            let got = until("a message to look at", async || {
                Ok(channel.basic_get(queue.into(), BasicGetOptions::default()).await?)
            });
            let got = got.await.with_context(|| format!("look {time}"))?;
            let options = BasicNackOptions { requeue: true, ..Default::default() };
            ensure!(got.acker.nack(options).await?, "nack lost");
        }
        Ok(channel.close(200, "looked".into()).await?)
    }

    /// Takes the first message of a queue and rejects it: the broker dead-letters it.
    ///
    /// # Errors
    /// None comes.
    pub async fn reject(&self, queue: &str) -> Result<()> {
        let channel = self.connection.create_channel().await?;
        let got = until("a message to reject", async || {
            Ok(channel.basic_get(queue.into(), BasicGetOptions::default()).await?)
        });
        ensure!(got.await?.acker.reject(BasicRejectOptions { requeue: false }).await?, "reject lost");
        Ok(channel.close(200, "rejected".into()).await?)
    }

    /// Starts to read a queue.
    ///
    /// # Errors
    /// No such queue.
    pub async fn mailbox(&self, queue: &str) -> Result<Mailbox> {
        let channel = self.connection.create_channel().await?;
        let consumer = channel
            .basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default())
            .await?;
        // The channel lives as long as its stream.
        let stream = consumer.map(move |delivery| {
            let _alive = &channel;
            delivery
        });
        Ok(Mailbox { queue: queue.to_owned(), stream: Box::pin(stream) })
    }

    /// # Errors
    /// The connection is gone already.
    pub async fn close(&self) -> Result<()> {
        // A mailbox that was dropped a moment ago is closing its channel. lapin answers that with an error or, seldom,
        // ends its connection without any answer; the connection closes anyway.
        match timeout(CLOSE_MAX, self.connection.close(200, "bye".into())).await {
            Ok(Err(error)) if !matches!(error.kind(), ErrorKind::InvalidChannelState(..)) => {
                Err(error.into())
            }
            _ => Ok(()),
        }
    }
}

impl Mailbox {
    /// The next message.
    ///
    /// # Errors
    /// None comes within the deadline.
    pub async fn next(&mut self) -> Result<Received> {
        match self.next_within(DEADLINE).await? {
            Some(message) => Ok(message),
            None => bail!("no message came to `{}` within {DEADLINE:?}", self.queue),
        }
    }

    /// The next message, if one comes within a time.
    ///
    /// # Errors
    /// The queue or the connection is gone.
    pub async fn next_within(&mut self, time: Duration) -> Result<Option<Received>> {
        let Ok(next) = timeout(time, self.stream.next()).await else {
            return Ok(None);
        };
        let delivery = next.with_context(|| format!("the consumer of `{}` was cancelled", self.queue))??;
        ensure!(delivery.acker.ack(BasicAckOptions::default()).await?, "ack lost");
        Ok(Some(Received { properties: delivery.properties, body: delivery.data }))
    }

    /// Passes every message to `record` before it is acknowledged, for ever. So a message that is lost with the connection comes again.
    ///
    /// # Errors
    /// The queue or the connection is gone; or nothing comes any more, since lapin does not always tell.
    pub async fn hand_over(&mut self, mut record: impl FnMut(&Received)) -> Result<Infallible> {
        loop {
            let next = timeout(QUIET_MAX, self.stream.next()).await.context("nothing came")?;
            let delivery = next.context("the consumer was cancelled")??;
            let message = Received { properties: delivery.properties, body: delivery.data };
            record(&message);
            // If the connection is just breaking, lapin may never complete this.
            let acked = timeout(QUIET_MAX, delivery.acker.ack(BasicAckOptions::default())).await;
            ensure!(acked.context("an ack that is never over")??, "ack lost");
        }
    }

    /// The next so many messages.
    ///
    /// # Errors
    /// They do not all come.
    pub async fn take(&mut self, count: usize) -> Result<Vec<Received>> {
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let next = self.next().await;
            taken.push(next.with_context(|| format!("{} of {count} came", taken.len()))?);
        }
        Ok(taken)
    }
}

impl Received {
    pub fn id(&self) -> &str {
        self.properties.message_id().as_ref().map_or("", |id| id.as_str())
    }

    pub fn correlation_id(&self) -> &str {
        self.properties.correlation_id().as_ref().map_or("", |id| id.as_str())
    }

    pub fn headers(&self) -> FieldTable {
        self.properties.headers().clone().unwrap_or_default()
    }

    /// # Errors
    /// The message is no reply.
    pub fn kind(&self) -> Result<ReplyKind> {
        let kind = self.properties.kind().as_ref().map_or("", |kind| kind.as_str());
        ReplyKind::of(kind).with_context(|| format!("type `{kind}` is none of a reply"))
    }

    /// # Errors
    /// The content type is unknown.
    pub fn encoding(&self) -> Result<Encoding> {
        Ok(Encoding::of(self.properties.content_type().as_ref().map(|t| t.as_str()))?)
    }

    /// The headers of a `part` or `done` reply.
    ///
    /// # Errors
    /// They are not.
    pub fn reply(&self) -> Result<ReplyHeaders> {
        Ok(ReplyHeaders::read(&self.headers())?)
    }

    /// # Errors
    /// The body is none of a `part` or `done` reply.
    pub fn outputs(&self) -> Result<Outputs> {
        Ok(codec::decode(&self.body, self.encoding()?)?)
    }

    /// # Errors
    /// The message is no `failed` reply.
    pub fn failure(&self) -> Result<Failure> {
        ensure!(self.kind()? == ReplyKind::Failed, "not a failure: {:?}", self.properties);
        Ok(codec::decode(&self.body, self.encoding()?)?)
    }

    /// # Errors
    /// The message is no dead letter of a worker.
    pub fn dead_letter(&self) -> Result<DeadLetter> {
        DeadLetter::read(&self.headers()).with_context(|| format!("no dead letter: {:?}", self.properties))
    }
}
