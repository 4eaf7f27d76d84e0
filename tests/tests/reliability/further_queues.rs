//! The owner of a model's further queue deletes it, or makes it again with other arguments. The worker loses that queue's consumers, and
//! no session.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use vramq_schemas::topology::jobs_queue;
use vramq_tests::client::Mailbox;
use vramq_tests::flow::{Flow, announce_lost_sessions};
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::node::Node;
use vramq_tests::on_queue_types;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{SILENCE, until};
use vramq_tests::worker::Worker;

use crate::queues::{self, FURTHER, received};
use crate::silence::Silence;
use crate::silent_replies::loses_its_metadata;

on_queue_types!(
    a_further_queue_that_is_deleted_costs_no_session,
    a_further_queue_with_other_arguments_is_left_alone,
    a_session_that_begins_without_a_further_queue_serves_the_others,
);

mod a_further_queue_without_its_majority_stops_only_its_own_consumers {
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        a_further_queue_without_its_majority_stops_only_its_own_consumers,
    );
}

/// What the worker says of a queue that it cannot consume.
const MISSING: &str = "a further queue cannot be consumed";

fn settings() -> [String; 2] {
    [
        format!("model.{MODEL}.queues={}=1,{FURTHER}=1", jobs_queue(MODEL)),
        format!("model.{MODEL}.pass_tokens=8"),
    ]
}

async fn worker(env: &mut TestEnv, others: &[&str]) -> Result<Worker> {
    queues::worker(env, &settings(), others).await
}

/// A worker that takes the queues as they are; another one has made them.
async fn worker_that_declares_nothing(env: &mut TestEnv, others: &[&str]) -> Result<Worker> {
    worker(env, &[]).await?.drain().await?;
    worker(env, &[&["broker.declare=false"], others].concat()).await
}

/// Whether the worker says that it cannot consume the further queue, and consumes its own.
fn is_missing(figures: &Figures) -> bool {
    figures.sum_of("vramq_queue_missing", &format!("queue=\"{FURTHER}\"")) == 1
        && figures.sum_of("vramq_queue_missing", &format!("queue=\"{}\"", jobs_queue(MODEL))) == 0
        && figures.sum("vramq_consuming") == 1
}

async fn missing(worker: &Worker) -> Result<Figures> {
    figures(worker, "the further queue to be missing", is_missing).await
}

async fn found(worker: &Worker) -> Result<Figures> {
    figures(worker, "the further queue to be back", |figures| figures.sum("vramq_queue_missing") == 0).await
}

fn sessions(figures: &Figures) -> (usize, usize) {
    (figures.sum("vramq_sessions_opened_total"), figures.sum("vramq_sessions_lost_total"))
}

async fn publish(env: &TestEnv, queue: &str, name: &str, jobs: usize) -> Result<()> {
    let jobs = (0..jobs).map(|at| env.job(&format!("{name} {at}"), ["x"])).collect::<Result<Vec<_>>>()?;
    env.client.publish_to_queue(queue, &jobs).await?;
    Ok(())
}

/// Takes the replies to so many jobs, each of which is answered once, and says which those are.
async fn answered(replies: &mut Mailbox, jobs: usize) -> Result<BTreeSet<String>> {
    let ids: BTreeSet<_> = replies.take(jobs).await?.iter().map(|reply| reply.id().to_owned()).collect();
    ensure!(ids.len() == jobs, "some jobs were answered twice: {ids:?}");
    Ok(ids)
}

const JOBS: usize = 40;

/// Deletes the further queue while no consumer of it starts. RabbitMQ 3.10 closes the whole connection with INTERNAL_ERROR if a quorum
/// queue goes while a consumer of it starts.
async fn delete_further(env: &TestEnv) -> Result<()> {
    /// Looks at the count of consumers, all of which see the same.
    const LOOKS: u32 = 10;
    let (mut last, mut same) = (0, 0);
    let quiet = async || {
        let now = env.client.consumers(FURTHER).await?;
        same = if now == last { same + 1 } else { 0 };
        last = now;
        Ok((now > 0 && same >= LOOKS).then_some(()))
    };
    until("no consumer to start any more", quiet).await?;
    env.vhost.delete_queue(FURTHER).await?;
    Ok(())
}

async fn a_further_queue_that_is_deleted_costs_no_session(env: &mut TestEnv) -> Result<()> {
    env.announce(MISSING);
    let mut tickets = PassTickets::new(env)?;
    let worker = worker_that_declares_nothing(env, &[&tickets.setting()]).await?;
    let own = jobs_queue(MODEL);
    publish(env, FURTHER, "team", JOBS).await?;
    publish(env, &own, "own", JOBS).await?;
    figures(&worker, "jobs of both queues", |figures| {
        received(figures, FURTHER) > 0 && received(figures, &own) > 0
    })
    .await?;
    // Passes run meanwhile.
    tickets.give(2)?;
    delete_further(env).await?;
    missing(&worker).await?;
    tickets.release();
    // What it had brought is answered like the rest; what had stayed in it is gone.
    let all = |figures: &Figures| {
        figures.sum("vramq_jobs_in_hand") == 0 && received(figures, &own) == JOBS && is_missing(figures)
    };
    let done = figures(&worker, "all jobs to be answered", all).await?;
    let of_further = received(&done, FURTHER);
    ensure!(done.sum("vramq_jobs_answered_total") == JOBS + of_further, "{of_further} of the further queue");
    ensure!(done.sum("vramq_items_total") == JOBS + of_further, "a job was computed twice");
    ensure!(sessions(&done) == (1, 0), "{:?}\n{}", sessions(&done), worker.log.text());
    let mut replies = env.replies().await?;
    let ids = answered(&mut replies, JOBS + of_further).await?;
    ensure!(ids.iter().filter(|id| id.starts_with("own")).count() == JOBS, "{ids:?}");

    // All slots are for the queue that is there.
    publish(env, &own, "alone", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    // Its owner makes it again; also a second time.
    for round in ["again", "once more"] {
        env.client.declare_queue(FURTHER, env.setup.queue.arguments()).await?;
        publish(env, FURTHER, round, JOBS).await?;
        answered(&mut replies, JOBS).await?;
        ensure!(sessions(&found(&worker).await?) == (1, 0), "{}", worker.log.text());
        if round == "again" {
            delete_further(env).await?;
            missing(&worker).await?;
        }
    }
    let more = replies.next_within(SILENCE).await?;
    ensure!(more.is_none(), "a reply more than jobs: {more:?}");
    Ok(())
}

async fn a_further_queue_with_other_arguments_is_left_alone(env: &mut TestEnv) -> Result<()> {
    env.announce(MISSING);
    let worker = worker(env, &[]).await?;
    delete_further(env).await?;
    missing(&worker).await?;
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-max-length".into(), 77.into());
    env.client.declare_queue(FURTHER, arguments).await?;
    // It says what differs, and neither fights it nor gives up.
    worker.log.wait_for("PRECONDITION_FAILED").await?;
    let mut replies = env.replies().await?;
    publish(env, &jobs_queue(MODEL), "own", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    ensure!(sessions(&missing(&worker).await?) == (1, 0), "{}", worker.log.text());
    // Out of the way, it is declared as it is configured.
    env.vhost.delete_queue(FURTHER).await?;
    found(&worker).await?;
    publish(env, FURTHER, "team", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    ensure!(sessions(&found(&worker).await?) == (1, 0), "{}", worker.log.text());
    Ok(())
}

async fn a_session_that_begins_without_a_further_queue_serves_the_others(env: &mut TestEnv) -> Result<()> {
    announce_lost_sessions(env);
    env.announce(MISSING);
    env.announce("cannot start");
    let worker = worker_that_declares_nothing(env, &[]).await?;
    delete_further(env).await?;
    missing(&worker).await?;
    until("the worker's connections to be cut", async || {
        Ok((env.vhost.cut_worker(&worker.name).await? > 0).then_some(()))
    })
    .await?;
    figures(&worker, "the next session", |figures| sessions(figures) >= (2, 1) && is_missing(figures))
        .await?;
    let mut replies = env.replies().await?;
    publish(env, &jobs_queue(MODEL), "own", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    // A worker that starts says at once that its configuration names a queue that is not there.
    let settings = settings();
    let other = env.spawn_worker(&[&settings[0], &settings[1], "broker.declare=false"])?;
    ensure!(other.exited().await? == Some(2), "{}", other.log.text());
    ensure!(other.log.find(FURTHER).is_some(), "{}", other.log.text());
    env.client.declare_queue(FURTHER, env.setup.queue.arguments()).await?;
    publish(env, FURTHER, "team", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    found(&worker).await.map(drop)
}

/// RabbitMQ starts no consumer of such a queue, and closes the worker's connection if it still has no majority after 65 s.
async fn a_further_queue_without_its_majority_stops_only_its_own_consumers(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    env.announce(MISSING);
    // The worker's own queues: with one member each, they lose no majority.
    env.worker(&[]).await?.drain().await?;
    let silence = Silence::declare(env, node, &[FURTHER.to_owned()]).await?;
    publish(env, &jobs_queue(MODEL), "before", JOBS).await?;
    silence.begin(env).await?;
    let worker = worker(env, &["broker.declare=false"]).await?;
    let mut replies = env.replies().await?;
    answered(&mut replies, JOBS).await?;
    // The worker notices it also while the broker goes on to deliver jobs of the other queue.
    let mut flow = Flow::default();
    flow.during(env, &mut replies, async { missing(&worker).await.map(drop) }).await?;
    let warning = worker.log.wait_for(MISSING).await?;
    ensure!(warning.text().contains(FURTHER) && warning.text().contains("majority"), "{}", warning.text());
    publish(env, &jobs_queue(MODEL), "own", JOBS).await?;
    answered(&mut replies, JOBS).await?;

    silence.end(env).await?;
    let again = found(&worker).await?;
    ensure!(sessions(&again) == (1, 0), "{}", worker.log.text());
    worker.log.counts(MISSING, 1).await?;
    publish(env, FURTHER, "team", JOBS).await?;
    answered(&mut replies, JOBS).await?;
    worker.drain().await?;
    // While all its members are there to agree.
    env.vhost.delete_queue(FURTHER).await
}
