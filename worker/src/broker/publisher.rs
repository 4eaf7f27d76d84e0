//! Publishes the messages about jobs and returns the outcome of each.

use std::time::{Duration, Instant};

use vramq_amqp::{ConfirmedPublisher, PublishOutcome, UnknownOutcome, header_frame_bytes};
use vramq_core::ids::JobKey;

use super::direct_replies::DirectReplies;
use super::first_replies::FirstReplies;
use super::message::Message;
use super::progress_replies::ProgressReplies;
use super::progress_turns::Report;
use super::reply_queues::QueueTrust;
use crate::failpoint;

/// How a publish ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessageOutcome {
    /// The broker has stored it: on disk, for a quorum queue on a majority of nodes. A direct reply was passed to the caller, if the caller
    /// still exists.
    Confirmed,
    /// The broker found no queue for it. The message is gone.
    Unroutable,
    /// The queue is full and rejects publishes.
    Refused,
    /// It is larger than the broker accepts, or its headers do not fit a frame. It was not sent, because the broker would close the channel,
    /// or the connection.
    TooLarge,
    /// A direct reply: the connection was lost while it was the only reply in flight.
    ConnectionLost,
    /// A direct reply that was not published, because the broker closed the connection over such an address.
    Barred,
    /// A direct reply: there was no connection for it, or its confirm did not come in time.
    NoConnection,
    /// A reply whose queue did not confirm it in time. The queue may have it nevertheless.
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
/// All messages except direct replies and `progress` share one channel. A reply uses that channel only if its queue is proven; another queue
/// could block it.
#[derive(Clone, Debug)]
pub struct Publisher {
    shared: ConfirmedPublisher,
    /// `None` if the broker allows no channels for them.
    first_replies: Option<FirstReplies>,
    /// `None` for the same reason.
    progress: Option<ProgressReplies>,
    /// Published on a separate connection.
    direct_replies: DirectReplies,
    size_max: SizeMax,
}

/// How large messages may be.
#[derive(Clone, Copy, Debug)]
pub(super) struct SizeMax {
    /// The largest body that the broker is known to accept.
    pub(super) body: usize,
    /// The largest frame, which has to take a message's properties and headers.
    pub(super) frame: usize,
}

impl SizeMax {
    fn allows(self, message: &Message) -> bool {
        message.body.len() <= self.body
            && header_frame_bytes(&message.properties, &message.headers) <= self.frame
    }
}

impl Publisher {
    /// `shared` must match returned messages by [`MatchBy::PublishSeq`](vramq_amqp::MatchBy::PublishSeq). Identical bodies can be different
    /// messages: otherwise a requeued job would be taken for its earlier attempt.
    pub(super) fn new(
        shared: ConfirmedPublisher,
        first_replies: Option<FirstReplies>,
        progress: Option<ProgressReplies>,
        direct_replies: DirectReplies,
        size_max: SizeMax,
    ) -> Self {
        Self { shared, first_replies, progress, direct_replies, size_max }
    }

    /// Publishes one message, once. All futures of this function belong into one `FuturesUnordered`: see [`ConfirmedPublisher`]. `caller`
    /// names the caller of its job, if the caller is known.
    ///
    /// # Errors
    /// [`UnknownOutcome`]; a reply that is not confirmed in time is a [`MessageOutcome`], because its queue belongs to its caller.
    pub async fn publish(
        &self,
        message: &Message,
        caller: impl Fn() -> Option<String>,
    ) -> Result<MessageOutcome, UnknownOutcome> {
        if !self.size_max.allows(message) {
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
        // The turn keeps the replies to a queue in order, whichever channel they use.
        let turn = queue.turn.lock().await;
        loop {
            // The reply before this one was not confirmed, so this one is given up too.
            if queue.silences() != silences {
                return Ok(MessageOutcome::NoConfirm);
            }
            match queue.trust(Instant::now()) {
                QueueTrust::Slow => queue.wait_while_slow().await,
                QueueTrust::Unproven => {
                    let caller = caller().unwrap_or_default();
                    match first_replies.publish(&queue, message, caller).await? {
                        Some(outcome) => return Ok(outcome),
                        None => break,
                    }
                }
                QueueTrust::Proven => break,
            }
        }
        // The channel sends in the order of the calls: the next reply cannot be polled before this one is sent.
        drop(turn);
        queue.publishes();
        let outcome = self.publish_shared(message).await?;
        queue.took(outcome, Instant::now());
        Ok(outcome)
    }

    /// Takes a `progress` reply, which may be lost, for [`next_progress`](Self::next_progress).
    pub fn add_progress(&self, job: JobKey, message: Message, caller: Option<String>) {
        if message.is_direct_reply() {
            if !self.direct_replies.try_publish(message) {
                tracing::debug!("dropped a progress reply: too many direct replies wait");
            }
            return;
        }
        // A queue could hold up all that is published on the shared channel.
        let Some(progress) = &self.progress else { return };
        if self.size_max.allows(&message) {
            let (caller, made_at) = (caller.unwrap_or_default(), Instant::now());
            progress.add(Report { job, caller, message, made_at });
        }
    }

    /// Publishes the next progress that may go out now. When it has ended, more may.
    pub fn next_progress(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.progress.as_ref()?.next()
    }

    async fn publish_shared(&self, message: &Message) -> Result<MessageOutcome, UnknownOutcome> {
        let outcome = publish_on(&self.shared, message).await?;
        if outcome != MessageOutcome::NoConfirm {
            self.first_replies.iter().for_each(FirstReplies::broker_answers);
        }
        Ok(outcome)
    }

    /// Whether the shared channel is open. The other channels carry one message at a time, and its outcome shows if the channel is closed.
    pub(super) fn is_open(&self) -> bool {
        self.shared.is_open()
    }

    /// The longest recent time that the broker took for a confirm, without the time for which it blocked publishers.
    pub(super) fn slowest_confirm(&self) -> Duration {
        let of_first = self.first_replies.as_ref().map(FirstReplies::slowest_confirm);
        self.shared.slowest_confirm().max(of_first.unwrap_or_default())
    }

    /// The broker blocks publishers and reads nothing from now on.
    pub fn blocked(&self) {
        self.shared.blocked();
        self.first_replies.iter().for_each(FirstReplies::blocked);
        self.progress.iter().for_each(ProgressReplies::blocked);
    }

    /// The broker reads again.
    pub fn unblocked(&self) {
        self.shared.unblocked();
        self.first_replies.iter().for_each(FirstReplies::unblocked);
        self.progress.iter().for_each(ProgressReplies::unblocked);
    }

    /// Another second has passed in which the broker could send confirms. Ends the wait for those that are overdue.
    pub fn tick(&self) {
        self.shared.tick();
        self.first_replies.iter().for_each(FirstReplies::tick);
        self.progress.iter().for_each(ProgressReplies::tick);
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
