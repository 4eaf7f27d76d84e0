//! A connection with its channels and consumers, opened in the order that makes them right: connection, topology,
//! confirms, then qos and consume for each model. lapin's own recovery stays off: it brings consumers back without their
//! prefetch.

use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{try_join, try_join_all};
use futures_util::stream::{BoxStream, Stream, StreamExt};
use lapin::message::Delivery;
use lapin::options::{
    BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, Event};
use vramq_amqp::ConnectError;
use vramq_schemas::topology::{jobs_queue, suspects_queue};

use crate::amqp::aside::{Aside, Experience};
use crate::amqp::direct_replies::DirectReplies;
use crate::amqp::publish::{BrokerLimits, Publisher};
use crate::amqp::topology::{self, TopologyError};
use crate::config::BrokerConfig;
use crate::model::Model;

/// How long an orderly close may take; after it the connection is dropped, which has the same effect for our jobs.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// What [`Session::flush`] waits for: so many of the slowest confirms, at least so long.
const FLUSH_CONFIRMS: u32 = 4;
const FLUSH_MIN: Duration = Duration::from_millis(50);

/// How long the broker may take to start a consumer.
const ANSWER_MAX: Duration = Duration::from_secs(3);

/// What a consumer gives: its model's index, and a delivery; nothing when it has ended.
pub type Deliveries = BoxStream<'static, (usize, Option<lapin::Result<Delivery>>)>;

/// An open session. Whatever of it breaks that jobs need, the whole is thrown away and a new one opened.
pub struct Session {
    connection: Arc<Connection>,
    /// Whether exchanges are declared.
    declare: bool,
    /// In confirm mode; everything about jobs is published here, but for direct replies.
    pub publisher: Publisher,
    direct_replies: DirectReplies,
    consumers: Vec<ModelConsumer>,
    /// For what goes on beside the jobs, until it is taken; nothing if the broker allows none.
    beside: Option<[Channel; 2]>,
    pub events: Pin<Box<dyn Stream<Item = Event> + Send>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("consumers", &self.consumers.len()).finish_non_exhaustive()
    }
}

/// Messages of a model that wait to be delivered.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub suspects: u32,
    pub jobs: u32,
    /// Workers that consume its jobs.
    pub consumers: u32,
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("connect to {0}")]
    Unreachable(ConnectError),
    /// The broker answered, and said no: credentials, vhost or permissions.
    #[error("the broker refuses the connection: {0}")]
    Refused(ConnectError),
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error("{step}: {error}")]
    Lost { step: &'static str, error: lapin::Error },
}

impl SessionError {
    /// Whether trying again without changing anything can help.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Refused(_) | Self::Topology(TopologyError::Refused { .. }))
    }
}

impl Session {
    /// Connects, and declares or verifies the topology of each model. What is above the limits is not published. Channels beside
    /// those of the jobs come last: if the broker allows none, the next session does without.
    ///
    /// # Errors
    /// [`SessionError`]; nothing stays open.
    pub async fn open(
        broker: &BrokerConfig,
        worker: &str,
        models: &[Arc<Model>],
        limits: BrokerLimits,
        experience: &Experience,
        direct_replies: &DirectReplies,
    ) -> Result<Self, SessionError> {
        let connection = broker.url.connect(&format!("vramq-worker {worker}")).await.map_err(|error| {
            if error.is_refusal() { SessionError::Refused(error) } else { SessionError::Unreachable(error) }
        })?;
        let lost = |step| move |error| SessionError::Lost { step, error };
        let events = Box::pin(connection.events_listener());
        for model in models {
            topology::declare(&connection, broker, model).await?;
        }
        let publisher = connection.create_channel().await.map_err(lost("open channel"))?;
        publisher.confirm_select(ConfirmSelectOptions::default()).await.map_err(lost("ask for confirms"))?;
        let mut consumers = Vec::with_capacity(models.len());
        for model in models {
            let consumer = ModelConsumer::open(&connection, worker, &model.key).await;
            consumers.push(consumer.map_err(lost("open channel"))?);
        }
        let mut beside = None;
        if !experience.is_refused() {
            let opened = try_join(connection.create_channel(), connection.create_channel()).await;
            beside = match opened {
                Ok(channels) => Some(channels.into()),
                // Not even asked for: the broker allows a connection no more, and this one is well.
                Err(error) if matches!(error.kind(), lapin::ErrorKind::ChannelsLimitReached) => {
                    experience.refuse(&error);
                    None
                }
                Err(error) => {
                    if is_channel_too_many(&error) {
                        experience.refuse(&error);
                    }
                    return Err(lost("open channels for operators")(error));
                }
            };
        }
        let (connection, declare) = (Arc::new(connection), broker.declare);
        let publisher = Publisher::new(publisher, direct_replies.clone(), limits);
        let direct_replies = direct_replies.clone();
        Ok(Self { connection, declare, publisher, direct_replies, consumers, beside, events })
    }

    /// Whether the connection and all channels that jobs need are open.
    pub fn is_whole(&self) -> bool {
        self.connection.status().connected()
            && self.publisher.is_open()
            && self.consumers.iter().all(|consumer| consumer.channel.status().connected())
    }

    /// For what goes on beside the jobs.
    pub fn aside(&mut self, experience: &Arc<Experience>) -> Option<[Aside; 2]> {
        let channels = self.beside.take()?;
        Some(channels.map(|channel| Aside {
            connection: Arc::clone(&self.connection),
            declare: self.declare,
            experience: Arc::clone(experience),
            direct_replies: self.direct_replies.clone(),
            channel: Some(channel),
        }))
    }

    /// Starts to consume a model's jobs with its slots as prefetch. A broker that lets consumers say so takes `timeout` for how
    /// long a job may be in hand; others have their own `consumer_timeout`.
    ///
    /// # Errors
    /// The channel is gone, or the broker does not answer: in words.
    pub async fn consume(
        &mut self,
        model: usize,
        slots: NonZeroU16,
        timeout: Duration,
    ) -> Result<Deliveries, String> {
        let consumer = &mut self.consumers[model];
        let stream = answered(consumer.start(slots, timeout)).await?;
        let closed = futures_util::stream::once(async move { (model, None) });
        Ok(stream.map(move |delivery| (model, Some(delivery))).chain(closed).boxed())
    }

    /// Tells the broker to send no more of a model's jobs. What it already sent still comes, then the end of the stream:
    /// that may take a while, so it is not bounded here.
    pub fn stop_consuming(&self, model: usize) -> impl Future<Output = lapin::Result<()>> + Send + use<> {
        let (channel, tag) = (self.consumers[model].channel.clone(), self.consumers[model].tag.clone());
        async move { channel.basic_cancel(tag, BasicCancelOptions::default()).await }
    }

    /// Asks how many messages of a model wait to be delivered.
    pub fn count_waiting(&self, model: usize) -> impl Future<Output = lapin::Result<Waiting>> + Send + use<> {
        let ModelConsumer { channel, suspects, queue, .. } = &self.consumers[model];
        let (channel, suspects, queue) = (channel.clone(), suspects.clone(), queue.clone());
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        async move {
            let suspects = channel.queue_declare(suspects, options, FieldTable::default()).await?;
            let jobs = channel.queue_declare(queue, options, FieldTable::default()).await?;
            let (suspects, consumers) = (suspects.message_count(), jobs.consumer_count());
            Ok(Waiting { suspects, jobs: jobs.message_count(), consumers })
        }
    }

    /// Asks for one job of a model's suspects, on the channel that jobs are acknowledged on: what was settled before is
    /// settled for the broker, too, when it answers. Whoever drops the answer has the job all the same, until the session
    /// ends.
    pub fn fetch_suspect(
        &self,
        model: usize,
    ) -> impl Future<Output = lapin::Result<Option<Delivery>>> + Send + use<> {
        let ModelConsumer { channel, suspects, .. } = &self.consumers[model];
        let (channel, queue) = (channel.clone(), suspects.clone());
        async move {
            let message = channel.basic_get(queue, BasicGetOptions::default()).await?;
            Ok(message.map(|message| message.delivery))
        }
    }

    /// Waits until the broker's queues have all acknowledgements. RabbitMQ 3.10 hands 32 of them on to a quorum queue
    /// (`quorum_commands_soft_limit`), and the rest, all at once, when the first of these are on disk; if the connection
    /// closes before, it forgets the rest. It does not say when that is. But it confirms publishes when they are on disk,
    /// so what these took is what to wait for.
    pub fn flush(&self) -> impl Future<Output = ()> + Send + use<> {
        let questions =
            |_| (0..self.consumers.len()).map(|model| self.count_waiting(model)).collect::<Vec<_>>();
        let [before, after] = [(); 2].map(questions);
        let written = FLUSH_MIN.max(self.publisher.slowest_confirm() * FLUSH_CONFIRMS);
        async move {
            let flushing = async {
                // Answers come after what was sent before: the broker has read all acknowledgements.
                try_join_all(before).await?;
                tokio::time::sleep(written).await;
                // And it has handed on what it held back.
                try_join_all(after).await
            };
            // A session that is lost has nothing to flush.
            let _ = tokio::time::timeout(CLOSE_MAX + written, flushing).await;
        }
    }

    /// Closes in good order; deliveries that are not settled go back to the broker.
    pub async fn close(self) {
        // A broker that blocks publishers reads nothing from us, and would never answer.
        match tokio::time::timeout(CLOSE_MAX, self.connection.close(200, "bye".into())).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "close connection"),
            Err(_) => tracing::debug!("the broker does not answer the close"),
        }
    }
}

/// The largest body that the broker takes, if an error says that one was larger. It has no other way to tell.
pub fn message_size_max(error: &lapin::Error) -> Option<usize> {
    let lapin::ErrorKind::ProtocolError(told) = error.kind() else { return None };
    let (_, rest) = told.get_message().as_str().split_once("is larger than configured max size ")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Whether the broker ended the connection because of a channel that this user may not open (`max-channels`).
fn is_channel_too_many(error: &lapin::Error) -> bool {
    let lapin::ErrorKind::ProtocolError(told) = error.kind() else { return false };
    *told.kind() == AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED)
}

/// How long the broker lets a consumer hold a delivery, if an error says that it lost patience. It has no other way to tell.
pub fn consumer_timeout(error: &lapin::Error) -> Option<Duration> {
    let lapin::ErrorKind::ProtocolError(told) = error.kind() else { return None };
    let (_, rest) = told.get_message().as_str().split_once("timed out. Timeout value used: ")?;
    let (ms, _) = rest.split_once(" ms")?;
    ms.parse().ok().map(Duration::from_millis)
}

/// A model's jobs on a channel of its own: qos is set before the consumer and holds for it alone.
struct ModelConsumer {
    channel: Channel,
    queue: ShortString,
    suspects: ShortString,
    /// The consumer's, the next one's too.
    tag: ShortString,
}

impl ModelConsumer {
    async fn open(connection: &Connection, worker: &str, key: &str) -> lapin::Result<Self> {
        let tag = format!("{worker}.{key}");
        let tag = tag[..tag.floor_char_boundary(255)].into();
        let (queue, suspects) = (jobs_queue(key).into(), suspects_queue(key).into());
        Ok(Self { channel: connection.create_channel().await?, queue, suspects, tag })
    }

    async fn start(&self, slots: NonZeroU16, timeout: Duration) -> lapin::Result<Consumer> {
        self.channel.basic_qos(slots.get(), BasicQosOptions { global: false }).await?;
        let (queue, tag) = (self.queue.clone(), self.tag.clone());
        let mut arguments = FieldTable::default();
        let ms = i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
        arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(ms));
        self.channel.basic_consume(queue, tag, BasicConsumeOptions::default(), arguments).await
    }
}

/// Waits for the broker's answer, but not for ever.
async fn answered<T>(request: impl Future<Output = lapin::Result<T>>) -> Result<T, String> {
    match tokio::time::timeout(ANSWER_MAX, request).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err("the broker does not answer".to_owned()),
    }
}
