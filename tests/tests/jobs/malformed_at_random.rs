//! Random bodies and headers, and those that a fuzzer kept: each job ends once, the worker continues, and the broker has no more
//! messages than jobs ended.
//!
//! `VRAMQ_TEST_FULL=1` publishes 5,000 strange bodies rather than 300.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::{Encoding, ReplyKind};
use vramq_tests::client::Received;
use vramq_tests::programs::root;
use vramq_tests::random::Random;
use vramq_tests::raw::{RawProperties, publish};
use vramq_tests::rejections::{counted_worker, has_published, keeps_serving};
use vramq_tests::setup::full;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::{on_all_setups, on_queue_types};

on_all_setups!(random_and_mutated_bodies);
on_queue_types!(what_a_fuzzer_has_found);

/// A good job comes after so many of them.
const GOOD_EVERY: usize = 20;

/// Good bodies to start from, in both encodings.
fn seeds(env: &TestEnv) -> Result<Vec<Vec<u8>>> {
    const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../schemas/golden");
    let mut seeds = vec![env.job("x", ["one", "two", "\u{1}\u{fffd}\u{10ffff}"])?.body];
    for name in ["job-text", "job-bytes", "job-uri", "job-params", "outputs", "failure"] {
        for encoding in ["json", "bincode"] {
            let path = format!("{GOLDEN}/{name}.{encoding}");
            seeds.push(std::fs::read(&path).with_context(|| path)?);
        }
    }
    Ok(seeds)
}

/// A body changed in a few places, or one of nothing but chance.
fn mutated(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    if random.below(8) == 0 {
        let length = random.below(500);
        return (0..length).map(|_| random.below(256) as u8).collect();
    }
    // Half of them start from a job that would run.
    let mut body = if random.below(2) == 0 { seeds[0].clone() } else { random.one_of(seeds).clone() };
    for _ in 0..=random.below(3) {
        let at = random.below(body.len() + 1);
        let end = (at + random.below(12)).min(body.len());
        match random.below(7) {
            0 => body.truncate(at),
            1 => drop(body.drain(at..end)),
            2 => drop(body.splice(at..end, std::iter::repeat_n(0xff, 9))),
            3 => {
                let some: Vec<_> = (0..random.below(9)).map(|_| random.below(256) as u8).collect();
                body.splice(at..at, some);
            }
            4 => {
                let other = random.one_of(seeds);
                let from = random.below(other.len());
                body.splice(at..end, other[from..].iter().copied());
            }
            5 => {
                let some = body[at..end].to_vec();
                body.splice(at..at, some.repeat(1 + random.below(50)));
            }
            _ => {
                if let Some(byte) = body.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
    }
    body
}

async fn random_and_mutated_bodies(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let (worker, proxy) = counted_worker(env, &[]).await?;
    let (mut random, seeds) = (Random::new(20_261_121), seeds(env)?);
    let mut jobs = BTreeMap::new();
    let mut good = 0;
    let bodies = if full() { 5000 } else { 300 };
    for at in 0..bodies {
        let id = format!("hostile {at}");
        let job = env.job(&id, ["x"])?.with_body(mutated(&seeds, &mut random));
        jobs.insert(id, job);
        if at % GOOD_EVERY == 0 {
            let id = format!("good {at}");
            jobs.insert(id.clone(), env.job(&id, ["x"])?);
            good += 1;
        }
    }
    env.client.publish_all(MODEL, jobs.values().cloned().collect()).await?;

    let mut failed = BTreeMap::new();
    let mut done = BTreeMap::new();
    let mut replies = env.replies().await?;
    for reply in replies.take(jobs.len()).await? {
        let of_kind = match reply.kind()? {
            ReplyKind::Done => &mut done,
            ReplyKind::Failed => &mut failed,
            kind @ (ReplyKind::Part | ReplyKind::Progress) => anyhow::bail!("{kind:?} of a tiny job"),
        };
        ensure!(jobs.contains_key(reply.id()), "a reply to {}", reply.id());
        ensure!(of_kind.insert(reply.id().to_owned(), reply).is_none(), "answered twice");
    }
    let of_good = done.keys().filter(|id| id.starts_with("good")).count();
    ensure!(of_good == good, "{of_good} of {good} good jobs are answered");
    ensure!(done.len() > good && failed.len() > bodies / 2, "{} done, {} failed", done.len(), failed.len());
    let mut letters = env.dead_letters().await?.take(failed.len()).await?;
    letters.sort_by(|a, b| a.id().cmp(b.id()));
    for (letter, (id, reply)) in letters.iter().zip(&failed) {
        ensure!(letter.id() == id, "{id} has no letter, or another two");
        ensure!(letter.body == jobs[id].body, "{id}: the body is not the job's");
        let (dossier, failure) = (letter.dead_letter()?, reply.failure()?);
        ensure!(
            (dossier.reason, &dossier.error) == (failure.reason, &failure.error),
            "{dossier:?}, {failure:?}"
        );
    }
    drop(replies);
    keeps_serving(env, &worker).await?;
    // A reply to each job, and the letters; a reply to the last good one.
    has_published(&worker, &proxy, jobs.len() + letters.len() + 1).await
}

/// Everything in a folder, if it is there: seeds are, what `make fuzz` has found only where it ran.
fn files(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let Ok(entries) = folder.read_dir() else { return Ok(Vec::new()) };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    paths.iter().map(|path| Ok(std::fs::read(path)?)).collect()
}

/// As bodies in both encodings, and as headers of a good job.
async fn what_a_fuzzer_has_found(env: &mut TestEnv) -> Result<()> {
    for text in ["job dead-lettered", "too large to publish again"] {
        env.announce(text);
    }
    let fuzz = root().join("schemas/fuzz");
    let of = |target: &str| -> Result<_> {
        Ok([files(&fuzz.join("seeds").join(target))?, files(&fuzz.join("corpus").join(target))?].concat())
    };
    let bodies = [of("job")?, of("reply")?, files(&root().join("schemas/golden"))?].concat();
    let tables = of("headers")?;
    ensure!(!bodies.is_empty() && !tables.is_empty(), "no seeds in {}", fuzz.display());
    println!("{} bodies, {} tables of headers", bodies.len(), tables.len());
    let worker = env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    let (mut open, mut failed) = (BTreeSet::new(), BTreeSet::new());
    let good = env.job("x", ["x"])?.body;
    let as_json = Encoding::Json.content_type();
    let encodings = [as_json, Encoding::Bincode.content_type()];
    let of_bodies = bodies.iter().flat_map(|body| encodings.map(|encoding| (encoding, body, &[][..])));
    let of_tables = tables.iter().filter(|table| is_whole(table)).map(|table| (as_json, &good, &table[4..]));
    for (at, (encoding, body, headers)) in of_bodies.chain(of_tables).enumerate() {
        let properties = RawProperties {
            content_type: encoding.into(),
            message_id: at.to_string().into(),
            reply_to: REPLIES.into(),
            headers: headers.to_vec(),
            ..RawProperties::default()
        };
        publish(&env.url, MODEL, &properties, body).await.with_context(|| format!("job {at}"))?;
        open.insert(at.to_string());
    }
    while !open.is_empty() {
        let reply = replies.next().await.with_context(|| format!("jobs without an end: {open:?}"))?;
        if reply.kind()? != ReplyKind::Part {
            ensure!(open.remove(reply.id()), "{} ended twice", reply.id());
        }
        if reply.kind()? == ReplyKind::Failed {
            failed.insert(reply.id().to_owned());
        }
    }
    let letters = env.dead_letters().await?.take(failed.len()).await?;
    ensure!(letters.iter().map(Received::id).collect::<BTreeSet<_>>().into_iter().eq(&failed));
    drop(replies);
    keeps_serving(env, &worker).await
}

/// A table whose length is right: the broker closes the connection over any other.
fn is_whole(table: &[u8]) -> bool {
    table.first_chunk().is_some_and(|length| u32::from_be_bytes(*length) as usize == table.len() - 4)
}
