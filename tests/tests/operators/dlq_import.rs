//! `vramq dlq import` while its input or the broker is slow.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use lapin::types::FieldTable;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::time::timeout;
use vramq_schemas::topology::dead_queue;
use vramq_tests::dead_letters::{Operator, add_dead_letters, drained, letters};
use vramq_tests::proxy::Proxy;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::worker::vramq;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(an_import_that_waits_for_a_pipe_ends_by_a_signal);
on_one_setup!(
    a_queue_that_confirms_nothing_holds_up_no_other_queue_of_an_import,
    a_dead_letter_of_a_queue_that_no_model_has_is_refused,
    an_import_that_fails_at_its_input_counts_nothing,
);

/// A dead letter as a line of a file.
fn line(queue: &str) -> String {
    let properties = r#"{"message_id":"a","delivery_mode":2}"#;
    format!(
        "{{\"vramq_letter\":1,\"queue\":\"{queue}\",\"fingerprint\":\"\",\"properties\":{properties},\"headers\":{{}},\"body\":\"AAEC\"}}\n"
    )
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
    let mut said = BufReader::new(import.stderr.take().context("a process without stderr")?).lines();
    // It waits for the silent queue, until there is a second signal.
    loop {
        let line = timeout(DEADLINE, said.next_line()).await.context("it does not wait")??;
        if line.context("it ended")?.contains("another signal ends this") {
            break;
        }
    }
    kill_process(pid, Signal::INT)?;
    let ended = timeout(DEADLINE, import.wait()).await.context("it does not end")??;
    ensure!(ended.code() == Some(130), "{ended:?}");
    let mut rest = Vec::new();
    while let Some(line) = said.next_line().await? {
        rest.push(line);
    }
    ensure!(
        rest.iter().any(|line| line.starts_with("1 dead letter published without an answer")),
        "{rest:?}"
    );
    let log = operator.log()?;
    let end = log.last().context("an empty log")?;
    ensure!(end["phase"] == "end" && end["detail"]["published"] == others.len(), "{end}");
    ensure!(end["detail"]["unknown"] == 1, "{end}");
    Ok(())
}

async fn an_import_that_fails_at_its_input_counts_nothing(env: &mut TestEnv) -> Result<()> {
    let operator = Operator::at(env)?;
    let log = operator.path("log.jsonl").to_string_lossy().into_owned();
    let failed = vramq(&env.url, &["dlq", "import", "nowhere.jsonl", "--action-log", &log]).await?;
    ensure!(failed.code == Some(2) && failed.stderr.starts_with("error: read nowhere.jsonl"), "{failed:?}");
    Ok(())
}

async fn a_dead_letter_of_a_queue_that_no_model_has_is_refused(env: &mut TestEnv) -> Result<()> {
    let operator = Operator::at(env)?;
    // The last name is longer than AMQP allows.
    for queue in ["vramq.jobs.echo".to_owned(), dead_queue(""), dead_queue(&"q".repeat(300))] {
        std::fs::write(operator.path("letters.jsonl"), line(&queue))?;
        let refused = operator.run_without_model(&["import", "letters.jsonl"]).await?;
        let says = format!("error: {queue} is not a queue of dead letters");
        ensure!(refused.code == Some(2) && refused.stderr.contains(&says), "{refused:?}");
    }
    Ok(())
}
