//! A reply queue that takes replies and confirms none: its own caller's jobs end as dead letters or wait unrun, and the jobs of
//! others go on. Callers are users of the broker. Each test has its own broker.
//!
//! `VRAMQ_TEST_FULL=1` waits until the queue confirms again and all jobs are answered, which takes a minute more.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::{DELAYS_MS, dead_queue, delay_queue, jobs_queue};
use vramq_schemas::{Input, Job, Params, Reason, ReplyKind, codec};
use vramq_testkit::not_run::not_run;
use vramq_tests::answers::answered_once;
use vramq_tests::caller::Caller;
use vramq_tests::client::Received;
use vramq_tests::flow::Flow;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::node::Node;
use vramq_tests::operator::Operator;
use vramq_tests::reply_counter::ReplyCounter;
use vramq_tests::setup::{Queue, full};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

use crate::silence::Silence;

mod a_reply_queue_that_confirms_nothing_costs_its_own_caller {
    // A quorum queue of two members, one of which is lost.
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        a_reply_queue_that_confirms_nothing_costs_its_own_caller,
    );
    // A queue whose process stands still.
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_classic,
        Classic,
        Json,
        a_reply_queue_that_confirms_nothing_costs_its_own_caller,
        #[ignore = "takes a minute on a busy machine"]
    );
}

mod a_first_reply_that_is_not_confirmed_holds_up_no_other_caller {
    // RabbitMQ would hold up the channel that publishes it.
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        a_first_reply_that_is_not_confirmed_holds_up_no_other_caller,
    );
}

mod a_busy_queue_that_falls_silent_holds_up_no_other_caller {
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        a_busy_queue_that_falls_silent_holds_up_no_other_caller,
    );
}

mod many_silent_queues_hold_up_no_other_caller {
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        many_silent_queues_hold_up_no_other_caller,
    );
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_classic,
        Classic,
        Json,
        many_silent_queues_hold_up_no_other_caller,
    );
}

mod progress_for_a_silent_queue_holds_up_no_other_caller {
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        progress_for_a_silent_queue_holds_up_no_other_caller,
    );
}

const SILENT: &str = "silent-replies";

/// Far more than the jobs that the worker may hold for the silent queue.
const SLOTS: usize = 16;

/// Jobs of a reply queue that does not confirm which a worker runs at a time.
const HELD_MAX: usize = 2;

/// Jobs of the caller with the silent queue after the first one, and of others.
const FOLLOWING: usize = 6;
const OTHERS: usize = 20;

/// The longest that a job of the silent queue waits once the queue confirms again: until the worker tries the queue, and in a delay
/// queue. A worker that found the queue silent three times tries it after half a minute.
const ANSWERED_WITHIN: Duration = Duration::from_secs(180);

/// A cluster of RabbitMQ 4.3 that has lost one of its two nodes has no majority for its metadata either, and answers nothing about queues.
pub(crate) async fn loses_its_metadata(env: &TestEnv) -> Result<bool> {
    let is_lost = env.setup.queue == Queue::Quorum && env.vhost.broker_is_at_least(4, 3).await?;
    if is_lost {
        not_run("this broker needs a cluster of three nodes for it");
    }
    Ok(is_lost)
}

/// A job of a silent queue's owner.
fn for_queue(owner: &Caller, id: &str, queue: &str) -> Result<Message> {
    Ok(owner.job(id, ["x"])?.with(|properties| properties.with_reply_to(queue.into())))
}

/// The job `first` and its result become dead letters, because its reply is not confirmed.
async fn first_is_dead_lettered(env: &TestEnv) -> Result<()> {
    for letter in env.dead_letters().await?.take(2).await? {
        let dossier = letter.dead_letter()?;
        ensure!(letter.id() == "first" && dossier.reason == Reason::Unroutable, "{dossier:?}");
        ensure!(dossier.error.contains("did not confirm"), "{}", dossier.error);
    }
    Ok(())
}

/// The owner of silent queues, the caller beside it, and a worker that holds the jobs of both.
struct Beside {
    owner: Caller,
    neighbour: Caller,
    worker: Worker,
}

impl Beside {
    /// Dead letters are of silent queues, and stay.
    async fn begin(env: &mut TestEnv) -> Result<Self> {
        env.announce("job dead-lettered");
        env.leave(&dead_queue(MODEL));
        let (owner, neighbour) = (Caller::new(env, "owner").await?, Caller::new(env, "neighbour").await?);
        let worker = env.worker(&["broker.confirm_s=40", "model.echo.slots_max=128"]).await?;
        Ok(Self { owner, neighbour, worker })
    }
}

/// Computed items. Each job has one, so no job was computed twice if there are no more of them than jobs.
fn items(figures: &Figures) -> usize {
    figures.sum("vramq_items_total")
}

/// The job whose reply is not confirmed ends with its results in a dead letter; of those that follow it all but two wait unrun.
async fn a_reply_queue_that_confirms_nothing_costs_its_own_caller(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    env.announce("job dead-lettered");
    // Those that ran before the queue confirmed again, and that may be answered as well.
    env.leave(&dead_queue(MODEL));
    let owner = Caller::new(env, "owner").await?;
    let worker = env.worker(&["broker.confirm_s=10", &format!("model.echo.slots_max={SLOTS}")]).await?;
    let silence = Silence::declare(env, node, &[SILENT.to_owned()]).await?;
    silence.begin(env).await?;
    owner.publish(for_queue(&owner, "first", SILENT)?).await?;
    first_is_dead_lettered(env).await?;
    let following: BTreeSet<_> = (0..FOLLOWING).map(|at| format!("following {at}")).collect();
    let jobs = following.iter().map(|id| for_queue(&owner, id, SILENT)).collect::<Result<_>>()?;
    owner.client.publish_all(MODEL, jobs).await?;
    let waiting = r#"cause="reply-queue-full""#;
    until("the jobs that wait unrun", async || {
        let waits = Figures::of(&worker).await?.sum_of("vramq_jobs_requeued_total", waiting);
        Ok((waits >= FOLLOWING - HELD_MAX).then_some(()))
    })
    .await?;
    let mut flow = Flow::default();
    flow.publish(env, OTHERS).await?;
    flow.collect(&mut env.replies().await?, 0).await?;
    let now = Figures::of(&worker).await?;
    let (ran, dead) = (items(&now), now.sum("vramq_jobs_dead_lettered_total"));
    ensure!(
        ran <= OTHERS + dead + HELD_MAX,
        "{ran} jobs ran, {dead} are dead letters: too many of the silent queue are held with their results"
    );
    worker.log.counts("\"consuming\"", 1).await?;

    silence.end(env).await?;
    let mut open = BTreeSet::from(["first".to_owned()]);
    if full() {
        open.extend(following);
    } else {
        // Those of its jobs that wait go on waiting for the next worker.
        for ms in DELAYS_MS {
            env.leave(&delay_queue(MODEL, ms));
        }
        env.leave(&jobs_queue(MODEL));
    }
    all_are_answered(env, open).await.with_context(|| worker.log.text())?;
    if full() {
        let (ran, jobs) = (items(&Figures::of(&worker).await?), 1 + OTHERS + FOLLOWING);
        ensure!(ran == jobs, "{ran} items of {jobs} jobs with one each were computed");
    }
    worker.drain().await?;
    // While all its members are there to agree.
    env.vhost.delete_queue(SILENT).await
}

/// A caller whose queue answered before, and one that gets its first reply.
const NEIGHBOURS: [&str; 2] = ["known", "new"];

/// While the first reply to the silent queue waits for its confirm, others are answered. Its job ends as the contract says.
async fn a_first_reply_that_is_not_confirmed_holds_up_no_other_caller(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    env.announce("job dead-lettered");
    let owner = Caller::new(env, "owner").await?;
    let mut neighbours = Vec::new();
    for name in NEIGHBOURS {
        neighbours.push(Caller::new(env, name).await?);
    }
    let worker = env.worker(&["broker.confirm_s=40", &format!("model.echo.slots_max={SLOTS}")]).await?;
    let silence = Silence::declare(env, node, &[SILENT.to_owned()]).await?;
    neighbours[0].publish(neighbours[0].job("before", ["x"])?).await?;
    ensure!(neighbours[0].mailbox().await?.next().await?.id() == "before");
    silence.begin(env).await?;

    owner.publish(for_queue(&owner, "first", SILENT)?).await?;
    figures(&worker, "the pass of the silent queue's job", |figures| items(figures) == 2).await?;
    for neighbour in &neighbours {
        for at in 0..OTHERS {
            neighbour.publish(neighbour.job(&at.to_string(), [format!("text {at}")])?).await?;
        }
        ReplyCounter::default().collect(&mut neighbour.mailbox().await?, OTHERS).await?;
    }
    let dead = Figures::of(&worker).await?.sum("vramq_jobs_dead_lettered_total");
    ensure!(dead == 0, "the others were answered only after the silent queue's job had ended");

    first_is_dead_lettered(env).await?;
    // Both: a job that ends while the figures are read is in neither of them.
    let ended = figures(&worker, "the end of all jobs", |figures| {
        figures.sum("vramq_jobs_dead_lettered_total") > 0 && figures.sum("vramq_jobs_in_hand") == 0
    });
    let now = ended.await?;
    ensure!(now.sum("vramq_sessions_opened_total") == 1, "{}", worker.log.text());
    ensure!(now.sum("vramq_jobs_dead_lettered_total") == 1, "{}", worker.log.text());
    ensure!(items(&now) == 2 + NEIGHBOURS.len() * OTHERS, "a job was computed twice");
    silence.end(env).await?;
    worker.drain().await?;
    env.vhost.delete_queue(SILENT).await
}

/// The same job, which asks for progress.
fn asking(env: &TestEnv, job: Message) -> Result<Message> {
    let mut params = Params::default();
    params.ask_for_progress();
    let job_body = Job { model: MODEL.to_owned(), inputs: vec![Input::Text("x".to_owned())], params };
    Ok(job.with_body(codec::encode(&job_body, env.setup.encoding)?))
}

/// The first message to the silent queue is progress. Heartbeats go on, and a new caller gets its progress and its replies.
async fn progress_for_a_silent_queue_holds_up_no_other_caller(env: &mut TestEnv, node: &Node) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    let mut operator = Operator::new(env).await?;
    let Beside { owner, neighbour, worker } = Beside::begin(env).await?;
    let silence = Silence::declare(env, node, &[SILENT.to_owned()]).await?;
    silence.begin(env).await?;
    owner.publish(asking(env, for_queue(&owner, "first", SILENT)?)?).await?;
    figures(&worker, "the pass of the silent queue's job", |figures| items(figures) == 1).await?;

    let mut replies = neighbour.mailbox().await?;
    for at in 0..OTHERS {
        let id = at.to_string();
        neighbour.publish(asking(env, neighbour.job(&id, ["x"])?)?).await?;
        let both = replies.take(2).await.with_context(|| worker.log.text())?;
        let kinds = both.iter().map(Received::kind).collect::<Result<Vec<_>>>()?;
        let is_right = kinds.contains(&ReplyKind::Progress) && kinds.contains(&ReplyKind::Done);
        ensure!(is_right && both.iter().all(|reply| reply.id() == id), "{id}: {kinds:?}");
    }
    operator.heartbeat(|heartbeat| heartbeat.models[0].counters.answered == OTHERS as u64).await?;
    let dead = Figures::of(&worker).await?.sum("vramq_jobs_dead_lettered_total");
    ensure!(dead == 0, "the others were served only after the silent queue's job had ended");

    first_is_dead_lettered(env).await?;
    let now = figures(&worker, "the end of all jobs", |figures| {
        figures.sum("vramq_jobs_dead_lettered_total") == 1 && figures.sum("vramq_jobs_in_hand") == 0
    });
    let now = now.await?;
    ensure!(now.sum("vramq_sessions_opened_total") == 1, "{}", worker.log.text());
    ensure!(items(&now) == 1 + OTHERS, "a job was computed twice");
    silence.end(env).await?;
    worker.drain().await?;
    env.vhost.delete_queue(SILENT).await
}

/// Jobs at once of the caller whose queue falls silent. The second and further ones are answered over the shared channel.
const BEFORE: usize = 8;

/// Jobs of the silent queue after that, and of the neighbour. RabbitMQ accepts 32 messages for a quorum queue without majority before it
/// throttles their channel. From such a channel it reads 400 further messages, and then nothing more from the connection.
const UNCONFIRMED: usize = 48;
const MANY_OTHERS: usize = 600;

/// A queue that has confirmed replies on the shared channel does not hold it up when it falls silent.
async fn a_busy_queue_that_falls_silent_holds_up_no_other_caller(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    let Beside { owner, neighbour, worker } = Beside::begin(env).await?;
    let silence = Silence::declare(env, node, &[SILENT.to_owned()]).await?;
    let jobs = |count: usize| {
        (0..count).map(|at| for_queue(&owner, &at.to_string(), SILENT)).collect::<Result<Vec<_>>>()
    };
    owner.client.publish_all(MODEL, jobs(BEFORE)?).await?;
    env.client.mailbox(SILENT).await?.take(BEFORE).await?;
    silence.begin(env).await?;
    owner.client.publish_all(MODEL, jobs(UNCONFIRMED)?).await?;
    let passes = figures(&worker, "the passes of the silent queue's jobs", |figures| {
        items(figures) == BEFORE + UNCONFIRMED
    });
    passes.await?;

    let jobs = (0..MANY_OTHERS).map(|at| neighbour.job(&at.to_string(), [format!("text {at}")]));
    neighbour.client.publish_all(MODEL, jobs.collect::<Result<_>>()?).await?;
    let answered = ReplyCounter::default().collect(&mut neighbour.mailbox().await?, MANY_OTHERS).await;
    answered.with_context(|| worker.log.text())?;
    let dead = Figures::of(&worker).await?.sum("vramq_jobs_dead_lettered_total");
    ensure!(dead == 0, "the others were answered only after {dead} jobs of the silent queue had ended");
    let now = figures(&worker, "the end of all jobs", |figures| {
        figures.sum("vramq_jobs_dead_lettered_total") == UNCONFIRMED && figures.sum("vramq_jobs_in_hand") == 0
    });
    let now = now.await?;
    ensure!(now.sum("vramq_sessions_opened_total") == 1, "{}", worker.log.text());
    ensure!(items(&now) == BEFORE + UNCONFIRMED + MANY_OTHERS, "a job was computed twice");
    silence.end(env).await?;
    worker.drain().await?;
    env.vhost.delete_queue(SILENT).await
}

/// Silent queues of one caller: more than it may have channels for first replies. All channels together were fewer once.
const SILENT_QUEUES: usize = 24;

/// The first reply to a caller does not wait for the first replies to many silent queues of another one.
async fn many_silent_queues_hold_up_no_other_caller(env: &mut TestEnv, node: &Node) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    let Beside { owner, neighbour, worker } = Beside::begin(env).await?;
    let queues: Vec<_> = (0..SILENT_QUEUES).map(|at| format!("silent-{at}")).collect();
    let silence = Silence::declare(env, node, &queues).await?;
    silence.begin(env).await?;
    for (at, queue) in queues.iter().enumerate() {
        owner.publish(for_queue(&owner, &at.to_string(), queue)?).await?;
    }
    figures(&worker, "the passes of the silent queues' jobs", |figures| items(figures) == SILENT_QUEUES)
        .await?;
    let mut replies = neighbour.mailbox().await?;
    for at in 0..OTHERS {
        let id = at.to_string();
        neighbour.publish(neighbour.job(&id, ["y"])?).await?;
        answered_once(&mut replies, &id, &["y".to_owned()]).await?;
    }
    let dead = Figures::of(&worker).await?.sum("vramq_jobs_dead_lettered_total");
    ensure!(dead == 0, "the neighbour was answered only after {dead} jobs of the silent queues had ended");

    silence.end(env).await?;
    let ended = |figures: &Figures| {
        let ends = figures.sum("vramq_jobs_dead_lettered_total") + figures.sum("vramq_jobs_answered_total");
        ends == SILENT_QUEUES + OTHERS && figures.sum("vramq_jobs_in_hand") == 0
    };
    let now = figures(&worker, "the end of all jobs", ended).await?;
    ensure!(now.sum("vramq_sessions_opened_total") == 1, "{}", worker.log.text());
    ensure!(items(&now) == SILENT_QUEUES + OTHERS, "a job was computed twice");
    worker.drain().await?;
    for queue in &queues {
        env.vhost.delete_queue(queue).await?;
    }
    Ok(())
}

/// What was published while the queue was silent comes late, and is not lost.
async fn all_are_answered(env: &TestEnv, mut open: BTreeSet<String>) -> Result<()> {
    let mut replies = env.client.mailbox(SILENT).await?;
    while !open.is_empty() {
        let reply = replies.next_within(ANSWERED_WITHIN).await?;
        let reply = reply.with_context(|| format!("no reply to {open:?}"))?;
        open.remove(reply.id());
    }
    Ok(())
}
