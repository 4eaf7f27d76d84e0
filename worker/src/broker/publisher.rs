//! Publishing with an answer: confirmed, returned or refused.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use lapin::options::BasicPublishOptions;
use lapin::types::AMQPValue;
use lapin::{Channel, Confirmation, PublisherConfirm};
use vramq_schemas::headers::PUBLISH_SEQ;

use super::direct_replies::DirectReplies;
use super::message::Message;
use super::publish_ledger::Ledger;
use crate::failpoint;

/// The broker's answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The broker has it: on disk, on a majority for a quorum queue. A direct reply it has passed to the caller, if there
    /// still is one.
    Confirmed,
    /// No queue takes it. The message is gone.
    Unroutable,
    /// The queue is full and rejects publishes.
    Refused,
    /// It is larger than the broker takes, and was not sent: the broker would close the channel.
    TooLarge,
    /// Of a direct reply: its connection was lost over it twice, the second time with no other reply on its way.
    ConnectionLost,
    /// Of a direct reply: there is no connection for it, or it was not confirmed in time.
    NoConnection,
    /// Of a reply: its queue did not confirm it in time. It may have it nevertheless.
    NoConfirm,
}

/// Why there is no answer. Whether the message arrived is unknown.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The connection or channel is closed.
    #[error(transparent)]
    Closed(#[from] lapin::Error),
    #[error("the broker did not confirm a message within {0} s (`broker.confirm_s`)")]
    NoConfirm(u32),
    #[error("the broker confirmed no message during two periods of {0} s (`broker.confirm_s`)")]
    Silent(u32),
    #[error("{0} replies are still not confirmed by their queues, the most that a session waits for")]
    SilentQueues(usize),
}

/// A channel in confirm mode, and what is open on it. Clones share both.
#[derive(Clone)]
pub struct Publisher {
    channel: Channel,
    direct_replies: DirectReplies,
    /// The largest body that the broker takes, as far as is known.
    body_max: usize,
    ledger: Arc<Mutex<Ledger>>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("channel", &self.channel.id()).finish_non_exhaustive()
    }
}

impl Publisher {
    /// `channel` is in confirm mode, and nothing else publishes on it. Direct replies go over their own connection. The broker has
    /// `confirm_s` seconds for each confirm.
    pub fn new(channel: Channel, direct_replies: DirectReplies, body_max: usize, confirm_s: u32) -> Self {
        // A random start below 2^62: no two sessions or workers use the same numbers.
        let last = uuid::Uuid::new_v4().as_u64_pair().0 >> 2;
        Self {
            channel,
            direct_replies,
            body_max,
            ledger: Arc::new(Mutex::new(Ledger::new(last, confirm_s, Instant::now()))),
        }
    }

    /// The longest recent time that the broker took for a confirm, without the time for which it blocked publishers.
    pub fn slowest_confirm(&self) -> Duration {
        self.ledger().slowest()
    }

    /// The broker reads nothing from now on.
    pub fn blocked(&self) {
        self.ledger().stop_clock(Instant::now());
    }

    /// The broker reads again.
    pub fn unblocked(&self) {
        self.ledger().start_clock(Instant::now());
    }

    /// A second has passed in which the worker could take confirms: those that are due are not waited for any more.
    pub fn tick(&self) {
        self.ledger().tick();
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Publishes one message, once.
    ///
    /// # Errors
    /// [`PublishError`]; a reply that is not confirmed in time is an [`Answer`], because its queue belongs to its caller.
    pub async fn publish(&self, message: &Message) -> Result<Answer, PublishError> {
        if message.body.len() > self.body_max {
            return Ok(Answer::TooLarge);
        }
        let (sent, confirmed) = message.failpoints();
        let id = message.properties.message_id().as_ref().map(|id| id.as_str());
        if message.is_direct_reply() {
            let answer = self.direct_replies.publish(message, None).await;
            if answer == Answer::Confirmed {
                failpoint::reach(confirmed, [id]);
            }
            return Ok(answer);
        }
        let (sequence, confirm) = self.send(message).await?;
        failpoint::reach(sent, [id]);
        let answer = match self.answer(sequence, confirm).await {
            Err(PublishError::NoConfirm(_)) if message.is_for_caller() => Answer::NoConfirm,
            answer => answer?,
        };
        if !matches!(answer, Answer::Refused | Answer::NoConfirm) {
            failpoint::reach(confirmed, [id]);
        }
        Ok(answer)
    }

    async fn send(&self, message: &Message) -> lapin::Result<(u64, PublisherConfirm)> {
        let sequence = self.ledger().open(Instant::now());
        let mut headers = message.headers.clone();
        headers.insert(PUBLISH_SEQ.into(), AMQPValue::LongLongInt(sequence.cast_signed()));
        let properties = message.properties.clone().with_headers(headers);
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let exchange = message.exchange.clone();
        let key = message.routing_key.clone();
        let confirm = self.channel.basic_publish(exchange, key, options, &message.body, properties).await?;
        Ok((sequence, confirm))
    }

    /// The broker's answer to one publish.
    ///
    /// A return reaches lapin before the confirm of its publish, and lapin attaches it to the next confirm that completes, of
    /// whichever publish. So a confirm is judged only when all that completed before it are noted.
    ///
    /// This holds because all publishes of this channel belong to futures of one `FuturesUnordered`, each with one confirm
    /// at a time, which it polls as soon as it has it; see [`after_the_others`].
    async fn answer(&self, sequence: u64, confirm: PublisherConfirm) -> Result<Answer, PublishError> {
        let confirmation = self.confirmation(sequence, confirm).await?;
        self.ledger().note(sequence, &confirmation, Instant::now());
        after_the_others().await;
        let judged = {
            let mut ledger = self.ledger();
            ledger.note_late();
            ledger.judge(sequence)
        };
        Ok(match judged {
            Ok(answer) => answer,
            // The sender is in the ledger, which `self` keeps.
            Err(verdict) => verdict.await.unwrap_or(Answer::Refused),
        })
    }

    /// Waits for a confirm, as long as the ledger says. One that may still come stays in the ledger.
    async fn confirmation(
        &self,
        sequence: u64,
        confirm: PublisherConfirm,
    ) -> Result<Confirmation, PublishError> {
        let mut confirm = Some(confirm);
        poll_fn(|context| {
            let Some(waiting) = &mut confirm else { return Poll::Pending };
            if let Poll::Ready(confirmation) = Pin::new(waiting).poll(context) {
                return Poll::Ready(confirmation.map_err(PublishError::Closed));
            }
            self.ledger().wait(sequence, &mut confirm, context.waker()).map(Err)
        })
        .await
    }

    /// Nothing panics while it holds the lock, and every entry stands by itself.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Lets the other futures of the same `FuturesUnordered` go first. It polls in the order of waking, so this comes back
/// when all that were woken before have been polled: every confirm that completed before ours is noted then.
async fn after_the_others() {
    let mut first = true;
    poll_fn(|context| {
        if std::mem::take(&mut first) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    })
    .await;
}
