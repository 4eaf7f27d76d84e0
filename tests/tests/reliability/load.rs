//! Under load, also when a worker ends meanwhile, every job ends once and none is lost. Lost connections: `connections.rs`, `session.rs`.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::at_rest::comes_to_rest;
use vramq_tests::blocked_device::BlockedDevice;
use vramq_tests::flow::announce_lost_sessions;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::Worker;
use vramq_tests::{on_all_setups, on_queue_types};

/// Many times what two workers hold.
const JOBS: usize = 2000;

/// Few enough that a backlog stays in the queue.
const SLOTS: &str = "model.echo.slots_max=66";
/// All but the one for large jobs.
const HELD: u64 = 65;

on_all_setups!(two_workers_answer_every_job_once);
on_queue_types!(
    a_killed_workers_jobs_are_answered_by_another,
    a_worker_killed_in_full_flow_loses_nothing,
    a_drained_worker_loses_nothing_and_repeats_nothing,
    a_deleted_queue_comes_back,
);

async fn two_workers_answer_every_job_once(env: &mut TestEnv) -> Result<()> {
    let workers = [env.worker(&[SLOTS]).await?, env.worker(&[SLOTS]).await?];
    let mut replies = env.replies().await?;
    let mut counter = ReplyCounter::default();
    let (published, collected) =
        tokio::join!(publish_many(env, 4, JOBS, |job| job), counter.collect(&mut replies, JOBS));
    published?;
    collected?;
    for worker in &workers {
        worker.drain().await?;
    }
    counter.collect_rest(&mut replies).await?;
    ensure!((counter.jobs(), counter.duplicates()) == (JOBS, 0), "{} duplicates", counter.duplicates());
    ensure!(counter.by_worker.len() == 2, "one worker did nothing: {:?}", counter.by_worker);
    Ok(())
}

/// A worker on a device that runs nothing yet.
async fn waiting_worker(env: &mut TestEnv, device: &BlockedDevice) -> Result<Worker> {
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).chain([SLOTS]).collect();
    env.worker(&settings).await
}

/// Publishes jobs that cannot run yet, until every worker's slots are full.
async fn hold_jobs(env: &TestEnv, workers: u64) -> Result<()> {
    publish_many(env, 2, JOBS, |job| job).await?;
    env.vhost.until_unacked(&jobs_queue(MODEL), workers * HELD).await
}

async fn a_killed_workers_jobs_are_answered_by_another(env: &mut TestEnv) -> Result<()> {
    let mut device = BlockedDevice::new().await?;
    let (killed, other) = (waiting_worker(env, &device).await?, waiting_worker(env, &device).await?);
    let mut replies = env.replies().await?;
    hold_jobs(env, 2).await?;
    killed.signal(Signal::KILL)?;
    ensure!(killed.exited().await?.is_none(), "it had ended before");

    device.release();
    let mut counter = ReplyCounter::default();
    counter.collect(&mut replies, JOBS).await?;
    // The killed one may have answered jobs that it did not acknowledge.
    comes_to_rest(env, &other).await?;
    other.drain().await?;
    counter.collect_rest(&mut replies).await?;
    // What the killed one had answered but not acknowledged may come twice, but no more than it held.
    println!("{} duplicates of {HELD} jobs in hand", counter.duplicates());
    ensure!(counter.duplicates() <= HELD as usize, "{} duplicates", counter.duplicates());
    ensure!(counter.by_worker[&other.name] >= JOBS - HELD as usize);
    Ok(())
}

async fn a_worker_killed_in_full_flow_loses_nothing(env: &mut TestEnv) -> Result<()> {
    let (killed, other) = (env.worker(&[SLOTS]).await?, env.worker(&[SLOTS]).await?);
    let mut replies = env.replies().await?;
    let mut counter = ReplyCounter::default();
    let mut flow = async || {
        counter.collect(&mut replies, JOBS / 4).await?;
        killed.signal(Signal::KILL)?;
        counter.collect(&mut replies, JOBS).await
    };
    let (published, collected) = tokio::join!(publish_many(env, 4, JOBS, |job| job), flow());
    published?;
    collected?;
    ensure!(killed.exited().await?.is_none(), "it had ended before");
    // The killed one may have answered jobs that it did not acknowledge.
    comes_to_rest(env, &other).await?;
    other.drain().await?;
    counter.collect_rest(&mut replies).await?;
    println!("{} duplicates, {:?}", counter.duplicates(), counter.by_worker);
    ensure!(counter.duplicates() <= HELD as usize, "{} duplicates", counter.duplicates());
    Ok(())
}

async fn a_drained_worker_loses_nothing_and_repeats_nothing(env: &mut TestEnv) -> Result<()> {
    let mut device = BlockedDevice::new().await?;
    let (drained, other) = (waiting_worker(env, &device).await?, waiting_worker(env, &device).await?);
    let mut replies = env.replies().await?;
    hold_jobs(env, 2).await?;
    // What the broker has sent need not have come to the worker.
    let held = |figures: &Figures| figures.sum("vramq_jobs_in_hand") as u64 == HELD;
    figures(&drained, "its share of the jobs", held).await?;
    drained.signal(Signal::TERM)?;
    let line = drained.log.wait_for("\"draining\"").await?;
    ensure!(line.field("jobs").and_then(|n| n.as_u64()) == Some(HELD), "{}", line.text());

    device.release();
    ensure!(drained.exited().await? == Some(0));
    let mut counter = ReplyCounter::default();
    counter.collect(&mut replies, JOBS).await?;
    other.drain().await?;
    counter.collect_rest(&mut replies).await?;
    ensure!(counter.duplicates() == 0, "{} duplicates", counter.duplicates());
    ensure!(counter.by_worker[&drained.name] >= HELD as usize, "{:?}", counter.by_worker);
    Ok(())
}

async fn a_deleted_queue_comes_back(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let worker = env.worker(&[]).await?;
    env.vhost.delete_queue(&jobs_queue(MODEL)).await?;
    worker.sessions(2).await?;
    publish_many(env, 1, 1, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, 1).await
}
