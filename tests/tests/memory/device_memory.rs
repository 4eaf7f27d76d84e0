//! Device memory: memory of other processes, learned limits, pressure, and leaks.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_schemas::topology::{DELAYS_MS, bulk_queue, delay_queue, jobs_queue};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::shared_device::{ECHO_ITEM_BYTES as ITEM, SharedDevice};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{SILENCE, until};
use vramq_tests::worker::{Worker, command, run_to_end};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(a_job_waits_for_memory_that_others_hold, slots_follow_the_memory,);
on_one_setup!(
    a_restart_keeps_learned_limits,
    a_leak_is_reported_and_ends_in_a_restart,
    a_device_file_of_another_size_is_refused,
);

async fn a_job_waits_for_memory_that_others_hold(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", NOTHING_FITS] {
        env.announce(text);
    }
    let device = SharedDevice::new(1)?;
    let settings = device.settings();
    let worker = env.worker(&settings.each_ref().map(String::as_str)).await?;
    let held = (1 << 20) - ITEM / 2;
    let mut replies = env.replies().await?;
    for round in 0..ROUNDS_MAX {
        let stops = worker.log.count(NOTHING_FITS);
        device.hold(held)?;
        env.client
            .publish(MODEL, env.job("patient", items(1))?.with(|p| p.with_expiration("600000".into())))
            .await?;
        // It waits in a queue of the broker, not in the worker's hands.
        let is_delayed = until("the job in a queue", || where_it_waits(env, &worker, stops)).await?;
        until("the worker stops consuming", async || Ok(has_stopped(&worker, stops).then_some(()))).await?;
        env.vhost.until_unacked(&jobs_queue(MODEL), 0).await?;
        device.give_back(held);
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.kind());
        if is_delayed {
            ensure!(reply.reply()?.attempt >= 2, "{:?}", reply.reply());
            worker.drain().await?;
            ensure!(worker.total("exclusive").await? >= 1 && worker.total("delayed").await? >= 1);
            ensure!(worker.total("oom_foreign").await? == worker.total("requeued").await?);
            return Ok(());
        }
        eprintln!("round {round}: the worker had stopped consuming before the job's second attempt");
    }
    anyhow::bail!("in {ROUNDS_MAX} rounds no job was delayed")
}

/// What the worker says each time that it stops consuming for want of memory.
const NOTHING_FITS: &str = "not even one item fits";

/// Whether it has stopped more often than that.
fn has_stopped(worker: &Worker, stops: usize) -> bool {
    worker.log.count(NOTHING_FITS) > stops
}

/// Attempts to give the job its second attempt, alone on the device, before the worker notices that nothing fits.
const ROUNDS_MAX: usize = 10;

/// Whether the job is in a delay queue, or in the queue of a worker that does not consume.
async fn where_it_waits(env: &TestEnv, worker: &Worker, stops: usize) -> Result<Option<bool>> {
    for ms in DELAYS_MS {
        let depth = env.vhost.depth(&delay_queue(MODEL, ms)).await?;
        if depth.is_some_and(|depth| depth.ready == 1) {
            return Ok(Some(true));
        }
    }
    let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
    let is_left = depth.is_some_and(|depth| depth.ready == 1 && depth.unacked == 0);
    Ok((is_left && has_stopped(worker, stops)).then_some(false))
}

/// The prefetch that the broker has for all consumers of the worker: of its jobs, and of large ones.
async fn prefetch(env: &TestEnv) -> Result<u64> {
    let ours = [jobs_queue(MODEL), bulk_queue(MODEL)];
    let consumers = env.vhost.consumers().await?;
    Ok(consumers
        .iter()
        .filter(|consumer| ours.contains(&consumer.queue))
        .map(|consumer| consumer.prefetch)
        .sum())
}

async fn slots_follow_the_memory(env: &mut TestEnv) -> Result<()> {
    const AT_A_TIME: usize = 500;
    /// Several of the broker's counts.
    const COUNTED: Duration = Duration::from_secs(6);
    let device = SharedDevice::new(8)?;
    let mut settings = device.settings().to_vec();
    // Half a MiB each: 16 jobs.
    settings.push("model.echo.job_items=512".to_owned());
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let worker = env.worker(&settings).await?;
    let moved = Cell::new(false);
    let held = 5 << 20;
    let watch = async || {
        // It holds as many as keep the device busy, which it learns from the first.
        until("16 slots", async || Ok((prefetch(env).await? == 16).then_some(()))).await?;
        device.hold(held)?;
        until("6 slots", async || Ok((prefetch(env).await? == 6).then_some(()))).await?;
        // The broker counts every few seconds: its first counts may still be of the old consumer.
        let unacked =
            async || anyhow::Ok(env.vhost.depth(&jobs_queue(MODEL)).await?.map(|depth| depth.unacked));
        until("a count of the new consumer", async || Ok(unacked().await?.filter(|count| *count <= 6)))
            .await?;
        let counted = Instant::now();
        while counted.elapsed() < COUNTED {
            let count = unacked().await?;
            ensure!(count.is_none_or(|count| count <= 6), "{count:?} unacknowledged with 6 slots");
        }
        device.give_back(held);
        until("16 slots again", async || Ok((prefetch(env).await? == 16).then_some(()))).await
    };
    let watch = async || {
        let watched = watch().await;
        moved.set(true);
        watched
    };
    // Jobs flow all the while.
    let mut replies = env.replies().await?;
    let mut jobs = 0;
    let mut duplicates = 0;
    let mut flow = async || {
        while !moved.get() {
            let mut counter = ReplyCounter::default();
            publish_many(env, 2, AT_A_TIME, |job| job).await?;
            counter.collect(&mut replies, AT_A_TIME).await?;
            jobs += counter.jobs();
            duplicates += counter.duplicates();
        }
        anyhow::Ok(())
    };
    let (watched, flowed) = tokio::join!(watch(), flow());
    watched?;
    flowed?;
    worker.drain().await?;
    ensure!(duplicates == 0 && worker.total("jobs").await? == jobs as u64, "{duplicates} duplicates");
    // Two moves, one each way: it does not flap.
    worker.log.counts("slots changed", 2).await?;
    Ok(())
}

async fn a_restart_keeps_learned_limits(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    let state = tempfile::tempdir()?;
    let settings =
        [format!("worker.state={}", state.path().display()), format!("device.cpu.fault=above={}", 9 * ITEM)];
    let settings = settings.each_ref().map(String::as_str);
    let mut replies = env.replies().await?;
    for (round, expected) in [(0, true), (1, false)] {
        let worker = env.worker(&settings).await?;
        for at in 0..20 {
            let items = items(40);
            let id = format!("{round}-{at}");
            env.client.publish(MODEL, env.job(&id, items.clone())?).await?;
            answered_once(&mut replies, &id, &items).await?;
        }
        worker.drain().await?;
        let ran_out = worker.log.count("\"out of memory\"");
        ensure!((ran_out > 0) == expected, "round {round}: {ran_out} times out of memory");
    }
    let mut doctor = command("vramq-worker")?;
    doctor.arg("doctor").args(["--set", "model.echo.engine=echo"]);
    for setting in &settings {
        doctor.args(["--set", setting]);
    }
    let output = run_to_end(doctor).await?;
    ensure!(output.code == Some(0), "{output:?}");
    ensure!(output.stdout.contains("echo: passes") && output.stdout.contains("ran out"), "{}", output.stdout);
    Ok(())
}

/// The device leaks for some eight hundred jobs, one after the other.
const LEAKS_MAX: Duration = Duration::from_secs(480);

async fn a_leak_is_reported_and_ends_in_a_restart(env: &mut TestEnv) -> Result<()> {
    for text in ["made to fail", "device memory leaks", "nearly full"] {
        env.announce(text);
    }
    // Every pass keeps 128 bytes of a MiB; a tenth of it is what is tolerated, for a second.
    let settings = [
        "device.cpu.fault=leak=128",
        // Otherwise jobs that pile up during a standstill of the worker would share a pass, and a job would leak less than a pass does; or
        // passes would be made for jobs that are not counted yet, as the broker has not confirmed their replies.
        "model.echo.slots_max=1",
        "device.cpu.memory_mib=1",
        "device.cpu.reserve_mib=0",
        "worker.pressure_percent=10",
        "worker.pressure_s=1",
    ];
    let worker = env.worker(&settings).await?;
    let (mut replies, mut answered) = (env.replies().await?, BTreeSet::new());
    let load = async {
        for at in 0.. {
            if !worker.is_running() {
                return Ok(at);
            }
            env.client.publish(MODEL, env.job(&at.to_string(), items(1))?).await?;
            if let Some(reply) = replies.next_within(Duration::from_millis(200)).await? {
                answered.insert(reply.id().to_owned());
            }
        }
        anyhow::bail!("numbers end")
    };
    let published: usize = tokio::time::timeout(LEAKS_MAX, load).await.context("it never ends")??;
    ensure!(worker.exited().await? == Some(5), "{}", worker.log.text());
    let line = worker.log.wait_for("device memory leaks").await?;
    // The last job is not counted yet when its pass is.
    let per_job = line.field("bytes_per_job").and_then(serde_json::Value::as_u64);
    ensure!(per_job.is_some_and(|bytes| (120..=140).contains(&bytes)), "{}", line.text());
    println!("restarted after {published} jobs");
    // Nothing is lost: what is left waits for the next worker.
    let next = env.worker(&[]).await?;
    while answered.len() < published {
        let reply = replies.next().await;
        let reply = reply.with_context(|| format!("{} of {published} jobs are answered", answered.len()))?;
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.failure());
        answered.insert(reply.id().to_owned());
    }
    env.vhost.until_empty(&[jobs_queue(MODEL)]).await?;
    // The worker may have answered jobs that it did not acknowledge any more.
    while replies.next_within(SILENCE).await?.is_some() {}
    next.drain().await
}

async fn a_device_file_of_another_size_is_refused(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let device = SharedDevice::new(8)?;
    let mut settings = device.settings();
    settings[1] = "device.cpu.memory_mib=9".to_owned();
    let worker = env.spawn_worker(&settings.each_ref().map(String::as_str))?;
    ensure!(worker.exited().await? == Some(4));
    ensure!(worker.log.text().contains("same memory_mib"), "{}", worker.log.text());
    Ok(())
}
