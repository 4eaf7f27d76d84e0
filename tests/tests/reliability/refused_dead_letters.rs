//! A policy limits the dead queue, which refuses dead letters. Jobs that end there hold up no others, and end when it has room again.

use std::collections::BTreeMap;
use std::slice;

use anyhow::{Result, ensure};
use lapin::{BasicProperties, Confirmation};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::client::Mailbox;
use vramq_tests::job::Message;
use vramq_tests::metrics::figures;
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(a_dead_queue_that_refuses_costs_other_jobs_no_slot);

/// Twice the slots.
const JOBS: usize = 8;
const SLOTS: &str = "model.echo.slots_max=4";

/// The names of the limited queues. All are dead queues.
const PATTERN: &str = r"^vramq\.dead\.";

/// More than this test puts in.
const ROOM: u64 = 1000;

async fn a_dead_queue_that_refuses_costs_other_jobs_no_slot(env: &mut TestEnv) -> Result<()> {
    for expected in ["job dead-lettered", "the dead letter is refused"] {
        env.announce(expected);
    }
    let worker = env.worker(&[SLOTS]).await?;
    env.vhost.limit_queue_length(PATTERN, 1).await?;
    fill(env).await?;
    for at in 0..JOBS {
        let malformed = env.job(&format!("malformed {at}"), ["x"])?.with_body("{no job");
        env.client.publish(MODEL, malformed).await?;
    }
    for at in 0..JOBS {
        env.client.publish(MODEL, env.job(&format!("good {at}"), ["x"])?).await?;
    }

    let mut replies = env.replies().await?;
    ensure!(kinds(&mut replies).await? == expected("good", ReplyKind::Done));
    figures(&worker, "the malformed jobs to wait", |figures| {
        figures.sum_of("vramq_jobs_requeued_total", "cause=\"dead-queue-full\"") >= JOBS
    })
    .await?;

    env.vhost.limit_queue_length(PATTERN, ROOM).await?;
    ensure!(kinds(&mut replies).await? == expected("malformed", ReplyKind::Failed));
    let (mut dead_letters, mut letters) = (env.dead_letters().await?, 0);
    while letters < JOBS {
        let letter = dead_letters.next().await?;
        if !letter.id().is_empty() {
            let dead = letter.dead_letter()?;
            ensure!(dead.reason == Reason::Malformed && letter.body == b"{no job", "{dead:?}");
            letters += 1;
        }
    }
    worker.drain().await
}

/// Fills the dead queue with messages without an id until it refuses more.
async fn fill(env: &TestEnv) -> Result<()> {
    let filler = Message { properties: BasicProperties::default(), body: Vec::new(), as_worker: false };
    until("the dead queue to refuse a message", async || {
        let confirms = env.client.publish_to_queue(&dead_queue(MODEL), slice::from_ref(&filler)).await?;
        Ok(matches!(confirms[..], [Confirmation::Nack(_)]).then_some(()))
    })
    .await
}

/// The next replies to so many jobs, each with its id and kind.
async fn kinds(replies: &mut Mailbox) -> Result<BTreeMap<String, ReplyKind>> {
    let replies = replies.take(JOBS).await?;
    replies.iter().map(|reply| Ok((reply.id().to_owned(), reply.kind()?))).collect()
}

fn expected(name: &str, kind: ReplyKind) -> BTreeMap<String, ReplyKind> {
    (0..JOBS).map(|at| (format!("{name} {at}"), kind)).collect()
}
