//! A worker on several GPUs of a fake driver: a process for each, when one fails, when all fail, and when they are ended.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use vramq_schemas::topology::jobs_queue;
use vramq_tests::fake_cuda::{driver, library_path, nvml};
use vramq_tests::flow::{Flow, sessions_are_right};
use vramq_tests::management::Depth;
use vramq_tests::on_one_setup;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, command, run_to_end};

on_one_setup!(
    jobs_go_to_every_gpu,
    a_gpu_that_fails_again_and_again_stops_no_other,
    a_killed_process_is_started_again,
    a_gpu_that_cannot_be_opened_stops_no_other,
    when_no_gpu_works_the_exit_code_says_so,
    a_signal_to_all_of_them_is_one_order,
    two_orders_end_them_at_once,
    a_process_that_hangs_is_killed_in_the_end,
    no_process_outlives_the_first_one,
    the_doctor_reports_each_gpu,
    each_instance_of_mig_has_its_process,
);

const CUDA: [&str; 4] = [
    "device.cuda.index=all",
    "device.cuda.reserve_mib=0",
    "model.echo.slots_max=4",
    "http.listen=127.0.0.1:0",
];
const GPUS: usize = 2;

/// The slots of each process for jobs of any size. The other half is for large jobs only.
const JOBS_IN_HAND: usize = 2;

fn machine(settings: &[(&str, &str)]) -> Result<Vec<(String, OsString)>> {
    let libraries: Vec<PathBuf> = vec![driver()?, nvml()?];
    let mut variables = vec![
        ("LD_LIBRARY_PATH".to_owned(), library_path(&libraries)?),
        ("FAKE_CUDA_DEVICES".to_owned(), GPUS.to_string().into()),
    ];
    variables.extend(settings.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())));
    Ok(variables)
}

/// Starts the whole on a machine with two GPUs.
fn spawn(env: &mut TestEnv, variables: &[(&str, &str)], settings: &[&str]) -> Result<Worker> {
    for (name, value) in machine(variables)? {
        env.set_environment(&name, value);
    }
    env.spawn_worker(&[&CUDA, settings].concat())
}

/// The same, and waits until so many processes consume.
async fn start(env: &mut TestEnv, variables: &[(&str, &str)], consuming: usize) -> Result<Worker> {
    let worker = spawn(env, variables, &[])?;
    worker.sessions(consuming).await?;
    Ok(worker)
}

/// The processes that it has started and that have not ended.
fn children(worker: &Worker) -> Result<Vec<Pid>> {
    let file = format!("/proc/{0}/task/{0}/children", worker.pid);
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().map(|pid| Pid::from_raw(pid.parse().ok()?)).collect::<Option<_>>().context("pids")
}

async fn gone(processes: &[Pid]) -> Result<()> {
    let is_gone = |pid: &Pid| {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        state.is_err() || state.is_ok_and(|state| state.contains(") Z "))
    };
    until("the processes to end", async || Ok(processes.iter().all(is_gone).then_some(()))).await
}

async fn jobs_go_to_every_gpu(env: &mut TestEnv) -> Result<()> {
    let worker = start(env, &[], GPUS).await?;
    sessions_are_right(env, GPUS, 4).await?;
    publish_many(env, 1, 200, |job| job).await?;
    let mut counter = ReplyCounter::default();
    counter.collect(&mut env.replies().await?, 200).await?;
    let by: Vec<_> = counter.by_worker.keys().map(String::as_str).collect();
    ensure!(by == ["worker-0-0", "worker-0-1"], "{:?}", counter.by_worker);
    for gpu in ["cuda:0", "cuda:1"] {
        let line = worker.log.wait_for(&format!("{{\"gpu\":\"{gpu}\"")).await?;
        ensure!(line.field("gpu").is_some_and(|value| value == gpu), "{}", line.text());
    }
    let children = children(&worker)?;
    ensure!(children.len() == GPUS, "{children:?}");
    worker.drain().await?;
    gone(&children).await
}

/// Announces the log lines about a failed process and its jobs.
fn announce_failures(env: &mut TestEnv) {
    for text in [
        "starting it again",
        "failed at their start",
        "device lost",
        "it will run in isolation",
        "will redeliver the unacknowledged jobs",
    ] {
        env.announce(text);
    }
}

async fn a_gpu_that_fails_again_and_again_stops_no_other(env: &mut TestEnv) -> Result<()> {
    announce_failures(env);
    // Giving memory back after its third pass, for which nobody is to blame, in each process on the second GPU.
    let fails = [("FAKE_CUDA_FAIL", "cuMemFreeAsync:3:700"), ("FAKE_CUDA_FAIL_PLACE", "1")];
    let worker = start(env, &fails, GPUS).await?;
    let well = children(&worker)?;
    let mut flow = Flow::default();
    let mut replies = env.replies().await?;
    let twice =
        until("it to fail twice", async || Ok((worker.log.count("starting it again") >= 2).then_some(())));
    flow.during(env, &mut replies, twice).await?;
    let line = worker.log.wait_for("starting it again").await?;
    let field = |name: &str| line.field(name).map(ToString::to_string).unwrap_or_default();
    ensure!(field("gpu").contains("1:GPU-") && field("how").contains("exit status: 5"), "{}", line.text());
    ensure!(field("running") == "1", "{}", line.text());
    let left = children(&worker)?;
    ensure!(left.iter().filter(|pid| well.contains(pid)).count() == 1, "{well:?}, then {left:?}");
    worker.drain().await
}

async fn a_killed_process_is_started_again(env: &mut TestEnv) -> Result<()> {
    announce_failures(env);
    let worker = start(env, &[], GPUS).await?;
    let killed = children(&worker)?[0];
    kill_process(killed, Signal::KILL)?;
    worker.sessions(GPUS + 1).await?;
    worker.log.wait_for("signal: 9").await?;
    sessions_are_right(env, GPUS, 4).await?;
    worker.drain().await
}

async fn a_gpu_that_cannot_be_opened_stops_no_other(env: &mut TestEnv) -> Result<()> {
    announce_failures(env);
    env.announce("cannot start");
    let fails = [("FAKE_CUDA_FAIL", "cuStreamCreate:1:1:0"), ("FAKE_CUDA_FAIL_PLACE", "0")];
    let worker = start(env, &fails, 1).await?;
    worker.log.wait_for("exit status: 4").await?;
    publish_many(env, 1, 20, |job| job).await?;
    let mut counter = ReplyCounter::default();
    counter.collect(&mut env.replies().await?, 20).await?;
    ensure!(counter.by_worker.keys().all(|name| name == "worker-0-1"), "{:?}", counter.by_worker);
    worker.drain().await
}

async fn when_no_gpu_works_the_exit_code_says_so(env: &mut TestEnv) -> Result<()> {
    announce_failures(env);
    env.announce("cannot start");
    let fails = [("FAKE_CUDA_FAIL", "cuStreamCreate:1:1:0")];
    let worker = spawn(env, &fails, &[])?;
    ensure!(worker.exited().await? == Some(4), "{}", worker.log.text());
    // What is wrong with the configuration is so on each.
    let worker = spawn(env, &[("FAKE_CUDA_FAIL", "")], &["device.cuda.index=0,1,2"])?;
    ensure!(worker.exited().await? == Some(4), "{}", worker.log.text());
    worker.log.wait_for("there is no such CUDA device").await.map(drop)
}

async fn a_signal_to_all_of_them_is_one_order(env: &mut TestEnv) -> Result<()> {
    // As a terminal and a service manager do it.
    let worker = start(env, &[], GPUS).await?;
    let children = children(&worker)?;
    children.iter().try_for_each(|pid| kill_process(*pid, Signal::TERM))?;
    worker.drain().await?;
    ensure!(worker.log.find("did not drain").is_none(), "{}", worker.log.text());
    gone(&children).await
}

async fn two_orders_end_them_at_once(env: &mut TestEnv) -> Result<()> {
    for text in [
        "did not drain",
        "asked to stop twice",
        "a failpoint is set",
        "will redeliver the unacknowledged jobs",
    ] {
        env.announce(text);
    }
    let queue = jobs_queue(MODEL);
    env.leave(&queue);
    let worker = spawn(env, &[], &["worker.drill=pass=hang"])?;
    worker.sessions(GPUS).await?;
    // As many as both can hold: each holds some.
    let jobs = GPUS * JOBS_IN_HAND;
    publish_many(env, 1, jobs, |job| job).await?;
    let all_in_hand = Some(Depth { ready: 0, unacked: jobs as u64 });
    until("all jobs in hand", async || Ok((env.vhost.depth(&queue).await? == all_in_hand).then_some(())))
        .await?;
    let children = children(&worker)?;
    worker.signal(Signal::TERM)?;
    worker.log.wait_for("draining").await?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(1), "{}", worker.log.text());
    gone(&children).await
}

async fn a_process_that_hangs_is_killed_in_the_end(env: &mut TestEnv) -> Result<()> {
    env.announce("did not drain");
    let worker = spawn(env, &[], &["worker.drain_s=1"])?;
    worker.sessions(GPUS).await?;
    let children = children(&worker)?;
    kill_process(children[0], Signal::STOP)?;
    worker.signal(Signal::TERM)?;
    ensure!(worker.exited().await? == Some(1), "{}", worker.log.text());
    gone(&children).await
}

async fn no_process_outlives_the_first_one(env: &mut TestEnv) -> Result<()> {
    let worker = start(env, &[], GPUS).await?;
    let children = children(&worker)?;
    worker.signal(Signal::KILL)?;
    gone(&children).await?;
    worker.log.counts("the parent's end", GPUS).await?;
    sessions_are_right(env, 0, 0).await
}

/// A process sees one instance, so each is started with its own made visible.
async fn each_instance_of_mig_has_its_process(env: &mut TestEnv) -> Result<()> {
    let uuid = |place: usize| format!("MIG-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadae{place:02}");
    for (name, value) in machine(&[("FAKE_CUDA_MIG", "1")])? {
        env.set_environment(&name, value);
    }
    let uuids = format!("device.cuda.uuid={},{}", uuid(0), uuid(1));
    let worker = env.spawn_worker(&[&[uuids.as_str()], &CUDA[1..]].concat())?;
    worker.sessions(GPUS).await?;
    for place in 0..GPUS {
        let opened = worker.log.wait_for(&format!("\"uuid\":\"{}\"", uuid(place))).await?;
        ensure!(opened.text().contains(&format!("Fake GPU {place}")), "{}", opened.text());
    }
    worker.drain().await
}

async fn the_doctor_reports_each_gpu(_: &mut TestEnv) -> Result<()> {
    let mut command = command("vramq-worker")?;
    command.arg("doctor").envs(machine(&[])?).stderr(Stdio::piped());
    for setting in CUDA.iter().chain(&["model.echo.engine=echo"]) {
        command.args(["--set", setting]);
    }
    let ended = run_to_end(command).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    ensure!(["\ncuda:1 ", "cuda:0 "].iter().all(|name| ended.stdout.contains(name)), "{}", ended.stdout);
    Ok(())
}
