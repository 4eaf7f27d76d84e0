//! Three workers with a real model on one device that is too small for them, a neighbour that comes and goes, and passes
//! that fail at random: every job ends, every item is answered once, and rightly.
//!
//! `VRAMQ_SOAK_SECONDS` says for how long jobs are published (`make soak` sets it), `VRAMQ_SOAK_SEED` repeats a run.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{JobHeaders, Output, Reason, ReplyKind};
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::programs::root;
use vramq_tests::random::Random;
use vramq_tests::tenant::SharedDevice;
use vramq_tests::worker::Worker;
use vramq_tests::world::{REPLIES, World};

on_queue_types!(jobs_of_all_sizes_end_once_and_rightly);

const MODEL: &str = "tiny";

const WORKERS: usize = 3;

/// Weights and one full pass take some 3 MiB of it: three passes at once do not fit.
const DEVICE_MIB: u64 = 5;

/// What the neighbour takes, now and then.
const NEIGHBOUR_BYTES: u64 = 2 << 20;

/// Jobs published at a time, and how many may be open then.
const BATCH: usize = 100;

/// Different texts; every output is compared with what an undisturbed worker makes of the text.
const TEXTS: usize = 200;

/// Correct results of different packings differ by this much: see the README of the fixtures.
const TOLERANCE: f32 = 1e-6;

fn from_environment(name: &str) -> Result<Option<u64>> {
    let value = std::env::var(name).ok();
    value.map(|value| value.parse().with_context(|| format!("{name}={value} is no number"))).transpose()
}

/// Texts of 1 to 510 words, each of one token: short ones are more frequent, as in life.
fn texts(random: &mut Random) -> Vec<String> {
    let words = ["the", "of", "and", "to", "in", "a", "is", "it"];
    let text = |at: usize, random: &mut Random| {
        let length = 1 + random.below([8, 40, 120, 510][at % 4]);
        (0..length).map(|_| *random.one_of(&words)).collect::<Vec<_>>().join(" ")
    };
    (0..TEXTS).map(|at| text(at, random)).collect()
}

fn vectors(reply: &Received) -> Result<Vec<Vec<f32>>> {
    let vector = |output| match output {
        Output::Embedding(embedding) => Ok(embedding.values.to_f32()),
        other => anyhow::bail!("no vector: {other:?}"),
    };
    reply.outputs()?.outputs.into_iter().map(vector).collect()
}

/// A job that is not at its end: the texts that it holds, and how many are answered.
struct Open {
    texts: Vec<usize>,
    answered: usize,
}

/// What became of the jobs.
struct Ledger<'a> {
    expected: &'a [Vec<f32>],
    open: HashMap<String, Open>,
    items: usize,
    dead: usize,
}

impl Ledger<'_> {
    /// Takes in a reply.
    fn add(&mut self, reply: &Received) -> Result<()> {
        let (id, kind) = (reply.id(), reply.kind()?);
        let open =
            self.open.get_mut(id).with_context(|| format!("a {kind:?} for job {id}, which is not open"))?;
        if kind == ReplyKind::Failed {
            // Its dead letter is what counts.
            return Ok(());
        }
        let headers = reply.reply()?;
        ensure!(headers.offset as usize == open.answered, "job {id}: {headers:?} after {}", open.answered);
        for vector in vectors(reply)? {
            let text =
                *open.texts.get(open.answered).with_context(|| format!("job {id}: too many outputs"))?;
            let off = self.expected[text].iter().zip(&vector).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            ensure!(off <= TOLERANCE, "job {id}, item {}: off by {off}", open.answered);
            open.answered += 1;
            self.items += 1;
        }
        if kind == ReplyKind::Done {
            ensure!(open.answered == open.texts.len(), "job {id} ended after {}", open.answered);
            self.open.remove(id);
        }
        Ok(())
    }

    fn bury(&mut self, letter: &Received) -> Result<()> {
        let id = letter.id();
        let open =
            self.open.remove(id).with_context(|| format!("a letter for job {id}, which is not open"))?;
        let told = letter.dead_letter()?;
        ensure!(told.reason == Reason::OutOfMemory && told.misfit.is_some(), "{told:?}");
        let reached = JobHeaders::read(&letter.headers())?.items_done as usize;
        ensure!(reached == open.answered, "job {id}: {reached} items by its letter, {} came", open.answered);
        self.dead += 1;
        Ok(())
    }

    /// Collects until so few jobs are open.
    async fn settle(&mut self, replies: &mut Mailbox, letters: &mut Mailbox, open: usize) -> Result<()> {
        while self.open.len() > open {
            // A letter is confirmed before the caller is told, but parts before both.
            if let Some(reply) = replies.next_within(Duration::from_millis(500)).await? {
                self.add(&reply)?;
            } else if let Some(letter) = letters.next_within(Duration::from_millis(500)).await? {
                self.bury(&letter)?;
            }
        }
        Ok(())
    }
}

async fn figure(worker: &Worker, name: &str) -> Result<u64> {
    let line = worker.log.wait_for("totals").await?;
    line.field(name)
        .and_then(serde_json::Value::as_u64)
        .with_context(|| format!("no {name}: {}", line.text()))
}

/// What an undisturbed worker makes of the texts.
async fn undisturbed(world: &mut World, model: &str, texts: &[String]) -> Result<Vec<Vec<f32>>> {
    let worker = world.spawn_bare_worker(&[model])?;
    worker.consuming().await?;
    let job = Message::texts(world.setup.encoding, MODEL, "undisturbed", REPLIES, texts.to_vec())?;
    world.client.publish(MODEL, job).await?;
    let reply = world.replies().await?.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done);
    worker.drain().await?;
    vectors(&reply)
}

async fn jobs_of_all_sizes_end_once_and_rightly(world: &mut World) -> Result<()> {
    let seconds = from_environment("VRAMQ_SOAK_SECONDS")?.unwrap_or(10);
    let now = std::time::UNIX_EPOCH.elapsed()?.as_millis() as u64;
    let seed = from_environment("VRAMQ_SOAK_SEED")?.unwrap_or(now);
    println!("VRAMQ_SOAK_SEED={seed}");
    for text in ["out of memory", "made to fail", "no room for a single item", "job dead-lettered"] {
        world.announce(text);
    }
    let mut random = Random::new(seed);
    let texts = texts(&mut random);
    let model = format!("model.{MODEL}.path={}", root().join("worker/tests/fixtures/tiny-long").display());
    let expected = undisturbed(world, &model, &texts).await?;

    let device = SharedDevice::new(DEVICE_MIB)?;
    let mut workers = Vec::new();
    for worker in 0..WORKERS {
        let mut settings = device.settings().to_vec();
        settings.extend([
            model.clone(),
            "device.cpu.threads=1".to_owned(),
            format!("model.{MODEL}.slots_max=20"),
            format!("device.cpu.fault=random=0.01,seed={}", seed.wrapping_add(worker as u64)),
        ]);
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        let worker = world.spawn_bare_worker(&settings)?;
        worker.consuming().await?;
        workers.push(worker);
    }

    let mut ledger = Ledger { expected: &expected, open: HashMap::new(), items: 0, dead: 0 };
    let mut replies = world.replies().await?;
    let mut letters = world.client.mailbox(&dead_queue(MODEL)).await?;
    let started = Instant::now();
    let mut published = 0;
    while started.elapsed() < Duration::from_secs(seconds) {
        let held = NEIGHBOUR_BYTES.min(device.memory().free);
        let visits = random.below(3) == 0 && device.hold(held).is_ok();
        let mut batch = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            let most = *random.one_of(&[5, 5, 20, 20, 100, 500]);
            let size = 1 + random.below(most);
            let job: Vec<_> = (0..size).map(|_| random.below(TEXTS)).collect();
            let id = published.to_string();
            let inputs: Vec<_> = job.iter().map(|text| texts[*text].clone()).collect();
            batch.push(Message::texts(world.setup.encoding, MODEL, &id, REPLIES, inputs)?);
            ledger.open.insert(id, Open { texts: job, answered: 0 });
            published += 1;
        }
        world.client.publish_all(MODEL, batch).await?;
        ledger.settle(&mut replies, &mut letters, BATCH / 2).await?;
        if visits {
            device.give_back(held);
        }
    }
    ledger.settle(&mut replies, &mut letters, 0).await?;

    let mut totals = HashMap::new();
    for worker in &workers {
        ensure!(worker.is_running(), "worker {} has ended by itself", worker.name);
        worker.drain().await?;
        for name in ["items", "oom_alone", "oom_shared", "requeued", "exclusive", "delayed", "recomputed"] {
            *totals.entry(name).or_insert(0) += figure(worker, name).await?;
        }
    }
    println!("{published} jobs, {} items, {} dead letters; {totals:?}", ledger.items, ledger.dead);
    ensure!(totals["recomputed"] == 0 && totals["items"] == ledger.items as u64, "items were computed twice");
    ensure!(totals["oom_alone"] + totals["oom_shared"] > 0, "nothing ran out of memory");
    ensure!(device.memory().own() == 0 && device.memory().foreign == 0, "{:?}", device.memory());
    // Word of the last dead letters may still be on its way to their callers.
    while replies.next_within(Duration::from_millis(300)).await?.is_some() {}
    Ok(())
}
