//! Callers that take replies on their channel (RabbitMQ's direct reply-to): forged addresses, and callers that are gone, affect
//! only their own jobs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use lapin::{BasicProperties, Confirmation, ExchangeKind};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::caller;
use vramq_tests::direct::{Caller, address, calling, node_of, with_pid};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::rejections::{counted_worker, has_published, keeps_serving};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

on_queue_types!(
    forged_addresses_end_once_and_delay_nobody,
    forged_addresses_of_commands_are_not_answered,
    callers_that_left_affect_no_other_job,
    ever_different_callers_that_left_cost_few_connections,
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
    let (worker, proxy) = counted_worker(env, &[]).await?;
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
    drop(dead);
    keeps_serving(env, &worker).await?;
    // No reply went anywhere else: each job has one end.
    has_published(&worker, &proxy, count + 1).await
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

async fn callers_that_left_affect_no_other_job(env: &mut TestEnv) -> Result<()> {
    // So that there are fewer letters than the 32 acks that a quorum queue writes at once: of more it forgets the rest when the
    // mailbox closes its channel.
    const ROUNDS: usize = 2;
    env.announce(LOST);
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    let worker = env.worker(&[]).await?;
    let stranger = caller::Caller::new(env, "stranger").await?;
    let neighbour = caller::Caller::new(env, "neighbour").await?;
    let mut caller = Caller::open(&env.url).await?;
    let left = Caller::open(&env.url).await?;
    let (dead_address, (node, creation)) = (left.address().await?, node_of(&caller.address().await?)?);
    left.leave().await?;

    let (mut calls, mut neighbours, mut strangers) = (0, 0, 0);
    for round in 0..ROUNDS {
        let departed = [
            dead_address.clone(),
            // Of an earlier start of the node, of a process that cannot be, of nodes that are not there.
            address(&node, 800, creation ^ 1),
            address(&node, u32::MAX, creation),
            address("reply@1", 800, 1),
            address(&format!("reply@{}", 2 + round), 800, creation),
        ];
        for (at, reply_to) in departed.iter().enumerate() {
            for malformed in [false, true] {
                let id = format!("stranger {round} {at} {malformed}");
                let job = stranger.job(&id, ["x"])?.with(|p| p.with_reply_to(reply_to.as_str().into()));
                stranger.publish(if malformed { job.with_body("{") } else { job }).await?;
                strangers += 1;
            }
            neighbour.publish(neighbour.job(&format!("neighbour {neighbours}"), ["x"])?).await?;
            neighbours += 1;
            caller.publish(&env.job(&format!("call {calls}"), ["x"])?.with(calling)).await?;
            calls += 1;
        }
    }
    neighbours_are_answered_once(&neighbour, neighbours).await?;
    calls_are_answered_once(&mut caller, env, calls).await?;
    caller.leave().await?;
    keeps_serving(env, &worker).await?;
    departed_jobs_ended_once(env, &worker, strangers).await
}

/// Each address is of another node that is not there.
async fn ever_different_callers_that_left_cost_few_connections(env: &mut TestEnv) -> Result<()> {
    const STRANGERS: usize = 16;
    // `LETHAL_MAX` of the worker.
    const CONNECTIONS_MAX: usize = 6;
    env.announce(LOST);
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    let worker = env.worker(&[]).await?;
    let stranger = caller::Caller::new(env, "stranger").await?;
    let neighbour = caller::Caller::new(env, "neighbour").await?;
    let mut caller = Caller::open(&env.url).await?;
    for at in 0..STRANGERS {
        let malformed = at % 2 == 1;
        let job = stranger.job(&format!("stranger {at} {malformed}"), ["x"])?;
        let job = job.with(|p| p.with_reply_to(address(&format!("reply@{}", 2 + at), 800, 1).into()));
        stranger.publish(if malformed { job.with_body("{") } else { job }).await?;
        neighbour.publish(neighbour.job(&format!("neighbour {at}"), ["x"])?).await?;
        caller.publish(&env.job(&format!("call {at}"), ["x"])?.with(calling)).await?;
    }
    neighbours_are_answered_once(&neighbour, STRANGERS).await?;
    calls_are_answered_once(&mut caller, env, STRANGERS).await?;
    caller.leave().await?;
    let lost = worker.log.count(LOST);
    ensure!(lost <= CONNECTIONS_MAX, "{lost} connections");
    keeps_serving(env, &worker).await?;
    departed_jobs_ended_once(env, &worker, STRANGERS).await
}

async fn neighbours_are_answered_once(neighbour: &caller::Caller, jobs: usize) -> Result<()> {
    let mut replies = neighbour.mailbox().await?;
    let mut answered: Vec<_> = replies.take(jobs).await?.iter().map(|reply| reply.id().to_owned()).collect();
    answered.sort_unstable();
    let mut expected: Vec<_> = (0..jobs).map(|at| format!("neighbour {at}")).collect();
    expected.sort_unstable();
    ensure!(answered == expected, "{answered:?}");
    Ok(())
}

/// And one call more, whose reply is the next.
async fn calls_are_answered_once(caller: &mut Caller, env: &TestEnv, calls: usize) -> Result<()> {
    let mut answered = BTreeMap::new();
    for _ in 0..calls {
        let reply = caller.next().await?;
        let id = reply.properties.message_id().as_ref().map(ToString::to_string);
        *answered.entry(id.context("no id")?).or_insert(0) += 1;
    }
    ensure!((0..calls).all(|at| answered.get(&format!("call {at}")) == Some(&1)), "{answered:?}");
    caller.call(env.job("the last call", ["x"])?).await?;
    Ok(())
}

/// Malformed jobs are one letter each. The others count as answered where the broker does not mind the address; where it closes
/// the connection over it, they are a letter with the job and one with its results.
async fn departed_jobs_ended_once(env: &mut TestEnv, worker: &Worker, jobs: usize) -> Result<()> {
    until("no job is left", async || Ok((env.client.ready(&jobs_queue(MODEL)).await? == 0).then_some(())))
        .await?;
    worker.drain().await?;
    let dead = usize::try_from(worker.total("dead").await?)?;
    ensure!(dead >= jobs / 2, "{dead} jobs are dead of {} malformed ones", jobs / 2);
    let letters = dead + (dead - jobs / 2);
    let mut ends: BTreeMap<String, Vec<Reason>> = BTreeMap::new();
    for letter in env.dead_letters().await?.take(letters).await? {
        let dossier = letter.dead_letter()?;
        ends.entry(letter.id().to_owned()).or_default().push(dossier.reason);
    }
    let is_well = |(id, reasons): (&String, &Vec<Reason>)| match &reasons[..] {
        [Reason::Malformed] => id.ends_with("true"),
        [Reason::Unroutable, Reason::Unroutable] => id.ends_with("false"),
        _ => false,
    };
    ensure!(ends.iter().all(is_well), "{ends:?}");
    let malformed = ends.keys().filter(|id| id.ends_with("true")).count();
    ensure!(malformed == jobs / 2, "{malformed} letters of {} malformed jobs", jobs / 2);
    let unroutable = ends.len() - malformed;
    ensure!(ends.len() == dead, "{dead} jobs are dead: {ends:?}");
    ensure!((unroutable > 0) == (worker.log.count(LOST) > 0), "{unroutable} jobs without a caller: {ends:?}");
    Ok(())
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
            Ok((env.vhost.cut_worker(&name).await? == 1).then_some(()))
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
    ensure!(worker.log.count("no channel for direct replies") == 1, "{}", worker.log.text());
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
    let refused = worker.log.count("refuses a connection for direct replies");
    ensure!(refused == 1, "the broker was asked {refused} times");
    env.vhost.limit_connections(100).await?;
    caller.leave().await?;
    keeps_serving(env, &worker).await
}
