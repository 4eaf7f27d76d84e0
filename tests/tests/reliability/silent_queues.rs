//! A broker that never answers a request, on connections that stand: the worker gives the session up, and opens another.

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use vramq_tests::answers::answered_once;
use vramq_tests::flow::announce_lost_sessions;
use vramq_tests::frames::Request;
use vramq_tests::on_one_setup;
use vramq_tests::proxy::Proxy;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::Worker;

on_one_setup!(
    a_queue_count_without_an_answer_ends_the_session,
    a_fetch_without_an_answer_ends_the_session,
    a_channel_that_is_not_opened_ends_the_session,
);

/// Why a session ends over a request about a queue.
const NO_ANSWER: &str = "look at the queues: the broker has sent neither a job nor an answer for 60 s";

/// A worker behind a proxy.
async fn worker_behind_proxy(env: &mut TestEnv, settings: &[&str]) -> Result<(Worker, Arc<Proxy>)> {
    announce_lost_sessions(env);
    let proxy = env.proxy().await?;
    let url = format!("broker.url={}", proxy.url());
    let worker = env.worker(&[&[url.as_str()], settings].concat()).await?;
    Ok((worker, proxy))
}

/// Waits until the worker gives the session up for this reason, and lets the next one pass.
async fn given_up(worker: &Worker, proxy: &Proxy, why: &str) -> Result<()> {
    let line = worker.log.wait_for("session lost").await?;
    ensure!(line.text().contains(why), "{}", line.text());
    proxy.pass();
    worker.sessions(2).await
}

/// The worker counts its queues each second.
async fn a_queue_count_without_an_answer_ends_the_session(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = worker_behind_proxy(env, &[]).await?;
    proxy.swallow_requests(Request::DeclareQueue);
    given_up(&worker, &proxy, NO_ANSWER).await?;
    env.client.publish(MODEL, env.job("next", ["x"])?).await?;
    answered_once(&mut env.replies().await?, "next", &["x".to_owned()]).await?;
    worker.drain().await
}

/// The worker asks for a quarantined job, and takes no others meanwhile. When it has given up, it takes both.
async fn a_fetch_without_an_answer_ends_the_session(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = worker_behind_proxy(env, &[]).await?;
    proxy.swallow_requests(Request::Get);
    let suspect = env.job("suspect", ["x"])?.with_header("crashes", AMQPValue::LongLongInt(2)).as_worker();
    env.client.publish(MODEL, suspect).await?;
    worker.log.wait_for("quarantined jobs run next").await?;
    given_up(&worker, &proxy, NO_ANSWER).await.with_context(|| worker.log.text())?;
    answered_once(&mut env.replies().await?, "suspect", &["x".to_owned()]).await?;
    worker.drain().await
}

/// The worker asks for a channel for the first reply to a queue. Its other channels are open already.
async fn a_channel_that_is_not_opened_ends_the_session(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = worker_behind_proxy(env, &["broker.confirm_s=5"]).await?;
    proxy.swallow_requests(Request::OpenChannel);
    env.client.publish(MODEL, env.job("first", ["x"])?).await?;
    given_up(&worker, &proxy, "publish: the broker did not open a channel for a message within 10 s").await?;
    answered_once(&mut env.replies().await?, "first", &["x".to_owned()]).await?;
    worker.drain().await
}
