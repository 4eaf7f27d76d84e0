//! Inputs by reference, from real folders and a real web server; and large outputs, which go to a folder.

use std::collections::BTreeSet;
use std::os::unix::fs::symlink;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use serde_json::json;
use tempfile::TempDir;
use vramq_schemas::{Input, Output, Reason, ReplyKind};
use vramq_tests::caller::Caller;
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::metrics::Scrape;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::web_server::{BODY, SHA256_OF_TEST, WebServer};
use vramq_tests::worker::Worker;
use vramq_tests::{on_all_setups, on_one_setup, on_queue_types};

use crate::process::{Served, consuming};

on_all_setups!(references_are_fetched, large_outputs_go_to_a_folder);
on_queue_types!(a_reference_that_leads_nowhere_ends_its_job, a_store_that_does_not_work_makes_the_job_wait);
on_one_setup!(
    a_program_gets_the_bytes,
    a_private_address_is_not_asked,
    a_job_waits_for_a_store_not_for_ever,
    a_silent_store_costs_its_own_caller,
    without_stores_references_are_left_to_the_model,
);

/// A folder and a web server, which the worker has as stores.
struct Places {
    folder: TempDir,
    server: WebServer,
}

impl Places {
    async fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        std::fs::create_dir_all(folder.path().join("in/deep"))?;
        std::fs::create_dir(folder.path().join("out"))?;
        std::fs::write(folder.path().join("in/deep/test"), "test")?;
        std::fs::write(folder.path().join("secret"), "secret")?;
        symlink(folder.path().join("secret"), folder.path().join("in/link"))?;
        symlink(folder.path(), folder.path().join("in/way-out"))?;
        std::fs::write(folder.path().join("in/large"), vec![7; (1 << 20) + 1])?;
        Ok(Self { folder, server: WebServer::start().await? })
    }

    fn file(&self, path: &str) -> String {
        format!("file://{}/{path}", self.folder.path().display())
    }

    /// Settings of a worker that reads from both, objects of at most a MiB.
    fn settings(&self) -> Vec<String> {
        vec![
            format!("store.in.url={}", self.file("in")),
            "store.in.object_mib_max=1".to_owned(),
            format!("store.web.url={}", self.server.url("/a")),
            "store.web.private=true".to_owned(),
            "store.web.object_mib_max=1".to_owned(),
        ]
    }

    async fn worker(&self, env: &mut TestEnv, more: &[String]) -> Result<Worker> {
        let settings = [self.settings(), more.to_vec()].concat();
        env.worker(&settings.iter().map(String::as_str).collect::<Vec<_>>()).await
    }
}

pub async fn publish(env: &TestEnv, id: &str, inputs: Vec<Input>) -> Result<()> {
    let job = Message::inputs(env.setup.encoding, MODEL, id, REPLIES, inputs)?;
    env.client.publish(MODEL, job).await
}

pub async fn done(replies: &mut Mailbox, id: &str) -> Result<(Received, Vec<Output>)> {
    let reply = replies.next().await?;
    ensure!(reply.id() == id, "{} instead of {id}", reply.id());
    ensure!(reply.kind()? == ReplyKind::Done, "{:?}", reply.failure());
    let outputs = reply.outputs()?.outputs;
    Ok((reply, outputs))
}

pub fn echoed(bytes: &[u8]) -> Output {
    Output::Bytes { media_type: "application/octet-stream".to_owned(), bytes: bytes.to_vec() }
}

async fn references_are_fetched(env: &mut TestEnv) -> Result<()> {
    let places = Places::new().await?;
    let worker = places.worker(env, &[]).await?;
    let mut replies = env.replies().await?;
    let inputs = vec![
        Input::Text("inline".to_owned()),
        Input::Uri(places.file("in/deep/test")),
        Input::Uri(places.server.url("/a/object?signature=1")),
        Input::Bytes(vec![1, 2, 3]),
        Input::Uri(places.server.url("/a/hinted")),
        Input::Uri(format!("{}#sha256={SHA256_OF_TEST}&type=text/plain", places.file("in/deep/test"))),
    ];
    publish(env, "mixed", inputs).await?;
    let (_, outputs) = done(&mut replies, "mixed").await?;
    let inline = Output::Json(json!("inline"));
    let expected = [inline, echoed(b"test"), echoed(BODY), echoed(&[1, 2, 3]), echoed(BODY), echoed(b"test")];
    ensure!(outputs == expected, "{outputs:?}");
    // Of a job that was answered in part, only what is left is fetched.
    let inputs = vec![Input::Uri(places.server.url("/a/missing")), Input::Uri(places.file("in/deep/test"))];
    let job = Message::inputs(env.setup.encoding, MODEL, "begun", REPLIES, inputs)?;
    let job = job.with_header("items-done", AMQPValue::LongLongInt(1)).as_worker();
    env.client.publish(MODEL, job).await?;
    let (reply, outputs) = done(&mut replies, "begun").await?;
    ensure!((reply.reply()?.offset, &outputs[..]) == (1, &[echoed(b"test")][..]), "{outputs:?}");
    ensure!(places.server.asked("/a/missing") == 0);
    worker.drain().await
}

async fn a_reference_that_leads_nowhere_ends_its_job(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let places = Places::new().await?;
    let worker = places.worker(env, &[format!("model.{MODEL}.fetch_mib_max=1")]).await?;
    let (file, web) = (|path: &str| places.file(path), |path: &str| places.server.url(path));
    let half = vec![7; 600 << 10];
    std::fs::write(places.folder.path().join("in/half"), half)?;
    let wrong = "0".repeat(64);
    let cases = [
        (vec![file("in/link")], Reason::ReferenceDenied, "links are not followed"),
        (vec![file("in/way-out/secret")], Reason::ReferenceDenied, "links are not followed"),
        (vec![file("in/../secret")], Reason::ReferenceDenied, "no store of this worker covers"),
        (vec![file("in/..%2fsecret")], Reason::ReferenceDenied, "not a name"),
        (vec![file("in/deep")], Reason::ReferenceDenied, "not a regular file"),
        (vec!["file:///etc/passwd".to_owned()], Reason::ReferenceDenied, "no store of this worker covers"),
        (vec![web("/other/object")], Reason::ReferenceDenied, "no store of this worker covers"),
        (vec!["s3://bucket/key".to_owned()], Reason::ReferenceDenied, "no store of this worker covers"),
        (vec![web("/a/redirect")], Reason::ReferenceDenied, "is a redirect (302)"),
        (vec![web("/a/refused")], Reason::ReferenceDenied, "with 403"),
        (vec![web("/a/gzip")], Reason::ReferenceDenied, "encoded as gzip"),
        (vec![file("in/none")], Reason::ReferenceMissing, "there is no file"),
        (vec![web("/a/missing")], Reason::ReferenceMissing, "(404)"),
        (vec![format!("{}#sha256={wrong}", file("in/deep/test"))], Reason::ReferenceMismatch, SHA256_OF_TEST),
        (vec![format!("{}#sha256={wrong}", web("/a/object"))], Reason::ReferenceMismatch, "has the sha256"),
        (vec![file("in/large")], Reason::TooLarge, "store `in` allows 1.0 MiB (object_mib_max)"),
        (vec![web("/a/large")], Reason::TooLarge, "has 2.0 MiB; store `web` allows 1.0 MiB"),
        (vec![web("/a/endless")], Reason::TooLarge, "has more; store `web` allows"),
        (vec![file("in/half"), file("in/half")], Reason::TooLarge, "more than 1.0 MiB (fetch_mib_max)"),
        (vec!["no reference".to_owned()], Reason::InvalidInput, "is not a URL"),
    ];
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    for (at, (references, reason, error)) in cases.into_iter().enumerate() {
        let what = format!("{references:?}");
        let id = format!("case {at}");
        publish(env, &id, references.into_iter().map(Input::Uri).collect()).await?;
        let failure = replies.next().await.with_context(|| what.clone())?;
        ensure!(failure.id() == id, "{what}: {}", failure.id());
        let failure = failure.failure().with_context(|| what.clone())?;
        ensure!(failure.reason == reason && failure.error.contains(error), "{what}: {failure:?}");
        ensure!(failure.error.starts_with("inputs["), "{what}: {failure:?}");
        let letter = letters.next().await.with_context(|| what.clone())?;
        ensure!(letter.dead_letter()?.reason == reason, "{what}: {:?}", letter.properties);
    }
    ensure!(places.server.asked("/a/behind") == 0, "the redirect was followed");
    ensure!(places.server.asked("/other/object") == 0);
    // None of it costs the next one anything.
    publish(env, "fine", vec![Input::Uri(places.file("in/deep/test"))]).await?;
    ensure!(done(&mut replies, "fine").await?.1 == [echoed(b"test")]);
    worker.drain().await
}

async fn a_store_that_does_not_work_makes_the_job_wait(env: &mut TestEnv) -> Result<()> {
    // Where the machine is slow: a failure in less than two seconds is no silence.
    env.announce("a store did not answer");
    let places = Places::new().await?;
    let settings = [format!("store.later.url={}", places.file("later")), "store.web.timeout_s=1".to_owned()];
    let worker = places.worker(env, &settings).await?;
    let mut replies = env.replies().await?;
    let faults = [places.server.url("/a/busy"), places.server.url("/a/slow"), places.server.url("/a/cut")];
    for reference in faults.into_iter().chain([places.file("later/object")]) {
        publish(env, &reference, vec![Input::Uri(reference.clone())]).await?;
    }
    // Meanwhile others are answered.
    publish(env, "other", vec![Input::Uri(places.file("in/deep/test"))]).await?;
    until("four jobs wait", async || {
        let metrics = Scrape::of(&worker).await?;
        let waits = metrics.sum("vramq_jobs_requeued_total", &[("cause", "store-unavailable")]);
        Ok((waits >= 4.0).then_some(()))
    })
    .await?;
    // The disk is mounted.
    std::fs::create_dir(places.folder.path().join("new"))?;
    std::fs::write(places.folder.path().join("new/object"), BODY)?;
    std::fs::rename(places.folder.path().join("new"), places.folder.path().join("later"))?;
    for _ in 0..5 {
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done, "{}: {:?}", reply.id(), reply.failure());
        let expected = if reply.id() == "other" { echoed(b"test") } else { echoed(BODY) };
        ensure!(reply.outputs()?.outputs == [expected], "{}", reply.id());
        ensure!(reply.reply()?.attempt == 0, "waiting is no attempt: {:?}", reply.reply());
    }
    worker.drain().await
}

async fn a_job_waits_for_a_store_not_for_ever(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let places = Places::new().await?;
    let worker = places.worker(env, &[]).await?;
    let inputs = vec![Input::Uri(places.server.url("/a/busy"))];
    let job = Message::inputs(env.setup.encoding, MODEL, "patient", REPLIES, inputs)?;
    let job = job.with_header("vramq-store-waits", AMQPValue::LongLongInt(64));
    env.client.publish(MODEL, job.as_worker()).await?;
    let failure = env.replies().await?.next().await?.failure()?;
    ensure!(failure.reason == Reason::StoreUnavailable, "{failure:?}");
    ensure!(
        failure.error.contains("with 503") && failure.error.contains("waited for it 64 times"),
        "{failure:?}"
    );
    ensure!(env.dead_letters().await?.next().await?.dead_letter()?.reason == Reason::StoreUnavailable);
    worker.drain().await
}

/// One caller's jobs fill all slots and refer to a store that takes connections and says nothing.
async fn a_silent_store_costs_its_own_caller(env: &mut TestEnv) -> Result<()> {
    env.announce("a store did not answer");
    let places = Places::new().await?;
    let settings = [format!("model.{MODEL}.slots_max=2"), "store.web.timeout_s=3".to_owned()];
    let worker = places.worker(env, &settings).await?;
    let other = Caller::new(env, "other").await?;
    let (mut replies, mut others) = (env.replies().await?, other.client.mailbox(&other.replies).await?);
    let paths: Vec<_> = (0..8).map(|number| format!("/a/{number}/silent")).collect();
    let asked = || paths.iter().map(|path| places.server.asked(path)).sum::<usize>();
    for path in &paths {
        publish(env, path, vec![Input::Uri(places.server.url(path))]).await?;
    }
    until("the store is asked", async || Ok((asked() >= 2).then_some(()))).await?;
    other.client.publish(MODEL, other.job("fine", ["text"])?).await?;
    let (_, outputs) = done(&mut others, "fine").await?;
    ensure!(outputs == [Output::Json(json!("text"))], "{outputs:?}");
    ensure!(
        asked() <= paths.len() / 2,
        "{} of {} jobs for the silent store were tried first",
        asked(),
        paths.len()
    );
    // No job is lost by that.
    places.server.speak();
    let mut answered = BTreeSet::new();
    for _ in &paths {
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done, "{}: {:?}", reply.id(), reply.failure());
        answered.insert(reply.id().to_owned());
    }
    ensure!(answered.len() == paths.len(), "{answered:?}");
    worker.drain().await
}

async fn a_private_address_is_not_asked(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let places = Places::new().await?;
    let port = places.server.url("/").rsplit(':').next().map(str::to_owned).context("no port")?;
    let port = port.trim_end_matches('/').to_owned();
    let settings = [
        format!("store.web.url=http://127.0.0.1:{port}/"),
        // A name that leads inside is no better.
        format!("store.name.url=http://localhost:{port}/"),
    ];
    let worker = env.worker(&settings.each_ref().map(String::as_str)).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    for host in ["127.0.0.1", "localhost"] {
        publish(env, host, vec![Input::Uri(format!("http://{host}:{port}/a/object"))]).await?;
        let failure = replies.next().await?.failure()?;
        ensure!(failure.reason == Reason::ReferenceDenied, "{failure:?}");
        ensure!(failure.error.contains("is at a private address"), "{failure:?}");
        letters.next().await?;
    }
    ensure!(places.server.asked("/a/object") == 0);
    worker.drain().await
}

async fn a_program_gets_the_bytes(env: &mut TestEnv) -> Result<()> {
    let places = Places::new().await?;
    let _served = Served::new(env, "vram = { mib_per_unit = 1 }", &[])?;
    let settings = places.settings();
    let worker = consuming(env, &settings.iter().map(String::as_str).collect::<Vec<_>>()).await?;
    let mut replies = env.replies().await?;
    let inputs = vec![Input::Uri(places.server.url("/a/object")), Input::Bytes(BODY.to_vec())];
    publish(env, "bytes", inputs).await?;
    let (_, outputs) = done(&mut replies, "bytes").await?;
    let hex: String = BODY.iter().map(|byte| format!("{byte:02x}")).collect();
    let expected = Output::Json(json!({"bytes": hex}));
    ensure!(outputs == [expected.clone(), expected], "{outputs:?}");
    worker.drain().await
}

async fn without_stores_references_are_left_to_the_model(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    publish(env, "as it is", vec![Input::Uri("s3://bucket/key".to_owned())]).await?;
    let (_, outputs) = done(&mut replies, "as it is").await?;
    ensure!(outputs == [Output::Uri("s3://bucket/key".to_owned())], "{outputs:?}");
    worker.drain().await
}

fn files(folder: &Path) -> Result<usize> {
    Ok(std::fs::read_dir(folder)?.count())
}

async fn large_outputs_go_to_a_folder(env: &mut TestEnv) -> Result<()> {
    let places = Places::new().await?;
    let settings = [
        format!("store.out.url={}", places.file("out")),
        format!("model.{MODEL}.output_store=out"),
        format!("model.{MODEL}.output_above_kib=1"),
        // The replies have no room for what is large.
        format!("model.{MODEL}.reply_mib_max=1"),
    ];
    let worker = places.worker(env, &settings).await?;
    let (large, small, out) = (vec![9; 2 << 20], vec![1; 1024], places.folder.path().join("out"));
    let text = "x".repeat(1025);
    let inputs = || vec![Input::Bytes(small.clone()), Input::Bytes(large.clone()), Input::Text(text.clone())];
    let (mut replies, mut first) = (env.replies().await?, None);
    for _ in 0..2 {
        publish(env, "large", inputs()).await?;
        let (_, outputs) = done(&mut replies, "large").await?;
        let [one, Output::Uri(two), Output::Uri(three)] = &outputs[..] else {
            anyhow::bail!("{outputs:?}");
        };
        ensure!(*one == echoed(&small), "a small one is in the reply");
        let read = |uri: &str| {
            let path = uri.split('#').next().and_then(|url| url.strip_prefix("file://")).map(str::to_owned);
            std::fs::read(path.unwrap_or_default()).with_context(|| uri.to_owned())
        };
        ensure!(read(two)? == large && two.contains("-1#sha256="), "{two}");
        ensure!(
            read(three)? == serde_json::to_vec(&text)? && three.ends_with("&type=application/json"),
            "{three}"
        );
        // The same job again writes over its own files.
        ensure!(first.get_or_insert_with(|| two.clone()) == two, "{two} is not {first:?}");
        ensure!(files(&out)? == 2, "{} files", files(&out)?);
    }
    // An output is the input of another job as it is, digest included.
    let reference = first.context("no reference")?;
    let inputs = vec![Input::Uri(reference.clone()), Input::Uri(places.file("in/deep/test"))];
    publish(env, "next", inputs).await?;
    let (_, outputs) = done(&mut replies, "next").await?;
    let [Output::Uri(again), test] = &outputs[..] else { anyhow::bail!("{outputs:?}") };
    ensure!(*test == echoed(b"test") && again.contains("-0#sha256="), "{outputs:?}");
    let digest = |uri: &str| uri.split('#').nth(1).map(str::to_owned);
    ensure!(digest(again) == digest(&reference), "{again} {reference}");
    ensure!(files(&out)? == 3, "{} files", files(&out)?);
    worker.drain().await
}
