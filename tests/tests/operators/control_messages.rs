//! Commands to workers as messages: their answers, and their effects in the broker's view and in heartbeats.

use anyhow::{Context as _, Result, ensure};
use lapin::{BasicProperties, Confirmation};
use vramq_schemas::ReplyKind;
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::status::WorkerState;
use vramq_schemas::topology::{
    CONTROL_ALL, CONTROL_EXCHANGE, STATUS_EXCHANGE, WITHDRAWALS_EXCHANGE, control_key, jobs_queue,
};
use vramq_tests::job::Message;
use vramq_tests::operator::Operator;
use vramq_tests::proxy::Cut;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(a_pause_stops_deliveries_and_outlives_a_session, a_drain_on_command_loses_nothing,);
on_one_setup!(
    heartbeats_show_the_current_state,
    invalid_commands_affect_no_job,
    answers_go_only_where_replies_may,
    jobs_go_on_without_the_exchanges,
    exchanges_that_are_deleted_cost_no_session,
    the_log_level_changes,
);

const JOBS: usize = 30;

/// The consumers that the broker has of the jobs.
async fn consumers(env: &TestEnv) -> Result<usize> {
    env.vhost.consumers_of(&jobs_queue(MODEL)).await
}

async fn a_pause_stops_deliveries_and_outlives_a_session(env: &mut TestEnv) -> Result<()> {
    env.announce("session lost, connecting again");
    let proxy = env.proxy().await?;
    let worker = env.worker(&[&format!("broker.url={}", proxy.url())]).await?;
    let mut operator = Operator::new(env).await?;
    until("a consumer", async || Ok((consumers(env).await? > 0).then_some(()))).await?;
    let answer = operator.ask(&worker, &Command::Pause).await?;
    ensure!(
        (&answer.outcome, answer.state, answer.last) == (&Outcome::Done, WorkerState::Paused, true),
        "{answer:?}"
    );
    ensure!(
        answer.worker == worker.name && answer.text == "takes no more jobs; 0 unacknowledged jobs go on",
        "{answer:?}"
    );
    until("no consumer", async || Ok((consumers(env).await? == 0).then_some(()))).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ensure!(env.client.ready(&jobs_queue(MODEL)).await? as usize == JOBS);
    ensure!(worker.answers("/readyz", 503).await? == "paused: an operator paused the worker\n");

    ensure!(proxy.cut(Cut::Reset) > 0);
    until("another session", async || Ok((worker.log.count("session open") == 2).then_some(()))).await?;
    // The same operator resumes it in the next session.
    let again = operator.ask(&worker, &Command::Pause).await?;
    ensure!(again.state == WorkerState::Paused, "{again:?}");
    worker.log.wait_for("connected, but not consuming").await?;
    worker.log.counts("\"consuming\"", 1).await?;
    ensure!(env.client.ready(&jobs_queue(MODEL)).await? as usize == JOBS && consumers(env).await? == 0);

    let answer = operator.ask(&worker, &Command::Resume).await?;
    ensure!((&answer.outcome, answer.state) == (&Outcome::Done, WorkerState::Consuming), "{answer:?}");
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    let answer = operator.ask(&worker, &Command::Resume).await?;
    ensure!(answer.text == "was not paused", "{answer:?}");
    Ok(())
}

async fn a_drain_on_command_loses_nothing(env: &mut TestEnv) -> Result<()> {
    const MANY: usize = 400;
    let worker = env.worker(&[]).await?;
    let mut operator = Operator::new(env).await?;
    let mut replies = env.replies().await?;
    let mut counter = ReplyCounter::default();
    publish_many(env, 1, MANY, |job| job).await?;
    counter.collect(&mut replies, 1).await?;
    let answer = operator.ask(&worker, &Command::Drain).await?;
    ensure!((&answer.outcome, answer.state) == (&Outcome::Done, WorkerState::Draining), "{answer:?}");
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    let gone = operator.heartbeat(|heartbeat| heartbeat.state == WorkerState::Gone).await?;
    ensure!(gone.worker == worker.name);
    env.worker(&[]).await?;
    counter.collect(&mut replies, MANY).await?;
    counter.collect_rest(&mut replies).await?;
    ensure!(counter.duplicates() == 0, "{} duplicates", counter.duplicates());
    Ok(())
}

async fn heartbeats_show_the_current_state(env: &mut TestEnv) -> Result<()> {
    let mut operator = Operator::new(env).await?;
    let worker = env.worker(&["worker.heartbeat_s=1", "model.echo.slots_max=7"]).await?;
    let first = operator.heartbeat(|_| true).await?;
    ensure!(
        (first.worker.as_str(), first.pid, first.interval_ms) == (worker.name.as_str(), worker.pid, 1000)
    );
    ensure!(first.started_at_ms > 0 && first.sent_at_ms >= first.started_at_ms, "{first:?}");
    let ready = operator.heartbeat(|heartbeat| heartbeat.state == WorkerState::Consuming).await?;
    ensure!(ready.reason.is_none() && (ready.sessions_opened, ready.sessions_lost) == (1, 0), "{ready:?}");
    let model = ready.models.first().context("no model")?;
    ensure!(
        (model.model.as_str(), model.key.as_str(), model.slots, model.consuming) == (MODEL, MODEL, 7, true)
    );
    let device = ready.devices.first().context("no device")?;
    ensure!(
        device.device == "cpu" && device.total == 2048 << 20 && device.free <= device.total,
        "{device:?}"
    );
    ensure!(device.budget > 0 && device.budget <= device.free, "{device:?}");

    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    let counted = operator.heartbeat(|heartbeat| {
        heartbeat.models.iter().any(|model| model.counters.answered == JOBS as u64 && model.in_hand == 0)
    });
    let counted = counted.await?;
    let counters = &counted.models[0].counters;
    ensure!(counters.received == JOBS as u64 && counters.items == JOBS as u64, "{counters:?}");

    // A change of state is sent at once, not with the next heartbeat.
    operator.ask(&worker, &Command::Pause).await?;
    let paused = operator.heartbeat(|heartbeat| heartbeat.state == WorkerState::Paused).await?;
    ensure!(
        paused.reason.as_deref() == Some("an operator paused the worker") && !paused.models[0].consuming,
        "{paused:?}"
    );
    worker.drain().await?;
    operator.heartbeat(|heartbeat| heartbeat.state == WorkerState::Gone).await?;
    Ok(())
}

async fn invalid_commands_affect_no_job(env: &mut TestEnv) -> Result<()> {
    const FLOOD: usize = 3000;
    let worker = env.worker(&[]).await?;
    let mut operator = Operator::new(env).await?;
    let long = format!(r#"{{"command": "cancel", "job": "{}"}}"#, "x".repeat(5000));
    let nested = "[".repeat(4000);
    let bodies: [&[u8]; 9] = [
        b"",
        b"no json",
        b"\xff\xfe\0",
        b"{}",
        br#"{"command": "explode"}"#,
        br#"{"command": "cancel"}"#,
        br#"{"command": "set", "log": 7}"#,
        long.as_bytes(),
        nested.as_bytes(),
    ];
    for body in bodies {
        operator.say(CONTROL_ALL, body).await?;
        let answer = operator.answer().await?;
        ensure!(answer.outcome == Outcome::Refused && answer.last && !answer.text.is_empty(), "{answer:?}");
    }
    let answer = operator.ask(&worker, &Command::Set { log: "[".to_owned() }).await?;
    ensure!(answer.outcome == Outcome::Refused && answer.text.contains("not a filter"), "{answer:?}");
    // Without a place for answers, or with one where they would be jobs.
    for reply_to in ["", "vramq.jobs.echo", "nowhere"] {
        for at in 0..FLOOD / 3 {
            let body = bodies[at % bodies.len()].to_vec();
            let properties = BasicProperties::default().with_reply_to(reply_to.into());
            let message = Message { properties, body, as_worker: false };
            env.client.publish_to(CONTROL_EXCHANGE, CONTROL_ALL, message).await?;
        }
    }
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    let answer = operator.ask(&worker, &Command::Pause).await?;
    ensure!(answer.outcome == Outcome::Done, "{answer:?}");
    worker.log.counts("\"consuming\"", 1).await?;
    ensure!(worker.get("/livez").await?.0 == 200);
    Ok(())
}

async fn jobs_go_on_without_the_exchanges(env: &mut TestEnv) -> Result<()> {
    // Makes what there has to be.
    env.worker(&[]).await?.drain().await?;
    for exchange in [STATUS_EXCHANGE, CONTROL_EXCHANGE, WITHDRAWALS_EXCHANGE] {
        env.vhost.delete_exchange(exchange).await?;
    }
    env.announce("are unavailable; jobs are not affected");
    let worker = env.worker(&["broker.declare=false"]).await?;
    worker.log.wait_for("are unavailable; jobs are not affected").await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    // Somebody makes them: the worker finds them, and says nothing of it.
    let mut operator = Operator::new(env).await?;
    operator.heartbeat(|heartbeat| heartbeat.worker == worker.name).await?;
    ensure!(operator.ask(&worker, &Command::Pause).await?.outcome == Outcome::Done);
    worker.drain().await?;
    ensure!(
        worker.log.count("are unavailable") == 1 && worker.log.count("\"consuming\"") == 1,
        "{}",
        worker.log.text()
    );
    Ok(())
}

async fn exchanges_that_are_deleted_cost_no_session(env: &mut TestEnv) -> Result<()> {
    env.announce("are unavailable; jobs are not affected");
    let worker = env.worker(&["worker.heartbeat_s=1"]).await?;
    Operator::new(env).await?.heartbeat(|_| true).await?;
    env.vhost.delete_exchange(STATUS_EXCHANGE).await?;
    worker.log.wait_for("are unavailable; jobs are not affected").await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    // It declares the exchange again, and is heard again.
    until("heartbeats", async || {
        let listed = env.client.bind_queue("operator.heartbeats", STATUS_EXCHANGE, "").await;
        Ok(listed.ok())
    })
    .await?;
    let mut operator = Operator::new(env).await?;
    operator.heartbeat(|heartbeat| heartbeat.worker == worker.name).await?;
    worker.drain().await?;
    worker.log.counts("\"consuming\"", 1).await?;
    Ok(())
}

async fn the_log_level_changes(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let mut operator = Operator::new(env).await?;
    let set = |log: &str| Command::Set { log: log.to_owned() };
    ensure!(operator.ask(&worker, &set("vramq_worker=debug")).await?.outcome == Outcome::Done);
    env.announce("job dead-lettered");
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("no job")).await?;
    worker.log.wait_for("dead letter confirmed").await?;
    ensure!(operator.ask(&worker, &set("off")).await?.outcome == Outcome::Done);
    ensure!(operator.ask(&worker, &Command::Pause).await?.outcome == Outcome::Done);
    ensure!(operator.ask(&worker, &set("info")).await?.outcome == Outcome::Done);
    env.dead_letters().await?.next().await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Failed);
    // The whole log is here when the process has ended.
    worker.drain().await?;
    let answered = |command: &str| worker.log.count(&format!("\"command\":\"{command}\""));
    ensure!(answered("set") >= 2 && answered("pause") == 0, "{}", worker.log.text());
    Ok(())
}

/// With `reply.allow` a command cannot make a worker publish into another one's queue.
async fn answers_go_only_where_replies_may(env: &mut TestEnv) -> Result<()> {
    const FORBIDDEN: &str = "payroll";
    const ALLOWED: &str = "answers.of-operators";
    let worker = env.worker(&["reply.allow=replies,answers.*"]).await?;
    for queue in [FORBIDDEN, ALLOWED] {
        env.client.declare_queue(queue, env.setup.queue.arguments()).await?;
    }
    let key = control_key(&worker.name);
    let say = async |command: &Command, reply_to: &str| {
        let properties = BasicProperties::default().with_reply_to(reply_to.into());
        let message = Message { properties, body: serde_json::to_vec(command)?, as_worker: false };
        until("a worker that listens", async || {
            let said = env.client.publish_to(CONTROL_EXCHANGE, &key, message.clone()).await?;
            Ok(matches!(said, Confirmation::Ack(None)).then_some(()))
        })
        .await
    };
    // It is carried out, and the log tells why nobody hears of it.
    say(&Command::Pause, FORBIDDEN).await?;
    until("no consumer", async || Ok((consumers(env).await? == 0).then_some(()))).await?;
    say(&Command::Resume, ALLOWED).await?;
    let mut answers = env.client.mailbox(ALLOWED).await?;
    let answer: Answer = serde_json::from_slice(&answers.next().await?.body)?;
    ensure!((&answer.outcome, answer.state) == (&Outcome::Done, WorkerState::Consuming), "{answer:?}");
    // Answers are published in their order, so the first one would be there.
    ensure!(env.client.ready(FORBIDDEN).await? == 0);
    let line = worker.log.wait_for("command answered").await?;
    let unsent = line.field("unsent").and_then(|why| why.as_str()).unwrap_or_default();
    ensure!(unsent.contains(FORBIDDEN) && unsent.contains("reply.allow"), "{}", line.text());
    Ok(())
}
