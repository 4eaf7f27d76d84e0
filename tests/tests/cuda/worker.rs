//! A worker on a fake driver: what happens to jobs when the memory runs out and when the device fails. These tests show nothing
//! about a real GPU.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{JobHeaders, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::fake_cuda::{broken_driver, cublaslt, driver, library_path, nvml};
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Ended, Worker, command, has_all, run_to_end};
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    a_pass_that_runs_out_costs_its_job_another_attempt,
    a_device_that_is_lost_in_a_pass_requeues_its_jobs,
    a_device_that_is_lost_between_passes_charges_no_job,
);
on_one_setup!(
    a_job_waits_for_a_neighbour,
    a_worker_without_its_device_says_why,
    the_doctor_reports_each_library_and_its_place,
);

const JOBS: usize = 30;
const CUDA: [&str; 2] = ["device.kind=cuda", "device.cuda.reserve_mib=0"];

/// Of the fake driver: 1024 MiB, of which a context takes 300.
const FREE_MIB: u64 = 1024 - 300;

fn fake_driver() -> Result<Vec<PathBuf>> {
    Ok(vec![driver()?, nvml()?])
}

/// Starts a worker on the fake driver, with a failure of it.
async fn worker(env: &mut TestEnv, failure: &str, settings: &[&str]) -> Result<Worker> {
    env.set_environment("LD_LIBRARY_PATH", library_path(&fake_driver()?)?);
    env.set_environment("FAKE_CUDA_FAIL", failure);
    // Like a driver whose device is lost, which may hang at exit: a worker must end without waiting for it.
    env.set_environment("FAKE_CUDA_EXIT_HANGS", "1");
    env.worker(&[&CUDA, settings].concat()).await
}

async fn a_pass_that_runs_out_costs_its_job_another_attempt(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    // The first allocation, and the one after what is kept was given back.
    let worker = worker(env, "cuMemAllocFromPoolAsync:1:2:2", &[]).await?;
    let opened = worker.log.wait_for("device open").await?;
    ensure!(opened.text().contains("cuda:0") && opened.text().contains("300.0 MiB"), "{}", opened.text());
    let items = items(100);
    env.client.publish(MODEL, env.job("halved", items.clone())?).await?;
    let replies = answered_once(&mut env.replies().await?, "halved", &items).await?;
    let last = replies.last().context("no replies")?.reply()?;
    ensure!(last.attempt == 1, "{last:?}");
    let line = worker.log.wait_for("out of memory").await?;
    let labels = [
        ("device", "cuda:0"),
        ("items", "100"),
        ("asked", "0.1 MiB"),
        ("total", "1024.0 MiB"),
        ("foreign", "0.0 MiB"),
    ];
    for (name, value) in labels {
        let found = line.field(name).with_context(|| format!("no {name} in {}", line.text()))?;
        ensure!(found.to_string().trim_matches('"') == value, "{name} is {found}, not {value}");
    }
    worker.drain().await?;
    ensure!(worker.total("requeued").await? == 1 && worker.total("recomputed").await? == 0);
    Ok(())
}

/// What is left of the jobs after a worker has ended, by how often each was on a device that was lost.
async fn left(env: &TestEnv, answered: u64) -> Result<Vec<u32>> {
    let mut queue = env.client.mailbox(&jobs_queue(MODEL)).await?;
    let mut crashes = Vec::new();
    for _ in answered..JOBS as u64 {
        crashes.push(JobHeaders::read(&queue.next().await?.headers())?.crashes);
    }
    Ok(crashes)
}

/// Runs jobs one by one on a worker whose device fails. Returns the crash counts of the jobs that it gave back.
async fn charges(env: &mut TestEnv, failure: &str) -> Result<Vec<u32>> {
    env.announce("device lost");
    let worker = worker(env, failure, &["model.echo.pass_tokens=1"]).await?;
    publish_many(env, 1, JOBS, |job| job).await?;
    ensure!(worker.exited().await? == Some(5), "{}", worker.log.text());
    let answered = worker.total("jobs").await?;
    ensure!((1..JOBS as u64).contains(&answered), "{answered} jobs were answered");
    let mut counter = ReplyCounter::default();
    let mut replies = env.replies().await?;
    counter.collect(&mut replies, usize::try_from(answered)?).await?;
    counter.collect_rest(&mut replies).await?;
    ensure!(counter.duplicates() == 0, "{} duplicates", counter.duplicates());
    left(env, answered).await
}

async fn a_device_that_is_lost_in_a_pass_requeues_its_jobs(env: &mut TestEnv) -> Result<()> {
    // An illegal address, in the sixth pass.
    let crashes = charges(env, "cuMemAllocFromPoolAsync:6:700").await?;
    // That pass, and the one that was ready on the device.
    let charged = crashes.iter().filter(|crashes| **crashes == 1).count();
    let free = crashes.iter().filter(|crashes| **crashes == 0).count();
    ensure!((1..=2).contains(&charged) && charged + free == crashes.len(), "{crashes:?}");
    Ok(())
}

async fn a_device_that_is_lost_between_passes_charges_no_job(env: &mut TestEnv) -> Result<()> {
    // Giving back the memory of the sixth pass, whose outputs are there.
    let crashes = charges(env, "cuMemFreeAsync:6:700").await?;
    ensure!(crashes.iter().all(|crashes| *crashes == 0), "{crashes:?}");
    Ok(())
}

async fn a_job_waits_for_a_neighbour(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "not even one item fits"] {
        env.announce(text);
    }
    let folder = tempfile::tempdir()?;
    let neighbour = folder.path().join("neighbour");
    let holds = |mib: u64| std::fs::write(&neighbour, (mib << 20).to_string()).context("write");
    holds(0)?;
    env.set_environment("FAKE_CUDA_FOREIGN", &neighbour);
    let worker = worker(env, "", &[]).await?;
    holds(FREE_MIB)?;
    env.client.publish(MODEL, env.job("patient", items(1))?).await?;
    let line = worker.log.wait_for("out of memory").await?;
    ensure!(line.text().contains(&format!("{FREE_MIB}.0 MiB")), "{}", line.text());
    until("the worker stops consuming", async || Ok(worker.log.find("not even one item fits").map(drop)))
        .await?;
    holds(0)?;
    let reply = env.replies().await?.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.reply()?.attempt >= 1, "{:?}", reply.reply());
    worker.drain().await?;
    ensure!(worker.total("oom_foreign").await? == worker.total("requeued").await?);
    Ok(())
}

/// Runs a subcommand of the worker with settings, and libraries of a machine.
async fn run(
    subcommand: &str,
    libraries: &[PathBuf],
    variables: &[(&str, &str)],
    settings: &[&str],
) -> Result<Ended> {
    let mut command = command("vramq-worker")?;
    command.arg(subcommand).env("LD_LIBRARY_PATH", library_path(libraries)?);
    command.envs(variables.iter().copied());
    for setting in [&["model.echo.engine=echo"], settings].concat() {
        command.args(["--set", setting]);
    }
    run_to_end(command).await
}

/// Libraries, variables, and what is said of them.
type Machine<'a> = (Vec<PathBuf>, &'a [(&'a str, &'a str)], &'a [&'a str]);

async fn a_worker_without_its_device_says_why(_: &mut TestEnv) -> Result<()> {
    let machines: [Machine<'_>; 4] = [
        (vec![broken_driver()?], &[], &["libcuda.so.1", "install the driver"]),
        (fake_driver()?, &[("FAKE_CUDA_DEVICES", "0")], &["CUDA_ERROR_NO_DEVICE (100)"]),
        (
            fake_driver()?,
            &[("CUDA_VISIBLE_DEVICES", "0")],
            &["device number 1", "Fake GPU 0", "hides others"],
        ),
        (
            fake_driver()?,
            &[("FAKE_CUDA_DEVICES", "2"), ("FAKE_CUDA_MEMORY_MIB", "200")],
            &["cuda:1", "make a context"],
        ),
    ];
    for (libraries, variables, words) in machines {
        let ended = run("run", &libraries, variables, &["device.cuda.index=1"]).await?;
        ensure!(ended.code == Some(4), "{ended:?}");
        has_all(&ended.stderr, words)?;
    }
    Ok(())
}

async fn the_doctor_reports_each_library_and_its_place(_: &mut TestEnv) -> Result<()> {
    let driver = driver()?.join("libcuda.so.1").display().to_string();
    let uuid = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae00";
    let well = run("doctor", &fake_driver()?, &[], &CUDA).await?;
    ensure!(well.code == Some(0), "{well:?}");
    has_all(
        &well.stdout,
        &["cuda:0", "1024.0 MiB", &format!("{FREE_MIB}.0 MiB"), &driver, uuid, "Fake GPU 0", "300.0 MiB"],
    )?;
    // What multiplies matrices: the program itself above, and cuBLASLt where it is.
    has_all(&well.stdout, &["the program's own matrix products are used"])?;
    let library = cublaslt()?.join("libcublasLt.so.13").display().to_string();
    let faster = run("doctor", &[fake_driver()?, vec![cublaslt()?]].concat(), &[], &CUDA).await?;
    has_all(&faster.stdout, &[&library])?;
    // The worker uses the CPU, and reports the CUDA devices anyway.
    let idle = run("doctor", &fake_driver()?, &[], &[]).await?;
    ensure!(idle.code == Some(0), "{idle:?}");
    has_all(&idle.stdout, &["cpu", &driver, uuid])?;
    let none = run("doctor", &[broken_driver()?], &[], &CUDA).await?;
    ensure!(none.code == Some(4), "{none:?}");
    has_all(&none.stdout, &["CUDA: the NVIDIA driver's library"])?;
    let lost = run("doctor", &fake_driver()?, &[], &[CUDA[0], "device.cuda.index=7"]).await?;
    ensure!(lost.code == Some(4), "{lost:?}");
    has_all(&lost.stdout, &[&driver, uuid])?;
    has_all(&lost.stderr, &["number 7"])
}
