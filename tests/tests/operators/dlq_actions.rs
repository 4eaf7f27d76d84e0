//! Actions of `vramq dlq`: no dead letter is lost when a process is killed, and two operators never republish the same one.
//!
//! With a few hundred letters; with `VRAMQ_TEST_FULL=1` ten thousand.

use anyhow::{Result, ensure};
use serde_json::Value;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::dead_letters::{Operator, add_dead_letters, drained, ids, letter, letters, scale};
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

on_queue_types!(
    a_retried_job_is_answered_and_one_that_fails_again_says_so,
    a_retry_that_is_killed_loses_nothing,
    two_operators_who_retry_the_same_letter_publish_it_once,
    a_drop_and_a_restore_that_are_killed_lose_nothing,
);

/// Kills a command as soon as the queue has so many messages, or it has ended before. Whether it was killed.
async fn killed_at(
    env: &TestEnv,
    operator: &Operator,
    args: &[&str],
    queue: &str,
    ready: usize,
) -> Result<bool> {
    let mut child = operator.spawn(args)?;
    let ended = until("messages, or its end", async || {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status.success()));
        }
        Ok((env.client.ready(queue).await? as usize >= ready).then_some(false))
    });
    let ended = ended.await?;
    child.kill().await?;
    Ok(!ended)
}

async fn a_retried_job_is_answered_and_one_that_fails_again_says_so(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let good = letter("good", Reason::Expired, "hello")?;
    let bad = letter("bad", Reason::Malformed, "")?.with_body(*b"{");
    add_dead_letters(env, vec![good, bad]).await?;
    let operator = Operator::at(env)?;
    operator.run_for(0, &["retry", "--all", "--dry-run"]).await?;
    ensure!(operator.ids().await?.len() == 2, "a dry run did something");
    for round in 1..=2 {
        operator.run_for(0, &["retry", "--all", "--yes"]).await?;
        let worker = env.worker(&[]).await?;
        until("the bad one, dead again", async || {
            Ok((env.client.ready(&dead_queue(MODEL)).await? == 1).then_some(()))
        })
        .await?;
        worker.drain().await?;
        let [again] = &operator.letters().await?[..] else { anyhow::bail!("not one letter") };
        ensure!(again["headers"]["vramq-retries"]["i64"] == round, "{again}");
        ensure!(again["headers"]["mine"]["text"] == "kept", "{again}");
        let output = operator.run_for(0, &["show", "bad"]).await?;
        let times = if round == 1 { "once" } else { "2 times" };
        ensure!(output.contains(&format!("It was retried {times} before, and failed again.")), "{output}");
    }
    let mut replies = env.replies().await?;
    let answers = replies.take(3).await?;
    let mut kinds = answers
        .iter()
        .map(|answer| Ok((answer.id().to_owned(), answer.kind()?)))
        .collect::<Result<Vec<_>>>()?;
    kinds.sort_by_key(|(id, _)| id.clone());
    let failed = || ("bad".to_owned(), ReplyKind::Failed);
    ensure!(kinds == [failed(), failed(), ("good".to_owned(), ReplyKind::Done)], "{kinds:?}");
    Ok(())
}

async fn a_retry_that_is_killed_loses_nothing(env: &mut TestEnv) -> Result<()> {
    let count = scale();
    add_dead_letters(env, letters(count)?).await?;
    let operator = Operator::at(env)?;
    // Forty seconds in all, to be in the middle of, however seldom the test gets to look.
    let rate = (count / 40).to_string();
    let args = ["retry", "--all", "--yes", "--rate", &rate];
    let mut killed = 0;
    for part in 1..=6 {
        let ready = part * count / 16;
        killed += u32::from(killed_at(env, &operator, &args, &jobs_queue(MODEL), ready).await?);
    }
    ensure!(killed == 6, "killed only {killed} times");
    let left = operator.ids().await?.len();
    ensure!(left > 0, "it was not in the middle");
    operator.run_for(0, &["retry", "--all", "--yes"]).await?;
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    let jobs = drained(env, &jobs_queue(MODEL)).await?;
    ensure!(jobs.len() == count, "{} of {count} jobs", jobs.len());
    let twice = jobs.values().sum::<usize>() - count;
    println!("killed {killed} times, {left} of {count} left at the last: {twice} jobs twice");
    // What awaited its confirm, or was confirmed and not removed yet, when it was killed.
    ensure!(twice <= 300 * killed as usize, "{twice} duplicates");
    Ok(())
}

async fn two_operators_who_retry_the_same_letter_publish_it_once(env: &mut TestEnv) -> Result<()> {
    let count = scale();
    add_dead_letters(env, letters(count)?).await?;
    let operators = [Operator::at(env)?, Operator::at(env)?];
    let args = ["retry", "--reason", "expired", "--yes"];
    let (one, other) = tokio::join!(operators[0].run(&args), operators[1].run(&args));
    let (one, other) = (one?, other?);
    let mut codes = [one.code, other.code];
    codes.sort_unstable();
    // The second one finds nothing, or, if both looked before either acted, nothing any more.
    ensure!(
        codes == [Some(0), Some(0)] || codes == [Some(0), Some(1)],
        "{codes:?}: {} {}",
        one.stderr,
        other.stderr
    );
    let jobs = drained(env, &jobs_queue(MODEL)).await?;
    ensure!(
        jobs.len() == count / 4 && jobs.values().all(|times| *times == 1),
        "{} jobs",
        jobs.values().sum::<usize>()
    );
    let rest: Vec<_> =
        ids(count).into_iter().enumerate().filter(|(at, _)| at % 4 != 0).map(|(_, id)| id).collect();
    ensure!(operators[0].ids().await? == rest, "the rest is not as it was");
    Ok(())
}

/// The arguments that restore the letters of archives.
fn restore_of(archives: &[String]) -> Vec<&str> {
    ["restore"].into_iter().chain(archives.iter().map(String::as_str)).collect()
}

/// Drops that are to be killed; and how many there are at most, until one of them was killed before it was done.
const DROPS: usize = 6;
const DROPS_MAX: usize = 40;

async fn a_drop_and_a_restore_that_are_killed_lose_nothing(env: &mut TestEnv) -> Result<()> {
    let count = scale();
    add_dead_letters(env, letters(count)?).await?;
    let operator = Operator::at(env)?;
    let mut before = operator.letters().await?;
    let mut files = Vec::new();
    let (mut drops_cut, mut restores_cut) = (0, 0);
    let all = |n: usize| n.to_string();
    for round in 0..DROPS_MAX {
        if round >= DROPS && drops_cut > 0 {
            break;
        }
        let file = format!("dropped-{round}.jsonl");
        let mut left = operator.ids().await?.len();
        if left == 0 && drops_cut == 0 {
            // The command was done before the test saw that it had begun: once more.
            operator.run_for(0, &restore_of(&files)).await?;
            left = operator.ids().await?.len();
        }
        let count = all(left);
        let args = ["drop", "--all", "--yes-drop", &count, "--archive", &file];
        if left > 0 {
            let mut child = operator.spawn(&args)?;
            until("an archive, or its end", async || {
                let begun = operator.path(&file).metadata().is_ok_and(|file| file.len() > 0);
                Ok((begun || child.try_wait()?.is_some()).then_some(()))
            })
            .await?;
            drops_cut += usize::from(child.try_wait()?.is_none());
            child.kill().await?;
        }
        // A letter may be in several of them: archived when the command was killed, and not removed.
        files.extend(operator.path(&file).exists().then_some(file));
    }
    let count = all(operator.ids().await?.len());
    if count != "0" {
        operator.run_for(0, &["drop", "--all", "--yes-drop", &count, "--archive", "last.jsonl"]).await?;
        files.push("last.jsonl".to_owned());
    }
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    let restore = restore_of(&files);
    for part in 1..=6 {
        let ready = part * before.len() / 8;
        restores_cut += usize::from(killed_at(env, &operator, &restore, &dead_queue(MODEL), ready).await?);
    }
    println!("{drops_cut} drops and {restores_cut} restores were cut off");
    ensure!(drops_cut > 0 && restores_cut > 2, "{drops_cut} drops and {restores_cut} restores were cut off");
    for _ in 0..2 {
        operator.run_for(0, &restore).await?;
        let mut after = operator.letters().await?;
        for letters in [&mut before, &mut after] {
            letters.iter_mut().for_each(|letter| letter["headers"]["publish-seq"] = Value::Null);
            letters.sort_by_key(|letter| letter["properties"]["message_id"].as_str().map(str::to_owned));
        }
        ensure!(after == before, "{} letters came back as {}", before.len(), after.len());
    }
    Ok(())
}
