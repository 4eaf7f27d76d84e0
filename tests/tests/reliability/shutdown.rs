//! How a worker ends: drained, by a second signal, out of time, or by a signal before it consumed.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tokio::net::TcpListener;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::blocked_device::BlockedDevice;
use vramq_tests::metrics::figures;
use vramq_tests::ports::ClosedPort;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{SILENCE, until};
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

/// Far longer than a test waits. A worker that ended by these deadlines, and not by its signal, would end too late.
const LONG_DRAIN: &str = "worker.drain_s=600";
const LONG_CONNECT: &str = "broker.connect_s=600";

/// How long a mailbox is looked at before the other one is.
const SHORT: Duration = Duration::from_millis(20);

/// Jobs that a worker holds at the same time, and rounds of the test.
const AT_ONCE_IN_HAND: usize = 200;
const ROUNDS: usize = 5;

on_queue_types!(
    an_idle_worker_ends_at_once,
    a_second_signal_ends_a_drain,
    a_drain_has_a_deadline,
    a_drain_does_not_wait_for_the_pass_of_another_process,
    a_drain_leaves_no_answered_job
);
on_one_setup!(a_signal_before_a_connection_stands, a_signal_while_the_broker_is_away);

async fn an_idle_worker_ends_at_once(env: &mut TestEnv) -> Result<()> {
    for signal in [Signal::TERM, Signal::INT] {
        let worker = env.worker(&[LONG_DRAIN]).await?;
        worker.signal(signal)?;
        ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
        env.vhost.workers_are_disconnected().await?;
    }
    Ok(())
}

/// A worker with a job that stays unacknowledged because its pass never ends.
async fn holds_a_job(env: &mut TestEnv, settings: &[&str]) -> Result<Worker> {
    env.announce("a failpoint is set");
    let worker = env.worker(&[&["worker.drill=pass=hang,job=held"], settings].concat()).await?;
    env.client.publish(MODEL, env.job("held", ["x"])?).await?;
    // A job that the broker has sent need not have come to the worker, and one without a pass would be requeued.
    figures(&worker, "a pass of the job", |figures| figures.sum("vramq_admitted_bytes_total") > 0).await?;
    Ok(worker)
}

/// The job that it held is answered by the next worker.
async fn is_served_by_the_next(env: &mut TestEnv) -> Result<()> {
    let next = env.worker(&[]).await?;
    let reply = env.replies().await?.next().await?;
    ensure!(reply.id() == "held" && reply.reply()?.worker == next.name);
    next.drain().await
}

async fn a_second_signal_ends_a_drain(env: &mut TestEnv) -> Result<()> {
    env.announce("asked to stop twice");
    env.announce("session ended: the broker will redeliver the unacknowledged jobs");
    let worker = holds_a_job(env, &[LONG_DRAIN]).await?;
    worker.signal(Signal::TERM)?;
    worker.log.wait_for("\"draining\"").await?;
    ensure!(worker.is_running(), "it did not wait for its job");
    worker.signal(Signal::INT)?;
    ensure!(worker.exited().await? == Some(1));
    is_served_by_the_next(env).await
}

async fn a_drain_has_a_deadline(env: &mut TestEnv) -> Result<()> {
    env.announce("drain deadline passed");
    env.announce("session ended: the broker will redeliver the unacknowledged jobs");
    let worker = holds_a_job(env, &["worker.drain_s=1"]).await?;
    worker.signal(Signal::TERM)?;
    // Less than the deadline that it has if nobody sets one.
    ensure!(worker.exited_within(Duration::from_secs(20)).await? == Some(1));
    is_served_by_the_next(env).await
}

/// Another process keeps the device to itself for longer than the drain takes. No crash is counted for the job.
async fn a_drain_does_not_wait_for_the_pass_of_another_process(env: &mut TestEnv) -> Result<()> {
    let device = BlockedDevice::new().await?;
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).chain(["worker.drain_s=20"]).collect();
    let worker = env.worker(&settings).await?;
    env.client.publish(MODEL, env.job("held", ["x"])?).await?;
    figures(&worker, "a pass of the job", |figures| figures.sum("vramq_admitted_bytes_total") > 0).await?;
    worker.drain().await?;
    let next = env.worker(&[]).await?;
    let reply = env.replies().await?.next().await?;
    ensure!(reply.id() == "held" && reply.reply()?.worker == next.name);
    ensure!(next.log.find("workers were lost while they held the job").is_none(), "{}", next.log.text());
    drop(device);
    next.drain().await
}

async fn a_signal_before_a_connection_stands(env: &mut TestEnv) -> Result<()> {
    // Accepts, and says nothing more.
    let mute = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("broker.url=amqp://guest:guest@{}/%2f", mute.local_addr()?);
    let worker = env.spawn_worker(&[&url, LONG_CONNECT])?;
    let _connection = mute.accept().await?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}

async fn a_signal_while_the_broker_is_away(env: &mut TestEnv) -> Result<()> {
    env.announce("no session yet");
    let gone = ClosedPort::new()?;
    let url = format!("broker.url=amqp://guest:guest@{}/%2f", gone.address);
    let worker = env.spawn_worker(&[&url, LONG_CONNECT])?;
    worker.log.wait_for("no session yet").await?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}

/// What is answered is acknowledged, also what was answered in the last moment; what is not is still there.
async fn a_drain_leaves_no_answered_job(env: &mut TestEnv) -> Result<()> {
    for round in 0..ROUNDS {
        let worker = env.worker(&[]).await?;
        let mut replies = env.replies().await?;
        let ids = (0..AT_ONCE_IN_HAND).map(|at| format!("{round}.{at}"));
        let jobs = ids.map(|id| env.job(&id, ["x"])).collect::<Result<_>>()?;
        env.client.publish_all(MODEL, jobs).await?;
        let mut ended = BTreeSet::from([replies.next().await?.id().to_owned()]);
        worker.drain().await?;
        let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
        let all = until("each job, or its reply", async || {
            while let Some(reply) = replies.next_within(SHORT).await? {
                ensure!(ended.insert(reply.id().to_owned()), "job {} was answered twice", reply.id());
            }
            while let Some(job) = queue.next_within(SHORT).await? {
                ensure!(
                    ended.insert(job.id().to_owned()),
                    "job {} was answered, and is there again",
                    job.id()
                );
            }
            Ok((ended.len() >= AT_ONCE_IN_HAND).then_some(()))
        });
        all.await.with_context(|| format!("round {round}"))?;
        ensure!(ended.len() == AT_ONCE_IN_HAND, "{} of {AT_ONCE_IN_HAND} jobs", ended.len());
        // None of them is there a second time.
        ensure!(replies.next_within(SILENCE).await?.is_none(), "a job was answered twice");
        ensure!(queue.next_within(SILENCE).await?.is_none(), "a job was answered, and is there again");
    }
    Ok(())
}
