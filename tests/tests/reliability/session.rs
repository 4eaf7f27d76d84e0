//! Sessions with the broker: after every fault the worker consumes again with its slots as prefetch, and every job from before
//! and after the fault is answered.
//!
//! `VRAMQ_TEST_FULL=1` cuts a thousand connections instead of a few. Faults of the broker itself are in `broker_faults.rs`.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use tempfile::NamedTempFile;
use vramq_schemas::topology::{
    DEAD_EXCHANGE, DELAYS_MS, dead_queue, delay_queue, jobs_queue, suspects_queue,
};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::answered_once;
use vramq_tests::flow::{Flow, announce_lost_sessions, sessions_are_right};
use vramq_tests::proxy::{Cut, Proxy};
use vramq_tests::setup::full;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(cut_connections_lose_nothing, a_reply_queue_that_is_deleted, a_lost_ack_runs_nothing_twice);
mod a_queue_that_is_declared_again {
    use super::*;
    vramq_tests::test_over!(run, classic, Classic, Json, a_queue_that_is_declared_again,);
    vramq_tests::test_over!(
        run, quorum, Quorum, Json, a_queue_that_is_declared_again,
        #[ignore = "RabbitMQ 3.10 may count the consumer of a deleted quorum queue beside that of its successor"]
    );
}
on_one_setup!(
    an_exchange_that_is_deleted,
    a_quarantine_queue_that_is_deleted,
    a_dead_queue_that_is_deleted,
    a_silent_network,
    a_slow_network,
    a_broker_that_comes_in_time,
    a_broker_that_does_not_answer_is_given_up,
    a_dead_letter_that_is_not_confirmed_ends_the_session,
    a_queue_that_is_declared_again_at_once,
);

const SLOTS: u64 = 16;

/// The slots that are for jobs of any size: two are for large ones alone.
const JOBS_IN_HAND: usize = SLOTS as usize - 2;

/// A worker's connections: one that consumes, one that publishes.
const CONNECTIONS: usize = 2;

/// Cuts that one worker suffers: it waits twice as long after each, up to half a minute, so a worker that suffered more
/// would only be waited for.
const CUTS_EACH: usize = 4;

const CUTS_IN_FULL: usize = 1000;

/// Workers that are cut at the same time.
const WORKERS: usize = 8;

/// What a worker may hold open besides what it held at first: sockets that the system is still closing.
const OPEN_FILES_MORE: usize = 4;

/// A worker whose connections go through a proxy, with a query at the end of its URL.
async fn worker_behind(env: &mut TestEnv, proxy: &Proxy, query: &str) -> Result<Worker> {
    let url = format!("broker.url={}{query}", proxy.url());
    env.worker(&[&url, &format!("model.echo.slots_max={SLOTS}")]).await
}

async fn cut_connections_lose_nothing(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let generations = if full() { CUTS_IN_FULL.div_ceil(WORKERS * CUTS_EACH) } else { 1 };
    let cuts = generations * WORKERS * CUTS_EACH;
    let started = Instant::now();
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    for generation in 0..generations {
        let mut workers = Vec::with_capacity(WORKERS);
        for _ in 0..WORKERS {
            let proxy = env.proxy().await?;
            workers.push((worker_behind(env, &proxy, "").await?, proxy));
        }
        let each = workers.iter().map(|(worker, proxy)| suffers_cuts(worker, proxy));
        let all = async { futures_util::future::try_join_all(each).await.map(drop) };
        flow.during(env, &mut replies, all).await.with_context(|| format!("generation {generation}"))?;
        sessions_are_right(env, WORKERS, SLOTS).await?;
        if generation + 1 == generations {
            all_is_settled(env).await?;
        }
        for (worker, _) in workers {
            worker.drain().await?;
        }
    }
    flow.counter.collect_rest(&mut replies).await?;
    let took = started.elapsed();
    let duplicates = flow.counter.duplicates();
    println!("{cuts} cuts in {took:.1?}: {} jobs, {duplicates} answered twice", flow.published);
    ensure!(duplicates <= cuts * SLOTS as usize, "{duplicates} duplicates");
    Ok(())
}

/// Waits for jobs that have been answered and are redelivered anyway, as suspects too.
pub(super) async fn all_is_settled(env: &TestEnv) -> Result<()> {
    env.vhost.until_empty(&[delay_queue(MODEL, DELAYS_MS[0]), jobs_queue(MODEL), suspects_queue(MODEL)]).await
}

/// Cuts a worker's connections each time it has a session.
async fn suffers_cuts(worker: &Worker, proxy: &Proxy) -> Result<()> {
    let files = worker.open_files().context("no worker")?;
    for cut in 0..CUTS_EACH {
        let how = [Cut::Reset, Cut::Finish][cut % 2];
        // One that the worker has given up may still stand for a moment.
        until("its two connections", async || Ok((proxy.open() == CONNECTIONS).then_some(()))).await?;
        proxy.cut(how);
        worker.sessions(cut + 2).await?;
    }
    let mut now = 0;
    // It may close a connection of the last session when the next one stands.
    let closed = until("as few open files as at first", async || {
        now = worker.open_files().context("the worker ended")?;
        Ok((now <= files + OPEN_FILES_MORE).then_some(()))
    })
    .await;
    closed.with_context(|| format!("{files} files open at first, {now} after {CUTS_EACH} cuts"))
}

/// An operator deletes the queue and makes one with other arguments. The worker leaves it alone, says so, and waits; when
/// the queue is out of the way, it makes its own.
async fn a_queue_that_is_declared_again(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "").await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    flow.publish(env, 20).await?;
    flow.collect(&mut replies, 0).await?;

    // Not so fast that it makes the queue itself.
    proxy.refuse();
    let queue = jobs_queue(MODEL);
    env.vhost.delete_queue(&queue).await?;
    worker.log.wait_for("session lost").await?;
    make_another(env, &queue).await?;
    proxy.pass();
    worker.log.wait_for("PRECONDITION_FAILED").await?;
    ensure!(worker.is_running());
    env.vhost.delete_queue(&queue).await?;
    worker.sessions(2).await?;
    sessions_are_right(env, 1, SLOTS).await?;
    flow.publish(env, 20).await?;
    flow.collect(&mut replies, 0).await
}

async fn make_another(env: &TestEnv, queue: &str) -> Result<()> {
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-max-length".into(), 77.into());
    env.client.declare_queue(queue, arguments).await
}

/// The same before the worker notices. RabbitMQ 3.10 may then keep a consumer on the new queue to which it never delivers, and reports
/// nothing. The worker notices that more jobs wait than it could hold.
async fn a_queue_that_is_declared_again_at_once(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    // If the worker declares its own queue before this session is given up: the new one has other arguments.
    env.announce("cannot declare the exchanges and queues again");
    let worker = env.worker(&[&format!("model.echo.slots_max={SLOTS}")]).await?;
    let queue = jobs_queue(MODEL);
    env.vhost.delete_queue(&queue).await?;
    make_another(env, &queue).await?;
    let jobs = (0..=SLOTS).map(|at| env.job(&at.to_string(), ["x"])).collect::<Result<Vec<_>>>()?;
    env.client.publish_to_queue(&queue, &jobs).await?;
    let mut replies = env.replies().await?;
    // Either it serves the new queue, or it notices.
    until("an answer, or a lost session", async || {
        let answered = replies.next_within(Duration::from_millis(100)).await?.is_some();
        Ok((answered || worker.log.find("session lost").is_some()).then_some(()))
    })
    .await
    .with_context(|| format!("while the worker consumes: {}", worker.log.text()))?;
    // Where it serves the new queue, more jobs are answered meanwhile than the one that was waited for. The broker may have counted
    // deliveries to the consumer of the old queue as attempts of workers that were lost.
    for queue in [queue, suspects_queue(MODEL), REPLIES.to_owned()] {
        env.leave(&queue);
    }
    Ok(())
}

/// The queue of a job's replies is deleted while the job is unacknowledged: its results are beside it in the dead letters.
async fn a_reply_queue_that_is_deleted(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "job dead-lettered"] {
        env.announce(text);
    }
    let held = NamedTempFile::new()?;
    let drill = format!("worker.drill=pass=hang,job=held,while={}", held.path().display());
    env.worker(&[&drill, &format!("model.echo.slots_max={SLOTS}")]).await?;
    let queue = "vanishing-replies";
    env.client.declare_queue(queue, env.setup.queue.arguments()).await?;
    let job = env.job("held", ["x"])?.with(|properties| properties.with_reply_to(queue.into()));
    env.client.publish(MODEL, job.clone()).await?;
    env.vhost.until_unacked(&jobs_queue(MODEL), 1).await?;
    env.vhost.delete_queue(queue).await?;
    // Now its pass ends.
    held.close()?;

    let mut letters = env.dead_letters().await?.take(2).await?;
    letters.sort_by_key(|letter| letter.body == job.body);
    let [results, letter] = &letters[..] else { anyhow::bail!("not two letters") };
    ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Unroutable);
    ensure!(results.kind()? == ReplyKind::Done && results.outputs()?.outputs.len() == 1);
    sessions_are_right(env, 1, SLOTS).await
}

/// The next publish to an exchange that is not there costs the session, and the next session makes it again, unless the worker has noticed
/// before (`deleted_topology.rs`).
async fn an_exchange_that_is_deleted(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    env.announce("job dead-lettered");
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "").await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    flow.publish(env, 20).await?;
    flow.collect(&mut replies, 0).await?;

    env.vhost.delete_exchange(DEAD_EXCHANGE).await?;
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("no job")).await?;
    worker.sessions(2).await?;
    ensure!(env.dead_letters().await?.next().await?.id() == "bad");
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    sessions_are_right(env, 1, SLOTS).await
}

/// It costs a session, which makes it again: a suspect then finds its way.
async fn a_quarantine_queue_that_is_deleted(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "").await?;
    env.vhost.delete_queue(&suspects_queue(MODEL)).await?;
    let suspect = env.job("suspect", ["x"])?.with_header("crashes", AMQPValue::LongLongInt(2)).as_worker();
    env.client.publish(MODEL, suspect).await?;
    answered_once(&mut env.replies().await?, "suspect", &["x".to_owned()]).await?;
    worker.sessions(2).await?;
    sessions_are_right(env, 1, SLOTS).await
}

/// The same: a letter waits for the next session.
async fn a_dead_queue_that_is_deleted(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    env.announce("job dead-lettered");
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "").await?;
    env.vhost.delete_queue(&dead_queue(MODEL)).await?;
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("no job")).await?;
    ensure!(env.replies().await?.next().await?.failure()?.reason == Reason::Malformed);
    ensure!(env.dead_letters().await?.next().await?.id() == "bad");
    worker.sessions(2).await?;
    worker.log.wait_for("it was deleted or unbound").await?;
    sessions_are_right(env, 1, SLOTS).await
}

/// Packets vanish without an error: the worker notices by its own heartbeat, and the broker by its.
async fn a_silent_network(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "?heartbeat=2").await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    let faults = async {
        proxy.stall();
        let line = worker.log.wait_for("session lost").await?;
        // Heartbeats are missing; or a consumer that it was about to change has no answer, whichever is noticed first.
        let is_noticed = ["heartbeat", "does not answer", "has not started it"]
            .iter()
            .any(|text| line.text().contains(text));
        ensure!(is_noticed, "{}", line.text());
        // What it tries now goes nowhere either.
        until("another connection", async || Ok((proxy.accepted() > CONNECTIONS).then_some(()))).await?;
        proxy.pass();
        worker.sessions(2).await
    };
    flow.during(env, &mut replies, faults).await?;
    sessions_are_right(env, 1, SLOTS).await?;
    let duplicates = flow.counter.duplicates();
    // With heartbeats so frequent a slow machine may lose another session; each has no more than its slots in hand.
    let lost = worker.log.count("session lost");
    ensure!(duplicates <= lost * SLOTS as usize, "{duplicates} duplicates, {lost} sessions lost");
    Ok(())
}

/// Slow is not lost: the session stands, and nothing comes twice.
async fn a_slow_network(env: &mut TestEnv) -> Result<()> {
    let proxy = env.proxy().await?;
    // The broker ends a session after two to three of them: a machine that stands still for less costs none.
    let worker = worker_behind(env, &proxy, "?heartbeat=10").await?;
    let mut replies = env.replies().await?;
    let mut flow = Flow::default();
    // Some 400 bytes a job each way: longer than heartbeats take to end a session.
    proxy.slow(3_000);
    flow.publish(env, 250).await?;
    flow.collect(&mut replies, 0).await?;
    sessions_are_right(env, 1, SLOTS).await?;
    proxy.pass();
    worker.drain().await?;
    ensure!(worker.log.count("\"consuming\"") == 1 && flow.counter.duplicates() == 0);
    Ok(())
}

/// A broker that is away when a worker starts, and comes within `connect_s`.
async fn a_broker_that_comes_in_time(env: &mut TestEnv) -> Result<()> {
    env.announce("no session yet");
    let proxy = env.proxy().await?;
    proxy.refuse();
    let url = format!("broker.url={}", proxy.url());
    let worker = env.spawn_worker(&[&url, "broker.connect_s=600"])?;
    worker.log.wait_for("no session yet").await?;
    proxy.pass();
    worker.consuming().await?;
    let mut flow = Flow::default();
    flow.publish(env, 1).await?;
    flow.collect(&mut env.replies().await?, 0).await
}

/// A peer that accepts and says nothing, as a load balancer with nothing behind it does, is no broker either.
async fn a_broker_that_does_not_answer_is_given_up(env: &mut TestEnv) -> Result<()> {
    env.announce("no session yet");
    env.announce("cannot start");
    let proxy = env.proxy().await?;
    proxy.stall();
    let url = format!("broker.url={}?connection_timeout=100", proxy.url());
    let worker = env.spawn_worker(&[&url, "broker.connect_s=25"])?;
    let files = async |attempts| {
        until("attempts", async || Ok((worker.log.count("no session yet") >= attempts).then_some(())))
            .await?;
        worker.open_files().context("the worker ended")
    };
    let (first, later) = (files(2).await?, files(4).await?);
    ensure!(later <= first + 1, "{first} files open after two attempts, {later} after four");
    ensure!(worker.exited().await? == Some(3), "{}", worker.log.text());
    Ok(())
}

/// The broker never learned that jobs were answered: they are redelivered, and are acknowledged without running.
async fn a_lost_ack_runs_nothing_twice(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let worker = worker_behind(env, &proxy, "").await?;
    proxy.lose_acks();
    let mut flow = Flow::default();
    flow.publish(env, JOBS_IN_HAND).await?;
    let mut replies = env.replies().await?;
    flow.collect(&mut replies, 0).await?;
    until("all to be acknowledged", async || Ok((proxy.lost_acks() == JOBS_IN_HAND).then_some(())))
        .await
        .with_context(|| format!("{} acks, {} answered", proxy.lost_acks(), flow.counter.jobs()))?;
    proxy.pass();
    ensure!(proxy.cut(Cut::Reset) > 0, "no connection to cut");
    until("an empty queue", async || {
        let depth = env.vhost.depth(&jobs_queue(MODEL)).await?;
        let again = worker.log.count("settled before") == JOBS_IN_HAND;
        Ok(depth.filter(|depth| again && (depth.ready, depth.unacked) == (0, 0)))
    })
    .await
    .with_context(|| worker.log.text())?;
    worker.drain().await?;
    flow.counter.collect_rest(&mut replies).await?;
    ensure!(flow.counter.duplicates() == 0 && worker.total("items").await? == JOBS_IN_HAND as u64);
    Ok(())
}

/// Nobody knows whether the broker has it: the job comes again.
async fn a_dead_letter_that_is_not_confirmed_ends_the_session(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    env.announce("job dead-lettered");
    env.leave(&dead_queue(MODEL));
    let proxy = env.proxy().await?;
    // The next session has what it publishes confirmed within that time, also where the machine stands still for some seconds.
    let worker = env.worker(&[&format!("broker.url={}", proxy.url()), "broker.confirm_s=10"]).await?;
    proxy.hold_confirms();
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("{")).await?;
    let line = worker.log.wait_for("session lost").await?;
    proxy.pass();
    ensure!(line.text().contains("did not confirm a message within 10 s"), "{}", line.text());
    let mut replies = env.replies().await?;
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    env.client.publish(MODEL, env.job("good", ["x"])?).await?;
    answered_once(&mut replies, "good", &["x".to_owned()]).await?;
    all_is_settled(env).await
}
