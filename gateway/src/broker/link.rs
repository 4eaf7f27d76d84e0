//! The gateway's own connection to the broker: receives heartbeats, counts the messages in queues, publishes withdrawals, reads
//! dead letters. Jobs and replies use the connections of the client library.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{Stream, StreamExt as _};
use lapin::protocol::AMQPErrorKind;
use lapin::{Connection, ErrorKind};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::{MissedTickBehavior, interval, timeout};
use vramq_amqp::{Address, Depth, LastError, Withdrawals, subscribe_to_heartbeats};

use super::answering::Answering;
use super::dead_letters::Letters;
use super::first_heartbeats::{FIRST_WITHIN, FirstHeartbeats};
use super::fleet::Fleet;
use super::outlook::Queues;
use super::questions::{self, ANSWER_WITHIN, Asker, NoAnswer, Question, Questions, Turn};
use super::withdrawing::Withdrawing;

/// How often the exchange of heartbeats is looked for while it is missing.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// How often those look who wait for the first heartbeats.
const LOOK_FOR_WORKERS_EVERY: Duration = Duration::from_millis(50);

/// How long the broker may leave a request of the link unanswered while the connection is open.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(60);

const RECONNECT_WAIT: Duration = Duration::from_secs(1);

/// The handle by which the rest of the gateway uses the link.
#[derive(Debug)]
pub struct Link {
    asker: Asker,
    fleet: Mutex<Fleet>,
    first_heartbeats: FirstHeartbeats,
    queues: Mutex<Queues>,
    pub withdrawals: Arc<Withdrawals>,
    is_connected: AtomicBool,
    /// One at a time reads dead letters: it holds what it has read, and others would not see it.
    readers: Arc<Semaphore>,
}

/// Why dead letters were not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LettersUnread {
    #[error("others read dead letters at the moment")]
    Busy,
    /// In words: no permission, no connection.
    #[error("{0}")]
    Failed(String),
}

/// The link's task.
#[derive(Debug)]
pub struct LinkTask {
    link: Arc<Link>,
    address: Address,
    name: String,
    questions: Questions,
    withdrawing: Withdrawing,
}

impl Link {
    /// A link, and the task that it needs to run. `name` is what the broker shows.
    pub fn new(address: Address, name: String) -> (Arc<Self>, LinkTask) {
        let (asker, questions) = questions::channel();
        let link = Arc::new(Self {
            asker,
            fleet: Mutex::default(),
            first_heartbeats: FirstHeartbeats::default(),
            queues: Mutex::default(),
            withdrawals: Arc::default(),
            is_connected: AtomicBool::new(false),
            readers: Arc::new(Semaphore::new(1)),
        });
        let withdrawing = Withdrawing::default();
        let task = LinkTask { link: Arc::clone(&link), address, name, questions, withdrawing };
        (link, task)
    }

    pub fn fleet(&self) -> MutexGuard<'_, Fleet> {
        lock(&self.fleet)
    }

    /// Waits until every worker should have sent a heartbeat: after the start for some seconds, then never again.
    pub async fn workers_are_known(&self) {
        let are_known = || {
            let now = Instant::now();
            let interval = self.fleet().interval(now);
            self.first_heartbeats.are_heard(interval, now)
        };
        // An `Err`: the gateway has no connection.
        let _ = timeout(FIRST_WITHIN, async {
            while !are_known() {
                tokio::time::sleep(LOOK_FOR_WORKERS_EVERY).await;
            }
        })
        .await;
    }

    pub fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }

    pub fn is_connected(&self) -> bool {
        self.is_connected.load(Ordering::Relaxed)
    }

    /// How many jobs of a model wait in all its queues, and how many consumers its own has; a second old at most.
    ///
    /// # Errors
    /// There is no connection, or the broker is too slow.
    pub async fn depth(&self, model: &str) -> Result<Depth, NoAnswer> {
        let now = Instant::now();
        let fresh = self.queues().fresh(model, now);
        if let Some(depth) = fresh {
            return Ok(depth);
        }
        let turn = if self.fleet().serves(model, now) { Turn::First } else { Turn::Last };
        self.ask(turn, |answer| Question::Depth { model: model.to_owned(), answer }).await
    }

    /// Messages and consumers of one queue, counted now.
    ///
    /// # Errors
    /// There is no connection, or the broker is too slow.
    pub async fn queue(&self, name: &str) -> Result<Depth, NoAnswer> {
        self.ask(Turn::First, |answer| Question::Queue { name: name.to_owned(), answer }).await
    }

    /// The oldest dead letters of a model. Waits while others read dead letters, for as long as the broker may take to answer.
    ///
    /// # Errors
    /// The others take longer; or the broker does not let this gateway read them, or does not answer.
    pub async fn dead_letters(&self, model: &str) -> Result<Letters, LettersUnread> {
        let turn = timeout(ANSWER_WITHIN, Arc::clone(&self.readers).acquire_owned()).await;
        // The semaphore is never closed.
        let Ok(Ok(only_reader)) = turn else { return Err(LettersUnread::Busy) };
        let question = |answer| Question::DeadLetters { model: model.to_owned(), only_reader, answer };
        let letters = self.ask(Turn::First, question).await;
        letters.unwrap_or_else(|no_answer| Err(no_answer.to_string())).map_err(LettersUnread::Failed)
    }

    async fn ask<T>(
        &self,
        turn: Turn,
        question: impl FnOnce(oneshot::Sender<T>) -> Question,
    ) -> Result<T, NoAnswer> {
        if !self.is_connected() {
            return Err(NoAnswer);
        }
        self.asker.ask(turn, question).await
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of the locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LinkTask {
    /// Opens one session after the other, for as long as the process runs.
    pub async fn run(mut self) {
        let mut last = LastError::default();
        loop {
            match self.address.connect(&self.name).await {
                Ok(connection) => {
                    self.link.first_heartbeats.connected(Instant::now());
                    self.link.is_connected.store(true, Ordering::Relaxed);
                    let connection = Arc::new(connection);
                    let Err(error) = self.session(&connection).await;
                    self.link.is_connected.store(false, Ordering::Relaxed);
                    last = LastError::default();
                    tracing::warn!(%error, "lost the gateway's own connection to the broker (heartbeats, queue depths, withdrawals): reconnecting");
                }
                // Each new error is a warning; its repeats are only debug lines, because an outage may last for hours.
                Err(error) if last.note(&error.to_string()) => {
                    tracing::warn!(
                        %error,
                        "cannot open the gateway's own connection to the broker (heartbeats, queue depths, withdrawals), trying again"
                    );
                }
                Err(_) => {}
            }
            // Dropping their senders fails the requests that asked in the meantime.
            self.questions.clear();
            tokio::time::sleep(RECONNECT_WAIT).await;
        }
    }

    async fn session(&mut self, connection: &Arc<Connection>) -> lapin::Result<Infallible> {
        let Self { link, questions, withdrawing, .. } = self;
        // Before any request, so that no error is missed.
        let events = connection.events_listener();
        // Side by side: a request that the broker does not answer delays nothing else.
        tokio::select! {
            lost = lost(events, withdrawing) => Err(lost),
            ended = link.hear_heartbeats(connection) => ended,
            ended = withdrawing.run(connection, &link.withdrawals) => ended,
            ended = Answering::new(link, connection).run(questions) => ended,
        }
    }
}

impl Link {
    /// Receives the heartbeats of workers.
    ///
    /// # Errors
    /// The connection is lost, or the broker does not answer.
    async fn hear_heartbeats(&self, connection: &Connection) -> lapin::Result<Infallible> {
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            look.tick().await;
            let Some(mut heartbeats) = answered(subscribe_to_heartbeats(connection)).await? else { continue };
            while let Some(delivery) = heartbeats.next().await {
                self.hear(&delivery?.data);
            }
        }
    }

    fn hear(&self, body: &[u8]) {
        let queues = self.queues();
        let now = Instant::now();
        self.fleet().hear(body, now, |model| queues.has_backlog(model, now));
    }
}

/// Waits for the end of a connection. Why it ended.
async fn lost(events: impl Stream<Item = lapin::Event>, withdrawing: &Withdrawing) -> lapin::Error {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            // The error of a channel only. For example, the broker closes a channel over a missing queue; the call on that channel returns
            // the error.
            lapin::Event::Error(error) if is_of_a_channel(&error) => withdrawing.channel_was_closed(&error),
            lapin::Event::Error(error) => return error,
            _ => {}
        }
    }
    ErrorKind::InvalidConnectionState(lapin::ConnectionState::Closed).into()
}

/// Waits for the broker's answer, but not for ever.
pub(super) async fn answered<T>(request: impl Future<Output = lapin::Result<T>>) -> lapin::Result<T> {
    let silent = || {
        let why = format!("no answer within {} s", SILENT_MAX.as_secs());
        ErrorKind::IOError(Arc::new(io::Error::new(io::ErrorKind::TimedOut, why))).into()
    };
    timeout(SILENT_MAX, request).await.unwrap_or_else(|_| Err(silent()))
}

/// Whether an error has closed a channel and left the connection open.
fn is_of_a_channel(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::ProtocolError(refused) if matches!(refused.kind(), AMQPErrorKind::Soft(_)))
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use vramq_schemas::status::{Heartbeat, ModelStatus, WorkerState};

    use super::*;

    #[tokio::test]
    async fn a_burst_of_callers_is_answered() {
        let (link, mut task) = Link::new("amqp://localhost".parse().unwrap(), "test".to_owned());
        link.is_connected.store(true, Ordering::Relaxed);
        let depth = |link: &Arc<Link>| {
            let link = Arc::clone(link);
            tokio::spawn(async move { link.depth("m").await })
        };
        let callers: Vec<_> = (0..3 * questions::QUESTIONS_MAX).map(|_| depth(&link)).collect();
        for _ in &callers {
            let question = timeout(ANSWER_WITHIN, task.questions.next()).await.expect("another question");
            match question.expect("the link is there") {
                Question::Depth { answer, .. } => answer.send(Depth::NoQueue).expect("somebody listens"),
                other => panic!("nobody asked: {other:?}"),
            }
        }
        for caller in callers {
            assert_eq!(caller.await.unwrap(), Ok(Depth::NoQueue));
        }
    }

    #[tokio::test]
    async fn models_that_nobody_serves_come_last() {
        let (link, mut task) = Link::new("amqp://localhost".parse().unwrap(), "test".to_owned());
        link.is_connected.store(true, Ordering::Relaxed);
        let named = || "served".to_owned();
        let heartbeat = Heartbeat {
            interval_ms: 60_000,
            state: WorkerState::Consuming,
            models: vec![ModelStatus { model: named(), key: named(), ..ModelStatus::default() }],
            ..Heartbeat::default()
        };
        link.hear(&serde_json::to_vec(&heartbeat).unwrap());
        for model in ["one", "two", "three", "served"] {
            let link = Arc::clone(&link);
            tokio::spawn(async move { link.depth(model).await });
        }
        let all_asked = async {
            while task.questions.len() < 4 {
                tokio::task::yield_now().await;
            }
        };
        timeout(ANSWER_WITHIN, all_asked).await.expect("four questions");
        for expected in ["served", "one"] {
            let next = task.questions.next().await;
            assert!(matches!(&next, Some(Question::Depth { model, .. }) if model == expected), "{next:?}");
        }
    }

    #[tokio::test]
    async fn nobody_waits_for_a_broker_that_is_away() {
        let (link, task) = Link::new("amqp://localhost".parse().unwrap(), "test".to_owned());
        assert_eq!(link.depth("m").await, Err(NoAnswer));
        // Dropping the connection also drops the questions that it received.
        link.is_connected.store(true, Ordering::Relaxed);
        drop(task);
        assert_eq!(link.depth("m").await, Err(NoAnswer));
        assert!(link.dead_letters("m").await.is_err());
    }

    #[tokio::test]
    async fn one_at_a_time_reads_dead_letters() {
        let (link, mut task) = Link::new("amqp://localhost".parse().unwrap(), "test".to_owned());
        link.is_connected.store(true, Ordering::Relaxed);
        let read = |link: &Arc<Link>| {
            let link = Arc::clone(link);
            tokio::spawn(async move { link.dead_letters("m").await })
        };
        let (leaves, waits) = (read(&link), read(&link));
        let question = timeout(ANSWER_WITHIN, task.questions.next()).await.expect("a question");
        let (only_reader, answer) = match question {
            Some(Question::DeadLetters { only_reader, answer, .. }) => (only_reader, answer),
            other => panic!("nobody asked: {other:?}"),
        };
        // Who leaves does not end the reading.
        leaves.abort();
        assert!(leaves.await.is_err());
        drop(answer);
        assert!(task.questions.next().now_or_never().is_none(), "a second reader");
        assert_eq!(link.dead_letters("m").await.unwrap_err(), LettersUnread::Busy);
        assert_eq!(waits.await.unwrap().unwrap_err(), LettersUnread::Busy);
        drop(only_reader);
        let next = read(&link);
        match timeout(ANSWER_WITHIN, task.questions.next()).await.expect("another question") {
            Some(Question::DeadLetters { answer, .. }) => {
                answer.send(Ok(Letters::default())).expect("somebody listens");
            }
            other => panic!("nobody asked: {other:?}"),
        }
        assert!(next.await.unwrap().is_ok());
    }
}
