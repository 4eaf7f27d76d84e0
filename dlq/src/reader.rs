//! Reads a dead queue, oldest first. Nothing is acknowledged unless the caller asks for it.
//!
//! One consumer reads up to 65,535 dead letters, because a quorum queue requeues the messages of one consumer in their order. The
//! messages of several consumers are requeued consumer by consumer, on RabbitMQ 4 in no certain order. The prefetch is set
//! explicitly because a quorum queue limits "unlimited" to 2,000.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::time::timeout;

use crate::byte_limiter::{ByteLimiter, Deliveries};
use crate::dead_letter::DeadLetter;
use crate::error::Error;
use crate::queue_lock::QueueLock;
use crate::text::safe;

/// The largest prefetch of AMQP: so many dead letters one consumer holds unacknowledged. For more, another consumer is added.
const PREFETCH_MAX: u16 = u16::MAX;

/// The longest wait for one delivery.
const SILENCE: Duration = Duration::from_secs(2);

/// After so many silences without a delivery, one more ends the reading.
const SILENCES_MAX: u32 = 5;

/// The longest wait for the channel to close.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// How often a reading is extended by letters that arrived meanwhile. Without a bound it might never end.
const EXTENSIONS_MAX: u32 = 3;

/// Reads the dead letters of a locked queue, and holds them unacknowledged until it gives them back.
#[derive(Debug)]
pub struct Reader<'a> {
    queue_lock: &'a QueueLock,
    channel: Channel,
    deliveries: Deliveries,
    /// The sum over all consumers so far.
    prefetch: u64,
    /// Messages that the queue reported.
    due: u64,
    extensions: u32,
    seen: u64,
    acked: Arc<AtomicU64>,
}

/// A dead letter that was read and not acknowledged.
#[derive(Debug)]
pub struct Unacked {
    pub letter: DeadLetter,
    /// Its delivery tag on the reader's channel.
    pub tag: u64,
    /// Some consumer got it before.
    pub(crate) redelivered: bool,
}

/// Acknowledges what a reader has read.
#[derive(Debug)]
pub(crate) struct Acks {
    channel: Channel,
    limiter: Arc<ByteLimiter>,
    acked: Arc<AtomicU64>,
}

impl Acks {
    /// Does not wait until it is sent: the thread that sends it may be blocked by the limiter, which only the caller releases.
    /// Reading the queue again shows whether the message is gone.
    pub(crate) fn ack(&self, tag: u64) -> Result<(), Error> {
        let acked =
            self.limiter.bypass(|| self.channel.basic_ack(tag, BasicAckOptions::default()).now_or_never());
        if let Some(Err(error)) = acked {
            return Err(error.into());
        }
        self.acked.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl<'a> Reader<'a> {
    /// Opens a channel. Reads nothing yet.
    ///
    /// # Errors
    /// The queue cannot be read, or the connection is lost.
    pub async fn open(queue_lock: &'a QueueLock) -> Result<Self, Error> {
        let channel = queue_lock.connection.create_channel().await?;
        let due = queue_lock.count().await?.ready;
        Ok(Self {
            queue_lock,
            channel,
            deliveries: Deliveries::new(),
            prefetch: 0,
            due,
            extensions: 0,
            seen: 0,
            acked: Arc::default(),
        })
    }

    /// The next dead letter; `None` after all that were there at the start.
    ///
    /// Cancel safety: none. After a dropped call, give back what was read.
    ///
    /// # Errors
    /// The queue cannot be read, or the connection is lost.
    pub async fn next(&mut self) -> Result<Option<Unacked>, Error> {
        let mut silences = 0;
        loop {
            if self.seen >= self.due {
                let more = self.queue_lock.count().await?.ready;
                if more == 0 || self.extensions == EXTENSIONS_MAX {
                    return Ok(None);
                }
                self.extensions += 1;
                self.due += more;
            }
            if self.held() >= self.prefetch {
                self.consume().await?;
            }
            match timeout(SILENCE, self.deliveries.next()).await.map(Result::transpose) {
                Ok(Some(delivery)) => return Ok(Some(self.unacked(delivery?))),
                Ok(None) => {
                    return Err(Error::Refused(format!("{} was deleted", safe(&self.queue_lock.queue))));
                }
                Err(_) if silences < SILENCES_MAX => silences += 1,
                // A client without the lock took them, or they expired.
                Err(_) if self.queue_lock.count().await?.ready == 0 => return Ok(None),
                Err(_) => {
                    return Err(Error::Refused(format!(
                        "{} reports messages, but delivers none",
                        safe(&self.queue_lock.queue)
                    )));
                }
            }
        }
    }

    /// Adds a consumer to those whose prefetch is used up.
    async fn consume(&mut self) -> Result<(), Error> {
        self.channel.basic_qos(PREFETCH_MAX, BasicQosOptions::default()).await?;
        let (queue, tag) = (self.queue_lock.queue.as_str().into(), format!("vramq-dlq-{:06}", self.prefetch));
        let options = BasicConsumeOptions::default();
        let consumer = self.channel.basic_consume(queue, tag.into(), options, FieldTable::default()).await;
        self.deliveries.add(consumer.map_err(|error| self.queue_lock.explained(error))?);
        self.prefetch += u64::from(PREFETCH_MAX);
        Ok(())
    }

    fn unacked(&mut self, delivery: Delivery) -> Unacked {
        self.seen += 1;
        let Delivery { properties, data, delivery_tag, redelivered, .. } = delivery;
        let letter = DeadLetter::new(&self.queue_lock.queue, properties, data);
        Unacked { letter, tag: delivery_tag, redelivered }
    }

    /// Messages that were read and not acknowledged.
    fn held(&self) -> u64 {
        self.seen - self.acked.load(Ordering::Relaxed)
    }

    pub(crate) fn acks(&self) -> Acks {
        let (channel, limiter) = (self.channel.clone(), self.deliveries.limiter());
        Acks { channel, limiter, acked: Arc::clone(&self.acked) }
    }

    /// Requeues every unacknowledged letter, and waits until the queue has all of them: the next reader would miss them.
    ///
    /// # Errors
    /// The queue cannot be read, or the connection is lost.
    pub async fn give_back(self) -> Result<(), Error> {
        let (held, Self { queue_lock, channel, deliveries, .. }) = (self.held(), self);
        drop(deliveries);
        let _ = timeout(CLOSE_MAX, channel.close(200, "OK".into())).await;
        queue_lock.wait_for_requeue(held).await
    }
}
