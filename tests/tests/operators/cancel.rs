//! Cancelled jobs: the answers to the operator are true, wherever the job is at that moment.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::client::Mailbox;
use vramq_tests::metrics::Scrape;
use vramq_tests::named_pipe::named_pipe;
use vramq_tests::operator::Operator;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{SILENCE, until};
use vramq_tests::worker::{Worker, command, vramq};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(a_job_is_cancelled_at_every_stage);
on_one_setup!(
    a_job_that_is_being_read_is_cancelled_when_it_is_read,
    a_job_that_waits_for_memory_is_cancelled_at_once,
    a_worker_that_dies_over_a_cancellation_is_not_waited_for,
);

fn cancel(job: &str) -> Command {
    Command::Cancel { job: job.to_owned() }
}

/// Waits until a worker holds so many unacknowledged jobs, and so many of them wait.
async fn holds(worker: &Worker, in_hand: f64, waiting: f64) -> Result<()> {
    until(&format!("{in_hand} jobs in hand, {waiting} waiting"), async || {
        let scrape = Scrape::of(worker).await?;
        let found = (scrape.sum("vramq_jobs_in_hand", &[]), scrape.sum("vramq_jobs_waiting", &[]));
        Ok((found == (in_hand, waiting)).then_some(()))
    })
    .await
}

async fn a_job_is_cancelled_at_every_stage(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    env.announce("a failpoint is set");
    let (device, proxy) = (SharedDevice::new(8)?, env.proxy().await?);
    let folder = tempfile::tempdir()?;
    let pipe = folder.path().join("running");
    named_pipe(&pipe)?;
    let mut settings = device.settings().to_vec();
    settings.push(format!("broker.url={}", proxy.url()));
    settings.push(format!("worker.drill=pass=hang,job=running,tickets={}", pipe.display()));
    let worker = env.worker(&settings.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let mut operator = Operator::new(env).await?;
    let mut replies = env.replies().await?;
    let mut dead = env.dead_letters().await?;
    let leave = device.block().await?;
    env.client.publish(MODEL, env.job("in line", ["x", "y"])?).await?;
    holds(&worker, 1.0, 0.0).await?;
    env.client.publish(MODEL, env.job("waiting", ["x"])?).await?;
    holds(&worker, 2.0, 1.0).await?;

    // One that waits is gone at once, also if its pass waits for another process only.
    for (id, held) in [("waiting", 1.0), ("in line", 0.0)] {
        operator.tell(&worker, &cancel(id)).await?;
        is_stopped(&mut operator, &device).await?;
        is_buried(&mut replies, &mut dead, id).await?;
        holds(&worker, held, 0.0).await?;
    }
    drop(leave);

    // One that runs when its pass has ended, and not before.
    env.client.publish(MODEL, env.job("running", ["x", "y"])?).await?;
    let runs = until("a pass of the job", async || reader_of(&pipe)).await?;
    operator.tell(&worker, &cancel("running")).await?;
    ensure!(operator.answer().await?.outcome == Outcome::Requested);
    ensure!(operator.hears_nothing().await?, "a pass that runs is said to have stopped");
    drop(runs);
    let stopped = operator.answer().await?;
    ensure!(stopped.outcome == Outcome::Stopped && !stopped.last, "{stopped:?}");
    memory_is_back(&operator.answer().await?, &device)?;
    is_buried(&mut replies, &mut dead, "running").await?;
    holds(&worker, 0.0, 0.0).await?;

    // One whose answer is on its way is not stopped any more: here the broker's confirm of the answer is.
    proxy.hold_confirms();
    env.client.publish(MODEL, env.job("answered", ["x"])?).await?;
    ensure!(replies.next().await?.kind()? == ReplyKind::Done);
    operator.tell(&worker, &cancel("answered")).await?;
    ensure!(operator.answer().await?.outcome == Outcome::Requested);
    proxy.pass();
    let late = operator.answer().await?;
    ensure!(late.outcome == Outcome::TooLate && late.text.contains("was answered") && late.last, "{late:?}");

    for job in ["answered", "running", "never published", ""] {
        let answer = operator.ask(&worker, &cancel(job)).await?;
        ensure!(answer.outcome == Outcome::NotHere && answer.last, "{answer:?}");
    }
    let scrape = Scrape::of(&worker).await?;
    let counted =
        |outcome| scrape.sum("vramq_control_commands_total", &[("command", "cancel"), ("outcome", outcome)]);
    ensure!((counted("memory-back"), counted("too-late"), counted("not-here")) == (3.0, 1.0, 4.0));
    ensure!(scrape.sum("vramq_jobs_dead_lettered_total", &[("reason", "cancelled")]) == 3.0);
    env.client.publish(MODEL, env.job("next", ["x"])?).await?;
    ensure!(replies.next().await?.kind()? == ReplyKind::Done);
    Ok(())
}

/// The writing end of a named pipe; `None` while nobody has it open for reading.
fn reader_of(pipe: &Path) -> Result<Option<OwnedFd>> {
    match rustix::fs::open(pipe, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
        Ok(writer) => Ok(Some(writer)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

async fn is_stopped(operator: &mut Operator, device: &SharedDevice) -> Result<()> {
    for expected in [Outcome::Requested, Outcome::Stopped] {
        let answer = operator.answer().await?;
        ensure!(answer.outcome == expected && !answer.last, "{answer:?}, not {expected:?}");
    }
    memory_is_back(&operator.answer().await?, device)
}

fn memory_is_back(answer: &Answer, device: &SharedDevice) -> Result<()> {
    let Outcome::MemoryBack { device: name, free_bytes } = &answer.outcome else {
        anyhow::bail!("no memory: {answer:?}");
    };
    ensure!(name == "cpu" && answer.last, "{answer:?}");
    ensure!(*free_bytes == device.memory().free, "{free_bytes} reported, {:?} measured", device.memory());
    Ok(())
}

async fn is_buried(replies: &mut Mailbox, dead: &mut Mailbox, id: &str) -> Result<()> {
    let reply = replies.next().await?;
    ensure!(reply.id() == id && reply.failure()?.reason == Reason::Cancelled, "{:?}", reply.properties);
    let letter = dead.next().await?;
    ensure!(letter.id() == id && letter.dead_letter()?.reason == Reason::Cancelled);
    Ok(())
}

/// For a command that stops listening when the worker has answered.
const PATIENT: &str = "60s";

/// Waits until the worker hears commands: it may consume jobs before.
async fn listens(env: &TestEnv) -> Result<()> {
    until("a worker that listens", async || {
        let resumed = vramq(&env.url, &["control", "resume", "--all", "--expect", "1"]).await?;
        Ok((resumed.code == Some(0)).then_some(()))
    })
    .await
}

/// `vramq control cancel JOB`; what it says when it has ended with 0.
async fn cancelled_by_command(env: &TestEnv, job: &str) -> Result<String> {
    listens(env).await?;
    let ended = vramq(&env.url, &["control", "cancel", job, "--expect", "1", "--wait", PATIENT]).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    Ok(ended.stdout)
}

fn outcomes(output: &str) -> Vec<&str> {
    output.lines().filter_map(|line| line.split('\t').nth(1)).collect()
}

/// A thread decodes the job, which cannot be stopped. The cancellation takes effect afterwards.
async fn a_job_that_is_being_read_is_cancelled_when_it_is_read(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "job dead-lettered"] {
        env.announce(text);
    }
    let folder = tempfile::tempdir()?;
    let reading = folder.path().join("reading");
    std::fs::write(&reading, "")?;
    let drill = format!("worker.drill=decode=hang,job=long,while={}", reading.display());
    let worker = env.worker(&[&drill]).await?;
    let (mut replies, mut dead) = (env.replies().await?, env.dead_letters().await?);
    // Small ones are read by the loop itself.
    env.client.publish(MODEL, env.job("long", ["x".repeat(50_000)])?).await?;
    holds(&worker, 1.0, 0.0).await?;
    let cancelling = cancelled_by_command(env, "long");
    let reading = async {
        worker.log.wait_for("\"outcome\":\"requested\"").await?;
        tokio::time::sleep(SILENCE).await;
        ensure!(
            worker.log.find("\"outcome\":\"stopped\"").is_none(),
            "it is being read, and is said to have stopped"
        );
        Ok(std::fs::remove_file(&reading)?)
    };
    let (output, ()) = tokio::try_join!(cancelling, reading)?;
    ensure!(outcomes(&output) == ["requested", "stopped", "memory-back"], "{output}");
    is_buried(&mut replies, &mut dead, "long").await?;
    holds(&worker, 0.0, 0.0).await?;
    ensure!(Scrape::of(&worker).await?.sum("vramq_items_total", &[]) == 0.0, "it has run");
    env.client.publish(MODEL, env.job("next", ["x"])?).await?;
    ensure!(replies.next().await?.kind()? == ReplyKind::Done);
    Ok(())
}

/// Its items are ready, and another pass has all of the memory.
async fn a_job_that_waits_for_memory_is_cancelled_at_once(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let device = SharedDevice::new(8)?;
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).chain(["model.echo.pass_tokens=4"]).collect();
    let worker = env.worker(&settings).await?;
    let (mut replies, mut dead) = (env.replies().await?, env.dead_letters().await?);
    let leave = device.block().await?;
    let exclusive = env.job("exclusive", ["x"])?.with_header("exclusive", true.into()).as_worker();
    env.client.publish(MODEL, exclusive).await?;
    holds(&worker, 1.0, 0.0).await?;
    // A full pass: it would be next on the device, if there were memory for it.
    env.client.publish(MODEL, env.job("waiting", ["a", "b", "c", "d"])?).await?;
    holds(&worker, 2.0, 1.0).await?;
    let scrape = Scrape::of(&worker).await?;
    let [held, budget] =
        ["vramq_device_budget_held_bytes", "vramq_device_budget_bytes"].map(|name| scrape.sum(name, &[]));
    ensure!(held >= budget && budget > 0.0, "{held} of {budget} are held");
    let output = cancelled_by_command(env, "waiting").await?;
    ensure!(outcomes(&output) == ["requested", "stopped", "memory-back"], "{output}");
    is_buried(&mut replies, &mut dead, "waiting").await?;
    holds(&worker, 1.0, 0.0).await?;
    drop(leave);
    ensure!(replies.next().await?.id() == "exclusive");
    ensure!(Scrape::of(&worker).await?.sum("vramq_items_total", &[]) == 1.0, "the cancelled one has run");
    Ok(())
}

async fn a_worker_that_dies_over_a_cancellation_is_not_waited_for(env: &mut TestEnv) -> Result<()> {
    env.leave(&jobs_queue(MODEL));
    env.announce("a failpoint is set");
    let folder = tempfile::tempdir()?;
    let pipe = folder.path().join("running");
    named_pipe(&pipe)?;
    let hang = format!("worker.drill=pass=hang,job=running,tickets={}", pipe.display());
    let worker = env.worker(&["worker.heartbeat_s=1", &hang]).await?;
    // The pass ends with the worker only, so that the cancellation cannot be answered before.
    env.client.publish(MODEL, env.job("running", ["x"])?).await?;
    let _runs = until("a pass of the job", async || reader_of(&pipe)).await?;
    listens(env).await?;
    let mut cancel = command("vramq")?;
    cancel.args(["control", "--broker-url", &env.url, "cancel", "running", "--wait", "20s"]);
    let mut cancel = cancel.stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(cancel.stdout.take().context("no output")?).lines();
    let line = lines.next_line().await?.context("the command prints no line")?;
    ensure!(line.contains("requested"), "{line}");
    worker.signal(Signal::KILL)?;
    let ended = until("the command to end", async || Ok(cancel.try_wait()?)).await?;
    ensure!(ended.code() == Some(1), "{ended}");
    Ok(())
}
