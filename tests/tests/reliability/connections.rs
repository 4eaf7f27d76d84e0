//! A worker's two connections: one consumes, the other publishes. What goes over each, and what the loss of one alone means.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_schemas::control::Command;
use vramq_tests::flow::{Flow, announce_lost_sessions, sessions_are_right};
use vramq_tests::operator::Operator;
use vramq_tests::rejections::counted_worker;
use vramq_tests::shared_device::ECHO_ITEM_BYTES;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

use super::session::all_is_settled;

on_queue_types!(the_loss_of_either_connection_ends_the_session, large_jobs_cost_no_session_on_a_slow_network);
on_one_setup!(nothing_is_published_on_the_connection_that_consumes);

const SLOTS: u64 = 16;

async fn the_loss_of_either_connection_ends_the_session(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let worker = env.worker(&[&format!("model.echo.slots_max={SLOTS}")]).await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    let connections = [worker.name.clone(), format!("{} publishing", worker.name)];
    for (session, connection) in (2..).zip(connections) {
        let cut = async {
            until("the connection", async || {
                Ok((env.vhost.cut_worker(&connection).await? == 1).then_some(()))
            })
            .await?;
            worker.sessions(session).await
        };
        flow.during(env, &mut replies, cut).await?;
        sessions_are_right(env, 1, SLOTS).await?;
    }
    all_is_settled(env).await?;
    worker.drain().await?;
    flow.counter.collect_rest(&mut replies).await
}

/// Neither replies, dead letters, another attempt, heartbeats nor answers to commands.
async fn nothing_is_published_on_the_connection_that_consumes(env: &mut TestEnv) -> Result<()> {
    for text in ["job dead-lettered", "out of memory", "made to fail"] {
        env.announce(text);
    }
    let fault = format!("device.cpu.fault=above={ECHO_ITEM_BYTES}");
    let (worker, proxy) = counted_worker(env, &["worker.heartbeat_s=1", &fault]).await?;
    let mut operator = Operator::new(env).await?;
    env.client.publish(MODEL, env.job("again", ["a", "b"])?).await?;
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("{")).await?;
    env.dead_letters().await?.next().await?;
    // The results of the one, the failure of the other.
    env.replies().await?.take(2).await?;
    operator.heartbeat(|heartbeat| heartbeat.worker == worker.name).await?;
    operator.ask(&worker, &Command::Pause).await?;
    worker.drain().await?;
    let accepted = proxy.accepted();
    ensure!(
        (accepted, proxy.publishing()) == (2, 1),
        "{accepted} connections, {} publish",
        proxy.publishing()
    );
    Ok(())
}

/// Bytes of a job, and of its reply: on their way for seven seconds, longer than the broker may be silent before it starts a consumer, and
/// longer than twice the time of a confirm.
const LARGE: usize = 1 << 20;
const SLOW_BYTES_PER_SECOND: u64 = 150_000;
const LARGE_JOBS: usize = 6;

/// The worker starts consumers and counts its queues while bodies are on their way.
async fn large_jobs_cost_no_session_on_a_slow_network(env: &mut TestEnv) -> Result<()> {
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    let worker = env.worker(&[&url, "broker.confirm_s=2"]).await?;
    proxy.slow(SLOW_BYTES_PER_SECOND);
    let text = "x".repeat(LARGE);
    for at in 0..LARGE_JOBS {
        env.client.publish(MODEL, env.job(&at.to_string(), [text.as_str()])?).await?;
    }
    let mut open: BTreeSet<_> = (0..LARGE_JOBS).map(|at| at.to_string()).collect();
    for reply in env.replies().await?.take(LARGE_JOBS).await? {
        ensure!(reply.kind()? == ReplyKind::Done && open.remove(reply.id()), "{} again", reply.id());
    }
    proxy.pass();
    worker.drain().await?;
    worker.log.counts("\"consuming\"", 1).await?;
    Ok(())
}
