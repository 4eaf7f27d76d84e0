//! The broker's limit for messages: the one of the configuration that is shipped, and jobs in a queue that are larger than a new limit.

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use vramq_schemas::topology::{DELAYS_MS, delay_queue, jobs_queue};
use vramq_schemas::{BODY_BYTES_MAX, Reason, ReplyKind};
use vramq_tests::node::Node;
use vramq_tests::proxy::Cut;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_own_node, on_own_nodes};

on_own_nodes!(
    jobs_larger_than_the_broker_takes_end,
    headers_that_fill_a_small_frame_cost_no_session,
    a_rejection_that_is_lost_is_repeated,
);
on_own_node!(the_shipped_configuration_refuses_what_workers_would_dead_letter);

/// What the broker takes, and what is there already.
const LIMIT: usize = 50_000;
const LARGER: usize = 60_000;

/// What a worker says that meets the limit.
fn announce(env: &mut TestEnv) {
    for text in [
        "session lost",
        "will redeliver the unacknowledged jobs",
        "no session yet",
        "learned the broker's max_message_size",
        "larger than the broker accepts",
        "larger than this",
        "job dead-lettered",
    ] {
        env.announce(text);
    }
}

async fn jobs_larger_than_the_broker_takes_end(env: &mut TestEnv, node: &Node) -> Result<()> {
    announce(env);
    env.worker(&[]).await?.drain().await?;
    // One that can never be read, one whose reply is as large as itself, and one like any other.
    let unreadable = env.job("unreadable", ["x"])?.with_body("x".repeat(LARGER));
    let echoed = env.job("echoed", ["x".repeat(LARGER)])?;
    env.client.publish_all(MODEL, vec![unreadable.clone(), echoed.clone(), env.job("good", ["x"])?]).await?;
    node.configure(&format!("max_message_size = {LIMIT}\n")).await?;
    env.reconnect().await?;

    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    let mut answers = 0;
    // The good one may come twice: it was unacknowledged when the broker closed the channel.
    let (mut failed, mut letters) = (Vec::new(), env.dead_letters().await?);
    while failed.len() < 2 || answers == 0 {
        let reply = replies.next().await?;
        match reply.kind()? {
            ReplyKind::Failed => failed.push((reply.id().to_owned(), reply.failure()?.reason)),
            _ => answers += usize::from(reply.id() == "good"),
        }
    }
    failed.sort_by(|(one, _), (other, _)| one.cmp(other));
    let expected = [("echoed", Reason::TooLarge), ("unreadable", Reason::Malformed)];
    ensure!(failed.iter().map(|(id, reason)| (id.as_str(), *reason)).eq(expected), "{failed:?}");
    // The broker has dead-lettered them itself.
    for letter in letters.take(2).await? {
        let job = if letter.id() == "echoed" { &echoed } else { &unreadable };
        ensure!(letter.body == job.body && letter.headers().inner().contains_key("x-death"));
    }
    // A classic queue says of all jobs that they are redelivered, once its node has restarted: they take a detour.
    env.vhost.until_empty(&[jobs_queue(MODEL), delay_queue(MODEL, DELAYS_MS[0])]).await?;
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions <= 3, "{sessions} sessions");
    worker.drain().await?;
    while replies.next_within(vramq_tests::wait::SILENCE).await?.is_some() {}
    Ok(())
}

/// The dead letter would have more headers than the job, and the broker closes the connection over a frame that is too large.
async fn headers_that_fill_a_small_frame_cost_no_session(env: &mut TestEnv, node: &Node) -> Result<()> {
    for text in ["frame_max is smaller", "larger than the broker accepts", "job dead-lettered"] {
        env.announce(text);
    }
    env.worker(&[]).await?.drain().await?;
    node.configure("frame_max = 8192\n").await?;
    env.reconnect().await?;

    let worker = env.worker(&[]).await?;
    worker.log.wait_for("frame_max is smaller").await?;
    let filling = AMQPValue::LongString("h".repeat(8_000).into());
    let unreadable = env.job("unreadable", ["x"])?.with_body("{").with_header("filling", filling);
    env.client.publish_all(MODEL, vec![unreadable.clone(), env.job("good", ["x"])?]).await?;
    let mut replies = env.replies().await?;
    for reply in replies.take(2).await? {
        match reply.id() {
            "unreadable" => ensure!(reply.failure()?.reason == Reason::Malformed),
            _ => ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.failure()),
        }
    }
    // The broker has dead-lettered it itself.
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == unreadable.body && letter.headers().inner().contains_key("x-death"));
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions == 1, "{sessions} sessions");
    worker.drain().await
}

/// The broker never receives the worker's rejection, which would have dead-lettered the job. So the redelivered job must not simply be
/// acknowledged.
async fn a_rejection_that_is_lost_is_repeated(env: &mut TestEnv, node: &Node) -> Result<()> {
    announce(env);
    env.worker(&[]).await?.drain().await?;
    let job = env.job("unreadable", ["x"])?.with_body("x".repeat(LARGER));
    env.client.publish(MODEL, job.clone()).await?;
    node.configure(&format!("max_message_size = {LIMIT}\n")).await?;
    env.reconnect().await?;

    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    proxy.lose_acks();
    let worker = env.worker(&[&url]).await?;
    until("a lost rejection", async || Ok((proxy.lost_acks() > 0).then_some(()))).await?;
    proxy.pass();
    proxy.cut(Cut::Reset);
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body && letter.headers().inner().contains_key("x-death"));
    worker.drain().await?;
    // The caller got a `failed` reply each time.
    let mut replies = env.replies().await?;
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    while replies.next_within(vramq_tests::wait::SILENCE).await?.is_some() {}
    Ok(())
}

/// The broker refuses a body that is larger than `body_mib_max`, before a worker has to take it.
async fn the_shipped_configuration_refuses_what_workers_would_dead_letter(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    const QUEUE: &str = "large";
    node.configure(include_str!("../../../deploy/rabbitmq.conf")).await?;
    env.reconnect().await?;
    // A new one: a quorum queue has no leader yet when its node has just started.
    env.client.declare_queue(QUEUE, env.setup.queue.arguments()).await?;
    let message =
        |bytes: usize| Ok::<_, anyhow::Error>(env.job("large", ["x"])?.with_body(vec![b'x'; bytes]));
    env.client.publish_to("", QUEUE, message(BODY_BYTES_MAX)?).await?;
    let larger = env.client.publish_to("", QUEUE, message(BODY_BYTES_MAX + 1)?).await;
    let error = larger.err().context("the broker takes a larger body")?;
    ensure!(format!("{error:#}").contains("larger than configured max size"), "{error:#}");
    // The broker has closed the channel.
    env.reconnect().await?;
    ensure!(env.client.mailbox(QUEUE).await?.next().await?.body.len() == BODY_BYTES_MAX);
    Ok(())
}
