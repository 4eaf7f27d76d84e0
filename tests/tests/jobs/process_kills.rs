//! Processes of a model that are killed again and again while jobs run in them: each job is answered, once.
//!
//! 600 jobs over 12 kills; `VRAMQ_TEST_FULL=1` has 10,000 jobs over 200 kills.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vramq_schemas::topology::{dead_queue, jobs_queue, suspects_queue};
use vramq_schemas::{Output, ReplyKind};
use vramq_tests::client::Received;
use vramq_tests::on_one_setup;
use vramq_tests::setup::full;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::SILENCE;

use crate::process::{Served, consuming};

on_one_setup!(jobs_outlive_the_processes_that_are_killed_under_them);

/// Jobs for each kill.
const JOBS_A_KILL: usize = 50;

/// Items of a pass: as many may be lost with a process.
const PASS_ITEMS: usize = 4;

/// The most jobs on their way at a time. While it has half of them, the worker always has some for its processes.
const OPEN: usize = 100;

async fn jobs_outlive_the_processes_that_are_killed_under_them(env: &mut TestEnv) -> Result<()> {
    for text in ["pass failed", "an idle process failed", "it will run in isolation"] {
        env.announce(text);
    }
    let kills = if full() { 200 } else { 12 };
    let jobs = kills * JOBS_A_KILL;
    let settings = format!(
        "instances = 2\nitems_max = {PASS_ITEMS}\nvram = {{ base_mib = 10, mib_per_unit = 1, learn = false }}"
    );
    let _served = Served::new(env, &settings, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let (mut published, mut killed, mut due) = (0, 0, JOBS_A_KILL);
    let mut open = BTreeSet::new();
    let mut done = 0;
    while done < jobs {
        if open.len() <= OPEN / 2 && published < jobs {
            let lot = published..jobs.min(published + OPEN / 2);
            published = lot.end;
            let ids: Vec<_> = lot.map(|number| format!("job-{number}")).collect();
            let lot: Result<Vec<_>> = ids.iter().map(|id| env.job(id, ["sleep 0.01"])).collect();
            env.client.publish_all(MODEL, lot?).await?;
            open.extend(ids);
        }
        let reply = replies.next().await.with_context(|| format!("{done} of {jobs}, {killed} kills"))?;
        ensure!(reply.kind()? == ReplyKind::Done, "{}: {:?}", reply.id(), reply.failure());
        ensure!(open.remove(reply.id()), "{} was answered before", reply.id());
        done += 1;
        // Most likely it is at its next pass now.
        if done >= due && killed < kills && kill_if_alive(pid(&reply)?)? {
            killed += 1;
            due += JOBS_A_KILL;
        }
    }
    ensure!(killed >= kills - 1, "{killed} of {kills} kills for {jobs} jobs");
    worker.drain().await?;
    // The ledger: all that was published was answered as done; there is no second answer, no dead letter, and no job left.
    ensure!(
        published == jobs && open.is_empty(),
        "{published} of {jobs} were published; {open:?} have no answer"
    );
    ensure!(replies.next_within(SILENCE).await?.is_none(), "a job was answered twice");
    for queue in [jobs_queue(MODEL), suspects_queue(MODEL), dead_queue(MODEL)] {
        let left = env.client.ready(&queue).await?;
        ensure!(left == 0, "{left} messages are in {queue}");
    }
    ensure!(worker.total("dead").await? == 0, "a job was dead-lettered");
    ensure!(worker.total("jobs").await? as usize == jobs, "another number of jobs was answered");
    let recomputed = worker.total("recomputed").await? as usize;
    ensure!(recomputed <= killed * PASS_ITEMS, "{recomputed} items were computed again for {killed} kills");
    Ok(())
}

fn pid(reply: &Received) -> Result<i32> {
    let outputs = reply.outputs()?.outputs;
    let Some(Output::Json(value)) = outputs.first() else { anyhow::bail!("no JSON: {outputs:?}") };
    let pid = value.get("pid").and_then(Value::as_i64).context("no pid")?;
    Ok(pid.try_into()?)
}

/// Whether the model's process was there to be killed.
fn kill_if_alive(pid: i32) -> Result<bool> {
    // Another program may have its number by now.
    let is_ours = std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
        .is_ok_and(|command| command.contains("served.py"));
    if is_ours {
        kill_process(Pid::from_raw(pid).context("no pid")?, Signal::KILL)?;
    }
    Ok(is_ours)
}
