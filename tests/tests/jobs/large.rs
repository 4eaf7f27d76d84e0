//! Large jobs: replies in parts, many items, outputs larger than their inputs.

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::{BODY_BYTES_MAX, Encoding, Output, Reason, ReplyKind};
use vramq_tests::client::Mailbox;
use vramq_tests::on_all_setups;
use vramq_tests::test_env::{MODEL, TestEnv};

const MIB: usize = 1 << 20;

on_all_setups!(
    a_large_reply_comes_in_parts,
    ten_thousand_items_are_one_job,
    outputs_that_grow_on_the_wire_are_still_parted,
);

/// Only in bincode: as JSON, a job with such an output would be over the cap itself.
mod an_output_over_the_cap_is_refused_with_its_size {
    vramq_tests::test_over!(run, quorum, Quorum, Bincode, an_output_over_the_cap_is_refused_with_its_size,);
    vramq_tests::test_over!(run, classic, Classic, Bincode, an_output_over_the_cap_is_refused_with_its_size,);
}

/// All replies of a job put together by their offsets, how many there were, and for how many milliseconds it ran.
async fn reassembled(replies: &mut Mailbox, id: &str) -> Result<(Vec<Output>, usize, u64)> {
    let mut outputs = Vec::new();
    let mut parts = 0;
    loop {
        let reply = replies.next().await?;
        ensure!(reply.id() == id);
        if reply.kind()? == ReplyKind::Failed {
            anyhow::bail!("failed: {:?}", reply.failure()?);
        }
        ensure!(reply.body.len() <= BODY_BYTES_MAX, "a part of {} bytes", reply.body.len());
        let headers = reply.reply()?;
        let some = reply.outputs()?.outputs;
        ensure!(headers.items as usize == some.len());
        // One worker, one channel: parts come in order.
        ensure!(headers.offset as usize == outputs.len(), "{headers:?} after {}", outputs.len());
        outputs.extend(some);
        parts += 1;
        if reply.kind()? == ReplyKind::Done {
            ensure!(headers.items_total as usize == outputs.len());
            return Ok((outputs, parts, headers.ran_ms));
        }
    }
}

fn texts(outputs: &[Output]) -> Result<Vec<&str>> {
    let text = |output| match output {
        &Output::Json(serde_json::Value::String(ref text)) => Some(text.as_str()),
        _ => None,
    };
    outputs.iter().map(text).collect::<Option<_>>().context("an output is not a text")
}

async fn a_large_reply_comes_in_parts(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let inputs: Vec<_> = (0..15u8).map(|at| ((b'a' + at) as char).to_string().repeat(MIB)).collect();
    env.client.publish(MODEL, env.job("large", inputs.clone())?).await?;
    let (outputs, parts, _) = reassembled(&mut env.replies().await?, "large").await?;
    ensure!(texts(&outputs)? == inputs);
    ensure!((12..=16).contains(&parts), "{parts} parts");
    Ok(())
}

async fn ten_thousand_items_are_one_job(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let inputs: Vec<_> = (0..10_000).map(|at| format!("item {at}")).collect();
    env.client.publish(MODEL, env.job("many", inputs.clone())?).await?;
    let (outputs, parts, ran_ms) = reassembled(&mut env.replies().await?, "many").await?;
    // On a slow machine its passes take so long that the caller gets what is finished of it.
    ensure!(texts(&outputs)? == inputs, "other outputs");
    ensure!(parts as u64 <= 1 + ran_ms / PART_AFTER_MS, "{parts} parts of a job that ran for {ran_ms} ms");
    Ok(())
}

/// When a caller has seen nothing for so long, it gets a part, however small.
const PART_AFTER_MS: u64 = 1000;

/// Control characters take one byte in memory and six in JSON.
async fn outputs_that_grow_on_the_wire_are_still_parted(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let bytes = match env.setup.encoding {
        // As JSON, the job itself is nearly as large as a body may be.
        Encoding::Json => BODY_BYTES_MAX / 6 / 8 - 16,
        Encoding::MessagePack | Encoding::Bincode => MIB,
    };
    let inputs = vec!["\u{1}".repeat(bytes); 8];
    env.client.publish(MODEL, env.job("growing", inputs.clone())?).await?;
    let (outputs, parts, _) = reassembled(&mut env.replies().await?, "growing").await?;
    ensure!(texts(&outputs)? == inputs && parts > 1, "{parts} parts");
    Ok(())
}

async fn an_output_over_the_cap_is_refused_with_its_size(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    env.worker(&[]).await?;
    let job = env.job("too large an output", ["\u{1}".repeat(3 * MIB)])?;
    env.client.publish(MODEL, job.clone()).await?;
    let failure = env.replies().await?.next().await?.failure()?;
    ensure!(failure.reason == Reason::TooLarge && failure.error.contains("output"), "{failure:?}");
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body);
    Ok(())
}
