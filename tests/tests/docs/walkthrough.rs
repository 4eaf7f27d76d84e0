//! Runs every command of docs/operating.md and docs/dead-letters.md as it is written, against a broker, workers and dead letters.

use anyhow::{Context as _, Result, ensure};
use lapin::types::AMQPValue;
use tempfile::TempDir;
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_tests::doc_runner::DocRunner;
use vramq_tests::job::Message;
use vramq_tests::metrics::Scrape;
use vramq_tests::on_queue_types;
use vramq_tests::programs::{program, root};
use vramq_tests::shared_device::{ECHO_ITEM_BYTES, SharedDevice};
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::{Worker, vramq};

on_queue_types!(every_command_does_what_the_pages_say);

/// The pages' model, the job that it cancels, and what they find among the dead letters.
const MODEL: &str = "minilm";
const CANCELLED: &str = "0198c2f4-7d5e";
const OUT_OF_MEMORY: usize = 14;
const EXPIRED: usize = 150;
const MALFORMED: usize = 3;

/// Where its jobs go that are for a larger device.
const LARGER: &str = "vramq.jobs.minilm-large";

fn job<T: Into<String>>(env: &TestEnv, id: &str, texts: impl IntoIterator<Item = T>) -> Result<Message> {
    Message::texts(env.setup.encoding, MODEL, id, REPLIES, texts)
}

async fn start(env: &mut TestEnv, name: &str, settings: &[&str]) -> Result<Worker> {
    let engine = format!("model.{MODEL}.engine=echo");
    let worker = env.spawn_named(name, &[&[engine.as_str(), "worker.heartbeat_s=1"], settings].concat())?;
    worker.consuming().await?;
    Ok(worker)
}

/// Waits until there are so many dead letters.
async fn buried(env: &TestEnv, count: usize) -> Result<()> {
    until(&format!("{count} dead letters"), async || {
        Ok((env.client.ready(&dead_queue(MODEL)).await? as usize == count).then_some(()))
    })
    .await
}

/// Somebody paused `worker-2`, and jobs expired. A small device, which is gone, had jobs that it had no room for.
async fn dead_letters(env: &mut TestEnv) -> Result<Worker> {
    for text in ["out of memory", "made to fail", "job dead-lettered"] {
        env.announce(text);
    }
    let paused = start(env, "worker-2", &[]).await?;
    until("worker-2 to be paused", async || {
        let paused = vramq(&env.url, &["control", "pause", "--worker", "worker-2"]).await?;
        Ok((paused.code == Some(0)).then_some(()))
    })
    .await?;
    for at in 0..EXPIRED {
        let late = job(env, &format!("late-{at}"), ["x"])?;
        env.client.publish(MODEL, late.with(|properties| properties.with_expiration("1".into()))).await?;
    }
    buried(env, EXPIRED).await?;
    let small = start(env, "worker-0", &[&format!("device.cpu.fault=above={}", ECHO_ITEM_BYTES - 1)]).await?;
    for at in 0..OUT_OF_MEMORY {
        env.client.publish(MODEL, job(env, &format!("large-{at}"), ["a", "b", "c", "d"])?).await?;
        if at == 0 {
            // The first one is the letter that the page explains. The worker learns a limit from it, which shortens the histories of the
            // later ones.
            buried(env, EXPIRED + 1).await?;
        }
    }
    for at in 0..MALFORMED {
        env.client.publish(MODEL, job(env, &format!("bad-{at}"), ["x"])?.with_body("no job")).await?;
    }
    buried(env, EXPIRED + OUT_OF_MEMORY + MALFORMED).await?;
    small.drain().await?;
    Ok(paused)
}

/// What the reader types first: the path of the programs, and the broker. `localhost:9464` stands for the port that was free.
async fn desk(env: &TestEnv, worker: &Worker, home: &TempDir) -> Result<Vec<String>> {
    let line = worker.log.wait_for("serving /livez").await?;
    let address = line.field("address").and_then(|it| it.as_str()).context("no address")?;
    std::fs::write(home.path().join(".curlrc"), format!("connect-to = \"localhost:9464:{address}\"\n"))?;
    let vramq = program("vramq")?;
    let programs = vramq.parent().context("no folder")?;
    Ok(vec![
        format!("cd {}; export HOME=$PWD XDG_STATE_HOME=$PWD", home.path().display()),
        format!("export PATH={}:$PATH VRAMQ_BROKER_URL={}", programs.display(), env.url),
    ])
}

/// docs/operating.md up to its section *Control*, docs/dead-letters.md, and the rest of docs/operating.md: `control` ends the worker that
/// the jobs of `dlq retry` go to.
fn pages() -> Result<[String; 3]> {
    let read = |name: &str| std::fs::read_to_string(root().join("docs").join(name));
    let operating = read("operating.md")?;
    let (before, after) = operating.split_once("\n## Control\n").context("no section Control")?;
    Ok([before.to_owned(), read("dead-letters.md")?, after.to_owned()])
}

async fn every_command_does_what_the_pages_say(env: &mut TestEnv) -> Result<()> {
    for queue in [REPLIES.to_owned(), LARGER.to_owned(), dead_queue(MODEL), jobs_queue(MODEL)] {
        env.leave(&queue);
    }
    let second = dead_letters(env).await?;
    // A worker with one job on the device, for as long as the walk takes, and another that waits.
    let device = SharedDevice::new(64)?;
    let first = start(env, "worker-1", &device.settings().each_ref().map(String::as_str)).await?;
    let leave = device.block().await?;
    for id in ["running", CANCELLED] {
        env.client.publish(MODEL, job(env, id, ["x", "y"])?).await?;
        until("the job in hand", async || {
            let waiting = if id == CANCELLED { 1.0 } else { 0.0 };
            let scrape = Scrape::of(&first).await?;
            let found = (scrape.sum("vramq_jobs_in_hand", &[]), scrape.sum("vramq_jobs_waiting", &[]));
            Ok((found == (1.0 + waiting, waiting)).then_some(()))
        })
        .await?;
    }
    let mut arguments = env.setup.queue.arguments();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(1000));
    env.client.declare_queue(LARGER, arguments).await?;

    let home = tempfile::tempdir()?;
    let runner = DocRunner::new(&desk(env, &first, &home).await?).await?;
    let mut count = 0;
    for page in pages()? {
        count += runner.walk(&page, &[]).await?;
    }
    ensure!(count >= 25, "only {count} commands were run");
    // Check that the comparison also notices wrong output.
    for wrong in [
        "```sh\nvramq dlq show --model minilm nobody\n```",
        "```sh\nvramq dlq list --model minilm  # exits with 1\n```",
        "```sh\nvramq dlq list --model minilm\n```\n```text\nGROUP  LETTERS  AGE\n```",
        "```sh\nvramq dlq lsit --model minilm\n```",
    ] {
        ensure!(runner.walk(wrong, &[]).await.is_err(), "{wrong}");
    }
    drop(leave);
    ensure!(first.exited().await? == Some(0), "{}", first.log.text());
    ensure!(second.answers("/readyz", 200).await? == "ready: consuming\n");
    Ok(())
}
