//! The main job with a real model: texts in, the vectors of the independent reference out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tokio::process::Command;
use vramq_inference::engine::encoder::{ComputeType, CpuUnits, Level, Parts};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Encoding, Output, Reason, ReplyKind};
use vramq_tests::bert::{RandomBert, fixture, reference};
use vramq_tests::client::Client;
use vramq_tests::job::Message;
use vramq_tests::metrics::figures;
use vramq_tests::ports::ClosedPort;
use vramq_tests::programs::setting;
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::worker::{Ended, command, run_to_end, vramq};
use vramq_tests::{on_all_setups, on_one_setup};

const MODEL: &str = "minilm";

/// How far an element of a sparse vector may be from the reference's, also in split bf16 where the worker finds AMX.
const SPARSE_CLOSE: f32 = 5e-4;

/// The token of `!` in the fixtures' vocabulary.
const EXCLAMATION: usize = 5;

on_all_setups!(texts_become_the_references_vectors);
on_one_setup!(
    sparse_vectors_are_the_references_in_every_encoding,
    a_vector_that_is_not_finite_is_never_published,
    a_job_whose_replies_would_be_too_large_is_refused_before_it_runs,
    vramq_submit_writes_json_lines_and_npy,
    vramq_submit_says_by_its_code_what_was_wrong,
    a_model_that_does_not_fit_is_refused,
    a_model_that_is_not_there_is_refused,
    the_doctor_and_the_log_name_the_units,
);

/// Texts and vectors of `inference/tests/fixtures`, made by an independent library.
struct Reference {
    texts: Vec<String>,
    vectors: Vec<Vec<f32>>,
}

impl Reference {
    fn read() -> Result<Self> {
        let (texts, vectors) = reference("minilm")?;
        Ok(Self { texts, vectors })
    }

    /// The issue's bounds: cosine at least 0.99999, no element off by more than 1e-5.
    fn agrees(&self, at: usize, found: &[f32]) -> Result<()> {
        let expected = &self.vectors[at];
        ensure!(found.len() == expected.len(), "{} numbers", found.len());
        let dot =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
        let cosine = dot(expected, found) / (dot(expected, expected) * dot(found, found)).sqrt();
        let off = expected.iter().zip(found).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        ensure!(cosine >= 0.99999 && off <= 1e-5, "text {at}: cosine {cosine}, off by {off}");
        Ok(())
    }
}

fn weights() -> Result<PathBuf> {
    let folder = std::env::var_os("VRAMQ_TEST_MODEL").context(
        "VRAMQ_TEST_MODEL is not set: `make test` sets it; by hand: models/fetch, then its folder",
    )?;
    let folder = PathBuf::from(folder);
    ensure!(
        folder.join("model.safetensors").exists(),
        "{} has no weights: run models/fetch",
        folder.display()
    );
    Ok(folder)
}

async fn worker(env: &mut TestEnv) -> Result<()> {
    let path = format!("model.{MODEL}.path={}", weights()?.display());
    env.spawn_bare_worker(&[&path])?.consuming().await
}

async fn texts_become_the_references_vectors(env: &mut TestEnv) -> Result<()> {
    let reference = Reference::read()?;
    worker(env).await?;
    let job = Message::texts(env.setup.encoding, MODEL, "all", REPLIES, reference.texts.clone())?;
    env.client.publish(MODEL, job).await?;
    // Alone and together with others: batches do not change what comes out.
    for (at, text) in reference.texts.iter().enumerate() {
        let job = Message::texts(env.setup.encoding, MODEL, &at.to_string(), REPLIES, [text.as_str()])?;
        env.client.publish(MODEL, job).await?;
    }
    let mut replies = env.replies().await?;
    let (mut open, mut seen) = (1 + reference.texts.len(), 0);
    while open > 0 {
        let reply = replies.next().await?;
        // On a slow machine the job with all texts is answered in parts.
        open -= usize::from(reply.kind()? == ReplyKind::Done);
        let first = reply.id().parse().unwrap_or(0) + reply.reply()?.offset as usize;
        for (at, output) in reply.outputs()?.outputs.into_iter().enumerate() {
            let Output::Embedding(vector) = output else {
                anyhow::bail!("{output:?} is no embedding");
            };
            reference.agrees(first + at, &vector.values.to_f32())?;
            seen += 1;
        }
    }
    ensure!(
        seen == 2 * reference.texts.len(),
        "{seen} vectors of {} texts, each twice",
        reference.texts.len()
    );
    Ok(())
}

async fn sparse_vectors_are_the_references_in_every_encoding(env: &mut TestEnv) -> Result<()> {
    let (texts, vectors) = reference("tiny-splade")?;
    let path = format!("model.{MODEL}.path={}", fixture("tiny-splade"));
    env.spawn_bare_worker(&[&path])?.consuming().await?;
    let encodings = [Encoding::Json, Encoding::MessagePack, Encoding::Bincode];
    for encoding in encodings {
        let id = encoding.content_type();
        env.client.publish(MODEL, Message::texts(encoding, MODEL, id, REPLIES, texts.clone())?).await?;
    }
    let mut replies = env.replies().await?;
    let (mut open, mut seen) = (encodings.len(), 0);
    while open > 0 {
        let reply = replies.next().await?;
        open -= usize::from(reply.kind()? == ReplyKind::Done);
        let first = reply.reply()?.offset as usize;
        for (at, output) in reply.outputs()?.outputs.into_iter().enumerate() {
            let Output::Sparse(sparse) = output else { anyhow::bail!("{output:?} is not sparse") };
            let mut found = vec![0.0; vectors[first + at].len()];
            for (index, value) in sparse.indices().iter().zip(sparse.values()) {
                found[*index as usize] = *value;
            }
            let off = found.iter().zip(&vectors[first + at]).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            ensure!(off <= SPARSE_CLOSE, "{}: text {}: off by {off}", reply.id(), first + at);
            seen += 1;
        }
    }
    ensure!(
        seen == encodings.len() * texts.len(),
        "{seen} vectors of {} texts, each in each encoding",
        texts.len()
    );
    Ok(())
}

/// A damaged checkpoint gives NaN for one token. Only the job that has it fails, whatever shares its pass.
async fn a_vector_that_is_not_finite_is_never_published(env: &mut TestEnv) -> Result<()> {
    for text in ["job dead-lettered", "health probe", "pass failed"] {
        env.announce(text);
    }
    let model = RandomBert { broken_token: Some(EXCLAMATION), ..RandomBert::default() }.write()?;
    let path = format!("model.{MODEL}.path={}", model.folder().display());
    let worker = env.spawn_bare_worker(&[&path])?;
    worker.consuming().await?;
    let jobs = [("good", vec!["first time"]), ("bad", vec!["first", "first!"]), ("well", vec!["time"])];
    let jobs = jobs.map(|(id, texts)| Message::texts(env.setup.encoding, MODEL, id, REPLIES, texts));
    env.client.publish_all(MODEL, jobs.into_iter().collect::<Result<_>>()?).await?;
    let mut replies = env.replies().await?;
    let mut ends = BTreeMap::new();
    while ends.len() < 3 {
        let reply = replies.next().await?;
        match reply.kind()? {
            ReplyKind::Failed => {
                let failure = reply.failure()?;
                ensure!(failure.reason == Reason::EngineFailed, "{failure:?}");
                ensure!(failure.error.contains("not a finite number"), "{failure:?}");
                ends.insert(reply.id().to_owned(), "failed");
            }
            kind => {
                for output in reply.outputs()?.outputs {
                    let Output::Embedding(vector) = output else { anyhow::bail!("{output:?}") };
                    ensure!(vector.values.first_not_finite().is_none(), "{} has {vector:?}", reply.id());
                }
                if kind == ReplyKind::Done {
                    ends.insert(reply.id().to_owned(), "done");
                }
            }
        }
    }
    let ends: Vec<_> = ends.iter().map(|(id, end)| (id.as_str(), *end)).collect();
    ensure!(ends == [("bad", "failed"), ("good", "done"), ("well", "done")], "{ends:?}");
    let letter = env.client.mailbox(&dead_queue(MODEL)).await?.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::EngineFailed && letter.id() == "bad");
    worker.drain().await
}

async fn submit(env: &TestEnv, arguments: &[&str]) -> Result<Ended> {
    vramq(&env.url, &[&["submit", "--model", MODEL], arguments].concat()).await
}

async fn vramq_submit_writes_json_lines_and_npy(env: &mut TestEnv) -> Result<()> {
    let reference = Reference::read()?;
    worker(env).await?;
    let folder = std::env::temp_dir().join(format!("vramq-submit-{}", uuid::Uuid::now_v7().simple()));
    std::fs::create_dir(&folder)?;
    let path = |name: &str| folder.join(name).display().to_string();
    let lines: Vec<_> = reference.texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    std::fs::write(path("texts.jsonl"), lines.join("\n"))?;

    let ended =
        submit(env, &["--file", &path("texts.jsonl"), "-o", &path("out.jsonl"), "--job-items", "3"]).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let written = std::fs::read_to_string(path("out.jsonl"))?;
    let rows: Vec<Value> = written.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(rows.len() == reference.texts.len(), "{} rows", rows.len());
    for (at, row) in rows.iter().enumerate() {
        ensure!(row["index"] == at, "{row}");
        let numbers: Vec<f32> = serde_json::from_value(row["embedding"].clone())?;
        reference.agrees(at, &numbers)?;
    }

    let ended = submit(env, &["--file", &path("texts.jsonl"), "-o", &path("out.npy")]).await?;
    ensure!(ended.code == Some(0), "{ended:?}");
    let (dtype, rows) = read_by_numpy(&path("out.npy")).await?;
    ensure!(dtype == "float32" && rows.len() == reference.texts.len(), "{dtype}, {} rows", rows.len());
    for (at, row) in rows.iter().enumerate() {
        reference.agrees(at, row)?;
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}

/// The type of a file's numbers, and the rows, as NumPy reads them.
async fn read_by_numpy(file: &str) -> Result<(String, Vec<Vec<f32>>)> {
    const READ: &str = "import json, sys, numpy\n\
                        read = numpy.load(sys.argv[1], allow_pickle=False)\n\
                        print(json.dumps([str(read.dtype), read.tolist()]))";
    let mut python = Command::new(setting("VRAMQ_TEST_PYTHON")?);
    let output = python.args(["-c", READ, file]).output().await?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(serde_json::from_slice(&output.stdout)?)
}

async fn vramq_submit_says_by_its_code_what_was_wrong(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let no_queue = submit(env, &["text"]).await?;
    ensure!(no_queue.code == Some(4), "no queue for the model: {no_queue:?}");
    worker(env).await?;
    let usage = submit(env, &["--no-such-flag"]).await?;
    ensure!(usage.code == Some(2), "{usage:?}");
    let failed = submit(env, &["--params", r#"{"temperature": 1}"#, "text"]).await?;
    ensure!(failed.code == Some(1), "{failed:?}");
    let dead = dead_queue(MODEL);
    env.client.mailbox(&dead).await?.next().await?;
    Client::connect(&env.url).await?.close().await?;
    let mut away = command("vramq")?;
    let gone = ClosedPort::new()?;
    away.args([
        "submit",
        "--broker-url",
        &format!("amqp://guest:guest@{}/%2f", gone.address),
        "--model",
        MODEL,
        "text",
    ]);
    let away = run_to_end(away).await?;
    ensure!(away.code == Some(3), "{away:?}");
    Ok(())
}

async fn a_model_that_does_not_fit_is_refused(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let path = format!("model.{MODEL}.path={}", weights()?.display());
    // The weights alone are 86.7 MiB; then those with too little beside them for one job.
    for (memory, missing) in [(64, "22.1 MiB are missing"), (100, "MiB are missing")] {
        let memory = format!("device.cpu.memory_mib={memory}");
        let worker = env.spawn_bare_worker(&[&path, &memory, "device.cpu.reserve_mib=0"])?;
        ensure!(worker.exited().await? == Some(4), "{}", worker.log.text());
        let line = worker.log.find("cannot start").context("no message")?;
        ensure!(line.text().contains(missing), "{}", line.text());
        println!("{}", line.text());
    }
    Ok(())
}

async fn a_model_that_is_not_there_is_refused(env: &mut TestEnv) -> Result<()> {
    env.announce("cannot start");
    let worker = env.spawn_bare_worker(&["model.minilm.path=/no/such/folder"])?;
    ensure!(worker.exited().await? == Some(4), "{}", worker.log.text());
    ensure!(worker.log.text().contains("/no/such/folder"), "{}", worker.log.text());
    Ok(())
}

/// The units that this CPU computes a type on, in words.
fn units(dtype: ComputeType) -> String {
    let vectors = CpuUnits::vectors(Level::best());
    let units = match dtype {
        ComputeType::F32 => vectors,
        // Exact where the worker does not say otherwise.
        _ => CpuUnits::amx(Parts::Split).unwrap_or(vectors),
    };
    units.to_string()
}

async fn the_doctor_and_the_log_name_the_units(env: &mut TestEnv) -> Result<()> {
    let path = format!("model.{MODEL}.path={}", fixture("tiny-mean"));
    for dtype in [ComputeType::Auto, ComputeType::F32] {
        let (dtype, units) = (format!("model.{MODEL}.dtype={dtype}"), units(dtype));
        let mut doctor = command("vramq-worker")?;
        doctor.args(["doctor", "--set", &path, "--set", &dtype]);
        let ended = run_to_end(doctor).await?;
        ensure!(ended.code == Some(0), "{ended:?}");
        // What else the CPU has comes behind it.
        let said = format!("{MODEL}: computed in {units};");
        ensure!(ended.stdout.contains(&said), "`{said}` is not in: {}", ended.stdout);

        let worker = env.spawn_bare_worker(&[&path, &dtype])?;
        worker.consuming().await?;
        let line = worker.log.wait_for("chose the CPU units of the encoder").await?;
        let logged = line.field("units").and_then(Value::as_str).context("no units")?;
        ensure!(logged.starts_with(&format!("{units};")), "{}, not {units}", line.text());
        worker.drain().await?;
    }
    Ok(())
}

/// Texts of a small body whose vectors do not fit in a MiB of replies.
const TOO_MANY: usize = 10_000;

async fn a_job_whose_replies_would_be_too_large_is_refused_before_it_runs(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let path = format!("model.{MODEL}.path={}", fixture("tiny-long"));
    let worker = env.spawn_bare_worker(&[&path, &format!("model.{MODEL}.reply_mib_max=1")])?;
    worker.consuming().await?;
    let job = |id: &str, texts: usize| {
        Message::texts(env.setup.encoding, MODEL, id, REPLIES, (0..texts).map(|at| at.to_string()))
    };
    let too_large = job("too large", TOO_MANY)?;
    ensure!(too_large.body.len() < 1 << 20, "a body that is too large itself");
    env.client.publish(MODEL, too_large.clone()).await?;
    let mut replies = env.replies().await?;
    let failure = replies.next().await?.failure()?;
    let letter = env.client.mailbox(&dead_queue(MODEL)).await?.next().await?;
    let dossier = letter.dead_letter()?;
    ensure!(letter.body == too_large.body, "the dead letter is not the job");
    let counted = figures(&worker, "the job to end", |figures| {
        figures.sum("vramq_jobs_dead_lettered_total") == 1 && figures.sum("vramq_jobs_in_hand") == 0
    })
    .await?;
    ensure!(counted.sum("vramq_items_total") == 0 && counted.sum("vramq_passes_total") == 0, "it ran");

    // The arithmetic, with the width of a real vector.
    env.client.publish(MODEL, job("one", 1)?).await?;
    let outputs = replies.next().await?.outputs()?.outputs;
    let [Output::Embedding(vector)] = &outputs[..] else { anyhow::bail!("{outputs:?}") };
    let bytes = vector.values.to_f32().len() * size_of::<f32>();
    let arithmetic =
        format!("the model's reply_mib_max allows 1.0 MiB: {TOO_MANY} items x {bytes} bytes of output = ");
    for (reason, error) in [(failure.reason, &failure.error), (dossier.reason, &dossier.error)] {
        ensure!(reason == Reason::TooLarge && error.contains(&arithmetic), "{reason}: {error}");
    }
    ensure!(failure.error == dossier.error);
    figures(&worker, "the next job's item", |figures| figures.sum("vramq_items_total") == 1).await?;
    Ok(())
}
