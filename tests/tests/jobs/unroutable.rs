//! Replies to queues that do not exist, among many that do: each job ends correctly, however confirms and returns are
//! interleaved.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};

const JOBS: usize = 3000;

on_queue_types!(only_the_unroutable_are_dead_lettered);

fn is_lost(job: usize) -> bool {
    !job.is_multiple_of(3)
}

async fn only_the_unroutable_are_dead_lettered(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    let mut dead = env.dead_letters().await?;
    let jobs = (0..JOBS).map(|at| {
        let job = env.job(&at.to_string(), ["x"])?;
        Ok(if is_lost(at) { job.with(|p| p.with_reply_to(format!("nowhere {at}").into())) } else { job })
    });
    env.client.publish_all(MODEL, jobs.collect::<Result<_>>()?).await?;

    let (lost, found): (Vec<_>, Vec<_>) = (0..JOBS).partition(|at| is_lost(*at));
    let mut answered = BTreeSet::new();
    for reply in replies.take(found.len()).await? {
        ensure!(reply.kind()? == ReplyKind::Done);
        ensure!(answered.insert(reply.id().parse::<usize>()?), "{} answered twice", reply.id());
    }
    ensure!(answered.into_iter().eq(found), "the wrong jobs were answered");
    // Two letters each: the job, and its results.
    let mut letters: Vec<usize> = Vec::new();
    for letter in dead.take(2 * lost.len()).await? {
        ensure!(letter.dead_letter()?.reason == Reason::Unroutable);
        letters.push(letter.id().parse()?);
    }
    letters.sort_unstable();
    worker.log.counts("job dead-lettered", lost.len()).await?;
    ensure!(
        letters.into_iter().eq(lost.into_iter().flat_map(|at| [at, at])),
        "the wrong jobs were dead-lettered"
    );
    drop(dead);
    worker.drain().await
}
