//! A worker that dies between two steps with a job: nothing is lost, and only unavoidable duplicates occur.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::dead_queue;
use vramq_schemas::{Output, Reason, ReplyKind};
use vramq_tests::answers::items;
use vramq_tests::at_rest::comes_to_rest;
use vramq_tests::client::{Mailbox, Received};
use vramq_tests::on_queue_types;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::SILENCE;
use vramq_tests::worker::Worker;

on_queue_types!(
    before_and_after_the_answer,
    between_part_and_requeue,
    around_the_dead_letter,
    a_panic_of_the_event_loop,
);

/// A job of so many items, ten a pass.
const ITEMS: usize = 40;
const PASS: &str = "model.echo.pass_tokens=10";

/// Starts a worker that dies at a failpoint, and waits until it is dead and its jobs are back in the queue or gone.
async fn dies_at(env: &mut TestEnv, point: &str, settings: &[&str]) -> Result<()> {
    env.announce("a failpoint is set");
    let drill = format!("worker.drill={point}=crash");
    let worker = env.spawn_worker(&[&[drill.as_str()], settings].concat())?;
    let code = worker.exited().await.with_context(|| format!("it does not die at {point}"))?;
    ensure!(code.is_none(), "at {point} it ended with {code:?}:\n{}", worker.log.text());
    env.vhost.workers_are_disconnected().await
}

/// All replies to a job: its last one has to come so many times, and nothing more when the heir of the dead worker has no work left.
async fn replies_to(
    env: &TestEnv,
    heir: &Worker,
    replies: &mut Mailbox,
    id: &str,
    times: usize,
) -> Result<Vec<Received>> {
    let (mut all, mut ended) = (Vec::new(), 0);
    while ended < times {
        let next = replies.next().await;
        let reply = next.with_context(|| format!("{ended} of at least {times} last replies to {id}"))?;
        ended += usize::from(reply.kind()? != ReplyKind::Part);
        all.push(reply);
    }
    comes_to_rest(env, heir).await?;
    while let Some(reply) = replies.next_within(SILENCE).await? {
        all.push(reply);
    }
    ensure!(all.iter().all(|reply| reply.id() == id));
    Ok(all)
}

/// Checks that every item is answered, rightly each time; gives how often each was answered too often.
fn repeats(replies: &[Received], items: &[String]) -> Result<Vec<usize>> {
    let mut times = vec![0; items.len()];
    for reply in replies {
        let offset = reply.reply()?.offset as usize;
        for (at, output) in (offset..).zip(reply.outputs()?.outputs) {
            ensure!(output == Output::Json(items[at].as_str().into()), "item {at}: {output:?}");
            times[at] += 1;
        }
    }
    ensure!(times.iter().all(|times| *times > 0), "items without an answer: {times:?}");
    Ok(times.into_iter().map(|times| times - 1).collect())
}

async fn before_and_after_the_answer(env: &mut TestEnv) -> Result<()> {
    // Whether what was sent last still reaches the broker is a matter of microseconds.
    let points: BTreeMap<&str, RangeInclusive<usize>> = [
        ("decode", 0..=0),
        ("pass", 0..=0),
        ("ran", 0..=0),
        ("sent-reply", 0..=1),
        ("confirmed-reply", 1..=1),
        ("acked", 0..=1),
    ]
    .into();
    let items = items(3);
    let mut replies = env.replies().await?;
    for (point, allowed) in points {
        // The first worker makes the queue; the job then is there before the one that dies.
        env.worker(&[]).await?.drain().await?;
        env.client.publish(MODEL, env.job(point, items.clone())?).await?;
        dies_at(env, point, &[]).await?;
        let heir = env.worker(&[]).await?;
        // One that died after its ack has reached the broker leaves nothing to do.
        let came = replies_to(env, &heir, &mut replies, point, 1 + *allowed.start()).await?;
        let repeated = repeats(&came, &items)?;
        ensure!(repeated.iter().all(|times| allowed.contains(times)), "{point}: repeated {repeated:?}");
        heir.drain().await?;
    }
    Ok(())
}

async fn between_part_and_requeue(env: &mut TestEnv) -> Result<()> {
    for text in ["out of memory", "made to fail"] {
        env.announce(text);
    }
    // The first pass fits, the second one does not: ten items are finished when the job goes back.
    let settings = [PASS, "device.cpu.fault=skip=1,fail=1", "worker.suspect_after=100"];
    // How often the first ten are repeated, and the others.
    let points = [
        ("sent-part", 0..=1, 0..=0),
        ("confirmed-part", 1..=1, 0..=0),
        ("sent-job", 1..=1, 0..=1),
        // The job exists twice, once from its start and once from the eleventh item. A classic queue also delivers a job before it confirms
        // it, so the second one may have been answered already.
        ("confirmed-job", 1..=1, 1..=2),
    ];
    let items = items(ITEMS);
    let mut replies = env.replies().await?;
    for (point, first, others) in points {
        env.worker(&[]).await?.drain().await?;
        env.client.publish(MODEL, env.job(point, items.clone())?).await?;
        dies_at(env, point, &settings).await?;
        let heir = env.worker(&[PASS]).await?;
        let came = replies_to(env, &heir, &mut replies, point, 1 + *others.start()).await?;
        let repeated = repeats(&came, &items)?;
        let (head, tail) = repeated.split_at(10);
        ensure!(
            head.iter().all(|times| first.contains(times)) && tail.iter().all(|times| others.contains(times)),
            "{point}: repeated {repeated:?}"
        );
        heir.drain().await?;
    }
    Ok(())
}

/// Workers die before and after the confirm of a job's dead letter: there is one, or the same once more. How the job came to its end makes
/// no difference there: every message that a worker publishes passes the same points.
async fn around_the_dead_letter(env: &mut TestEnv) -> Result<()> {
    env.announce("job dead-lettered");
    let mut replies = env.replies().await?;
    for (point, letters_min) in [("sent-letter", 1), ("confirmed-letter", 2)] {
        let job = env.job(point, ["x"])?.with_body("{no job");
        env.worker(&[]).await?.drain().await?;
        env.client.publish(MODEL, job.clone()).await?;
        dies_at(env, point, &[]).await?;
        let heir = env.worker(&[]).await?;
        let mut letters = env.client.mailbox(&dead_queue(MODEL)).await?;
        let mut came = letters.take(letters_min).await?;
        comes_to_rest(env, &heir).await?;
        while let Some(letter) = letters.next_within(SILENCE).await? {
            came.push(letter);
        }
        ensure!((letters_min..=2).contains(&came.len()), "{point}: {} letters", came.len());
        for letter in came {
            ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Malformed);
        }
        ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
        heir.drain().await?;
        while replies.next_within(SILENCE).await?.is_some() {}
    }
    Ok(())
}

/// The worker ends, and by its exit code asks for a restart.
async fn a_panic_of_the_event_loop(env: &mut TestEnv) -> Result<()> {
    for text in ["a failpoint is set", "panicked"] {
        env.announce(text);
    }
    let worker = env.worker(&["worker.drill=received=panic,job=killer"]).await?;
    let mut replies = env.replies().await?;
    env.client.publish(MODEL, env.job("killer", items(3))?).await?;
    let code = worker.exited().await?;
    ensure!(code == Some(5), "it ended with {code:?}:\n{}", worker.log.text());
    env.vhost.workers_are_disconnected().await?;
    let heir = env.worker(&[]).await?;
    let came = replies_to(env, &heir, &mut replies, "killer", 1).await?;
    ensure!(repeats(&came, &items(3))? == [0, 0, 0], "{came:?}");
    heir.drain().await
}
