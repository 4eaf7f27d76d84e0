//! Measures how long a caller's jobs wait while another caller publishes jobs whose reply queue is full.
//!
//! Each caller is a separate user of the broker. The other caller's reply queue rejects publishes (`reject-publish`).

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Context;
use base64::Engine as _;
use lapin::Channel;
use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use vramq_schemas::topology::{DELAYS_MS, delay_queue, jobs_queue};

use crate::end_to_end::{Caller, job, publish};
use crate::process;
use crate::share::{self, Link, MODEL, Setup};

/// Time between two jobs whose replies are rejected: 20 jobs in a second.
const EVERY: Duration = Duration::from_millis(50);

/// Number of measured jobs, each of one text, and the time between two of them. Together they take 20 s. A job that kept its slot
/// while its reply is rejected would keep it for all that time.
const JOBS: usize = 200;
const PAUSE: Duration = Duration::from_millis(100);

const FULL_QUEUE: &str = "bench-full-replies";
const OTHER_USER: &str = "bench-other";

/// How long jobs of one text wait.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    pub beside_refused: bool,
    pub p50_ms: f64,
    pub p95_ms: f64,
    /// The p95 divided by that of an undisturbed caller in the same run.
    pub over_undisturbed: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { beside_refused, p50_ms, p95_ms, over_undisturbed } = self;
        let load = if *beside_refused { "beside 20 jobs/s for a full reply queue" } else { "undisturbed" };
        write!(
            f,
            "  a job of one text {load:<39} p50 {p50_ms:>7.1} ms  p95 {p95_ms:>7.1} ms  {over_undisturbed:.2}x undisturbed"
        )
    }
}

/// Measures without the other caller, then with it. `management` is the broker's management API, which makes the other user.
pub async fn run(setup: &Setup<'_>, management: &str) -> anyhow::Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for beside_refused in [false, true] {
        let waits = waits(setup, management, beside_refused).await?;
        let quantile = |part: f64| waits[((waits.len() - 1) as f64 * part).round() as usize];
        let (p50_ms, p95_ms) = (quantile(0.5), quantile(0.95));
        let undisturbed = rows.first().map_or(p95_ms, |row| row.p95_ms);
        let row = Row { beside_refused, p50_ms, p95_ms, over_undisturbed: p95_ms / undisturbed };
        println!("{row}");
        rows.push(row);
    }
    Ok(rows)
}

/// Milliseconds that each job took, sorted.
async fn waits(setup: &Setup<'_>, management: &str, beside_refused: bool) -> anyhow::Result<Vec<f64>> {
    let mut link = Link::open(setup.url).await?;
    forget_delays(&link.channel).await?;
    let mut served = share::spawn(setup, 0, "off")?;
    process::wait_for_consumer(&link.connection, &jobs_queue(MODEL)).await?;
    let one = vec![setup.texts.first().context("no texts")?.clone()];
    let other = match beside_refused {
        true => Some(Other::start(setup.url, management, one.clone()).await?),
        false => None,
    };
    let mut clock = interval(PAUSE);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut waits = Vec::with_capacity(JOBS);
    for _ in 0..JOBS {
        clock.tick().await;
        let started = Instant::now();
        publish(&link.channel, &link.queue, &[job(MODEL, &one)], None, Caller::User(&link.user)).await?;
        link.count(1, &mut BTreeMap::new()).await?;
        waits.push(started.elapsed().as_secs_f64() * 1e3);
    }
    if let Some(other) = other {
        other.stop().await?;
    }
    // The other caller's remaining jobs are not needed.
    served.kill().await?;
    share::forget(&link.channel).await?;
    forget_delays(&link.channel).await?;
    link.channel.queue_delete(FULL_QUEUE.into(), QueueDeleteOptions::default()).await?;
    link.connection.close(200, "done".into()).await?;
    waits.sort_by(f64::total_cmp);
    Ok(waits)
}

async fn forget_delays(channel: &Channel) -> lapin::Result<()> {
    for ms in DELAYS_MS {
        channel.queue_delete(delay_queue(MODEL, ms).into(), QueueDeleteOptions::default()).await?;
    }
    Ok(())
}

/// The other caller, at work.
struct Other {
    link: Link,
    publishing: JoinHandle<anyhow::Result<()>>,
}

impl Other {
    /// Makes the user and its full reply queue, and publishes from now on.
    async fn start(url: &str, management: &str, texts: Vec<String>) -> anyhow::Result<Self> {
        let url = add_user(url, management).await?;
        let link = Link::open_beside(&url).await?;
        fill(&link.channel).await?;
        let (channel, user) = (link.channel.clone(), link.user.clone());
        let publishing = tokio::spawn(async move {
            let mut clock = interval(EVERY);
            clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let full = ShortString::from(FULL_QUEUE);
            loop {
                clock.tick().await;
                publish(&channel, &full, &[job(MODEL, &texts)], None, Caller::User(&user)).await?;
            }
        });
        Ok(Self { link, publishing })
    }

    async fn stop(self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.publishing.is_finished(), "the other caller stopped: the figures mean nothing");
        self.publishing.abort();
        // Wait for the publisher's end: the connection must not be closed during a publish.
        let _ = self.publishing.await;
        Ok(self.link.connection.close(200, "done".into()).await?)
    }
}

/// Declares the queue, and fills it until it rejects publishes.
async fn fill(channel: &Channel) -> anyhow::Result<()> {
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(1));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(FULL_QUEUE.into(), durable, arguments).await?;
    let deadline = Instant::now() + process::STALLED;
    loop {
        let options = BasicPublishOptions::default();
        let confirm =
            channel.basic_publish("".into(), FULL_QUEUE.into(), options, b"full", Default::default());
        if confirm.await?.await?.is_nack() {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "the reply queue takes everything");
    }
}

/// Makes the other user, who may do everything, and returns its address.
async fn add_user(url: &str, management: &str) -> anyhow::Result<String> {
    let (scheme, rest) = url.split_once("://").context("no scheme in the broker's address")?;
    let (_, host) = rest.split_once('@').context("no user in the broker's address")?;
    let (_, vhost) = host.split_once('/').context("no virtual host in the broker's address")?;
    let (api, rest) = management.split_once("://").context("no scheme in the management API's address")?;
    let (credentials, authority) = rest.split_once('@').context("no user in the management API's address")?;
    let authority = authority.trim_end_matches('/');
    let user = (
        format!("{api}://{authority}/api/users/{OTHER_USER}"),
        json!({ "password": OTHER_USER, "tags": "" }),
    );
    let permissions = (
        format!("{api}://{authority}/api/permissions/{vhost}/{OTHER_USER}"),
        json!({ "configure": ".*", "write": ".*", "read": ".*" }),
    );
    let authorization = format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(credentials));
    tokio::task::spawn_blocking(move || {
        for (address, body) in [user, permissions] {
            let request = ureq::put(&address)
                .set("authorization", &authorization)
                .set("content-type", "application/json");
            request.send_string(&body.to_string())?;
        }
        anyhow::Ok(())
    })
    .await?
    .context("make another user")?;
    Ok(format!("{scheme}://{OTHER_USER}:{OTHER_USER}@{host}"))
}
