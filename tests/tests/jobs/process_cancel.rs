//! Jobs that their callers withdraw while a program runs them: the worker cancels the pass, and ends the program if it does not stop. A
//! pass that another job needs goes on.

use std::path::Path;

use anyhow::{Result, ensure};
use lapin::{BasicProperties, Confirmation, ExchangeKind};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::{DIGEST, Digest, TYPE, Withdrawal};
use vramq_schemas::{Output, Reason, ReplyKind, fields};
use vramq_tests::client::Mailbox;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Scrape, figures, processes_run};
use vramq_tests::on_one_setup;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

use crate::process::{Served, consuming, outputs, pid_of};

on_one_setup!(
    a_program_stops_the_pass_of_a_withdrawn_job,
    a_program_that_ignores_the_cancel_is_ended_and_its_memory_comes_back,
    a_pass_that_another_job_needs_goes_on,
    a_drain_cancels_a_programs_pass_and_keeps_what_is_finished,
    a_pass_that_waits_for_another_process_ends_at_once,
);

const ONE_PROCESS: &str = "instances = 1\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }";

/// A job that can be withdrawn. Its secret is its id.
fn withdrawable(env: &TestEnv, id: &str, text: &str) -> Result<Message> {
    Ok(env.job(id, [text])?.with_header(DIGEST, fields::text(&Digest::of(id).to_string())))
}

/// Withdraws it, as soon as a worker listens.
async fn withdraw(env: &TestEnv, id: &str) -> Result<()> {
    env.client.declare_exchange(WITHDRAWALS_EXCHANGE, ExchangeKind::Fanout).await?;
    let withdrawal = Withdrawal { job: id.to_owned(), secret: id.to_owned() };
    let properties = BasicProperties::default().with_type(TYPE.into());
    let message = Message { properties, body: serde_json::to_vec(&withdrawal)?, as_worker: false };
    until("a worker that receives withdrawals", async || {
        let confirmation = env.client.publish_to(WITHDRAWALS_EXCHANGE, "", message.clone()).await?;
        Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
    })
    .await
}

/// The next reply says that this job was withdrawn.
async fn is_withdrawn(replies: &mut Mailbox, id: &str) -> Result<()> {
    let reply = replies.next().await?;
    ensure!(reply.id() == id, "a reply to {}, not {id}", reply.id());
    let failure = reply.failure()?;
    ensure!(failure.reason == Reason::Withdrawn, "{failure:?}");
    Ok(())
}

/// Waits until the program has made a file: it is at that item.
async fn until_file(path: &Path) -> Result<()> {
    until("the program to begin", async || Ok(path.exists().then_some(()))).await
}

/// Waits until so many jobs wait for a pass.
async fn until_waiting(worker: &Worker, jobs: f64) -> Result<()> {
    until(&format!("{jobs} jobs that wait"), async || {
        Ok((Scrape::of(worker).await?.sum("vramq_jobs_waiting", &[]) == jobs).then_some(()))
    })
    .await
}

async fn cancelled_passes(worker: &Worker) -> Result<f64> {
    Ok(Scrape::of(worker).await?.sum("vramq_passes_total", &[("outcome", "cancelled")]))
}

/// One process. It is not ended before it has heard a cancel, however busy the machine is.
fn patient(env: &mut TestEnv) -> Result<Served> {
    let served = Served::new(env, ONE_PROCESS, &[])?;
    let config = std::fs::read_to_string(served.config())?;
    ensure!(config.contains("kill_s = 1\n"), "{config}");
    std::fs::write(served.config(), config.replace("kill_s = 1\n", "kill_s = 600\n"))?;
    Ok(served)
}

async fn a_program_stops_the_pass_of_a_withdrawn_job(env: &mut TestEnv) -> Result<()> {
    let served = patient(env)?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("before", ["echo it"])?).await?;
    let before = pid_of(&outputs(&mut replies, "before").await?.0[0])?;

    env.client.publish(MODEL, withdrawable(env, "long", "heed began")?).await?;
    until_file(&served.path("began")).await?;
    withdraw(env, "long").await?;
    is_withdrawn(&mut replies, "long").await?;
    ensure!(served.path("began.cancelled").exists(), "the program did not hear of it");
    ensure!(cancelled_passes(&worker).await? == 1.0);

    env.client.publish(MODEL, env.job("after", ["echo it"])?).await?;
    ensure!(pid_of(&outputs(&mut replies, "after").await?.0[0])? == before, "another process runs");
    worker.drain().await?;
    worker.log.counts("process loaded", 1).await?;
    Ok(())
}

/// Twice in a row: a process that is ended over a cancelled pass is no failure of the model, which the next job waits for.
async fn a_program_that_ignores_the_cancel_is_ended_and_its_memory_comes_back(
    env: &mut TestEnv,
) -> Result<()> {
    let device = SharedDevice::new(1000)?;
    let served = Served::of_600_mib(env, &device)?;
    let [file, memory, reserve] = device.settings();
    let worker = consuming(env, &[&file, &memory, &reserve]).await?;
    let mut replies = env.replies().await?;
    for id in ["first", "second"] {
        env.client.publish(MODEL, withdrawable(env, id, &format!("ignore {id}"))?).await?;
        until_file(&served.path(id)).await?;
        ensure!(device.memory().free == 400 << 20, "{:?}", device.memory());
        withdraw(env, id).await?;
        is_withdrawn(&mut replies, id).await?;
        until("the memory of the process to come back", async || {
            Ok((device.memory().free == 1000 << 20).then_some(()))
        })
        .await?;
    }
    ensure!(cancelled_passes(&worker).await? == 2.0);
    env.client.publish(MODEL, env.job("next", ["echo it"])?).await?;
    outputs(&mut replies, "next").await?;
    worker.drain().await?;
    worker.log.counts("process loaded", 3).await?;
    worker.log.counts("a cancelled pass did not stop", 2).await?;
    Ok(())
}

async fn a_pass_that_another_job_needs_goes_on(env: &mut TestEnv) -> Result<()> {
    let served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("gate", ["wait gate"])?).await?;
    processes_run(&worker, 1).await?;
    env.client.publish(MODEL, withdrawable(env, "gone", "wait stop")?).await?;
    env.client.publish(MODEL, env.job("needed", ["echo it"])?).await?;
    until_waiting(&worker, 2.0).await?;
    std::fs::write(served.path("gate"), "")?;
    outputs(&mut replies, "gate").await?;
    until_waiting(&worker, 0.0).await?;

    // Withdrawals come in order: when the second took effect, the worker has had the first.
    env.client.publish(MODEL, withdrawable(env, "later", "echo later")?).await?;
    until_waiting(&worker, 1.0).await?;
    withdraw(env, "gone").await?;
    withdraw(env, "later").await?;
    is_withdrawn(&mut replies, "later").await?;
    std::fs::write(served.path("stop"), "")?;
    for reply in replies.take(2).await? {
        if reply.id() == "gone" {
            ensure!(reply.failure()?.reason == Reason::Withdrawn, "{:?}", reply.failure());
            continue;
        }
        ensure!((reply.id(), reply.kind()?) == ("needed", ReplyKind::Done), "{:?}", reply.properties);
        let outputs = reply.outputs()?.outputs;
        let [Output::Json(value)] = &outputs[..] else { anyhow::bail!("{outputs:?}") };
        ensure!(value["items"] == 2, "they did not share a pass: {value}");
    }
    ensure!(cancelled_passes(&worker).await? == 0.0);
    worker.drain().await?;
    ensure!(worker.total("recomputed").await? == 0);
    Ok(())
}

/// The pass would never end. At half time of the drain it is cancelled, and the job goes to another worker with its first item.
async fn a_drain_cancels_a_programs_pass_and_keeps_what_is_finished(env: &mut TestEnv) -> Result<()> {
    let served = patient(env)?;
    let worker = consuming(env, &["worker.drain_s=20"]).await?;
    env.client.publish(MODEL, env.job("long", ["echo it", "heed began"])?).await?;
    until_file(&served.path("began")).await?;
    worker.drain().await?;
    ensure!(served.path("began.cancelled").exists(), "the program did not hear of it");
    std::fs::write(served.path("began.go"), "")?;
    let next = consuming(env, &[]).await?;
    let (found, reply) = outputs(&mut env.replies().await?, "long").await?;
    ensure!(found.len() == 2 && pid_of(&found[0])? != pid_of(&found[1])?, "{found:?}");
    ensure!(reply.reply()?.attempt == 0, "{:?}", reply.reply());
    next.drain().await
}

/// Another process keeps the device to itself. The passes of a withdrawn job, and of a drain, end while it does.
async fn a_pass_that_waits_for_another_process_ends_at_once(env: &mut TestEnv) -> Result<()> {
    let _served = Served::new(env, ONE_PROCESS, &[])?;
    let device = SharedDevice::new(64)?;
    let settings = device.settings();
    let settings: Vec<_> = settings.iter().map(String::as_str).chain(["worker.drain_s=20"]).collect();
    let worker = consuming(env, &settings).await?;
    let mut replies = env.replies().await?;
    let _alone = device.block().await?;
    for id in ["gone", "held"] {
        env.client.publish(MODEL, withdrawable(env, id, "echo it")?).await?;
        let figure = "vramq_jobs_in_hand";
        figures(&worker, "a pass of the job", |figures| figures.sum(figure) == 1).await?;
        until_waiting(&worker, 0.0).await?;
        if id == "gone" {
            withdraw(env, id).await?;
            is_withdrawn(&mut replies, id).await?;
            figures(&worker, "no job", |figures| figures.sum(figure) == 0).await?;
        }
    }
    worker.drain().await?;
    let next = consuming(env, &[]).await?;
    outputs(&mut replies, "held").await?;
    next.drain().await
}
