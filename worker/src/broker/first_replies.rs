//! Publishes the first replies to each reply queue, one at a time, on channels that nothing else uses.
//!
//! The first message to a quorum queue without its majority holds up its channel: see [`reply_queues`](super::reply_queues). So
//! it holds up no other reply. If no confirm comes in time, its channel is closed, and that reply alone is given up.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::Connection;
use lapin::options::ConfirmSelectOptions;
use lapin::types::ShortString;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use vramq_amqp::{ConfirmedPublisher, MatchBy, UnknownOutcome};

use super::aux_channel::AuxChannelState;
use super::message::Message;
use super::opening::is_channel_too_many;
use super::publisher::{MessageOutcome, publish_on};
use super::reply_queues::{ReplyQueue, ReplyQueues};

/// The most channels, those included that the broker has not closed yet. It closes a channel of a queue without majority after
/// 65 s. So up to so many such queues keep no other caller's first reply waiting. Channels are opened when they are needed: a
/// worker whose queues all confirm has one or two.
const CHANNELS_MAX: usize = 16;

/// The session's channels for first replies. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct FirstReplies {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    connection: Arc<Connection>,
    aux_state: Arc<AuxChannelState>,
    confirm_s: u32,
    queues: Mutex<ReplyQueues>,
    /// One for each channel that may be opened or used.
    permits: Arc<Semaphore>,
    channels: Mutex<Channels>,
    /// Seconds in which the broker read.
    seconds: watch::Sender<u32>,
}

#[derive(Debug, Default)]
struct Channels {
    /// All that may be used.
    open: Vec<ConfirmedPublisher>,
    /// Of those, the ones with nothing to confirm.
    idle: Vec<ConfirmedPublisher>,
}

impl FirstReplies {
    pub(super) fn new(connection: Arc<Connection>, aux_state: Arc<AuxChannelState>, confirm_s: u32) -> Self {
        let shared = Shared {
            connection,
            aux_state,
            confirm_s,
            queues: Mutex::default(),
            permits: Arc::new(Semaphore::new(CHANNELS_MAX)),
            channels: Mutex::default(),
            seconds: watch::Sender::new(0),
        };
        Self { shared: Arc::new(shared) }
    }

    /// What is known of the queue that a reply goes to.
    pub(super) fn queue(&self, name: &ShortString) -> Arc<ReplyQueue> {
        self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner).of(name)
    }

    /// Publishes a reply to a queue that is not proven. The caller has the queue's turn.
    ///
    /// # Errors
    /// As of [`Publisher::publish`](super::publisher::Publisher::publish).
    pub(super) async fn publish(
        &self,
        queue: &ReplyQueue,
        message: &Message,
    ) -> Result<MessageOutcome, UnknownOutcome> {
        let outcome = tokio::select! {
            channel = self.channel() => self.publish_alone(channel?, message).await?,
            () = self.shared.overdue() => MessageOutcome::NoConfirm,
        };
        queue.took_alone(outcome, Instant::now());
        Ok(outcome)
    }

    async fn publish_alone(
        &self,
        channel: OwnChannel,
        message: &Message,
    ) -> Result<MessageOutcome, UnknownOutcome> {
        let OwnChannel { publisher, permit } = channel;
        let outcome = publish_on(&publisher, message).await?;
        if outcome != MessageOutcome::NoConfirm {
            self.shared.channels().idle.push(publisher);
            return Ok(outcome);
        }
        // The broker may take a minute to read that the channel is to be closed.
        tokio::spawn(async move {
            if let Err(error) = publisher.close().await {
                tracing::debug!(error = error.to_string(), "close the channel of a silent reply queue");
            }
            drop(permit);
        });
        Ok(outcome)
    }

    /// Waits for a channel. Cancel-safe.
    async fn channel(&self) -> Result<OwnChannel, UnknownOutcome> {
        // An `Err` only if the semaphore was closed, which nobody does.
        let Ok(permit) = Arc::clone(&self.shared.permits).acquire_owned().await else {
            return std::future::pending().await;
        };
        let idle = self.shared.channels().idle.pop();
        let publisher = match idle {
            Some(publisher) => publisher,
            None => self.open().await?,
        };
        Ok(OwnChannel { publisher, permit })
    }

    async fn open(&self) -> lapin::Result<ConfirmedPublisher> {
        let opened = async {
            let channel = self.shared.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        };
        let channel = opened.await.inspect_err(|error| {
            if is_channel_too_many(error) {
                self.shared.aux_state.refuse(error);
            }
        })?;
        let publisher = ConfirmedPublisher::new(channel, MatchBy::PublishSeq, Some(self.shared.confirm_s));
        if self.shared.is_blocked() {
            publisher.blocked();
        }
        let mut channels = self.shared.channels();
        channels.open.retain(ConfirmedPublisher::is_open);
        channels.open.push(publisher.clone());
        Ok(publisher)
    }

    /// The longest recent time that the broker took for a confirm.
    pub(super) fn slowest_confirm(&self) -> Duration {
        let channels = self.shared.channels();
        channels.open.iter().map(ConfirmedPublisher::slowest_confirm).max().unwrap_or_default()
    }

    pub(super) fn blocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::blocked);
    }

    pub(super) fn unblocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::unblocked);
    }

    /// A second has passed in which confirms could be taken.
    pub(super) fn tick(&self) {
        if !self.shared.is_blocked() {
            self.shared.seconds.send_modify(|seconds| *seconds += 1);
        }
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::tick);
    }
}

/// A channel on which one message is published at a time, and the permit to have it.
struct OwnChannel {
    publisher: ConfirmedPublisher,
    permit: OwnedSemaphorePermit,
}

impl Shared {
    /// Waits as long as a confirm may take, not counting the time for which the broker blocks publishers.
    async fn overdue(&self) {
        let mut seconds = self.seconds.subscribe();
        let until = seconds.borrow().saturating_add(self.confirm_s);
        // An `Err` only without a sender, which `self` holds.
        let _ = seconds.wait_for(|now| *now > until).await;
    }

    fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// Nothing panics while it holds the lock.
    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
