//! Results that reached nobody: a retry delivers them, and a job whose results are complete does not run again.

use anyhow::{Context as _, Result, ensure};
use lapin::BasicProperties;
use vramq_schemas::ReplyKind;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_tests::client::Received;
use vramq_tests::dead_letters::Operator;
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::terminal::Terminal;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(
    results_are_delivered_and_their_job_does_not_run_again,
    a_job_with_one_of_two_ids_does_not_run_again,
    a_job_with_results_in_parts_does_not_run_again,
    a_job_does_not_run_again_after_a_retry_that_is_killed_between_its_parts,
    a_job_without_its_last_part_runs_again,
    results_that_stay_are_not_counted_as_gone,
);

/// A reply queue that does not exist while jobs run.
const LATE: &str = "late";

/// The items of a job whose results take several replies.
const ITEMS: usize = 12;

/// A large text: three of them fill a reply.
const TEXT_BYTES: usize = 300_000;

/// Has the jobs run while [`LATE`] does not exist, so that each leaves at least two dead letters. The worker's name.
async fn run_unanswered(env: &mut TestEnv, jobs: Vec<Message>) -> Result<String> {
    env.announce("job dead-lettered");
    env.leave(&dead_queue(MODEL));
    let worker = env.worker(&[]).await?;
    let letters = 2 * u32::try_from(jobs.len())?;
    for job in jobs {
        env.client.publish(MODEL, job.with(|properties| properties.with_reply_to(LATE.into()))).await?;
    }
    until("two letters for each", async || {
        Ok((env.client.ready(&dead_queue(MODEL)).await? >= letters).then_some(()))
    })
    .await?;
    // It publishes the letters that are still missing.
    worker.drain().await?;
    Ok(worker.name.clone())
}

fn in_parts(env: &TestEnv, items: usize) -> Result<Message> {
    env.job("in parts", (0..items).map(|_| "x".repeat(TEXT_BYTES)))
}

async fn declare_late(env: &TestEnv) -> Result<()> {
    env.client.declare_queue(LATE, env.setup.queue.arguments()).await
}

/// Retries, and ensures that what it says of jobs is this.
async fn retry(operator: &Operator, what: &str, says: &str) -> Result<()> {
    let ended = operator.run(&["retry", what, "--yes"]).await?;
    ensure!(ended.code == Some(0) && ended.stderr.contains(says), "{:?}: {}", ended.code, ended.stderr);
    Ok(())
}

/// Ensures that no dead letter is left, and no job that would run.
async fn ensure_all_is_done(env: &TestEnv, operator: &Operator) -> Result<()> {
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    ensure!(env.client.ready(&jobs_queue(MODEL)).await? == 0, "a job would run again");
    Ok(())
}

/// The replies in [`LATE`].
async fn delivered(env: &TestEnv) -> Result<Vec<Received>> {
    let count = env.client.ready(LATE).await?;
    env.client.mailbox(LATE).await?.take(count as usize).await
}

async fn results_are_delivered_and_their_job_does_not_run_again(env: &mut TestEnv) -> Result<()> {
    let jobs = ["a", "b"].iter().map(|id| env.job(id, ["x", "y"])).collect::<Result<_>>()?;
    let worker = run_unanswered(env, jobs).await?;
    let operator = Operator::at(env)?;
    // Nobody is there yet: all of it stays.
    operator.run_for(1, &["retry", "--all", "--yes"]).await?;
    ensure!(operator.ids().await?.len() == 4, "letters are missing");
    declare_late(env).await?;
    retry(&operator, "--all", "2 jobs answered by these results").await?;
    ensure_all_is_done(env, &operator).await?;
    let replies = delivered(env).await?;
    ensure!(replies.len() == 2, "{} replies", replies.len());
    for reply in replies {
        ensure!(reply.kind()? == ReplyKind::Done && reply.outputs()?.outputs.len() == 2);
        ensure!(reply.reply()?.worker == worker && !reply.headers().contains_key("reason"));
        ensure!(reply.properties.reply_to().is_none());
    }
    Ok(())
}

/// Replies have the message id as their correlation id, where the job has no other.
async fn a_job_with_one_of_two_ids_does_not_run_again(env: &mut TestEnv) -> Result<()> {
    let ids = [(Some("message"), None), (None, Some("correlation")), (Some("same"), Some("same"))];
    let jobs = ids.iter().map(|(message_id, correlation_id)| {
        let job = env.job("", ["x"])?;
        Ok(job.with(|before| {
            let mut properties = BasicProperties::default().with_delivery_mode(2);
            if let Some(content_type) = before.content_type().clone() {
                properties = properties.with_content_type(content_type);
            }
            if let Some(id) = *message_id {
                properties = properties.with_message_id(id.into());
            }
            if let Some(id) = *correlation_id {
                properties = properties.with_correlation_id(id.into());
            }
            properties
        }))
    });
    let jobs = jobs.collect::<Result<_>>()?;
    run_unanswered(env, jobs).await?;
    declare_late(env).await?;
    let operator = Operator::at(env)?;
    for id in ["message", "correlation"] {
        retry(&operator, id, "1 job answered by these results").await?;
    }
    retry(&operator, "--reason=unroutable", "1 job answered by these results").await?;
    ensure_all_is_done(env, &operator).await?;
    let replies = delivered(env).await?;
    ensure!(replies.len() == ids.len(), "{} replies", replies.len());
    for reply in replies {
        ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.properties);
    }
    Ok(())
}

async fn a_job_with_results_in_parts_does_not_run_again(env: &mut TestEnv) -> Result<()> {
    let job = in_parts(env, ITEMS)?;
    run_unanswered(env, vec![job]).await?;
    let operator = Operator::at(env)?;
    let letters = operator.ids().await?.len();
    ensure!(letters > 2, "the results are in one reply");
    operator.run_for(1, &["retry", "--all", "--yes"]).await?;
    ensure!(operator.ids().await?.len() == letters, "letters are missing");
    declare_late(env).await?;
    retry(&operator, "--all", "1 job answered by these results").await?;
    ensure_all_is_done(env, &operator).await?;
    let mut replies = delivered(env).await?.iter().map(Received::reply).collect::<Result<Vec<_>>>()?;
    ensure!(replies.len() == letters - 1, "{} replies of {letters} letters", replies.len());
    replies.sort_by_key(|reply| reply.offset);
    let mut next = 0;
    for reply in replies {
        ensure!(reply.offset == next, "{reply:?} after {next} items");
        next += reply.items;
    }
    ensure!(next as usize == ITEMS, "{next} items");
    Ok(())
}

async fn a_job_does_not_run_again_after_a_retry_that_is_killed_between_its_parts(
    env: &mut TestEnv,
) -> Result<()> {
    // A second for each reply: enough to be in the middle of, also where the test stands still for some of them.
    let job = in_parts(env, 2 * ITEMS)?;
    run_unanswered(env, vec![job]).await?;
    let operator = Operator::at(env)?;
    let letters = operator.ids().await?.len();
    ensure!(letters > 3, "the results are in two replies");
    declare_late(env).await?;
    let mut child = operator.spawn(&["retry", "--all", "--yes", "--rate", "1"])?;
    // The first one is confirmed, and would be acknowledged by now: the second one was published a second later.
    until("two of the results", async || Ok((env.client.ready(LATE).await? >= 2).then_some(()))).await?;
    child.kill().await?;
    until("the letters to be back", async || {
        Ok((env.client.ready(&dead_queue(MODEL)).await? as usize == letters).then_some(()))
    })
    .await?;
    let before = env.client.ready(LATE).await? as usize;
    ensure!(before < letters - 1, "it was killed too late");
    retry(&operator, "--all", "1 job answered by these results").await?;
    ensure_all_is_done(env, &operator).await?;
    let mut offsets = Vec::new();
    for reply in delivered(env).await? {
        offsets.push(reply.reply()?.offset);
    }
    ensure!(offsets.len() == before + letters - 1, "{offsets:?} after {before} of {letters}");
    offsets.sort_unstable();
    offsets.dedup();
    ensure!(offsets.len() == letters - 1, "{offsets:?}");
    Ok(())
}

async fn a_job_without_its_last_part_runs_again(env: &mut TestEnv) -> Result<()> {
    let job = in_parts(env, ITEMS)?;
    run_unanswered(env, vec![job]).await?;
    declare_late(env).await?;
    let operator = Operator::at(env)?;
    let letters = operator.letters().await?;
    let last = letters.iter().find(|letter| letter["properties"]["type"] == "done").context("no `done`")?;
    let last = last["fingerprint"].as_str().context("no fingerprint")?;
    operator.run_for(0, &["drop", last, "--yes-drop", "1", "--archive", "last.jsonl"]).await?;
    retry(&operator, "--all", "1 job to the exchange").await?;
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    let worker = env.worker(&[]).await?;
    let mut late = env.client.mailbox(LATE).await?;
    let (mut items, mut parts) = (0, 0);
    // The parts that were kept, and all of the job's second run, until it is done.
    loop {
        let reply = late.next().await?;
        items += reply.reply()?.items as usize;
        if reply.kind()? == ReplyKind::Done {
            break;
        }
        parts += 1;
    }
    ensure!(items > ITEMS && parts >= 2 * (letters.len() - 2), "{items} items, {parts} parts");
    worker.drain().await
}

/// While the operator is asked, another client takes a part of the results. The job and its other results stay.
async fn results_that_stay_are_not_counted_as_gone(env: &mut TestEnv) -> Result<()> {
    let job = in_parts(env, ITEMS)?;
    run_unanswered(env, vec![job]).await?;
    declare_late(env).await?;
    let operator = Operator::at(env)?;
    let letters = operator.ids().await?.len();
    ensure!(letters > 3, "the results are in two replies");
    let terminal = Terminal::open(160, 24).await?;
    let log = operator.path("actions.jsonl");
    terminal.type_line(&format!("export VRAMQ_BROKER_URL={}; clear", env.url)).await?;
    let retry =
        format!("dlq retry --model {MODEL} --all --action-log {}; echo \"ended with $?\"", log.display());
    terminal.run("vramq", &retry).await?;
    terminal.shows("the question", |screen| screen.contains("Retry them? [y/N]")).await?;
    let first = env.client.mailbox(&dead_queue(MODEL)).await?.next().await?;
    ensure!(first.kind()? == ReplyKind::Part, "{:?}", first.properties);
    until("the others to be back", async || {
        Ok((env.client.ready(&dead_queue(MODEL)).await? as usize == letters - 1).then_some(()))
    })
    .await?;
    terminal.type_line("y").await?;
    let screen = terminal.shows("the end", |screen| screen.contains("\nended with ")).await?;
    ensure!(screen.contains("ended with 1"), "{screen}");
    ensure!(screen.contains("1 dead letter no longer in the queue"), "{screen}");
    ensure!(screen.matches(" stays: ").count() == letters - 1, "{screen}");
    ensure!(operator.ids().await?.len() == letters - 1, "letters are missing");
    ensure!(delivered(env).await?.len() == letters - 2, "the other results were not delivered");
    Ok(())
}
