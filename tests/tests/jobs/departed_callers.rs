//! Callers that take replies on their channel (RabbitMQ's direct reply-to) and are gone, or never were: up to 3.10.8 at least, the broker
//! closes the connection over some of their addresses. Each costs its own job, and all of them together a few connections.
//!
//! Callers are users of the broker.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use lapin::BasicProperties;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::caller;
use vramq_tests::client::{Client, Mailbox};
use vramq_tests::direct::{Caller, address, address_of, calling, node_of};
use vramq_tests::job::Message;
use vramq_tests::metrics::figures;
use vramq_tests::rejections::{counted_worker, keeps_serving};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_one_setup!(a_broker_closes_connections_over_nodes_and_large_numbers);
on_queue_types!(
    callers_who_have_hung_up_affect_no_other_job,
    very_many_unknown_addresses_cost_few_connections
);

const LOST: &str = "connection for direct replies lost";

/// Whether the broker closes connections over any well-formed address.
async fn is_vulnerable(env: &TestEnv) -> Result<bool> {
    Ok(!env.vhost.broker_is_at_least(4, 0).await?)
}

/// Checks the facts by which workers decide which addresses are like one that the broker took, or over which it closed the connection.
async fn a_broker_closes_connections_over_nodes_and_large_numbers(env: &mut TestEnv) -> Result<()> {
    let dead_address = address_of_departed(env).await?;
    let (node, creation) = node_of(&dead_address)?;
    let is_vulnerable = is_vulnerable(env).await?;
    for (what, reply_to, closes) in [
        ("a caller that left", dead_address, false),
        ("an earlier start of the node", address(&node, 800, creation ^ 1), false),
        ("numbers of as many bits as its Erlang has", address_of(&node, [0x7fff, 0x1fff, creation]), false),
        ("an id of one bit more", address_of(&node, [0x8000, 0, creation]), is_vulnerable),
        ("a serial of one bit more", address_of(&node, [800, 0x2000, creation]), is_vulnerable),
        ("the largest id", address(&node, u32::MAX, creation), is_vulnerable),
        ("a node that is not there", address("reply@1", 800, creation), is_vulnerable),
    ] {
        let client = Client::connect(&env.url).await?;
        let reply = Message { properties: BasicProperties::default(), body: b"x".to_vec(), as_worker: false };
        let published = client.publish_to("", &reply_to, reply).await;
        match &published {
            Ok(_) => client.close().await?,
            Err(error) => ensure!(error.is::<lapin::Error>(), "{what}: {error:#}"),
        }
        ensure!(published.is_err() == closes, "{what}: {published:?}");
    }
    Ok(())
}

async fn callers_who_have_hung_up_affect_no_other_job(env: &mut TestEnv) -> Result<()> {
    // Keeps the number of letters below 32, the acks that a quorum queue writes at once: the rest of a larger number would be lost when the
    // mailbox closes its channel.
    const ROUNDS: usize = 2;
    let worker = env.worker(&[]).await?;
    let users = Users::new(env).await?;
    let mut direct = Caller::open(&users.caller.url).await?;
    let dead_address = address_of_departed(env).await?;
    let (node, creation) = node_of(&dead_address)?;

    let (mut calls, mut strangers) = (0, 0);
    for round in 0..ROUNDS {
        let departed = [
            dead_address.clone(),
            // Of an earlier start of the node, of a process that cannot be, of nodes that are not there.
            address(&node, 800, creation ^ 1),
            address(&node, u32::MAX, creation),
            address("reply@1", 800, 1),
            address(&format!("reply@{}", 2 + round), 800, creation),
        ];
        for reply_to in &departed {
            for _ in 0..2 {
                users.publish_as_stranger(strangers, reply_to).await?;
                strangers += 1;
            }
            users.publish_as_others(&direct, calls).await?;
            calls += 1;
        }
    }
    users.others_are_answered_once(&mut direct, calls).await?;
    direct.leave().await?;
    keeps_serving(env, &worker).await?;
    until("no job is left", async || Ok((env.client.ready(&jobs_queue(MODEL)).await? == 0).then_some(())))
        .await?;
    worker.drain().await?;
    let dead = usize::try_from(worker.total("dead").await?)?;
    let unroutable = departed_jobs_ended_once(&mut env.dead_letters().await?, dead, strangers).await?;
    ensure!((unroutable > 0) == (worker.log.count(LOST) > 0), "{unroutable} jobs without a caller");
    Ok(())
}

/// Addresses of fifty processes that the callers' node cannot have, and of fifty nodes that are not there, beside a caller that was
/// answered before. A new caller on its node is answered, too.
async fn very_many_unknown_addresses_cost_few_connections(env: &mut TestEnv) -> Result<()> {
    const STRANGERS: usize = 100;
    /// Connections that the broker may close within a minute, before the worker publishes to no stranger's address.
    const CUTS_MAX: usize = 6;
    env.announce("the broker keeps closing the connection for direct replies");
    let (worker, proxy) = counted_worker(env, &[]).await?;
    let of_jobs = proxy.accepted();
    let (node, creation) = node_of(&address_of_departed(env).await?)?;
    let users = Users::new(env).await?;
    let mut direct = Caller::open(&users.caller.url).await?;
    direct.call(users.caller.job("the first call", ["x"])?).await?;

    for at in 0..STRANGERS {
        let lethal = match u32::try_from(at)? {
            id if at < STRANGERS / 2 => address(&node, 0x8000 + id, creation),
            number => address(&format!("reply@{number}"), 800, 1),
        };
        users.publish_as_stranger(at, &lethal).await?;
        users.publish_as_others(&direct, at).await?;
    }
    users.others_are_answered_once(&mut direct, STRANGERS).await?;
    let settled = figures(&worker, "all jobs to end", |figures| {
        figures.sum("vramq_jobs_received_total") == 1 + 3 * STRANGERS
            && figures.sum("vramq_jobs_in_hand") == 0
    })
    .await?;
    // None comes twice.
    direct.call(users.caller.job("the last call", ["x"])?).await?;
    direct.leave().await?;
    let mut newcomer = Caller::open(&users.caller.url).await?;
    newcomer.call(users.caller.job("a newcomer's call", ["x"])?).await?;
    newcomer.leave().await?;
    let dead = settled.sum("vramq_jobs_dead_lettered_total");
    let mut letters = env.dead_letters().await?;
    let unroutable = departed_jobs_ended_once(&mut letters, dead, STRANGERS).await?;
    let connections = proxy.accepted() - of_jobs;
    if is_vulnerable(env).await? {
        ensure!(unroutable == STRANGERS / 2, "{unroutable} jobs without a caller");
        ensure!(connections <= 1 + CUTS_MAX + 1, "{connections} connections for direct replies");
    } else {
        ensure!(unroutable == 0 && connections == 1, "{unroutable} jobs, {connections} connections");
    }
    keeps_serving(env, &worker).await
}

/// The address of a caller that has left. Its node is there.
async fn address_of_departed(env: &TestEnv) -> Result<String> {
    let caller = Caller::open(&env.url).await?;
    let address = caller.address().await?;
    caller.leave().await?;
    Ok(address)
}

/// Who publishes: to addresses without a caller, to a queue, and with direct reply-to.
struct Users {
    stranger: caller::Caller,
    neighbour: caller::Caller,
    caller: caller::Caller,
}

impl Users {
    async fn new(env: &mut TestEnv) -> Result<Self> {
        env.announce(LOST);
        env.announce("job dead-lettered");
        env.announce("reply could not be delivered to the caller");
        Ok(Self {
            stranger: caller::Caller::new(env, "stranger").await?,
            neighbour: caller::Caller::new(env, "neighbour").await?,
            caller: caller::Caller::new(env, "caller").await?,
        })
    }

    /// Every second job has a body that cannot be read.
    async fn publish_as_stranger(&self, at: usize, reply_to: &str) -> Result<()> {
        let is_malformed = at % 2 == 1;
        let job = self.stranger.job(&format!("stranger {at} {is_malformed}"), ["x"])?;
        let job = job.with(|p| p.with_reply_to(reply_to.into()));
        self.stranger.publish(if is_malformed { job.with_body("{") } else { job }).await
    }

    async fn publish_as_others(&self, direct: &Caller, at: usize) -> Result<()> {
        self.neighbour.publish(self.neighbour.job(&format!("neighbour {at}"), ["x"])?).await?;
        direct.publish(&self.caller.job(&format!("call {at}"), ["x"])?.with(calling)).await
    }

    async fn others_are_answered_once(&self, direct: &mut Caller, count: usize) -> Result<()> {
        let (mut neighbours, mut calls) = (BTreeMap::new(), BTreeMap::new());
        for reply in self.neighbour.mailbox().await?.take(count).await? {
            ensure!(reply.kind()? == ReplyKind::Done, "{}", reply.id());
            *neighbours.entry(reply.id().to_owned()).or_insert(0) += 1;
        }
        for _ in 0..count {
            let id = direct.next().await?.properties.message_id().as_ref().map(ToString::to_string);
            *calls.entry(id.context("no id")?).or_insert(0) += 1;
        }
        let once = |name: &str| (0..count).map(|at| (format!("{name} {at}"), 1)).collect::<BTreeMap<_, _>>();
        ensure!(neighbours == once("neighbour"), "{neighbours:?}");
        ensure!(calls == once("call"), "{calls:?}");
        Ok(())
    }
}

/// Malformed jobs are one letter each. The others count as answered where the broker does not mind the address; where it closes
/// the connection over it, they are a letter with the job and one with its results. How many these are.
async fn departed_jobs_ended_once(letters: &mut Mailbox, dead: usize, jobs: usize) -> Result<usize> {
    ensure!(dead >= jobs / 2, "{dead} jobs are dead of {} malformed ones", jobs / 2);
    let unroutable = dead - jobs / 2;
    let mut ends: BTreeMap<String, Vec<Reason>> = BTreeMap::new();
    for letter in letters.take(dead + unroutable).await? {
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
    ensure!(ends.len() == dead, "{dead} jobs are dead: {ends:?}");
    Ok(unroutable)
}
