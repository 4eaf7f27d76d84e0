//! `vramq dlq`: looking changes nothing, whatever is done goes on record, and no letter is lost, whoever is killed.
//!
//! With a few hundred letters; with `VRAMQ_TEST_FULL=1` ten thousand.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use rustix::process::Signal;
use serde_json::Value;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::dead_letters::{Operator, bury, letter};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::random::Random;
use vramq_tests::setup::full;
use vramq_tests::wait::until;
use vramq_tests::world::{MODEL, World};

on_queue_types!(
    looking_changes_nothing,
    memory_is_flat,
    a_list_can_be_filtered_and_a_letter_told,
    a_retried_job_is_answered_and_one_that_fails_again_says_so,
    results_are_delivered_and_their_job_does_not_run_again,
    a_retry_that_is_killed_loses_nothing,
    two_who_retry_the_same_send_it_once,
    a_full_queue_ends_a_retry_and_the_rest_stays,
    a_drop_and_a_restore_that_are_killed_lose_nothing,
    letters_that_the_broker_wrote_come_back_as_they_were,
    what_changes_is_refused_or_on_record,
);

fn scale() -> usize {
    if full() { 10_000 } else { 400 }
}

/// Letters of several kinds.
fn letters(count: usize) -> Result<Vec<Message>> {
    let reasons = [Reason::Expired, Reason::OutOfMemory, Reason::EngineFailed, Reason::Unroutable];
    (0..count).map(|at| letter(&format!("job-{at}"), reasons[at % reasons.len()], "a text")).collect()
}

fn ids(count: usize) -> Vec<String> {
    (0..count).map(|at| format!("job-{at}")).collect()
}

/// How often each id is in a queue; takes it out.
async fn drained(world: &World, queue: &str) -> Result<BTreeMap<String, usize>> {
    let mut counts = BTreeMap::new();
    let count = world.client.ready(queue).await?;
    let mut mailbox = world.client.mailbox(queue).await?;
    for message in mailbox.take(count as usize).await? {
        *counts.entry(message.id().to_owned()).or_default() += 1;
    }
    Ok(counts)
}

/// The time that it takes if nobody interrupts it.
async fn timed(operator: &Operator, args: &[&str]) -> Result<Duration> {
    let start = Instant::now();
    operator.run_for(0, args).await?;
    Ok(start.elapsed())
}

async fn looking_changes_nothing(world: &mut World) -> Result<()> {
    let count = scale();
    bury(world, letters(count)?).await?;
    let operator = Operator::at(world)?;
    let before = operator.letters().await?;
    ensure!(operator.ids().await? == ids(count), "not in the order of their publishing");
    let took = timed(&operator, &["list"]).await?;
    println!("list of {count}: {took:.2?}");
    let mut random = Random::new(7);
    for look in 0..50 {
        let after = took.mul_f64(random.below(1200) as f64 / 1000.0);
        let signal = if look % 2 == 0 { Signal::KILL } else { Signal::INT };
        operator.cut_off(&["list"], signal, after).await?;
        if look % 10 == 0 {
            ensure!(operator.letters().await? == before, "changed by look {look}, cut off after {after:?}");
        }
    }
    let (one, other) =
        tokio::join!(operator.run_for(0, &["list", "--json"]), operator.run_for(0, &["list", "--json"]));
    ensure!(one? == other?, "two at once do not see the same");
    ensure!(operator.letters().await? == before, "changed by two at once");
    ensure!(world.client.ready(&dead_queue(MODEL)).await? as usize == count, "not all are there");
    Ok(())
}

async fn memory_is_flat(world: &mut World) -> Result<()> {
    /// Of a list of however many letters: the program itself, and what may wait at its gate.
    const PEAK_MIB_MAX: u64 = 80;
    let count = scale();
    let text = "x".repeat(20_000);
    let letters = (0..count).map(|at| letter(&format!("job-{at}"), Reason::Expired, &text));
    bury(world, letters.collect::<Result<_>>()?).await?;
    let operator = Operator::at(world)?;
    for args in [&["list"][..], &["export", "--all", "-o", "all.jsonl"]] {
        let start = Instant::now();
        let mut child = operator.spawn(args)?;
        let status = format!("/proc/{}/status", child.id().context("no id")?);
        let mut peak = 0;
        let ended = until("its end", async || {
            let told = std::fs::read_to_string(&status).unwrap_or_default();
            let kib = told.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
            peak = kib.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0).max(peak);
            Ok(child.try_wait()?)
        });
        ensure!(ended.await?.success());
        println!("{} of {count} letters of 20 KB: {} MiB, {:.2?}", args[0], peak / 1024, start.elapsed());
        ensure!(peak / 1024 < PEAK_MIB_MAX, "{} MiB", peak / 1024);
    }
    Ok(())
}

async fn a_list_can_be_filtered_and_a_letter_told(world: &mut World) -> Result<()> {
    let mut all = letters(8)?;
    all.push(letter("\u{1b}[2Jhostile\u{202e}", Reason::Malformed, "x")?.with_body(*b"\x1b]0;no job\x07"));
    bury(world, all).await?;
    let operator = Operator::at(world)?;
    let told = operator.run_for(0, &["list"]).await?;
    ensure!(told.contains("expired/echo/0.0.1") && told.contains("job-7"), "{told}");
    ensure!(told.contains("\\u{1b}[2Jhostile\\u{202e}") && !told.contains('\u{1b}'), "{told}");
    for (args, count) in [
        (&["--reason", "expired"][..], 2),
        (&["--reason", "expired", "--reason", "malformed"], 3),
        (&["--group", "out-of-memory/echo/0.0.1"], 2),
        (&["--since", "1h"], 0),
        (&["--since", "2023-11-01T00:00:00Z"], 9),
        (&["--limit", "4"], 4),
    ] {
        let told = operator.run_for(0, &[&["list", "--json"], args].concat()).await?;
        let letters = told.lines().filter(|line| line.contains(r#""kind":"letter""#)).count();
        ensure!(letters == count, "{args:?}: {letters} letters in {told}");
    }
    let told = operator.run_for(0, &["list", "--json", "--reason", "malformed"]).await?;
    let hostile: Value = serde_json::from_str(told.lines().last().context("no line")?)?;
    let fingerprint = hostile["fingerprint"].as_str().context("no fingerprint")?;
    let told = operator.run_for(0, &["show", fingerprint, "--save", "body"]).await?;
    ensure!(
        told.contains("Why it ended") && told.contains("What to do") && !told.contains('\u{1b}'),
        "{told}"
    );
    ensure!(std::fs::read(operator.path("body"))? == b"\x1b]0;no job\x07");
    operator.run_for(0, &["show", "job-3", "--body"]).await?;
    operator.run_for(1, &["show", "nobody"]).await?;
    operator.run_for(2, &["drop"]).await?;
    operator.run_for(2, &["retry", "--all"]).await?;
    operator.run_for(1, &["drop", "--all", "--yes-drop", "8"]).await?;
    let elsewhere = operator.command(&["list", "--model", "nothing"])?;
    ensure!(vramq_tests::worker::run_to_end(elsewhere).await?.code == Some(4));
    ensure!(operator.ids().await?.len() == 9, "letters are missing");
    Ok(())
}

async fn a_retried_job_is_answered_and_one_that_fails_again_says_so(world: &mut World) -> Result<()> {
    world.announce("job dead-lettered");
    let good = letter("good", Reason::Expired, "hello")?;
    let bad = letter("bad", Reason::Malformed, "")?.with_body(*b"{");
    bury(world, vec![good, bad]).await?;
    let operator = Operator::at(world)?;
    operator.run_for(0, &["retry", "--all", "--dry-run"]).await?;
    ensure!(operator.ids().await?.len() == 2, "a dry run did something");
    for round in 1..=2 {
        operator.run_for(0, &["retry", "--all", "--yes"]).await?;
        let worker = world.worker(&[]).await?;
        until("the bad one, dead again", async || {
            Ok((world.client.ready(&dead_queue(MODEL)).await? == 1).then_some(()))
        })
        .await?;
        worker.drain().await?;
        let [again] = &operator.letters().await?[..] else { anyhow::bail!("not one letter") };
        ensure!(again["headers"]["retries"]["i64"] == round, "{again}");
        ensure!(again["headers"]["mine"]["text"] == "kept", "{again}");
        let told = operator.run_for(0, &["show", "bad"]).await?;
        ensure!(told.contains("sent on from here"), "{told}");
    }
    let mut replies = world.replies().await?;
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

async fn results_are_delivered_and_their_job_does_not_run_again(world: &mut World) -> Result<()> {
    world.announce("reply not taken, dead-lettered");
    world.leave(&dead_queue(MODEL));
    let worker = world.worker(&[]).await?;
    for id in ["a", "b"] {
        let job = world.job(id, ["x", "y"])?.with(|properties| properties.with_reply_to("late".into()));
        world.client.publish(MODEL, job).await?;
    }
    until("two letters for each", async || {
        Ok((world.client.ready(&dead_queue(MODEL)).await? == 4).then_some(()))
    })
    .await?;
    worker.drain().await?;
    let operator = Operator::at(world)?;
    // Nobody is there yet: all of it stays.
    operator.run_for(1, &["retry", "--all", "--yes"]).await?;
    ensure!(operator.ids().await?.len() == 4, "letters are missing");
    world.client.declare_queue("late", world.setup.queue.arguments()).await?;
    let told = operator.run(&["retry", "--all", "--yes"]).await?;
    ensure!(
        told.code == Some(0) && told.stderr.contains("2 jobs answered by these results"),
        "{}",
        told.stderr
    );
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    ensure!(world.client.ready(&jobs_queue(MODEL)).await? == 0, "a job would run again");
    let mut late = world.client.mailbox("late").await?;
    for reply in late.take(2).await? {
        ensure!(reply.kind()? == ReplyKind::Done && reply.outputs()?.outputs.len() == 2);
        ensure!(reply.reply()?.worker == worker.name && !reply.headers().contains_key("reason"));
        ensure!(reply.properties.reply_to().is_none());
    }
    Ok(())
}

/// Kills a command as soon as the queue has so many messages, or it has ended before. Whether it was killed.
async fn killed_at(
    world: &World,
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
        Ok((world.client.ready(queue).await? as usize >= ready).then_some(false))
    });
    let ended = ended.await?;
    child.kill().await?;
    Ok(!ended)
}

async fn a_retry_that_is_killed_loses_nothing(world: &mut World) -> Result<()> {
    let count = scale();
    bury(world, letters(count)?).await?;
    let operator = Operator::at(world)?;
    // A second or so in all, to be in the middle of.
    let rate = count.to_string();
    let args = ["retry", "--all", "--yes", "--rate", &rate];
    let mut killed = 0;
    for part in 1..=6 {
        let ready = part * count / 8;
        killed += u32::from(killed_at(world, &operator, &args, &jobs_queue(MODEL), ready).await?);
    }
    ensure!(killed == 6, "killed only {killed} times");
    let left = operator.ids().await?.len();
    ensure!(left > 0, "it was not in the middle");
    operator.run_for(0, &["retry", "--all", "--yes"]).await?;
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    let jobs = drained(world, &jobs_queue(MODEL)).await?;
    ensure!(jobs.len() == count, "{} of {count} jobs", jobs.len());
    let twice = jobs.values().sum::<usize>() - count;
    println!("killed {killed} times, {left} of {count} left at the last: {twice} jobs twice");
    // What awaited its confirm, or was confirmed and not removed yet, when it was killed.
    ensure!(twice <= 300 * killed as usize, "{twice} duplicates");
    Ok(())
}

async fn two_who_retry_the_same_send_it_once(world: &mut World) -> Result<()> {
    let count = scale();
    bury(world, letters(count)?).await?;
    let operators = [Operator::at(world)?, Operator::at(world)?];
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
    let jobs = drained(world, &jobs_queue(MODEL)).await?;
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

async fn a_full_queue_ends_a_retry_and_the_rest_stays(world: &mut World) -> Result<()> {
    const ROOM: i64 = 30;
    /// More than what is under way when a quorum queue says that it is full.
    const LETTERS: usize = 1000;
    bury(world, letters(LETTERS)?).await?;
    let mut arguments = world.setup.queue.arguments();
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(ROOM));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    world.client.declare_queue("small", arguments).await?;
    let operator = Operator::at(world)?;
    let ended = operator.run(&["retry", "--all", "--yes", "--to", "small"]).await?;
    ensure!(ended.code == Some(4) && ended.stderr.contains("full"), "{:?} {}", ended.code, ended.stderr);
    let sent = drained(world, "small").await?;
    ensure!(sent.values().all(|times| *times == 1) && sent.len() >= ROOM as usize, "{} jobs", sent.len());
    let stayed = operator.ids().await?;
    ensure!(stayed.len() + sent.len() == LETTERS, "{} and {}", stayed.len(), sent.len());
    ensure!(stayed.iter().all(|id| !sent.contains_key(id)), "a letter is in both");
    let gone = operator.run(&["retry", "--all", "--yes", "--to", "nowhere"]).await?;
    ensure!(gone.code == Some(4), "{:?} {}", gone.code, gone.stderr);
    ensure!(operator.ids().await? == stayed, "letters went nowhere");
    Ok(())
}

async fn a_drop_and_a_restore_that_are_killed_lose_nothing(world: &mut World) -> Result<()> {
    let count = scale();
    bury(world, letters(count)?).await?;
    let operator = Operator::at(world)?;
    let mut before = operator.letters().await?;
    let mut files = Vec::new();
    let all = |n: usize| n.to_string();
    for round in 0..6 {
        let file = format!("dropped-{round}.jsonl");
        let left = operator.ids().await?.len();
        let count = all(left);
        let args = ["drop", "--all", "--yes-drop", &count, "--archive", &file];
        if left > 0 {
            let mut child = operator.spawn(&args)?;
            until("an archive, or its end", async || {
                let begun = operator.path(&file).metadata().is_ok_and(|file| file.len() > 0);
                Ok((begun || child.try_wait()?.is_some()).then_some(()))
            })
            .await?;
            child.kill().await?;
        }
        files.extend(operator.path(&file).exists().then_some(file));
    }
    let count = all(operator.ids().await?.len());
    if count != "0" {
        operator.run_for(0, &["drop", "--all", "--yes-drop", &count, "--archive", "last.jsonl"]).await?;
        files.push("last.jsonl".to_owned());
    }
    ensure!(operator.ids().await?.is_empty(), "letters are left");
    let restore: Vec<&str> = ["restore"].into_iter().chain(files.iter().map(String::as_str)).collect();
    for part in 1..=6 {
        killed_at(world, &operator, &restore, &dead_queue(MODEL), part * before.len() / 8).await?;
    }
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

async fn letters_that_the_broker_wrote_come_back_as_they_were(world: &mut World) -> Result<()> {
    bury(world, Vec::new()).await?;
    let job = world.job("late", ["x"])?.with(|properties| properties.with_expiration("1".into()));
    world.client.publish(MODEL, job).await?;
    until("an expired job", async || Ok((world.client.ready(&dead_queue(MODEL)).await? == 1).then_some(())))
        .await?;
    let operator = Operator::at(world)?;
    let told = operator.run_for(0, &["list"]).await?;
    ensure!(told.contains("expired/echo/broker"), "{told}");
    let told = operator.run_for(0, &["show", "late"]).await?;
    ensure!(told.contains("the broker took it from the queue vramq.jobs.echo"), "{told}");
    let before = operator.letters().await?;
    operator.run_for(0, &["drop", "late", "--yes-drop", "1", "--archive", "late.jsonl"]).await?;
    operator.run_for(0, &["restore", "late.jsonl"]).await?;
    let mut after = operator.letters().await?;
    after[0]["headers"].as_object_mut().context("no headers")?.remove("publish-seq");
    ensure!(after == before, "{after:?}\nnot\n{before:?}");
    operator
        .run_for(0, &["retry", "late", "--yes", "--set", "expiration=10m", "--set", "batch-hint=3"])
        .await?;
    let worker = world.worker(&[]).await?;
    let answer = world.replies().await?.next().await?;
    ensure!(answer.kind()? == ReplyKind::Done && answer.id() == "late");
    worker.drain().await
}

async fn what_changes_is_refused_or_on_record(world: &mut World) -> Result<()> {
    bury(world, letters(4)?).await?;
    let operator = Operator::at(world)?;
    for args in
        [&["retry", "--all", "--yes"][..], &["drop", "--all", "--yes-drop", "4"], &["import", "x.jsonl"]]
    {
        let mut command = operator.command(args)?;
        command.env("VRAMQ_READ_ONLY", "1");
        ensure!(vramq_tests::worker::run_to_end(command).await?.code == Some(2), "{args:?}");
    }
    ensure!(operator.log().is_err(), "what was refused is on record");
    operator.run_for(0, &["retry", "job-0", "--yes"]).await?;
    operator.run_for(0, &["drop", "job-1", "--yes-drop", "1", "--archive", "one.jsonl"]).await?;
    operator.run_for(0, &["restore", "one.jsonl"]).await?;
    let log = operator.log()?;
    let told: Vec<_> = log.iter().map(|entry| (entry["command"].as_str(), entry["phase"].as_str())).collect();
    let pair = |command| [(Some(command), Some("begin")), (Some(command), Some("end"))];
    ensure!(told == [pair("retry"), pair("drop"), pair("import")].concat(), "{told:?}");
    ensure!(log[0]["letters"][0]["id"] == "job-0" && log[1]["count"] == 1, "{log:?}");
    ensure!(log.iter().all(|entry| entry["who"].as_str().is_some_and(|who| who.contains('@'))));
    // Where it cannot be put on record, it is not done.
    let refused = operator.run(&["retry", "job-2", "--yes", "--log", "/proc/nothing/log"]).await?;
    ensure!(refused.code == Some(2), "{}", refused.stderr);
    ensure!(operator.ids().await? == ["job-2", "job-3", "job-1"]);
    Ok(())
}
