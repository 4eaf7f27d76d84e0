//! A caller that gives up on its job withdraws it: a real worker starts no pass for the job, and no dead letter is left. Jobs that were
//! answered stay answered.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::process::Command;
use vramq_producer::{Client, JobError, Pending, PublishError, Reason, SubmitOptions};
use vramq_tests::permissions::{Permissions, documented};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

use crate::common::command::{Scratch, code, command, lines, stderr};
use crate::common::held::{HeldWorker, UnpermittedCaller};
use crate::common::{Broker, in_time, job, worker};

on_queue_types!(a_client_that_closes_withdraws_what_is_unanswered);
on_one_setup!(
    jobs_of_handles_that_are_dropped_and_of_late_ones_are_withdrawn,
    a_job_that_is_forgotten_runs,
    a_client_without_the_permission_goes_on,
    a_refused_withdrawal_is_tried_again,
    a_withdrawal_without_a_confirm_holds_up_no_other,
    an_interrupted_submit_withdraws_what_is_unanswered,
);

async fn submit(client: &Client, text: &str) -> Result<Pending, PublishError> {
    client.submit(job(MODEL, &[text]), SubmitOptions::default()).await
}

/// A job that holds the device: its pass has begun.
async fn submit_held(client: &Client) -> Result<Pending> {
    let options = SubmitOptions { progress: true, ..SubmitOptions::default() };
    let pending = client.submit(job(MODEL, &["runs"]), options).await?;
    let mut progress = pending.progress();
    in_time(progress.wait_for(|progress| progress.current.is_some())).await?;
    Ok(pending)
}

/// With the least permissions of a publisher.
async fn a_client_that_closes_withdraws_what_is_unanswered(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let (_, url) = env.add_user("caller", "publisher").await?;
    let client = Client::connect(url.as_str()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    let mut unanswered = vec![submit_held(&client).await?];
    for text in ["next", "waits", "waits, too"] {
        unanswered.push(submit(&client, text).await?);
    }
    client.close().await;
    ensure!(client.stats().withdrawn == 4, "{:?}", client.stats());
    for pending in unanswered {
        let closed = in_time(pending.outputs()).await;
        ensure!(matches!(closed, Err(JobError::Closed)), "{closed:?}");
    }
    held.all_are_withdrawn(env, 4).await
}

async fn jobs_of_handles_that_are_dropped_and_of_late_ones_are_withdrawn(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let client = Client::connect(env.url.as_str()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    let runs = submit_held(&client).await?;
    drop(submit(&client, "a handle that is dropped").await?);
    drop(submit(&client, "a wait that is dropped").await?.outputs());
    let short = SubmitOptions { timeout: Some(Duration::from_secs(2)), ..SubmitOptions::default() };
    match client.submit(job(MODEL, &["late"]), short).await {
        Ok(pending) => {
            let late = in_time(pending.outputs()).await;
            ensure!(matches!(late, Err(JobError::Timeout { .. })), "{late:?}");
        }
        Err(late) => ensure!(matches!(late, PublishError::Timeout { .. }), "{late:?}"),
    }
    until("the broker to have the withdrawals", async || Ok((client.stats().withdrawn == 3).then_some(())))
        .await?;
    drop(runs);
    client.close().await;
    ensure!(client.stats().withdrawn == 4, "{:?}", client.stats());
    held.all_are_withdrawn(env, 4).await
}

async fn a_job_that_is_forgotten_runs(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let client = Client::connect(env.url.as_str()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    let runs = submit(&client, "runs").await?;
    submit(&client, "forgotten").await?.forget();
    held.release()?;
    ensure!(runs.outputs().await?.len() == 1);
    held.until_counted("vramq_jobs_answered_total", 3.0).await?;
    client.close().await;
    ensure!(client.stats().withdrawn == 0, "{:?}", client.stats());
    Ok(())
}

/// The broker closes the channel of the withdrawal, and no other.
async fn a_client_without_the_permission_goes_on(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let write = r"^vramq\.jobs$".to_owned();
    let jobs_alone = Permissions { write, ..documented("publisher")? };
    let (_, url) = env.add_user_with("jobs-alone", &jobs_alone).await?;
    let client = Client::connect(url.as_str()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    drop(submit(&client, "runs although nobody waits").await?);
    let runs = submit(&client, "runs").await?;
    held.release()?;
    ensure!(runs.outputs().await?.len() == 1);
    held.until_counted("vramq_jobs_answered_total", 3.0).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    client.close().await;
    let stats = client.stats();
    ensure!((stats.withdrawn, stats.reconnects) == (0, 0), "{stats:?}");
    Ok(())
}

async fn a_refused_withdrawal_is_tried_again(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let caller = UnpermittedCaller::new(env).await?;
    let client = Client::connect(caller.url()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    let (runs, next) = (submit_held(&client).await?, submit(&client, "next").await?);
    drop(submit(&client, "withdrawn").await?);
    caller.is_permitted_later(env, &held).await?;
    ensure!(runs.outputs().await?.len() == 1 && next.outputs().await?.len() == 1);
    client.close().await;
    let stats = client.stats();
    ensure!((stats.withdrawn, stats.reconnects) == (1, 0), "{stats:?}");
    Ok(())
}

/// As while the queue of one worker's withdrawals does not answer: the other workers have the withdrawal, and the broker confirms it late.
async fn a_withdrawal_without_a_confirm_holds_up_no_other(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let proxy = env.proxy().await?;
    let client = Client::connect(proxy.url()).await?;
    ensure!(submit(&client, "answered").await?.outputs().await?.len() == 1);
    let (runs, next) = (submit_held(&client).await?, submit(&client, "next").await?);
    let (first, second) = (submit(&client, "withdrawn").await?, submit(&client, "withdrawn, too").await?);
    proxy.hold_confirms();
    drop(first);
    held.until_counted("vramq_jobs_withdrawn_total", 1.0).await?;
    drop(second);
    held.until_counted("vramq_jobs_withdrawn_total", 2.0).await?;
    held.release()?;
    ensure!(runs.outputs().await?.len() == 1 && next.outputs().await?.len() == 1);
    client.close().await;
    ensure!(client.stats().reconnects == 0, "{:?}", client.stats());
    Ok(())
}

async fn an_interrupted_submit_withdraws_what_is_unanswered(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    let scratch = Scratch::new();
    let output = scratch.path("out.jsonl");
    let texts = ["answered", "runs", "next", "waits", "waits, too"];
    let args = [&["--model", MODEL, "--job-items", "1", "-o", &output][..], &texts[..]].concat();
    let child = command(&env.url, &args).spawn()?;
    let partial = format!("{output}.partial");
    held.until_counted("vramq_jobs_received_total", 5.0).await?;
    until("the first answer to be written", async || {
        Ok(std::fs::read(&partial).is_ok_and(|bytes| bytes.ends_with(b"\n")).then_some(()))
    })
    .await?;
    // One is in the pass that is held, and one in the pass that was made ahead.
    held.until_counted("vramq_jobs_waiting", 2.0).await?;
    let pid = child.id().map(|pid| pid.to_string()).unwrap_or_default();
    ensure!(Command::new("kill").args(["-INT", &pid]).status().await?.success());
    let interrupted = in_time(child.wait_with_output()).await?;
    code(&interrupted, 130);
    let said = stderr(&interrupted);
    ensure!(
        said.contains("interrupted: no answer to 4 jobs") && said.contains("\n4 jobs withdrawn"),
        "{said}"
    );
    ensure!(lines(&std::fs::read(&partial)?).len() == 1);
    held.all_are_withdrawn(env, 4).await
}

/// A caller that gives up and submits the job again under the same id gets the answer to the second one. The end of the first one does not
/// count for it.
#[tokio::test]
async fn the_end_of_a_withdrawn_job_is_not_that_of_the_next_with_its_id() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| match received.text(0) {
        "first" => Vec::new(),
        _ => vec![received.failed(Reason::Withdrawn, "the caller withdrew the job"), received.done()],
    })
    .await;
    let client = Client::connect(broker.url()).await.unwrap();
    let under_one_id = || SubmitOptions { id: Some("one".to_owned()), ..SubmitOptions::default() };
    drop(in_time(client.submit(job("m", &["first"]), under_one_id())).await.unwrap());
    let second = in_time(client.submit(job("m", &["second"]), under_one_id())).await.unwrap();
    assert_eq!(in_time(second.outputs()).await.unwrap(), [worker::embed("second")]);
    client.close().await;
    worker.abort();
}
