//! Publishes jobs steadily while faults happen to workers, and then checks the broker's view of their sessions.

use std::cell::Cell;

use anyhow::{Context as _, Result, ensure};
use tokio::time::{Duration, timeout};
use vramq_schemas::topology::{bulk_queue, jobs_queue};

use crate::client::Mailbox;
use crate::reply_counter::ReplyCounter;
use crate::test_env::{MODEL, TestEnv};
use crate::wait::until;

/// Jobs published at a time. Also how many may be open when the next are published.
const BATCH: usize = 20;

/// Longer than the longest wait of a worker before it connects again.
const ANSWER_MAX: Duration = Duration::from_secs(150);

/// Announces the log lines of workers whose sessions are lost.
pub fn announce_lost_sessions(env: &mut TestEnv) {
    for text in [
        "session lost, connecting again",
        "session ended: the broker will redeliver the unacknowledged jobs",
        "no session yet",
        "it will run in isolation",
        // If the worker looks between the deletion of a queue and the next session.
        "an exchange or a queue is missing",
    ] {
        env.announce(text);
    }
}

/// Jobs that were published, and their answers.
#[derive(Debug, Default)]
pub struct Flow {
    pub published: usize,
    pub counter: ReplyCounter,
}

impl Flow {
    /// Publishes and collects until the faults are over, and every job is answered.
    ///
    /// # Errors
    /// What the faults fail with; a job that is not answered, or not rightly.
    pub async fn during(
        &mut self,
        env: &TestEnv,
        replies: &mut Mailbox,
        faults: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let over = Cell::new(false);
        let faults = async {
            faults.await?;
            over.set(true);
            Ok(())
        };
        let flowing = async {
            while !over.get() {
                self.publish(env, BATCH).await?;
                self.collect(replies, BATCH).await?;
            }
            self.collect(replies, 0).await
        };
        tokio::try_join!(faults, flowing).map(drop)
    }

    /// Publishes so many jobs.
    ///
    /// # Errors
    /// The broker does not take one.
    pub async fn publish(&mut self, env: &TestEnv, jobs: usize) -> Result<()> {
        let ids = self.published..self.published + jobs;
        let messages = ids.map(|id| env.job(&id.to_string(), [format!("text {id}")]));
        env.client.publish_all(MODEL, messages.collect::<Result<_>>()?).await?;
        self.published += jobs;
        Ok(())
    }

    /// Collects until so few jobs are open.
    ///
    /// # Errors
    /// A job that is not answered, or not rightly.
    pub async fn collect(&mut self, replies: &mut Mailbox, open: usize) -> Result<()> {
        let jobs = self.published.saturating_sub(open);
        let collected = timeout(ANSWER_MAX, self.counter.collect(replies, jobs)).await;
        collected.with_context(|| format!("no {jobs} answers within {ANSWER_MAX:?}"))?
    }
}

/// Waits until the broker sees consumers of [`MODEL`]'s jobs, each with a prefetch, and all of them together with no more than the
/// workers' slots; and no more unacknowledged deliveries than slots.
///
/// # Errors
/// It does not come to that.
pub async fn sessions_are_right(env: &TestEnv, workers: usize, slots: u64) -> Result<()> {
    let (queue, bulk) = (jobs_queue(MODEL), bulk_queue(MODEL));
    let most = slots * workers as u64;
    let seen = Cell::new(None);
    let right = until("the right consumers", async || {
        let consumers = env.vhost.consumers().await?;
        let ours: Vec<_> = consumers.into_iter().filter(|c| [&queue, &bulk].contains(&&c.queue)).collect();
        let depth = env.vhost.depth(&queue).await?;
        let (of_jobs, prefetch) =
            (ours.iter().filter(|c| c.queue == queue).count(), ours.iter().map(|c| c.prefetch).sum::<u64>());
        // 0 would be no limit at all.
        let is_limited = ours.iter().all(|consumer| consumer.prefetch > 0);
        let right = of_jobs >= workers && is_limited && prefetch <= most && depth.is_some();
        seen.set(Some((ours, depth)));
        Ok(right.then_some(depth).flatten())
    });
    let depth = right.await.with_context(|| format!("the broker sees {:?}", seen.take()))?;
    ensure!(depth.unacked <= most, "{depth:?} of {workers} worker(s) with {slots} slots");
    Ok(())
}
