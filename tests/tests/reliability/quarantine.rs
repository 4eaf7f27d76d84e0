//! Quarantine: jobs that kill workers are dead-lettered, and jobs that were only held by the same workers are answered.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use vramq_schemas::topology::{jobs_queue, suspects_queue};
use vramq_schemas::{JobHeaders, Reason, ReplyKind};
use vramq_tests::blocked_device::BlockedDevice;
use vramq_tests::management::Depth;
use vramq_tests::on_queue_types;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(
    a_job_that_kills_workers_in_a_pass_is_dead_lettered,
    a_job_that_kills_workers_while_it_is_read_is_dead_lettered,
    a_job_whose_pass_never_ends_is_dead_lettered,
    jobs_of_workers_that_are_killed_from_outside_are_answered,
    a_forged_crash_count_affects_no_other_job,
    a_lost_connection_is_charged_to_no_job,
);

const NEIGHBOURS: usize = 50;

/// How many workers the default configuration lets a job crash.
const CRASHES_MAX: usize = 5;

/// Lost connections: enough to quarantine a job, if they counted as crashes.
const CUTS: usize = 3;

/// Runs a job that ends every worker at a failpoint, among jobs that do not, and checks how all of them end. A worker ends with `code`, if
/// it gets that far.
async fn killer(env: &mut TestEnv, drill: &str, code: Option<i32>, outcome: &str) -> Result<()> {
    for text in ["a failpoint is set", "it will run in isolation", "job dead-lettered", "device lost"] {
        env.announce(text);
    }
    env.worker(&[]).await?.drain().await?;
    let job = env.job("killer", ["x"])?;
    env.client.publish(MODEL, job.clone()).await?;
    publish_many(env, 1, NEIGHBOURS, |job| job).await?;

    let drill = format!("worker.drill={drill},job=killer");
    // The pass that hangs is given up soon, and no other one takes as long, also where the machine stands still for some seconds.
    let job_s = if code.is_some() { "worker.job_s=12" } else { "worker.job_s=60" };
    let (mut letters, mut replies) = (env.dead_letters().await?, env.replies().await?);
    let mut victims = 0;
    let (worker, letter) = loop {
        let worker = env.spawn_worker(&[&drill, job_s])?;
        tokio::select! {
            letter = letters.next() => break (worker, letter?),
            ended = worker.exited() => ensure!(ended? == code, "{}", worker.log.text()),
        }
        victims += 1;
        ensure!(victims <= CRASHES_MAX, "a {victims}th victim");
    };
    ensure!(victims == CRASHES_MAX, "{victims} victims");
    ensure!(letter.body == job.body && letter.id() == "killer", "{:?}", letter.properties);
    let dossier = letter.dead_letter()?;
    ensure!(dossier.reason == Reason::Crashed && dossier.error.contains("5 workers crashed"), "{dossier:?}");
    let headers = JobHeaders::read(&letter.headers())?;
    // A retried job would start with these headers.
    ensure!(headers.crashes == 2 && !headers.history.is_empty(), "{headers:?}");
    ensure!(headers.history.iter().all(|attempt| attempt.outcome == outcome), "{headers:?}");

    // Its caller has a failed reply, and all others have their results.
    let (mut answered, mut dossier) = (BTreeSet::new(), false);
    while answered.len() < NEIGHBOURS || !dossier {
        let reply = replies.next().await.with_context(|| format!("{} answered", answered.len()))?;
        match reply.kind()? {
            ReplyKind::Failed => {
                ensure!(reply.id() == "killer" && reply.failure()?.reason == Reason::Crashed);
                dossier = true;
            }
            _ => drop(answered.insert(reply.id().to_owned())),
        }
    }
    all_gone(env).await?;
    worker.drain().await?;
    while replies.next_within(vramq_tests::wait::SILENCE).await?.is_some() {}
    Ok(())
}

/// Waits until the broker has no job left, neither suspect nor other.
async fn all_gone(env: &TestEnv) -> Result<()> {
    env.vhost.until_empty(&[jobs_queue(MODEL), suspects_queue(MODEL)]).await
}

async fn a_job_that_kills_workers_in_a_pass_is_dead_lettered(env: &mut TestEnv) -> Result<()> {
    killer(env, "pass=crash", None, "worker-lost").await
}

async fn a_job_that_kills_workers_while_it_is_read_is_dead_lettered(env: &mut TestEnv) -> Result<()> {
    killer(env, "decode=crash", None, "worker-lost").await
}

async fn a_job_whose_pass_never_ends_is_dead_lettered(env: &mut TestEnv) -> Result<()> {
    killer(env, "pass=hang", Some(5), "device-lost").await
}

/// Workers that are killed from outside, again and again, with unacknowledged jobs: all jobs are answered.
async fn jobs_of_workers_that_are_killed_from_outside_are_answered(env: &mut TestEnv) -> Result<()> {
    env.announce("it will run in isolation");
    let mut device = BlockedDevice::new().await?;
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let mut replies = env.replies().await?;
    env.worker(&[]).await?.drain().await?;
    publish_many(env, 1, NEIGHBOURS, |job| job).await?;
    for _ in 0..CRASHES_MAX {
        ready(env, NEIGHBOURS as u64).await?;
        let worker = env.worker(&settings).await?;
        // Quarantined jobs are taken one at a time. A further death would dead-letter the first of them, rightly by all that workers can
        // know, so this death is the last.
        let suspected = until("jobs in hand, or suspects", async || {
            let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
            let held = depth.is_some_and(|depth| depth.unacked == NEIGHBOURS as u64);
            let suspected = worker.log.find("quarantined jobs run next").is_some();
            Ok((held || suspected).then_some(suspected))
        })
        .await?;
        if suspected {
            device.release();
            ReplyCounter::default().collect(&mut replies, NEIGHBOURS).await?;
            all_gone(env).await?;
            return worker.drain().await;
        }
        worker.signal(rustix::process::Signal::KILL)?;
        worker.exited().await?;
    }
    anyhow::bail!("{CRASHES_MAX} workers vanished, and nobody is suspected");
}

/// Waits until the broker has so many jobs to deliver.
async fn ready(env: &TestEnv, count: u64) -> Result<()> {
    until("all jobs back in the queue", async || {
        let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
        Ok(depth.filter(|depth| *depth == Depth { ready: count, unacked: 0 }))
    })
    .await
    .map(drop)
}

async fn a_lost_connection_is_charged_to_no_job(env: &mut TestEnv) -> Result<()> {
    for text in ["session lost", "will redeliver the unacknowledged jobs", "no session yet"] {
        env.announce(text);
    }
    let mut device = BlockedDevice::new().await?;
    let settings = device.settings();
    let worker = env.worker(&settings.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let mut replies = env.replies().await?;
    publish_many(env, 1, NEIGHBOURS, |job| job).await?;
    for cut in 0..CUTS {
        until("a session with jobs in hand, and its connection to cut", async || {
            let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
            let held = depth.is_some_and(|depth| depth.unacked > 0);
            let opened = worker.log.count("\"consuming\"") == cut + 1;
            Ok((opened && held && env.vhost.cut_worker(&worker.name).await? > 0).then_some(()))
        })
        .await?;
    }
    worker.sessions(CUTS + 1).await?;
    device.release();
    let mut counter = ReplyCounter::default();
    counter.collect(&mut replies, NEIGHBOURS).await?;
    all_gone(env).await?;
    for charge in ["workers were lost while they held the job", "adding one to its crashes"] {
        ensure!(worker.log.find(charge).is_none(), "{}", worker.log.text());
    }
    worker.drain().await?;
    counter.collect_rest(&mut replies).await?;
    Ok(())
}

/// A publisher forges a crash count: its job runs in isolation or not at all, and affects no other.
async fn a_forged_crash_count_affects_no_other_job(env: &mut TestEnv) -> Result<()> {
    for text in ["it will run in isolation", "job dead-lettered"] {
        env.announce(text);
    }
    let worker = env.worker(&[]).await?;
    for (id, crashes) in [("1", 1i64), ("2", 2), ("many", i64::from(u32::MAX))] {
        let job = env.job(id, ["x"])?.with_header("crashes", AMQPValue::LongLongInt(crashes)).as_worker();
        env.client.publish(MODEL, job).await?;
    }
    let mut ends = std::collections::BTreeMap::new();
    for reply in env.replies().await?.take(3).await? {
        ends.insert(reply.id().to_owned(), reply.kind()?);
    }
    let expected = [("1", ReplyKind::Done), ("2", ReplyKind::Done), ("many", ReplyKind::Failed)];
    ensure!(ends.iter().map(|(id, kind)| (id.as_str(), *kind)).eq(expected), "{ends:?}");
    ensure!(env.dead_letters().await?.next().await?.dead_letter()?.reason == Reason::Crashed);
    all_gone(env).await?;
    worker.drain().await
}
