//! The npm package, installed from its tarball, against real workers. `node/tests/scenarios.mjs` has the scenarios.

use std::path::Path;
use std::process::Stdio;

use anyhow::Result;
use tokio::process::Command;
use vramq_schemas::topology::jobs_queue;
use vramq_tests::programs::{root, setting};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::{on_one_setup, on_queue_types};

use crate::common::held::HeldWorker;
use crate::common::package::{
    dead_letters_are_expected, succeeds, succeeds_when_cut_off, succeeds_when_permitted_later,
    succeeds_while_cut, unserved_model,
};

on_queue_types!(
    results_come_in_order_and_parts,
    errors_say_what_a_caller_needs,
    a_broker_that_no_worker_has_used_is_named,
    jobs_that_nobody_answers_end,
    cut_connections_lose_no_result,
    a_lost_reply_queue_fails_its_jobs,
    reconnecting_ends_at_its_limit,
);
on_one_setup!(
    only_what_the_broker_refuses_is_a_refusal,
    a_refused_job_ends_no_other,
    a_caller_that_stops_waiting_gives_its_slot_back,
    jobs_of_callers_that_give_up_are_withdrawn,
    an_id_names_one_job,
    ids_of_the_caller_are_those_that_workers_take,
    a_refused_withdrawal_is_tried_again,
    callbacks_that_fail_end_nothing,
    closing_ends_what_waits_for_the_broker,
    vectors_come_as_numbers_and_as_base64,
    message_pack_gives_the_same_results,
    all_revisions_of_a_result_are_named,
    headers_arrive_or_are_refused_before_they_are_sent,
    the_golden_bytes_are_read,
    types_name_what_there_is,
    typescript_takes_a_program_of_the_readme_and_refuses_mistakes,
);

/// The command to run in `folder`: modules are looked for beside the program.
pub fn scenario(folder: &Path, name: &str, url: &str) -> Result<Command> {
    std::os::unix::fs::symlink(setting("VRAMQ_TEST_NODE_PACKAGE")?, folder.join("node_modules"))?;
    let program = folder.join("scenarios.mjs");
    std::fs::copy(root().join("node/tests/scenarios.mjs"), &program)?;
    let mut command = Command::new(setting("VRAMQ_TEST_NODE")?);
    command.arg(program).args([name, url]).stdin(Stdio::null()).kill_on_drop(true);
    Ok(command)
}

async fn run(name: &str, env: &TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    succeeds(scenario(folder.path(), name, &env.url)?).await
}

async fn results_come_in_order_and_parts(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    run("results", env).await
}

async fn message_pack_gives_the_same_results(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    run("msgpack", env).await
}

async fn ids_of_the_caller_are_those_that_workers_take(env: &mut TestEnv) -> Result<()> {
    run("given_ids", env).await
}

async fn all_revisions_of_a_result_are_named(env: &mut TestEnv) -> Result<()> {
    run("revisions", env).await
}

async fn headers_arrive_or_are_refused_before_they_are_sent(env: &mut TestEnv) -> Result<()> {
    run("headers", env).await
}

async fn errors_say_what_a_caller_needs(env: &mut TestEnv) -> Result<()> {
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    run("failures", env).await
}

async fn a_broker_that_no_worker_has_used_is_named(env: &mut TestEnv) -> Result<()> {
    run("nothing_declared", env).await
}

async fn jobs_that_nobody_answers_end(env: &mut TestEnv) -> Result<()> {
    env.leave(&jobs_queue(MODEL));
    env.worker(&["broker.queue_length_max=3"]).await?.drain().await?;
    run("unanswered", env).await
}

async fn cut_connections_lose_no_result(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    succeeds_while_cut(env, |url| scenario(folder.path(), "reconnect", url)).await
}

async fn a_lost_reply_queue_fails_its_jobs(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    run("reply_queue_lost", env).await
}

async fn reconnecting_ends_at_its_limit(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    succeeds_when_cut_off(env, |url| scenario(folder.path(), "gives_up", url)).await
}

async fn jobs_of_callers_that_give_up_are_withdrawn(env: &mut TestEnv) -> Result<()> {
    let held = HeldWorker::start(env).await?;
    run("withdrawn", env).await?;
    held.all_are_withdrawn(env, 4).await
}

async fn an_id_names_one_job(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    run("ids", env).await
}

async fn a_refused_withdrawal_is_tried_again(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    succeeds_when_permitted_later(env, |url| scenario(folder.path(), "withdrawn_once_permitted", url)).await
}

async fn only_what_the_broker_refuses_is_a_refusal(env: &mut TestEnv) -> Result<()> {
    run("refusals", env).await
}

async fn a_refused_job_ends_no_other(env: &mut TestEnv) -> Result<()> {
    // A job that was published twice may be answered after the client has gone, with its reply queue.
    dead_letters_are_expected(env);
    env.worker(&[]).await?;
    run("refused", env).await
}

async fn a_caller_that_stops_waiting_gives_its_slot_back(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    unserved_model(env).await?;
    run("slots", env).await
}

async fn callbacks_that_fail_end_nothing(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    run("callbacks", env).await
}

async fn closing_ends_what_waits_for_the_broker(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    succeeds_when_cut_off(env, |url| scenario(folder.path(), "closed_while_away", url)).await
}

async fn types_name_what_there_is(env: &mut TestEnv) -> Result<()> {
    run("types", env).await
}

async fn typescript_takes_a_program_of_the_readme_and_refuses_mistakes(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let program = root().canonicalize()?.join("node/tests/typed.ts");
    succeeds(scenario(folder.path(), "typescript", &program.to_string_lossy())?).await
}

async fn the_golden_bytes_are_read(_: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let golden = root().canonicalize()?.join("schemas/golden");
    succeeds(scenario(folder.path(), "golden", &golden.to_string_lossy())?).await
}

async fn vectors_come_as_numbers_and_as_base64(env: &mut TestEnv) -> Result<()> {
    let folder = setting("VRAMQ_TEST_MODEL")?;
    env.worker(&[&format!("model.minilm.path={}", folder.display())]).await?;
    run("embed", env).await
}
