//! Inputs from object stores, and large outputs to them: against a real S3 server with one valid key.

use anyhow::{Context as _, Result, ensure};
use tempfile::TempDir;
use vramq_schemas::{Input, Output, Reason};
use vramq_tests::metrics::Scrape;
use vramq_tests::object_server::{BUCKET, KEY, ObjectServer};
use vramq_tests::on_one_setup;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::web_server::SHA256_OF_TEST;

use crate::stores::{done, echoed, publish};

on_one_setup!(
    objects_are_inputs_and_outputs,
    an_object_that_cannot_be_had_ends_its_job,
    an_object_store_that_hangs_makes_jobs_wait_and_outputs_go_with_replies,
);

/// The options of two stores of a server's bucket: `in`, with a key of its own, and `out`, with that of the environment.
struct Stores {
    options: Vec<String>,
    /// With the file of the key's secret.
    _folder: TempDir,
}

impl Stores {
    fn of(env: &mut TestEnv, server: &ObjectServer) -> Result<Self> {
        env.set_environment("AWS_ACCESS_KEY_ID", KEY);
        env.set_environment("AWS_SECRET_ACCESS_KEY", KEY);
        let folder = tempfile::tempdir()?;
        let secret = folder.path().join("secret");
        std::fs::write(&secret, format!("{KEY}\n"))?;
        let endpoint = server.endpoint();
        let options = vec![
            format!("store.in.url=s3://{BUCKET}/in"),
            format!("store.in.endpoint={endpoint}"),
            format!("store.in.access_key_id={KEY}"),
            format!("store.in.secret_file={}", secret.display()),
            "store.in.object_mib_max=1".to_owned(),
            format!("store.out.url=s3://{BUCKET}/out/deep/"),
            format!("store.out.endpoint={endpoint}"),
            format!("model.{MODEL}.output_store=out"),
            format!("model.{MODEL}.output_above_kib=1"),
        ];
        Ok(Self { options, _folder: folder })
    }

    /// The options as a worker takes them.
    fn with<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        self.options.iter().map(String::as_str).chain(more.iter().copied()).collect()
    }
}

async fn objects_are_inputs_and_outputs(env: &mut TestEnv) -> Result<()> {
    let server = ObjectServer::start()?;
    let stores = Stores::of(env, &server)?;
    server.put("in/deep/a%20b", b"test").await?;
    // The replies have no room for what is large.
    let reply_max = format!("model.{MODEL}.reply_mib_max=1");
    let worker = env.worker(&stores.with(&[&reply_max])).await?;
    let mut replies = env.replies().await?;
    let (large, object) = (vec![9; 2 << 20], format!("s3://{BUCKET}/in/deep/a%20b"));
    let (mut first, inputs) = (None, || {
        let digest = format!("{object}#sha256={SHA256_OF_TEST}&type=text/plain");
        vec![Input::Uri(object.clone()), Input::Uri(digest), Input::Bytes(large.clone())]
    });
    for _ in 0..2 {
        publish(env, "job", inputs()).await?;
        let (_, outputs) = done(&mut replies, "job").await?;
        let [one, two, Output::Uri(uri)] = &outputs[..] else { anyhow::bail!("{outputs:?}") };
        ensure!(*one == echoed(b"test") && *two == echoed(b"test"), "{outputs:?}");
        let url = uri.split('#').next().unwrap_or_default();
        let key = url.strip_prefix(&format!("s3://{BUCKET}/")).with_context(|| uri.clone())?;
        ensure!(key.starts_with("out/deep/") && key.ends_with("-2"), "{uri}");
        ensure!(uri.ends_with("&type=application/octet-stream"), "{uri}");
        ensure!(server.get(key).await?.as_deref() == Some(&large[..]), "other bytes are at {key}");
        // The same job again writes over its own object.
        ensure!(first.get_or_insert_with(|| uri.clone()) == uri, "{uri} is not {first:?}");
        ensure!(server.keys("").await? == ["in/deep/a b", key], "{:?}", server.keys("").await?);
    }
    // An output is the input of another job as it is, digest included.
    publish(env, "next", vec![Input::Uri(first.context("no reference")?)]).await?;
    let (_, outputs) = done(&mut replies, "next").await?;
    let [Output::Uri(again)] = &outputs[..] else { anyhow::bail!("{outputs:?}") };
    ensure!(again.contains("-0#sha256="), "{again}");
    worker.drain().await
}

async fn an_object_that_cannot_be_had_ends_its_job(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let server = ObjectServer::start()?;
    let stores = Stores::of(env, &server)?;
    for key in ["in/test", "inside/test"] {
        server.put(key, b"test").await?;
    }
    server.put("in/large", &vec![7; (1 << 20) + 1]).await?;
    let worker = env.worker(&stores.with(&[])).await?;
    let (mut replies, mut letters) = (env.replies().await?, env.dead_letters().await?);
    let digest = "0".repeat(64);
    for (at, (key, reason, error)) in [
        ("in/none", Reason::ReferenceMissing, "the store has no s3://jobs/in/none"),
        (&*format!("in/test#sha256={digest}"), Reason::ReferenceMismatch, SHA256_OF_TEST),
        ("in/large", Reason::TooLarge, "store `in` allows 1.0 MiB (object_mib_max)"),
        ("inside/test", Reason::ReferenceDenied, "no store of this worker covers"),
        ("in/../inside/test", Reason::ReferenceDenied, "no store of this worker covers"),
        ("in/..%2finside/test", Reason::ReferenceDenied, "not a name"),
        ("in/test?versionId=1", Reason::ReferenceDenied, "has a query"),
        ("in/%ff", Reason::ReferenceDenied, "is not a key"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("case {at}");
        publish(env, &id, vec![Input::Uri(format!("s3://{BUCKET}/{key}"))]).await?;
        let failure = replies.next().await.with_context(|| key.to_owned())?;
        ensure!(failure.id() == id, "{key}: {}", failure.id());
        let failure = failure.failure().with_context(|| key.to_owned())?;
        ensure!(failure.reason == reason && failure.error.contains(error), "{key}: {failure:?}");
        ensure!(!failure.error.contains("127.0.0.1"), "the endpoint is no caller's business: {failure:?}");
        ensure!(letters.next().await?.dead_letter()?.reason == reason, "{key}");
    }
    publish(env, "fine", vec![Input::Uri(format!("s3://{BUCKET}/in/test"))]).await?;
    ensure!(done(&mut replies, "fine").await?.1 == [echoed(b"test")]);
    worker.drain().await
}

async fn an_object_store_that_hangs_makes_jobs_wait_and_outputs_go_with_replies(
    env: &mut TestEnv,
) -> Result<()> {
    env.announce("cannot write the output to its store");
    env.announce("a store did not answer");
    let server = ObjectServer::start()?;
    let stores = Stores::of(env, &server)?;
    server.put("in/test", b"test").await?;
    let worker = env.worker(&stores.with(&["store.in.timeout_s=2", "store.out.timeout_s=2"])).await?;
    let mut replies = env.replies().await?;
    server.pause()?;
    publish(env, "waits", vec![Input::Uri(format!("s3://{BUCKET}/in/test"))]).await?;
    until("the job waits", async || {
        let metrics = Scrape::of(&worker).await?;
        let waits = metrics.sum("vramq_jobs_requeued_total", &[("cause", "store-unavailable")]);
        Ok((waits >= 1.0).then_some(()))
    })
    .await?;
    let bytes = vec![1; 2048];
    publish(env, "large", vec![Input::Bytes(bytes.clone())]).await?;
    ensure!(done(&mut replies, "large").await?.1 == [echoed(&bytes)]);
    server.resume()?;
    let (reply, outputs) = done(&mut replies, "waits").await?;
    ensure!(outputs == [echoed(b"test")], "{outputs:?}");
    ensure!(reply.reply()?.attempt == 0, "waiting is no attempt: {:?}", reply.reply());
    worker.drain().await
}
