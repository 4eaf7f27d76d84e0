//! A program of the user's on a CUDA device, whose memory the worker counts as its own: by process ids where NVML tells what each
//! process holds, else by difference. On a fake driver and a fake NVML, which programs and worker share.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use vramq_schemas::{Output, ReplyKind};
use vramq_tests::client::Mailbox;
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::metrics::Figures;
use vramq_tests::on_one_setup;
use vramq_tests::programs::{python, root};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::{SILENCE, until};
use vramq_tests::worker::Worker;

on_one_setup!(
    the_memory_of_a_program_is_distinguished_by_process_id,
    a_program_that_takes_nothing_of_the_device_holds_nothing,
    process_ids_of_another_namespace_leave_the_difference,
    a_driver_that_does_not_tell_what_processes_hold_leaves_the_difference,
    memory_that_a_dead_program_leaves_withholds_its_slot,
    memory_that_a_program_of_another_namespace_leaves_withholds_its_slot,
);

const CUDA: [&str; 2] = ["device.kind=cuda", "device.cuda.reserve_mib=0"];
const TOTAL_MIB: u64 = 4096;

/// What the fake driver takes for a context, and the program beyond that.
const CONTEXT_MIB: u64 = 300;
const BASE_MIB: u64 = 500;
const LOADED_MIB: u64 = CONTEXT_MIB + BASE_MIB;

/// What another process takes while the program loads.
const NEIGHBOUR_MIB: u64 = 200;

/// What a pass takes.
const PASS_MIB: u64 = 700;

/// The first device of the fake driver.
const UUID: &str = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae00";

/// Of the fake NVML: process ids as a container sees them that does not share those of the host; and what WDDM and some containers tell.
const OTHER_NAMESPACE: (&str, &str) = ("FAKE_CUDA_PIDS_FROM", "1000000");
const NOT_TOLD: (&str, &str) = ("FAKE_CUDA_NO_HELD", "1");

/// A device that worker, program and a neighbour share.
struct SharedGpu {
    folder: TempDir,
}

impl SharedGpu {
    /// `variable` is one of the worker's NVML.
    fn new(env: &mut TestEnv, variable: Option<(&str, &str)>) -> Result<Self> {
        Self::with_base(env, variable, BASE_MIB)
    }

    /// The same, with a program that takes so much beyond its context, or nothing at all.
    fn with_base(env: &mut TestEnv, variable: Option<(&str, &str)>, base_mib: u64) -> Result<Self> {
        let gpu = Self { folder: tempfile::tempdir()? };
        gpu.neighbour_holds(0)?;
        let shared = [
            ("FAKE_CUDA_SHARED", gpu.path("device").display().to_string()),
            ("FAKE_CUDA_FOREIGN", gpu.path("neighbour").display().to_string()),
            ("FAKE_CUDA_MEMORY_MIB", TOTAL_MIB.to_string()),
        ];
        env.set_environment("LD_LIBRARY_PATH", library_path(&[driver()?, nvml()?])?);
        for (name, value) in shared.iter().map(|(name, value)| (*name, value.as_str())).chain(variable) {
            env.set_environment(name, value);
        }
        let repository = root().canonicalize()?;
        let mut text = format!(
            "[model.{MODEL}]\nengine = \"process\"\ncommand = [{:?}, \"gpu.py\"]\nfolder = {:?}\nkill_s = 1\ninstances = 1\n\
             [model.{MODEL}.env]\nPYTHONPATH = {:?}\nFOLDER = {:?}\nBASE_MIB = \"{base_mib}\"\n",
            python()?,
            repository.join("tests/models"),
            repository.join("python"),
            gpu.folder.path(),
        );
        for (name, value) in &shared {
            text.push_str(&format!("{name} = {value:?}\n"));
        }
        std::fs::write(gpu.path("worker.toml"), text)?;
        env.set_environment("VRAMQ_CONFIG", gpu.path("worker.toml"));
        env.set_environment("VRAMQ__WORKER__STATE", gpu.folder.path());
        Ok(gpu)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn neighbour_holds(&self, mib: u64) -> Result<()> {
        std::fs::write(self.path("neighbour"), (mib << 20).to_string()).context("write")
    }

    /// Starts a worker. While its program loads, and has taken its memory, the neighbour takes so much, too.
    async fn worker(&self, env: &mut TestEnv, neighbour_mib: u64) -> Result<Worker> {
        let worker = env.spawn_bare_worker(&CUDA)?;
        until("the program to have taken its memory", async || {
            ensure!(worker.is_running(), "{}", worker.log.text());
            Ok(self.path("taken").exists().then_some(()))
        })
        .await?;
        self.neighbour_holds(neighbour_mib)?;
        std::fs::write(self.path("go"), "")?;
        worker.consuming().await?;
        Ok(worker)
    }
}

/// Runs a job of one item; its output.
async fn run(env: &TestEnv, replies: &mut Mailbox, id: &str, item: &str) -> Result<Value> {
    env.client.publish(MODEL, env.job(id, [item])?).await?;
    output(replies, id).await
}

async fn output(replies: &mut Mailbox, id: &str) -> Result<Value> {
    let reply = replies.next().await?;
    ensure!(reply.id() == id && reply.kind()? == ReplyKind::Done, "{:?} {:?}", reply.id(), reply.failure());
    match reply.outputs()?.outputs.remove(0) {
        Output::Json(value) => Ok(value),
        other => anyhow::bail!("no JSON: {other:?}"),
    }
}

/// What the worker books for its program, in MiB: when it is loaded, and what passes were measured to take.
async fn booked(env: &mut TestEnv, variable: Option<(&str, &str)>) -> Result<(u64, BTreeSet<u64>)> {
    let gpu = SharedGpu::new(env, variable)?;
    let worker = gpu.worker(env, NEIGHBOUR_MIB).await?;
    let mut replies = env.replies().await?;
    let line = worker.log.wait_for("process loaded").await?;
    let loaded = line.field("held_bytes").and_then(Value::as_u64).context("no held_bytes")?;
    let place = run(env, &mut replies, "where", "where").await?;
    ensure!((&place["device"], &place["visible"]) == (&"cuda:0".into(), &UUID.into()), "{place}");
    let taken = run(env, &mut replies, "take", &format!("take {PASS_MIB}")).await?;
    ensure!(place["pid"] == taken["pid"], "{place} {taken}");
    let shown = Figures::of(&worker).await?.sum("vramq_program_held_bytes") as u64;
    ensure!(shown == loaded, "{shown} {loaded}");
    worker.drain().await?;
    let learned: Value = serde_json::from_slice(&std::fs::read(gpu.path("ceilings.json"))?)?;
    Ok((loaded >> 20, peaks(&learned).into_iter().map(|bytes| bytes >> 20).collect()))
}

/// The measured peaks in what a worker keeps of its programs.
fn peaks(learned: &Value) -> Vec<u64> {
    let inside = |value: &Value| value.as_array().into_iter().flatten().flat_map(peaks).collect::<Vec<_>>();
    match learned {
        Value::Object(map) => map
            .iter()
            .flat_map(|(name, value)| match name.as_str() {
                "peaks" => value.as_array().into_iter().flatten().filter_map(Value::as_u64).collect(),
                _ => peaks(value),
            })
            .collect(),
        list => inside(list),
    }
}

async fn the_memory_of_a_program_is_distinguished_by_process_id(env: &mut TestEnv) -> Result<()> {
    let (loaded, peaks) = booked(env, None).await?;
    ensure!(loaded == LOADED_MIB, "{loaded}");
    // The pass that took nothing, and the one that did.
    ensure!(peaks == BTreeSet::from([0, PASS_MIB]), "{peaks:?}");
    Ok(())
}

/// NVML lists the worker's own process and not the program's, so the difference is the neighbour's.
async fn a_program_that_takes_nothing_of_the_device_holds_nothing(env: &mut TestEnv) -> Result<()> {
    let gpu = SharedGpu::with_base(env, None, 0)?;
    let worker = gpu.worker(env, NEIGHBOUR_MIB).await?;
    let line = worker.log.wait_for("process loaded").await?;
    ensure!(line.field("held_bytes").and_then(Value::as_u64) == Some(0), "{}", line.text());
    worker.drain().await
}

/// Nobody can tell what is a pass's, and what the neighbour took is in it: then a process waits for more than it must.
async fn by_difference(env: &mut TestEnv, variable: (&str, &str)) -> Result<()> {
    let (loaded, peaks) = booked(env, Some(variable)).await?;
    ensure!(loaded == LOADED_MIB + NEIGHBOUR_MIB, "{loaded}");
    // Nothing else moves while the passes run.
    ensure!(peaks == BTreeSet::from([0, PASS_MIB]), "{peaks:?}");
    Ok(())
}

async fn process_ids_of_another_namespace_leave_the_difference(env: &mut TestEnv) -> Result<()> {
    by_difference(env, OTHER_NAMESPACE).await
}

async fn a_driver_that_does_not_tell_what_processes_hold_leaves_the_difference(
    env: &mut TestEnv,
) -> Result<()> {
    by_difference(env, NOT_TOLD).await
}

/// A program dies, and a neighbour has what it held: no other process is started before that memory is back.
async fn withheld(env: &mut TestEnv, variable: Option<(&str, &str)>) -> Result<()> {
    for text in ["pass failed", "its slot is withheld", "no process can run the model"] {
        env.announce(text);
    }
    let gpu = SharedGpu::new(env, variable)?;
    let worker = gpu.worker(env, 0).await?;
    let mut replies = env.replies().await?;
    let place = run(env, &mut replies, "where", "where").await?;
    env.client.publish(MODEL, env.job("bequest", [format!("bequeath {LOADED_MIB}")])?).await?;
    let line = worker.log.wait_for("its slot is withheld").await?;
    let missing = line.field("bytes").and_then(Value::as_u64).context("no bytes")?;
    ensure!(missing == LOADED_MIB << 20, "{}", line.text());
    ensure!(replies.next_within(10 * SILENCE).await?.is_none(), "it ran though the memory is not back");
    worker.log.counts("process loaded", 1).await?;
    gpu.neighbour_holds(0)?;
    let after = output(&mut replies, "bequest").await?;
    ensure!(after["pid"] != place["pid"], "{after} {place}");
    worker.drain().await
}

async fn memory_that_a_dead_program_leaves_withholds_its_slot(env: &mut TestEnv) -> Result<()> {
    withheld(env, None).await
}

async fn memory_that_a_program_of_another_namespace_leaves_withholds_its_slot(
    env: &mut TestEnv,
) -> Result<()> {
    withheld(env, Some(OTHER_NAMESPACE)).await
}
