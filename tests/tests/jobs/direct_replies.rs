//! Callers that take replies on their channel (RabbitMQ's direct reply-to): forged addresses affect only their own jobs, and a
//! connection that is lost, silent or refused costs no reply or result.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use lapin::{BasicProperties, Confirmation, ExchangeKind};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::caller;
use vramq_tests::direct::{Caller, address, calling, with_pid};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::rejections::{all_published, keeps_serving};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(
    forged_addresses_end_once_and_delay_nobody,
    forged_addresses_of_commands_are_not_answered,
    a_caller_is_answered_after_the_connection_of_replies_was_cut,
    a_caller_is_answered_after_a_host_was_silent,
    without_a_second_connection_results_become_dead_letters,
);

const LOST: &str = "connection for direct replies lost";

/// What a client may write into `reply_to` and no broker would.
fn forged() -> Vec<String> {
    let rests = ["", ".", "x", "x.y", "x.y.z", "g2gCYQFhAg==.KBqIg8/EXSKLQGWg1+Yogw==", "\u{ff}\u{0}.y"];
    let mut forged: Vec<_> = rests.map(|rest| format!("amq.rabbitmq.reply-to.{rest}")).into();
    // Terms that are no process id; one of another encoding; one of a node that calls itself by its name.
    forged.extend([&[131, 97, 1][..], &[131, 119, 2, b'o', b'k'], &[131, 106]].map(with_pid));
    forged.push(with_pid(&[&[131, 103, 119, 7][..], b"reply@1", &[0, 0, 0, 1, 0, 0, 0, 0, 1]].concat()));
    forged.push(address("rabbit@localhost", 800, 1));
    forged.push(address("reply@nobody", 800, 1));
    // Any process of a node that ever was.
    forged.push(address("reply@1", 800, 0));
    forged
}

async fn forged_addresses_end_once_and_delay_nobody(env: &mut TestEnv) -> Result<()> {
    const ROUNDS: usize = 5;
    env.announce("job dead-lettered");
    // A job that cost one of them its session would come to the other one.
    let proxy = env.proxy().await?;
    let broker = format!("broker.url={}", proxy.url());
    let workers = [env.worker(&[&broker]).await?, env.worker(&[&broker]).await?];
    let forger = caller::Caller::new(env, "forger").await?;
    let neighbour = caller::Caller::new(env, "neighbour").await?;
    let mut bodies = BTreeMap::new();
    let (mut bad, mut good) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for (at, reply_to) in forged().iter().enumerate() {
            for malformed in [false, true] {
                let id = format!("forged {round} {at} {malformed}");
                let job = forger.job(&id, ["x"])?.with(|p| p.with_reply_to(reply_to.as_str().into()));
                let job = if malformed { job.with_body("{") } else { job };
                bodies.insert(id, (job.body.clone(), reply_to.clone()));
                bad.push(job);
                good.push(neighbour.job(&format!("neighbour {}", good.len()), ["x"])?);
            }
        }
    }
    let (count, neighbours) = (bad.len() + good.len(), good.len());
    tokio::try_join!(forger.client.publish_all(MODEL, bad), neighbour.client.publish_all(MODEL, good))?;
    let mut replies = neighbour.mailbox().await?;
    let mut answered: Vec<usize> = Vec::new();
    for reply in replies.take(neighbours).await? {
        ensure!(reply.kind()? == ReplyKind::Done, "{}", reply.id());
        answered.push(reply.id().strip_prefix("neighbour ").context("another's reply")?.parse()?);
    }
    answered.sort_unstable();
    ensure!(answered.into_iter().eq(0..neighbours), "each neighbour is answered once");
    drop(replies);

    let mut dead = env.dead_letters().await?;
    for letter in dead.take(bodies.len()).await? {
        let dossier = letter.dead_letter()?;
        let (body, reply_to) =
            bodies.remove(letter.id()).with_context(|| format!("{} twice", letter.id()))?;
        ensure!(dossier.reason == Reason::Malformed && letter.body == body, "{dossier:?}");
        ensure!(
            dossier.error.contains("not an address that RabbitMQ gives") && dossier.error.contains(&reply_to),
            "{dossier:?}"
        );
        ensure!(letter.properties.reply_to().as_ref().is_some_and(|to| to.as_str() == reply_to));
    }
    for worker in &workers {
        worker.drain().await?;
        let sessions = worker.log.count("\"consuming\"");
        ensure!(sessions == 1, "{} had to connect {sessions} times", worker.name);
    }
    // No reply went anywhere else: each job has one end.
    let published = all_published(&proxy).await?;
    ensure!(published == count, "{published} messages were published for {count} jobs");
    Ok(())
}

/// Commands come on the connection that takes the jobs.
async fn forged_addresses_of_commands_are_not_answered(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.client.declare_exchange(CONTROL_EXCHANGE, ExchangeKind::Direct).await?;
    let mut caller = Caller::open(&env.url).await?;
    let (foreign, own) = (address("reply@1", 800, 1), caller.address().await?);
    env.announce(LOST);
    for reply_to in forged().iter().chain([&foreign, &own]) {
        let properties = BasicProperties::default().with_reply_to(reply_to.as_str().into());
        let command = Message { properties, body: b"no command".to_vec(), as_worker: false };
        until("a worker that takes commands", async || {
            let confirmation = env.client.publish_to(CONTROL_EXCHANGE, CONTROL_ALL, command.clone()).await?;
            Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
        })
        .await?;
    }
    // A command with a true address gets its answer.
    ensure!(caller.next().await?.properties.kind().as_ref().is_some_and(|kind| kind.as_str() == "answer"));
    caller.leave().await?;
    keeps_serving(env, &worker).await
}

async fn a_caller_is_answered_after_the_connection_of_replies_was_cut(env: &mut TestEnv) -> Result<()> {
    // Where a call comes before the worker has noticed.
    env.announce(LOST);
    let worker = env.worker(&[]).await?;
    let mut caller = Caller::open(&env.url).await?;
    let name = format!("{} direct replies", worker.name);
    for call in 0..3 {
        caller.call(env.job(&format!("call {call}"), ["x"])?).await?;
        until("the connection of replies", async || {
            // The one that was cut before may still be listed.
            Ok((env.vhost.cut_worker(&name).await? > 0).then_some(()))
        })
        .await?;
    }
    caller.call(env.job("the last call", ["x"])?).await?;
    caller.leave().await?;
    keeps_serving(env, &worker).await
}

/// The broker takes the connection of direct replies, and never opens its channel.
async fn a_caller_is_answered_after_a_host_was_silent(env: &mut TestEnv) -> Result<()> {
    env.announce("no channel for direct replies");
    let proxy = env.proxy().await?;
    let worker = env.worker(&[&format!("broker.url={}", proxy.url())]).await?;
    let of_jobs = proxy.accepted();
    proxy.swallow_new();
    let mut caller = Caller::open(&env.url).await?;
    caller.publish(&env.job("call", ["x"])?.with(calling)).await?;
    until("a connection of replies", async || Ok((proxy.accepted() > of_jobs).then_some(()))).await?;
    proxy.pass();
    let reply = caller.next().await?;
    ensure!(reply.properties.message_id().as_ref().is_some_and(|id| id.as_str() == "call"));
    worker.log.counts("no channel for direct replies", 1).await?;
    until("no connection that is silent", async || Ok((proxy.open() == of_jobs + 1).then_some(()))).await?;
    caller.leave().await?;
    keeps_serving(env, &worker).await
}

async fn without_a_second_connection_results_become_dead_letters(env: &mut TestEnv) -> Result<()> {
    const JOBS: usize = 20;
    env.announce("the broker refuses a connection for direct replies");
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    let caller = Caller::open(&env.url).await?;
    // The test's own, the worker's, the caller's.
    env.vhost.limit_connections(3).await?;
    let mut dead = env.dead_letters().await?;
    for at in 0..JOBS {
        let id = format!("call {at}");
        let job = env.job(&id, ["x"])?.with(calling);
        caller.publish(&job).await?;
        let letters = dead.take(2).await?;
        ensure!(
            letters.iter().filter(|letter| letter.body == job.body).count() == 1,
            "no letter with the job"
        );
        for letter in &letters {
            let dossier = letter.dead_letter()?;
            ensure!(letter.id() == id && dossier.reason == Reason::Unroutable, "{dossier:?}");
            ensure!(dossier.error.contains("no connection for direct replies"), "{dossier:?}");
        }
    }
    drop(dead);
    worker
        .log
        .counts("refuses a connection for direct replies", 1)
        .await
        .context("how often the broker was asked")?;
    env.vhost.limit_connections(100).await?;
    caller.leave().await?;
    keeps_serving(env, &worker).await
}
