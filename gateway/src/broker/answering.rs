//! Answers the questions of requests. The broker is asked several things at once, so a queue that does not answer delays only the questions
//! about it.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::Connection;
use tokio::sync::oneshot;
use tokio::time::timeout;
use vramq_amqp::{Depth, is_missing, queue_depth};
use vramq_schemas::topology::{bulk_queue, jobs_queue};

use super::dead_letters::{self, Letters};
use super::link::{Link, SILENT_MAX};
use super::questions::{ANSWER_WITHIN, NoAnswer, Question, Questions};

/// Counts at the same time. Each has a channel, and brokers allow 2,047 on a connection by default. A queue that does not answer keeps one
/// of them, so this is far more than models whose queues fall silent together.
const COUNTS_MAX: usize = 128;

/// How long the next reader of dead letters waits for those that the broker still has to put back.
const PUT_BACK_MAX: Duration = Duration::from_secs(1);

/// Answers questions for as long as a connection lasts.
pub(super) struct Answering<'a> {
    link: &'a Link,
    connection: &'a Arc<Connection>,
    counts: FuturesUnordered<BoxFuture<'a, Count>>,
    /// Who waits for each of `counts`. All callers who ask the same share one: else the requests for a model whose queue does not answer
    /// would take all of [`COUNTS_MAX`].
    callers: HashMap<Counted, Vec<oneshot::Sender<Depth>>>,
}

/// What is counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Counted {
    /// The queues of a model.
    Model(String),
    /// One queue, by its name.
    Queue(String),
}

/// A count that has ended; `None` if the broker did not answer, or had no channel for it.
type Count = (Counted, Option<lapin::Result<Depth>>);

impl<'a> Answering<'a> {
    pub(super) fn new(link: &'a Link, connection: &'a Arc<Connection>) -> Self {
        Self { link, connection, counts: FuturesUnordered::new(), callers: HashMap::new() }
    }

    /// # Errors
    /// The connection is lost, or the broker refuses a count for another reason than those of [`Depth`].
    pub(super) async fn run(mut self, questions: &mut Questions) -> lapin::Result<Infallible> {
        loop {
            tokio::select! {
                Some((counted, depth)) = self.counts.next() => self.ended(&counted, depth.transpose()?),
                Some(question) = questions.next(), if self.counts.len() < COUNTS_MAX => self.take(question),
            }
        }
    }

    fn take(&mut self, question: Question) {
        match question {
            Question::Depth { model, answer } => {
                // Another request may have counted it in the meantime.
                let fresh = self.link.queues().fresh(&model, Instant::now());
                let Some(depth) = fresh else { return self.count(Counted::Model(model), answer) };
                // An `Err`: the request was given up in the meantime.
                let _ = answer.send(depth);
            }
            Question::Queue { name, answer } => self.count(Counted::Queue(name), answer),
            Question::DeadLetters { model, only_reader, answer } => {
                let connection = Arc::clone(self.connection);
                tokio::spawn(async move {
                    read_dead_letters(&connection, &model, answer).await;
                    drop(only_reader);
                });
            }
        }
    }

    fn count(&mut self, counted: Counted, caller: oneshot::Sender<Depth>) {
        if let Some(callers) = self.callers.get_mut(&counted) {
            // Requests come again and again while the broker does not answer: forget those that have given up.
            callers.retain(|caller| !caller.is_closed());
            callers.push(caller);
            return;
        }
        self.callers.insert(counted.clone(), vec![caller]);
        let (link, connection) = (self.link, self.connection);
        let count = async move {
            let count = async {
                match &counted {
                    Counted::Model(model) => count_model(link, connection, model).await,
                    Counted::Queue(name) => queue_depth(connection, name).await,
                }
            };
            // Waits longer than its callers do. The broker frees the channel only when the queue answers, and until then the next question
            // about the queue would take a further channel.
            let depth = timeout(SILENT_MAX, count).await.ok().filter(|depth| !lacks_channel(depth));
            (counted, depth)
        };
        self.counts.push(count.boxed());
    }

    /// Gives its callers the depth; `None` fails their requests.
    fn ended(&mut self, counted: &Counted, depth: Option<Depth>) {
        let callers = self.callers.remove(counted).unwrap_or_default();
        let Some(depth) = depth else { return };
        for caller in callers {
            let _ = caller.send(depth);
        }
    }
}

/// Whether the connection has as many channels as the broker allows. Other counts end, and free theirs.
fn lacks_channel(depth: &lapin::Result<Depth>) -> bool {
    depth.as_ref().is_err_and(|error| matches!(error.kind(), lapin::ErrorKind::ChannelsLimitReached))
}

/// Counts a model's queues, and notes their depth. If the model may have no queue under its name, counts those under the key that its workers
/// name, and notes the key as well.
async fn count_model(link: &Link, connection: &Connection, model: &str) -> lapin::Result<Depth> {
    let mut depth = count_under(link, connection, model, model).await?;
    let key = other_key(link, model, depth);
    if let Some(key) = &key {
        depth = count_under(link, connection, model, key).await?;
    }
    link.queues().note(model, key, depth, Instant::now());
    Ok(depth)
}

/// The key of a model, if that is not its name. `depth`: that of the queue under its name.
fn other_key(link: &Link, model: &str, depth: Depth) -> Option<String> {
    match depth {
        Depth::Messages { .. } => None,
        // Who may not count queues does not hear that there is none, and publishes jobs all the same.
        Depth::NoQueue | Depth::NoPermission => {
            // Keep the last key while the model's workers are away.
            let before = link.queues().key(model).map(str::to_owned);
            link.fleet().other_key(model, Instant::now()).or(before)
        }
    }
}

/// The depth of the queue under a key, with what waits of the model's large jobs, and in the further queues that its workers name.
async fn count_under(link: &Link, connection: &Connection, model: &str, key: &str) -> lapin::Result<Depth> {
    let mut depth = queue_depth(connection, &jobs_queue(key)).await?;
    if !matches!(depth, Depth::Messages { .. }) {
        // Requests may name any model: one that no worker serves costs the broker only one request.
        return Ok(depth);
    }
    let further = link.fleet().further_queues(model, key, Instant::now());
    for queue in std::iter::once(bulk_queue(key)).chain(further) {
        let counted = queue_depth(connection, &queue).await?;
        if let (Depth::Messages { ready, .. }, Depth::Messages { ready: more, .. }) = (&mut depth, counted) {
            *ready = ready.saturating_add(more);
        }
    }
    Ok(depth)
}

/// Answers with the dead letters, and returns when the broker has put them back.
async fn read_dead_letters(
    connection: &Connection,
    model: &str,
    answer: oneshot::Sender<Result<Letters, String>>,
) {
    let letters = match timeout(ANSWER_WITHIN, dead_letters::read(connection, model)).await {
        Ok(Ok(letters)) => Ok(letters),
        Ok(Err(error)) if is_missing(&error) => Ok(Letters::default()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(NoAnswer.to_string()),
    };
    let total = letters.as_ref().map_or(0, |letters| letters.total);
    let _ = answer.send(letters);
    if total > 0 {
        // In vain if somebody removes letters meanwhile.
        let _ = timeout(PUT_BACK_MAX, dead_letters::until_put_back(connection, model, total)).await;
    }
}

#[cfg(test)]
mod tests {
    use vramq_schemas::status::{Heartbeat, ModelStatus, WorkerState};

    use super::*;

    #[tokio::test]
    async fn a_model_has_the_key_that_its_workers_name_unless_there_is_a_queue_of_its_name() {
        let (link, _task) = Link::new("amqp://localhost".parse().unwrap(), "test".to_owned());
        let now = Instant::now();
        let model = ModelStatus { model: "m".to_owned(), key: "key".to_owned(), ..ModelStatus::default() };
        let heartbeat = Heartbeat {
            interval_ms: 60_000,
            state: WorkerState::Consuming,
            models: vec![model],
            ..Heartbeat::default()
        };
        link.fleet().hear(&serde_json::to_vec(&heartbeat).unwrap(), now, |_| false);
        link.queues().note("away", Some("key".to_owned()), Depth::NoQueue, now);
        let there = Depth::Messages { ready: 0, consumers: 1 };
        for (depth, key) in [(Depth::NoQueue, Some("key")), (Depth::NoPermission, Some("key")), (there, None)]
        {
            for model in ["m", "away"] {
                assert_eq!(other_key(&link, model, depth).as_deref(), key, "{model}: {depth:?}");
            }
            assert_eq!(other_key(&link, "made-up", depth), None);
        }
    }
}
