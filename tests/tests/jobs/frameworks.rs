//! The examples of docs/model-examples on PyTorch and ONNX Runtime themselves: jobs of several publishers share their passes.
//! `make test-pytorch`, `make test-programs`.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Embedding, Input, Output, ReplyKind};
use vramq_tests::bert::reference;
use vramq_tests::client::Client;
use vramq_tests::encoders::cosine;
use vramq_tests::job::Message;
use vramq_tests::on_one_setup;
use vramq_tests::programs::setting;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::worker::Worker;

use crate::example::Example;
use crate::process::consuming;

on_one_setup!(
    #[ignore = "needs PyTorch: make test-pytorch"]
    pytorch_gives_the_encoders_vectors_to_jobs_that_share_passes,
    #[ignore = "needs ONNX Runtime: make test-programs"]
    onnx_runtime_answers_jobs_that_share_passes,
);

/// Each has a connection and a reply queue of its own, and publishes one job of one item.
const PUBLISHERS: usize = 12;

/// The default of `items_max`.
const ITEMS_MAX: usize = 8;

/// A worker of an example, in one process. `variables` are lines of its environment.
async fn serving(
    env: &mut TestEnv,
    python: &str,
    program: &str,
    variables: &str,
) -> Result<(TempDir, Worker)> {
    // What a pass takes is declared, so that the worker holds more than one job before it has measured a pass.
    let settings = "instances = 1\nload_s = 600\nvram = { base_mib = 1000, mib_per_unit = 1, learn = false }";
    let folder = Example { python, program, settings, variables }.configure(env)?;
    let worker = consuming(env, &["device.cpu.memory_mib=8000"]).await?;
    Ok((folder, worker))
}

/// The outputs of jobs of one input each, from as many publishers, all of which are published while the program stands still.
async fn shared(env: &mut TestEnv, worker: &Worker, inputs: Vec<Input>) -> Result<Vec<Output>> {
    let loaded = worker.log.wait_for("process loaded").await?;
    let pid =
        loaded.field("pid").and_then(Value::as_i64).and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let program = pid.context("no pid")?;
    kill_process(program, Signal::STOP)?;
    let jobs = inputs.len();
    let mut publishers = Vec::with_capacity(jobs);
    for (number, input) in inputs.into_iter().enumerate() {
        let client = Client::connect(&env.url).await?;
        let (id, replies) = (format!("job {number}"), format!("replies-{number}"));
        client.declare_queue(&replies, env.setup.queue.arguments()).await?;
        let job = Message::inputs(env.setup.encoding, MODEL, &id, &replies, vec![input])?;
        client.publish(MODEL, job).await?;
        publishers.push((client, id, replies));
    }
    env.vhost.until_unacked(&jobs_queue(MODEL), jobs as u64).await?;
    kill_process(program, Signal::CONT)?;
    let mut outputs = Vec::with_capacity(jobs);
    for (client, id, replies) in publishers {
        let reply = client.mailbox(&replies).await?.next().await?;
        ensure!(reply.id() == id && reply.kind()? == ReplyKind::Done, "{id}: {:?}", reply.failure());
        let mut given = reply.outputs()?.outputs;
        ensure!(given.len() == 1, "{id}: {} outputs", given.len());
        outputs.append(&mut given);
        client.close().await?;
    }
    Ok(outputs)
}

/// Drains the worker, and checks that its jobs of one item shared passes.
async fn few_passes(worker: &Worker, jobs: usize) -> Result<()> {
    worker.drain().await?;
    ensure!(worker.total("jobs").await? == jobs as u64);
    let passes = worker.total("passes").await?;
    // The first has the jobs that were there when the program stood still; the others are as large as they may be.
    let most = 2 + jobs.div_ceil(ITEMS_MAX) as u64;
    ensure!(passes < jobs as u64 && passes <= most, "{passes} passes for {jobs} jobs");
    Ok(())
}

async fn pytorch_gives_the_encoders_vectors_to_jobs_that_share_passes(env: &mut TestEnv) -> Result<()> {
    let weights = format!("MODEL = {:?}\nHF_HUB_OFFLINE = \"1\"", setting("VRAMQ_TEST_MODEL")?);
    let (_folder, worker) = serving(env, "VRAMQ_BENCH_PYTHON", "minilm.py", &weights).await?;
    let (texts, vectors) = reference("minilm")?;
    let inputs = texts.iter().take(PUBLISHERS).cloned().map(Input::Text).collect();
    let outputs = shared(env, &worker, inputs).await?;
    for ((output, vector), text) in outputs.into_iter().zip(&vectors).zip(&texts) {
        let Output::Embedding(Embedding { values, .. }) = output else { anyhow::bail!("{output:?}") };
        let cosine = cosine(&values.to_f32(), vector);
        ensure!(cosine >= 0.9999, "{cosine} for {text:?}");
    }
    few_passes(&worker, PUBLISHERS).await
}

/// The logistic regression on irises that ONNX Runtime brings along. The probabilities are those of
/// `inference/tests/process/programs.rs`.
async fn onnx_runtime_answers_jobs_that_share_passes(env: &mut TestEnv) -> Result<()> {
    let code = "from onnxruntime.datasets import get_example; print(get_example('logreg_iris.onnx'))";
    let python = setting("VRAMQ_TEST_PROGRAMS_PYTHON")?;
    let model = Command::new(python).args(["-c", code]).output().context("ask where the model is")?;
    let variable = format!("MODEL = {:?}", String::from_utf8(model.stdout)?.trim());
    let (_folder, worker) = serving(env, "VRAMQ_TEST_PROGRAMS_PYTHON", "onnx.py", &variable).await?;
    // The model takes three of them. Each publisher has them in an order of its own.
    let irises = [([5.1, 3.5], 0.978253), ([4.9, 3.0], 0.956215), ([6.7, 3.0], 0.883158)];
    let of_publisher = |number: usize| [0, 1, 2].map(|at| irises[(number + at) % irises.len()]);
    let input = |number| Input::Json(json!(of_publisher(number).map(|(iris, _)| iris)).into());
    let inputs = (0..PUBLISHERS).map(input).collect();
    for (number, output) in shared(env, &worker, inputs).await?.into_iter().enumerate() {
        let Output::Json(value) = output else { anyhow::bail!("{output:?}") };
        for (at, (_, expected)) in of_publisher(number).into_iter().enumerate() {
            let probability = value["probabilities"][at]["0"].as_f64().with_context(|| value.to_string())?;
            ensure!((probability - expected).abs() < 1e-5, "{probability} instead of {expected}: {value}");
        }
    }
    few_passes(&worker, PUBLISHERS).await
}
