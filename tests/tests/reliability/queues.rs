//! A model whose jobs come from several queues: each has its share of the passes and slots, and a flood in one of them costs the
//! others no more than that.
//!
//! Each queue belongs to a team, a user of the broker that may publish only to its own queue. Waits are counted in passes: the
//! worker runs them by tickets.

use anyhow::{Context as _, Result, ensure};
use lapin::{Confirmation, ExchangeKind};
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::caller::Caller;
use vramq_tests::client::Client;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Figures, figures};
use vramq_tests::on_queue_types;
use vramq_tests::pass_tickets::PassTickets;
use vramq_tests::permissions::{Permissions, documented};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::worker::Worker;

on_queue_types!(
    queues_that_are_full_have_their_shares,
    a_flood_in_one_queue_costs_another_no_more_than_its_share,
    a_job_of_a_further_queue_ends_like_any_other,
);

/// A further queue of the model.
pub(crate) const FURTHER: &str = "team-a.jobs";

/// Items of a pass. A job of these tests has one.
const PASS: usize = 8;

/// What a worker of these tests holds: two passes. One slot more is for large jobs.
const HELD: usize = 2 * PASS;

fn settings(weights: (u32, u32)) -> Vec<String> {
    vec![
        format!("model.{MODEL}.queues={}={},{FURTHER}={}", jobs_queue(MODEL), weights.0, weights.1),
        format!("model.{MODEL}.pass_tokens={PASS}"),
        format!("model.{MODEL}.slots_max={}", HELD + 1),
    ]
}

/// Starts a worker with these settings and others.
pub(crate) async fn worker(env: &mut TestEnv, settings: &[String], others: &[&str]) -> Result<Worker> {
    env.worker(&settings.iter().map(String::as_str).chain(others.iter().copied()).collect::<Vec<_>>()).await
}

/// The team that publishes to the further queue: a user that may write to one exchange, which leads there and nowhere else.
struct Team {
    user: String,
    client: Client,
}

impl Team {
    const EXCHANGE: &str = "team-a";

    /// The queue has to be there.
    async fn new(env: &mut TestEnv) -> Result<Self> {
        env.client.declare_exchange(Self::EXCHANGE, ExchangeKind::Direct).await?;
        env.client.bind_queue(FURTHER, Self::EXCHANGE, MODEL).await?;
        let write = format!("^{}$", Self::EXCHANGE);
        let (user, url) =
            env.add_user_with("team-a", &Permissions { write, ..documented("publisher")? }).await?;
        Ok(Self { user, client: Client::connect(&url).await? })
    }

    async fn publish(&self, job: Message) -> Result<()> {
        let job = job.with(|properties| properties.with_user_id(self.user.as_str().into()));
        let confirm = self.client.publish_to(Self::EXCHANGE, MODEL, job).await?;
        ensure!(matches!(confirm, Confirmation::Ack(None)), "{confirm:?}");
        Ok(())
    }
}

/// Deliveries from a queue that the worker has taken.
pub(crate) fn received(figures: &Figures, queue: &str) -> usize {
    figures.sum_of("vramq_queue_jobs_received_total", &format!("queue=\"{queue}\""))
}

/// Makes the queues before the worker of the test consumes them, so that both have jobs when it starts.
async fn make_queues(env: &mut TestEnv, settings: &[String]) -> Result<()> {
    worker(env, settings, &[]).await?.drain().await
}

/// Jobs of each queue, and passes that run: the heavier queue has three quarters of them, and does not run dry.
const JOBS: usize = 160;
const PASSES: usize = 20;

async fn queues_that_are_full_have_their_shares(env: &mut TestEnv) -> Result<()> {
    let settings = settings((3, 1));
    make_queues(env, &settings).await?;
    let (own, team) = (Caller::new(env, "own").await?, Team::new(env).await?);
    for at in 0..JOBS {
        own.publish(own.job(&format!("own {at}"), ["x"])?).await?;
        team.publish(env.job(&format!("team {at}"), ["x"])?).await?;
    }
    let mut tickets = PassTickets::new(env)?;
    let worker = worker(env, &settings, &[&tickets.setting()]).await?;
    for pass in 0..PASSES {
        // What ran is acknowledged. It holds all that it may, and has made of it all full passes that there are.
        figures(&worker, "two passes of jobs", |figures| {
            figures.sum("vramq_passes_total") == pass
                && figures.sum("vramq_jobs_answered_total") == figures.sum("vramq_items_total")
                && figures.sum("vramq_jobs_in_hand") == HELD
                && figures.sum("vramq_jobs_waiting") < PASS
        })
        .await?;
        tickets.give(1)?;
    }
    let ran = figures(&worker, "the last pass, and its replies", |figures| {
        figures.sum("vramq_passes_total") == PASSES
            && figures.sum("vramq_items_total") == figures.sum("vramq_jobs_answered_total")
    })
    .await?;
    let answered = ran.sum("vramq_jobs_answered_total");
    let of_own = env.client.ready(&own.replies).await? as usize;
    ensure!(of_own + env.client.ready(REPLIES).await? as usize == answered, "a reply is missing");
    // The first pass is smaller: it starts with what comes first.
    ensure!(answered > (PASSES - 1) * PASS, "{answered} jobs in {PASSES} passes");
    let share = of_own as f64 / answered as f64;
    ensure!(
        (0.70..=0.80).contains(&share),
        "{of_own} of {answered} jobs came from the queue with weight 3 of 4"
    );

    // One queue runs dry; the other has all passes then, and all jobs end once.
    tickets.release();
    for (mailbox, name) in [(own.mailbox().await?, "own"), (env.replies().await?, "team")] {
        let mut mailbox = mailbox;
        let mut ids: Vec<_> = mailbox.take(JOBS).await?.iter().map(|reply| reply.id().to_owned()).collect();
        let mut expected: Vec<_> = (0..JOBS).map(|at| format!("{name} {at}")).collect();
        ids.sort_unstable();
        expected.sort_unstable();
        ensure!(ids == expected, "{ids:?}");
    }
    Ok(())
}

const FLOOD: usize = 200;
const ROUNDS: usize = 4;

/// Passes that may start after a job came to the worker until it is answered, its own included.
const PASSES_MAX: usize = 3;

async fn a_flood_in_one_queue_costs_another_no_more_than_its_share(env: &mut TestEnv) -> Result<()> {
    let settings = settings((1, 1));
    make_queues(env, &settings).await?;
    let (quiet, team) = (Caller::new(env, "quiet").await?, Team::new(env).await?);
    for at in 0..FLOOD {
        team.publish(env.job(&format!("flood {at}"), ["x"])?).await?;
    }
    let mut tickets = PassTickets::new(env)?;
    let worker = worker(env, &settings, &[&tickets.setting()]).await?;
    // The flood has all slots but one.
    let full = |figures: &Figures| received(figures, FURTHER) >= HELD - 1;
    figures(&worker, "the flood", full).await?;
    let mut replies = quiet.mailbox().await?;
    for round in 0..ROUNDS {
        let id = format!("quiet {round}");
        quiet.publish(quiet.job(&id, ["x"])?).await?;
        // It does not wait at the broker behind the flood.
        let own = jobs_queue(MODEL);
        let before =
            figures(&worker, "the quiet job", |figures| received(figures, &own) == round + 1).await?;
        // One more for the pass that is on the device.
        tickets.give(1 + PASSES_MAX)?;
        answered_once(&mut replies, &id, &["x".to_owned()])
            .await
            .with_context(|| format!("round {round}"))?;
        let passes = before.sum("vramq_passes_total") + 1 + PASSES_MAX;
        figures(&worker, "the passes", |figures| figures.sum("vramq_passes_total") == passes).await?;
    }
    tickets.release();
    env.replies().await?.take(FLOOD).await?;
    Ok(())
}

async fn a_job_of_a_further_queue_ends_like_any_other(env: &mut TestEnv) -> Result<()> {
    for expected in ["out of memory", "made to fail", "job dead-lettered"] {
        env.announce(expected);
    }
    let settings = settings((1, 1));
    let worker = worker(env, &settings, &["device.cpu.fault=skip=0,fail=1"]).await?;
    let team = Team::new(env).await?;
    let mut replies = env.replies().await?;
    // Another attempt comes by the model's own queue, and is believed.
    let texts = items(6);
    team.publish(env.job("again", texts.clone())?).await?;
    let answered = answered_once(&mut replies, "again", &texts).await?;
    ensure!(answered.last().context("no reply")?.reply()?.attempt == 1);
    let taken = Figures::of(&worker).await?;
    ensure!((received(&taken, FURTHER), received(&taken, &jobs_queue(MODEL))) == (1, 1));
    // So large that it moves to the queue of large jobs.
    let texts = items(5 * PASS);
    team.publish(env.job("large", texts.clone())?).await?;
    answered_once(&mut replies, "large", &texts).await?;
    // Replies must not come back as jobs.
    let to_itself = env.job("loop", ["x"])?.with(|properties| properties.with_reply_to(FURTHER.into()));
    team.publish(to_itself).await?;
    team.publish(env.job("malformed", ["x"])?.with_body("{no job")).await?;
    let failed = replies.next().await?;
    ensure!(failed.kind()? == ReplyKind::Failed && failed.id() == "malformed", "{:?}", failed.properties);
    let mut letters = env.client.mailbox(&dead_queue(MODEL)).await?;
    for letter in letters.take(2).await? {
        let dead = letter.dead_letter()?;
        ensure!(dead.reason == Reason::Malformed, "{dead:?}");
    }
    Ok(())
}
