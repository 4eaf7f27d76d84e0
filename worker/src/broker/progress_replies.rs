//! Publishes `progress` replies, on channels that carry nothing else.
//!
//! Each is the only message on its channel, because its queue may hold the channel up: see [`reply_queues`](super::reply_queues). Replies have
//! channels of their own, so neither waits for the other. Nobody learns what became of a report: a queue that confirms none, or an error,
//! shows in the replies.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use vramq_amqp::{ConfirmedPublisher, PublishOutcome, UnknownOutcome};

use super::progress_turns::{ProgressTurns, Report};
use super::reply_connection::ReplyConnection;

/// How long a queue that did not confirm a report gets no other, and its caller has one channel less. RabbitMQ takes up to 65 s to close the
/// channel.
const REST: Duration = Duration::from_secs(90);

/// The session's channels for progress. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct ProgressReplies {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    connection: ReplyConnection,
    turns: Mutex<ProgressTurns>,
    channels: Mutex<Channels>,
}

#[derive(Debug, Default)]
struct Channels {
    /// All usable channels. Another one is opened only if none is idle, so there are no more than reports may be on their way.
    open: Vec<ConfirmedPublisher>,
    /// Those without an unconfirmed message.
    idle: Vec<ConfirmedPublisher>,
}

impl ProgressReplies {
    pub(super) fn new(connection: ReplyConnection) -> Self {
        let shared = Shared { connection, turns: Mutex::default(), channels: Mutex::default() };
        Self { shared: Arc::new(shared) }
    }

    /// Takes a report for [`next`](Self::next).
    pub(super) fn add(&self, report: Report) {
        // Reports would pile up in the connection.
        if !self.shared.connection.is_blocked() {
            self.shared.turns().add(report);
        }
    }

    /// Publishes the next report that may go out now. When it has ended, others may.
    pub(super) fn next(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        let report = self.shared.turns().next(Instant::now())?;
        let shared = Arc::clone(&self.shared);
        // Dropped only with the session.
        Some(async move {
            shared.publish(&report).await;
            shared.turns().ended(&report);
        })
    }

    pub(super) fn blocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::blocked);
    }

    pub(super) fn unblocked(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::unblocked);
    }

    /// Another second has passed in which the broker could send confirms.
    pub(super) fn tick(&self) {
        self.shared.channels().open.iter().for_each(ConfirmedPublisher::tick);
    }
}

impl Shared {
    async fn publish(&self, report: &Report) {
        let Some(publisher) = self.channel().await else { return };
        let published = async {
            // The broker may have taken a while to open the channel.
            if !report.is_old(Instant::now()) {
                let unconfirmed = publisher.send(report.message.to_send()).await?;
                return publisher.outcome(unconfirmed).await.map(Some);
            }
            Ok::<_, UnknownOutcome>(None)
        };
        match published.await {
            // The channel may refuse reports to this queue for good: see `FirstReplies::publish`.
            Ok(Some(PublishOutcome::Refused)) => drop(timeout(REST, publisher.close()).await),
            Ok(_) => self.channels().idle.push(publisher),
            Err(UnknownOutcome::Closed(_)) => {}
            // Its confirm is overdue.
            Err(_) => {
                let (closed, ()) = tokio::join!(timeout(REST, publisher.close()), sleep(REST));
                tracing::debug!(?closed, "closed a channel for progress");
            }
        }
    }

    /// A channel without messages; `None` if there can be no more. Waits as long as the broker takes to open it: until then the place of the
    /// report is taken.
    async fn channel(&self) -> Option<ConfirmedPublisher> {
        let idle = self.channels().idle.pop();
        if let Some(publisher) = idle.filter(ConfirmedPublisher::is_open) {
            return Some(publisher);
        }
        let publisher = self.connection.open_channel(Some(self.connection.confirm_s)).await.ok()??;
        let mut channels = self.channels();
        channels.open.retain(ConfirmedPublisher::is_open);
        channels.open.push(publisher.clone());
        Some(publisher)
    }

    /// Nothing panics while it holds the lock, nor that of the channels.
    fn turns(&self) -> MutexGuard<'_, ProgressTurns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
