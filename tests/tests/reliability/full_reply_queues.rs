//! A caller with many full reply queues holds up no other caller, and a queue that has room again is noticed.
//!
//! Callers are users of the broker. Unacknowledged jobs are counted at the worker.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_schemas::topology::{DELAYS_MS, dead_queue, delay_queue, jobs_queue};
use vramq_tests::answers::answered_once;
use vramq_tests::blocked_reply_queue::BlockedReplyQueue;
use vramq_tests::caller::Caller;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(many_full_reply_queues_cost_their_own_caller);
on_one_setup!(a_reply_queue_that_loses_its_limit_gets_replies_again);

/// Twice the slots.
const QUEUES: usize = 20;
const SLOTS: &str = "model.echo.slots_max=10";

/// Replies that a queue has room for: more than its jobs.
const ROOM: usize = 10;

/// Jobs for each queue that follow the first one.
const FOLLOWING: usize = 3;

/// How often the full queues are tried again while the other callers are watched.
const TRIES: usize = 3;

/// Jobs of full reply queues that a worker of so few slots holds with their results: one of a caller, two of all.
const HELD_MAX: usize = 2;

fn ended(figures: &Figures) -> usize {
    figures.sum("vramq_jobs_dead_lettered_total")
}

/// Jobs whose replies the broker has confirmed: no reply to a full queue is.
fn answered(figures: &Figures) -> usize {
    figures.sum("vramq_jobs_answered_total")
}

/// Jobs that have run and have not ended.
fn held(figures: &Figures) -> usize {
    figures.sum("vramq_items_total").saturating_sub(ended(figures) + answered(figures))
}

async fn many_full_reply_queues_cost_their_own_caller(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let worker = env.worker(&[SLOTS]).await?;
    let hostile = Caller::new(env, "hostile").await?;
    let (slow, quiet) = (Caller::new(env, "slow").await?, Caller::new(env, "quiet").await?);
    let mut full = Vec::new();
    for at in 0..QUEUES {
        let name = format!("full-replies-{at}");
        full.push(BlockedReplyQueue::declare_named(&env.client, env.setup.queue, &name, ROOM).await?);
        env.leave(&name);
    }
    let of_slow =
        BlockedReplyQueue::declare_named(&env.client, env.setup.queue, "slow-replies", ROOM).await?;

    // The worker meets each queue.
    for (at, queue) in full.iter().enumerate() {
        hostile.publish(queue.receives(hostile.job(&format!("hostile {at}"), ["x"])?)).await?;
    }
    slow.publish(of_slow.receives(slow.job("slow", ["x"])?)).await?;
    let met = QUEUES + 1;
    figures(&worker, "each queue to refuse a reply", |figures| ended(figures) == met).await?;
    let mut published = QUEUES;
    for _ in 0..FOLLOWING {
        for queue in &full {
            hostile.publish(queue.receives(hostile.job(&format!("hostile {published}"), ["x"])?)).await?;
            published += 1;
        }
    }
    let mut ids = BTreeSet::new();
    for at in 0..FOLLOWING {
        let id = format!("slow {at}");
        slow.publish(of_slow.receives(slow.job(&id, ["x"])?)).await?;
        ids.insert(id);
    }
    let mut of_slow = of_slow.unblock().await?;

    // A flood for the full queues goes on beside the jobs of the other callers.
    let (mut replies, mut round) = (quiet.mailbox().await?, 0);
    while !ids.is_empty() || ended(&Figures::of(&worker).await?) < met + TRIES {
        let queue = &full[round % QUEUES];
        hostile.publish(queue.receives(hostile.job(&format!("hostile {published}"), ["x"])?)).await?;
        published += 1;
        let id = format!("quiet {round}");
        quiet.publish(quiet.job(&id, ["x"])?).await?;
        answered_once(&mut replies, &id, &["x".to_owned()]).await?;
        // Until the broker has confirmed their replies, the jobs of the other callers count as held.
        let now = until("the confirms of what the other callers have", async || {
            while let Some(reply) = of_slow.next_within(Duration::ZERO).await? {
                ensure!(reply.kind()? == ReplyKind::Done && ids.remove(reply.id()), "{:?}", reply.properties);
            }
            let now = Figures::of(&worker).await?;
            Ok((answered(&now) == round + 1 + FOLLOWING - ids.len()).then_some(now))
        })
        .await
        .with_context(|| format!("round {round}"))?;
        // Any of the slow caller's that are left may just have run.
        let (held, most) = (held(&now), HELD_MAX + ids.len());
        ensure!(held <= most, "{held} jobs are held with their results in round {round}, more than {most}");
        round += 1;
    }
    all_are_left_or_dead(env, &worker, published).await
}

/// Drains the worker: of so many jobs of the full queues each is a dead letter, or waits for another worker.
async fn all_are_left_or_dead(env: &mut TestEnv, worker: &Worker, jobs: usize) -> Result<()> {
    worker.drain().await?;
    let mut queues = vec![jobs_queue(MODEL)];
    queues.extend(DELAYS_MS.iter().map(|ms| delay_queue(MODEL, *ms)));
    let dead = dead_queue(MODEL);
    until("all jobs of the full queues in a queue", async || {
        let mut left = 0;
        for queue in &queues {
            left += env.client.ready(queue).await? as usize;
        }
        // The results of each, and the job. One is the slow caller's.
        left += (env.client.ready(&dead).await? as usize).div_ceil(2) - 1;
        Ok((left == jobs).then_some(()))
    })
    .await?;
    queues.iter().for_each(|queue| env.leave(queue));
    env.leave(&dead);
    Ok(())
}

/// A quorum queue under a policy of its owner.
const LIMITED: &str = "limited-replies";

fn to_limited(env: &TestEnv, id: &str) -> Result<Message> {
    Ok(env.job(id, ["x"])?.with(|properties| properties.with_reply_to(LIMITED.into())))
}

/// RabbitMQ 3.10 refuses replies on the channels that were told that the queue is full, also when the limit is gone and the queue empty.
async fn a_reply_queue_that_loses_its_limit_gets_replies_again(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    env.client.declare_queue(LIMITED, env.setup.queue.arguments()).await?;
    // Their replies also use the channel that all share.
    let first: Vec<_> =
        (0..QUEUES).map(|at| to_limited(env, &format!("first {at}"))).collect::<Result<_>>()?;
    env.client.publish_all(MODEL, first).await?;
    figures(&worker, "the first jobs", |figures| answered(figures) == QUEUES).await?;

    env.vhost.limit_queue_length(&format!("^{LIMITED}$"), 1).await?;
    let mut published = QUEUES;
    while ended(&Figures::of(&worker).await?) == 0 {
        env.client.publish(MODEL, to_limited(env, &format!("limited {published}"))?).await?;
        published += 1;
        figures(&worker, "the job to end", |figures| answered(figures) + ended(figures) == published).await?;
    }

    env.vhost.remove_length_limit().await?;
    env.client.purge(LIMITED).await?;
    env.client.publish(MODEL, to_limited(env, "last")?).await?;
    let reply = env.client.mailbox(LIMITED).await?.next().await?;
    ensure!(reply.id() == "last" && reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
    env.leave(&dead_queue(MODEL));
    Ok(())
}
