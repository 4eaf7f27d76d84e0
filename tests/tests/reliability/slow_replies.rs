//! Large replies on a slow network. What is published behind one on the same connection arrives only after it, which may take longer than
//! `broker.confirm_s`. No reply is given up for that, and no session ends.

use anyhow::{Result, ensure};
use tempfile::NamedTempFile;
use vramq_tests::answers::answered_once;
use vramq_tests::direct::{Caller, calling};
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::on_one_setup;
use vramq_tests::proxy::Proxy;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

on_one_setup!(
    a_first_reply_waits_for_a_large_one_on_another_channel,
    #[ignore = "a direct reply has half a minute, so this takes a minute"]
    a_large_direct_reply_has_the_time_that_it_needs,
);

/// More than the slowest network for which a worker allows large replies more time.
const SLOW_BYTES_PER_SECOND: u64 = 100_000;

/// The first replies to these queues are the first messages on two channels, which stay open.
const EARLIER: [&str; 2] = ["earlier-0", "earlier-1"];

/// The queues of the replies that are large, and small.
const QUEUES: [&str; 2] = ["large", "small"];

/// A job whose reply goes to a queue.
fn for_queue(env: &TestEnv, queue: &str, text: &str) -> Result<Message> {
    Ok(env.job(queue, [text])?.with(|properties| properties.with_reply_to(queue.into())))
}

/// Opens two channels for first replies: neither of two replies is confirmed before the other one is published.
async fn open_channels(env: &TestEnv, proxy: &Proxy) -> Result<()> {
    proxy.hold_confirms();
    for queue in EARLIER {
        env.client.publish(MODEL, for_queue(env, queue, "x")?).await?;
    }
    until("both replies", async || Ok((proxy.published() == EARLIER.len()).then_some(()))).await?;
    proxy.pass();
    for queue in EARLIER {
        answered_once(&mut env.client.mailbox(queue).await?, queue, &["x".to_owned()]).await?;
    }
    Ok(())
}

/// The worker holds the large job when the network becomes slow, so only its reply is slow.
async fn held_until_the_network_is_slow(
    worker: &Worker,
    proxy: &Proxy,
    publish: impl AsyncFnOnce() -> Result<()>,
    holds: NamedTempFile,
) -> Result<()> {
    publish().await?;
    figures(worker, "the large job in hand", |figures| figures.sum("vramq_jobs_in_hand") > 0).await?;
    proxy.slow(SLOW_BYTES_PER_SECOND);
    Ok(holds.close()?)
}

/// A worker behind a proxy that holds the job `large` until the file is gone.
async fn holding_worker(env: &mut TestEnv, proxy: &Proxy, setting: &str) -> Result<(Worker, NamedTempFile)> {
    env.announce("a failpoint is set");
    let holds = NamedTempFile::new()?;
    let broker = format!("broker.url={}", proxy.url());
    let drill = format!("worker.drill=pass=hang,job=large,while={}", holds.path().display());
    Ok((env.worker(&[&broker, &drill, setting]).await?, holds))
}

/// No reply was given up, and no session lost.
async fn nothing_was_given_up(worker: &Worker) -> Result<()> {
    let now = Figures::of(worker).await?;
    ensure!(now.sum("vramq_jobs_dead_lettered_total") == 0, "{}", worker.log.text());
    ensure!(now.sum("vramq_sessions_opened_total") == 1, "{}", worker.log.text());
    worker.drain().await
}

async fn a_first_reply_waits_for_a_large_one_on_another_channel(env: &mut TestEnv) -> Result<()> {
    for queue in EARLIER.iter().chain(&QUEUES) {
        env.client.declare_queue(queue, env.setup.queue.arguments()).await?;
    }
    let proxy = env.proxy().await?;
    // A quarter of the time that the large reply takes.
    let (worker, holds) = holding_worker(env, &proxy, "broker.confirm_s=5").await?;
    open_channels(env, &proxy).await?;
    let text = "x".repeat(2 << 20);
    let texts = [text.as_str(), "small"];
    let publish = async || {
        for (queue, text) in QUEUES.iter().zip(texts) {
            env.client.publish(MODEL, for_queue(env, queue, text)?).await?;
        }
        Ok(())
    };
    held_until_the_network_is_slow(&worker, &proxy, publish, holds).await?;
    for (queue, text) in QUEUES.iter().zip(texts) {
        answered_once(&mut env.client.mailbox(queue).await?, queue, &[text.to_owned()]).await?;
    }
    nothing_was_given_up(&worker).await
}

async fn a_large_direct_reply_has_the_time_that_it_needs(env: &mut TestEnv) -> Result<()> {
    let proxy = env.proxy().await?;
    let (worker, holds) = holding_worker(env, &proxy, "broker.confirm_s=30").await?;
    let mut caller = Caller::open(&env.url).await?;
    // It takes forty seconds.
    let text = "x".repeat(4 << 20);
    let job = env.job("large", [text.as_str()])?.with(calling);
    let publish = async || caller.publish(&job).await;
    held_until_the_network_is_slow(&worker, &proxy, publish, holds).await?;
    let reply = caller.next().await?;
    ensure!(reply.data.len() > text.len(), "{:?}", reply.properties);
    caller.leave().await?;
    nothing_was_given_up(&worker).await
}
