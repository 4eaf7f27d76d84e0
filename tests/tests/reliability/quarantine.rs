//! Quarantine: jobs that kill workers are dead-lettered, and jobs that were only held by the same workers are answered.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use tokio::time::sleep;
use vramq_schemas::topology::{bulk_queue, jobs_queue, suspects_queue};
use vramq_schemas::{JobHeaders, Reason, ReplyKind};
use vramq_tests::answers::items;
use vramq_tests::blocked_device::BlockedDevice;
use vramq_tests::job::Message;
use vramq_tests::management::Depth;
use vramq_tests::on_queue_types;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(
    a_job_that_kills_workers_in_a_pass_is_dead_lettered,
    a_job_that_kills_workers_while_it_is_read_is_dead_lettered,
    a_job_whose_pass_never_ends_is_dead_lettered,
    jobs_of_workers_that_are_killed_from_outside_are_answered,
    a_forged_crash_count_affects_no_other_job,
    quarantined_jobs_of_one_model_do_not_starve_another,
    a_quarantined_job_waits_for_no_large_job,
    a_lost_connection_is_charged_to_no_job,
);

const NEIGHBOURS: usize = 50;

const SUSPECTS: usize = 10;

/// Victims that the defaults grant.
const CRASHES_MAX: usize = 5;

/// Lost connections, enough for suspicion if they counted.
const CUTS: usize = 3;

/// A job that ends every worker at a point, among others that do not: how it ends, and they. A worker ends with `code`, if
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
    let (mut letters, mut replies) = (env.dead_letters().await?, env.replies().await?);
    let mut victims = 0;
    let (worker, letter) = loop {
        let worker = env.spawn_worker(&[&drill, "worker.job_s=1"])?;
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
    // What a replay would start with.
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
    for queue in [jobs_queue(MODEL), suspects_queue(MODEL)] {
        until("queues with nothing in them", async || {
            let depth = env.vhost.depth(&queue).await?;
            Ok(depth.filter(|depth| *depth == Depth { ready: 0, unacked: 0 }))
        })
        .await?;
    }
    Ok(())
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
    let mut device = BlockedDevice::new()?;
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).collect();
    let mut replies = env.replies().await?;
    env.worker(&[]).await?.drain().await?;
    publish_many(env, 1, NEIGHBOURS, |job| job).await?;
    for _ in 0..CRASHES_MAX {
        ready(env, NEIGHBOURS as u64).await?;
        let worker = env.worker(&settings).await?;
        // Once they are suspects it takes one at a time. The first one would be condemned, rightly by all that workers can
        // know; so this is the last of the deaths.
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
    let mut device = BlockedDevice::new()?;
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
    until("the last session", async || Ok((worker.log.count("\"consuming\"") == CUTS + 1).then_some(())))
        .await?;
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

/// A publisher that claims crashes: its job runs alone, or not at all, and that is that.
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

/// Quarantined jobs run with no other job of any model unacknowledged: in turn with the jobs of others, not instead of them.
async fn quarantined_jobs_of_one_model_do_not_starve_another(env: &mut TestEnv) -> Result<()> {
    env.announce("it will run in isolation");
    let worker = env.worker(&["model.other.engine=echo"]).await?;
    let job = |model: &str, id: usize| {
        Message::texts(env.setup.encoding, model, &id.to_string(), REPLIES, [format!("text {id}")])
    };
    let suspect = |id| Ok(job(MODEL, id)?.with_header("crashes", AMQPValue::LongLongInt(2)).as_worker());
    let suspects = (0..SUSPECTS).map(suspect).collect::<Result<Vec<_>>>()?;
    let others = (SUSPECTS..SUSPECTS + NEIGHBOURS).map(|id| job("other", id)).collect::<Result<Vec<_>>>()?;
    env.client.publish_all(MODEL, suspects).await?;
    env.client.publish_all("other", others).await?;
    let (mut counter, mut replies) = (ReplyCounter::default(), env.replies().await?);
    counter.collect(&mut replies, SUSPECTS + NEIGHBOURS).await?;
    all_gone(env).await?;
    worker.drain().await?;
    counter.collect_rest(&mut replies).await?;
    ensure!(counter.duplicates() == 0, "{} duplicates", counter.duplicates());
    ensure!(worker.log.count("it will run in isolation") == SUSPECTS, "{}", worker.log.text());
    Ok(())
}

/// Items of a job of hundreds of passes.
const LARGE_TEXTS: usize = 5_000;

/// Passes that run, of any job, until the quarantined one and a small one behind it are answered. They need some five; a worker that
/// is slow may begin its isolation twice.
const PASSES_MAX: usize = 40;

/// Gives a ticket whenever a pass has taken the last one.
async fn give_tickets(tickets: &mut PassTickets, passes: &mut usize) -> Result<Infallible> {
    loop {
        while tickets.left()? > 0 {
            sleep(Duration::from_millis(10)).await;
        }
        ensure!(
            *passes < PASSES_MAX,
            "the quarantined and the small job are not done after {PASSES_MAX} passes"
        );
        tickets.give(1)?;
        *passes += 1;
    }
}

async fn a_quarantined_job_waits_for_no_large_job(env: &mut TestEnv) -> Result<()> {
    env.announce("it will run in isolation");
    let mut tickets = PassTickets::new(env)?;
    let worker = env.worker(&[&tickets.setting(), "model.echo.pass_tokens=16"]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("large", items(LARGE_TEXTS))?).await?;
    until("the large job in hand", async || {
        let depth = env.vhost.depth(&bulk_queue(MODEL)).await?;
        Ok(depth.filter(|depth| depth.unacked == 1))
    })
    .await?;
    let suspect = env.job("suspect", ["x"])?.with_header("crashes", AMQPValue::LongLongInt(2)).as_worker();
    env.client.publish(MODEL, suspect).await?;
    worker.log.wait_for("quarantined jobs run next").await?;
    env.client.publish(MODEL, env.job("small", ["x"])?).await?;
    let (mut done, mut of_large) = (BTreeSet::new(), 0);
    let (mut passes, mut is_small_in_hand) = (0, false);
    while done.len() < 3 {
        if done.contains("suspect") && !is_small_in_hand {
            // How long the broker takes to deliver it is not counted in passes.
            until("the small job in hand", async || {
                Ok((env.client.ready(&jobs_queue(MODEL)).await? == 0).then_some(()))
            })
            .await?;
            is_small_in_hand = true;
        }
        let reply = if done.len() < 2 {
            tokio::select! {
                reply = replies.next() => reply?,
                fed = give_tickets(&mut tickets, &mut passes) => match fed? {},
            }
        } else {
            replies.next().await?
        };
        let kind = reply.kind()?;
        ensure!(kind != ReplyKind::Failed, "{:?}", reply.failure());
        if reply.id() == "large" {
            // Each item once, in order, although the job was requeued between two of its parts.
            ensure!(
                reply.reply()?.offset as usize == of_large,
                "{:?} after {of_large} items",
                reply.reply()?
            );
            of_large += reply.outputs()?.outputs.len();
        }
        if kind == ReplyKind::Done {
            done.insert(reply.id().to_owned());
        }
        if done.len() == 2 {
            ensure!(!done.contains("large"), "{done:?}");
            tickets.release();
        }
    }
    ensure!(of_large == LARGE_TEXTS, "{of_large} items");
    all_gone(env).await?;
    worker.drain().await
}
