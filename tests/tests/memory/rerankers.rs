//! A reranker that runs out of memory: each pair is an item, so that a pass of pairs can be halved.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use vramq_inference::device::cpu::CpuDevice;
use vramq_inference::engine::encoder::{ComputeType, Encoder};
use vramq_inference::engine::{Engine as _, shape_of};
use vramq_schemas::{Input, JobHeaders, MinimumRequirement, Output, Params, Reason, ReplyKind};
use vramq_tests::bert::{fixture, logits};
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::job::Message;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::worker::Worker;
use vramq_tests::{on_all_setups, on_queue_types};

on_all_setups!(a_pass_of_pairs_is_halved_and_the_scores_are_the_same);
on_queue_types!(a_pair_that_never_fits_fails_alone);

const RERANKER: &str = "tiny-bert-reranker";

/// Of the worker's device. A pass takes scratch memory for each of them.
const THREADS: usize = 2;

const PAIRS: usize = 16;

/// A worker of the fixture, with this fault.
async fn reranker(env: &mut TestEnv, fault: Option<&str>) -> Result<Worker> {
    let path = format!("model.{MODEL}.path={}", fixture(RERANKER));
    let threads = format!("device.cpu.threads={THREADS}");
    let settings: Vec<&str> = [path.as_str(), threads.as_str()].into_iter().chain(fault).collect();
    let worker = env.spawn_bare_worker(&settings)?;
    worker.consuming().await?;
    Ok(worker)
}

fn job(env: &TestEnv, id: &str, pairs: Vec<Input>) -> Result<Message> {
    Message::inputs(env.setup.encoding, MODEL, id, REPLIES, pairs)
}

fn scores(reply: &Received) -> Result<Vec<f64>> {
    let score = |output: &Output| {
        let Output::Json(value) = output else { anyhow::bail!("{output:?} is no score") };
        value["score"].as_f64().with_context(|| format!("no score in {value}"))
    };
    reply.outputs()?.outputs.iter().map(score).collect()
}

/// What came back of a job: its scores, in order, and its last reply.
struct Ended {
    scores: Vec<f64>,
    last: Received,
}

/// Collects replies until so many jobs have ended. Fails unless the parts of each come in order, without gaps and repeats.
async fn ended(replies: &mut Mailbox, jobs: usize) -> Result<BTreeMap<String, Ended>> {
    let (mut open, mut ends) = (BTreeMap::<String, Vec<f64>>::new(), BTreeMap::new());
    while ends.len() < jobs {
        let reply = replies.next().await?;
        let (id, kind) = (reply.id().to_owned(), reply.kind()?);
        let found = open.entry(id.clone()).or_default();
        if kind != ReplyKind::Failed {
            let headers = reply.reply()?;
            ensure!(headers.offset as usize == found.len(), "{id}: {headers:?} after {} scores", found.len());
            found.extend(scores(&reply)?);
        }
        if kind != ReplyKind::Part {
            let scores = open.remove(&id).unwrap_or_default();
            ends.insert(id, Ended { scores, last: reply });
        }
    }
    ensure!(open.is_empty(), "{open:?}");
    Ok(ends)
}

async fn a_pass_of_pairs_is_halved_and_the_scores_are_the_same(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    let (inputs, _) = logits(RERANKER)?;
    let pairs = inputs.iter().filter(|input| matches!(input, Input::Json(_)));
    let pairs: Vec<Input> = pairs.cycle().take(PAIRS).cloned().collect();
    ensure!(pairs.len() == PAIRS, "no pairs in the fixture");
    let mut replies = env.replies().await?;
    let mut ended_of = async |env: &TestEnv, id: &str| -> Result<Ended> {
        env.client.publish(MODEL, job(env, id, pairs.clone())?).await?;
        ended(&mut replies, 1).await?.remove(id).with_context(|| format!("another job than {id}"))
    };

    let whole = reranker(env, None).await?;
    let expected = ended_of(env, "whole").await?;
    ensure!(expected.last.kind()? == ReplyKind::Done && expected.scores.len() == PAIRS);
    ensure!(expected.last.reply()?.items as usize == PAIRS, "{:?}", expected.last.reply());
    whole.drain().await?;

    let halving = reranker(env, Some("device.cpu.fault=skip=0,fail=1")).await?;
    let found = ended_of(env, "halved").await?;
    ensure!(found.last.kind()? == ReplyKind::Done, "{:?}", found.last.failure());
    let headers = found.last.reply()?;
    ensure!(headers.attempt == 1, "{headers:?}");
    let line = halving.log.wait_for("out of memory").await?;
    let items = line.field("items").and_then(serde_json::Value::as_u64);
    ensure!(items == Some(PAIRS as u64), "{}", line.text());
    // To the bit: a pair's score does not depend on its pass.
    ensure!(found.scores == expected.scores, "{:?}, not {:?}", found.scores, expected.scores);
    halving.drain().await?;
    for (name, expected) in [("requeued", 1), ("recomputed", 0), ("items", PAIRS as u64)] {
        let total = halving.total(name).await?;
        ensure!(total == expected, "{name}: {total}, not {expected}");
    }
    // The one that failed, and its halves. They may be more than two: each keeps to half of the bytes, too.
    let passes = halving.total("passes").await?;
    ensure!((3..=5).contains(&passes), "{passes} passes");
    Ok(())
}

fn pair(query: &str, document: &str) -> Input {
    Input::Json(json!({"query": query, "document": document}).into())
}

/// Tokens of a pass of these pairs, and its bytes on the worker's device.
fn needs(pairs: &[Input]) -> Result<(u32, u64)> {
    let device = CpuDevice::new(1 << 28, THREADS)?;
    let encoder = Encoder::load_dtype(&fixture(RERANKER), device, ComputeType::Auto)?;
    let shape = shape_of(&encoder.prepare(pairs, &Params::default())?);
    Ok((u32::try_from(shape.cost)?, encoder.pass_bytes(shape)))
}

/// The sixth pair of a job is too long for the device, whatever its pass. The pairs before it are answered, and so is another job.
async fn a_pair_that_never_fits_fails_alone(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "made to fail", "job dead-lettered"] {
        env.announce(text);
    }
    const LONG_AT: usize = 5;
    let short = |at: usize| pair("a cat", ["the cat sat", "the city", "of the war"][at % 3]);
    let long = pair("the first year of the war", &"of the city ".repeat(100));
    let (cost, needs_bytes) = needs(std::slice::from_ref(&long))?;
    ensure!(needs(&[short(0), short(1)])?.1 < needs_bytes, "two short pairs take as much as the long one");
    let worker = reranker(env, Some(&format!("device.cpu.fault=above={}", needs_bytes - 1))).await?;

    let pairs = (0..8).map(|at| if at == LONG_AT { long.clone() } else { short(at) }).collect();
    let too_large = job(env, "too large", pairs)?;
    let well = job(env, "well", (0..3).map(short).collect())?;
    env.client.publish_all(MODEL, vec![too_large.clone(), well]).await?;
    let ends = ended(&mut env.replies().await?, 2).await?;
    let (too_large_end, well_end) = (&ends["too large"], &ends["well"]);
    ensure!(well_end.last.kind()? == ReplyKind::Done && well_end.scores.len() == 3);
    let expected: Vec<f64> = well_end.scores.iter().copied().cycle().take(LONG_AT).collect();
    ensure!(too_large_end.scores == expected, "{:?}, not {expected:?}", too_large_end.scores);
    let failure = too_large_end.last.failure()?;
    ensure!(failure.reason == Reason::OutOfMemory, "{failure:?}");

    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == too_large.body, "the dead letter is not the job");
    let dossier = letter.dead_letter()?;
    let item = u32::try_from(LONG_AT)?;
    ensure!(
        dossier.requirement == Some(MinimumRequirement { item, cost, needs_bytes }),
        "{dossier:?}, but {needs_bytes} bytes for {cost} tokens"
    );
    ensure!(dossier.error == failure.error && failure.error.contains(&format!("item {item}")), "{failure:?}");
    let headers = JobHeaders::read(&letter.headers())?;
    ensure!(headers.items_done == item, "{headers:?}");
    let attempt = headers.history.last().context("no history")?;
    ensure!((attempt.items, attempt.asked, attempt.alone) == (1, needs_bytes, true), "{attempt:?}");
    worker.drain().await?;
    for (name, expected) in [("dead", 1), ("recomputed", 0), ("items", LONG_AT as u64 + 3)] {
        let total = worker.total(name).await?;
        ensure!(total == expected, "{name}: {total}, not {expected}");
    }
    Ok(())
}
