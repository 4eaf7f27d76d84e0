//! Logs and what commands print: where nobody reads it, it stops nothing.

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tokio::time::timeout;
use vramq_schemas::ReplyKind;
use vramq_tests::on_one_setup;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{DEADLINE, until};
use vramq_tests::worker::command;

on_one_setup!(a_log_that_nobody_reads_stops_nothing, a_reader_that_has_gone_ends_no_command);

/// Each has a line of some 300 bytes in the log; a pipe holds 64 KiB.
const MALFORMED: usize = 1000;

async fn a_log_that_nobody_reads_stops_nothing(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    worker.log.stand_still(true);
    for at in 0..MALFORMED {
        env.client.publish(MODEL, env.job(&format!("bad {at}"), ["x"])?.with_body("{")).await?;
    }
    env.dead_letters().await?.take(MALFORMED).await?;
    env.client.publish(MODEL, env.job("good", ["x"])?).await?;
    let replies = env.replies().await?.take(MALFORMED + 1).await?;
    let answered = replies.iter().filter(|reply| reply.kind().is_ok_and(|kind| kind == ReplyKind::Done));
    ensure!(answered.count() == 1, "the good job is not answered");

    // It ends, too, although nobody reads its last lines.
    worker.signal(Signal::TERM)?;
    until("the end of the worker", async || Ok(worker.resident_bytes().is_none().then_some(()))).await?;
    worker.log.stand_still(false);
    ensure!(worker.exited().await? == Some(0), "{}", worker.log.text());
    Ok(())
}

/// As with `2>&1 | head`.
async fn a_reader_that_has_gone_ends_no_command(_: &mut TestEnv) -> Result<()> {
    for (subcommand, setting, code) in [
        ("check-config", "model.m.path=/no/such/folder", 0),
        ("doctor", "model.m.path=/no/such/folder", 4),
        ("doctor", "model.echo.engine=echo", 0),
    ] {
        let (reader, pipe) = std::io::pipe()?;
        drop(reader);
        let mut command = command("vramq-worker")?;
        command.args([subcommand, "--set", setting]).stdout(pipe.try_clone()?).stderr(pipe);
        let ended = timeout(DEADLINE, command.status()).await.context("the program does not end")??;
        ensure!(ended.code() == Some(code), "{subcommand} {setting}: {ended:?}");
    }
    Ok(())
}
