//! Three workers with a real model on one device that is too small for them, another process that takes memory at times, and
//! texts that fit no pass: every job ends, and every item is answered once and correctly.
//!
//! `VRAMQ_SOAK_SECONDS` says for how long jobs are published (`make soak` sets it), `VRAMQ_SOAK_SEED` repeats a run.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{JobHeaders, Output, Reason, ReplyKind};
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::programs::root;
use vramq_tests::random::Random;
use vramq_tests::setup::number_from;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::worker::Worker;

on_queue_types!(jobs_of_all_sizes_end_once_and_rightly);

const MODEL: &str = "tiny";

const WORKERS: usize = 3;

/// The weights take some 0.6 MiB of it: three passes at once fit only if they are small.
const DEVICE_MIB: u64 = 2;

/// What the neighbour takes, now and then.
const NEIGHBOUR_BYTES: u64 = 1 << 20;

/// What a pass of one text may take: one of 350 words fits, one of 505 does not.
const ARENA_BYTES_MAX: u64 = 400_000;
const WORDS_MAX: usize = 350;
const WORDS_TOO_MANY: usize = 505;

/// Of so many jobs one has a text that fits no pass.
const ONE_MISFIT_IN: usize = 50;

/// A test that hears nothing for this long has lost a job. Longer than the longest wait of a job.
const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Jobs published at a time, and how many may be open then.
const BATCH: usize = 100;

/// Different texts; every output is compared with what an undisturbed worker makes of the text.
const TEXTS: usize = 200;

/// Correct results of different packings differ by this much: see the README of the fixtures.
const TOLERANCE: f32 = 1e-6;

/// Texts of words of one token each: short ones are more frequent, as in life. The last one fits no pass.
fn texts(random: &mut Random) -> Vec<String> {
    let words = ["the", "of", "and", "to", "in", "a", "is", "it"];
    let text = |at: usize, random: &mut Random| {
        let length = match at + 1 {
            TEXTS => WORDS_TOO_MANY,
            _ => 1 + random.below([8, 40, 120, WORDS_MAX][at % 4]),
        };
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
    dead: HashSet<String>,
}

impl Ledger<'_> {
    /// Takes in a reply.
    fn add(&mut self, reply: &Received) -> Result<()> {
        let (id, kind) = (reply.id(), reply.kind()?);
        if kind == ReplyKind::Failed {
            // Its dead letter is what counts.
            return Ok(());
        }
        let open =
            self.open.get_mut(id).with_context(|| format!("a {kind:?} for job {id}, which is not open"))?;
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
        let dossier = letter.dead_letter()?;
        ensure!(dossier.reason == Reason::OutOfMemory && dossier.misfit.is_some(), "{dossier:?}");
        let reached = JobHeaders::read(&letter.headers())?.items_done as usize;
        ensure!(reached == open.answered, "job {id}: {reached} items by its letter, {} came", open.answered);
        ensure!(open.texts[reached] == TEXTS - 1, "job {id}: item {reached} would have fitted");
        self.dead.insert(id.to_owned());
        Ok(())
    }

    /// Collects until so few jobs are open.
    async fn settle(&mut self, replies: &mut Mailbox, letters: &mut Mailbox, open: usize) -> Result<()> {
        let mut heard = Instant::now();
        while self.open.len() > open {
            // A dead letter is confirmed before the failed reply, and parts before both.
            if let Some(reply) = replies.next_within(Duration::from_millis(200)).await? {
                self.add(&reply)?;
            } else if let Some(letter) = letters.next_within(Duration::from_millis(20)).await? {
                self.bury(&letter)?;
            } else {
                ensure!(heard.elapsed() < SILENCE_MAX, "{} jobs do not end", self.open.len());
                continue;
            }
            heard = Instant::now();
        }
        Ok(())
    }
}

/// What an undisturbed worker makes of the texts.
async fn undisturbed(env: &mut TestEnv, model: &str, texts: &[String]) -> Result<Vec<Vec<f32>>> {
    let worker = env.spawn_bare_worker(&[model])?;
    worker.consuming().await?;
    let job = Message::texts(env.setup.encoding, MODEL, "undisturbed", REPLIES, texts.to_vec())?;
    env.client.publish(MODEL, job).await?;
    let mut replies = env.replies().await?;
    let mut all = Vec::new();
    loop {
        let reply = replies.next().await?;
        all.extend(vectors(&reply)?);
        if reply.kind()? == ReplyKind::Done {
            break;
        }
    }
    worker.drain().await?;
    Ok(all)
}

async fn start_workers(env: &mut TestEnv, device: &SharedDevice, model: &str) -> Result<Vec<Worker>> {
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let mut settings = device.settings().to_vec();
        settings.extend([
            model.to_owned(),
            "device.cpu.threads=1".to_owned(),
            format!("model.{MODEL}.slots_max=20"),
            format!("model.{MODEL}.pass_tokens=600"),
            format!("device.cpu.fault=above={ARENA_BYTES_MAX}"),
        ]);
        let settings: Vec<_> = settings.iter().map(String::as_str).collect();
        let worker = env.spawn_bare_worker(&settings)?;
        worker.consuming().await?;
        workers.push(worker);
    }
    Ok(workers)
}

/// The texts of a random job, by their numbers; whether one of them fits no pass.
fn draw(random: &mut Random) -> (Vec<usize>, bool) {
    let most = *random.one_of(&[5, 5, 20, 20, 100, 500]);
    let size = 1 + random.below(most);
    let mut job: Vec<_> = (0..size).map(|_| random.below(TEXTS - 1)).collect();
    let misfit = random.below(ONE_MISFIT_IN) == 0;
    if misfit {
        job[random.below(size)] = TEXTS - 1;
    }
    (job, misfit)
}

async fn jobs_of_all_sizes_end_once_and_rightly(env: &mut TestEnv) -> Result<()> {
    let seconds = number_from("VRAMQ_SOAK_SECONDS")?.unwrap_or(10);
    let now = std::time::UNIX_EPOCH.elapsed()?.as_millis() as u64;
    let seed = number_from("VRAMQ_SOAK_SEED")?.unwrap_or(now);
    println!("VRAMQ_SOAK_SEED={seed}");
    for text in ["out of memory", "made to fail", "not even one item fits", "job dead-lettered"] {
        env.announce(text);
    }
    let mut random = Random::new(seed);
    let texts = texts(&mut random);
    let model = format!("model.{MODEL}.path={}", root().join("inference/tests/fixtures/tiny-long").display());
    let expected = undisturbed(env, &model, &texts).await?;

    let device = SharedDevice::new(DEVICE_MIB)?;
    let workers = start_workers(env, &device, &model).await?;
    let mut ledger = Ledger { expected: &expected, open: HashMap::new(), items: 0, dead: HashSet::new() };
    let mut replies = env.replies().await?;
    let mut letters = env.client.mailbox(&dead_queue(MODEL)).await?;
    let started = Instant::now();
    let mut published = 0;
    let mut misfits = 0;
    while started.elapsed() < Duration::from_secs(seconds) {
        let held = NEIGHBOUR_BYTES.min(device.memory().free);
        let visits = random.below(3) == 0 && device.hold(held).is_ok();
        let mut batch = Vec::with_capacity(BATCH);
        for _ in 0..BATCH {
            let (job, misfit) = draw(&mut random);
            misfits += usize::from(misfit);
            let id = published.to_string();
            let inputs: Vec<_> = job.iter().map(|text| texts[*text].clone()).collect();
            batch.push(Message::texts(env.setup.encoding, MODEL, &id, REPLIES, inputs)?);
            ledger.open.insert(id, Open { texts: job, answered: 0 });
            published += 1;
        }
        env.client.publish_all(MODEL, batch).await?;
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
            *totals.entry(name).or_insert(0) += worker.total(name).await?;
        }
    }
    let dead = ledger.dead.len();
    println!("{published} jobs, {} items, {dead} dead letters; {totals:?}", ledger.items);
    ensure!(dead == misfits, "{dead} dead letters for {misfits} jobs that fit nowhere");
    ensure!(totals["recomputed"] == 0 && totals["items"] == ledger.items as u64, "items were computed twice");
    ensure!(totals["oom_alone"] + totals["oom_shared"] > 0, "nothing ran out of memory");
    ensure!(device.memory().own() == 0 && device.memory().foreign == 0, "{:?}", device.memory());
    // Word of the last dead letters may still be on its way to their callers.
    while replies.next_within(Duration::from_millis(300)).await?.is_some() {}
    Ok(())
}
