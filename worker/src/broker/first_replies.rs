//! Publishes the first replies to each reply queue, one at a time, on separate channels.
//!
//! The first message to a quorum queue without its majority blocks its channel: see [`reply_queues`](super::reply_queues). On a separate
//! channel it blocks no other reply. If its confirm does not come in time although the broker confirms other messages, its channel is
//! closed, and only that reply is given up.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::Connection;
use lapin::options::ConfirmSelectOptions;
use lapin::types::ShortString;
use tokio::sync::watch;
use tokio::time::timeout;
use vramq_amqp::{ConfirmedPublisher, MatchBy, UnknownOutcome, transfer_seconds};

use super::aux_channel::AuxChannelState;
use super::channel_shares::ChannelShares;
use super::message::Message;
use super::opening::is_channel_too_many;
use super::publisher::{MessageOutcome, publish_on};
use super::reply_queues::{ReplyQueue, ReplyQueues};

/// How long the broker may take to close a channel before another one is opened in addition: longer than RabbitMQ's 65 s.
const CLOSE_MAX: Duration = Duration::from_secs(90);

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
    /// Who has a channel, and who waits for one.
    shares: Mutex<ChannelShares>,
    channels: Mutex<Channels>,
    /// Counts the seconds in which the broker read from the connection.
    seconds: watch::Sender<u32>,
    /// Counts the messages that the broker has answered, on any channel.
    answers: AtomicU64,
    /// A reply was given up while the broker answered nothing, and it has answered nothing since.
    is_one_given_up: AtomicBool,
}

#[derive(Debug, Default)]
struct Channels {
    /// All usable channels.
    open: Vec<ConfirmedPublisher>,
    /// The usable channels without an unconfirmed message.
    idle: Vec<ConfirmedPublisher>,
}

impl FirstReplies {
    pub(super) fn new(connection: Arc<Connection>, aux_state: Arc<AuxChannelState>, confirm_s: u32) -> Self {
        let shared = Shared {
            connection,
            aux_state,
            confirm_s,
            queues: Mutex::default(),
            shares: Mutex::default(),
            channels: Mutex::default(),
            seconds: watch::Sender::new(0),
            answers: AtomicU64::new(0),
            is_one_given_up: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The record of a reply's queue.
    pub(super) fn queue(&self, name: &ShortString) -> Arc<ReplyQueue> {
        self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner).of(name)
    }

    /// Publishes a caller's reply to a queue that is not proven. The queue's `turn` must be held. `None` if the connection allows no channel
    /// for it.
    ///
    /// # Errors
    /// Those of [`Publisher::publish`](super::publisher::Publisher::publish).
    pub(super) async fn publish(
        &self,
        queue: &ReplyQueue,
        message: &Message,
        caller: String,
    ) -> Result<Option<MessageOutcome>, UnknownOutcome> {
        let Some(OwnChannel { publisher, permit }) = self.channel(caller).await? else { return Ok(None) };
        let confirm_s = self.shared.confirm_s.saturating_add(transfer_seconds(message.body.len()));
        let before = self.shared.answers.load(Ordering::Relaxed);
        let is_queue_silent = tokio::select! {
            outcome = publish_on(&publisher, message) => {
                let outcome = outcome?;
                self.broker_answers();
                self.shared.channels().idle.push(publisher);
                queue.took_alone(outcome, Instant::now());
                return Ok(Some(outcome));
            }
            overdue = self.shared.overdue(before, confirm_s) => overdue?,
        };
        // Only if this queue is silent, not the whole broker: replies that wait behind this one then end with it.
        if is_queue_silent {
            queue.took_alone(MessageOutcome::NoConfirm, Instant::now());
        }
        self.close(publisher, permit);
        Ok(Some(MessageOutcome::NoConfirm))
    }

    /// The broker has answered a message on any channel.
    pub(super) fn broker_answers(&self) {
        self.shared.answers.fetch_add(1, Ordering::Relaxed);
        self.shared.is_one_given_up.store(false, Ordering::Relaxed);
    }

    /// Closes the channel and returns its permit when the broker has done so. That may take a minute.
    fn close(&self, publisher: ConfirmedPublisher, permit: Permit) {
        let shared = Arc::clone(&self.shared);
        tokio::spawn(async move {
            let closed = timeout(CLOSE_MAX, publisher.close()).await;
            tracing::debug!(?closed, "closed the channel of a silent reply queue");
            shared.channels().open.retain(ConfirmedPublisher::is_open);
            drop(permit);
        });
    }

    /// Waits until a caller may have a channel; `None` if the connection allows no more.
    async fn channel(&self, caller: String) -> Result<Option<OwnChannel>, UnknownOutcome> {
        let permit = self.permit(caller).await;
        let idle = self.shared.channels().idle.pop();
        let publisher = match idle {
            Some(publisher) => Some(publisher),
            None => self.open().await?,
        };
        Ok(publisher.map(|publisher| OwnChannel { publisher, permit }))
    }

    /// Not cancel-safe: a channel that is passed on to a future that was dropped is not free again in this session.
    async fn permit(&self, caller: String) -> Permit {
        let waiting = self.shared.shares().take(&caller);
        if let Some(waiting) = waiting {
            // An `Err` only without a sender; `self` holds it.
            let _ = waiting.await;
        }
        Permit { shared: Arc::clone(&self.shared), caller }
    }

    async fn open(&self) -> lapin::Result<Option<ConfirmedPublisher>> {
        let opened = async {
            let channel = self.shared.connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        };
        let channel = match opened.await {
            Ok(channel) => channel,
            // lapin refused to open the channel, so the connection is not affected.
            Err(error) if matches!(error.kind(), lapin::ErrorKind::ChannelsLimitReached) => return Ok(None),
            Err(error) => {
                if is_channel_too_many(&error) {
                    self.shared.aux_state.refuse_first_replies(&error);
                }
                return Err(error);
            }
        };
        // `Shared::overdue` sets its deadline.
        let publisher = ConfirmedPublisher::new(channel, MatchBy::PublishSeq, None);
        if self.shared.is_blocked() {
            publisher.blocked();
        }
        let mut channels = self.shared.channels();
        channels.open.retain(ConfirmedPublisher::is_open);
        channels.open.push(publisher.clone());
        Ok(Some(publisher))
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

    /// Another second has passed in which the broker could send confirms.
    pub(super) fn tick(&self) {
        if !self.shared.is_blocked() {
            self.shared.seconds.send_modify(|seconds| *seconds += 1);
        }
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::tick);
    }
}

/// A channel for one message at a time, with its permit.
struct OwnChannel {
    publisher: ConfirmedPublisher,
    permit: Permit,
}

/// A caller's permit for one channel. Returns it when dropped.
struct Permit {
    shared: Arc<Shared>,
    caller: String,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.shared.shares().give_back(&self.caller);
    }
}

impl Shared {
    /// Waits as long as a confirm may take, without the time in which the broker blocks publishers. `before`: the broker's answers when the
    /// message was sent; `confirm_s`: how long it may take. True if the queue is silent: the broker answered other messages meanwhile.
    /// Otherwise one reply is given up (`false`), whose dead letter shows whether the broker answers, and the others wait for another such
    /// time.
    ///
    /// # Errors
    /// [`UnknownOutcome::Silent`]: the broker answered nothing in that time either.
    async fn overdue(&self, before: u64, confirm_s: u32) -> Result<bool, UnknownOutcome> {
        let mut seconds = self.seconds.subscribe();
        let sent = *seconds.borrow_and_update();
        let mut has_answered = false;
        // An `Err` only without a sender; `self` holds one.
        while seconds.changed().await.is_ok() {
            let waited = seconds.borrow_and_update().saturating_sub(sent);
            if waited <= confirm_s {
                continue;
            }
            let answers = self.answers.load(Ordering::Relaxed) != before;
            if answers && has_answered {
                return Ok(true);
            }
            // After the broker was silent, its answers arrive together. Allow the own one a moment.
            has_answered = answers;
            if !answers && !self.is_one_given_up.swap(true, Ordering::Relaxed) {
                return Ok(false);
            }
            if !answers && waited > confirm_s.saturating_mul(2) {
                return Err(UnknownOutcome::Silent(self.confirm_s));
            }
        }
        std::future::pending().await
    }

    fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// Nothing panics while it holds the lock.
    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same.
    fn shares(&self) -> MutexGuard<'_, ChannelShares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
