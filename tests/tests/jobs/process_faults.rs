//! Items that programs call invalid, mistakes of programs, and faults in their configuration. Each is reported where it belongs and
//! affects no other job.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use vramq_schemas::{Input, JobHeaders, Output, Reason, ReplyKind};
use vramq_tests::client::Mailbox;
use vramq_tests::job::Message;
use vramq_tests::metrics::{Scrape, figures, processes_run};
use vramq_tests::on_one_setup;
use vramq_tests::programs::python;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, command, run_to_end};

use crate::process::{Served, consuming, outputs, pid_of};

on_one_setup!(
    an_invalid_item_ends_its_job_and_the_neighbours_run,
    an_invalid_item_that_is_not_named_is_found,
    bytes_of_a_media_type_that_the_model_does_not_take_are_rejected,
    mistakes_of_a_program_are_in_the_dead_letter,
    a_program_that_answers_too_much_costs_its_job_only,
    an_output_that_no_reply_holds_does_not_cost_those_before_it,
    the_words_of_a_program_about_its_out_of_memory_are_in_the_dead_letter,
    a_job_whose_program_finds_the_disk_full_waits_until_there_is_room,
    faults_of_the_configuration_come_all_at_once,
    every_model_that_cannot_be_loaded_is_named,
    an_idle_model_makes_room_for_another,
);

const ONE_PROCESS: &str = "instances = 1\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }";

/// Two good jobs of two items, and between them one with an item that the program calls invalid, wait for the same pass.
async fn together(env: &TestEnv, served: &Served, worker: &Worker, refused: &str) -> Result<Mailbox> {
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("gate", ["wait gate"])?).await?;
    processes_run(worker, 1).await?;
    for (id, items) in
        [("before", ["echo 0", "echo 1"]), ("bad", ["echo 2", refused]), ("after", ["echo 4", "echo 5"])]
    {
        env.client.publish(MODEL, env.job(id, items)?).await?;
    }
    until("all three wait", async || {
        Ok((Scrape::of(worker).await?.sum("vramq_jobs_waiting", &[]) == 3.0).then_some(()))
    })
    .await?;
    std::fs::write(served.path("gate"), "")?;
    outputs(&mut replies, "gate").await?;
    Ok(replies)
}

/// What came of the three jobs of [`together`]: the outputs of the good ones, and how the bad one ended.
async fn ends(replies: &mut Mailbox) -> Result<([Vec<Value>; 2], vramq_schemas::Failure)> {
    let (mut before, mut after, mut failure, mut done) = (Vec::new(), Vec::new(), None, 0);
    while done < 2 || failure.is_none() {
        let reply = replies.next().await?;
        if reply.kind()? == ReplyKind::Failed {
            ensure!(reply.id() == "bad", "{} failed: {:?}", reply.id(), reply.failure());
            failure = Some(reply.failure()?);
            continue;
        }
        let values = reply.outputs()?.outputs.into_iter().map(|output| match output {
            Output::Json(value) => Ok(value),
            other => anyhow::bail!("no JSON: {other:?}"),
        });
        match reply.id() {
            "before" => before.extend(values.collect::<Result<Vec<_>>>()?),
            "after" => after.extend(values.collect::<Result<Vec<_>>>()?),
            // Its first item was finished before.
            "bad" => ensure!(reply.kind()? == ReplyKind::Part, "{:?}", reply.properties),
            other => anyhow::bail!("a reply to {other}"),
        }
        done += usize::from(reply.kind()? == ReplyKind::Done);
    }
    Ok(([before, after], failure.context("no failure")?))
}

async fn an_invalid_item_ends_its_job_and_the_neighbours_run(env: &mut TestEnv) -> Result<()> {
    for text in ["pass failed", "job dead-lettered"] {
        env.announce(text);
    }
    let served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = together(env, &served, &worker, "refuse no picture").await?;
    let ([before, after], failure) = ends(&mut replies).await?;
    ensure!(
        (failure.reason, failure.error.as_str()) == (Reason::InvalidInput, "inputs[1]: no picture"),
        "{failure:?}"
    );
    ensure!(before.len() == 2 && after.len() == 2, "{before:?} {after:?}");
    let in_one_pass = |output: &Value| output["items"] == 6;
    ensure!(before.iter().any(in_one_pass), "they did not share a pass: {before:?} {after:?}");
    let letter = env.dead_letters().await?.next().await?;
    ensure!(
        letter.id() == "bad" && letter.dead_letter()?.reason == Reason::InvalidInput,
        "{:?}",
        letter.properties
    );
    ensure!(letter.dead_letter()?.error == "inputs[1]: no picture", "{:?}", letter.dead_letter());
    worker.drain().await?;
    ensure!(worker.total("recomputed").await? == 0 && worker.log.count("process loaded") == 1);
    Ok(())
}

async fn an_invalid_item_that_is_not_named_is_found(env: &mut TestEnv) -> Result<()> {
    for text in ["pass failed", "job dead-lettered"] {
        env.announce(text);
    }
    let served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = together(env, &served, &worker, "refuse_one no picture").await?;
    let ([before, after], failure) = ends(&mut replies).await?;
    // The item that was left of the job ran alone, so that it is known.
    ensure!(
        (failure.reason, failure.error.as_str()) == (Reason::InvalidInput, "inputs[1]: no picture"),
        "{failure:?}"
    );
    ensure!(before.len() == 2 && after.len() == 2, "{before:?} {after:?}");
    ensure!(env.dead_letters().await?.next().await?.dead_letter()?.reason == Reason::InvalidInput);
    worker.drain().await?;
    ensure!(worker.total("recomputed").await? == 0 && worker.log.count("process loaded") == 1);
    Ok(())
}

async fn bytes_of_a_media_type_that_the_model_does_not_take_are_rejected(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let _served = Served::new(env, ONE_PROCESS, &[("ACCEPTS", "text audio/*")])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let job = |id: &str, bytes: &[u8]| {
        let inputs = vec![Input::Text("echo it".to_owned()), Input::Bytes(bytes.to_vec())];
        Message::inputs(env.setup.encoding, MODEL, id, REPLIES, inputs)
    };
    env.client.publish(MODEL, job("image", b"\x89PNG\r\n\x1a\n")?).await?;
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::InvalidInput, "{failure:?}");
    ensure!(failure.error.contains("input 1 is image/png; the model takes text, audio/*"), "{failure:?}");
    ensure!(env.dead_letters().await?.next().await?.dead_letter()?.reason == Reason::InvalidInput);
    // What is known to be audio is taken; what nothing is known of is left to the program.
    for (id, bytes) in [("audio", &b"fLaC"[..]), ("unknown", &b"what is it"[..])] {
        env.client.publish(MODEL, job(id, bytes)?).await?;
        let (found, _) = outputs(&mut replies, id).await?;
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        ensure!(found[1]["bytes"] == hex, "{found:?}");
    }
    worker.drain().await?;
    ensure!(worker.log.find("pass failed").is_none(), "it came as far as the program");
    Ok(())
}

/// The reason, what the letter says, and whether the process that did it serves the next job.
const WRONG: [(&str, Reason, &str, bool); 5] = [
    ("skip", Reason::EngineFailed, "run returned 0 outputs for 1 items; item 0 has none", true),
    ("babble 5", Reason::EngineFailed, "ValueError: what went wrong", true),
    ("again it", Reason::EngineFailed, "run returned more than 1 outputs for 1 items", true),
    ("garble", Reason::EngineFailed, "protocol fault: a header of", false),
    ("refuse no picture", Reason::InvalidInput, "inputs[0]: no picture", true),
];

async fn mistakes_of_a_program_are_in_the_dead_letter(env: &mut TestEnv) -> Result<()> {
    for text in ["pass failed", "job dead-lettered"] {
        env.announce(text);
    }
    let _served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    let mut pid = None;
    for (text, reason, said, is_kept) in WRONG {
        env.client.publish(MODEL, env.job("next", ["echo it"])?).await?;
        let before = pid_of(&outputs(&mut replies, "next").await?.0[0])?;
        ensure!(pid.is_none_or(|expected| expected == before), "{text}: another process came in between");
        env.client.publish(MODEL, env.job(text, [text])?).await?;
        let failure = replies.next().await?.failure()?;
        ensure!(failure.reason == reason && failure.error.contains(said), "{text}: {failure:?}");
        let letter = letters.next().await?;
        let dossier = letter.dead_letter()?;
        ensure!(
            letter.id() == text && dossier.reason == reason && dossier.error.contains(said),
            "{text}: {dossier:?}"
        );
        // Of what was printed, the last.
        ensure!(dossier.error.len() < 4096, "{text}: {} bytes", dossier.error.len());
        let printed = ["xxxxxxxx", "what went wrong"].iter().any(|words| dossier.error.contains(words));
        ensure!(printed == text.starts_with("babble"), "{text}: what another job made it print: {dossier:?}");
        pid = is_kept.then_some(before);
    }
    worker.drain().await?;
    worker.log.counts("process loaded", 2).await?;
    Ok(())
}

/// Without a size: then no wait helps, although the model is taken to need less than is free.
async fn the_words_of_a_program_about_its_out_of_memory_are_in_the_dead_letter(
    env: &mut TestEnv,
) -> Result<()> {
    const SAID: &str = "vae: no room for the attention";
    env.announce("out of memory");
    env.announce("job dead-lettered");
    let _served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    env.client.publish(MODEL, env.job("job", ["echo first", "exhaust no room for the attention"])?).await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.outputs()?.outputs.len() == 1, "{:?}", part.properties);
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::OutOfMemory && failure.error.contains(SAID), "{failure:?}");
    let dossier = letters.next().await?.dead_letter()?;
    ensure!(dossier.error.contains(SAID) && !dossier.error.contains("fragmented"), "{dossier:?}");
    worker.log.wait_for(SAID).await?;
    worker.drain().await
}

/// Two outputs have no room in a reply of 1 MiB, the first one has. What was finished before is answered, and the next job runs.
async fn a_program_that_answers_too_much_costs_its_job_only(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let _served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[&format!("model.{MODEL}.reply_mib_max=1")]).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    let large = format!("echo {}", "x".repeat(600 << 10));
    env.client.publish(MODEL, env.job("large", [&large[..], &large, "echo end"])?).await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.outputs()?.outputs.len() == 1, "{:?}", part.properties);
    let failure = replies.next().await?.failure()?;
    let said =
        "with the output of item 1 the replies take up to 1.2 MiB, the model's reply_mib_max allows 1.0 MiB";
    ensure!(failure.reason == Reason::TooLarge && failure.error.contains(said), "{failure:?}");
    let letter = letters.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::TooLarge, "{:?}", letter.dead_letter());
    env.client.publish(MODEL, env.job("next", ["echo it"])?).await?;
    outputs(&mut replies, "next").await?;
    worker.drain().await
}

/// The three are finished in one pass. The job ends with its last item, so that its replies were to end with `done`.
async fn an_output_that_no_reply_holds_does_not_cost_those_before_it(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let _served = Served::new(env, ONE_PROCESS, &[])?;
    let worker = consuming(env, &[]).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    env.client.publish(MODEL, env.job("large", ["echo first", "echo second", "fill 17"])?).await?;
    let part = replies.next().await?;
    ensure!(part.kind()? == ReplyKind::Part && part.outputs()?.outputs.len() == 2, "{:?}", part.properties);
    let failure = replies.next().await?.failure()?;
    ensure!(failure.reason == Reason::TooLarge, "{failure:?}");
    let letter = letters.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::TooLarge, "{:?}", letter.dead_letter());
    let reached = JobHeaders::read(&letter.headers())?;
    ensure!(reached.items_done == 2, "{reached:?}");
    figures(&worker, "one part of a reply", |figures| figures.sum("vramq_reply_parts_total") == 1).await?;
    env.client.publish(MODEL, env.job("next", ["echo it"])?).await?;
    outputs(&mut replies, "next").await?;
    worker.drain().await
}

/// The file in the scratch folder leads to `/dev/full` at first, which answers as a file on a full disk does.
async fn a_job_whose_program_finds_the_disk_full_waits_until_there_is_room(env: &mut TestEnv) -> Result<()> {
    env.announce("pass failed");
    let served = Served::new(env, ONE_PROCESS, &[])?;
    std::os::unix::fs::symlink("/dev/full", served.path("disk"))?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("full", ["echo first", "write disk"])?).await?;
    until("the job waits", async || {
        let waits = Scrape::of(&worker).await?.sum("vramq_jobs_requeued_total", &[("cause", "scratch-full")]);
        Ok((waits >= 1.0).then_some(()))
    })
    .await?;
    // What was finished before is answered.
    let part = replies.next().await?;
    ensure!(part.id() == "full" && part.kind()? == ReplyKind::Part, "{:?}", part.properties);
    env.client.publish(MODEL, env.job("beside", ["echo it"])?).await?;
    outputs(&mut replies, "beside").await?;
    std::fs::remove_file(served.path("disk"))?;
    let last = replies.next().await?;
    ensure!(last.id() == "full" && last.kind()? == ReplyKind::Done, "{:?}", last.failure());
    ensure!((last.reply()?.offset, last.reply()?.attempt) == (1, 0), "{:?}", last.reply());
    ensure!(std::fs::read(served.path("disk"))? == b"x");
    worker.drain().await?;
    worker.log.counts("process loaded", 1).await?;
    Ok(())
}

async fn faults_of_the_configuration_come_all_at_once(env: &mut TestEnv) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("worker.toml");
    let text = format!(
        "[model.relative]\nengine = \"process\"\ncommand = [\"python3\", \"serve.py\"]\nitem_max = 8\n\
         [model.missing]\nengine = \"process\"\ncommand = [\"/opt/no/such/python\", \"serve.py\"]\nload_s = \"long\"\n\
         [model.whole]\nengine = \"process\"\ncommand = [{:?}]\nvram = {{ per = \"tokens\" }}\n",
        python()?,
    );
    std::fs::write(&config, text)?;
    for subcommand in ["run", "doctor"] {
        let mut worker = command("vramq-worker")?;
        worker.args([subcommand, "--broker-url", &env.url, "--config"]).arg(&config);
        let ended = run_to_end(worker).await?;
        ensure!(ended.code == Some(2), "{subcommand}: {ended:?}");
        for words in [
            "model.relative.command: starts with \"python3\"; its program must be an absolute path",
            "model.relative.item_max: is not a known key",
            "model.missing.command: the program \"/opt/no/such/python\" cannot be used",
            "model.missing.load_s: is \"long\"; it must be a number",
            "model.whole.vram.per: is \"tokens\"; it must be one of",
        ] {
            ensure!(ended.stderr.contains(words), "{subcommand}: `{words}` is not in {}", ended.stderr);
        }
    }
    ensure!(env.vhost.worker_connections().await?.is_empty());
    Ok(())
}

/// Three models that cannot be loaded, each for a reason of its own, beside one that can.
async fn every_model_that_cannot_be_loaded_is_named(env: &mut TestEnv) -> Result<()> {
    for text in ["cannot start", "cannot load the model"] {
        env.announce(text);
    }
    let served = Served::new(env, "load_s = 2", &[("LOAD", "hang")])?;
    let hangs = std::fs::read_to_string(served.config())?;
    let fails = hangs.replace(&format!("[model.{MODEL}"), "[model.second");
    let fails = fails.replace("load_s = 2", "").replace("LOAD = \"hang\"", "");
    std::fs::write(served.config(), hangs + &fails)?;
    std::fs::remove_file(served.path("weights"))?;
    let empty = tempfile::tempdir()?;
    let encoder = format!("model.third.path={}", empty.path().display());
    let settings = [&*encoder, "model.beside.engine=echo"];
    let broken =
        [(MODEL, "not loaded within 2 s"), ("second", "the weights are gone"), ("third", "config.json")];

    let worker = env.spawn_bare_worker(&settings)?;
    ensure!(worker.exited().await? == Some(4));
    for (model, cause) in broken {
        let line = worker.log.find(&format!("cannot start: load model `{model}`"));
        let line = line.with_context(|| format!("{model} is not named"))?;
        ensure!(line.text().contains(cause), "`{cause}` is not in: {}", line.text());
    }
    worker.log.counts("cannot start", broken.len()).await?;
    ensure!(env.vhost.worker_connections().await?.is_empty());

    let mut doctor = command("vramq-worker")?;
    doctor.args(["doctor", "--config"]).arg(served.config());
    doctor.args(settings.iter().flat_map(|setting| ["--set", setting]));
    let ended = run_to_end(doctor).await?;
    ensure!(ended.code == Some(4), "{ended:?}");
    for (model, cause) in broken {
        let text = ended.stderr.split("vramq-worker: ").find(|text| text.contains(&format!("`{model}`")));
        ensure!(text.is_some_and(|text| text.contains(cause)), "{model}: `{cause}` is not in {ended:?}");
    }
    // The one that can be loaded is shown.
    ensure!(ended.stdout.lines().any(|line| line.starts_with("beside ")), "{ended:?}");
    ensure!(ended.stdout.contains("3 model(s) could not be loaded"), "{ended:?}");
    Ok(())
}

/// Two models of 600 MiB on a device of 1,000: the one that is warm and idle does not starve the other.
async fn an_idle_model_makes_room_for_another(env: &mut TestEnv) -> Result<()> {
    let device = SharedDevice::new(1000)?;
    let served = Served::of_600_mib(env, &device)?;
    let [file, memory, reserve] = device.settings();
    let first = std::fs::read_to_string(served.config())?;
    let second = first.replace(&format!("[model.{MODEL}"), "[model.second");
    std::fs::write(served.config(), first + &second)?;
    let worker = consuming(env, &[&file, &memory, &reserve]).await?;
    let mut replies = env.replies().await?;
    for (round, model) in [MODEL, "second", MODEL, "second"].into_iter().enumerate() {
        let id = format!("{round}");
        let job = Message::texts(env.setup.encoding, model, &id, REPLIES, ["echo it"])?;
        env.client.publish(model, job).await?;
        ensure!(outputs(&mut replies, &id).await?.0[0]["text"] == "it");
        ensure!(device.memory().free == 400 << 20, "{:?}", device.memory());
    }
    worker.drain().await?;
    ensure!(device.memory().free == 1000 << 20, "{:?}", device.memory());
    Ok(())
}
