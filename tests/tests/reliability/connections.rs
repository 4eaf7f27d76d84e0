//! A worker's two connections: one consumes, the other publishes. What goes over each, and what goes on while the broker reads from one
//! of them alone.

use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use vramq_schemas::control::Command;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::flow::{Flow, announce_lost_sessions, sessions_are_right};
use vramq_tests::node::Node;
use vramq_tests::operator::Operator;
use vramq_tests::rejections::counted_worker;
use vramq_tests::shared_device::ECHO_ITEM_BYTES;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_own_node, on_queue_types};

use super::broker_faults::{AT_ONCE, MEMORY};
use super::session::{all_is_settled, sessions};

on_queue_types!(the_loss_of_either_connection_ends_the_session);
on_one_setup!(nothing_is_published_on_the_connection_that_consumes);
on_own_node!(
    #[ignore = "takes half a minute"]
    acks_cancels_and_heartbeats_go_on_while_publishers_are_blocked,
);

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
            sessions(&worker, session).await
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

/// The broker reads nothing from the connection that publishes, for longer than it would wait for a heartbeat.
async fn acks_cancels_and_heartbeats_go_on_while_publishers_are_blocked(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    const HEARTBEAT: Duration = Duration::from_secs(3);
    env.announce("the broker blocks publishers");
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}?heartbeat={}", proxy.url(), HEARTBEAT.as_secs());
    let worker = env.worker(&[&url, "worker.heartbeat_s=1"]).await?;
    let unacked = async |count: u64| {
        until("acks", async || {
            let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
            Ok(depth.filter(|depth| depth.unacked == count && depth.ready == 0))
        })
        .await
        .map(drop)
    };
    // Answered, and not acknowledged: the worker does not know that the broker has the reply.
    proxy.hold_confirms();
    env.client.publish(MODEL, env.job("answered", ["x"])?).await?;
    ensure!(env.replies().await?.next().await?.id() == "answered");
    unacked(1).await?;
    node.ctl(&MEMORY.on).await?;
    worker.log.wait_for("the broker blocks publishers").await?;
    proxy.pass();
    unacked(0).await?;

    tokio::time::sleep(4 * HEARTBEAT).await;
    ensure!(worker.log.count("\"session open\"") == 1 && proxy.open() == 2, "{}", worker.log.text());
    worker.signal(Signal::TERM)?;
    until("no consumers", async || Ok(env.vhost.consumers().await?.is_empty().then_some(()))).await?;
    ensure!(worker.exited_within(AT_ONCE).await? == Some(0), "{}", worker.log.text());
    node.ctl(&MEMORY.off).await.map(drop)
}
