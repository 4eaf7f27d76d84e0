//! Real texts through RabbitMQ, a real worker, and back: jobs of 32 texts, replies in bincode.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::stream::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};
use tokio::process::{Child, Command};
use vramq_schemas::headers::BATCH_HINT;
use vramq_schemas::topology::{JOBS_EXCHANGE, jobs_queue};
use vramq_schemas::{Encoding, Input, Job, Params, codec};

use crate::path::forget_queues;
use crate::process::{self, STALLED};

const MODEL: &str = "bench-minilm";

/// Texts in a job.
const JOB_ITEMS: usize = 32;

/// What is sent, and through what.
#[derive(Clone, Copy, Debug)]
pub struct Load<'a> {
    pub url: &'a str,
    pub worker: &'a Path,
    pub model: &'a Path,
    pub texts: &'a [String],
    pub threads: usize,
    pub pass_tokens: usize,
    /// The jobs' batch hint.
    pub hint: Option<u32>,
    /// More settings of the worker.
    pub settings: &'a [String],
}

/// The queue of the jobs.
pub fn queue() -> String {
    jobs_queue(MODEL)
}

/// Sentences per second, from the first publish to the last reply. `other` serves the queue in the worker's place.
pub async fn run(load: &Load<'_>, other: Option<Command>) -> anyhow::Result<f64> {
    let Load { url, worker, model, texts, threads, pass_tokens, hint, settings } = *load;
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.queue_delete(queue().into(), QueueDeleteOptions::default()).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let (replies, mut incoming) = replies(&channel).await?;
    let mut all = vec![
        format!("model.{MODEL}.path={}", model.display()),
        format!("model.{MODEL}.pass_tokens={pass_tokens}"),
        format!("device.cpu.threads={threads}"),
    ];
    all.extend_from_slice(settings);
    let mut served = process::spawn_worker(url, worker, &all)?;
    process::wait_for_consumer(&connection, &queue()).await?;
    if let Some(mut other) = other {
        // The worker only made the queue.
        process::stop(&mut served).await?;
        served = other.kill_on_drop(true).spawn()?;
        process::wait_for_consumer(&connection, &queue()).await?;
    }
    // The first jobs warm up caches and the allocator, and teach what fits.
    let jobs = |texts: &[String]| texts.chunks(JOB_ITEMS).map(|texts| job(MODEL, texts)).collect::<Vec<_>>();
    exchange(&channel, &replies, &mut incoming, &jobs(&texts[..texts.len().min(10 * JOB_ITEMS)]), hint)
        .await?;
    let started = Instant::now();
    exchange(&channel, &replies, &mut incoming, &jobs(texts), hint).await?;
    let seconds = started.elapsed().as_secs_f64();
    process::stop(&mut served).await?;
    connection.close(200, "done".into()).await?;
    Ok(texts.len() as f64 / seconds)
}

/// A job of some texts.
pub fn job(model: &str, texts: &[String]) -> Job {
    let inputs = texts.iter().cloned().map(Input::Text).collect();
    Job { model: model.to_owned(), inputs, params: Params::default() }
}

/// A reply queue that ends with the connection, and its consumer.
pub async fn replies(channel: &Channel) -> anyhow::Result<(ShortString, Consumer)> {
    let exclusive = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    let replies = channel.queue_declare("".into(), exclusive, FieldTable::default()).await?.name().clone();
    let no_ack = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let incoming = channel.basic_consume(replies.clone(), "".into(), no_ack, FieldTable::default()).await?;
    Ok((replies, incoming))
}

const ECHO: &str = "bench-again";

/// A worker of the echo engine whose first `fails` passes run out of memory.
async fn echo_worker(
    url: &str,
    worker: &Path,
    queue_type: &str,
    fails: usize,
    connection: &Connection,
) -> anyhow::Result<Child> {
    let settings = [
        format!("model.{ECHO}.engine=echo"),
        format!("model.{ECHO}.slots_max=16"),
        format!("broker.queue_type={queue_type}"),
        format!("device.cpu.fault=skip=0,fail={fails}"),
    ];
    let served = process::spawn_worker(url, worker, &settings)?;
    process::wait_for_consumer(connection, &jobs_queue(ECHO)).await?;
    Ok(served)
}

/// Milliseconds from the publish of a job of two items to its reply. Its first `fails` passes run out of memory.
pub async fn round_trip(url: &str, worker: &Path, queue_type: &str, fails: usize) -> anyhow::Result<f64> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    forget_queues(&channel, ECHO).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let (replies, mut incoming) = replies(&channel).await?;
    let mut served = echo_worker(url, worker, queue_type, fails, &connection).await?;
    let started = Instant::now();
    exchange(&channel, &replies, &mut incoming, &[job(ECHO, &vec![String::new(); 2])], None).await?;
    let milliseconds = started.elapsed().as_secs_f64() * 1e3;
    process::stop(&mut served).await?;
    connection.close(200, "done".into()).await?;
    Ok(milliseconds)
}

/// How many of a backlog's jobs are answered before its first one, which runs out of memory and goes back.
pub async fn overtaken(url: &str, worker: &Path, queue_type: &str, backlog: usize) -> anyhow::Result<usize> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    forget_queues(&channel, ECHO).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let (replies, mut incoming) = replies(&channel).await?;
    // One worker makes the queue, another one drains it.
    let mut first = echo_worker(url, worker, queue_type, 0, &connection).await?;
    process::stop(&mut first).await?;
    let jobs = vec![job(ECHO, &vec![String::new(); 2]); backlog];
    publish(&channel, &replies, &jobs, None, Caller::Unknown).await?;
    let mut served = echo_worker(url, worker, queue_type, 1, &connection).await?;
    let mut before = None;
    for seen in 0..backlog {
        let reply =
            next(&mut incoming).await.with_context(|| format!("stalled after {seen} of {backlog}"))?;
        if reply.properties.message_id().as_ref().is_some_and(|id| id.as_str() == "0") {
            before = Some(seen);
        }
    }
    process::stop(&mut served).await?;
    connection.close(200, "done".into()).await?;
    before.context("the first job was not answered")
}

/// Publishes jobs and waits until all are answered.
pub async fn exchange(
    channel: &Channel,
    reply_to: &ShortString,
    replies: &mut Consumer,
    jobs: &[Job],
    hint: Option<u32>,
) -> anyhow::Result<()> {
    publish(channel, reply_to, jobs, hint, Caller::Unknown).await?;
    let mut done = 0;
    while done < jobs.len() {
        let reply = next(replies).await.with_context(|| format!("stalled after {done} of {}", jobs.len()))?;
        match reply.properties.kind().as_ref().map(|kind| kind.as_str()) {
            Some("done") => done += 1,
            Some("part") => {}
            kind => anyhow::bail!("a reply of type {kind:?}"),
        }
    }
    Ok(())
}

/// The next reply.
pub async fn next(replies: &mut Consumer) -> anyhow::Result<Delivery> {
    let reply = tokio::time::timeout(STALLED.max(Duration::from_secs(120)), replies.next()).await?;
    Ok(reply.context("replies ended")??)
}

/// Who publishes, for fair sharing.
#[derive(Clone, Copy, Debug)]
pub enum Caller<'a> {
    /// Jobs without a user: together they are one caller.
    Unknown,
    /// The connection's user.
    User(&'a str),
}

/// Publishes jobs with the ids `0`, `1`… and waits for the confirms.
pub async fn publish(
    channel: &Channel,
    reply_to: &ShortString,
    jobs: &[Job],
    hint: Option<u32>,
    caller: Caller<'_>,
) -> anyhow::Result<()> {
    let mut confirms = Vec::new();
    for (id, job) in jobs.iter().enumerate() {
        let body = codec::encode(job, Encoding::Bincode)?;
        let mut headers = FieldTable::default();
        if let Some(hint) = hint {
            headers.insert(BATCH_HINT.into(), AMQPValue::LongUInt(hint));
        }
        let user = match caller {
            Caller::Unknown => BasicProperties::default(),
            Caller::User(user) => BasicProperties::default().with_user_id(user.into()),
        };
        let properties = user
            .with_delivery_mode(2)
            .with_content_type(Encoding::Bincode.content_type().into())
            .with_message_id(id.to_string().into())
            .with_headers(headers)
            .with_reply_to(reply_to.clone());
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let key = job.model.as_str().into();
        confirms.push(channel.basic_publish(JOBS_EXCHANGE.into(), key, options, &body, properties).await?);
    }
    for confirm in confirms {
        anyhow::ensure!(confirm.await?.is_ack(), "job not confirmed");
    }
    Ok(())
}
