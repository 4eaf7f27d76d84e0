//! The client's task: keeps a session open, publishes jobs in it, and ends with the client.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;
use vramq_amqp::LastError;

use crate::error::{ConnectError, JobError, PublishError};
use crate::job_channels::JobChannels;
use crate::outgoing::Outgoing;
use crate::registry::Registry;
use crate::reply_queue::{dispatch_held_replies, dispatch_replies, settle};
use crate::session::{CLOSE_TIMEOUT, Connector, NotOpened, Session};
use crate::withdrawing::Withdrawing;

/// The first wait before reconnecting, doubled with every failure.
const RECONNECT_DELAY_MIN: Duration = Duration::from_millis(100);

/// The longest wait: a broker that comes back after an hour is noticed within seconds.
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(10);

/// For so long the broker has to refuse each attempt before that counts. A refusal may pass: the service that checks users is away for a
/// moment, or a broker that lost its state gets its users some seconds after it listens.
const REFUSED_FOR: Duration = Duration::from_secs(10);

pub(crate) struct Actor {
    connector: Connector,
    registry: Arc<Registry>,
    shared: Arc<Shared>,
    reconnect_for: Option<Duration>,
    new_jobs: mpsc::UnboundedReceiver<Outgoing>,
    close: watch::Receiver<bool>,
    jobs: JobChannels,
}

/// What the client's handles can see of its task.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(crate) reconnects: AtomicU64,
    /// When the last session ended, unless there is another one.
    disconnected_at: Mutex<Option<Instant>>,
    /// Why the task has ended, if it has; and the broker's refusal, if that is why.
    pub(crate) end: OnceLock<PublishError>,
    pub(crate) refusal: OnceLock<ConnectError>,
}

impl Shared {
    pub(crate) fn disconnected_at(&self) -> Option<Instant> {
        *self.disconnected_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whether there is a session.
    fn note_session(&self, is_there: bool) {
        // Nothing panics while it holds the lock.
        let mut at = self.disconnected_at.lock().unwrap_or_else(PoisonError::into_inner);
        *at = if is_there { None } else { at.or_else(|| Some(Instant::now())) };
    }
}

enum Event {
    Close,
    Job(Box<Outgoing>),
    /// Outcomes of publishes are known, or a channel is lost.
    PublishesSettled(lapin::Result<()>),
    RepliesEnded(Result<lapin::Result<()>, JoinError>),
    /// `None` when the stream of events ended with the connection.
    Connection(Option<lapin::Event>),
}

/// Why the client no longer runs a session.
enum End {
    Closed,
    Lost(String),
}

impl Actor {
    pub(crate) fn new(
        connector: Connector,
        registry: Arc<Registry>,
        shared: Arc<Shared>,
        reconnect_for: Option<Duration>,
        new_jobs: mpsc::UnboundedReceiver<Outgoing>,
        close: watch::Receiver<bool>,
    ) -> Self {
        Self { connector, registry, shared, reconnect_for, new_jobs, close, jobs: JobChannels::default() }
    }

    /// Runs until the client is closed or dropped, or the broker stays away for too long or refuses to let it back.
    pub(crate) async fn run(mut self, mut session: Session) {
        loop {
            let lost = match self.serve(&mut session).await {
                End::Closed => {
                    let done = self.registry.is_done();
                    // First acknowledge what is due. Failing the jobs makes the replies of unfinished jobs due as well, and a client that
                    // adopts the queue still needs those. If this fails or is slow, the broker keeps all replies.
                    let _ = timeout(CLOSE_TIMEOUT, settle(&self.registry)).await;
                    self.fail(&PublishError::Closed, &JobError::Closed);
                    session.close(self.connector.queue_to_delete(done)).await;
                    return;
                }
                End::Lost(error) => error,
            };
            self.shared.note_session(false);
            // Drop both connections: a half-open session would share the reply queue with its successor.
            self.jobs.end_session();
            drop(session);
            session = match self.reconnect(lost).await {
                Ok(session) => session,
                Err(None) => return self.fail(&PublishError::Closed, &JobError::Closed),
                Err(Some(error)) => {
                    tracing::error!(%error, "no connection to the broker: giving up, all unanswered jobs fail");
                    if let ConnectError::Refused { .. } = error {
                        // Set once only: the task ends with it.
                        let _ = self.shared.refusal.set(error.clone());
                    }
                    return self
                        .fail(&PublishError::Disconnected(error.clone()), &JobError::Disconnected(error));
                }
            };
            if session.lost_replies {
                let jobs = self.registry.fail_confirmed(&JobError::ReplyQueueLost);
                tracing::warn!(jobs, "reply queue lost with the replies in it; created a new one");
            }
            self.shared.note_session(true);
            self.shared.reconnects.fetch_add(1, Ordering::Relaxed);
        }
    }

    async fn serve(&mut self, session: &mut Session) -> End {
        let mut replies = session.replies.as_ref().map(|replies| {
            let (consumer, registry) = (replies.consumer.clone(), Arc::clone(&self.registry));
            if self.connector.holds() {
                registry.held.clear();
                tokio::spawn(dispatch_held_replies(consumer, registry, self.connector.adopts()))
            } else {
                tokio::spawn(dispatch_replies(consumer, registry))
            }
        });
        let withdrawing = Withdrawing::start(Arc::clone(&session.publishing), Arc::clone(&self.registry));
        let mut connection = session.events();
        if let Some(first) = session.first_job_channel.take() {
            self.jobs.begin_session(Arc::clone(&session.publishing), first);
        }
        let end = loop {
            match self.select(&mut replies, &mut connection).await {
                Event::Close => break End::Closed,
                Event::Job(outgoing) => self.jobs.add(*outgoing),
                Event::PublishesSettled(Ok(())) => {}
                Event::PublishesSettled(Err(error)) => break End::Lost(error.to_string()),
                Event::Connection(event) => {
                    if let Some(lapin::Event::Error(error)) = &event
                        && !error.is_amqp_soft_error()
                    {
                        self.jobs.connection_lost(error, &self.registry);
                    }
                    if let Some(error) = note_event(event) {
                        break End::Lost(error);
                    }
                }
                Event::RepliesEnded(ended) => {
                    replies = None;
                    break End::Lost(match ended {
                        Ok(Ok(())) => "the broker cancelled the consumer of the reply queue".to_owned(),
                        Ok(Err(error)) => error.to_string(),
                        Err(error) => error.to_string(),
                    });
                }
            }
        };
        if let End::Closed = end {
            // Replies are still taken: a withdrawal may come too late.
            withdrawing.finish(&session.publishing, &self.registry).await;
        }
        if let Some(replies) = replies {
            replies.abort();
            // No reply is taken from here on.
            let _ = replies.await;
        }
        end
    }

    /// Cancel safety: no arm loses anything when it is dropped.
    async fn select(
        &mut self,
        replies: &mut Option<JoinHandle<lapin::Result<()>>>,
        connection: &mut BoxStream<'static, lapin::Event>,
    ) -> Event {
        let replies_ended = async {
            match replies {
                Some(replies) => replies.await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = closed(&mut self.close) => Event::Close,
            ended = replies_ended => Event::RepliesEnded(ended),
            settled = self.jobs.next(&self.registry) => Event::PublishesSettled(settled),
            event = connection.next() => Event::Connection(event),
            job = self.new_jobs.recv() => job.map_or(Event::Close, |job| Event::Job(Box::new(job))),
        }
    }

    /// # Errors
    /// `None` if the client was closed in the meantime, else the last attempt's error when the time is over, or trying again is of no use.
    async fn reconnect(&mut self, lost: String) -> Result<Session, Option<ConnectError>> {
        let since = Instant::now();
        let mut lost = Some(lost);
        let mut refused_since = None;
        let mut last = LastError::default();
        loop {
            let delay = delay(self.jobs.failures);
            self.jobs.failures = self.jobs.failures.saturating_add(1);
            let connector = &mut self.connector;
            let attempt = async {
                sleep(delay).await;
                // Not before: a caller whose job failed with the session may close the client at once.
                if let Some(error) = lost.take() {
                    tracing::warn!(broker = connector.broker(), error, "session lost, reconnecting");
                }
                connector.open().await
            };
            let opened = tokio::select! {
                () = closed(&mut self.close) => return Err(None),
                opened = attempt => opened,
            };
            let NotOpened { error, is_forbidden } = match opened {
                Ok(session) => return Ok(session),
                Err(not_opened) => not_opened,
            };
            if !is_forbidden {
                refused_since = None;
            }
            let is_refused = is_forbidden
                && self.connector.gives_up_when_refused()
                && refused_since.get_or_insert_with(Instant::now).elapsed() >= REFUSED_FOR;
            if is_refused || self.reconnect_for.is_some_and(|max| since.elapsed() >= max) {
                return Err(Some(error));
            }
            // Each new error is a warning; its repeats are only debug lines, because an outage may last for hours.
            if last.note(&error.to_string()) {
                tracing::warn!(%error, "cannot reconnect to the broker, trying again");
            } else {
                tracing::debug!(%error, "cannot reconnect to the broker, trying again");
            }
        }
    }

    /// Fails every job in flight. Jobs that are not in the channel yet find it closed.
    fn fail(&mut self, publishes: &PublishError, jobs: &JobError) {
        // Set once only: the task ends with it.
        let _ = self.shared.end.set(publishes.clone());
        self.shared.note_session(false);
        self.new_jobs.close();
        self.jobs.fail(publishes);
        while let Ok(outgoing) = self.new_jobs.try_recv() {
            outgoing.finish(Err(publishes.clone()));
        }
        self.registry.fail_all(jobs);
    }
}

impl Drop for Actor {
    /// Also if its runtime ends before the client is closed: no caller may wait for ever. After a proper end there is nothing left to do.
    fn drop(&mut self) {
        self.fail(&PublishError::Closed, &JobError::Closed);
    }
}

/// Logs what an event of the publishing connection says. Returns the error if the connection is lost: without jobs in flight nothing else
/// would report it.
fn note_event(event: Option<lapin::Event>) -> Option<String> {
    match event {
        None => return Some("the connection is closed".to_owned()),
        // A soft error closes only a channel. If it is one for jobs, `JobChannels::next` returns the error; the withdrawals' channel concerns
        // no job.
        Some(lapin::Event::Error(error)) if error.is_amqp_soft_error() => {}
        Some(lapin::Event::Error(error)) => return Some(error.to_string()),
        Some(lapin::Event::ConnectionBlocked(reason)) => {
            tracing::warn!(reason, "the broker blocks publishers until it has resources again");
        }
        Some(lapin::Event::ConnectionUnblocked) => tracing::info!("the broker no longer blocks publishers"),
        Some(_) => {}
    }
    None
}

/// Resolves when the client is closed, or its last clone is dropped.
async fn closed(close: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped: closed, too.
    let _ = close.wait_for(|closed| *closed).await;
}

/// Exponential, half of it random, so that clients that were cut off together do not reconnect together.
fn delay(failures: u32) -> Duration {
    let full = RECONNECT_DELAY_MIN.saturating_mul(2u32.saturating_pow(failures)).min(RECONNECT_DELAY_MAX);
    let random = Uuid::new_v4().as_bytes()[0];
    full / 2 + full / 2 * u32::from(random) / 255
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_cap() {
        for (failures, full_ms) in [(0, 100), (1, 200), (6, 6_400), (7, 10_000), (u32::MAX, 10_000)] {
            let delay_ms = delay(failures).as_millis();
            assert!((full_ms / 2..=full_ms).contains(&delay_ms), "{failures}: {delay_ms}");
        }
    }
}
