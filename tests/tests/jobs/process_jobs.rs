//! Features of jobs for programs: JSON inputs, progress, model revisions; and the status of processes.

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vramq_schemas::fields::as_text;
use vramq_schemas::headers::{MODEL_REVISION, REVISION_WAITS};
use vramq_schemas::status::WorkerState;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Input, ItemProgress, Job, JsonText, Params, Reason, ReplyKind, codec};
use vramq_tests::client::Received;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Scrape, figures};
use vramq_tests::operator::Operator;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::vramq;
use vramq_tests::{on_all_setups, on_one_setup};

use crate::process::{Served, consuming, outputs};

on_all_setups!(json_inputs_reach_a_program_as_they_were_published, progress_comes_to_those_who_ask);
on_one_setup!(
    the_command_submits_json_and_shows_progress,
    a_job_runs_with_the_revision_that_it_demands_only,
    a_revision_that_no_worker_has_is_given_up,
    a_program_of_another_revision_is_served_after_a_restart_only,
    a_one_shot_program_that_was_exchanged_is_served_after_a_restart_only,
    processes_are_shown,
    a_rule_moves_a_job_to_other_workers_once,
    memory_that_never_comes_back_ends_the_worker,
);

async fn json_inputs_reach_a_program_as_they_were_published(env: &mut TestEnv) -> Result<()> {
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &["model.beside.engine=echo"]).await?;
    let mut replies = env.replies().await?;
    // Parsed and written again, this would have other digits and another order.
    let text = r#"{"b": 18446744073709551615, "a": [1.10, null]}"#;
    let inputs = vec![Input::Json(JsonText::parse(text)?), Input::Text("echo it".to_owned())];
    let job = Message::inputs(env.setup.encoding, MODEL, "json", REPLIES, inputs.clone())?;
    env.client.publish(MODEL, job).await?;
    let (found, _) = outputs(&mut replies, "json").await?;
    ensure!(found[0] == json!({"json": {"b": 18446744073709551615_u64, "a": [1.1, null]}}), "{found:?}");
    ensure!(found[1]["text"] == "it", "{found:?}");
    // Echo shows the text itself.
    let job = Message::inputs(env.setup.encoding, "beside", "text", REPLIES, inputs)?;
    env.client.publish("beside", job).await?;
    let echoed = replies.next().await?.outputs()?.outputs;
    let expected = vramq_schemas::Output::Bytes {
        media_type: "application/json".to_owned(),
        bytes: text.as_bytes().to_vec(),
    };
    ensure!(echoed[0] == expected, "{echoed:?}");
    worker.drain().await
}

/// A job whose only item takes about a second and a half, and reports every 20 ms.
fn slow_job(env: &TestEnv, id: &str, asks: bool) -> Result<Message> {
    let mut params = Params::default();
    if asks {
        params.ask_for_progress();
    }
    let inputs = vec![Input::Text("echo first".to_owned()), Input::Text("steps 75".to_owned())];
    let body = codec::encode(&Job { model: MODEL.to_owned(), inputs, params }, env.setup.encoding)?;
    Ok(env.job(id, ["x"])?.with_body(body))
}

async fn progress_comes_to_those_who_ask(env: &mut TestEnv) -> Result<()> {
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }\nitem_s = 60", &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, slow_job(env, "silent", false)?).await?;
    outputs(&mut replies, "silent").await?;
    env.client.publish(MODEL, slow_job(env, "followed", true)?).await?;
    // A report may come after `done`.
    env.leave(REPLIES);
    let mut reports: Vec<ItemProgress> = Vec::new();
    loop {
        let reply = replies.next().await?;
        ensure!(reply.id() == "followed" && reply.correlation_id() == "correlation of followed");
        match reply.kind()? {
            ReplyKind::Done => break,
            ReplyKind::Part => {}
            ReplyKind::Progress => {
                ensure!(*reply.properties.delivery_mode() == Some(1), "{:?}", reply.properties);
                ensure!(reply.properties.expiration().is_some(), "{:?}", reply.properties);
                ensure!(reply.headers().inner().contains_key("worker"), "{:?}", reply.properties);
                reports.push(codec::decode(&reply.body, env.setup.encoding)?);
            }
            ReplyKind::Failed => anyhow::bail!("failed: {:?}", reply.failure()),
        }
    }
    // The first tells that the job has begun.
    let begin = reports.remove(0);
    ensure!((begin.item, begin.fraction, begin.note.as_str()) == (0, 0.0, ""), "{begin:?}");
    // The program made 75 reports. The worker passes on one each half second, so fewer than half of them on a machine of any speed.
    ensure!((1..38).contains(&reports.len()), "{} reports", reports.len());
    ensure!(reports.iter().all(|report| report.item == 1 && report.note.starts_with("step ")), "{reports:?}");
    ensure!(reports.is_sorted_by(|a, b| a.fraction < b.fraction), "{reports:?}");
    worker.drain().await
}

async fn the_command_submits_json_and_shows_progress(env: &mut TestEnv) -> Result<()> {
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &[]).await?;
    let submit = async |arguments: &[&str]| {
        vramq(&env.url, &[&["submit", "--model", MODEL], arguments].concat()).await
    };
    let output = submit(&["--json-inputs", r#"{"a": 1}"#, "[2]"]).await?;
    ensure!(output.code == Some(0), "{output:?}");
    let lines = output.stdout.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    let expected =
        [json!({"index": 0, "json": {"json": {"a": 1}}}), json!({"index": 1, "json": {"json": [2]}})];
    ensure!(lines == expected, "{lines:?}");
    let refused = submit(&["--json-inputs", "{"]).await?;
    ensure!(refused.code == Some(2) && refused.stderr.contains("argument 1: not JSON"), "{refused:?}");
    // Lines of progress come every five seconds.
    let output = submit(&["--progress", "steps 400"]).await?;
    ensure!(output.code == Some(0), "{output:?}");
    let shown = output.stderr.lines().any(|line| line.contains("item 0: ") && line.contains(" of 400"));
    ensure!(shown, "{}", output.stderr);
    worker.drain().await
}

fn demanding(env: &TestEnv, id: &str, revision: &str) -> Result<Message> {
    Ok(env.job(id, ["echo it"])?.with_header(MODEL_REVISION, AMQPValue::LongString(revision.into())))
}

/// A fleet of two revisions: the job waits until a worker with the right one takes it.
async fn a_job_runs_with_the_revision_that_it_demands_only(env: &mut TestEnv) -> Result<()> {
    let served = Served::new(env, "vram = { mib_per_unit = 1 }", &[("REVISION", "old")])?;
    let old = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, demanding(env, "of the old", "old")?).await?;
    let (_, reply) = outputs(&mut replies, "of the old").await?;
    let revision = |headers: &lapin::types::FieldTable| headers.inner().get(MODEL_REVISION).and_then(as_text);
    ensure!(revision(&reply.headers()).as_deref() == Some("old"), "{:?}", reply.properties);
    env.client.publish(MODEL, demanding(env, "of the new", "new")?).await?;
    until("the old worker leaves it", async || {
        let metrics = Scrape::of(&old).await?;
        let requeued = metrics.sum("vramq_jobs_requeued_total", &[("cause", "wrong-revision")]);
        Ok((requeued > 0.0).then_some(()))
    })
    .await?;
    old.drain().await?;
    drop(served);
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }", &[("REVISION", "new")])?;
    let new = consuming(env, &[]).await?;
    let (_, reply) = outputs(&mut replies, "of the new").await?;
    ensure!(revision(&reply.headers()).as_deref() == Some("new"), "{:?}", reply.properties);
    ensure!(reply.reply()?.attempt == 0, "waiting is no attempt: {:?}", reply.reply());
    new.drain().await
}

async fn a_revision_that_no_worker_has_is_given_up(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    // It has been everywhere.
    let job = demanding(env, "nobody's", "f32-none")?.with_header(REVISION_WAITS, AMQPValue::LongLongInt(16));
    env.client.publish(MODEL, job.as_worker()).await?;
    let failure = env.replies().await?.next().await?.failure()?;
    ensure!(failure.reason == Reason::WrongRevision, "{failure:?}");
    ensure!(failure.error.contains("demands revision `f32-none`"), "{failure:?}");
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::WrongRevision);
    let kept = letter.headers().inner().get(MODEL_REVISION).and_then(as_text);
    ensure!(kept.as_deref() == Some("f32-none"), "{:?}", letter.properties);
    worker.drain().await
}

/// The weights are exchanged while the worker runs, and a process dies.
async fn a_program_of_another_revision_is_served_after_a_restart_only(env: &mut TestEnv) -> Result<()> {
    for text in [
        "pass failed",
        "load the model",
        "no process can run the model",
        "another revision than the one that this worker serves",
    ] {
        env.announce(text);
    }
    let served = Served::new(env, "instances = 1\nvram = { mib_per_unit = 1 }", &[])?;
    std::fs::write(served.path("revision"), "old")?;
    let old = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let revision = |reply: &Received| reply.headers().inner().get(MODEL_REVISION).and_then(as_text);
    env.client.publish(MODEL, env.job("before", ["echo it"])?).await?;
    ensure!(revision(&outputs(&mut replies, "before").await?.1).as_deref() == Some("old"));
    std::fs::write(served.path("revision"), "new")?;
    env.client.publish(MODEL, env.job("after", ["show after"])?).await?;
    let pid = until("the process", async || {
        Ok(std::fs::read_to_string(served.path("after")).ok().and_then(|text| text.parse::<i32>().ok()))
    })
    .await?;
    kill_process(Pid::from_raw(pid).context("no pid")?, Signal::KILL)?;
    ensure!(old.exited().await? == Some(5), "a restart is wanted");
    let new = consuming(env, &[]).await?;
    ensure!(revision(&outputs(&mut replies, "after").await?.1).as_deref() == Some("new"));
    new.drain().await
}

/// The script is exchanged while the worker runs: its next item runs under the new revision.
async fn a_one_shot_program_that_was_exchanged_is_served_after_a_restart_only(
    env: &mut TestEnv,
) -> Result<()> {
    for text in [
        "not starting the program",
        "no process can run the model",
        "another revision than the one that this worker serves",
    ] {
        env.announce(text);
    }
    let folder = tempfile::tempdir()?;
    let (config, script) = (folder.path().join("worker.toml"), folder.path().join("script"));
    let text = format!(
        "[model.{MODEL}]\nengine = \"process\"\nmode = \"once\"\ncommand = [\"/bin/sh\", {script:?}]\n\
         vram = {{ mib_per_unit = 0 }}\nonce = {{ media_type = \"application/json\" }}\n"
    );
    std::fs::write(&config, text)?;
    std::fs::write(&script, "echo 1")?;
    env.set_environment("VRAMQ_CONFIG", &config);
    let old = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let mut printed = async |id: &str| -> Result<(Value, Option<String>)> {
        let (mut found, reply) = outputs(&mut replies, id).await?;
        Ok((found.remove(0), reply.headers().inner().get(MODEL_REVISION).and_then(as_text)))
    };
    env.client.publish(MODEL, env.job("before", ["x"])?).await?;
    let (one, revision) = printed("before").await?;
    std::fs::write(&script, "echo 2")?;
    env.client.publish(MODEL, env.job("after", ["x"])?).await?;
    ensure!(old.exited().await? == Some(5), "a restart is wanted");
    let new = consuming(env, &[]).await?;
    let (two, other) = printed("after").await?;
    ensure!((one, two) == (json!(1), json!(2)) && revision.is_some() && revision != other, "{other:?}");
    new.drain().await
}

async fn processes_are_shown(env: &mut TestEnv) -> Result<()> {
    let served = Served::new(env, "instances = 1\nvram = { base_mib = 10, mib_per_unit = 1 }", &[])?;
    let worker = consuming(env, &["worker.heartbeat_s=1"]).await?;
    let mut operator = Operator::new(env).await?;
    env.client.publish(MODEL, env.job("one", ["echo it"])?).await?;
    let (found, reply) = outputs(&mut env.replies().await?, "one").await?;
    let heard = operator
        .heartbeat(|heartbeat| {
            heartbeat.state == WorkerState::Consuming
                && heartbeat
                    .models
                    .iter()
                    .any(|model| model.processes.iter().any(|process| process.passes > 0))
        })
        .await?;
    let model = &heard.models[0];
    let [process] = &model.processes[..] else { anyhow::bail!("{:?}", model.processes) };
    ensure!(process.pid.map(i64::from) == found[0]["pid"].as_i64(), "{process:?} {found:?}");
    ensure!((process.state.as_str(), process.passes, process.starts) == ("idle", 1, 1), "{process:?}");
    // A program that says nothing of its revision has the one of its command and its script.
    let revision = model.revision.clone().context("no revision")?;
    ensure!(revision.starts_with("program-"), "{revision}");
    let of_reply = reply.headers().inner().get(MODEL_REVISION).and_then(as_text);
    ensure!(of_reply == Some(revision), "{of_reply:?}");
    let (_, metrics) = worker.get("/metrics").await?;
    for name in ["held_bytes", "passes", "starts_total"] {
        let metric = format!("vramq_program_instance_{name}{{");
        ensure!(metrics.contains(&metric), "no {metric}: {metrics}");
    }
    until("a report that has heard the worker", async || {
        let output = vramq(&env.url, &["status", "--for", "8s"]).await?;
        Ok((output.stdout.contains("PROCESS OF") && output.stdout.contains("idle")).then_some(()))
    })
    .await?;
    worker.drain().await?;
    drop(served);
    Ok(())
}

/// Each of two workers would move the job to the other one.
async fn a_rule_moves_a_job_to_other_workers_once(env: &mut TestEnv) -> Result<()> {
    const LARGE: &str = "large-texts";
    let rule = |to: &str| {
        format!("vram = {{ mib_per_unit = 1 }}\nrule = [{{ when = \"characters > 20\", to = \"{to}\" }}]")
    };
    let _small = Served::new(env, &rule(LARGE), &[("REVISION", "small")])?;
    let first = consuming(env, &[]).await?;
    let more = format!("key = \"{LARGE}\"\n{}", rule(MODEL));
    let _large = Served::new(env, &more, &[("REVISION", "large")])?;
    let second = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    for (id, text, revision) in
        [("short", "echo it", "small"), ("long", "echo a text of more than 20 characters", "large")]
    {
        env.client.publish(MODEL, env.job(id, ["echo x", text])?).await?;
        let (found, reply) = outputs(&mut replies, id).await?;
        ensure!(found.len() == 2, "{found:?}");
        let ran = reply.headers().inner().get(MODEL_REVISION).and_then(as_text);
        ensure!(ran.as_deref() == Some(revision), "{id}: {ran:?}");
    }
    // The broker may deliver a job before it confirms its publish, on which the worker counts it.
    figures(&first, "one job to be moved", |figures| {
        figures.sum_of("vramq_jobs_requeued_total", "cause=\"moved\"") == 1
    })
    .await?;
    first.drain().await?;
    second.drain().await
}

async fn memory_that_never_comes_back_ends_the_worker(env: &mut TestEnv) -> Result<()> {
    const BASE_MIB: u64 = 1000;
    for text in [
        "pass failed",
        "its slot is withheld",
        "device memory of an ended process is still not free",
        "no process can run the model",
        "drain deadline passed",
        "will redeliver the unacknowledged jobs",
    ] {
        env.announce(text);
    }
    let device = SharedDevice::new(4000)?;
    let [file, memory, reserve] = device.settings();
    let path = file.split_once('=').context("no file")?.1.to_owned();
    let more = format!(
        "instances = 1\nwithheld_s = 1\nvram = {{ base_mib = {BASE_MIB}, mib_per_unit = 1, learn = false }}"
    );
    let base = BASE_MIB.to_string();
    let _served = Served::new(env, &more, &[("DEVICE", &path), ("BASE_MIB", &base)])?;
    let worker = consuming(env, &[&file, &memory, &reserve, "worker.drain_s=5"]).await?;
    // This process is the stranger.
    env.client.publish(MODEL, env.job("bequest", [format!("bequeath {}", std::process::id())])?).await?;
    ensure!(worker.exited().await? == Some(5), "a restart is wanted");
    device.give_back(BASE_MIB << 20);
    // The job is not lost. The broker has it back when it has noticed the end of the connection.
    env.leave(&jobs_queue(MODEL));
    until("the job in its queue", async || {
        Ok((env.client.ready(&jobs_queue(MODEL)).await? == 1).then_some(()))
    })
    .await
}
