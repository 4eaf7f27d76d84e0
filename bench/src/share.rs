//! Measures how workers share a backlog, and how long a job of one text waits beside a bulk load.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use lapin::options::ConfirmSelectOptions;
use lapin::types::ShortString;
use lapin::{Channel, Connection, ConnectionProperties, Consumer};
use serde::Serialize;
use tokio::process::Child;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{ReplyHeaders, ReplyKind};

use crate::end_to_end::{Caller, job, next, publish, replies};
use crate::path::forget_queues;
use crate::{process, programs};

pub(crate) const MODEL: &str = "bench-share";

/// Workers on one backlog.
const WORKERS: [usize; 3] = [1, 2, 4];

/// Texts of a job of the backlog. Jobs are small beside a pass, so that one job more or less hardly changes a share.
const JOB_TEXTS: usize = 8;

/// Texts of the backlog for devices that do not use the CPU. One device takes about 20 s for them. So each worker's last pass is a
/// small part of the time even with four workers.
const STEADY_TEXTS: usize = 8_000;
/// Items of their passes.
const STEADY_ITEMS_MAX: usize = 16;

/// Texts of a job of the bulk load: more than four passes, so it takes the way of large jobs.
const BULK_TEXTS: usize = 500;
/// Enough of them that they outlast the small jobs.
const BULK_JOBS: usize = 12;

/// Jobs of one text, each published when the one before is answered.
const SMALL_JOBS: usize = 40;

/// What is measured, and with what.
#[derive(Clone, Copy, Debug)]
pub struct Setup<'a> {
    pub url: &'a str,
    pub worker: &'a Path,
    pub model: &'a Path,
    pub texts: &'a [String],
    pub pass_tokens: usize,
}

/// So many workers on one backlog.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What runs the passes: the encoder on one thread of the CPU, or a device that leaves the CPU alone.
    pub on: &'static str,
    pub workers: usize,
    pub sentences_per_s: f64,
    /// The rate divided by that of one worker.
    pub over_one: f64,
    /// The smallest part of the jobs that a worker ran, times the number of workers: 1 is an equal share.
    pub least_share: f64,
}

/// How long jobs of one text wait.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Latency {
    pub beside_bulk: bool,
    pub p50_ms: f64,
    pub p95_ms: f64,
    /// The mean duration of all passes during the measurement.
    pub pass_ms: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { on, workers, sentences_per_s, over_one, least_share } = self;
        write!(
            f,
            "  {workers} worker(s) {on:<25} {sentences_per_s:>7.1} sentences/s  {over_one:.2}x one worker  \
             least share {least_share:.2} of an equal one"
        )
    }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { beside_bulk, p50_ms, p95_ms, pass_ms } = self;
        let load = if *beside_bulk { "beside a bulk load" } else { "on an idle worker" };
        let passes = p95_ms / pass_ms;
        write!(
            f,
            "  a job of one text {load:<18} p50 {p50_ms:>7.1} ms  p95 {p95_ms:>7.1} ms, {passes:.1} passes of {pass_ms:.1} ms"
        )
    }
}

/// The throughput of 1, 2 and 4 workers with the encoder. The figures of one worker are the reference, in the same run.
pub async fn throughput(setup: &Setup<'_>) -> anyhow::Result<Vec<Row>> {
    by_number_of_workers("of 1 thread", setup.url, setup.texts, |at| spawn(setup, at, "off")).await
}

/// The same with a device that takes a fixed time for each text and leaves the CPU alone, as a GPU does: what sharing
/// itself costs shows also on a machine with fewer cores than workers.
pub async fn beside_the_cpu(setup: &Setup<'_>, python: &Path) -> anyhow::Result<Vec<Row>> {
    let program = programs::command(python, "steady")?;
    let package = std::path::absolute("python")?;
    let start = |at: usize| {
        let settings = [
            format!("model.{MODEL}.engine=process"),
            format!("model.{MODEL}.command={program}"),
            format!("model.{MODEL}.env.PYTHONPATH={}", package.display()),
            format!("model.{MODEL}.instances=1"),
            format!("model.{MODEL}.items_max={STEADY_ITEMS_MAX}"),
            format!("worker.name=share-{at}"),
        ];
        process::spawn_worker(setup.url, setup.worker, &settings)
    };
    let texts: Vec<_> = setup.texts.iter().cycle().take(STEADY_TEXTS).cloned().collect();
    by_number_of_workers("of a device of their own", setup.url, &texts, start).await
}

async fn by_number_of_workers(
    on: &'static str,
    url: &str,
    texts: &[String],
    start: impl Fn(usize) -> anyhow::Result<Child>,
) -> anyhow::Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for workers in WORKERS {
        let (sentences_per_s, least) = backlog(url, texts, workers, &start).await?;
        let one = rows.first().map_or(sentences_per_s, |row| row.sentences_per_s);
        let (over_one, least_share) = (sentences_per_s / one, least * workers as f64);
        let row = Row { on, workers, sentences_per_s, over_one, least_share };
        println!("{row}");
        rows.push(row);
    }
    Ok(rows)
}

/// Sentences per second of so many workers on one backlog, and the smallest part of the jobs that one of them ran.
async fn backlog(
    url: &str,
    texts: &[String],
    workers: usize,
    start: &impl Fn(usize) -> anyhow::Result<Child>,
) -> anyhow::Result<(f64, f64)> {
    let mut link = Link::open(url).await?;
    let mut served = (0..workers).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    process::wait_for_consumer(&link.connection, &jobs_queue(MODEL)).await?;
    let jobs: Vec<_> = texts.chunks(JOB_TEXTS).map(|texts| job(MODEL, texts)).collect();
    // Once each worker has answered, all are loaded and warm, and know what a job costs.
    let mut warm = BTreeMap::new();
    while warm.len() < workers {
        publish(&link.channel, &link.queue, &jobs[..jobs.len().min(4 * workers)], None, Caller::Unknown)
            .await?;
        link.count(jobs.len().min(4 * workers), &mut warm).await?;
    }
    let mut by_worker = BTreeMap::new();
    let started = Instant::now();
    publish(&link.channel, &link.queue, &jobs, None, Caller::Unknown).await?;
    link.count(jobs.len(), &mut by_worker).await?;
    let seconds = started.elapsed().as_secs_f64();
    for child in &mut served {
        process::stop(child).await?;
    }
    link.connection.close(200, "done".into()).await?;
    let least = if by_worker.len() < workers { 0 } else { by_worker.values().copied().min().unwrap_or(0) };
    Ok((texts.len() as f64 / seconds, least as f64 / jobs.len() as f64))
}

/// How long jobs of one text wait on a worker that has nothing else to do, and beside a bulk load.
pub async fn latencies(setup: &Setup<'_>) -> anyhow::Result<Vec<Latency>> {
    let mut latencies = Vec::new();
    for beside_bulk in [false, true] {
        let latency = latency(setup, beside_bulk).await?;
        println!("{latency}");
        latencies.push(latency);
    }
    Ok(latencies)
}

async fn latency(setup: &Setup<'_>, beside_bulk: bool) -> anyhow::Result<Latency> {
    let (mut link, mut of_bulk) = (Link::open(setup.url).await?, Link::open_beside(setup.url).await?);
    let port = process::free_port()?;
    let mut served = spawn(setup, 0, &format!("127.0.0.1:{port}"))?;
    process::wait_for_consumer(&link.connection, &jobs_queue(MODEL)).await?;
    if beside_bulk {
        let texts: Vec<_> = setup.texts.iter().cycle().take(BULK_TEXTS).cloned().collect();
        let jobs = vec![job(MODEL, &texts); BULK_JOBS];
        publish(&of_bulk.channel, &of_bulk.queue, &jobs, None, Caller::Unknown).await?;
        // The first part of a reply shows that the load is under way.
        next(&mut of_bulk.incoming).await?;
    }
    let one = setup.texts.first().context("no texts")?.clone();
    let before = Passes::of(port).await?;
    let mut waits = Vec::with_capacity(SMALL_JOBS);
    for _ in 0..SMALL_JOBS {
        let started = Instant::now();
        let small = [job(MODEL, std::slice::from_ref(&one))];
        publish(&link.channel, &link.queue, &small, None, Caller::User(&link.user)).await?;
        link.count(1, &mut BTreeMap::new()).await?;
        waits.push(started.elapsed().as_secs_f64() * 1e3);
    }
    let after = Passes::of(port).await?;
    if beside_bulk {
        let done = of_bulk.done_by_now();
        anyhow::ensure!(
            done < BULK_JOBS,
            "the bulk load ended before the small jobs: the figures mean nothing"
        );
    }
    // The rest of the bulk load is not needed.
    served.kill().await?;
    forget(&link.channel).await?;
    of_bulk.connection.close(200, "done".into()).await?;
    link.connection.close(200, "done".into()).await?;
    waits.sort_by(f64::total_cmp);
    let quantile = |part: f64| waits[((waits.len() - 1) as f64 * part).round() as usize];
    let pass_ms = (after.seconds - before.seconds) * 1e3 / (after.count - before.count).max(1.0);
    Ok(Latency { beside_bulk, p50_ms: quantile(0.5), p95_ms: quantile(0.95), pass_ms })
}

pub(crate) fn spawn(setup: &Setup<'_>, number: usize, http: &str) -> anyhow::Result<Child> {
    let settings = [
        format!("model.{MODEL}.path={}", setup.model.display()),
        format!("model.{MODEL}.pass_tokens={}", setup.pass_tokens),
        "device.cpu.threads=1".to_owned(),
        format!("worker.name=share-{number}"),
        format!("http.listen={http}"),
    ];
    process::spawn_worker(setup.url, setup.worker, &settings)
}

pub(crate) async fn forget(channel: &Channel) -> anyhow::Result<()> {
    Ok(forget_queues(channel, MODEL).await?)
}

/// Passes that a worker has run, and their time.
struct Passes {
    count: f64,
    seconds: f64,
}

impl Passes {
    async fn of(port: u16) -> anyhow::Result<Self> {
        let of = |name| process::metric(port, name);
        let (count, seconds) = ("vramq_pass_duration_seconds_count", "vramq_pass_duration_seconds_sum");
        Ok(Self { count: of(count).await?, seconds: of(seconds).await? })
    }
}

/// A connection of a publisher, with a reply queue to itself.
pub(crate) struct Link {
    pub(crate) connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) user: String,
    pub(crate) queue: ShortString,
    incoming: Consumer,
}

impl Link {
    /// Without queues that an earlier run left.
    pub(crate) async fn open(url: &str) -> anyhow::Result<Self> {
        let link = Self::open_beside(url).await?;
        forget(&link.channel).await?;
        Ok(link)
    }

    pub(crate) async fn open_beside(url: &str) -> anyhow::Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let (queue, incoming) = replies(&channel).await?;
        let address: lapin::uri::AMQPUri = url.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
        Ok(Self { connection, channel, user: address.authority.userinfo.username, queue, incoming })
    }

    /// Takes replies until so many jobs are answered; which worker answered how many.
    pub(crate) async fn count(
        &mut self,
        jobs: usize,
        by_worker: &mut BTreeMap<String, usize>,
    ) -> anyhow::Result<()> {
        let mut done = 0;
        while done < jobs {
            let reply =
                next(&mut self.incoming).await.with_context(|| format!("stalled after {done} of {jobs}"))?;
            let kind = reply.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str()));
            match kind {
                Some(ReplyKind::Part) => {}
                Some(ReplyKind::Done) => {
                    done += 1;
                    let headers = reply.properties.headers().clone().unwrap_or_default();
                    *by_worker.entry(ReplyHeaders::read(&headers)?.worker).or_default() += 1;
                }
                kind => anyhow::bail!("a reply of type {kind:?}"),
            }
        }
        Ok(())
    }

    /// How many jobs are answered of those whose replies are here.
    fn done_by_now(&mut self) -> usize {
        use futures_util::{FutureExt as _, StreamExt as _};
        let mut done = 0;
        while let Some(Some(Ok(reply))) = self.incoming.next().now_or_never() {
            let kind = reply.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str()));
            done += usize::from(kind == Some(ReplyKind::Done));
        }
        done
    }
}
