//! Both ends of a soak test: publishers that continue through every fault, and collectors of replies. Both write to the ledger.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use vramq_schemas::Encoding;

use crate::client::{Client, Received};
use crate::job::Message;
use crate::job_ledger::{JobLedger, Kind, item};
use crate::random::Random;
use crate::test_env::{MODEL, REPLIES};

/// How long the broker may take to answer before a connection is given up.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// Between looks at a broker that is away, and at a ledger that is full.
const PAUSE: Duration = Duration::from_millis(50);

/// Jobs that may be open at a time: enough that workers never run dry.
const OPEN_MAX: usize = 300;

const BATCH_MAX: usize = 8;
const ITEMS_MAX: usize = 200;

/// Of so many jobs one is malformed.
const ONE_MALFORMED_IN: usize = 50;

/// The ledger, for all who write in it.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<JobLedger>>);

impl Shared {
    pub fn ledger(&self) -> MutexGuard<'_, JobLedger> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishers and collectors at work. Ended when it is dropped.
#[derive(Debug)]
pub struct Ends {
    publishing: watch::Sender<bool>,
    publishers: Vec<JoinHandle<Result<()>>>,
    collectors: Vec<JoinHandle<()>>,
}

impl Ends {
    /// `publish_url` may lead through a proxy; what comes back is collected at `collect_url`.
    pub fn start(
        ledger: &Shared,
        publish_url: &str,
        publishers: usize,
        collect_url: &str,
        dead_queue: &str,
        random: &mut Random,
    ) -> Self {
        let publishing = watch::Sender::new(true);
        let publishers = (0..publishers).map(|number| {
            let seed = random.below(usize::MAX) as u64;
            let publisher = Publisher {
                number,
                next: 0,
                random: Random::new(seed),
                url: publish_url.to_owned(),
                ledger: ledger.clone(),
            };
            tokio::spawn(publisher.publish(publishing.subscribe()))
        });
        let collect = |queue: &str, add: fn(&mut JobLedger, &Received)| {
            tokio::spawn(collect(collect_url.to_owned(), queue.to_owned(), ledger.clone(), add))
        };
        let collectors = vec![collect(REPLIES, JobLedger::reply), collect(dead_queue, JobLedger::letter)];
        Self { publishers: publishers.collect(), publishing, collectors }
    }

    /// Ends the publishers, each after the jobs that it has under way.
    ///
    /// # Errors
    /// A job could not be encoded.
    pub async fn stop_publishing(&mut self) -> Result<()> {
        self.publishing.send_replace(false);
        for publisher in self.publishers.drain(..) {
            publisher.await??;
        }
        Ok(())
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        for collector in &self.collectors {
            collector.abort();
        }
        for publisher in &self.publishers {
            publisher.abort();
        }
    }
}

struct Publisher {
    number: usize,
    next: usize,
    random: Random,
    url: String,
    ledger: Shared,
}

impl Publisher {
    /// Publishes jobs. One without a confirm may have arrived, so the ledger keeps its id as unsure. The id is not used again: a duplicate
    /// is never the publisher's doing.
    async fn publish(mut self, publishing: watch::Receiver<bool>) -> Result<()> {
        let mut client = None;
        while *publishing.borrow() {
            if self.ledger.ledger().open() >= OPEN_MAX {
                sleep(PAUSE).await;
                continue;
            }
            let Some(connected) = client.take() else {
                client = timeout(ANSWER_MAX, Client::connect(&self.url)).await.ok().and_then(Result::ok);
                sleep(PAUSE).await;
                continue;
            };
            let (ids, messages) = self.draw()?;
            let taken = timeout(ANSWER_MAX, connected.offer(MODEL, messages)).await.unwrap_or_default();
            for (at, id) in ids.iter().enumerate() {
                self.ledger.ledger().published(id, taken.get(at).copied().unwrap_or(false));
            }
            if taken.is_empty() || taken.contains(&false) {
                let _ = timeout(ANSWER_MAX, connected.close()).await;
            } else {
                client = Some(connected);
            }
        }
        Ok(())
    }

    fn draw(&mut self) -> Result<(Vec<String>, Vec<Message>)> {
        let batch = 1 + self.random.below(BATCH_MAX);
        let (mut ids, mut messages) = (Vec::with_capacity(batch), Vec::with_capacity(batch));
        for _ in 0..batch {
            let id = format!("{}-{}", self.number, self.next);
            self.next += 1;
            let most = *self.random.one_of(&[1, 5, 20, ITEMS_MAX]);
            let items = 1 + self.random.below(most);
            let texts = (0..items).map(|at| item(&id, at));
            let mut message = Message::texts(Encoding::Json, MODEL, &id, REPLIES, texts)?;
            let malformed = self.random.below(ONE_MALFORMED_IN) == 0;
            if malformed {
                message = message.with_body("{no job");
            }
            self.ledger.ledger().enter(&id, if malformed { Kind::Malformed } else { Kind::Good(items) });
            ids.push(id);
            messages.push(message);
        }
        Ok((ids, messages))
    }
}

/// Takes all messages of a queue into the ledger, through whatever happens to the broker.
async fn collect(url: String, queue: String, ledger: Shared, add: fn(&mut JobLedger, &Received)) {
    loop {
        if let Ok(Ok(client)) = timeout(ANSWER_MAX, Client::connect(&url)).await {
            if let Ok(Ok(mut mailbox)) = timeout(ANSWER_MAX, client.mailbox(&queue)).await {
                let _ = mailbox.hand_over(|message| add(&mut ledger.ledger(), message)).await;
            }
            // If a client is dropped during a request, lapin leaves its connection open, and the consumer would receive messages for ever.
            let _ = timeout(ANSWER_MAX, client.close()).await;
        }
        sleep(PAUSE).await;
    }
}
