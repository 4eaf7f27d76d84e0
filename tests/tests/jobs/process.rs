//! Programs of the user as models: a worker runs them, and survives their faults.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use vramq_schemas::{Input, Job, JobHeaders, Output, Params, Reason, ReplyKind, codec};
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::metrics::processes_run;
use vramq_tests::programs::{python, root};
use vramq_tests::setup::full;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, command, run_to_end};
use vramq_tests::{on_all_setups, on_one_setup};

on_all_setups!(a_program_answers_beside_another_model);
on_one_setup!(
    three_processes_overlap,
    a_pass_that_runs_out_of_memory_is_halved_in_the_same_process,
    a_killed_process_costs_the_job_in_it_only,
    a_job_that_kills_processes_is_dead_lettered_with_what_they_printed,
    memory_that_another_program_took_withholds_the_slot,
    a_model_that_hangs_in_load_ends_the_start,
    a_model_that_cannot_be_loaded_any_more_has_no_consumers,
    the_doctor_starts_programs,
);

/// A folder for a model to find its weights and leave marks in, and the worker's configuration.
pub(crate) struct Served {
    folder: TempDir,
}

impl Served {
    /// A configuration with [`MODEL`] as `tests/models/served.py`. `more` are keys of the model, `env` variables of it.
    pub(crate) fn new(env: &mut TestEnv, more: &str, variables: &[(&str, &str)]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let served = Self { folder };
        std::fs::write(served.path("weights"), "")?;
        let repository = root().canonicalize()?;
        let paths =
            ["python", "inference/tests/models"].map(|path| repository.join(path).display().to_string());
        let variables: String =
            variables.iter().map(|(name, value)| format!("{name} = {value:?}\n")).collect();
        let text = format!(
            "[model.{MODEL}]\nengine = \"process\"\ncommand = [{:?}, \"served.py\"]\nfolder = {:?}\nkill_s = 1\n{more}\n\
             [model.{MODEL}.env]\nPYTHONPATH = {:?}\nFOLDER = {:?}\n{variables}",
            python()?,
            repository.join("tests/models"),
            paths.join(":"),
            served.folder.path(),
        );
        std::fs::write(served.config(), text)?;
        env.set_environment("VRAMQ_CONFIG", served.config());
        Ok(served)
    }

    /// One process that holds 600 MiB of a device.
    pub(crate) fn of_600_mib(env: &mut TestEnv, device: &SharedDevice) -> Result<Self> {
        let [file, ..] = device.settings();
        let path = file.split_once('=').context("no file")?.1;
        let more = "instances = 1\nvram = { base_mib = 600, mib_per_unit = 1, learn = false }";
        Self::new(env, more, &[("DEVICE", path), ("BASE_MIB", "600")])
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn config(&self) -> PathBuf {
        self.path("worker.toml")
    }
}

pub(crate) async fn consuming(env: &mut TestEnv, settings: &[&str]) -> Result<Worker> {
    let worker = env.spawn_bare_worker(settings)?;
    worker.consuming().await?;
    Ok(worker)
}

/// What a job's items gave, in their order, when it is done.
pub(crate) async fn outputs(replies: &mut Mailbox, id: &str) -> Result<(Vec<Value>, Received)> {
    let mut all = Vec::new();
    loop {
        let reply = replies.next().await?;
        ensure!(reply.id() == id, "{} instead of {id}", reply.id());
        ensure!(reply.kind()? != ReplyKind::Failed, "failed: {:?}", reply.failure());
        ensure!(reply.reply()?.offset as usize == all.len(), "{:?}", reply.reply());
        for output in reply.outputs()?.outputs {
            let Output::Json(value) = output else { anyhow::bail!("no JSON: {output:?}") };
            all.push(value);
        }
        if reply.kind()? == ReplyKind::Done {
            return Ok((all, reply));
        }
    }
}

pub(crate) fn pid_of(output: &Value) -> Result<i64> {
    output["pid"].as_i64().with_context(|| format!("no pid: {output}"))
}

async fn a_program_answers_beside_another_model(env: &mut TestEnv) -> Result<()> {
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &["model.beside.engine=echo"]).await?;
    let texts: Vec<String> = (0..20).map(|at| format!("echo item {at}")).collect();
    env.client.publish(MODEL, env.job("of the program", texts)?).await?;
    let mut replies = env.replies().await?;
    let (found, _) = outputs(&mut replies, "of the program").await?;
    for (at, output) in found.iter().enumerate() {
        ensure!(output["text"] == format!("item {at}"), "{output}");
        // The default of items_max.
        ensure!(output["items"].as_u64().is_some_and(|items| items <= 8), "{output}");
    }
    ensure!(found.len() == 20);
    let beside = Message::texts(env.setup.encoding, "beside", "of echo", REPLIES, ["the same"])?;
    env.client.publish("beside", beside).await?;
    let reply = replies.next().await?;
    ensure!(reply.outputs()?.outputs == [Output::Json("the same".into())]);
    worker.drain().await
}

async fn three_processes_overlap(env: &mut TestEnv) -> Result<()> {
    let more = "instances = 3\nitems_max = 1\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }";
    let served = Served::new(env, more, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    // Work until all three are there.
    let mut jobs = 0;
    until("three processes", async || {
        env.client.publish(MODEL, env.job(&format!("warm {jobs}"), ["sleep 0.5"; 3])?).await?;
        outputs(&mut replies, &format!("warm {jobs}")).await?;
        jobs += 1;
        Ok((worker.log.count("process loaded") == 3).then_some(()))
    })
    .await?;
    // None of them ends before all three run.
    env.client.publish(MODEL, env.job("together", ["wait gate"; 3])?).await?;
    processes_run(&worker, 3).await?;
    std::fs::write(served.path("gate"), "")?;
    let (found, _) = outputs(&mut replies, "together").await?;
    let mut pids = found.iter().map(pid_of).collect::<Result<Vec<_>>>()?;
    pids.sort_unstable();
    pids.dedup();
    ensure!(pids.len() == 3, "{pids:?}");
    Ok(())
}

/// A pass of eight runs out of memory after three items, which are kept; so does one of four; two fit.
async fn a_pass_that_runs_out_of_memory_is_halved_in_the_same_process(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    let settings = "instances = 1\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }";
    let _served = Served::new(env, settings, &[])?;
    let worker = consuming(env, &[]).await?;
    let params = Params([("fits".to_owned(), 3.into())].into_iter().collect());
    let inputs = (0..8).map(|at| Input::Text(format!("echo {at}"))).collect();
    let body = codec::encode(&Job { model: MODEL.to_owned(), inputs, params }, env.setup.encoding)?;
    env.client.publish(MODEL, env.job("halved", ["x"])?.with_body(body)).await?;
    let (found, last) = outputs(&mut env.replies().await?, "halved").await?;
    let texts: Vec<_> = found.iter().filter_map(|output| output["text"].as_str()).collect();
    ensure!(texts == ["0", "1", "2", "3", "4", "5", "6", "7"], "{texts:?}");
    let sizes: Vec<_> = found.iter().filter_map(|output| output["items"].as_u64()).collect();
    ensure!(sizes == [8, 8, 8, 4, 4, 4, 2, 2], "{sizes:?}");
    let first = pid_of(&found[0])?;
    ensure!(found.iter().all(|output| pid_of(output).is_ok_and(|pid| pid == first)), "{found:?}");
    ensure!(last.reply()?.attempt == 2, "{:?}", last.reply());
    worker.drain().await?;
    ensure!(worker.total("recomputed").await? == 0 && worker.total("requeued").await? == 2);
    Ok(())
}

async fn a_killed_process_costs_the_job_in_it_only(env: &mut TestEnv) -> Result<()> {
    env.announce("pass failed");
    let more = "instances = 2\nitems_max = 1\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }";
    let served = Served::new(env, more, &[])?;
    let worker = consuming(env, &[]).await?;
    for id in ["victim", "neighbour"] {
        env.client.publish(MODEL, env.job(id, [format!("show {id}")])?).await?;
    }
    let pid = async |id: &str| {
        until(&format!("the process of {id}"), async || {
            Ok(std::fs::read_to_string(served.path(id)).ok().and_then(|text| text.parse::<i32>().ok()))
        })
        .await
    };
    let (victim, neighbour) = (pid("victim").await?, pid("neighbour").await?);
    ensure!(victim != neighbour);
    kill_process(Pid::from_raw(victim).context("no pid")?, Signal::KILL)?;
    let mut replies = env.replies().await?;
    // The second time the job does not wait.
    let (found, _) = outputs(&mut replies, "victim").await?;
    ensure!(pid_of(&found[0])? != i64::from(victim));
    ensure!(Path::new(&format!("/proc/{neighbour}")).exists(), "the neighbour died as well");
    let shown = std::fs::read_to_string(served.path("neighbour"))?;
    ensure!(shown == neighbour.to_string(), "the neighbour was started again");
    kill_process(Pid::from_raw(neighbour).context("no pid")?, Signal::KILL)?;
    outputs(&mut replies, "neighbour").await?;
    worker.drain().await
}

async fn a_job_that_kills_processes_is_dead_lettered_with_what_they_printed(env: &mut TestEnv) -> Result<()> {
    // Neither that the job is quarantined, because its crashes cost only processes, nor that the model has no process meanwhile.
    for text in ["pass failed", "job dead-lettered"] {
        env.announce(text);
    }
    let _served = Served::new(env, "instances = 1\nvram = { mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &[]).await?;
    env.client.publish(MODEL, env.job("killer", ["kill item 0"])?).await?;
    let mut replies = env.replies().await?;
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::Crashed, "{failure:?}");
    let letter = env.dead_letters().await?.next().await?;
    let dossier = letter.dead_letter()?;
    ensure!(dossier.reason == Reason::Crashed && dossier.error.contains("killed by item 0"), "{dossier:?}");
    let history = JobHeaders::read(&letter.headers())?.history;
    let lost = history.iter().filter(|attempt| attempt.outcome == "process-lost").count();
    ensure!(lost == 5, "{history:?}");
    // Each process was loaded, and died in a pass.
    until("as many programs", async || Ok((worker.log.count("process loaded") >= lost).then_some(())))
        .await?;
    ensure!(worker.log.count("cannot load the model") == 0, "{}", worker.log.text());
    // The worker is the same, and serves others.
    env.client.publish(MODEL, env.job("after", ["echo it"])?).await?;
    ensure!(outputs(&mut replies, "after").await?.0[0]["text"] == "it");
    worker.log.counts("process loaded", 6).await?;
    worker.drain().await
}

async fn memory_that_another_program_took_withholds_the_slot(env: &mut TestEnv) -> Result<()> {
    const BASE_MIB: u64 = 1000;
    // After some seconds the job waits in its queue, where another worker could take it.
    for text in ["pass failed", "its slot is withheld", "no process can run the model"] {
        env.announce(text);
    }
    let device = SharedDevice::new(4000)?;
    let [file, memory, reserve] = device.settings();
    let path = file.split_once('=').context("no file")?.1.to_owned();
    let more = format!("instances = 1\nvram = {{ base_mib = {BASE_MIB}, mib_per_unit = 1, learn = false }}");
    let base = BASE_MIB.to_string();
    let _served = Served::new(env, &more, &[("DEVICE", &path), ("BASE_MIB", &base)])?;
    let worker = consuming(env, &[&file, &memory, &reserve]).await?;
    ensure!(device.memory().free == (4000 - BASE_MIB) << 20);
    // This process is the stranger.
    let text = format!("bequeath {}", std::process::id());
    env.client.publish(MODEL, env.job("bequest", [text])?).await?;
    worker.log.wait_for("its slot is withheld").await?;
    let mut replies = env.replies().await?;
    // Longer than the worker has patience with anything else.
    let hold = Duration::from_secs(if full() { 20 } else { 7 });
    ensure!(replies.next_within(hold).await?.is_none(), "it ran though the memory is not back");
    worker.log.counts("process loaded", 1).await?;
    device.give_back(BASE_MIB << 20);
    outputs(&mut replies, "bequest").await?;
    worker.drain().await?;
    ensure!(device.memory().free == 4000 << 20, "{:?}", device.memory());
    Ok(())
}

async fn a_model_that_hangs_in_load_ends_the_start(env: &mut TestEnv) -> Result<()> {
    for text in ["cannot start", "load the model"] {
        env.announce(text);
    }
    let _served = Served::new(env, "load_s = 30", &[("LOAD", "hang")])?;
    let worker = env.spawn_bare_worker(&[])?;
    ensure!(worker.exited().await? == Some(4));
    let line = worker.log.find("cannot start").context("no message")?;
    for words in ["not loaded within 30 s", "looking for weights", MODEL] {
        ensure!(line.text().contains(words), "`{words}` is not in: {}", line.text());
    }
    ensure!(env.vhost.worker_connections().await?.is_empty());
    Ok(())
}

async fn a_model_that_cannot_be_loaded_any_more_has_no_consumers(env: &mut TestEnv) -> Result<()> {
    for text in ["pass failed", "load the model", "no process can run the model"] {
        env.announce(text);
    }
    let served = Served::new(env, "vram = { mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &["model.beside.engine=echo"]).await?;
    std::fs::remove_file(served.path("weights"))?;
    env.client.publish(MODEL, env.job("waits", ["show waits"])?).await?;
    let pid = until("the process", async || {
        Ok(std::fs::read_to_string(served.path("waits")).ok().and_then(|text| text.parse::<i32>().ok()))
    })
    .await?;
    kill_process(Pid::from_raw(pid).context("no pid")?, Signal::KILL)?;
    worker.log.wait_for("not consuming its jobs").await?;
    let mut replies = env.replies().await?;
    // The rest goes on.
    let beside = Message::texts(env.setup.encoding, "beside", "of echo", REPLIES, ["the same"])?;
    env.client.publish("beside", beside).await?;
    ensure!(replies.next().await?.id() == "of echo");
    std::fs::write(served.path("weights"), "")?;
    let (_, last) = outputs(&mut replies, "waits").await?;
    ensure!(last.reply()?.attempt == 0, "{:?}", last.reply());
    worker.drain().await
}

async fn the_doctor_starts_programs(env: &mut TestEnv) -> Result<()> {
    let more = "instances = 2\nvram = { base_mib = 10, mib_per_unit = 1.5 }";
    let served = Served::new(env, more, &[])?;
    let mut doctor = command("vramq-worker")?;
    doctor.args(["doctor", "--json", "--config"]).arg(served.config());
    let output = run_to_end(doctor).await?;
    ensure!(output.code == Some(0), "{output:?}");
    let report: Value = serde_json::from_str(&output.stdout)?;
    let model = &report["models"][0];
    ensure!(model["program"]["instances"] == 2, "{model}");
    ensure!(model["program"]["per_item"] == 1536 << 10, "{model}");
    ensure!(model["weights"].as_u64().is_some_and(|bytes| bytes > 0), "{model}");
    Ok(())
}
