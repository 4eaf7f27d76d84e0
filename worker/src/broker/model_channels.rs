//! The channels of one model's jobs: one for its own queue, its large jobs and its quarantine, and one for each further queue.
//!
//! The broker closes a channel that asks for a queue that does not exist. So a further queue, which others may delete, has a channel of
//! its own, and its loss costs only that channel. When the worker finds the queue again, it opens a new channel. In a classic queue
//! RabbitMQ acks a message by its number: an ack for the deleted queue would settle the message that has this number in the new queue.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use futures_util::stream::{BoxStream, StreamExt};
use lapin::message::Delivery;
use lapin::types::ShortString;
use lapin::{Channel, ConnectionStatus};
use vramq_core::action::JobQueue;
use vramq_core::event::{QueueCount, QueueCounts, Source};
use vramq_core::ids::{ChannelId, ConsumerId, ModelIndex, QueueIndex};
use vramq_schemas::topology::{bulk_queue, jobs_queue, suspects_queue};

use super::consumer_timeouts::ConsumerTimeouts;
use super::deadline::ANSWER_MAX;
use super::job_channel::{JobChannel, QueueError};
use super::silent_queues::{SilentQueues, is_about_a_queue};
use super::topology::FurtherQueue;

/// How long the broker may be silent before it starts a consumer. A busy broker has taken more than 3 s.
const CONSUME_MAX: Duration = Duration::from_secs(10);

/// How long the broker may take to start a consumer of a further queue while it delivers jobs of other queues, but none of this one. Well
/// below the 65 s after which RabbitMQ closes the connection, so that the worker knows the cause by then.
const FURTHER_MAX: Duration = Duration::from_secs(20);

/// The longest consumer tag: AMQP's short string.
const TAG_BYTES_MAX: usize = 255;

/// A consumer's stream: deliveries, then one item without a delivery when the consumer has ended.
pub type Deliveries = BoxStream<'static, Delivered>;

/// A consumer that the broker has started: the channel that it is on, which may be replaced by now, and its deliveries.
pub type StartedConsumer = (Arc<JobChannel>, Deliveries);

/// A delivery, or the end of its consumer.
#[derive(Debug)]
pub struct Delivered {
    pub source: Source,
    pub channel: Arc<JobChannel>,
    pub delivery: Option<lapin::Result<Delivery>>,
}

/// Why there is no consumer.
#[derive(Debug, thiserror::Error)]
pub enum ConsumeError {
    #[error(transparent)]
    Broker(#[from] lapin::Error),
    #[error(
        "the broker has not started it: it has sent nothing for {} s, or no answer for {} s. If its queue is a quorum queue, check that \
         most of the queue's members run",
        CONSUME_MAX.as_secs(),
        ANSWER_MAX.as_secs()
    )]
    Silent(ChannelId),
    /// The further queue is missing. The core does not start consumers of queues that it knows to be missing.
    #[error("the queue has no channel")]
    NoChannel,
}

/// What waits of a model, and the further queues that could not be counted. These have no channel any more.
#[derive(Debug)]
pub struct Counted {
    pub counts: QueueCounts,
    pub lost: Vec<(QueueIndex, lapin::Error)>,
}

/// The channel that a model's own queues are consumed on. Further queues get channels of the same connection.
#[derive(Debug)]
pub struct OwnChannel {
    pub channel: Channel,
    pub connection: ConnectionStatus,
}

/// The channels of a model in one session.
#[derive(Clone, Debug)]
pub struct ModelChannels {
    model: ModelIndex,
    own: Arc<JobChannel>,
    jobs: ShortString,
    bulk: ShortString,
    quarantine: ShortString,
    further: Vec<Further>,
    timeouts: ConsumerTimeouts,
    /// The connection of all channels.
    connection: ConnectionStatus,
    /// The prefix of its consumers' tags.
    tag: Arc<str>,
    /// How many channels for its jobs were opened in this session.
    made: u32,
}

/// A further queue.
#[derive(Clone, Debug)]
struct Further {
    queue: FurtherQueue,
    /// `None` while the queue cannot be consumed. May already be closed.
    channel: Option<Arc<JobChannel>>,
}

impl ModelChannels {
    /// `key`: the model's routing key. Further queues have no channels yet.
    pub fn new(
        model: ModelIndex,
        own: OwnChannel,
        worker: &str,
        key: &str,
        further: impl IntoIterator<Item = FurtherQueue>,
        timeouts: ConsumerTimeouts,
    ) -> Self {
        let OwnChannel { channel, connection } = own;
        Self {
            model,
            own: JobChannel::new(ChannelId { model, number: 0 }, channel, connection.clone()),
            jobs: jobs_queue(key).into(),
            bulk: bulk_queue(key).into(),
            quarantine: suspects_queue(key).into(),
            further: further.into_iter().map(|queue| Further { queue, channel: None }).collect(),
            timeouts,
            connection,
            tag: format!("{worker}.{key}").into(),
            made: 1,
        }
    }

    /// Whether the model's own channel is open. Without it the model receives no jobs.
    pub fn is_open(&self) -> bool {
        self.own.is_open()
    }

    /// A further queue was found; from now on this channel consumes it.
    pub fn found(&mut self, queue: QueueIndex, channel: Channel) {
        let id = ChannelId { model: self.model, number: self.made };
        self.made += 1;
        let channel = JobChannel::new(id, channel, self.connection.clone());
        if let Some(further) = self.further_mut(queue) {
            further.channel = Some(channel);
        }
    }

    /// Whether a further queue has an open channel.
    pub fn has_open(&mut self, queue: QueueIndex) -> bool {
        let channel = self.further_mut(queue).and_then(|further| further.channel.as_ref());
        channel.is_some_and(|channel| channel.is_open())
    }

    /// A further queue cannot be consumed.
    pub fn lost(&mut self, queue: QueueIndex) {
        if let Some(further) = self.further_mut(queue) {
            further.channel = None;
        }
    }

    /// Gives up the channel on which the broker does not start a further queue's consumer, and notes the silence at once. The returned future
    /// closes the channel. It forgets the silence if the broker answers, or if the connection ends for another reason. `None` if the queue
    /// has another channel by now, or none.
    pub fn give_up(
        &mut self,
        queue: QueueIndex,
        asked_on: ChannelId,
        silent: &SilentQueues,
    ) -> Option<impl Future<Output = ()> + Send + use<>> {
        let Further { queue, channel } = self.further_mut(queue)?;
        let channel = channel.take_if(|channel| channel.id() == asked_on)?;
        let (name, silent) = (queue.name.clone(), silent.clone());
        silent.note(&name, Instant::now());
        Some(async move {
            match channel.give_up().await {
                Err(error) if is_about_a_queue(&error) => {}
                Ok(()) | Err(_) => silent.forget(&name),
            }
        })
    }

    /// A further queue with the arguments for declaring it.
    pub fn further(&self, queue: QueueIndex) -> Option<&FurtherQueue> {
        Some(&self.further.get(queue.0.checked_sub(1)?)?.queue)
    }

    fn further_mut(&mut self, queue: QueueIndex) -> Option<&mut Further> {
        self.further.get_mut(queue.0.checked_sub(1)?)
    }

    /// A queue's name.
    pub fn name(&self, queue: JobQueue) -> ShortString {
        self.of(queue).0
    }

    /// A queue's name, and the channel that it is consumed on, if it has one.
    fn of(&self, queue: JobQueue) -> (ShortString, Option<Arc<JobChannel>>) {
        match queue {
            JobQueue::Bulk => (self.bulk.clone(), Some(Arc::clone(&self.own))),
            JobQueue::Jobs(QueueIndex::OWN) => (self.jobs.clone(), Some(Arc::clone(&self.own))),
            // In range: the core and this struct know the same queues of the model.
            JobQueue::Jobs(queue) => {
                let Further { queue, channel } = &self.further[queue.0 - 1];
                (queue.name.clone(), channel.clone())
            }
        }
    }

    /// A tag that no other consumer of the session has had.
    fn tag_of(&self, consumer: ConsumerId) -> ShortString {
        let number = format!(".{consumer}");
        let end = self.tag.floor_char_boundary(TAG_BYTES_MAX - number.len());
        format!("{}{number}", &self.tag[..end]).into()
    }

    /// Starts a consumer of the model's jobs. `hold_max`: how long a job may be held, for queues that accept this setting. For others the
    /// broker's own `consumer_timeout` applies.
    pub fn consume(
        &self,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: NonZeroU16,
        hold_max: Duration,
    ) -> impl Future<Output = Result<StartedConsumer, ConsumeError>> + Send + use<> {
        let ((name, channel), tag) = (self.of(queue), self.tag_of(consumer));
        let timeout = self.timeouts.takes(&name).then_some(hold_max);
        let is_further = matches!(queue, JobQueue::Jobs(queue) if queue.is_further());
        async move {
            let channel = channel.ok_or(ConsumeError::NoChannel)?;
            let started = channel.consume(name, tag, prefetch, timeout);
            let started = if is_further {
                channel.answered_within_own(CONSUME_MAX, FURTHER_MAX, started).await
            } else {
                channel.answered_within(CONSUME_MAX, started).await
            };
            let stream = started.ok_or(ConsumeError::Silent(channel.id()))??;
            let source = match queue {
                JobQueue::Jobs(queue) => Source::Jobs(queue, consumer),
                JobQueue::Bulk => Source::Bulk(consumer),
            };
            let ended = futures_util::stream::once(async { None });
            let deliveries = stream.map(Some).chain(ended);
            let on = Arc::clone(&channel);
            let with_source = move |delivery| Delivered { source, channel: Arc::clone(&channel), delivery };
            Ok((on, deliveries.map(with_source).boxed()))
        }
    }

    /// Asks the broker to send no more to a consumer, on the channel that it has started on.
    pub fn stop(
        &self,
        consumer: ConsumerId,
        channel: Arc<JobChannel>,
    ) -> impl Future<Output = lapin::Result<()>> + Send + use<> {
        let tag = self.tag_of(consumer);
        async move { channel.stop(tag).await }
    }

    /// Asks how many messages of the model wait to be delivered.
    pub fn count(&self) -> impl Future<Output = Result<Counted, QueueError>> + Send + use<> {
        let Self { own, jobs, bulk, quarantine, further, .. } = self.clone();
        async move {
            let quarantined = own.count(&quarantine).await?.waiting;
            let bulk = own.count(&bulk).await?;
            let (mut counts, mut lost) = (vec![own.count(&jobs).await?], Vec::new());
            for (at, Further { queue, channel }) in (1..).map(QueueIndex).zip(further) {
                let counted = match channel {
                    Some(channel) => tokio::select! {
                        counted = channel.count(&queue.name) => counted,
                        () = channel.given_up() => Ok(QueueCount::default()),
                    },
                    None => Ok(QueueCount::default()),
                };
                counts.push(match counted {
                    Err(QueueError::Broker(error)) => {
                        lost.push((at, error));
                        QueueCount::default()
                    }
                    counted => counted?,
                });
            }
            Ok(Counted { counts: QueueCounts { jobs: counts, bulk, quarantined }, lost })
        }
    }

    /// Waits until the broker has read everything sent on the channels so far, above all acks: it answers in their order.
    pub fn synced(&self) -> impl Future<Output = ()> + Send + use<> {
        let Self { own, quarantine, further, .. } = self.clone();
        async move {
            let of_further = further.iter().filter_map(|Further { queue, channel }| {
                let channel = channel.as_ref()?;
                Some(async move {
                    tokio::select! {
                        _ = channel.count(&queue.name) => {}
                        () = channel.given_up() => {}
                    }
                })
            });
            // A closed channel does not answer, and is not waited for.
            let (_, _) = futures_util::join!(own.count(&quarantine), join_all(of_further));
        }
    }

    /// Takes one job from the model's quarantine. The answer also shows that the broker has read all acks that were sent before. If the
    /// future is dropped, the session may hold a job that nothing handles, until it ends.
    pub fn take_quarantined(
        &self,
    ) -> impl Future<Output = Result<Option<(Arc<JobChannel>, Delivery)>, QueueError>> + Send + use<> {
        let (own, quarantine) = (Arc::clone(&self.own), self.quarantine.clone());
        let synced = (!self.further.is_empty()).then(|| self.synced());
        async move {
            if let Some(synced) = synced {
                synced.await;
            }
            let delivery = own.get(&quarantine).await?;
            Ok(delivery.map(|delivery| (own, delivery)))
        }
    }
}
