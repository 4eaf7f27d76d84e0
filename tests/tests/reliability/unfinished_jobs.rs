//! Unfinished jobs are requeued uncharged: by a drain, and when the device is sick.

use std::fs::File;

use anyhow::{Result, ensure};
use rustix::process::Signal;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{JobHeaders, Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::bert::fixture;
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::flow::announce_lost_sessions;
use vramq_tests::job::Message;
use vramq_tests::metrics::figures;
use vramq_tests::proxy::Cut;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::SILENCE;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    a_drain_requeues_a_large_job,
    a_job_that_is_held_for_too_long_is_requeued_and_continued,
    a_sick_device_costs_no_job,
    a_device_that_stays_sick_ends_the_worker,
    a_bad_job_is_distinguished_from_a_sick_device,
    a_pass_that_never_ends_costs_no_job,
    a_pass_that_never_ends_is_charged_to_its_own_jobs,
    a_pass_of_a_lost_session_is_charged_to_its_own_jobs,
    a_pass_that_waits_for_another_process_is_charged_to_no_job,
);
on_one_setup!(a_session_that_begins_while_the_device_is_sick_does_not_consume);

const JOBS: usize = 30;

/// A real model on one thread, one text a pass: a job of so many texts takes seconds, and a part goes out after some thousand.
const TEXTS: usize = 60_000;
const ONE_BY_ONE: [&str; 2] = ["model.tiny.pass_tokens=1", "device.cpu.threads=1"];

fn tiny() -> String {
    format!("model.tiny.path={}", fixture("tiny-long"))
}

async fn publish_large(env: &TestEnv) -> Result<()> {
    let items = (0..TEXTS).map(|at| format!("the {at} the {at} the {at}"));
    env.client.publish("tiny", Message::texts(env.setup.encoding, "tiny", "large", REPLIES, items)?).await
}

/// Takes the replies with all items from `offset` on: each item once, in order, in the first attempt. The number of replies.
async fn rest(replies: &mut Mailbox, offset: usize) -> Result<usize> {
    let (mut next, mut parts) = (offset, 0);
    loop {
        let reply = replies.next().await?;
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == next, "{headers:?} after {next}");
        ensure!(headers.attempt == 0, "an attempt was counted: {headers:?}");
        next += reply.outputs()?.outputs.len();
        parts += 1;
        if reply.kind()? == ReplyKind::Done {
            ensure!(next == TEXTS, "{next} items");
            return Ok(parts);
        }
    }
}

async fn a_drain_requeues_a_large_job(env: &mut TestEnv) -> Result<()> {
    let model = tiny();
    let first = env.spawn_bare_worker(&[&[model.as_str()], &ONE_BY_ONE[..]].concat())?;
    first.consuming().await?;
    publish_large(env).await?;
    let mut replies = env.replies().await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.reply()?.offset == 0, "{:?}", part.reply());
    first.signal(Signal::TERM)?;
    ensure!(first.exited().await? == Some(0), "{}", first.log.text());
    ensure!(first.total("handed_over").await? == 1 && first.total("recomputed").await? == 0);

    let second = env.spawn_bare_worker(&[model.as_str()])?;
    second.consuming().await?;
    rest(&mut replies, part.reply()?.items as usize).await?;
    second.drain().await?;
    let computed = first.total("items").await? + second.total("items").await?;
    ensure!(computed == TEXTS as u64, "{computed} items computed");
    Ok(())
}

/// A job that takes longer than `job_s`: what is finished goes out each time, and nothing is computed again.
async fn a_job_that_is_held_for_too_long_is_requeued_and_continued(env: &mut TestEnv) -> Result<()> {
    let model = tiny();
    let settings = [&[model.as_str(), "worker.job_s=1"], &ONE_BY_ONE[..]].concat();
    let worker = env.spawn_bare_worker(&settings)?;
    worker.consuming().await?;
    publish_large(env).await?;
    rest(&mut env.replies().await?, 0).await?;
    worker.drain().await?;
    ensure!(worker.total("handed_over").await? > 0, "it was done in a second");
    ensure!(worker.total("items").await? == TEXTS as u64 && worker.total("recomputed").await? == 0);
    Ok(())
}

async fn a_sick_device_costs_no_job(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "pass failed", "health probe"] {
        env.announce(text);
    }
    // The pass of all, the first one's alone, and the health probe fail; the next probe succeeds.
    let worker = env.worker(&["worker.drill=pass=fail,times=3", "model.other.engine=echo"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    // A pass of the other model would be one of the three that fail, and then the probe would succeed at once.
    worker.log.wait_for("health probe failed").await?;
    let others = (JOBS..2 * JOBS).map(|id| {
        let texts = [format!("text {id}")];
        Message::texts(env.setup.encoding, "other", &id.to_string(), REPLIES, texts)
    });
    env.client.publish_all("other", others.collect::<Result<_>>()?).await?;
    let mut counter = ReplyCounter::default();
    let mut replies = env.replies().await?;
    counter.collect(&mut replies, 2 * JOBS).await?;
    worker.log.wait_for("health probe succeeded").await?;
    worker.drain().await?;
    counter.collect_rest(&mut replies).await?;
    ensure!(counter.duplicates() == 0 && worker.total("dead").await? == 0);
    ensure!(worker.total("handed_over").await? > 0);
    Ok(())
}

async fn a_session_that_begins_while_the_device_is_sick_does_not_consume(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    for text in ["a failpoint is set", "pass failed", "health probe"] {
        env.announce(text);
    }
    let proxy = env.proxy().await?;
    // The next two probes fail, too, so the device is sick for seconds. Between two sessions no probe runs.
    let url = format!("broker.url={}", proxy.url());
    let worker = env.worker(&[&url, "worker.drill=pass=fail,times=5"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    worker.log.wait_for("health probe failed").await?;
    ensure!(proxy.cut(Cut::Reset) > 0, "no connection to cut");
    let said = worker.log.wait_for("connected, but not consuming").await?;
    ensure!(said.text().contains("the health probe fails on the device"), "{}", said.text());
    let (mut counter, mut replies) = (ReplyCounter::default(), env.replies().await?);
    counter.collect(&mut replies, JOBS).await?;
    worker.drain().await?;
    counter.collect_rest(&mut replies).await
}

async fn a_device_that_stays_sick_ends_the_worker(env: &mut TestEnv) -> Result<()> {
    for text in
        ["a failpoint is set", "pass failed", "health probe", "device lost", "it will run in isolation"]
    {
        env.announce(text);
    }
    let sick = env.worker(&["worker.drill=pass=fail"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ensure!(sick.exited().await? == Some(5), "{}", sick.log.text());
    ensure!(sick.total("dead").await? == 0 && sick.total("jobs").await? == 0);
    // No attempt is counted, and everybody is answered by a worker that is well.
    let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
    let jobs = queue.take(JOBS).await?;
    // Before the jobs are published again: a job delivered to this mailbox would go back, which counts against the accused job.
    drop(queue);
    let mut accused = 0;
    for job in &jobs {
        let headers = JobHeaders::read(&job.headers())?;
        // But for the one that the device failed on first.
        accused += headers.crashes;
        ensure!(headers.attempt == 0 && headers.history.len() == headers.crashes as usize, "{headers:?}");
    }
    ensure!(accused <= 1, "{accused} jobs are accused");
    let again = |job: Received| Message { properties: job.properties, body: job.body, as_worker: true };
    env.client.publish_all(MODEL, jobs.into_iter().map(again).collect()).await?;
    let well = env.worker(&[]).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    well.drain().await
}

async fn a_bad_job_is_distinguished_from_a_sick_device(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "pass failed", "job dead-lettered"] {
        env.announce(text);
    }
    let worker = env.worker(&["worker.drill=pass=fail,job=7"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    let mut replies = env.replies().await?;
    for reply in replies.take(JOBS).await? {
        let expected = if reply.id() == "7" { ReplyKind::Failed } else { ReplyKind::Done };
        ensure!(reply.kind()? == expected, "{:?}", reply.properties);
    }
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.id() == "7" && letter.dead_letter()?.reason == Reason::EngineFailed);
    worker.drain().await?;
    ensure!(worker.total("handed_over").await? == 0 && worker.log.find("health probe").is_none());
    Ok(())
}

async fn a_pass_that_never_ends_costs_no_job(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "device lost"] {
        env.announce(text);
    }
    let stuck = env.worker(&["worker.drill=pass=hang", "worker.job_s=1"]).await?;
    let items = items(3);
    env.client.publish(MODEL, env.job("stuck", items.clone())?).await?;
    ensure!(stuck.exited().await? == Some(5), "{}", stuck.log.text());
    let well = env.worker(&[]).await?;
    answered_once(&mut env.replies().await?, "stuck", &items).await?;
    well.drain().await
}

async fn a_pass_that_never_ends_is_charged_to_its_own_jobs(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "device lost"] {
        env.announce(text);
    }
    // One job a pass: behind the one that hangs another is ready, and the rest waits.
    // No other pass takes as long, also where the device's thread waits for a core or the machine stands still for some seconds.
    let settings = ["worker.drill=pass=hang,job=3", "worker.job_s=12", "model.echo.pass_tokens=1"];
    let stuck = env.worker(&settings).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ensure!(stuck.exited().await? == Some(5), "{}", stuck.log.text());
    ensure!(stuck.total("dead").await? == 0, "{}", stuck.log.text());
    let left = JOBS - usize::try_from(stuck.total("jobs").await?)?;
    let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
    for job in queue.take(left).await? {
        let crashes = JobHeaders::read(&job.headers())?.crashes;
        ensure!(crashes == u32::from(job.id() == "3"), "{} is charged with {crashes}", job.id());
    }
    let mut replies = env.replies().await?;
    while replies.next_within(SILENCE).await?.is_some() {}
    Ok(())
}

async fn a_pass_of_a_lost_session_is_charged_to_its_own_jobs(env: &mut TestEnv) -> Result<()> {
    for text in
        ["a failpoint is set", "session lost", "will redeliver the unacknowledged jobs", "device lost"]
    {
        env.announce(text);
    }
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    // Within that time the worker loses its session and has the next one.
    let settings = [&url, "worker.drill=pass=hang,times=1", "worker.job_s=20", "model.echo.pass_tokens=1"];
    let stuck = env.worker(&settings).await?;
    // As many as a worker holds of jobs that fill a pass each: both sessions hold all of them, the accused one and the other.
    let jobs = 2;
    publish_many(env, 1, jobs, |job| job).await?;
    figures(&stuck, "a pass that hangs, with a job behind it", |figures| {
        figures.sum("vramq_jobs_in_hand") == jobs
    })
    .await?;
    ensure!(proxy.cut(Cut::Reset) > 0, "no connection to cut");
    // The next session's pass waits behind it, until it has been there for too long.
    stuck.sessions(2).await?;
    ensure!(stuck.exited().await? == Some(5), "{}", stuck.log.text());
    let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
    let mut charged = 0;
    for job in queue.take(jobs).await? {
        charged += JobHeaders::read(&job.headers())?.crashes;
    }
    ensure!(charged == 1, "{charged} charges for one job");
    Ok(())
}

async fn a_pass_that_waits_for_another_process_is_charged_to_no_job(env: &mut TestEnv) -> Result<()> {
    env.announce("device lost");
    let folder = tempfile::tempdir()?;
    let device = folder.path().join("device");
    let setting = format!("device.cpu.file={}", device.display());
    // A process that has the device for an exclusive pass, and hangs in it.
    let lane = File::create(folder.path().join("device.lane"))?;
    lane.lock()?;
    let waits = env.worker(&[&setting, "worker.job_s=2"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ensure!(waits.exited().await? == Some(5), "{}", waits.log.text());
    waits.log.counts("another process keeps the device", 1).await?;
    let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
    for job in queue.take(JOBS).await? {
        let headers = JobHeaders::read(&job.headers())?;
        ensure!(headers.crashes == 0 && headers.history.is_empty(), "{}: {headers:?}", job.id());
    }
    Ok(())
}
