//! Publishes the messages about jobs, and says how each of them ended.

use lapin::Channel;
use vramq_amqp::{ConfirmedPublisher, MatchBy, PublishOutcome, UnknownOutcome};

use super::direct_replies::DirectReplies;
use super::message::Message;
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

/// The session's publisher. Direct replies go over a connection of their own. Clones share both.
#[derive(Clone, Debug)]
pub struct Publisher {
    /// Of everything but direct replies.
    pub confirmed: ConfirmedPublisher,
    direct_replies: DirectReplies,
    /// The largest body that the broker takes, as far as is known.
    body_max: usize,
}

impl Publisher {
    /// `channel` is in confirm mode, and nothing else publishes on it. The broker has `confirm_s` seconds for each confirm.
    pub fn new(channel: Channel, direct_replies: DirectReplies, body_max: usize, confirm_s: u32) -> Self {
        // Identical bodies are different messages: a requeued job would otherwise be taken for its earlier attempt.
        let confirmed = ConfirmedPublisher::new(channel, MatchBy::PublishSeq, Some(confirm_s));
        Self { confirmed, direct_replies, body_max }
    }

    /// Publishes one message, once. All futures of this function belong into one `FuturesUnordered`: see [`ConfirmedPublisher`].
    ///
    /// # Errors
    /// [`UnknownOutcome`]; a reply that is not confirmed in time is an [`MessageOutcome`], because its queue belongs to its caller.
    pub async fn publish(&self, message: &Message) -> Result<MessageOutcome, UnknownOutcome> {
        if message.body.len() > self.body_max {
            return Ok(MessageOutcome::TooLarge);
        }
        let (sent, confirmed) = message.failpoints();
        let id = message.properties.message_id().as_ref().map(|id| id.as_str());
        if message.is_direct_reply() {
            let answer = self.direct_replies.publish(message, None).await;
            if answer == MessageOutcome::Confirmed {
                failpoint::reach(confirmed, [id]);
            }
            return Ok(answer);
        }
        let unconfirmed = self.confirmed.send(message.to_send()).await?;
        failpoint::reach(sent, [id]);
        let answer = match self.confirmed.outcome(unconfirmed).await {
            Err(UnknownOutcome::NoConfirm(_)) if message.is_for_caller() => MessageOutcome::NoConfirm,
            outcome => outcome?.into(),
        };
        if !matches!(answer, MessageOutcome::Refused | MessageOutcome::NoConfirm) {
            failpoint::reach(confirmed, [id]);
        }
        Ok(answer)
    }
}
