//! Actions of `vramq dlq` that end early: what was not done stays, and the command says how far it came.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use tokio::time::timeout;
use vramq_schemas::Reason;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_tests::dead_letters::{Operator, add_dead_letters, drained, ids, letter, letters, scale};
use vramq_tests::permissions::Permissions;
use vramq_tests::proxy::{Cut, Proxy};
use vramq_tests::setup::Queue;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    a_full_queue_ends_a_retry_and_the_rest_stays,
    a_letter_that_stays_is_not_taken_for_its_copy,
    a_retry_without_permission_ends_and_the_letters_stay,
    a_drop_that_cannot_write_says_where_the_letters_are,
    a_file_that_gets_no_letter_does_not_stay,
    a_retry_that_cannot_log_its_end_says_what_was_done,
    an_import_that_ends_early_says_that_the_log_lacks_its_end,
    a_retry_that_loses_the_broker_says_what_was_confirmed,
);
on_one_setup!(connections_are_closed_also_after_an_error);

/// The queue `small`, which refuses what it has no room for.
async fn declare_small(env: &TestEnv, kind: Queue, room: i64) -> Result<()> {
    let mut arguments = kind.arguments();
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(room));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    env.client.declare_queue("small", arguments).await
}

async fn a_full_queue_ends_a_retry_and_the_rest_stays(env: &mut TestEnv) -> Result<()> {
    const ROOM: i64 = 30;
    /// More than what is under way when a quorum queue says that it is full.
    const LETTERS: usize = 1000;
    add_dead_letters(env, letters(LETTERS)?).await?;
    declare_small(env, env.setup.queue, ROOM).await?;
    let operator = Operator::at(env)?;
    let ended = operator.run(&["retry", "--all", "--yes", "--to", "small"]).await?;
    ensure!(ended.code == Some(4) && ended.stderr.contains("full"), "{:?} {}", ended.code, ended.stderr);
    let sent = drained(env, "small").await?;
    ensure!(sent.values().all(|times| *times == 1) && sent.len() >= ROOM as usize, "{} jobs", sent.len());
    let stayed = operator.ids().await?;
    ensure!(stayed.len() + sent.len() == LETTERS, "{} and {}", stayed.len(), sent.len());
    ensure!(stayed.iter().all(|id| !sent.contains_key(id)), "a letter is in both");
    let gone = operator.run(&["retry", "--all", "--yes", "--to", "nowhere"]).await?;
    ensure!(gone.code == Some(4), "{:?} {}", gone.code, gone.stderr);
    ensure!(operator.ids().await? == stayed, "letters went nowhere");
    Ok(())
}

/// Two identical letters, as of a job that expired twice in a second, and room for one. The other one stays, although the command then looks
/// for acknowledgements that the broker has lost.
async fn a_letter_that_stays_is_not_taken_for_its_copy(env: &mut TestEnv) -> Result<()> {
    let twin = letter("twin", Reason::Expired, "x")?;
    add_dead_letters(env, vec![twin.clone(), twin]).await?;
    // A quorum queue takes more than it has room for.
    declare_small(env, Queue::Classic, 1).await?;
    env.leave("small");
    let operator = Operator::at(env)?;
    for (room, moved) in [("takes one", 1), ("is full", 0)] {
        let ended = operator.run(&["retry", "--all", "--yes", "--to", "small"]).await?;
        let said = &ended.stderr;
        let left = env.client.ready(&dead_queue(MODEL)).await?;
        let sent = env.client.ready("small").await?;
        ensure!(
            ended.code == Some(4) && (sent, left) == (1, 1),
            "it {room}: {sent} sent, {left} left: {said}"
        );
        ensure!(logged(&operator, "done")? == moved, "it {room}: {said}");
    }
    Ok(())
}

/// RabbitMQ answers a publish without permission by closing the channel, and confirms nothing that is on it.
async fn a_retry_without_permission_ends_and_the_letters_stay(env: &mut TestEnv) -> Result<()> {
    // For the exchange `vramq.retry`.
    env.worker(&[]).await?.drain().await?;
    add_dead_letters(env, letters(scale())?).await?;
    let own = r"^(amq\.gen.*|vramq\.dlq-lock\..+)$".to_owned();
    let read = r"^(vramq\.(dead|dlq-lock)\..+|amq\.gen.*)$".to_owned();
    let (_, of_reader) =
        env.add_user_with("reader", &Permissions { configure: own.clone(), write: own, read }).await?;
    let operator = Operator::with_url(&of_reader)?;
    let all = operator.ids().await?;
    for what in [&["--all"][..], &["--all", "--first", "1"], &["--all", "--rate", "5"]] {
        let ended = operator.run(&[&["retry", "--yes"][..], what].concat()).await?;
        let (code, stderr) = (ended.code, &ended.stderr);
        ensure!(code == Some(4), "{what:?}: {code:?} {stderr}");
        ensure!(stderr.contains("ACCESS_REFUSED") && stderr.contains("vramq.retry"), "{what:?}: {stderr}");
    }
    ensure!(operator.ids().await? == all, "the letters are not as they were");
    // Results go to the queues that they name, by another exchange, which this user may not use either.
    let ended = operator.run(&["retry", "--all", "--yes", "--to", "replies"]).await?;
    ensure!(ended.code == Some(4) && ended.stderr.contains("ACCESS_REFUSED"), "{}", ended.stderr);
    ensure!(operator.ids().await? == all, "the letters are not as they were");
    Ok(())
}

async fn a_drop_that_cannot_write_says_where_the_letters_are(env: &mut TestEnv) -> Result<()> {
    /// More than fit a file of so many KiB.
    const LETTERS: usize = 400;
    const KIB: u32 = 64;
    add_dead_letters(env, letters(LETTERS)?).await?;
    let operator = Operator::at(env)?;
    let ended = operator.run_with_files_up_to(KIB, &["export", "--all", "-o", "part.jsonl"]).await?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("part.jsonl is incomplete"), "{ended:?}");
    let count = LETTERS.to_string();
    let drop = ["drop", "--all", "--yes-drop", &count, "--archive", "half.jsonl"];
    let ended = operator.run_with_files_up_to(KIB, &drop).await?;
    ensure!(ended.code == Some(1) && ended.stderr.contains("File too large"), "{ended:?}");
    ensure!(ended.stderr.contains("in half.jsonl: `vramq dlq restore half.jsonl`"), "{ended:?}");
    operator.run_for(0, &["restore", "half.jsonl"]).await?;
    let mut found = operator.ids().await?;
    let mut expected = ids(LETTERS);
    found.sort();
    expected.sort();
    ensure!(found == expected, "{} letters", found.len());
    Ok(())
}

/// The broker logs a warning for each that just ends.
async fn connections_are_closed_also_after_an_error(env: &mut TestEnv) -> Result<()> {
    const KIB: u32 = 8;
    add_dead_letters(env, vec![letter("big", Reason::Malformed, &"x".repeat(64 << 10))?]).await?;
    let proxy = Proxy::to(&env.url).await?;
    let operator = Operator::with_url(proxy.url())?;
    // An action has a connection to plan, and another one to run.
    for (action, connections) in
        [(&["export", "--all", "-o"][..], 1), (&["drop", "--all", "--yes-drop", "1", "--archive"][..], 3)]
    {
        let ended = operator.run_with_files_up_to(KIB, &[action, &["big.jsonl"]].concat()).await?;
        ensure!(ended.code == Some(1) && ended.stderr.contains("is removed"), "{ended:?}");
        ensure!((proxy.accepted(), proxy.closed()) == (connections, connections), "{ended:?} {proxy:?}");
    }
    Ok(())
}

/// So that the command can be repeated as it is, when there is room.
async fn a_file_that_gets_no_letter_does_not_stay(env: &mut TestEnv) -> Result<()> {
    const KIB: u32 = 8;
    add_dead_letters(env, vec![letter("big", Reason::Malformed, &"x".repeat(64 << 10))?]).await?;
    let operator = Operator::at(env)?;
    for action in [&["export", "--all", "-o"][..], &["drop", "--all", "--yes-drop", "1", "--archive"]] {
        let action = [action, &["big.jsonl"]].concat();
        let ended = operator.run_with_files_up_to(KIB, &action).await?;
        ensure!(ended.code == Some(1) && ended.stderr.contains("is removed"), "{ended:?}");
        ensure!(!ended.stderr.contains("restore") && !operator.path("big.jsonl").exists(), "{ended:?}");
        operator.run_for(0, &action).await?;
        ensure!(operator.path("big.jsonl").exists(), "{action:?} wrote nothing");
        std::fs::remove_file(operator.path("big.jsonl"))?;
    }
    ensure!(operator.ids().await?.is_empty(), "the letter is still there");
    Ok(())
}

async fn a_retry_that_cannot_log_its_end_says_what_was_done(env: &mut TestEnv) -> Result<()> {
    /// So many that the first line of the action log fits a file of so many KiB, and the last one does not.
    const LETTERS: usize = 60;
    const KIB: u32 = 4;
    add_dead_letters(env, letters(LETTERS)?).await?;
    let operator = Operator::at(env)?;
    let ended = operator.run_with_files_up_to(KIB, &["retry", "--all", "--yes"]).await?;
    let said = &ended.stderr;
    ensure!(ended.code == Some(1) && said.contains("error: write the action log"), "{ended:?}");
    ensure!(said.contains(&format!("{LETTERS} of {LETTERS} dead letters retried")), "{said}");
    ensure!(env.client.ready(&jobs_queue(MODEL)).await? as usize == LETTERS, "{said}");
    // The lines of the next action are whole.
    operator.run_for(0, &["import", "/dev/null"]).await?;
    let log = std::fs::read_to_string(operator.path("vramq/actions.jsonl"))?;
    let whole = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).is_ok());
    ensure!(whole.eq([true, false, true, true]), "{log}");
    Ok(())
}

async fn an_import_that_ends_early_says_that_the_log_lacks_its_end(env: &mut TestEnv) -> Result<()> {
    const KIB: u32 = 4;
    let operator = Operator::at(env)?;
    let import = ["import", "missing.jsonl"];
    let ended = operator.run(&import).await?;
    ensure!(!ended.stderr.contains("the action log"), "{ended:?}");
    let path = operator.path("vramq/actions.jsonl");
    let log = std::fs::read_to_string(&path)?;
    let (begin, end) = log.split_once('\n').context("no two lines")?;
    // The first line of the next import fits the file, and the last one does not.
    let before = KIB as usize * 1024 - begin.len() - end.len() / 2;
    std::fs::write(&path, format!("{}\n", " ".repeat(before)))?;
    let ended = operator.run_with_files_up_to(KIB, &import).await?;
    let said = &ended.stderr;
    ensure!(said.contains("the action log does not say so: write the action log"), "{ended:?}");
    ensure!(said.contains("missing.jsonl"), "{ended:?}");
    Ok(())
}

/// How many fingerprints the last line of the action log has under a key.
fn logged(operator: &Operator, key: &str) -> Result<usize> {
    let log = operator.log()?;
    let end = log.last().filter(|line| line["phase"] == "end").context("no end in the action log")?;
    Ok(end[key].as_array().with_context(|| format!("no {key} in {end}"))?.len())
}

/// Some jobs are confirmed, others are published without a confirm, and the rest is not published when the connections break.
async fn a_retry_that_loses_the_broker_says_what_was_confirmed(env: &mut TestEnv) -> Result<()> {
    // Many more than are published until the connections break, however late the broker counts.
    let count = 100;
    add_dead_letters(env, letters(count)?).await?;
    let counted = async |wanted: &dyn Fn(usize) -> bool| {
        until("the broker's count of the letters", async || {
            let left = env.vhost.depth(&dead_queue(MODEL)).await?;
            Ok(left.is_some_and(|left| wanted((left.ready + left.unacked) as usize)).then_some(()))
        })
        .await
    };
    counted(&|letters| letters == count).await?;
    let proxy = Proxy::to(&env.url).await?;
    let operator = Operator::with_url(proxy.url())?;
    let mut command = operator.command(&["retry", "--all", "--yes", "--rate", "2"])?;
    let retry = command.stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
    // A letter leaves its queue when the broker has confirmed the job.
    counted(&|letters| letters < count).await?;
    proxy.hold_confirms();
    let published = async || env.client.ready(&jobs_queue(MODEL)).await;
    let before = published().await?;
    until("jobs without a confirm", async || Ok((published().await? >= before + 3).then_some(()))).await?;
    proxy.cut(Cut::Reset);
    let ended = timeout(DEADLINE, retry.wait_with_output()).await.context("it does not end")??;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.code() == Some(3), "{:?}: {said}", ended.status);
    let (done, unknown) = (logged(&operator, "done")?, logged(&operator, "unknown")?);
    let ready = env.client.ready(&jobs_queue(MODEL)).await? as usize;
    ensure!(done >= 1 && done <= ready && ready <= done + unknown, "{done}, {unknown}, {ready}: {said}");
    ensure!(unknown >= 2 && done + unknown < count, "{done}, {unknown}: {said}");
    for line in [
        format!("{done} of {count} dead letters retried\n"),
        format!(
            "{unknown} published without an answer of the broker: they may be retried, and are still in the queue\n"
        ),
        "the others are still in the queue\n".to_owned(),
        "look with `vramq dlq list`".to_owned(),
    ] {
        ensure!(said.contains(&line), "{line:?} is not in {said}");
    }
    until("the letters to be back", async || {
        Ok((env.client.ready(&dead_queue(MODEL)).await? as usize >= count - done).then_some(()))
    })
    .await
}
