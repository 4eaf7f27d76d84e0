//! Actions of `vramq dlq`: no dead letter is lost when a process is killed, and two operators never republish the same one.
//!
//! With a few hundred letters; with `VRAMQ_TEST_FULL=1` ten thousand.

use std::collections::BTreeMap;

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use lapin::types::{AMQPValue, FieldTable};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::dead_letters::{Operator, add_dead_letters, ids, letter, letters, scale};
use vramq_tests::permissions::Permissions;
use vramq_tests::proxy::{Cut, Proxy};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    a_retried_job_is_answered_and_one_that_fails_again_says_so,
    a_retry_that_is_killed_loses_nothing,
    two_operators_who_retry_the_same_letter_publish_it_once,
    a_full_queue_ends_a_retry_and_the_rest_stays,
    a_retry_without_permission_ends_and_the_letters_stay,
    a_drop_that_cannot_write_says_where_the_letters_are,
    a_drop_and_a_restore_that_are_killed_lose_nothing,
    a_retry_that_loses_the_broker_says_what_was_confirmed,
    an_import_that_waits_for_a_pipe_ends_by_a_signal,
);
on_one_setup!(a_queue_that_confirms_nothing_holds_up_no_other_queue_of_an_import);

/// How often each id is in a queue; takes it out.
async fn drained(env: &TestEnv, queue: &str) -> Result<BTreeMap<String, usize>> {
    let mut counts = BTreeMap::new();
    let count = env.client.ready(queue).await?;
    let mut mailbox = env.client.mailbox(queue).await?;
    for message in mailbox.take(count as usize).await? {
        *counts.entry(message.id().to_owned()).or_default() += 1;
    }
    Ok(counts)
}

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

async fn a_full_queue_ends_a_retry_and_the_rest_stays(env: &mut TestEnv) -> Result<()> {
    const ROOM: i64 = 30;
    /// More than what is under way when a quorum queue says that it is full.
    const LETTERS: usize = 1000;
    add_dead_letters(env, letters(LETTERS)?).await?;
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(ROOM));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    env.client.declare_queue("small", arguments).await?;
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

/// SIGINT and SIGTERM end it with their codes. What was read is published, and a line that has begun is not.
async fn an_import_that_waits_for_a_pipe_ends_by_a_signal(env: &mut TestEnv) -> Result<()> {
    add_dead_letters(env, letters(2)?).await?;
    let operator = Operator::at(env)?;
    let exported = operator.run_for(0, &["export", "--all"]).await?;
    drained(env, &dead_queue(MODEL)).await?;
    let (first, second) = exported.split_once('\n').context("no two lines")?;
    for (signal, code, there) in [(Signal::INT, 130, 1), (Signal::TERM, 143, 2)] {
        let mut command = operator.command(&["import", "--duplicates", "-"])?;
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut import = command.spawn()?;
        let mut stdin = import.stdin.take().context("a process without stdin")?;
        stdin.write_all(format!("{first}\n{}", &second[..20]).as_bytes()).await?;
        let dead = dead_queue(MODEL);
        until("the letter", async || Ok((env.client.ready(&dead).await? >= there).then_some(()))).await?;
        let pid = import.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("no process")?;
        kill_process(pid, signal)?;
        let ended = timeout(DEADLINE, import.wait_with_output()).await.context("it does not end")??;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.code() == Some(code), "{:?}: {said}", ended.status);
        drop(stdin);
        let log = operator.log()?;
        let end = log.last().context("an empty log")?;
        ensure!(end["phase"] == "end" && end["detail"]["published"] == 1, "{end}");
        ensure!(env.client.ready(&dead).await? == there, "{:?}", operator.ids().await?);
    }
    // A line without end is refused, with its number, and not read to its end.
    let mut command = operator.command(&["import", "-"])?;
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut import = command.spawn()?;
    let mut stdin = import.stdin.take().context("a process without stdin")?;
    let endless = tokio::spawn(async move { while stdin.write_all(&[b'x'; 4096]).await.is_ok() {} });
    let ended = timeout(DEADLINE, import.wait_with_output()).await.context("it does not end")??;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.code() == Some(2) && said.contains("line 1: it begins no dead letter"), "{said}");
    Ok(endless.await?)
}

/// All other queues get their letters, and these are counted.
async fn a_queue_that_confirms_nothing_holds_up_no_other_queue_of_an_import(env: &mut TestEnv) -> Result<()> {
    let proxy = Proxy::to(&env.url).await?;
    let operator = Operator::with_url(proxy.url())?;
    let queues = ["silent", "a", "b", "c", "d", "e"].map(dead_queue);
    for queue in &queues {
        env.client.declare_queue(queue, FieldTable::default()).await?;
        env.leave(queue);
    }
    let line = |queue: &str| {
        let properties = r#"{"message_id":"a","delivery_mode":2}"#;
        format!(
            "{{\"vramq_letter\":1,\"queue\":\"{queue}\",\"fingerprint\":\"\",\"properties\":{properties},\"headers\":{{}},\"body\":\"AAEC\"}}\n"
        )
    };
    let arrived = async |queues: &[String]| {
        until("the letters", async || {
            for queue in queues {
                if env.client.ready(queue).await? == 0 {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })
        .await
    };
    let [silent, others @ ..] = &queues;
    proxy.hold_new_confirms();
    let mut command = operator.command_without_model(&["import", "-"])?;
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut import = command.spawn()?;
    let mut stdin = import.stdin.take().context("a process without stdin")?;
    stdin.write_all(line(silent).as_bytes()).await?;
    arrived(std::slice::from_ref(silent)).await?;
    // Each queue has a connection of its own.
    proxy.pass();
    let rest: String = others.iter().map(|queue| line(queue)).collect();
    stdin.write_all(rest.as_bytes()).await?;
    drop(stdin);
    arrived(others).await?;
    let pid = import.id().and_then(|id| Pid::from_raw(id.cast_signed())).context("no process")?;
    kill_process(pid, Signal::INT)?;
    let ended = timeout(DEADLINE, import.wait_with_output()).await.context("it does not end")??;
    let said = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.code() == Some(130), "{:?}: {said}", ended.status);
    let log = operator.log()?;
    let end = log.last().context("an empty log")?;
    ensure!(end["phase"] == "end" && end["detail"]["published"] == others.len(), "{end}: {said}");
    Ok(())
}
