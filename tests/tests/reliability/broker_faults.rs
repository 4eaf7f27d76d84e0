//! Faults of the broker: killed, out of memory or disk, with a short `consumer_timeout`. Each test has its own node.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tempfile::NamedTempFile;
use vramq_schemas::Reason;
use vramq_schemas::control::{Command, Outcome};
use vramq_schemas::topology::jobs_queue;
use vramq_testkit::not_run::not_run;
use vramq_tests::blocked_reply_queue::BlockedReplyQueue;
use vramq_tests::flow::{Flow, announce_lost_sessions, sessions_are_right};
use vramq_tests::job::Message;
use vramq_tests::node::Node;
use vramq_tests::operator::Operator;
use vramq_tests::setup::{Queue, full};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;
use vramq_tests::{on_own_node, on_own_nodes};

on_own_nodes!(a_killed_broker_loses_nothing, a_job_that_is_cut_off_each_time_ends,);
on_own_node!(a_blocked_broker_only_delays,);
on_own_nodes!(
    an_impatient_broker_closes_the_channel_alone,
    a_job_without_progress_before_the_consumer_timeout_ends,
);

const SLOTS: u64 = 16;

/// So slow that jobs are unacknowledged for as long as it takes to do something to the broker: some thirty jobs a second.
const SLOW_BYTES_PER_SECOND: u64 = 8_000;

const JOBS: usize = 500;

/// Enough for a minute: rabbitmqctl has taken 40 s on a busy machine.
const BLOCKED_JOBS: usize = 2_000;

/// To find out that a job is cut off each time may cost a few sessions.
const SESSIONS_MAX: usize = 4;

/// Seconds between AMQP heartbeats of the workers that alarms block: a peer that is silent for two of them counts as lost, so a machine that
/// stands still for less costs no session.
const HEARTBEAT_S: u64 = 10;

/// How long an alarm lasts: several heartbeats, while the broker reads nothing from the connection that publishes. Nothing but time
/// brings them.
const ALARM_LASTS: Duration = Duration::from_secs(5 * HEARTBEAT_S);

/// Waits until some of the jobs are answered, and more are in the worker's hands.
async fn in_full_flow(env: &TestEnv) -> Result<()> {
    until("jobs in hand among answered ones", async || {
        let answered = env.vhost.depth(REPLIES).await?;
        let open = env.vhost.depth(&jobs_queue(MODEL)).await?;
        let both = answered.zip(open);
        Ok(both.filter(|(answered, open)| answered.ready > 0 && open.unacked > 0 && open.ready > 0))
    })
    .await
    .map(drop)
}

/// SIGKILL, with unacknowledged jobs and unconfirmed replies: durable queues keep what was confirmed.
async fn a_killed_broker_loses_nothing(env: &mut TestEnv, node: &Node) -> Result<()> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let settings = [format!("broker.url={}", proxy.url()), format!("model.echo.slots_max={SLOTS}")];
    let worker = env.worker(&[&settings[0], &settings[1]]).await?;
    let mut flow = Flow::default();
    proxy.slow(SLOW_BYTES_PER_SECOND);
    flow.publish(env, JOBS).await?;
    in_full_flow(env).await?;
    node.kill().await?;
    worker.log.wait_for("no session yet").await?;
    node.restart().await?;
    proxy.pass();
    env.reconnect().await?;
    let answered = env.client.ready(REPLIES).await? as usize;
    flow.collect(&mut env.replies().await?, 0).await?;
    sessions_are_right(env, 1, SLOTS).await?;
    flow.publish(env, JOBS).await?;
    flow.collect(&mut env.replies().await?, 0).await?;
    let duplicates = flow.counter.duplicates();
    println!("{duplicates} of {answered} answered jobs came twice, {SLOTS} were in hand");
    // A killed node has lost the acks that a classic queue had not written yet: those of all jobs since it last wrote.
    let forgotten = if env.setup.queue == Queue::Classic { answered } else { 0 };
    ensure!(duplicates <= SLOTS as usize + forgotten, "{duplicates} duplicates");
    Ok(())
}

/// What makes a node block publishers, and what ends it.
struct Alarm {
    on: [&'static str; 2],
    off: [&'static str; 2],
}

const MEMORY: Alarm =
    Alarm { on: ["set_vm_memory_high_watermark", "0.0000001"], off: ["set_vm_memory_high_watermark", "0.4"] };
const DISK: Alarm =
    Alarm { on: ["set_disk_free_limit", "1000000000000000"], off: ["set_disk_free_limit", "1000000"] };

/// A worker in full flow on a broker that then takes no publishes.
async fn blocked(
    env: &mut TestEnv,
    node: &Node,
    flow: &mut Flow,
    alarm: &Alarm,
    drain_s: u32,
) -> Result<Worker> {
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}?heartbeat={HEARTBEAT_S}", proxy.url());
    let (slots, drain) = (format!("model.echo.slots_max={SLOTS}"), format!("worker.drain_s={drain_s}"));
    let worker = env.worker(&[&url, &slots, &drain]).await?;
    proxy.slow(SLOW_BYTES_PER_SECOND);
    flow.publish(env, BLOCKED_JOBS).await?;
    in_full_flow(env).await?;
    node.ctl(&alarm.on).await?;
    proxy.pass();
    worker.log.wait_for("the broker blocks publishers").await?;
    Ok(worker)
}

async fn a_blocked_broker_only_delays(env: &mut TestEnv, node: &Node) -> Result<()> {
    for text in [
        "the broker blocks publishers",
        "drain deadline passed",
        "session ended: the broker will redeliver the unacknowledged jobs",
    ] {
        env.announce(text);
    }
    the_session_stands(env, node).await?;
    a_drain_waits_but_not_for_ever(env, node).await
}

/// Under load, while heartbeats go by: nothing comes twice, and neither connection is lost.
async fn the_session_stands(env: &mut TestEnv, node: &Node) -> Result<()> {
    let mut flow = Flow::default();
    let mut operator = Operator::new(env).await?;
    // The broker does the same on both.
    let alarms = if full() { vec![MEMORY, DISK] } else { vec![MEMORY] };
    for alarm in alarms {
        let pause = operator.put_aside(&Command::Pause).await?;
        let resume = operator.put_aside(&Command::Resume).await?;
        let worker = blocked(env, node, &mut flow, &alarm, 3).await?;
        commands_take_effect(env, &operator, &worker).await?;
        tokio::time::sleep(ALARM_LASTS).await;
        ensure!(worker.log.count("session lost") == 0, "{}", worker.log.text());
        ensure!(operator.hears_nothing().await?, "the alarm did not block what the worker publishes");
        node.ctl(&alarm.off).await?;
        let paused = operator.answer_to(pause).await?;
        ensure!(paused.text.starts_with("takes no more jobs"), "{paused:?}");
        ensure!(operator.answer_to(resume).await?.outcome == Outcome::Done);
        flow.collect(&mut env.replies().await?, 0).await.with_context(|| worker.log.text())?;
        sessions_are_right(env, 1, SLOTS).await?;
        worker.drain().await?;
        worker.log.counts("\"consuming\"", 1).await?;
        ensure!(flow.counter.duplicates() == 0, "{} duplicates", flow.counter.duplicates());
    }
    Ok(())
}

/// The worker receives commands on the connection on which it publishes nothing. The answer to the first one waits, and the second
/// one is carried out nevertheless.
async fn commands_take_effect(env: &TestEnv, operator: &Operator, worker: &Worker) -> Result<()> {
    let queue = jobs_queue(MODEL);
    let consumers = async || env.vhost.consumers_of(&queue).await;
    until("a consumer", async || Ok((consumers().await? > 0).then_some(()))).await?;
    let carried_out = async |commands: usize| {
        operator.send_put_aside().await?;
        until("a command to be carried out", async || {
            Ok((worker.log.count("command answered") == commands).then_some(()))
        })
        .await
        .with_context(|| worker.log.text())
    };
    carried_out(1).await?;
    until("no consumer after the pause", async || Ok((consumers().await? == 0).then_some(()))).await?;
    // How many jobs the worker may hold on top of those without a confirmed reply depends: it need not consume again at once.
    carried_out(2).await
}

async fn a_drain_waits_but_not_for_ever(env: &mut TestEnv, node: &Node) -> Result<()> {
    let mut flow = Flow::default();
    // Longer than any `rabbitmqctl` takes, which takes tens of seconds on a machine under load.
    let worker = blocked(env, node, &mut flow, &MEMORY, 300).await?;
    worker.signal(Signal::TERM)?;
    worker.log.wait_for("\"draining\"").await?;
    node.ctl(&MEMORY.off).await?;
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    ensure!(worker.total("handed_back").await? == 0, "{}", worker.log.text());

    let worker = blocked(env, node, &mut flow, &MEMORY, 3).await?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(1), "{}", worker.log.text());
    node.ctl(&MEMORY.off).await?;
    let next = env.worker(&[&format!("model.echo.slots_max={SLOTS}")]).await?;
    flow.collect(&mut env.replies().await?, 0).await.with_context(|| next.log.text())?;
    next.drain().await?;
    let duplicates = flow.counter.duplicates();
    ensure!(duplicates <= SLOTS as usize, "{duplicates} duplicates");
    Ok(())
}

/// `consumer_timeout` closes the channel of a worker that holds a job for longer, and leaves the connection.
async fn make_impatient(env: &mut TestEnv, node: &Node, timeout_ms: u32) -> Result<()> {
    announce_lost_sessions(env);
    env.announce("held for longer than the broker's consumer_timeout");
    let eval = format!(
        "application:set_env(rabbit, consumer_timeout, {timeout_ms}), \
         application:set_env(rabbit, channel_tick_interval, 300)."
    );
    node.ctl(&["eval", &eval]).await.map(drop)
}

/// Whether `consumer_timeout` does not concern a worker's consumers: from RabbitMQ 4.3 on they have their own on quorum queues, and none
/// on classic ones.
async fn has_own_timeouts(env: &TestEnv) -> Result<bool> {
    env.vhost.broker_is_at_least(4, 3).await
}

/// A worker that was cut off by such a broker, while the pass of the job `held` lasted. It ends with the session: the next time
/// it takes no longer than others.
async fn cut_off(env: &mut TestEnv, node: &Node, held: Message, timeout_ms: u32) -> Result<Worker> {
    env.announce("a failpoint is set");
    make_impatient(env, node, timeout_ms).await?;
    let lasts = NamedTempFile::new()?;
    let drill = format!("worker.drill=pass=hang,job=held,while={}", lasts.path().display());
    let worker = env.worker(&[&drill, &format!("model.echo.slots_max={SLOTS}")]).await?;
    env.client.publish(MODEL, held).await?;
    let line = worker.log.wait_for("session lost").await?;
    ensure!(line.text().contains("PRECONDITION_FAILED"), "{}", line.text());
    lasts.close()?;
    Ok(worker)
}

async fn an_impatient_broker_closes_the_channel_alone(env: &mut TestEnv, node: &Node) -> Result<()> {
    if has_own_timeouts(env).await? {
        return is_not_cut_off(env, node).await;
    }
    let held = env.job("held", ["x"])?;
    // Longer than a busy machine stands still: nothing but the held job is cut off.
    let worker = cut_off(env, node, held, 20_000).await?;
    let mut replies = env.replies().await?;
    ensure!(replies.next().await?.id() == "held");
    worker.sessions(2).await?;
    sessions_are_right(env, 1, SLOTS).await?;
    let mut flow = Flow::default();
    flow.publish(env, 20).await?;
    flow.collect(&mut replies, 0).await?;
    worker.drain().await
}

/// A job is held for much longer than the broker's `consumer_timeout`, and the session goes on.
async fn is_not_cut_off(env: &mut TestEnv, node: &Node) -> Result<()> {
    env.announce("a failpoint is set");
    make_impatient(env, node, 1_000).await?;
    let lasts = NamedTempFile::new()?;
    let drill = format!("worker.drill=pass=hang,job=held,while={}", lasts.path().display());
    let worker = env.worker(&[&drill]).await?;
    env.client.publish(MODEL, env.job("held", ["x"])?).await?;
    // Nothing but time shows that the broker does not care.
    tokio::time::sleep(Duration::from_secs(10)).await;
    lasts.close()?;
    ensure!(env.replies().await?.next().await?.id() == "held");
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions == 1, "{sessions} sessions");
    worker.drain().await
}

/// A job that takes longer than the broker waits is cut off each time. It may not go on like that for ever, nor keep
/// the worker from its other jobs.
async fn a_job_that_is_cut_off_each_time_ends(env: &mut TestEnv, node: &Node) -> Result<()> {
    if has_own_timeouts(env).await? {
        not_run("this broker cuts off no job that a worker works on");
        return Ok(());
    }
    for text in ["job dead-lettered", "reply could not be delivered to the caller"] {
        env.announce(text);
    }
    env.leave("blocked-replies");
    let blocked = BlockedReplyQueue::declare(&env.client, env.setup.queue).await?;
    let held = blocked.receives(env.job("held", ["x"])?);
    // Less than the time for which a worker offers a refused reply again.
    let worker = cut_off(env, node, held, 600).await?;
    let mut flow = Flow::default();
    let mut replies = env.replies().await?;
    let mut letters = env.dead_letters().await?;
    let ended = async {
        // The job, and its results.
        let letters = letters.take(2).await?;
        ensure!(letters.iter().all(|letter| letter.id() == "held"));
        Ok(())
    };
    let ended = flow.during(env, &mut replies, ended).await;
    let sessions = worker.log.count("\"consuming\"");
    println!("{sessions} sessions, {} jobs answered meanwhile", flow.counter.jobs());
    ended?;
    ensure!(sessions <= SESSIONS_MAX, "{sessions} sessions");
    Ok(())
}

/// A pass that outlasts the broker's patience each time: its job is cut off once, and then ends.
async fn a_job_without_progress_before_the_consumer_timeout_ends(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if has_own_timeouts(env).await? {
        not_run("this broker cuts off no job that a worker works on");
        return Ok(());
    }
    // The worker looks at its watch once a second, and has a fifth of this for it: also on a machine that stands still for a moment.
    make_impatient(env, node, 20_000).await?;
    for text in ["a failpoint is set", "job dead-lettered"] {
        env.announce(text);
    }
    let worker = env.worker(&["worker.drill=pass=hang,job=endless"]).await?;
    let job = env.job("endless", ["x"])?;
    env.client.publish(MODEL, job.clone()).await?;
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body && letter.id() == "endless", "{:?}", letter.properties);
    ensure!(letter.dead_letter()?.reason == Reason::TimedOut, "{:?}", letter.dead_letter()?);
    ensure!(env.replies().await?.next().await?.failure()?.reason == Reason::TimedOut);
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions <= SESSIONS_MAX, "{sessions} sessions");
    worker.drain().await
}
