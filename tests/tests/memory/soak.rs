//! Three workers with a real model on one device that is too small for them, another process that takes memory at times, and
//! texts that fit no pass: every job ends, and every item is answered once and correctly.
//!
//! `VRAMQ_SOAK_SECONDS` says for how long jobs are published (`make soak` sets it), `VRAMQ_SOAK_SEED` repeats a run.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{JobHeaders, Output, Reason, ReplyKind};
use vramq_tests::bert::fixture;
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::on_queue_types;
use vramq_tests::random::Random;
use vramq_tests::setup::{Queue, number_from};
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::wait::SILENCE;
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

/// The text that fits no pass.
const MISFIT: usize = TEXTS - 1;

/// Jobs of which a failure tells all that is known.
const SHOWN_MAX: usize = 5;

/// Correct results of different packings differ by this much: see the README of the fixtures.
const TOLERANCE: f32 = 1e-6;

/// Texts of words of one token each: short ones are more frequent, as in life. One fits no pass.
fn texts(random: &mut Random) -> Vec<String> {
    let words = ["the", "of", "and", "to", "in", "a", "is", "it"];
    let text = |at: usize, random: &mut Random| {
        let length = match at {
            MISFIT => WORDS_TOO_MANY,
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

/// A job, and what came of it.
struct Job {
    /// The texts that it holds, by their numbers.
    texts: Vec<usize>,
    /// How many of them are answered.
    answered: usize,
    is_done: bool,
    /// How many are answered by its dead letter.
    dead_at: Option<usize>,
    has_failed_reply: bool,
    /// The messages that came, for whoever looks for the cause of a failure.
    came: Vec<String>,
}

impl Job {
    fn new(texts: Vec<usize>) -> Self {
        let came = Vec::new();
        Self { texts, answered: 0, is_done: false, dead_at: None, has_failed_reply: false, came }
    }

    /// Whether the job's messages are all here, in any order: the letter, the replies that it refers to, and the `failed` reply come from
    /// two queues.
    fn has_ended(&self) -> bool {
        self.is_done || (self.has_failed_reply && self.dead_at == Some(self.answered))
    }

    /// Takes in a reply. How many items it answers.
    fn reply(&mut self, reply: &Received, expected: &[Vec<f32>]) -> Result<usize> {
        let kind = reply.kind()?;
        let has_ended = self.is_done || self.has_failed_reply;
        if kind == ReplyKind::Failed {
            self.came.push(format!("failed: {:?}", reply.failure()?));
            self.has_failed_reply = true;
            ensure!(!has_ended, "a `failed` reply after the last one");
            return Ok(0);
        }
        let headers = reply.reply()?;
        self.came.push(format!("{kind:?}: {headers:?}"));
        ensure!(!has_ended, "a reply after the last one");
        ensure!(
            headers.offset as usize == self.answered,
            "items from {} on, not from {} on",
            headers.offset,
            self.answered
        );
        let vectors = vectors(reply)?;
        for vector in &vectors {
            let text = *self.texts.get(self.answered).context("too many outputs")?;
            ensure!(vector.len() == expected[text].len(), "item {}: {} numbers", self.answered, vector.len());
            let off = expected[text].iter().zip(vector).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            ensure!(off <= TOLERANCE, "item {}, text {text}: off by {off}", self.answered);
            self.answered += 1;
        }
        if kind == ReplyKind::Done {
            self.is_done = true;
            ensure!(self.answered == self.texts.len(), "it ended before all items were answered");
            ensure!(!self.texts.contains(&MISFIT), "a text was answered that fits no pass");
        }
        Ok(vectors.len())
    }

    fn letter(&mut self, letter: &Received) -> Result<()> {
        let (dossier, headers) = (letter.dead_letter()?, JobHeaders::read(&letter.headers())?);
        self.came.push(format!("dead letter: {dossier:?}, {headers:?}"));
        let reached = headers.items_done as usize;
        ensure!(!self.is_done, "a dead letter of a job that is answered");
        ensure!(self.dead_at.replace(reached).is_none(), "a second dead letter");
        ensure!(
            dossier.reason == Reason::OutOfMemory && dossier.requirement.is_some(),
            "it did not run out of memory"
        );
        ensure!(self.answered <= reached, "more items came than its letter says");
        ensure!(self.texts.get(reached) == Some(&MISFIT), "item {reached} would have fitted");
        Ok(())
    }

    fn story(&self) -> String {
        let came = if self.came.is_empty() { "nothing".to_owned() } else { self.came.join("; ") };
        format!("{} of {} items answered; what came: {came}", self.answered, self.texts.len())
    }
}

/// What became of the jobs.
struct Ledger<'a> {
    expected: &'a [Vec<f32>],
    jobs: HashMap<String, Job>,
    open: usize,
    items: usize,
}

impl Ledger<'_> {
    /// Enters a job before it is published.
    fn enter(&mut self, id: String, texts: Vec<usize>) {
        self.jobs.insert(id, Job::new(texts));
        self.open += 1;
    }

    fn reply(&mut self, reply: &Received) -> Result<()> {
        let expected = self.expected;
        self.items += self.take_in(reply, |job| job.reply(reply, expected))?;
        Ok(())
    }

    fn letter(&mut self, letter: &Received) -> Result<()> {
        self.take_in(letter, |job| job.letter(letter))
    }

    fn take_in<T>(&mut self, message: &Received, act: impl FnOnce(&mut Job) -> Result<T>) -> Result<T> {
        let id = message.id();
        let job = self.jobs.get_mut(id);
        let job =
            job.with_context(|| format!("a message of no job that was published: {:?}", message.properties))?;
        let was_open = !job.has_ended();
        let taken = act(job).with_context(|| format!("job {id}: {}", job.story()));
        self.open -= usize::from(was_open && job.has_ended());
        taken
    }

    /// Collects until so few jobs are open.
    async fn settle(&mut self, replies: &mut Mailbox, letters: &mut Mailbox, open: usize) -> Result<()> {
        let mut heard = Instant::now();
        while self.open > open {
            if let Some(reply) = replies.next_within(Duration::from_millis(200)).await? {
                self.reply(&reply)?;
            } else if let Some(letter) = letters.next_within(Duration::from_millis(20)).await? {
                self.letter(&letter)?;
            } else {
                ensure!(heard.elapsed() < SILENCE_MAX, "{}", self.unended());
                continue;
            }
            heard = Instant::now();
        }
        Ok(())
    }

    /// Some of the jobs that do not end.
    fn unended(&self) -> String {
        let open = self.jobs.iter().filter(|(_, job)| !job.has_ended());
        let stories: Vec<_> =
            open.take(SHOWN_MAX).map(|(id, job)| format!("\njob {id}: {}", job.story())).collect();
        format!("{} jobs do not end, among them:{}", self.open, stories.concat())
    }

    fn dead(&self) -> usize {
        self.jobs.values().filter(|job| job.dead_at.is_some()).count()
    }
}

/// Adds to an error what every queue holds.
async fn with_queues(env: &TestEnv, result: Result<()>) -> Result<()> {
    let Err(error) = result else { return Ok(()) };
    let queues = match depths(env).await {
        Ok(depths) => depths.join(", "),
        Err(unknown) => format!("{unknown:#}"),
    };
    Err(error.context(format!("the queues: {queues}")))
}

async fn depths(env: &TestEnv) -> Result<Vec<String>> {
    let mut depths = Vec::new();
    for queue in env.vhost.queues().await? {
        depths.push(format!("{queue} {:?}", env.vhost.depth(&queue).await?));
    }
    Ok(depths)
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

/// The texts of a random job, by their numbers.
fn draw(random: &mut Random) -> Vec<usize> {
    let most = *random.one_of(&[5, 5, 20, 20, 100, 500]);
    let size = 1 + random.below(most);
    let mut job: Vec<_> = (0..size).map(|_| random.below(MISFIT)).collect();
    if random.below(ONE_MISFIT_IN) == 0 {
        job[random.below(size)] = MISFIT;
    }
    job
}

async fn publish(
    env: &TestEnv,
    random: &mut Random,
    texts: &[String],
    ledger: &mut Ledger<'_>,
) -> Result<()> {
    let mut batch = Vec::with_capacity(BATCH);
    for _ in 0..BATCH {
        let (id, job) = (ledger.jobs.len().to_string(), draw(random));
        let inputs: Vec<_> = job.iter().map(|text| texts[*text].clone()).collect();
        batch.push(Message::texts(env.setup.encoding, MODEL, &id, REPLIES, inputs)?);
        ledger.enter(id, job);
    }
    env.client.publish_all(MODEL, batch).await
}

/// Announces what workers say whose memory runs out.
fn announce(env: &mut TestEnv) {
    for text in ["out of memory", "made to fail", "not even one item fits", "job dead-lettered"] {
        env.announce(text);
    }
    if env.setup.queue == Queue::Quorum {
        // Workers stop consumers while no item fits. A quorum queue takes back what it was sending to such a consumer, and counts
        // that as a delivery. Two of these look like two lost workers: the job runs in isolation, after a health probe, and ends.
        for text in ["it will run in isolation", "health probe ran out of memory"] {
            env.announce(text);
        }
    }
}

async fn jobs_of_all_sizes_end_once_and_rightly(env: &mut TestEnv) -> Result<()> {
    let seconds = number_from("VRAMQ_SOAK_SECONDS")?.unwrap_or(10);
    let now = std::time::UNIX_EPOCH.elapsed()?.as_millis() as u64;
    let seed = number_from("VRAMQ_SOAK_SEED")?.unwrap_or(now);
    println!("VRAMQ_SOAK_SEED={seed}");
    announce(env);
    let mut random = Random::new(seed);
    let texts = texts(&mut random);
    let model = format!("model.{MODEL}.path={}", fixture("tiny-long"));
    let expected = undisturbed(env, &model, &texts).await?;

    let device = SharedDevice::new(DEVICE_MIB)?;
    let workers = start_workers(env, &device, &model).await?;
    let mut ledger = Ledger { expected: &expected, jobs: HashMap::new(), open: 0, items: 0 };
    let mut replies = env.replies().await?;
    let mut letters = env.client.mailbox(&dead_queue(MODEL)).await?;
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(seconds) {
        let held = NEIGHBOUR_BYTES.min(device.memory().free);
        let visits = random.below(3) == 0 && device.hold(held).is_ok();
        publish(env, &mut random, &texts, &mut ledger).await?;
        let settled = ledger.settle(&mut replies, &mut letters, BATCH / 2).await;
        with_queues(env, settled).await?;
        if visits {
            device.give_back(held);
        }
    }
    let settled = ledger.settle(&mut replies, &mut letters, 0).await;
    with_queues(env, settled).await?;

    let mut totals = BTreeMap::new();
    for worker in &workers {
        ensure!(worker.is_running(), "worker {} has ended by itself", worker.name);
        worker.drain().await?;
        for name in ["items", "oom_alone", "oom_shared", "requeued", "exclusive", "delayed", "recomputed"] {
            *totals.entry(name).or_insert(0) += worker.total(name).await?;
        }
    }
    let (jobs, items, dead) = (ledger.jobs.len(), ledger.items, ledger.dead());
    let isolated: usize = workers.iter().map(|worker| worker.log.count("it will run in isolation")).sum();
    println!("{jobs} jobs, {items} items, {dead} dead letters, {isolated} quarantined; {totals:?}");
    ensure!(
        totals["recomputed"] == 0 && totals["items"] == items as u64,
        "{items} items are answered, of which some were computed twice: {totals:?}"
    );
    ensure!(totals["oom_alone"] + totals["oom_shared"] > 0, "nothing ran out of memory");
    ensure!(device.memory().own() == 0 && device.memory().foreign == 0, "{:?}", device.memory());
    // No job has another message after its end.
    while let Some(reply) = replies.next_within(SILENCE).await? {
        ledger.reply(&reply)?;
    }
    Ok(())
}
