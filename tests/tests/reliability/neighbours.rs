//! No caller holds up another one by its delays, a full reply queue, large jobs, or by being first.
//!
//! Callers are users of the broker. Waits are counted in passes: workers run them by tickets.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::Confirmation;
use tokio::time::{Interval, MissedTickBehavior};
use vramq_schemas::headers::{CALLER, USER};
use vramq_schemas::topology::{RETRY_EXCHANGE, bulk_queue, delay_key, delay_queue, jobs_queue};
use vramq_schemas::{ReplyKind, fields};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::blocked_reply_queue::BlockedReplyQueue;
use vramq_tests::caller::Caller;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::on_queue_types;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

on_queue_types!(
    a_model_that_is_gone_or_full_delays_no_other,
    a_full_reply_queue_costs_its_own_caller,
    a_small_job_waits_for_three_passes_whatever_large_jobs_wait,
    a_worker_that_joins_gets_its_share,
);

pub(crate) fn in_hand(figures: &Figures) -> usize {
    figures.sum("vramq_jobs_in_hand")
}

/// More than the broker takes on at a time: it dead-letters 32 messages of a queue, and waits for their confirms.
const STUCK: usize = 40;

/// Delayed jobs whose own queue is gone, or full, in front of a delayed job of another model.
async fn a_model_that_is_gone_or_full_delays_no_other(env: &mut TestEnv) -> Result<()> {
    for (model, length) in [("gone", "100000"), ("full", "1")] {
        let (engine, length) =
            (format!("model.{model}.engine=echo"), format!("broker.queue_length_max={length}"));
        let maker = env.spawn_bare_worker(&[&engine, &length])?;
        maker.consuming().await?;
        maker.drain().await?;
        env.leave(&delay_queue(model, 1000));
    }
    env.vhost.delete_queue(&jobs_queue("gone")).await?;
    let (stuck, live) = (Caller::new(env, "stuck").await?, Caller::new(env, "live").await?);
    let full = jobs_queue("full");
    until("a full queue", async || {
        // A classic queue may take a few more than its length.
        let taken = stuck.client.offer("full", vec![stuck.job_for("full", "filler", ["x"])?]).await;
        Ok((taken == [false]).then_some(()))
    })
    .await?;
    for at in 0..STUCK {
        for model in ["gone", "full"] {
            delay(env, model, &format!("{model} {at}"), &stuck).await?;
        }
    }
    env.leave(&full);

    env.worker(&[]).await?;
    delay(env, MODEL, "live", &live).await?;
    answered_once(&mut live.mailbox().await?, "live", &["x".to_owned()]).await?;
    Ok(())
}

/// Publishes a caller's job to a delay queue of its model, as a worker does: publishers may not. The headers name the caller, because the
/// broker takes a `user_id` from that user alone.
async fn delay(env: &TestEnv, model: &str, id: &str, caller: &Caller) -> Result<()> {
    let job = Message::texts(env.setup.encoding, model, id, &caller.replies, ["x"])?;
    let user = || fields::text(&caller.user);
    let job = job.with_header(USER, user()).with_header(CALLER, user());
    let confirm = env.client.publish_to(RETRY_EXCHANGE, &delay_key(model, 1000), job).await?;
    ensure!(matches!(confirm, Confirmation::Ack(None)), "no delay queue took the job: {confirm:?}");
    Ok(())
}

const FLOOD: usize = 40;
const QUIET: usize = 20;

/// Jobs of a full reply queue that a worker holds with their results.
const HELD_MAX: usize = 2;

/// A caller whose reply queue is full, and another one that sends a job, waits for its answer, and sends the next.
async fn a_full_reply_queue_costs_its_own_caller(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    // Far fewer than the flood.
    let worker = env.worker(&["model.echo.slots_max=10"]).await?;
    let (flood, quiet) = (Caller::new(env, "flood").await?, Caller::new(env, "quiet").await?);
    let blocked = BlockedReplyQueue::declare(&env.client, env.setup.queue).await?;
    let flood_job =
        |at: usize| Ok::<_, anyhow::Error>(blocked.receives(flood.job(&format!("flood {at}"), ["x"])?));
    let (mut ids, mut replies) = (BTreeSet::new(), quiet.mailbox().await?);
    for at in 0..FLOOD {
        ids.insert(format!("flood {at}"));
        flood.publish(flood_job(at)?).await?;
    }
    // Those that ran before the worker knew end as dead letters, with their results. All others wait unrun.
    let ended = |figures: &Figures| figures.sum("vramq_jobs_dead_lettered_total");
    let answered = |figures: &Figures| figures.sum("vramq_jobs_answered_total");
    let before = figures(&worker, "the flood to be held off", |figures| {
        ended(figures) > 0
            && in_hand(figures) <= HELD_MAX
            && figures.sum("vramq_jobs_received_total") >= FLOOD
    })
    .await?;
    for at in 0..QUIET {
        ids.insert(format!("flood {}", FLOOD + at));
        flood.publish(flood_job(FLOOD + at)?).await?;
        let id = format!("quiet {at}");
        quiet.publish(quiet.job(&id, ["x"])?).await?;
        answered_once(&mut replies, &id, &["x".to_owned()]).await?;
        // Until the broker has confirmed its reply, the quiet caller's job counts as held. None of the flood's is confirmed.
        let now = figures(&worker, "the confirm of the quiet caller's reply", |figures| {
            answered(figures) == at + 1
        })
        .await?;
        let held = now.sum("vramq_items_total").saturating_sub(ended(&now) + answered(&now));
        ensure!(held <= HELD_MAX, "{held} jobs are held with their results");
    }
    let during = ended(&Figures::of(&worker).await?) - ended(&before);
    ensure!(during < QUIET, "{during} jobs of the full queue had to end before {QUIET} others were answered");

    let mut freed = blocked.unblock().await?;
    let all = FLOOD + QUIET;
    let settled = |figures: &Figures| ended(figures) + answered(figures);
    let last = figures(&worker, "all jobs to end", |figures| settled(figures) == all + QUIET).await?;
    ensure!(last.sum("vramq_items_total") == all + QUIET, "a job was computed twice, or not at all");
    ensure!(last.sum("vramq_items_recomputed_total") == 0);
    let dead = ended(&last);
    ensure!(dead < all, "no job of the full queue was answered when it was emptied");
    for reply in freed.take(all - dead).await? {
        ensure!(reply.kind()? == ReplyKind::Done && ids.remove(reply.id()), "{:?}", reply.properties);
    }
    // The results of each, and the job.
    for letter in env.dead_letters().await?.take(2 * dead).await? {
        ids.remove(letter.id());
    }
    ensure!(ids.is_empty(), "{ids:?} are neither answered nor dead-lettered");
    Ok(())
}

const LARGE: usize = 8;
const LARGE_TEXTS: usize = 20_000;

/// The smallest large job: four full passes, of a text each for a unit of cost, and one more.
const SMALLEST_LARGE_TEXTS: usize = 4 * 2048 + 1;
const SMALLEST_LARGE_PASSES: usize = 5;

/// How often small jobs are published beside the large ones: so few that none of these ends meanwhile.
const ROUNDS: usize = 4;

/// Passes that may start after a small job is published until it is answered, its own included. The pass that runs at that
/// moment is not counted.
const PASSES_MAX: usize = 3;

async fn a_small_job_waits_for_three_passes_whatever_large_jobs_wait(env: &mut TestEnv) -> Result<()> {
    let mut tickets = PassTickets::new(env)?;
    let worker = env.worker(&[&tickets.setting(), "model.echo.slots_max=66"]).await?;
    let (bulk, other) = (Caller::new(env, "bulk").await?, Caller::new(env, "other").await?);
    let large_replies = "vramq.replies.client.large";
    bulk.client.declare_queue(large_replies, env.setup.queue.arguments()).await?;
    // The worker learns that large jobs are short here: then it holds two of them, which it moves to a queue of their own.
    let texts = items(SMALLEST_LARGE_TEXTS);
    bulk.publish(bulk.job("first", texts.clone())?).await?;
    tickets.give(SMALLEST_LARGE_PASSES)?;
    let mut of_bulk = bulk.mailbox().await?;
    answered_once(&mut of_bulk, "first", &texts).await?;
    let before = figures(&worker, "the first large job to end", |figures| in_hand(figures) == 0).await?;
    let before = before.sum("vramq_jobs_received_total");
    // Published one after the other, the first two are held: one with a batch hint, one without.
    let large_in_hand = 2;
    for at in 0..LARGE {
        let job = bulk.job(&format!("large {at}"), items(LARGE_TEXTS))?;
        let job = job.with(|properties| properties.with_reply_to(large_replies.into()));
        bulk.publish(if at % 2 == 0 { job.with_header("batch-hint", 1.into()) } else { job }).await?;
        let (taken, held) = (at + 1, large_in_hand.min(at + 1));
        figures(&worker, "large jobs that wait for their next pass", |figures| {
            figures.sum("vramq_jobs_received_total") == before + taken + held && in_hand(figures) == held
        })
        .await?;
    }
    let mut of_other = other.mailbox().await?;
    for round in 0..ROUNDS {
        let id = format!("small {round}");
        bulk.publish(bulk.job(&id, ["x"])?).await?;
        other.publish(other.job(&id, ["x"])?).await?;
        let before = figures(&worker, "two small jobs that wait", |figures| {
            figures.sum("vramq_jobs_waiting") == large_in_hand + 2
        })
        .await?;
        tickets.give(1 + PASSES_MAX)?;
        for replies in [&mut of_bulk, &mut of_other] {
            let answered = answered_once(replies, &id, &["x".to_owned()]).await;
            answered.with_context(|| format!("not answered in round {round} after {PASSES_MAX} passes"))?;
        }
        let passes = before.sum("vramq_passes_total") + 1 + PASSES_MAX;
        figures(&worker, "the passes", |figures| figures.sum("vramq_passes_total") == passes).await?;
    }
    tickets.release();
    worker.drain().await?;
    // What the drain left of the large jobs waits for another worker.
    let answers = env.client.ready(large_replies).await? as usize;
    let mut ended = 0;
    for reply in bulk.client.mailbox(large_replies).await?.take(answers).await? {
        ended += usize::from(reply.kind()? == ReplyKind::Done);
    }
    let mut left = 0;
    for queue in [bulk_queue(MODEL), jobs_queue(MODEL)] {
        left += env.client.ready(&queue).await? as usize;
        env.leave(&queue);
    }
    ensure!(ended + left == LARGE, "{ended} large jobs are answered and {left} left, of {LARGE}");
    Ok(())
}

const JOBS: usize = 100;
const TEXTS: usize = 400;

/// Jobs that the first worker runs before the second one joins.
const BEFORE: usize = 10;

/// How fast the device is: a worker holds what it runs in half a second. Slower does no harm.
const PASS: Duration = Duration::from_millis(200);

/// Passes of two devices in 5 s: by then a worker that joins has its share.
const SOON: usize = 50;

async fn a_worker_that_joins_gets_its_share(env: &mut TestEnv) -> Result<()> {
    // A job is a pass.
    let pass_tokens = format!("model.echo.pass_tokens={TEXTS}");
    let mut tickets = [PassTickets::new(env)?, PassTickets::new(env)?];
    let first = env.worker(&[&tickets[0].setting(), &pass_tokens]).await?;
    let caller = Caller::new(env, "caller").await?;
    for at in 0..JOBS {
        caller.publish(caller.job(&at.to_string(), items(TEXTS))?).await?;
    }
    let passes =
        async |worker: &Worker| Ok::<_, anyhow::Error>(Figures::of(worker).await?.sum("vramq_passes_total"));
    let mut clock = tokio::time::interval(PASS);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut given = 0;
    while given < BEFORE {
        clock.tick().await;
        if passes(&first).await? == given {
            tickets[0].give(1)?;
            given += 1;
        }
    }
    figures(&first, "the first passes", |figures| figures.sum("vramq_passes_total") == BEFORE).await?;
    let second = env.worker(&[&tickets[1].setting(), &pass_tokens]).await?;
    let soon = run_side_by_side([&first, &second], &mut tickets, &mut clock).await?;
    ensure!(
        soon as f64 >= 0.9 / 2.0 * SOON as f64 - 1.0,
        "the worker that joined ran {soon} of the first {SOON} passes"
    );
    let items_by_worker = items_by_worker(&caller).await?;
    let (left, of_second) =
        ((JOBS - BEFORE) * TEXTS, items_by_worker.get(&second.name).copied().unwrap_or(0));
    ensure!(items_by_worker.values().sum::<usize>() == JOBS * TEXTS, "{items_by_worker:?}");
    ensure!(
        of_second as f64 >= 0.9 / 2.0 * left as f64,
        "the worker that joined ran {of_second} of {left} items"
    );
    Ok(())
}

/// Gives passes to two workers until all jobs are answered. Returns how many of the first [`SOON`] passes the second worker ran. The
/// devices are equally fast even if one process gets less of the machine: neither begins a pass before the other has ended its own, if it
/// has a job.
async fn run_side_by_side(
    workers: [&Worker; 2],
    tickets: &mut [PassTickets; 2],
    clock: &mut Interval,
) -> Result<usize> {
    let mut given = [BEFORE, 0];
    let mut of_second_soon = None;
    loop {
        clock.tick().await;
        let now = [Figures::of(workers[0]).await?, Figures::of(workers[1]).await?];
        if now.iter().map(|figures| figures.sum("vramq_jobs_answered_total")).sum::<usize>() >= JOBS {
            break;
        }
        let ran = now.each_ref().map(|figures| figures.sum("vramq_passes_total"));
        if ran[0] + ran[1] - BEFORE >= SOON && of_second_soon.is_none() {
            of_second_soon = Some(ran[1]);
        }
        let has_run = [0, 1].map(|at| ran[at] == given[at]);
        if (0..2).any(|at| !has_run[at] && in_hand(&now[at]) > 0) {
            continue;
        }
        for at in (0..2).filter(|at| has_run[*at]) {
            tickets[at].give(1)?;
            given[at] += 1;
        }
    }
    for tickets in tickets {
        tickets.release();
    }
    of_second_soon.context("too few jobs")
}

/// How many items each worker answered, when all jobs are done.
async fn items_by_worker(caller: &Caller) -> Result<BTreeMap<String, usize>> {
    let mut items = BTreeMap::new();
    let (mut replies, mut done) = (caller.mailbox().await?, 0);
    while done < JOBS {
        let reply = replies.next().await?;
        ensure!(reply.kind()? != ReplyKind::Failed, "{:?}", reply.failure());
        done += usize::from(reply.kind()? == ReplyKind::Done);
        let headers = reply.reply()?;
        *items.entry(headers.worker).or_insert(0) += headers.items as usize;
    }
    Ok(items)
}
