//! Real texts through RabbitMQ, a real worker, and back: jobs of 32 texts, replies in bincode.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures_util::stream::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use vramq_schemas::topology::{JOBS_EXCHANGE, jobs_queue};
use vramq_schemas::{Encoding, Input, Job, Params, codec};

use crate::process::{self, STALLED};

const MODEL: &str = "bench-minilm";

/// Texts in a job.
const JOB_ITEMS: usize = 32;

/// Sentences per second, from the first publish to the last reply.
pub async fn run(
    url: &str,
    worker: &Path,
    model: &Path,
    texts: &[String],
    threads: usize,
    pass_tokens: usize,
) -> anyhow::Result<f64> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.queue_delete(jobs_queue(MODEL).into(), QueueDeleteOptions::default()).await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let exclusive = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    let replies = channel.queue_declare("".into(), exclusive, FieldTable::default()).await?.name().clone();
    let no_ack = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let mut incoming =
        channel.basic_consume(replies.clone(), "".into(), no_ack, FieldTable::default()).await?;
    let settings = [
        format!("model.{MODEL}.path={}", model.display()),
        format!("model.{MODEL}.pass_tokens={pass_tokens}"),
        format!("device.cpu.threads={threads}"),
    ];
    let mut served = process::spawn_worker(url, worker, &settings)?;
    process::wait_for_consumer(&connection, &jobs_queue(MODEL)).await?;
    // The first jobs warm up caches and the allocator.
    exchange(&channel, &replies, &mut incoming, &texts[..texts.len().min(10 * JOB_ITEMS)]).await?;
    let started = Instant::now();
    exchange(&channel, &replies, &mut incoming, texts).await?;
    let seconds = started.elapsed().as_secs_f64();
    process::stop(&mut served).await?;
    connection.close(200, "done".into()).await?;
    Ok(texts.len() as f64 / seconds)
}

async fn exchange(
    channel: &Channel,
    reply_to: &lapin::types::ShortString,
    replies: &mut lapin::Consumer,
    texts: &[String],
) -> anyhow::Result<()> {
    let mut confirms = Vec::new();
    for (id, chunk) in texts.chunks(JOB_ITEMS).enumerate() {
        let inputs = chunk.iter().cloned().map(Input::Text).collect();
        let body = codec::encode(
            &Job { model: MODEL.to_owned(), inputs, params: Params::default() },
            Encoding::Bincode,
        )?;
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_content_type(Encoding::Bincode.content_type().into())
            .with_message_id(id.to_string().into())
            .with_reply_to(reply_to.clone());
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        confirms.push(
            channel.basic_publish(JOBS_EXCHANGE.into(), MODEL.into(), options, &body, properties).await?,
        );
    }
    let jobs = confirms.len();
    for confirm in confirms {
        anyhow::ensure!(confirm.await?.is_ack(), "job not confirmed");
    }
    for seen in 0..jobs {
        let reply = tokio::time::timeout(STALLED.max(Duration::from_secs(120)), replies.next()).await;
        let reply =
            reply.with_context(|| format!("stalled after {seen} of {jobs}"))?.context("replies ended")??;
        let kind = reply.properties.kind().as_ref().map(|kind| kind.as_str());
        anyhow::ensure!(kind == Some("done"), "a reply of type {kind:?}");
    }
    Ok(())
}
