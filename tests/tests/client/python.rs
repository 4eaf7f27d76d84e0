//! The Python package, as its wheel installs it, against real workers. `python/tests/scenarios.py` has what it does.

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::bert::reference;
use vramq_tests::encoders::cosine;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::{on_one_setup, on_queue_types};

use crate::common::package::{
    DEADLINE, dead_letters_are_expected, succeeds, succeeds_when_cut_off, succeeds_while_cut, unserved_model,
};

on_queue_types!(
    results_come_in_order_and_parts,
    errors_say_what_a_caller_needs,
    jobs_that_nobody_answers_end,
    cut_connections_lose_no_result,
    a_lost_reply_queue_fails_its_jobs,
    reconnecting_ends_at_its_limit,
    call_sites_of_celery_go_on,
);
on_one_setup!(vectors_are_those_of_the_reference, serving_a_model_needs_no_extra);

fn scenario(name: &str, url: &str) -> Result<Command> {
    let mut command = Command::new(setting("VRAMQ_TEST_PACKAGE")?);
    // Isolated: neither this folder nor the user's packages are looked into.
    command.arg("-I").arg(root().join("python/tests/scenarios.py")).args([name, url]);
    command.stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

async fn results_come_in_order_and_parts(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    succeeds(scenario("results", &env.url)?).await
}

async fn errors_say_what_a_caller_needs(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    succeeds(scenario("failures", &env.url)?).await
}

async fn jobs_that_nobody_answers_end(env: &mut TestEnv) -> Result<()> {
    env.leave(&jobs_queue(MODEL));
    env.worker(&["broker.queue_length_max=3"]).await?.drain().await?;
    succeeds(scenario("unanswered", &env.url)?).await
}

async fn cut_connections_lose_no_result(env: &mut TestEnv) -> Result<()> {
    succeeds_while_cut(env, |url| scenario("reconnect", url)).await
}

async fn a_lost_reply_queue_fails_its_jobs(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("reply_queue_lost", &env.url)?).await
}

async fn reconnecting_ends_at_its_limit(env: &mut TestEnv) -> Result<()> {
    succeeds_when_cut_off(env, |url| scenario("gives_up", url)).await
}

async fn call_sites_of_celery_go_on(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    unserved_model(env).await?;
    succeeds(scenario("celery", &env.url)?).await
}

async fn vectors_are_those_of_the_reference(env: &mut TestEnv) -> Result<()> {
    let folder = setting("VRAMQ_TEST_MODEL")?;
    env.worker(&[&format!("model.minilm.path={}", folder.display())]).await?;
    let (texts, expected) = reference("minilm")?;
    let mut client = scenario("embed", &env.url)?
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut input = client.stdin.take().context("no standard input")?;
    input.write_all(&serde_json::to_vec(&texts)?).await?;
    drop(input);
    let ended = tokio::time::timeout(DEADLINE, client.wait_with_output()).await??;
    ensure!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    let found: Vec<Vec<f32>> = serde_json::from_slice(&ended.stdout)?;
    ensure!(found.len() == expected.len(), "{} vectors of {} texts", found.len(), expected.len());
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let cosine = cosine(found, expected);
        ensure!(cosine >= 0.99999, "text {at}: cosine {cosine}");
    }
    Ok(())
}

async fn serving_a_model_needs_no_extra(env: &mut TestEnv) -> Result<()> {
    succeeds(scenario("without_the_extra", &env.url)?).await
}
