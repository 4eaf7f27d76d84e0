//! The worker tokenises texts a few passes before they run, and of a long text only what the model keeps.

use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::{Output, ReplyKind, headers};
use vramq_tests::bert::reference;
use vramq_tests::client::Mailbox;
use vramq_tests::job::Message;
use vramq_tests::on_all_setups;
use vramq_tests::programs::root;
use vramq_tests::test_env::{REPLIES, TestEnv};
use vramq_tests::worker::Worker;

const MODEL: &str = "tiny";

/// The model of the fixtures, of up to 512 tokens.
const FIXTURE: &str = "tiny-long";

on_all_setups!(a_job_of_many_texts_is_answered_as_one_of_few, a_text_of_one_endless_word_takes_little_memory);

fn folder() -> PathBuf {
    root().join("inference/tests/fixtures").join(FIXTURE)
}

async fn worker(env: &mut TestEnv) -> Result<Worker> {
    let path = format!("model.{MODEL}.path={}", folder().display());
    let worker = env.spawn_bare_worker(&[&path, &format!("model.{MODEL}.pass_tokens=512")])?;
    worker.consuming().await?;
    Ok(worker)
}

/// All vectors of a job in their order, and the tokens that its replies tell.
async fn answer(replies: &mut Mailbox) -> Result<(Vec<Vec<f32>>, u64)> {
    let (mut vectors, mut tokens) = (Vec::new(), 0);
    loop {
        let reply = replies.next().await?;
        let kind = reply.kind()?;
        ensure!(kind != ReplyKind::Failed, "{:?}", reply.failure()?);
        ensure!(reply.reply()?.offset as usize == vectors.len(), "a part is missing, or came twice");
        tokens += headers::tokens(&reply.headers()).context("a reply without tokens")?;
        for output in reply.outputs()?.outputs {
            let Output::Embedding(vector) = output else { anyhow::bail!("{output:?} is no embedding") };
            vectors.push(vector.values.to_f32());
        }
        if kind == ReplyKind::Done {
            return Ok((vectors, tokens));
        }
    }
}

async fn a_job_of_many_texts_is_answered_as_one_of_few(env: &mut TestEnv) -> Result<()> {
    let (texts, expected) = reference(FIXTURE)?;
    let tokens: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(folder().join("tokens.json"))?)?;
    worker(env).await?;
    // Some hundred passes' worth; at first, four are prepared.
    let (rounds, of_round) = (100, tokens.iter().map(Vec::len).sum::<usize>());
    let many = texts.iter().cycle().take(rounds * texts.len()).cloned();
    env.client.publish(MODEL, Message::texts(env.setup.encoding, MODEL, "many", REPLIES, many)?).await?;
    let (vectors, counted) = answer(&mut env.replies().await?).await?;
    ensure!(vectors.len() == rounds * texts.len(), "{} vectors", vectors.len());
    ensure!(counted == (rounds * of_round) as u64, "{counted} tokens, not {rounds} x {of_round}");
    for (at, vector) in vectors.iter().enumerate() {
        let of_text = &expected[at % texts.len()];
        let off = vector.iter().zip(of_text).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        ensure!(vector.len() == of_text.len() && off <= 1e-5, "text {at} is off by {off}");
    }
    Ok(())
}

async fn a_text_of_one_endless_word_takes_little_memory(env: &mut TestEnv) -> Result<()> {
    const MIB: u64 = 1 << 20;
    let worker = worker(env).await?;
    let mut replies = env.replies().await?;
    let job = |id: &str, text: String| Message::texts(env.setup.encoding, MODEL, id, REPLIES, [text]);
    env.client.publish(MODEL, job("short", "x".repeat(1000))?).await?;
    let short = answer(&mut replies).await?;
    let before = worker.peak_bytes().context("the worker ended")?;
    env.client.publish(MODEL, job("endless", "x".repeat(15 * MIB as usize))?).await?;
    // One unknown word, as the short one is.
    ensure!(answer(&mut replies).await? == short);
    let grown = worker.peak_bytes().context("the worker ended")? - before;
    // The body as it came and the text that was read of it are 30 MiB.
    ensure!(grown <= 100 * MIB, "the worker grew by {} MiB", grown / MIB);
    Ok(())
}
