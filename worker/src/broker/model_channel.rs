//! The channel of one model's jobs: its consumers, its acks, and counts of what waits.

use std::num::NonZeroU16;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::poll;
use futures_util::stream::{BoxStream, StreamExt};
use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{
    BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use tokio::sync::Mutex;
use vramq_core::action::JobQueue;
use vramq_core::event::{QueueCount, QueueCounts, Source};
use vramq_core::ids::ConsumerId;
use vramq_core::settings::QueueFacts;
use vramq_schemas::topology::{bulk_queue, suspects_queue};

use super::deadline::within;

/// How long the broker may take to start a consumer: one that answers nothing for so long delivers no jobs either.
const CONSUME_MAX: Duration = Duration::from_secs(3);

/// The longest consumer tag: AMQP's short string.
const TAG_BYTES_MAX: usize = 255;

/// What a consumer gives: deliveries, then `None` when it has ended.
pub type Deliveries = BoxStream<'static, (Source, Option<lapin::Result<Delivery>>)>;

/// Why there is no consumer.
#[derive(Debug, thiserror::Error)]
pub enum ConsumeError {
    #[error(transparent)]
    Broker(#[from] lapin::Error),
    #[error("the broker does not answer")]
    Silent,
}

/// A model's jobs on a channel of its own. Clones are the same channel.
#[derive(Clone, Debug)]
pub struct ModelChannel {
    channel: Channel,
    /// Where its jobs come from: first its own queue.
    jobs: Arc<[ShortString]>,
    bulk: ShortString,
    quarantine: ShortString,
    /// What the tags of its consumers start with.
    tag: Arc<str>,
    /// Held while a consumer starts or stops: the prefetch is set on the channel and taken by the consumer that starts next.
    starting: Arc<Mutex<()>>,
}

impl ModelChannel {
    /// For a model with this routing key, whose jobs come from these queues.
    pub fn new(channel: Channel, worker: &str, key: &str, queues: &[QueueFacts]) -> Self {
        let jobs = queues.iter().map(|queue| queue.name.as_str().into()).collect();
        let (bulk, quarantine) = (bulk_queue(key).into(), suspects_queue(key).into());
        Self {
            channel,
            jobs,
            bulk,
            quarantine,
            tag: format!("{worker}.{key}").into(),
            starting: Arc::default(),
        }
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// A tag that no other consumer of the channel has or had.
    fn tag_of(&self, consumer: ConsumerId) -> ShortString {
        let number = format!(".{consumer}");
        let end = self.tag.floor_char_boundary(TAG_BYTES_MAX - number.len());
        format!("{}{number}", &self.tag[..end]).into()
    }

    /// Starts a consumer of the model's jobs. A broker that lets consumers say so takes `hold_max` for how long a job may be
    /// held; others have their own `consumer_timeout`.
    pub fn consume(
        &self,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: NonZeroU16,
        hold_max: Duration,
    ) -> impl Future<Output = Result<Deliveries, ConsumeError>> + Send + use<> {
        let this = self.clone();
        async move {
            let started = within(CONSUME_MAX, this.start(queue, consumer, prefetch, hold_max)).await;
            let stream = started.ok_or(ConsumeError::Silent)??;
            let source = match queue {
                JobQueue::Jobs(_) => Source::Jobs(consumer),
                JobQueue::Bulk => Source::Bulk(consumer),
            };
            let ended = futures_util::stream::once(async move { (source, None) });
            Ok(stream.map(move |delivery| (source, Some(delivery))).chain(ended).boxed())
        }
    }

    async fn start(
        &self,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: NonZeroU16,
        hold_max: Duration,
    ) -> lapin::Result<lapin::Consumer> {
        let _starting = self.starting.lock().await;
        self.channel.basic_qos(prefetch.get(), BasicQosOptions { global: false }).await?;
        let mut arguments = FieldTable::default();
        let ms = i64::try_from(hold_max.as_millis()).unwrap_or(i64::MAX);
        arguments.insert("x-consumer-timeout".into(), AMQPValue::LongLongInt(ms));
        let queue = match queue {
            // The core knows as many queues as the channel: both are the model's.
            JobQueue::Jobs(queue) => self.jobs[queue.0].clone(),
            JobQueue::Bulk => self.bulk.clone(),
        };
        let tag = self.tag_of(consumer);
        self.channel.basic_consume(queue, tag, BasicConsumeOptions::default(), arguments).await
    }

    /// Has the broker send no more to a consumer. What it already sent still comes, then the end of the stream: that may take
    /// a while, so it is not bounded here.
    pub fn stop(&self, consumer: ConsumerId) -> impl Future<Output = lapin::Result<()>> + Send + use<> {
        let this = self.clone();
        async move {
            let starting = this.starting.lock().await;
            let options = BasicCancelOptions::default();
            let mut cancelling = pin!(this.channel.basic_cancel(this.tag_of(consumer), options));
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
    }

    /// Asks how many messages of the model wait to be delivered.
    pub fn count(&self) -> impl Future<Output = lapin::Result<QueueCounts>> + Send + use<> {
        let Self { channel, jobs, bulk, quarantine, .. } = self.clone();
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        async move {
            let quarantine = channel.queue_declare(quarantine, options, FieldTable::default()).await?;
            let bulk = channel.queue_declare(bulk, options, FieldTable::default()).await?;
            let mut counts = Vec::with_capacity(jobs.len());
            for queue in jobs.iter() {
                let queue = channel.queue_declare(queue.clone(), options, FieldTable::default()).await?;
                counts.push(QueueCount { waiting: queue.message_count(), consumers: queue.consumer_count() });
            }
            Ok(QueueCounts {
                jobs: counts,
                bulk: bulk.message_count(),
                quarantined: quarantine.message_count(),
            })
        }
    }

    /// Takes one job from the model's quarantine, on the channel that jobs are acknowledged on: when it answers, the broker has
    /// read all acks that were sent before. If the answer is dropped, the job is held anyway, until the session ends.
    pub fn fetch_quarantined(&self) -> impl Future<Output = lapin::Result<Option<Delivery>>> + Send + use<> {
        let (channel, queue) = (self.channel.clone(), self.quarantine.clone());
        async move {
            let message = channel.basic_get(queue, BasicGetOptions::default()).await?;
            Ok(message.map(|message| message.delivery))
        }
    }
}
