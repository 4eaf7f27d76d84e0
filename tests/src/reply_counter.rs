//! Publishes many jobs at once, and counts how each of them ended.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::{Output, ReplyKind};

use crate::client::{Client, Mailbox};
use crate::job::Message;
use crate::test_env::{MODEL, TestEnv};
use crate::wait::SILENCE;

/// How often each job was answered.
#[derive(Debug, Default)]
pub struct ReplyCounter {
    answers: BTreeMap<String, usize>,
    /// Answers by worker.
    pub by_worker: BTreeMap<String, usize>,
}

/// Publishes `jobs` jobs with ids `0`, `1`… over several connections at the same time, each changed by `change`.
///
/// # Errors
/// The broker does not take one.
pub async fn publish_many(
    env: &TestEnv,
    producers: usize,
    jobs: usize,
    change: impl Fn(Message) -> Message,
) -> Result<()> {
    let change = &change;
    let each = (0..producers).map(|producer| async move {
        let client = Client::connect(&env.url).await?;
        let mine = (producer..jobs).step_by(producers);
        let messages = mine.map(|at| env.job(&at.to_string(), [format!("text {at}")]).map(change));
        client.publish_all(MODEL, messages.collect::<Result<_>>()?).await?;
        client.close().await
    });
    futures_util::future::try_join_all(each).await.map(drop)
}

impl ReplyCounter {
    /// Takes in replies until `jobs` different jobs are answered.
    ///
    /// # Errors
    /// One is not answered in time, or not rightly.
    pub async fn collect(&mut self, replies: &mut Mailbox, jobs: usize) -> Result<()> {
        while self.answers.len() < jobs {
            let came = self.answers.len();
            let reply = replies.next().await.with_context(|| format!("{came} of {jobs} answered"))?;
            self.add(&reply)?;
        }
        Ok(())
    }

    /// Takes in what is left, once nobody publishes any more.
    ///
    /// # Errors
    /// A wrong answer.
    pub async fn collect_rest(&mut self, replies: &mut Mailbox) -> Result<()> {
        while let Some(reply) = replies.next_within(SILENCE).await? {
            self.add(&reply)?;
        }
        Ok(())
    }

    fn add(&mut self, reply: &crate::client::Received) -> Result<()> {
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
        let (id, headers) = (reply.id(), reply.reply()?);
        ensure!((headers.offset, headers.items_total) == (0, 1), "{headers:?}");
        let expected = Output::Json(format!("text {id}").into());
        ensure!(reply.outputs()?.outputs == [expected], "a wrong answer to {id}");
        *self.answers.entry(id.to_owned()).or_default() += 1;
        *self.by_worker.entry(headers.worker).or_default() += 1;
        Ok(())
    }

    /// Answers beyond the first of each job.
    pub fn duplicates(&self) -> usize {
        self.answers.values().map(|count| count - 1).sum()
    }

    /// Jobs answered.
    pub fn jobs(&self) -> usize {
        self.answers.len()
    }
}
