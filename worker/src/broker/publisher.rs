//! Publishes the messages about jobs, and says how each of them ended.

use std::time::{Duration, Instant};

use vramq_amqp::{ConfirmedPublisher, PublishOutcome, UnknownOutcome};

use super::direct_replies::DirectReplies;
use super::first_replies::FirstReplies;
use super::message::Message;
use super::reply_queues::Standing;
use crate::failpoint;

/// How a publish ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageOutcome {
    /// The broker has it: on disk, on a majority for a quorum queue. A direct reply it has passed to the caller, if there
    /// still is one.
    Confirmed,
    /// No queue takes it. The message is gone.
    Unroutable,
    /// The queue is full and rejects publishes.
    Refused,
    /// It is larger than the broker takes, and was not sent: the broker would close the channel.
    TooLarge,
    /// Of a direct reply: its connection was lost over it, with no other reply on its way.
    ConnectionLost,
    /// Of a direct reply: it was not published, because the broker closed the connection over such addresses.
    Barred,
    /// Of a direct reply: there is no connection for it, or it was not confirmed in time.
    NoConnection,
    /// Of a reply: its queue did not confirm it in time. It may have it nevertheless.
    NoConfirm,
}

impl From<PublishOutcome> for MessageOutcome {
    fn from(outcome: PublishOutcome) -> Self {
        match outcome {
            PublishOutcome::Confirmed => Self::Confirmed,
            PublishOutcome::Returned => Self::Unroutable,
            PublishOutcome::Refused => Self::Refused,
            PublishOutcome::TooLarge => Self::TooLarge,
        }
    }
}

/// The session's publisher. Clones share its channels.
///
/// All but direct replies share one channel. A reply goes over it only if its queue is proven: another queue could hold it up.
#[derive(Clone, Debug)]
pub struct Publisher {
    shared: ConfirmedPublisher,
    /// None if the broker allows no channels for them.
    first_replies: Option<FirstReplies>,
    /// Over a connection of their own.
    direct_replies: DirectReplies,
    /// The largest body that the broker takes, as far as is known.
    body_max: usize,
}

impl Publisher {
    /// `shared` matches returned messages by [`MatchBy::PublishSeq`](vramq_amqp::MatchBy::PublishSeq): identical bodies are
    /// different messages, or a requeued job would be taken for its earlier attempt.
    pub(super) fn new(
        shared: ConfirmedPublisher,
        first_replies: Option<FirstReplies>,
        direct_replies: DirectReplies,
        body_max: usize,
    ) -> Self {
        Self { shared, first_replies, direct_replies, body_max }
    }

    /// Publishes one message, once. All futures of this function belong into one `FuturesUnordered`: see [`ConfirmedPublisher`].
    ///
    /// # Errors
    /// [`UnknownOutcome`]; a reply that is not confirmed in time is a [`MessageOutcome`], because its queue belongs to its caller.
    pub async fn publish(&self, message: &Message) -> Result<MessageOutcome, UnknownOutcome> {
        if message.body.len() > self.body_max {
            return Ok(MessageOutcome::TooLarge);
        }
        if message.is_direct_reply() {
            let answer = self.direct_replies.publish(message, None).await;
            if answer == MessageOutcome::Confirmed {
                failpoint::reach(message.failpoints().1, [message.id()]);
            }
            return Ok(answer);
        }
        let Some(first_replies) = self.first_replies.as_ref().filter(|_| message.is_for_caller()) else {
            return self.publish_shared(message).await;
        };
        let queue = first_replies.queue(&message.routing_key);
        let silences = queue.silences();
        // The replies to a queue keep their order, over whichever channel they go.
        let turn = queue.turn.lock().await;
        loop {
            // A reply that waited behind one that was not confirmed ends with it.
            if queue.silences() != silences {
                return Ok(MessageOutcome::NoConfirm);
            }
            match queue.standing(Instant::now()) {
                Standing::Slow => queue.wait_while_slow().await,
                Standing::Unproven => match first_replies.publish(&queue, message).await? {
                    Some(outcome) => return Ok(outcome),
                    None => break,
                },
                Standing::Proven => break,
            }
        }
        // The next reply is not polled before this one is sent: nothing waits in between.
        drop(turn);
        queue.publishes();
        let outcome = self.publish_shared(message).await?;
        queue.took(outcome, Instant::now());
        Ok(outcome)
    }

    async fn publish_shared(&self, message: &Message) -> Result<MessageOutcome, UnknownOutcome> {
        let outcome = publish_on(&self.shared, message).await?;
        if outcome != MessageOutcome::NoConfirm {
            self.first_replies.iter().for_each(FirstReplies::broker_answers);
        }
        Ok(outcome)
    }

    /// Whether the shared channel is open. The others carry one message at a time, whose outcome says if its channel is closed.
    pub(super) fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// The longest recent time that the broker took for a confirm, without the time for which it blocked publishers.
    pub(super) fn slowest_confirm(&self) -> Duration {
        let of_first = self.first_replies.as_ref().map(FirstReplies::slowest_confirm);
        self.shared.slowest_confirm().max(of_first.unwrap_or_default())
    }

    /// The broker blocks publishers: it reads nothing from now on.
    pub fn blocked(&self) {
        self.shared.blocked();
        self.first_replies.iter().for_each(FirstReplies::blocked);
    }

    /// The broker reads again.
    pub fn unblocked(&self) {
        self.shared.unblocked();
        self.first_replies.iter().for_each(FirstReplies::unblocked);
    }

    /// A second has passed in which confirms could be taken: those that are due are not waited for any more.
    pub fn tick(&self) {
        self.shared.tick();
        self.first_replies.iter().for_each(FirstReplies::tick);
    }
}

/// Publishes a message on a channel, and waits for its outcome.
pub(super) async fn publish_on(
    publisher: &ConfirmedPublisher,
    message: &Message,
) -> Result<MessageOutcome, UnknownOutcome> {
    let (sent, confirmed) = message.failpoints();
    let unconfirmed = publisher.send(message.to_send()).await?;
    failpoint::reach(sent, [message.id()]);
    let answer = match publisher.outcome(unconfirmed).await {
        Err(UnknownOutcome::NoConfirm(_)) if message.is_for_caller() => MessageOutcome::NoConfirm,
        outcome => outcome?.into(),
    };
    if !matches!(answer, MessageOutcome::Refused | MessageOutcome::NoConfirm) {
        failpoint::reach(confirmed, [message.id()]);
    }
    Ok(answer)
}
