//! Hostile messages: whatever a publisher writes into headers and properties, each job ends once, the worker continues, and the
//! broker has no more messages than jobs ended.
//!
//! `VRAMQ_TEST_FULL=1` publishes 100,000 tiny jobs rather than 20,000.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use vramq_schemas::topology::{dead_queue, jobs_queue};
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::answers::{answered_once, items};
use vramq_tests::dead_letters::Operator;
use vramq_tests::direct::{Caller, calling};
use vramq_tests::job::Message;
use vramq_tests::raw::{RawProperties, publish, take_and_leave};
use vramq_tests::rejections::{
    Rejected, all_published, counted_worker, has_published, keeps_serving, rejected_and_reported,
};
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::setup::{Queue, full};
use vramq_tests::shared_device::ECHO_ITEM_BYTES as ITEM;
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{on_one_setup, on_queue_types};

on_queue_types!(
    headers_that_claim_earlier_attempts,
    forged_attempts_and_out_of_memory,
    odd_properties,
    jobs_that_expire_at_once,
    reply_queues_of_all_kinds,
    headers_that_fill_a_frame,
    headers_that_fill_a_frame_and_come_again,
    headers_that_fill_a_frame_and_are_dead_lettered_by_the_broker,
);
on_one_setup!(very_many_jobs_and_a_very_large_one);

const MIB: usize = 1 << 20;

const BODY: &[u8] = br#"{"model":"echo","inputs":["x"]}"#;

async fn headers_that_claim_earlier_attempts(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = counted_worker(env, &[]).await?;
    let deep = (0..20).fold(AMQPValue::LongInt(1), |inner, _| AMQPValue::FieldArray(vec![inner].into()));
    let refused = [
        ("batch-hint", AMQPValue::Float(f32::MAX)),
        ("batch-hint", AMQPValue::DecimalValue(lapin::types::DecimalValue { scale: 255, value: 1 })),
        ("batch-hint", AMQPValue::Timestamp(8)),
        ("batch-hint", AMQPValue::Timestamp(u64::MAX)),
        ("vramq-batch-hint", AMQPValue::Timestamp(8)),
        ("batch-hint-max", AMQPValue::LongLongInt(i64::MIN)),
        ("batch-hint-max", AMQPValue::Double(1e300)),
        ("attempt", AMQPValue::LongLongInt(i64::MAX)),
        ("attempt", deep.clone()),
        ("items-done", AMQPValue::Float(1.5)),
        ("delays", AMQPValue::LongInt(-1)),
        ("delays", AMQPValue::LongString("9".repeat(60_000).into())),
        ("exclusive", AMQPValue::ByteArray(vec![1].into())),
        ("expires-at-ms", AMQPValue::LongLongInt(i64::MIN)),
        ("expires-at-ms", AMQPValue::Double(1.0)),
        ("expires-at-ms", deep.clone()),
    ];
    let mut cases = Vec::new();
    for (at, (name, value)) in refused.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        cases.push(Rejected::new(&what, job, Reason::Malformed));
    }
    rejected_and_reported(env, &cases).await?;
    // Expired according to an earlier attempt that never happened.
    let old = env.job("old", ["1"])?.with_header("expires-at-ms", AMQPValue::LongInt(1)).as_worker();
    rejected_and_reported(env, &[Rejected::new("old", old, Reason::Expired)]).await?;

    let taken = [
        ("batch-hint-max", AMQPValue::LongInt(0)),
        ("attempt", AMQPValue::LongLongInt(u32::MAX.into())),
        ("delays", AMQPValue::LongLongInt(u32::MAX.into())),
        ("expires-at-ms", AMQPValue::LongLongInt(i64::MAX)),
        ("history", deep),
        ("history", AMQPValue::FieldArray(vec![AMQPValue::FieldTable(FieldTable::default()); 5000].into())),
        ("publish-seq", AMQPValue::LongInt(1)),
        ("publish-seq", AMQPValue::FieldTable(FieldTable::default())),
        ("x-death", AMQPValue::LongString("not a list".into())),
        ("x-delivery-count", AMQPValue::LongLongInt(i64::MAX)),
        ("worker", AMQPValue::Boolean(true)),
        ("items-done", AMQPValue::LongInt(3)),
    ];
    let mut replies = env.replies().await?;
    let count = taken.len();
    for (at, (name, value)) in taken.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        env.client.publish(MODEL, job).await.with_context(|| what.clone())?;
        let reply = replies.next().await.with_context(|| what.clone())?;
        ensure!(reply.kind()? == ReplyKind::Done && reply.id() == what, "{what}: {:?}", reply.properties);
        let headers = reply.reply()?;
        // With the forged `items-done` everything counts as answered, so only an empty `done` is left to send.
        let items = if name == "items-done" { 0 } else { 3 };
        ensure!((headers.offset, headers.items, headers.items_total) == (3 - items, items, 3), "{what}");
        ensure!(reply.outputs()?.outputs.len() == items as usize, "{what}");
    }
    drop(replies);
    keeps_serving(env, &worker).await?;
    has_published(&worker, &proxy, 2 * (cases.len() + 1) + count + 1).await
}

/// All forgeable headers at once, on a worker without enough memory for the whole job.
async fn forged_attempts_and_out_of_memory(env: &mut TestEnv) -> Result<()> {
    env.announce("out of memory");
    env.announce("made to fail");
    let fault = format!("device.cpu.fault=above={}", 9 * ITEM);
    let (worker, proxy) = counted_worker(env, &[&fault]).await?;
    let keys = |names: &[&str]| {
        let names = names.iter().map(|name| AMQPValue::LongString((*name).into()));
        AMQPValue::FieldArray(FieldArray::from(names.collect::<Vec<_>>()))
    };
    let death = |reason: &str| {
        let mut table = FieldTable::default();
        table.insert("queue".into(), AMQPValue::LongString(jobs_queue(MODEL).as_str().into()));
        table.insert("reason".into(), AMQPValue::LongString(reason.into()));
        table.insert("count".into(), AMQPValue::LongLongInt(1 << 40));
        AMQPValue::FieldTable(table)
    };
    let deaths = vec![death("expired"), death("rejected"), death("maxlen")];
    let items = items(20);
    let mut job = env
        .job("forged", items.clone())?
        .as_worker()
        .with(|p| p.with_priority(255).with_timestamp(u64::MAX).with_expiration("3600000".into()))
        .with_header("attempt", AMQPValue::LongLongInt(u32::MAX.into()))
        .with_header("delays", AMQPValue::LongLongInt(u32::MAX.into()))
        .with_header("batch-hint", AMQPValue::LongLongInt(u32::MAX.into()))
        .with_header("batch-hint-max", AMQPValue::LongInt(1))
        .with_header("exclusive", AMQPValue::Boolean(true))
        .with_header("history", AMQPValue::FieldArray(vec![death("long ago"); 200].into()))
        .with_header("publish-seq", AMQPValue::LongInt(1))
        .with_header("x-death", AMQPValue::FieldArray(deaths.into()))
        .with_header("x-first-death-queue", AMQPValue::LongString(jobs_queue(MODEL).as_str().into()))
        .with_header("CC", keys(&[MODEL, "nobody"]))
        .with_header("BCC", keys(&["nobody"]));
    for at in 0..2000 {
        job = job.with_header(&format!("header-{at:04}"), AMQPValue::LongString("h".repeat(20).into()));
    }
    env.client.publish(MODEL, job).await?;
    let replies = answered_once(&mut env.replies().await?, "forged", &items).await?;
    let last = replies.last().context("no replies")?.reply()?;
    // The counter saturates instead of wrapping around.
    ensure!(last.attempt == u32::MAX, "{last:?}");
    // The whole log is here when the process has ended.
    worker.drain().await?;
    let requeued = worker.log.count("\"out of memory\"");
    ensure!((1..=5).contains(&requeued), "{requeued} times back to the queue");
    has_published(&worker, &proxy, requeued + replies.len()).await?;
    ensure!(worker.total("requeued").await? == requeued as u64);
    Ok(())
}

async fn odd_properties(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = counted_worker(env, &[]).await?;
    let longest = "m".repeat(255);
    let odd = |id: &str| env.job(id, ["x"]);
    let jobs = [
        odd("timestamp 0")?.with(|p| p.with_timestamp(0)),
        odd("the last timestamp")?.with(|p| p.with_timestamp(u64::MAX)),
        odd("the last timestamp in seconds")?.with(|p| p.with_timestamp(100_000_000_000)),
        odd("the longest expiration")?.with(|p| p.with_expiration("4294967295".into())),
        odd("the last of all moments")?
            .with(|p| p.with_timestamp(u64::MAX).with_expiration("4294967295".into())),
        odd("priority 255")?.with(|p| p.with_priority(255)),
        odd("transient")?.with(|p| p.with_delivery_mode(1)),
        // Named, but not so.
        odd("content encoding")?.with(|p| p.with_content_encoding("gzip".into())),
        odd("type")?.with(|p| p.with_type("done".into())),
        odd("an empty reply_to")?.with(|p| p.with_reply_to("".into())),
        odd("\u{0}\n\u{1b}[31m\u{202e}")?,
    ];
    let default = vramq_schemas::topology::default_reply_queue(MODEL);
    let (mut replies, mut defaults) = (env.replies().await?, env.client.mailbox(&default).await?);
    for job in &jobs {
        let id = job.properties.message_id().as_ref().map_or("", |id| id.as_str());
        env.client.publish(MODEL, job.clone()).await.with_context(|| id.to_owned())?;
        let mailbox = if id == "an empty reply_to" { &mut defaults } else { &mut replies };
        let reply = mailbox.next().await.with_context(|| id.to_owned())?;
        ensure!(reply.kind()? == ReplyKind::Done && reply.id() == id, "{id}: {:?}", reply.properties);
    }
    // The correlation that the harness gives would be too long for it.
    let job = Message { properties: jobs[0].properties.clone(), ..odd("longest")? }
        .with(|p| p.with_message_id(longest.as_str().into()).with_correlation_id(longest.as_str().into()));
    env.client.publish(MODEL, job).await?;
    let reply = replies.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done && reply.id() == longest && reply.correlation_id() == longest);
    // Its correlation is its id then.
    let unnamed = odd("an empty id")?.with(|p| p.with_message_id("".into()));
    let correlation = unnamed.properties.correlation_id().clone();
    env.client.publish(MODEL, unnamed).await?;
    let reply = replies.next().await?;
    let correlation = correlation.as_ref().map_or("", |id| id.as_str());
    ensure!(
        reply.kind()? == ReplyKind::Done && !correlation.is_empty() && reply.correlation_id() == correlation
    );
    drop((replies, defaults));

    // Bodies are not unpacked.
    let gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\x56\x4a\x4c\x4a\x56\xb2\x52\x50\x32\x54\xaa\x05\0".to_vec();
    let packed = odd("packed")?.with(|p| p.with_content_encoding("gzip".into())).with_body(gzip);
    let bad = [Rejected::new("packed", packed, Reason::Malformed)];
    rejected_and_reported(env, &bad).await?;
    let line = worker.log.wait_for("content encoding").await?;
    ensure!(line.text().contains("compression"), "{}", line.text());
    keeps_serving(env, &worker).await?;
    has_published(&worker, &proxy, jobs.len() + 2 + 2 * bad.len() + 1).await
}

/// Whether it runs, the worker refuses it, or the broker never delivers it: each ends once.
async fn jobs_that_expire_at_once(env: &mut TestEnv) -> Result<()> {
    const JOBS: usize = 50;
    const SHORT: Duration = Duration::from_millis(5);
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    let job = |at: usize| Ok(env.job(&format!("brief {at}"), ["x"])?.with(|p| p.with_expiration("0".into())));
    let jobs = (0..JOBS).map(job).collect::<Result<Vec<_>>>()?;
    env.client.publish_all(MODEL, jobs).await?;
    let (mut replies, mut dead) = (env.replies().await?, env.dead_letters().await?);
    let (mut done, mut refused, mut letters, mut dropped) = (0, 0, 0, 0);
    let ended = until("an end of each", async || {
        // One after the other: a read that is given up after it has its message would lose it.
        if let Some(reply) = replies.next_within(SHORT).await? {
            if reply.kind()? == ReplyKind::Done {
                done += 1;
            } else {
                ensure!(reply.failure()?.reason == Reason::Expired, "{:?}", reply.failure());
                refused += 1;
            }
        }
        if let Some(letter) = dead.next_within(SHORT).await? {
            dropped += usize::from(letter.headers().inner().contains_key("x-death"));
            letters += 1;
        }
        Ok((done + letters >= JOBS && refused + dropped >= letters).then_some(()))
    });
    ended.await?;
    ensure!(done + letters == JOBS && refused + dropped == letters, "{done} {refused} {letters} {dropped}");
    drop((replies, dead));
    keeps_serving(env, &worker).await
}

async fn reply_queues_of_all_kinds(env: &mut TestEnv) -> Result<()> {
    let (worker, proxy) = counted_worker(env, &[]).await?;
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    // Exchanges are no queues, and a name is only a name.
    let nowhere = ["vramq.jobs", "vramq.dead", "amq.direct", "\u{0}", &"q".repeat(255)];
    let mut dead = env.dead_letters().await?;
    for queue in nowhere {
        let job = env.job("unroutable", ["x"])?.with(|p| p.with_reply_to(queue.into()));
        env.client.publish(MODEL, job.clone()).await?;
        // The results and the job.
        let letters = dead.take(2).await.with_context(|| queue.to_owned())?;
        ensure!(letters.iter().filter(|letter| letter.body == job.body).count() == 1, "{queue}");
        for letter in &letters {
            ensure!(letter.dead_letter()?.reason == Reason::Unroutable, "{queue}");
            ensure!(letter.properties.reply_to() == job.properties.reply_to(), "{queue}");
        }
    }

    // The broker's own way to answer without a queue, to somebody who waits and to somebody who has left.
    let mut caller = Caller::open(&env.url).await?;
    caller.call(env.job("direct", ["x"])?).await?;
    let job = env.job("left", ["x"])?.with(calling).with_body("{");
    caller.publish(&job).await?;
    caller.leave().await?;
    let letter = dead.next().await?;
    ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Malformed);
    drop(dead);
    keeps_serving(env, &worker).await?;
    // Replies that came back count, too: for each a letter with the results and one with the job. Then a direct reply, a letter, a
    // failed reply to who has left, and the last job's answer.
    has_published(&worker, &proxy, 3 * nowhere.len() + 1 + 2 + 1).await
}

/// A job whose header frame is so many bytes smaller than the broker takes.
fn filling(id: &str, left: usize) -> Result<RawProperties> {
    const FRAME_BYTES_MAX: usize = 128 << 10;
    // Around the text: the frame's head and end, class, weight, size, flags, and the properties' own lengths.
    let around = 8 + 12 + 2 + 4 + 2 + 1 + 4 + (1 + REPLIES.len()) + (1 + id.len());
    let text = vec![b'h'; FRAME_BYTES_MAX - around - left];
    Ok(RawProperties {
        message_id: id.into(),
        reply_to: REPLIES.into(),
        headers: [b"\x01hS", &u32::try_from(text.len())?.to_be_bytes()[..], &text].concat(),
        ..RawProperties::default()
    })
}

/// A job with as many headers as the broker takes would be too large to come again: it ends the first time.
async fn headers_that_fill_a_frame(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("job dead-lettered");
    env.announce("dropped headers that are too large to publish again");
    let (mut replies, mut dead) = (env.replies().await?, env.dead_letters().await?);
    for left in [0, 16, 32, 64, 1000, 6000, 9000, 20_000] {
        let id = format!("{left} bytes left");
        publish(&env.url, MODEL, &filling(&id, left)?, BODY).await.with_context(|| id.clone())?;
        let reply = replies.next().await.with_context(|| id.clone())?;
        ensure!(reply.id() == id);
        if left > 8192 {
            ensure!(reply.kind()? == ReplyKind::Done, "{id}");
        } else {
            ensure!(reply.failure()?.reason == Reason::TooLarge, "{id}");
            ensure!(dead.next().await?.body == BODY, "{id}");
        }
    }
    drop((replies, dead));
    keeps_serving(env, &worker).await
}

/// A quorum queue adds `x-delivery-count` to a job that it delivers again: its header frame is larger than any that a client may
/// send. It costs no session, and no other job. A classic queue counts nothing, so the worker publishes the job again with a
/// count, and without the header that leaves no space for it.
async fn headers_that_fill_a_frame_and_come_again(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?.drain().await?;
    publish(&env.url, MODEL, &filling("again", 0)?, BODY).await?;
    take_and_leave(&env.url, &jobs_queue(MODEL)).await?;
    env.client.publish(MODEL, env.job("behind", ["x"])?).await?;
    env.announce("job dead-lettered");
    env.announce("dropped headers that are too large to publish again");
    let worker = env.worker(&[]).await?;
    let is_rejected = env.setup.queue == Queue::Quorum;
    let mut replies = env.replies().await?;
    for _ in 0..2 {
        let reply = replies.next().await?;
        match reply.id() {
            "again" if is_rejected => ensure!(reply.failure()?.reason == Reason::TooLarge),
            id => ensure!(["again", "behind"].contains(&id) && reply.kind()? == ReplyKind::Done, "{id}"),
        }
    }
    drop(replies);
    if is_rejected {
        let letter = env.dead_letters().await?.next().await?;
        ensure!(letter.body == BODY && letter.dead_letter()?.reason == Reason::TooLarge);
    }
    keeps_serving(env, &worker).await?;
    worker.log.counts("\"session open\"", 1).await?;
    Ok(())
}

/// The broker adds `x-death` and more, about 1 KiB, and operators have to be able to read what it is about.
async fn headers_that_fill_a_frame_and_are_dead_lettered_by_the_broker(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?.drain().await?;
    publish(&env.url, MODEL, &filling("rejected", 0)?, BODY).await?;
    env.client.reject(&jobs_queue(MODEL)).await?;
    until("a dead letter", async || Ok((env.client.ready(&dead_queue(MODEL)).await? == 1).then_some(())))
        .await?;
    let operator = Operator::at(env)?;
    let shown = operator.run_for(0, &["show", "rejected"]).await?;
    ensure!(shown.contains("x-death"), "{shown}");
    // It cannot be published as it is, and says so.
    let retried = operator.run(&["retry", "--all", "--yes"]).await?;
    ensure!(
        retried.code == Some(1) && retried.stderr.contains("its headers take"),
        "{:?} {}",
        retried.code,
        retried.stderr
    );
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == BODY && letter.headers().inner().contains_key("x-death"));
    Ok(())
}

async fn very_many_jobs_and_a_very_large_one(env: &mut TestEnv) -> Result<()> {
    let jobs = if full() { 100_000 } else { 20_000 };
    let (worker, proxy) = counted_worker(env, &[]).await?;
    let mut replies = env.replies().await?;
    env.client.declare_queue("large", env.setup.queue.arguments()).await?;
    let mut large = env.client.mailbox("large").await?;
    let texts: Vec<_> = (0..15u8).map(|at| ((b'a' + at) as char).to_string().repeat(MIB)).collect();
    let job = env.job("large", texts.clone())?.with(|p| p.with_reply_to("large".into()));

    let mut counter = ReplyCounter::default();
    let beside = async {
        env.client.publish(MODEL, job).await?;
        answered_once(&mut large, "large", &texts).await
    };
    let (published_all, collected, parts) =
        tokio::join!(publish_many(env, 4, jobs, |job| job), counter.collect(&mut replies, jobs), beside);
    published_all?;
    collected?;
    let parts = parts?.len();
    worker.log.counts("\"consuming\"", 1).await?;
    worker.drain().await?;
    counter.collect_rest(&mut replies).await?;
    ensure!((counter.jobs(), counter.duplicates()) == (jobs, 0), "{} duplicates", counter.duplicates());
    let count = all_published(&proxy).await?;
    ensure!(count == jobs + parts, "{count} messages for {jobs} jobs, and {parts} parts");
    Ok(())
}
