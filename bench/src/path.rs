//! Measures the message path with an engine that does nothing: the worker's `echo` against a bare pipelined loop.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use futures_util::stream::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions, QueuePurgeOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde::Serialize;
use tokio::process::Command;
use vramq_schemas::topology::{
    JOBS_EXCHANGE, bulk_queue, dead_queue, default_reply_queue, jobs_queue, suspects_queue,
};
use vramq_schemas::{Encoding, Input, Job, Params, codec};

use crate::process::{self, STALLED};

const MODEL: &str = "bench-echo";
const REPLIES: &str = "vramq.bench.replies";

/// Bytes of text in a job; with the JSON around it about 1 KiB.
const TEXT_BYTES: usize = 980;

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub queue_type: &'static str,
    pub prefetch: u16,
    pub bare: Speed,
    pub worker: Speed,
    /// The worker's rate divided by that of the loop.
    pub ratio: f64,
}

/// How fast a process took jobs, and what each job cost the process.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    pub jobs_per_s: f64,
    /// Processor time of the process, without the broker's: what is left of a difference when the rate is noisy.
    pub cpu_us_per_job: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { queue_type, prefetch, bare, worker, ratio } = self;
        write!(
            f,
            "  {queue_type:<8} prefetch {prefetch:<4} bare loop {:>7.0}/s {:>4.0} us/job  worker {:>7.0}/s {:>4.0} us/job  ratio {ratio:.2}",
            bare.jobs_per_s, bare.cpu_us_per_job, worker.jobs_per_s, worker.cpu_us_per_job
        )
    }
}

/// Whom to measure.
#[derive(Clone, Copy)]
enum Who {
    Bare,
    Worker,
}

/// Measures both, one after the other and `rounds` times in turn, and keeps the median of each.
pub async fn run(url: &str, worker: &Path, jobs: usize, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for queue_type in ["classic", "quorum"] {
        for prefetch in [64, 256] {
            let (mut bare, mut ours) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                bare.push(measure(url, worker, queue_type, prefetch, jobs, Who::Bare).await?);
                ours.push(measure(url, worker, queue_type, prefetch, jobs, Who::Worker).await?);
            }
            let (bare, worker) = (median(bare), median(ours));
            let ratio = worker.jobs_per_s / bare.jobs_per_s;
            let row = Row { queue_type, prefetch, bare, worker, ratio };
            println!("{row}");
            rows.push(row);
        }
    }
    Ok(rows)
}

fn median(mut runs: Vec<Speed>) -> Speed {
    runs.sort_by(|a, b| a.jobs_per_s.total_cmp(&b.jobs_per_s));
    runs[runs.len() / 2]
}

/// Jobs per second from the first reply to the last, draining a queue that was filled before.
async fn measure(
    url: &str,
    worker: &Path,
    queue_type: &'static str,
    prefetch: u16,
    jobs: usize,
    who: Who,
) -> anyhow::Result<Speed> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    forget_queues(&channel, MODEL).await?;
    channel.queue_delete(REPLIES.into(), QueueDeleteOptions::default()).await?;
    // The worker declares the topology; it is stopped again before the queue is filled.
    let settings = settings(queue_type, prefetch);
    let mut setup = process::spawn_worker(url, worker, &settings)?;
    process::wait_for_consumer(&connection, &jobs_queue(MODEL)).await?;
    process::stop(&mut setup).await?;
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(queue_type.into()));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(REPLIES.into(), durable, arguments).await?;
    fill(&channel, jobs).await?;

    let no_ack = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let mut replies = channel.basic_consume(REPLIES.into(), "".into(), no_ack, FieldTable::default()).await?;
    let mut served = match who {
        Who::Worker => process::spawn_worker(url, worker, &settings)?,
        Who::Bare => Command::new(std::env::current_exe()?)
            .args(["bare", "--url", url, "--queue", &jobs_queue(MODEL), "--prefetch", &prefetch.to_string()])
            .kill_on_drop(true)
            .spawn()?,
    };
    let mut first = None;
    for seen in 0..jobs {
        let reply = tokio::time::timeout(STALLED, replies.next()).await;
        reply
            .with_context(|| format!("no reply for {STALLED:?} after {seen} of {jobs}"))?
            .context("replies ended")??;
        first.get_or_insert_with(Instant::now);
    }
    let seconds = first.context("no jobs")?.elapsed().as_secs_f64();
    anyhow::ensure!(served.try_wait()?.is_none(), "the measured process ended by itself");
    let cpu_us_per_job = process::cpu_us(&served)? / jobs as f64;
    process::stop(&mut served).await?;
    channel.queue_purge(REPLIES.into(), QueuePurgeOptions::default()).await?;
    connection.close(200, "done".into()).await?;
    Ok(Speed { jobs_per_s: (jobs - 1) as f64 / seconds, cpu_us_per_job })
}

/// Deletes a model's queues, because the next measurement may need another queue type.
pub async fn forget_queues(channel: &Channel, model: &str) -> lapin::Result<()> {
    let queues = [
        jobs_queue(model),
        bulk_queue(model),
        suspects_queue(model),
        dead_queue(model),
        default_reply_queue(model),
    ];
    for queue in queues {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    Ok(())
}

fn settings(queue_type: &str, prefetch: u16) -> [String; 3] {
    [
        format!("model.{MODEL}.engine=echo"),
        format!("model.{MODEL}.slots_max={prefetch}"),
        format!("broker.queue_type={queue_type}"),
    ]
}

async fn fill(channel: &Channel, jobs: usize) -> anyhow::Result<()> {
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    // Bound again in case an earlier run deleted the queue.
    let bind = QueueBindOptions::default();
    channel
        .queue_bind(jobs_queue(MODEL).into(), JOBS_EXCHANGE.into(), MODEL.into(), bind, FieldTable::default())
        .await?;
    let job = Job {
        model: MODEL.to_owned(),
        inputs: vec![Input::Text("x".repeat(TEXT_BYTES))],
        params: Params::default(),
    };
    let body = codec::encode(&job, Encoding::Json)?;
    let mut confirms = Vec::new();
    for id in 0..jobs {
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_content_type(Encoding::Json.content_type().into())
            .with_message_id(id.to_string().into())
            .with_reply_to(REPLIES.into());
        let options = BasicPublishOptions::default();
        confirms.push(
            channel.basic_publish(JOBS_EXCHANGE.into(), MODEL.into(), options, &body, properties).await?,
        );
        if confirms.len() == 256 {
            for confirm in confirms.drain(..) {
                confirm.await?;
            }
        }
    }
    for confirm in confirms {
        confirm.await?;
    }
    Ok(())
}
