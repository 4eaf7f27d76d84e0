//! Large jobs: one that waits goes to the next idle worker, and one that has had its turn makes room for others.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::MissedTickBehavior;
use vramq_schemas::topology::bulk_queue;
use vramq_tests::answers::{answered_once, items};
use vramq_tests::caller::Caller;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::on_queue_types;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

use crate::neighbours::in_hand;

on_queue_types!(
    a_large_job_that_waits_goes_to_the_next_idle_worker,
    a_large_job_that_had_its_turn_makes_room_for_others,
);

/// Texts of a pass: more than forty are a large job.
const PASS: &str = "model.echo.pass_tokens=10";
const SMALLEST: usize = 50;

async fn waits_in_bulk(env: &TestEnv, jobs: u32) -> Result<()> {
    until("large jobs that wait in their queue", async || {
        Ok((env.client.ready(&bulk_queue(MODEL)).await? == jobs).then_some(()))
    })
    .await
}

/// A large job runs at a worker. Gives the worker's figures.
async fn holds_one(worker: &Worker) -> Result<Figures> {
    figures(worker, "a large job that waits for its next pass", |figures| {
        figures.sum("vramq_jobs_waiting") == 1 && in_hand(figures) == 1
    })
    .await
}

async fn a_large_job_that_waits_goes_to_the_next_idle_worker(env: &mut TestEnv) -> Result<()> {
    let mut tickets = PassTickets::new(env)?;
    let first = env.worker(&[&tickets.setting(), PASS]).await?;
    let (one, other) = (Caller::new(env, "one").await?, Caller::new(env, "other").await?);
    let texts = items(2 * SMALLEST);
    one.publish(one.job("held", texts.clone())?).await?;
    holds_one(&first).await?;
    other.publish(other.job("waiting", texts.clone())?).await?;
    waits_in_bulk(env, 1).await?;
    // It holds both until the broker has confirmed that the one is in the queue.
    figures(&first, "one job in hand", |figures| in_hand(figures) == 1).await?;

    let second = env.worker(&[PASS]).await?;
    answered_once(&mut other.mailbox().await?, "waiting", &texts).await?;
    let of_first = Figures::of(&first).await?;
    ensure!(
        of_first.sum("vramq_items_total") == 0 && in_hand(&of_first) == 1,
        "the first worker ran something"
    );
    tickets.release();
    answered_once(&mut one.mailbox().await?, "held", &texts).await?;
    for worker in [first, second] {
        worker.drain().await?;
        ensure!(worker.total("items").await? == texts.len() as u64, "{}", worker.log.text());
    }
    Ok(())
}

/// How often a pass of the long job may run: slower than the device's time is counted.
const PASS_EVERY: Duration = Duration::from_millis(100);

/// How long the pass of one text takes from which the worker learns its speed: at it a large job takes longer than the two seconds
/// below which a second one is held.
const SLOW_PASS: Duration = Duration::from_secs(2);

/// Texts of a job of a hundred passes.
const LONG: usize = 1_000;

/// Bytes of a text. Ten times those of the long job are consumed, so it may be handed over once.
const FILLER: usize = 400_000;

async fn a_large_job_that_had_its_turn_makes_room_for_others(env: &mut TestEnv) -> Result<()> {
    let mut tickets = PassTickets::new(env)?;
    let worker = env.worker(&[&tickets.setting(), PASS, "worker.large_turn_s=1"]).await?;
    let (long, other) = (Caller::new(env, "long").await?, Caller::new(env, "other").await?);
    let (mut to_long, mut to_other) = (long.mailbox().await?, other.mailbox().await?);
    let filler = "x".repeat(FILLER);
    other.publish(other.job("filler", [filler.as_str()])?).await?;
    // A slow pass: from its speed the worker takes it that large jobs are long, and holds one of them at a time.
    tokio::time::sleep(SLOW_PASS).await;
    tickets.give(1)?;
    answered_once(&mut to_other, "filler", std::slice::from_ref(&filler)).await?;
    let texts = (items(LONG), items(SMALLEST));
    long.publish(long.job("long", texts.0.clone())?).await?;
    holds_one(&worker).await?;
    other.publish(other.job("short", texts.1.clone())?).await?;
    waits_in_bulk(env, 1).await?;

    let mut clock = tokio::time::interval(PASS_EVERY);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let handed_over = |figures: &Figures| figures.sum_of("vramq_jobs_requeued_total", "cause=\"turn\"");
    let mut given = 0;
    while handed_over(&Figures::of(&worker).await?) == 0 {
        ensure!(given < LONG / 10, "the long job had all its passes");
        given += 1;
        clock.tick().await;
        tickets.give(1)?;
    }
    // It goes behind the one that waited, which needs five passes.
    tickets.give(SMALLEST / 10)?;
    answered_once(&mut to_other, "short", &texts.1).await?;
    let ran = Figures::of(&worker).await?.sum("vramq_items_total");
    ensure!(ran < 1 + LONG, "the long job was done before: {ran} items");
    tickets.release();
    answered_once(&mut to_long, "long", &texts.0).await?;
    let last = figures(&worker, "all jobs to end", |figures| in_hand(figures) == 0).await?;
    ensure!(
        last.sum("vramq_items_total") == 1 + LONG + SMALLEST,
        "an item was computed twice, or not at all"
    );
    ensure!(last.sum("vramq_items_recomputed_total") == 0 && handed_over(&last) == 1);
    worker.drain().await
}
