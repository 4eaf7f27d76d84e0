//! Measures what running out of memory costs: a worker that learns what fits, against the usual policies.
//!
//! The device has room for far less than the configuration assumes (`device.cpu.fault = above=…`), and the texts have very
//! different lengths. The benchmark compares jobs per second of the same jobs through RabbitMQ.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use futures_util::stream::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde::Serialize;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, Encoder, Source};
use vramq_inference::engine::{Engine, Item, PassError, PassShape};
use vramq_schemas::{Encoding, Job, Output, Outputs, codec};

use crate::end_to_end::{self, Load};

/// What a pass may take: a third of what `pass_tokens` asks for.
pub const LIMIT_BYTES: u64 = 6 << 20;

/// Memory of the device besides: never the limit.
const DEVICE_BYTES: u64 = 4 << 30;

/// A policy for too little memory, and its result.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub policy: &'static str,
    pub sentences_per_s: f64,
    /// Relative to the oracle's rate.
    pub ratio: f64,
}

/// What fits under the limit, by the engine's own plan.
struct Fitting {
    /// Tokens of a pass whatever its texts are.
    tokens: usize,
    /// Texts of a pass even if all are of the greatest length.
    items: u32,
}

impl Fitting {
    fn new(model: &Path, threads: usize) -> anyhow::Result<Self> {
        let engine = load(model, threads)?.0;
        let longest = engine.item_cost_max();
        // A pass has the most items if each has two tokens: no text has fewer.
        let fits = |tokens: usize| {
            engine.pass_bytes(PassShape { items: tokens / 2, cost: tokens, longest }) <= LIMIT_BYTES
        };
        let tokens = (longest..100_000).step_by(16).take_while(|tokens| fits(*tokens)).last();
        let full = |items: u32| {
            let items = items as usize;
            engine.pass_bytes(PassShape { items, cost: items * longest, longest }) <= LIMIT_BYTES
        };
        let items = (1..1000).take_while(|items| full(*items)).last();
        Ok(Self { tokens: tokens.context("nothing fits")?, items: items.context("nothing fits")? })
    }
}

fn load(model: &Path, threads: usize) -> anyhow::Result<(Encoder, Arc<CpuDevice>)> {
    let device = CpuDevice::new(DEVICE_BYTES, threads)?;
    Ok((
        Encoder::load_dtype(&Source::Folder(model.to_owned()), Arc::clone(&device), ComputeType::Auto)?,
        device,
    ))
}

/// Measures all policies, each `rounds` times in turn; the median counts.
pub async fn run(load: &Load<'_>, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let Fitting { tokens, items } = Fitting::new(load.model, load.threads)?;
    println!("  the limit has room for {tokens} tokens, or for {items} of the longest texts");
    let limit = format!("device.cpu.fault=above={LIMIT_BYTES}");
    let limited = Load { settings: std::slice::from_ref(&limit), ..*load };
    let oracle = Load { pass_tokens: tokens, ..limited };
    let small = Load { hint: Some(items), ..limited };
    let mut runs: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        runs[0].push(end_to_end::run(&oracle, None).await?);
        runs[1].push(end_to_end::run(&limited, None).await?);
        runs[2].push(end_to_end::run(&small, None).await?);
        let halving = halving_command(load)?;
        runs[3].push(end_to_end::run(load, Some(halving)).await?);
    }
    let names = [
        "an oracle that knows what fits",
        "vramq, learning it",
        "a fixed batch that always fits",
        "halving in place, from the full size each time",
    ];
    let medians = runs.map(|mut runs| {
        runs.sort_by(f64::total_cmp);
        runs[runs.len() / 2]
    });
    Ok(names
        .into_iter()
        .zip(medians)
        .map(|(policy, rate)| Row { policy, sentences_per_s: rate, ratio: rate / medians[0] })
        .collect())
}

fn halving_command(load: &Load<'_>) -> anyhow::Result<tokio::process::Command> {
    let mut command = tokio::process::Command::new(std::env::current_exe()?);
    command.args(["halving", "--url", load.url, "--queue", &end_to_end::queue()]);
    command.arg("--model").arg(load.model).args(["--threads", &load.threads.to_string()]);
    Ok(command)
}

/// The reference that does not know the limit: it runs a whole job, and halves it where that fails. Like a good worker, it
/// tokenises ahead of the pass, and publishes with confirms in flight.
pub async fn halve(url: &str, queue: &str, model: &Path, threads: usize) -> anyhow::Result<()> {
    let (engine, device) = load(model, threads)?;
    device.inject(format!("above={LIMIT_BYTES}").parse().map_err(anyhow::Error::msg)?);
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    channel.basic_qos(64, BasicQosOptions::default()).await?;
    let jobs = channel
        .basic_consume(queue.into(), "halving".into(), BasicConsumeOptions::default(), FieldTable::default())
        .await?;
    let engine = Arc::new(engine);
    let prepared = jobs.map(|delivery| {
        let engine = Arc::clone(&engine);
        async move {
            let delivery = delivery?;
            tokio::task::spawn_blocking(move || {
                let job: Job = codec::decode(&delivery.data, Encoding::Bincode)?;
                let items = engine.prepare(&job.inputs, &job.params)?;
                anyhow::Ok((delivery, job.model, items))
            })
            .await?
        }
    });
    let mut prepared = std::pin::pin!(prepared.buffered(4));
    while let Some(job) = prepared.next().await {
        let (delivery, model, items) = job?;
        let running = Arc::clone(&engine);
        let outputs = tokio::task::spawn_blocking(move || run_halving(&running, &items)).await??;
        let body = codec::encode(&Outputs { model, outputs }, Encoding::Bincode)?;
        let channel = channel.clone();
        tokio::spawn(async move { answer(&channel, &delivery, &body).await });
    }
    anyhow::bail!("the consumer ended")
}

async fn answer(channel: &lapin::Channel, delivery: &Delivery, body: &[u8]) -> anyhow::Result<()> {
    let reply_to = delivery.properties.reply_to().clone().unwrap_or_else(|| "".into());
    let properties = BasicProperties::default().with_delivery_mode(2).with_type("done".into());
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    let confirm = channel.basic_publish("".into(), reply_to, options, body, properties).await?;
    anyhow::ensure!(confirm.await?.is_ack(), "reply not confirmed");
    delivery.acker.ack(BasicAckOptions::default()).await?;
    Ok(())
}

fn run_halving(engine: &Encoder, items: &[Item]) -> anyhow::Result<Vec<Output>> {
    match engine.run(items) {
        Err(PassError::OutOfMemory { .. }) if items.len() > 1 => {
            let (first, second) = items.split_at(items.len() / 2);
            let mut outputs = run_halving(engine, first)?;
            outputs.extend(run_halving(engine, second)?);
            Ok(outputs)
        }
        result => Ok(result?),
    }
}

/// A skewed load: of ten texts, six are short, three of middle length, one is as long as the model takes.
pub fn skewed(texts: &[String]) -> Vec<String> {
    let words: Vec<_> = texts.iter().flat_map(|text| text.split_whitespace()).collect();
    let mut at = 0;
    let mut text = |length: usize| {
        let words: Vec<_> = words.iter().cycle().skip(at % words.len()).take(length).copied().collect();
        at += length;
        words.join(" ")
    };
    (0..texts.len()).map(|n| text([8, 12, 10, 16, 9, 11, 40, 60, 50, 300][n % 10])).collect()
}

/// The cost of an out-of-memory: the milliseconds that it adds to a job of two items on an idle worker, and the jobs of a backlog
/// that are answered before the job that was requeued.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Again {
    pub queue_type: &'static str,
    pub idle_ms: f64,
    pub overtaken_by: usize,
    pub backlog: usize,
}

/// Measures [`Again`] with the echo engine.
pub async fn again(url: &str, worker: &Path) -> anyhow::Result<Vec<Again>> {
    let mut rows = Vec::new();
    for queue_type in ["classic", "quorum"] {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..5 {
            for (fails, times) in times.iter_mut().enumerate() {
                times.push(end_to_end::round_trip(url, worker, queue_type, fails).await?);
            }
        }
        let [well, again] = times.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        });
        const BACKLOG: usize = 2000;
        let overtaken_by = end_to_end::overtaken(url, worker, queue_type, BACKLOG).await?;
        rows.push(Again { queue_type, idle_ms: again - well, overtaken_by, backlog: BACKLOG });
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_skewed() {
        let texts = vec!["one two three".to_owned(); 20];
        let lengths: Vec<_> = skewed(&texts).iter().map(|text| text.split_whitespace().count()).collect();
        assert_eq!((lengths[0], lengths[6], lengths[9], lengths.len()), (8, 40, 300, 20));
    }
}
