//! Jobs that go on elsewhere for no fault of theirs: at a drain, and when the device is sick.

use anyhow::{Result, ensure};
use rustix::process::Signal;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{JobHeaders, Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::client::Received;
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::programs::root;
use vramq_tests::tally::{Tally, publish_many};
use vramq_tests::world::{MODEL, REPLIES, World};

on_queue_types!(
    a_drain_hands_a_large_job_over,
    a_sick_device_costs_no_job,
    a_device_that_stays_sick_ends_the_worker,
    a_bad_job_is_told_from_a_sick_device,
    a_pass_that_never_ends_costs_no_job,
);

const JOBS: usize = 30;

async fn a_drain_hands_a_large_job_over(world: &mut World) -> Result<()> {
    // A real model, one text a pass: it takes seconds, and a part goes out after some thousand.
    let fixture = root().join("worker/tests/fixtures/tiny-long");
    let model = format!("model.tiny.path={}", fixture.display());
    let settings = [model.as_str(), "model.tiny.pass_tokens=1", "device.cpu.threads=1"];
    let first = world.spawn_bare_worker(&settings)?;
    first.consuming().await?;
    let items: Vec<_> = (0..60_000).map(|at| format!("the {at}")).collect();
    let job = Message::texts(world.setup.encoding, "tiny", "large", REPLIES, items.clone())?;
    world.client.publish("tiny", job).await?;
    let mut replies = world.replies().await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.reply()?.offset == 0, "{:?}", part.reply());
    let done = part.reply()?.items as usize;
    first.signal(Signal::TERM)?;
    ensure!(first.exited().await? == Some(0), "{}", first.log.text());
    ensure!(first.total("handed_over").await? == 1 && first.total("recomputed").await? == 0);

    let second = world.spawn_bare_worker(&[model.as_str()])?;
    second.consuming().await?;
    // The rest, as if it were a job of its own.
    let mut rest = Vec::new();
    loop {
        let reply = replies.next().await?;
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == done + rest.len(), "{headers:?} after {}", done + rest.len());
        ensure!(headers.attempt == 0, "an attempt was counted: {headers:?}");
        rest.extend(reply.outputs()?.outputs);
        if reply.kind()? == ReplyKind::Done {
            break;
        }
    }
    ensure!(done + rest.len() == items.len());
    second.drain().await?;
    let computed = first.total("items").await? + second.total("items").await?;
    ensure!(computed == items.len() as u64, "{computed} items computed");
    Ok(())
}

async fn a_sick_device_costs_no_job(world: &mut World) -> Result<()> {
    for text in ["a drill is on", "pass failed", "canary"] {
        world.announce(text);
    }
    // The pass of all, the first one's alone, and the canary fail; the next canary lives.
    let worker = world.spawn_worker(&["worker.drill=pass=fail,times=3"])?;
    worker.consuming().await?;
    publish_many(world, 1, JOBS, |job| job).await?;
    let mut tally = Tally::default();
    let mut replies = world.replies().await?;
    tally.collect(&mut replies, JOBS).await?;
    ensure!(worker.log.find("a canary lives").is_some(), "{}", worker.log.text());
    worker.drain().await?;
    tally.collect_rest(&mut replies).await?;
    ensure!(tally.duplicates() == 0 && worker.total("dead").await? == 0);
    ensure!(worker.total("handed_over").await? > 0);
    Ok(())
}

async fn a_device_that_stays_sick_ends_the_worker(world: &mut World) -> Result<()> {
    for text in ["a drill is on", "pass failed", "canary", "device lost"] {
        world.announce(text);
    }
    let sick = world.worker(&["worker.drill=pass=fail"]).await?;
    publish_many(world, 1, JOBS, |job| job).await?;
    ensure!(sick.exited().await? == Some(5), "{}", sick.log.text());
    ensure!(sick.total("dead").await? == 0 && sick.total("jobs").await? == 0);
    // No attempt is counted, and everybody is answered by a worker that is well.
    let mut queue = world.client.mailbox(&jobs_queue(MODEL)).await?;
    let jobs = queue.take(JOBS).await?;
    drop(queue);
    let mut accused = 0;
    for job in &jobs {
        let headers = JobHeaders::read(&job.headers())?;
        // But for the one that the device failed on first.
        accused += headers.crashes;
        ensure!(headers.attempt == 0 && headers.history.len() == headers.crashes as usize, "{headers:?}");
    }
    ensure!(accused <= 1, "{accused} jobs are accused");
    let again = |job: Received| Message { properties: job.properties, body: job.body };
    world.client.publish_all(MODEL, jobs.into_iter().map(again).collect()).await?;
    let well = world.worker(&[]).await?;
    Tally::default().collect(&mut world.replies().await?, JOBS).await?;
    well.drain().await
}

async fn a_bad_job_is_told_from_a_sick_device(world: &mut World) -> Result<()> {
    for text in ["a drill is on", "pass failed", "job dead-lettered"] {
        world.announce(text);
    }
    let worker = world.worker(&["worker.drill=pass=fail,job=7"]).await?;
    publish_many(world, 1, JOBS, |job| job).await?;
    let mut replies = world.replies().await?;
    for reply in replies.take(JOBS).await? {
        let expected = if reply.id() == "7" { ReplyKind::Failed } else { ReplyKind::Done };
        ensure!(reply.kind()? == expected, "{:?}", reply.properties);
    }
    let letter = world.dead_letters().await?.next().await?;
    ensure!(letter.id() == "7" && letter.dead_letter()?.reason == Reason::EngineFailed);
    worker.drain().await?;
    ensure!(worker.total("handed_over").await? == 0 && worker.log.find("canary").is_none());
    Ok(())
}

async fn a_pass_that_never_ends_costs_no_job(world: &mut World) -> Result<()> {
    for text in ["a drill is on", "device lost"] {
        world.announce(text);
    }
    let stuck = world.worker(&["worker.drill=pass=hang", "worker.job_s=1"]).await?;
    let items = items(3);
    world.client.publish(MODEL, world.job("stuck", items.clone())?).await?;
    ensure!(stuck.exited().await? == Some(5), "{}", stuck.log.text());
    let well = world.worker(&[]).await?;
    answered_once(&mut world.replies().await?, "stuck", &items).await?;
    well.drain().await
}
