//! A job queue whose bytes a policy limits: publishers are refused, workers start as before, and nothing is lost.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use vramq_schemas::ReplyKind;
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

/// What the policy allows, and what a job's text takes of it.
const LIMIT: u64 = 200_000;
const TEXT: usize = 20_000;

/// Jobs that are offered at most until one is refused. A quorum queue tells its publishers late: several more pass.
const OFFERED_MAX: usize = 200;

on_queue_types!(a_policy_limits_the_bytes_of_a_queue);

async fn a_policy_limits_the_bytes_of_a_queue(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?.drain().await?;
    env.vhost.limit_queue_bytes(r"^vramq\.jobs\.", LIMIT).await?;
    let mut accepted = BTreeSet::new();
    let refused = loop {
        let id = accepted.len();
        let job = env.job(&id.to_string(), ["x".repeat(TEXT)])?;
        if env.client.offer(MODEL, vec![job]).await != [true] {
            break id;
        }
        accepted.insert(id);
        ensure!(id < OFFERED_MAX, "the queue took {id} jobs of {TEXT} bytes, with a limit of {LIMIT}");
    };

    // The worker declares the queue with its own arguments, which the policy does not change.
    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    let mut answered = BTreeSet::new();
    for reply in replies.take(accepted.len()).await? {
        ensure!(reply.kind()? == ReplyKind::Done);
        ensure!(answered.insert(reply.id().parse()?), "{} answered twice", reply.id());
    }
    ensure!(answered == accepted, "accepted {accepted:?}, answered {answered:?}");
    until("the queue to take jobs again", async || {
        let job = env.job(&refused.to_string(), ["x"])?;
        Ok((env.client.offer(MODEL, vec![job]).await == [true]).then_some(()))
    })
    .await?;
    ensure!(replies.next().await?.id() == refused.to_string());
    worker.drain().await
}
