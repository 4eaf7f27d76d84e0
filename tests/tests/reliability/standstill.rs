//! Workers that stand still for a while, as on a paused machine: if the broker kept their session, they keep it, too.

use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use tokio::time::Instant;
use vramq_schemas::ReplyKind;
use vramq_tests::on_one_setup;
use vramq_tests::test_env::{MODEL, TestEnv};

on_one_setup!(a_standstill_that_the_broker_tolerates_costs_no_session);

/// Longer than any wait for an answer of the broker, and than one AMQP heartbeat: a client that took its own standstill for the broker's
/// silence would give up the session. Shorter than two heartbeats, which the broker tolerates to miss; on a busy machine the standstill
/// ends late.
const STANDSTILL: Duration = Duration::from_secs(50);

/// Seconds between AMQP heartbeats.
const AMQP_HEARTBEAT_S: u32 = 30;

/// Several workers, because the broker's last word before a standstill is up to half a heartbeat old, by chance.
const WORKERS: usize = 3;

async fn a_standstill_that_the_broker_tolerates_costs_no_session(env: &mut TestEnv) -> Result<()> {
    const JOBS: usize = 30;
    let url = format!("broker.url={}?heartbeat={AMQP_HEARTBEAT_S}", env.url);
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        // Heartbeats each second: the broker has heard from each of its connections a moment ago.
        workers.push(env.worker(&["worker.heartbeat_s=1", &url]).await?);
    }
    let stand = Instant::now();
    for worker in &workers {
        worker.signal(Signal::STOP)?;
    }
    for at in 0..JOBS {
        env.client.publish(MODEL, env.job(&at.to_string(), ["x"])?).await?;
    }
    // However long the publishing took.
    tokio::time::sleep_until(stand + STANDSTILL).await;
    for worker in &workers {
        worker.signal(Signal::CONT)?;
    }
    let mut replies = env.replies().await?;
    for reply in replies.take(JOBS).await? {
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
    }
    for worker in &workers {
        worker.answers("/livez", 200).await?;
        worker.log.wait_for("the process stood still").await?;
        worker.log.counts("\"session open\"", 1).await?;
        ensure!(worker.log.count("session lost") == 0, "{}", worker.log.text());
    }
    Ok(())
}
