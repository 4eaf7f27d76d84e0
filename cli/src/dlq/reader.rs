//! A dead queue's letters, oldest first, none of them acknowledged unless somebody says so.
//!
//! All by one consumer: what a dead consumer of a quorum queue held comes back in its order, but what several held comes back
//! consumer by consumer, on RabbitMQ 4 in no certain order. Its prefetch is said aloud, because a quorum queue takes "no
//! limit" for 2,000.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use tokio::time::timeout;

use super::byte_limiter::{ByteLimiter, Deliveries};
use super::dead_letter::DeadLetter;
use super::error::Error;
use super::queue_lock::{CLOSE_MAX, QueueLock};
use crate::output::text::safe;

/// The largest prefetch that AMQP can say. A queue with more letters is read by several consumers.
const PREFETCH_MAX: u16 = u16::MAX;

/// How long a queue that says it has letters may give none before it is asked again.
const SILENCE: Duration = Duration::from_secs(2);

/// How often it may be asked again in vain.
const SILENCES_MAX: u32 = 5;

/// How often letters that came meanwhile are taken along: if they come as fast as they are read, that would not end.
const EXTENSIONS_MAX: u32 = 3;

pub(super) struct Reader<'a> {
    queue_lock: &'a QueueLock,
    channel: Channel,
    deliveries: Deliveries,
    /// What all consumers so far may hold.
    prefetch: u64,
    /// Letters that the queue has, as far as it has said.
    due: u64,
    extensions: u32,
    seen: u64,
    acked: Rc<Cell<u64>>,
}

/// A letter in hand.
pub(super) struct Unacked {
    pub(super) letter: DeadLetter,
    pub(super) tag: u64,
}

/// Removes what a reader has read.
pub(super) struct Acks {
    channel: Channel,
    limiter: Arc<ByteLimiter>,
    acked: Rc<Cell<u64>>,
}

impl Acks {
    /// Without waiting until it is sent: the thread that would send it may be waiting for room at the limiter, which only the
    /// caller makes. Whether the letter is gone is seen by reading the queue again.
    pub(super) fn ack(&self, tag: u64) -> Result<(), Error> {
        let acked =
            self.limiter.bypass(|| self.channel.basic_ack(tag, BasicAckOptions::default()).now_or_never());
        if let Some(Err(error)) = acked {
            return Err(error.into());
        }
        self.acked.set(self.acked.get() + 1);
        Ok(())
    }
}

impl<'a> Reader<'a> {
    pub(super) async fn open(queue_lock: &'a QueueLock) -> Result<Self, Error> {
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
            acked: Rc::default(),
        })
    }

    /// The next letter, until all are read that were there.
    ///
    /// Cancel safety: none; whoever drops it half-way gives back what was read.
    pub(super) async fn next(&mut self) -> Result<Option<Unacked>, Error> {
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
                Ok(Some(delivery)) => return Ok(Some(self.taken(delivery?))),
                Ok(None) => {
                    return Err(Error::Refused(format!("{} was deleted", safe(&self.queue_lock.queue))));
                }
                Err(_) if silences < SILENCES_MAX => silences += 1,
                // Somebody without the lock took letters, or they expired.
                Err(_) if self.queue_lock.count().await?.ready == 0 => return Ok(None),
                Err(_) => {
                    return Err(Error::Refused(format!(
                        "{} says that it has letters, but gives none",
                        safe(&self.queue_lock.queue)
                    )));
                }
            }
        }
    }

    /// Another consumer beside those whose prefetch is used up.
    async fn consume(&mut self) -> Result<(), Error> {
        self.channel.basic_qos(PREFETCH_MAX, BasicQosOptions::default()).await?;
        let (queue, tag) = (self.queue_lock.queue.as_str().into(), format!("vramq-dlq-{:06}", self.prefetch));
        let options = BasicConsumeOptions::default();
        let consumer = self.channel.basic_consume(queue, tag.into(), options, FieldTable::default()).await;
        self.deliveries.admit(consumer.map_err(|error| self.queue_lock.explained(error))?);
        self.prefetch += u64::from(PREFETCH_MAX);
        Ok(())
    }

    fn taken(&mut self, delivery: Delivery) -> Unacked {
        self.seen += 1;
        let Delivery { properties, data, delivery_tag, .. } = delivery;
        Unacked { letter: DeadLetter::new(&self.queue_lock.queue, properties, data), tag: delivery_tag }
    }

    /// Letters that were read and not acknowledged.
    fn held(&self) -> u64 {
        self.seen - self.acked.get()
    }

    pub(super) fn acks(&self) -> Acks {
        let (channel, limiter) = (self.channel.clone(), self.deliveries.limiter());
        Acks { channel, limiter, acked: Rc::clone(&self.acked) }
    }

    /// Gives everything back that is not acknowledged, and waits until the queue has it: the next to look would count it
    /// as missing.
    pub(super) async fn give_back(self) -> Result<(), Error> {
        let (held, Self { queue_lock, channel, deliveries, .. }) = (self.held(), self);
        drop(deliveries);
        let _ = timeout(CLOSE_MAX, channel.close(200, "seen".into())).await;
        queue_lock.has_back(held).await
    }
}
