//! Publishes the first replies to each reply queue, one at a time, on separate channels.
//!
//! The first message to a quorum queue without its majority blocks its channel: see [`reply_queues`](super::reply_queues). On a separate
//! channel it blocks no other reply. If its confirm does not come in time although the broker confirms other messages, its channel is
//! closed, and only that reply is given up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lapin::types::ShortString;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;
use vramq_amqp::{ConfirmTime, ConfirmedPublisher, OnItsWay, SLOWEST_FADES, UnknownOutcome};

use super::channel_shares::{ChannelShares, Permit};
use super::first_reply_deadline::{FirstReplyDeadline, Overdue};
use super::message::Message;
use super::publisher::{MessageOutcome, publish_on};
use super::reply_connection::ReplyConnection;
use super::reply_queues::{ReplyQueue, ReplyQueues};

/// How long the broker may take to close a channel before another one is opened in addition: longer than RabbitMQ's 65 s.
const CLOSE_MAX: Duration = Duration::from_secs(90);

/// The most channels that stay open however long they have no message. A worker whose queues all confirm needs a few at a time.
const IDLE_MAX: usize = 8;

/// How many seconds further ones stay open without a message. The replies of each pass come together, and the next pass may need as many
/// channels.
const IDLE_S: u32 = 30;

/// The session's channels for first replies. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct FirstReplies {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    connection: ReplyConnection,
    queues: Mutex<ReplyQueues>,
    /// Who has a channel, and who waits for one.
    shares: ChannelShares,
    channels: Mutex<Channels>,
    /// Counts the seconds in which the broker read from the connection.
    seconds: watch::Sender<u32>,
    /// A reply was given up while the broker answered nothing, and it has answered nothing since.
    is_one_given_up: AtomicBool,
}

#[derive(Debug, Default)]
struct Channels {
    /// All usable channels.
    open: Vec<ConfirmedPublisher>,
    /// The usable channels without an unconfirmed message, and the second since which each has none. The one that was used last is at the
    /// end. They have no permits: another channel is opened only if none is idle, so all together are no more than the permits allow.
    idle: Vec<(ConfirmedPublisher, u32)>,
    /// The longest recent time to a confirm on channels that are closed now.
    slowest_closed: Duration,
}

impl Channels {
    /// Forgets the channels that are closed, but not their times.
    fn remove_closed(&mut self) {
        let closed = self.open.extract_if(.., |publisher| !publisher.is_open());
        let slowest = closed.map(|publisher| publisher.slowest_confirm()).max();
        self.slowest_closed = self.slowest_closed.max(slowest.unwrap_or_default());
    }

    /// A channel's message was confirmed.
    fn confirmed(&mut self) {
        self.slowest_closed = self.slowest_closed.mul_f64(SLOWEST_FADES);
    }

    /// Takes out the channels that are not needed any more.
    fn take_stale(&mut self, second: u32) -> Vec<ConfirmedPublisher> {
        let since = self.idle.iter().map(|(_, since)| *since);
        let stale = stale(since, second);
        self.idle.drain(..stale).map(|(publisher, _)| publisher).collect()
    }
}

/// How many of the channels that are idle since then, in this order, are not needed any more.
fn stale(since: impl ExactSizeIterator<Item = u32>, second: u32) -> usize {
    let surplus = since.len().saturating_sub(IDLE_MAX);
    since.take(surplus).take_while(|since| second.saturating_sub(*since) > IDLE_S).count()
}

impl FirstReplies {
    pub(super) fn new(connection: ReplyConnection) -> Self {
        let shared = Shared {
            connection,
            queues: Mutex::default(),
            shares: ChannelShares::default(),
            channels: Mutex::default(),
            seconds: watch::Sender::new(0),
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
        let Some(channel) = self.channel(caller).await? else { return Ok(None) };
        let gives_up = || !self.shared.is_one_given_up.swap(true, Ordering::Relaxed);
        let is_queue_silent = tokio::select! {
            outcome = publish_on(&channel.publisher, message) => {
                let outcome = outcome?;
                self.broker_answers();
                self.shared.channels().confirmed();
                // After a refusal the channel may refuse all further messages to this queue: see `Facts::note`.
                if outcome != MessageOutcome::Refused {
                    channel.put_back();
                }
                queue.took_alone(outcome, Instant::now());
                return Ok(Some(outcome));
            }
            overdue = self.shared.overdue(&channel.publisher, gives_up) => match overdue {
                Overdue::QueueIsSilent => true,
                Overdue::GivenUp => false,
                Overdue::BrokerIsSilent(time) => return Err(UnknownOutcome::Silent(time)),
            },
        };
        // Only if this queue is silent, not the whole broker: replies that wait behind this one then end with it.
        if is_queue_silent {
            queue.took_alone(MessageOutcome::NoConfirm, Instant::now());
        }
        Ok(Some(MessageOutcome::NoConfirm))
    }

    /// The broker has answered a message on any channel.
    pub(super) fn broker_answers(&self) {
        self.shared.is_one_given_up.store(false, Ordering::Relaxed);
    }

    /// Waits until a caller may have a channel; `None` if the connection allows no more.
    async fn channel(&self, caller: String) -> Result<Option<MessageChannel>, UnknownOutcome> {
        let permit = self.shared.shares.permit(&caller).await;
        let idle = self.shared.channels().idle.pop();
        let publisher = match idle {
            Some((publisher, _)) => Some(publisher),
            None => self.open().await?,
        };
        let shared = Arc::clone(&self.shared);
        Ok(publisher.map(|publisher| MessageChannel { shared, publisher, permit: Some(permit) }))
    }

    async fn open(&self) -> Result<Option<ConfirmedPublisher>, UnknownOutcome> {
        let opened = tokio::select! {
            // `Shared::overdue` watches the time of a confirm.
            opened = self.shared.connection.open_channel(None) => opened?,
            time = self.shared.not_opened() => return Err(UnknownOutcome::NoChannel(time)),
        };
        let Some(publisher) = opened else { return Ok(None) };
        let mut channels = self.shared.channels();
        channels.remove_closed();
        channels.open.push(publisher.clone());
        Ok(Some(publisher))
    }

    /// The longest recent time that the broker took for a confirm.
    pub(super) fn slowest_confirm(&self) -> Duration {
        let channels = self.shared.channels();
        let of_open = channels.open.iter().map(ConfirmedPublisher::slowest_confirm).max();
        channels.slowest_closed.max(of_open.unwrap_or_default())
    }

    pub(super) fn blocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::blocked);
    }

    pub(super) fn unblocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::unblocked);
    }

    /// Another second has passed in which the broker could send confirms.
    pub(super) fn tick(&self) {
        if !self.shared.connection.is_blocked() {
            self.shared.seconds.send_modify(|seconds| *seconds += 1);
        }
        let mut channels = self.shared.channels();
        channels.open.iter().for_each(ConfirmedPublisher::tick);
        let stale = channels.take_stale(self.shared.second());
        drop(channels);
        stale.into_iter().for_each(|publisher| self.shared.close(publisher, None));
    }
}

/// A channel for one message at a time, with its permit. Dropped before it was put back, it is closed: a message without an outcome could
/// hold up the next one.
struct MessageChannel {
    shared: Arc<Shared>,
    publisher: ConfirmedPublisher,
    /// `None` when the channel was put back.
    permit: Option<Permit>,
}

impl MessageChannel {
    /// Its message has its outcome: the channel may carry another one.
    fn put_back(mut self) {
        let since = self.shared.second();
        self.shared.channels().idle.push((self.publisher.clone(), since));
        self.permit = None;
    }
}

impl Drop for MessageChannel {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.shared.close(self.publisher.clone(), Some(permit));
        }
    }
}

impl Shared {
    /// Closes a channel. Returns the permit when the broker has closed it. That may take a minute.
    fn close(self: &Arc<Self>, publisher: ConfirmedPublisher, permit: Option<Permit>) {
        // Without a runtime the process ends, and its connections with it.
        let Ok(runtime) = Handle::try_current() else { return };
        let shared = Arc::clone(self);
        runtime.spawn(async move {
            let closed = timeout(CLOSE_MAX, publisher.close()).await;
            tracing::debug!(?closed, "closed a channel for first replies");
            shared.channels().remove_closed();
            drop(permit);
        });
    }

    /// The current second of those in which the broker read from the connection.
    fn second(&self) -> u32 {
        *self.seconds.borrow()
    }

    /// Waits as long as the confirm of a channel's only message may take, without the time in which the broker blocks publishers. `gives_up`:
    /// whether to give the message up while the broker confirms nothing.
    async fn overdue(&self, publisher: &ConfirmedPublisher, gives_up: impl Fn() -> bool) -> Overdue {
        self.each_second(|deadline, second| deadline.look(second, publisher.on_its_way(), &gives_up)).await
    }

    /// Waits as long as the broker may take to open a channel, without the time in which it blocks publishers. If it lost a frame, no answer
    /// comes.
    async fn not_opened(&self) -> ConfirmTime {
        let transfer = &self.connection.transfer;
        let before = transfer.published();
        self.each_second(|deadline, second| {
            let (up_to_last_bytes, all_bytes) = (transfer.unread(before), transfer.all_unread());
            let on_its_way = OnItsWay { up_to_last_bytes, all_bytes, is_last_passed: false };
            deadline.look_at_broker(second, on_its_way)
        })
        .await
    }

    /// Looks at a deadline, which begins now, each second until there is a result.
    async fn each_second<T>(&self, mut look: impl FnMut(&mut FirstReplyDeadline, u32) -> Option<T>) -> T {
        let mut seconds = self.seconds.subscribe();
        let mut deadline = FirstReplyDeadline::new(self.connection.confirm_s, *seconds.borrow_and_update());
        // An `Err` only without a sender; `self` holds one.
        while seconds.changed().await.is_ok() {
            let second = *seconds.borrow_and_update();
            if let Some(result) = look(&mut deadline, second) {
                return result;
            }
        }
        std::future::pending().await
    }

    /// Nothing panics while it holds the lock.
    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_that_the_next_pass_may_need_stay_open() {
        let table: [(&[u32], u32, usize); 4] = [
            // Forty callers were answered together.
            (&[10; 40], 10 + IDLE_S, 0),
            (&[10; 40], 10 + IDLE_S + 1, 40 - IDLE_MAX),
            (&[10; IDLE_MAX], 1000, 0),
            // The ones that were used last stay.
            (&[10, 10, 900, 990, 990, 990, 990, 990, 990, 990, 990, 990], 1000, 3),
        ];
        for (since, second, expected) in table {
            assert_eq!(stale(since.iter().copied(), second), expected, "{since:?} at {second}");
        }
    }
}
