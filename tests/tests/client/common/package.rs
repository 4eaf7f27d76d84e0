//! What the tests of the packages for other languages share: programs that use a package, run while something is wrong.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use vramq_schemas::topology::{JOBS_EXCHANGE, dead_queue, jobs_queue};
use vramq_tests::proxy::Cut;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::run_to_end_within;

use super::held::{HeldWorker, UnpermittedCaller};

/// How long a program may take: far more than the slowest needs on a loaded machine.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// A model with a queue that nobody consumes.
pub const UNSERVED: &str = "slow";

/// Runs a program; it has to exit with 0.
pub async fn succeeds(command: Command) -> Result<()> {
    let ended = run_to_end_within(command, DEADLINE).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(())
}

/// Makes the queue of a model that no worker serves.
pub async fn unserved_model(env: &mut TestEnv) -> Result<()> {
    let queue = jobs_queue(UNSERVED);
    env.client.declare_queue(&queue, env.setup.queue.arguments()).await?;
    env.client.bind_queue(&queue, JOBS_EXCHANGE, UNSERVED).await?;
    env.leave(&queue);
    Ok(())
}

/// Announces dead letters of the worker's model.
pub fn dead_letters_are_expected(env: &mut TestEnv) {
    env.announce("job dead-lettered");
    env.leave(&dead_queue(MODEL));
}

/// Runs the program that `program` makes for a URL. It prints lines while jobs are in flight; after each of them all its
/// connections are cut.
pub async fn succeeds_while_cut(
    env: &mut TestEnv,
    program: impl FnOnce(&str) -> Result<Command>,
) -> Result<()> {
    // A job that was published twice may come after the client has gone, with its reply queue.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    let proxy = env.proxy().await?;
    let mut client = program(proxy.url())?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("no standard output")?).lines();
    let mut cuts = 0;
    let ended = tokio::time::timeout(DEADLINE, async {
        while lines.next_line().await?.is_some() {
            cuts += usize::from(proxy.cut(Cut::Reset) > 0);
        }
        client.wait_with_output().await
    })
    .await??;
    let errors = String::from_utf8_lossy(&ended.stderr);
    ensure!(ended.status.success() && cuts >= 5, "after {cuts} cuts: {}: {errors}", ended.status);
    Ok(())
}

/// Runs a program whose user may not withdraw jobs at first.
pub async fn succeeds_when_permitted_later(
    env: &mut TestEnv,
    program: impl FnOnce(&str) -> Result<Command>,
) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let caller = UnpermittedCaller::new(env).await?;
    let program = succeeds(program(caller.url())?);
    tokio::try_join!(program, caller.is_permitted_later(env, &held)).map(drop)
}

/// Runs a program that publishes a job for the model without workers and prints a line; then the broker is out of reach for good.
pub async fn succeeds_when_cut_off(
    env: &mut TestEnv,
    program: impl FnOnce(&str) -> Result<Command>,
) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    let proxy = env.proxy().await?;
    let mut client = program(proxy.url())?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("no standard output")?).lines();
    let ended = tokio::time::timeout(DEADLINE, async {
        lines.next_line().await?;
        proxy.refuse();
        proxy.cut(Cut::Reset);
        client.wait_with_output().await
    })
    .await??;
    ensure!(ended.status.success(), "{}: {}", ended.status, String::from_utf8_lossy(&ended.stderr));
    Ok(())
}
