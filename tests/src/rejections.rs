//! Checks that are the same for every bad job: how it ends, and that it does not affect other jobs.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use lapin::BasicProperties;
use lapin::types::AMQPValue;
use vramq_schemas::{Reason, ReplyKind};

use crate::client::Received;
use crate::job::Message;
use crate::proxy::Proxy;
use crate::test_env::{MODEL, TestEnv};
use crate::wait::until;
use crate::worker::Worker;

/// Headers that a worker adds to a dead letter. `publish-seq` identifies its publish. `expiration` is a header because the property of that
/// name would make the letter itself expire.
const ADDED: [&str; 7] =
    ["reason", "error", "dead-at-ms", "worker", "worker-version", "publish-seq", "expiration"];

/// Headers that a worker adds if the job has a `user_id`, which the letter cannot have.
const ADDED_OF_USER: [&str; 2] = ["vramq-user", "vramq-caller"];

/// A job that can never run, and how it is to end.
#[derive(Clone, Debug)]
pub struct Rejected {
    pub what: String,
    pub job: Message,
    pub reason: Reason,
    lost_headers: Vec<&'static str>,
    loses_user_id: bool,
}

impl Rejected {
    pub fn new(what: &str, job: Message, reason: Reason) -> Self {
        Self { what: what.to_owned(), job, reason, lost_headers: Vec::new(), loses_user_id: false }
    }

    /// The broker would cut the connection of a publisher that claims to be another user.
    #[must_use]
    pub fn losing_user_id(mut self) -> Self {
        self.loses_user_id = true;
        self
    }

    /// Headers that would make the broker route copies of the letter.
    #[must_use]
    pub fn losing_headers(mut self, names: &[&'static str]) -> Self {
        self.lost_headers = names.to_vec();
        self
    }
}

/// Publishes the jobs one by one. Each must come back as a dead letter with its reason and everything that was
/// published, and as a `failed` reply.
///
/// # Errors
/// Names the job that ends otherwise.
pub async fn rejected_and_reported(env: &mut TestEnv, cases: &[Rejected]) -> Result<()> {
    env.announce("job dead-lettered");
    let mut dead = env.dead_letters().await?;
    let mut replies = env.replies().await?;
    for case in cases {
        let what = &case.what;
        env.client.publish(MODEL, case.job.clone()).await.with_context(|| what.clone())?;
        let reply = replies.next().await.with_context(|| what.clone())?;
        let letter = dead.next().await.with_context(|| what.clone())?;
        check_reply(case, &reply).with_context(|| format!("{what}: the failed reply"))?;
        buried(case, &letter).with_context(|| format!("{what}: the dead letter"))?;
    }
    Ok(())
}

/// A worker, and the proxy that counts what it publishes.
///
/// # Errors
/// No process, or no proxy.
pub async fn counted_worker(env: &mut TestEnv, settings: &[&str]) -> Result<(Worker, Arc<Proxy>)> {
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    let worker = env.worker(&[&[url.as_str()], settings].concat()).await?;
    Ok((worker, proxy))
}

/// Ends the worker, and finds that it has published so many messages in all.
///
/// # Errors
/// There are fewer, or others.
pub async fn has_published(worker: &Worker, proxy: &Proxy, messages: usize) -> Result<()> {
    worker.drain().await?;
    let published = all_published(proxy).await?;
    ensure!(published == messages, "{published} messages were published, {messages} are accounted for");
    Ok(())
}

/// What a worker that has ended published in all.
///
/// # Errors
/// Its connections stay open.
pub async fn all_published(proxy: &Proxy) -> Result<usize> {
    until("the end of the worker's connections", async || Ok((proxy.open() == 0).then_some(()))).await?;
    Ok(proxy.published())
}

fn check_reply(case: &Rejected, reply: &Received) -> Result<()> {
    let failure = reply.failure()?;
    ensure!(failure.reason == case.reason, "{failure:?}");
    ensure!(!failure.error.is_empty(), "no words");
    let of_job = &case.job.properties;
    // An empty id is none.
    let [id, correlation] = [of_job.message_id(), of_job.correlation_id()]
        .map(|id| id.as_ref().filter(|id| !id.as_str().is_empty()));
    ensure!(reply.properties.message_id().as_ref() == id);
    ensure!(reply.properties.correlation_id().as_ref() == correlation.or(id));
    ensure!(*reply.properties.delivery_mode() == Some(2), "not persistent");
    ensure!(reply.kind()? == ReplyKind::Failed);
    Ok(())
}

fn buried(case: &Rejected, letter: &Received) -> Result<()> {
    let dossier = letter.dead_letter()?;
    ensure!(dossier.reason == case.reason, "{dossier:?}");
    ensure!(!dossier.error.is_empty() && !dossier.worker.is_empty(), "{dossier:?}");
    ensure!(letter.body == case.job.body, "the body is not the job's");

    // All other properties are as published, except those that the letter may not have.
    let mut expected = BasicProperties::default().with_delivery_mode(2);
    let of_job = &case.job.properties;
    macro_rules! same {
        ($($get:ident => $with:ident),*) => {
            $(if let Some(value) = of_job.$get() { expected = expected.$with(value.clone()); })*
        };
    }
    same!(
        content_type => with_content_type, content_encoding => with_content_encoding, priority => with_priority,
        correlation_id => with_correlation_id, reply_to => with_reply_to, message_id => with_message_id,
        timestamp => with_timestamp, kind => with_type, app_id => with_app_id
    );
    if !case.loses_user_id
        && let Some(user) = of_job.user_id()
    {
        expected = expected.with_user_id(user.clone());
    }
    let found = letter.properties.clone();
    let expected = expected.with_headers(found.headers().clone().unwrap_or_default());
    ensure!(found == expected, "properties are {found:?}, not {expected:?}");

    let mut headers: BTreeMap<_, _> = case.job.headers().inner().clone();
    headers.retain(|name, _| !case.lost_headers.contains(&name.as_str()));
    if let Some(expiration) = of_job.expiration() {
        headers.insert("expiration".into(), AMQPValue::LongString(expiration.as_str().into()));
    }
    for (name, value) in &headers {
        let kept = letter.headers().inner().get(name).cloned();
        ensure!(kept.as_ref() == Some(value), "header {name} is {kept:?}, not {value:?}");
    }
    let extra = letter.headers().inner().keys().cloned().collect::<Vec<_>>();
    let of_user = of_job.user_id().is_some();
    ensure!(
        ADDED_OF_USER.iter().all(|name| extra.iter().any(|it| it.as_str() == *name) == of_user),
        "{extra:?}"
    );
    for name in extra {
        ensure!(
            headers.contains_key(&name)
                || ADDED_OF_USER.contains(&name.as_str())
                || ADDED.contains(&name.as_str()),
            "extra header {name}"
        );
    }
    Ok(())
}

/// The same process serves the next job as if nothing had been.
///
/// # Errors
/// It does not.
pub async fn keeps_serving(env: &mut TestEnv, worker: &Worker) -> Result<()> {
    let job = env.job("the next job", ["fine"])?;
    env.client.publish(MODEL, job).await?;
    let reply = env.replies().await?.next().await.context("the next job has no reply")?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.id() == "the next job", "{:?}", reply.properties);
    ensure!(worker.is_running(), "the worker ended");
    ensure!(reply.reply()?.worker == worker.name);
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions == 1, "the worker had to connect {sessions} times");
    Ok(())
}
