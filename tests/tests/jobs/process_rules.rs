//! Rules of programs for unusual items, and memory that goes by an item's bytes, through the broker.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use vramq_schemas::{Output, Reason, ReplyKind};
use vramq_tests::metrics::processes_run;
use vramq_tests::on_one_setup;
use vramq_tests::shared_device::SharedDevice;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;

use crate::process::{Served, consuming, outputs};

on_one_setup!(
    an_exclusive_item_runs_alone_beside_jobs_that_share,
    an_item_that_a_rule_refuses_costs_its_job_only,
    memory_by_bytes_decides_how_many_items_share_a_pass,
);

/// When an item ran, by the clock of all processes, and in a pass of how many.
#[derive(Clone, Copy, Debug)]
struct Span {
    began: f64,
    ended: f64,
    items: u64,
}

impl Span {
    fn of(output: &Value) -> Result<Self> {
        let number = |name: &str| output[name].as_f64().with_context(|| format!("no {name}: {output}"));
        let items = output["items"].as_u64().with_context(|| format!("no items: {output}"))?;
        Ok(Self { began: number("began")?, ended: number("ended")?, items })
    }

    fn overlaps(self, other: Self) -> bool {
        self.began < other.ended && other.began < self.ended
    }
}

async fn an_exclusive_item_runs_alone_beside_jobs_that_share(env: &mut TestEnv) -> Result<()> {
    const BEFORE: usize = 12;
    const JOBS: usize = 24;
    let more = "instances = 3\nitems_max = 2\nvram = { base_mib = 10, mib_per_unit = 1, learn = false }\n\
        rule = [{ when = \"characters > 20\", exclusive = true }]";
    let served = Served::new(env, more, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    // Until all three processes are there, so that the others could run beside it.
    let mut warm = 0;
    until("three processes", async || {
        env.client.publish(MODEL, env.job(&format!("warm {warm}"), ["sleep 0.3"; 6])?).await?;
        outputs(&mut replies, &format!("warm {warm}")).await?;
        warm += 1;
        Ok((worker.log.count("process loaded") == 3).then_some(()))
    })
    .await?;
    // All of them wait, those before the exclusive item and those after it, while all processes are busy.
    env.client.publish(MODEL, env.job("gate", ["wait gate"; 6])?).await?;
    processes_run(&worker, 3).await?;
    for at in 0..JOBS {
        if at == BEFORE {
            // Two usual items, and between them the unusual one.
            let long = "span 0.5 with more than 20 characters";
            env.client.publish(MODEL, env.job("exclusive", ["span 0.2", long, "span 0.2"])?).await?;
        }
        env.client.publish(MODEL, env.job(&format!("job {at}"), ["span 0.2"])?).await?;
    }
    std::fs::write(served.path("gate"), "")?;
    outputs(&mut replies, "gate").await?;
    let (mut shared, mut alone) = (Vec::new(), None);
    let mut done = 0;
    while done < JOBS + 1 {
        let reply = replies.next().await?;
        ensure!(reply.kind()? != ReplyKind::Failed, "{}: {:?}", reply.id(), reply.failure());
        let offset = reply.reply()?.offset as usize;
        for (at, output) in reply.outputs()?.outputs.into_iter().enumerate() {
            let Output::Json(value) = output else { anyhow::bail!("no JSON: {output:?}") };
            let span = Span::of(&value)?;
            if (reply.id(), offset + at) == ("exclusive", 1) {
                alone = Some(span);
            } else {
                shared.push(span);
            }
        }
        done += usize::from(reply.kind()? == ReplyKind::Done);
    }
    let alone = alone.context("no output of the exclusive item")?;
    ensure!(alone.items == 1, "it shared its pass: {alone:?}");
    let beside: Vec<_> = shared.iter().filter(|span| span.overlaps(alone)).collect();
    ensure!(beside.is_empty(), "{beside:?} ran beside {alone:?}");
    // Others did share: passes, and the device.
    ensure!(shared.iter().any(|span| span.items == 2), "{shared:?}");
    let overlap = |one: &Span| shared.iter().filter(|other| other.overlaps(*one)).count();
    ensure!(shared.iter().any(|span| overlap(span) > 2), "{shared:?}");
    // Some ran before it and some after it: it waited for no idle worker, and kept nobody for ever.
    ensure!(shared.iter().any(|span| span.ended <= alone.began), "{alone:?} {shared:?}");
    ensure!(shared.iter().any(|span| span.began >= alone.ended), "{alone:?} {shared:?}");
    worker.drain().await
}

async fn an_item_that_a_rule_refuses_costs_its_job_only(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let more = "instances = 1\nvram = { mib_per_unit = 1 }\n\
        rule = [{ when = \"bytes > 30\", refuse = \"texts above 30 bytes\" }, { when = \"bytes >= 0\", exclusive = true }]";
    let _served = Served::new(env, more, &[])?;
    let worker = consuming(env, &[]).await?;
    let mut replies = env.replies().await?;
    let long = format!("echo {}", "x".repeat(26));
    for (id, second) in [("before", "echo b"), ("refused", long.as_str()), ("after", "echo c")] {
        env.client.publish(MODEL, env.job(id, ["echo a", second])?).await?;
    }
    let mut done = Vec::new();
    let mut failure = None;
    while done.len() < 2 || failure.is_none() {
        let reply = replies.next().await?;
        match reply.kind()? {
            ReplyKind::Done => done.push(reply.id().to_owned()),
            ReplyKind::Failed => failure = Some((reply.id().to_owned(), reply.failure()?)),
            _ => {}
        }
    }
    done.sort();
    ensure!(done == ["after", "before"], "{done:?}");
    let (id, failure) = failure.context("no failure")?;
    ensure!((id.as_str(), failure.reason) == ("refused", Reason::InvalidInput), "{id} {failure:?}");
    let said = "input 1 is refused: texts above 30 bytes";
    ensure!(failure.error.contains(said), "{failure:?}");
    let letter = env.dead_letters().await?.next().await?;
    let dossier = letter.dead_letter()?;
    ensure!(letter.id() == "refused" && dossier.error.contains(said), "{dossier:?}");
    ensure!(dossier.reason == Reason::InvalidInput, "{dossier:?}");
    worker.drain().await?;
    // Nothing of it ran.
    ensure!(worker.total("items").await? == 4, "{}", worker.log.text());
    Ok(())
}

/// A text of so many bytes and about half as many characters.
fn text_of(bytes: usize) -> String {
    let mut text = "echo ".to_owned();
    while text.len() + 'ü'.len_utf8() <= bytes {
        text.push('ü');
    }
    let rest = bytes - text.len();
    text + &"x".repeat(rest)
}

/// On a device of 1,000 MiB, of which the process holds 100, with a MiB for each byte.
async fn memory_by_bytes_decides_how_many_items_share_a_pass(env: &mut TestEnv) -> Result<()> {
    let device = SharedDevice::new(1000)?;
    let settings = device.settings();
    let path = settings[0].split_once('=').context("no file")?.1;
    let more = "instances = 1\nitems_max = 8\n\
        vram = { base_mib = 100, per = \"bytes\", mib_per_unit = 1, learn = false }";
    let served = Served::new(env, more, &[("DEVICE", path), ("BASE_MIB", "100")])?;
    let worker = consuming(env, &settings.each_ref().map(String::as_str)).await?;
    let mut replies = env.replies().await?;
    // Two items of 400 fit, four of 220, and all eight that a pass may have.
    for (bytes, together) in [(400, 2), (220, 4), (20, 8)] {
        let gate = format!("gate {bytes}");
        env.client.publish(MODEL, env.job(&gate, [format!("wait {gate}")])?).await?;
        processes_run(&worker, 1).await?;
        let (id, text) = (format!("of {bytes}"), text_of(bytes));
        ensure!(text.len() == bytes && text.chars().count() < bytes, "{text}");
        env.client.publish(MODEL, env.job(&id, vec![text; 8])?).await?;
        std::fs::write(served.path(&gate), "")?;
        outputs(&mut replies, &gate).await?;
        let (found, _) = outputs(&mut replies, &id).await?;
        let items: Vec<_> = found.iter().filter_map(|output| output["items"].as_u64()).collect();
        ensure!(items == [together; 8], "items of {bytes} bytes ran in passes of {items:?}");
    }
    worker.drain().await?;
    ensure!(device.memory().free == 1000 << 20, "{:?}", device.memory());
    Ok(())
}
