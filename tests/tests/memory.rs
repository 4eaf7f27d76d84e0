//! Running out of memory: what it costs, and whom.

use std::cell::Cell;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::{DELAYS_MS, delay, jobs_queue};
use vramq_schemas::{JobHeaders, Misfit, Output, Reason, ReplyKind};
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::dam::Dam;
use vramq_tests::management::Depth;
use vramq_tests::setup::Queue;
use vramq_tests::tally::{Tally, publish_many};
use vramq_tests::tenant::SharedDevice;
use vramq_tests::wait::{DEADLINE, until, until_within};
use vramq_tests::worker::{Worker, command, run_to_end};
use vramq_tests::world::{MODEL, World};
use vramq_tests::{on_all_setups, on_one_setup, on_queue_types};

on_all_setups!(a_job_is_halved_until_it_fits, what_is_finished_is_not_computed_again);
on_queue_types!(
    a_requeued_job_overtakes_the_backlog,
    an_item_that_never_fits_ends_with_its_story,
    what_does_not_fit_goes_to_a_larger_device,
    a_job_waits_for_memory_that_others_hold,
    slots_follow_the_memory,
    workers_on_one_device_lose_nothing_to_each_other,
);
on_one_setup!(
    a_restart_does_not_learn_anew,
    a_leak_is_told_and_ends_in_a_restart,
    a_device_file_of_another_size_is_refused,
);

/// What the echo engine takes of the device per item.
const ITEM: u64 = 1024;

fn items(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("item {at}")).collect()
}

/// All replies of a job put together. Parts come in order and without gaps or repeats: nothing is answered twice.
async fn answered_once(replies: &mut Mailbox, id: &str, items: &[String]) -> Result<Vec<Received>> {
    let mut outputs = Vec::new();
    let mut all = Vec::new();
    loop {
        let reply = replies.next().await?;
        ensure!(reply.id() == id);
        ensure!(reply.kind()? != ReplyKind::Failed, "failed: {:?}", reply.failure());
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == outputs.len(), "{headers:?} after {} items", outputs.len());
        outputs.extend(reply.outputs()?.outputs);
        let done = reply.kind()? == ReplyKind::Done;
        all.push(reply);
        if done {
            break;
        }
    }
    let expected: Vec<_> = items.iter().map(|item| Output::Json(item.as_str().into())).collect();
    ensure!(outputs == expected, "{} outputs for {} items", outputs.len(), items.len());
    Ok(all)
}

/// A figure of the line that a worker ends with.
async fn total(worker: &Worker, name: &str) -> Result<u64> {
    let line = worker.log.wait_for("totals").await?;
    line.field(name)
        .and_then(serde_json::Value::as_u64)
        .with_context(|| format!("no {name}: {}", line.text()))
}

/// The dead letter's headers as a job's.
fn reached(letter: &Received) -> Result<JobHeaders> {
    Ok(JobHeaders::read(&letter.headers())?)
}

async fn a_job_is_halved_until_it_fits(world: &mut World) -> Result<()> {
    world.announce("out of memory");
    // Passes of more than 9 items fail.
    let fault = format!("device.cpu.fault=above={}", 9 * ITEM);
    world.announce("made to fail");
    let worker = world.worker(&[&fault]).await?;
    let items = items(100);
    world.client.publish(MODEL, world.job("halved", items.clone())?).await?;
    let replies = answered_once(&mut world.replies().await?, "halved", &items).await?;
    // 100, 50, 25, 12 ran out; 6 fits. What was learned of them cuts no corner: each was tried once.
    let last = replies.last().context("no replies")?.reply()?;
    ensure!(last.attempt >= 1 && last.attempt <= 4, "{last:?}");
    let line = worker.log.wait_for("out of memory").await?;
    for (name, value) in [("items", "100"), ("asked", "0.1 MiB"), ("total", "2048.0 MiB"), ("alone", "true")]
    {
        let found = line.field(name).with_context(|| format!("no {name} in {}", line.text()))?;
        ensure!(found.to_string().trim_matches('"') == value, "{name} is {found}, not {value}");
    }
    worker.drain().await?;
    ensure!(total(&worker, "oom_alone").await? == u64::from(last.attempt));
    ensure!(total(&worker, "requeued").await? == u64::from(last.attempt));
    ensure!(total(&worker, "recomputed").await? == 0);
    ensure!(total(&worker, "items").await? == 100);
    Ok(())
}

/// A job of 10,000 items runs out of memory in the middle on one worker, and another one finishes it.
async fn what_is_finished_is_not_computed_again(world: &mut World) -> Result<()> {
    world.announce("out of memory");
    world.announce("made to fail");
    // Passes of 2,048 items: two fit, the third does not.
    let first = world.worker(&["device.cpu.fault=skip=2,fail=1000"]).await?;
    let dam = Dam::build(&world.client, world.setup.queue).await?;
    let items = items(10_000);
    let job = dam.before(world.job("moved", items.clone())?);
    world.client.publish(MODEL, job.clone()).await?;
    // It waits until its finished items are taken, so it is still there when it is told to drain.
    first.log.wait_for("out of memory").await?;
    first.signal(rustix::process::Signal::TERM)?;
    first.log.wait_for("\"draining\"").await?;
    let mut replies = dam.open().await?;
    ensure!(first.exited().await? == Some(0));

    let second = world.worker(&[]).await?;
    let replies = answered_once(&mut replies, "moved", &items).await?;
    let by = |worker: &Worker| -> Result<usize> {
        let headers: Vec<_> = replies.iter().map(Received::reply).collect::<Result<_>>()?;
        Ok(headers.iter().filter(|h| h.worker == worker.name).map(|h| h.items as usize).sum())
    };
    ensure!(by(&first)? == 4096 && by(&second)? == 10_000 - 4096, "{} and {}", by(&first)?, by(&second)?);
    second.drain().await?;
    ensure!(total(&first, "items").await? == 4096 && total(&second, "items").await? == 10_000 - 4096);
    ensure!(total(&first, "recomputed").await? == 0 && total(&first, "parts").await? >= 1);
    Ok(())
}

async fn an_item_that_never_fits_ends_with_its_story(world: &mut World) -> Result<()> {
    world.announce("out of memory");
    world.announce("made to fail");
    world.announce("job dead-lettered");
    // The fourth pass and all later ones fail: with a hint of 1 the items go one by one.
    let worker = world.worker(&["device.cpu.fault=skip=3,fail=1000"]).await?;
    let job = world.job("too large", items(9))?.with_header("batch-hint", 1.into());
    world.client.publish(MODEL, job.clone()).await?;

    let mut replies = world.replies().await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.reply()?.items == 3, "{:?}", part.reply());
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::OutOfMemory, "{failure:?}");

    let letter = world.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body);
    let told = letter.dead_letter()?;
    ensure!(told.misfit == Some(Misfit { item: 3, cost: 1, needs_bytes: ITEM }), "{told:?}");
    ensure!(told.error.contains("item 3") && told.error == failure.error, "{}", told.error);
    let headers = reached(&letter)?;
    ensure!((headers.items_done, headers.attempt) == (3, 1), "{headers:?}");
    let attempt = headers.history.last().context("no history")?;
    ensure!((attempt.items, attempt.asked, attempt.total) == (1, ITEM, 2048 << 20), "{attempt:?}");
    ensure!(attempt.alone && attempt.worker == worker.name && attempt.device == "cpu", "{attempt:?}");
    Ok(())
}

/// A job that ran out of memory goes before the backlog, where the broker has priorities.
async fn a_requeued_job_overtakes_the_backlog(world: &mut World) -> Result<()> {
    world.announce("out of memory");
    world.announce("made to fail");
    // The first one makes the queues.
    world.worker(&[]).await?.drain().await?;
    for at in 0..50 {
        let id = if at == 0 { "again".to_owned() } else { at.to_string() };
        world.client.publish(MODEL, world.job(&id, items(2))?).await?;
    }
    world.worker(&["device.cpu.fault=skip=0,fail=1", "model.echo.slots_max=1"]).await?;
    let replies = world.replies().await?.take(50).await?;
    let place = replies.iter().position(|reply| reply.id() == "again");
    let expected = if world.setup.queue == Queue::Classic { 0..=2 } else { 0..=49 };
    ensure!(place.is_some_and(|place| expected.contains(&place)), "{place:?}");
    Ok(())
}

async fn what_does_not_fit_goes_to_a_larger_device(world: &mut World) -> Result<()> {
    for text in ["out of memory", "made to fail", "job dead-lettered", "no worker with a larger device"] {
        world.announce(text);
    }
    let small = world.worker(&["device.cpu.fault=above=1000", "model.echo.larger=echo-large"]).await?;
    let job = world.job("large", items(2))?.with_header("mine", 7.into());
    // There is no worker with a larger device yet.
    world.client.publish(MODEL, job.clone()).await?;
    let mut letters = world.dead_letters().await?;
    let mut replies = world.replies().await?;
    ensure!(letters.next().await?.dead_letter()?.reason == Reason::OutOfMemory);
    ensure!(replies.next().await?.failure()?.reason == Reason::OutOfMemory);

    let large = world.worker(&["model.echo.key=echo-large"]).await?;
    world.client.publish(MODEL, job.clone()).await?;
    let reply = replies.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.outputs()?.outputs.len() == 2);
    ensure!(reply.reply()?.worker == large.name && reply.reply()?.attempt >= 1, "{:?}", reply.reply());
    large.drain().await?;

    // What the larger worker gets is the job, told what happened, as if it had never been tried.
    world.client.publish(MODEL, job.clone()).await?;
    let sent = world.client.mailbox(&jobs_queue("echo-large")).await?.next().await?;
    ensure!(sent.body == job.body && sent.id() == "large");
    let headers = reached(&sent)?;
    ensure!(headers.batch_hint.is_none() && !headers.exclusive && headers.items_done == 0, "{headers:?}");
    ensure!(headers.history.len() == headers.attempt as usize && headers.attempt >= 1, "{headers:?}");
    ensure!(sent.headers().inner().contains_key("mine"), "a header of the publisher's is lost");
    small.drain().await?;
    ensure!(total(&small, "enlarged").await? == 3);
    Ok(())
}

async fn a_job_waits_for_memory_that_others_hold(world: &mut World) -> Result<()> {
    for text in ["out of memory", "no room for a single item"] {
        world.announce(text);
    }
    let device = SharedDevice::new(1)?;
    let settings = device.settings();
    let worker = world.worker(&settings.each_ref().map(String::as_str)).await?;
    let held = (1 << 20) - ITEM / 2;
    device.hold(held)?;
    world
        .client
        .publish(MODEL, world.job("patient", items(1))?.with(|p| p.with_expiration("600000".into())))
        .await?;
    worker.log.wait_for("out of memory").await?;
    // It waits in a queue of the broker, not in the worker's hands.
    until("the job in a delay queue", async || {
        for ms in DELAYS_MS {
            let depth = world.vhost.depth(&delay(ms)).await?;
            if depth.is_some_and(|depth| depth.ready == 1) {
                return Ok(Some(()));
            }
        }
        Ok(None)
    })
    .await?;
    until("the worker stops consuming", async || Ok(worker.log.find("no room for a single item").map(drop)))
        .await?;
    until("nothing in the worker's hands", async || {
        let depth = world.vhost.depth(&jobs_queue(MODEL)).await?;
        Ok(depth.filter(|depth| depth.unacked == 0))
    })
    .await?;
    device.give_back(held);
    let reply = world.replies().await?.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.reply()?.attempt >= 2, "{:?}", reply.reply());
    worker.drain().await?;
    ensure!(total(&worker, "exclusive").await? >= 1 && total(&worker, "delayed").await? >= 1);
    ensure!(total(&worker, "oom_foreign").await? == total(&worker, "requeued").await?);
    Ok(())
}

/// The prefetch that the broker has for the worker; 0 without a consumer.
async fn prefetch(world: &World) -> Result<u64> {
    let mut consumers = world.vhost.consumers().await?;
    consumers.retain(|consumer| consumer.queue == jobs_queue(MODEL));
    ensure!(consumers.len() <= 1, "{consumers:?}");
    Ok(consumers.first().map_or(0, |consumer| consumer.prefetch))
}

async fn slots_follow_the_memory(world: &mut World) -> Result<()> {
    const AT_A_TIME: usize = 500;
    /// Several of the broker's counts.
    const COUNTED: Duration = Duration::from_secs(6);
    let device = SharedDevice::new(8)?;
    let mut settings = device.settings().to_vec();
    // Half a MiB each: 16 jobs.
    settings.push("model.echo.job_items=512".to_owned());
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let worker = world.worker(&settings).await?;
    until("16 slots", async || Ok((prefetch(world).await? == 16).then_some(()))).await?;

    let moved = Cell::new(false);
    let held = 5 << 20;
    let watch = async || {
        device.hold(held)?;
        until("6 slots", async || Ok((prefetch(world).await? == 6).then_some(()))).await?;
        // The broker counts every few seconds: its first counts may still be of the old consumer.
        let unacked =
            async || anyhow::Ok(world.vhost.depth(&jobs_queue(MODEL)).await?.map(|depth| depth.unacked));
        until("a count of the new consumer", async || Ok(unacked().await?.filter(|count| *count <= 6)))
            .await?;
        let counted = Instant::now();
        while counted.elapsed() < COUNTED {
            let count = unacked().await?;
            ensure!(count.is_none_or(|count| count <= 6), "{count:?} unacknowledged with 6 slots");
        }
        device.give_back(held);
        until("16 slots again", async || Ok((prefetch(world).await? == 16).then_some(()))).await
    };
    let watch = async || {
        let watched = watch().await;
        moved.set(true);
        watched
    };
    // Jobs flow all the while.
    let mut replies = world.replies().await?;
    let mut jobs = 0;
    let mut duplicates = 0;
    let mut flow = async || {
        while !moved.get() {
            let mut tally = Tally::default();
            publish_many(world, 2, AT_A_TIME, |job| job).await?;
            tally.collect(&mut replies, AT_A_TIME).await?;
            jobs += tally.jobs();
            duplicates += tally.duplicates();
        }
        anyhow::Ok(())
    };
    let (watched, flowed) = tokio::join!(watch(), flow());
    watched?;
    flowed?;
    worker.drain().await?;
    ensure!(duplicates == 0 && total(&worker, "jobs").await? == jobs as u64, "{duplicates} duplicates");
    // Two moves, one each way: it does not flap.
    ensure!(worker.log.count("slots follow") == 2, "{}", worker.log.text());
    Ok(())
}

/// Three workers race for a device that is too small for them, and passes fail at random besides.
async fn workers_on_one_device_lose_nothing_to_each_other(world: &mut World) -> Result<()> {
    const JOBS: usize = 600;
    for text in ["out of memory", "made to fail", "no room for a single item"] {
        world.announce(text);
    }
    let device = SharedDevice::new(1)?;
    let mut workers = Vec::new();
    for seed in 0..3 {
        let mut settings = device.settings().to_vec();
        settings.push(format!("device.cpu.fault=random=0.02,seed={seed}"));
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        workers.push(world.worker(&settings).await?);
    }
    // 1 to 800 items a job; three passes of the largest are more than the device has.
    let sizes: Vec<usize> = (0..JOBS).map(|at| 1 + (at * 7919) % [5, 60, 800][at % 3]).collect();
    let jobs = sizes.iter().enumerate().map(|(at, size)| world.job(&at.to_string(), items(*size)));
    world.client.publish_all(MODEL, jobs.collect::<Result<_>>()?).await?;

    let mut replies = world.replies().await?;
    let mut next = vec![0; JOBS];
    let mut open = JOBS;
    while open > 0 {
        let reply = replies.next().await.with_context(|| format!("{open} jobs are open"))?;
        ensure!(reply.kind()? != ReplyKind::Failed, "failed: {:?}", reply.failure());
        let at: usize = reply.id().parse()?;
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == next[at], "job {at}: {headers:?} after {} items", next[at]);
        let outputs = reply.outputs()?.outputs;
        let right = outputs
            .iter()
            .zip(next[at]..)
            .all(|(output, item)| *output == Output::Json(format!("item {item}").into()));
        ensure!(right, "job {at}: wrong outputs");
        next[at] += outputs.len();
        if reply.kind()? == ReplyKind::Done {
            ensure!(next[at] == sizes[at], "job {at} ended after {} of {}", next[at], sizes[at]);
            open -= 1;
        }
    }
    let (mut ran_out, mut computed) = (0, 0);
    for worker in &workers {
        worker.drain().await?;
        ensure!(total(worker, "recomputed").await? == 0);
        ran_out += total(worker, "oom_alone").await? + total(worker, "oom_shared").await?;
        computed += total(worker, "items").await?;
    }
    println!("{ran_out} passes ran out of memory");
    ensure!(ran_out > 0);
    ensure!(computed == sizes.iter().sum::<usize>() as u64, "{computed} items were computed");
    ensure!(device.memory().free == 1 << 20, "memory is left behind: {:?}", device.memory());
    Ok(())
}

async fn a_restart_does_not_learn_anew(world: &mut World) -> Result<()> {
    world.announce("out of memory");
    world.announce("made to fail");
    let state = tempfile::tempdir()?;
    let settings =
        [format!("worker.state={}", state.path().display()), format!("device.cpu.fault=above={}", 9 * ITEM)];
    let settings = settings.each_ref().map(String::as_str);
    let mut replies = world.replies().await?;
    for (round, expected) in [(0, true), (1, false)] {
        let worker = world.worker(&settings).await?;
        for at in 0..20 {
            let items = items(40);
            let id = format!("{round}-{at}");
            world.client.publish(MODEL, world.job(&id, items.clone())?).await?;
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
    let told = run_to_end(doctor).await?;
    ensure!(told.code == Some(0), "{told:?}");
    ensure!(told.stdout.contains("echo: passes") && told.stdout.contains("ran out"), "{}", told.stdout);
    Ok(())
}

async fn a_leak_is_told_and_ends_in_a_restart(world: &mut World) -> Result<()> {
    for text in ["made to fail", "a leak", "nearly full"] {
        world.announce(text);
    }
    // Every pass keeps 64 bytes of a MiB; half of it is what is tolerated, for a second.
    let settings = [
        "device.cpu.fault=leak=64",
        "device.cpu.memory_mib=1",
        "device.cpu.reserve_mib=0",
        "worker.pressure_percent=50",
        "worker.pressure_s=1",
    ];
    let worker = world.worker(&settings).await?;
    let mut replies = world.replies().await?;
    let load = async {
        for at in 0.. {
            if !worker.is_running() {
                return Ok(at);
            }
            world.client.publish(MODEL, world.job(&at.to_string(), items(1))?).await?;
            replies.next_within(Duration::from_millis(200)).await?;
        }
        anyhow::bail!("numbers end")
    };
    let published: usize = tokio::time::timeout(DEADLINE, load).await.context("it never ends")??;
    ensure!(worker.exited().await? == Some(5), "{}", worker.log.text());
    let line = worker.log.wait_for("a leak").await?;
    ensure!(line.field("bytes_per_job").and_then(serde_json::Value::as_u64) == Some(64), "{}", line.text());
    println!("restarted after {published} jobs");
    // Nothing is lost: what is left waits for the next worker.
    let next = world.worker(&[]).await?;
    until_within(DEADLINE, "an empty queue", async || {
        while replies.next_within(Duration::from_millis(50)).await?.is_some() {}
        let depth = world.vhost.depth(&jobs_queue(MODEL)).await?;
        Ok(depth.filter(|depth| *depth == Depth { ready: 0, unacked: 0 }))
    })
    .await?;
    while replies.next_within(Duration::from_millis(300)).await?.is_some() {}
    next.drain().await
}

async fn a_device_file_of_another_size_is_refused(world: &mut World) -> Result<()> {
    world.announce("cannot start");
    let device = SharedDevice::new(8)?;
    let mut settings = device.settings();
    settings[1] = "device.cpu.memory_mib=9".to_owned();
    let worker = world.spawn_worker(&settings.each_ref().map(String::as_str))?;
    ensure!(worker.exited().await? == Some(4));
    ensure!(worker.log.text().contains("same memory_mib"), "{}", worker.log.text());
    Ok(())
}
