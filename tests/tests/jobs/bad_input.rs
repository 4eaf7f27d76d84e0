//! Rejected input: each job ends once, is kept whole, is reported to its caller, and costs no other caller anything.

use anyhow::{Context as _, Result, ensure};
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};
use vramq_schemas::{BODY_BYTES_MAX, Encoding, Input, ReplyKind, codec};
use vramq_schemas::{Reason, topology};
use vramq_tests::client::Client;
use vramq_tests::job::Message;
use vramq_tests::rejections::{Rejected, keeps_serving, rejected_and_reported};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::{in_message_pack, on_all_setups, on_queue_types};

on_all_setups!(bodies_that_are_no_job, a_body_over_the_cap);
in_message_pack!(bodies_that_are_no_job, a_body_over_the_cap);
on_queue_types!(
    jobs_for_nobody,
    headers_that_make_no_sense,
    expired_jobs,
    replies_to_queues_of_jobs,
    replies_to_nowhere,
    properties_that_would_stop_a_republish,
    headers_too_large_to_keep,
);

/// A bincode body cut off in the middle, and one that claims more than it holds.
fn broken_bincode(good: &[u8]) -> Vec<(&'static str, Vec<u8>, Reason)> {
    let mut endless = good[..1].to_vec();
    endless.extend([253, 255, 255, 255, 255, 255, 255, 255, 255]);
    vec![
        ("cut off", good[..good.len() - 1].to_vec(), Reason::Malformed),
        ("too long", [good, b"!"].concat(), Reason::Malformed),
        ("a claim of 2^64 bytes", endless, Reason::Malformed),
        ("version 4", [&[4], &good[1..]].concat(), Reason::UnsupportedEncoding),
        ("version 0", [&[0], &good[1..]].concat(), Reason::UnsupportedEncoding),
        ("JSON", br#"{"model":"echo","inputs":["x"]}"#.to_vec(), Reason::UnsupportedEncoding),
    ]
}

/// MessagePack that is cut off, claims more than it holds, or has what a job has no place for.
fn broken_message_pack(good: &[u8]) -> Vec<(&'static str, Vec<u8>, Reason)> {
    let input = |input: &[u8]| [&b"\x82\xa5model\xa4echo\xa6inputs\x91"[..], input].concat();
    let deep = [&b"\x81\xa4json"[..], &b"\x91".repeat(60_000)].concat();
    let bodies = vec![
        ("cut off", good[..good.len() - 1].to_vec()),
        ("too long", [good, b"!"].concat()),
        ("a nil", b"\xc0".to_vec()),
        ("a claim of 4 GiB", input(b"\xdb\xff\xff\xff\xff")),
        ("a list of 2^32 inputs", b"\x82\xa5model\xa4echo\xa6inputs\xdd\xff\xff\xff\xff".to_vec()),
        ("not UTF-8", input(b"\xa2\xff\xfe")),
        ("bytes as a text", input(b"\x81\xa5bytes\xa4AA==")),
        ("a number as input", input(b"\x07")),
        ("an extension", input(b"\xd4\x01x")),
        ("a key that is a number", input(b"\x81\xa4json\x81\x01\x02")),
        ("lists 60,000 deep", input(&deep)),
    ];
    bodies.into_iter().map(|(what, body)| (what, body, Reason::Malformed)).collect()
}

fn broken_json(good: &[u8]) -> Vec<(&'static str, Vec<u8>, Reason)> {
    let deep = format!(r#"{{"model":"echo","inputs":["x"],"params":{{"a":{}}}}}"#, "[".repeat(60_000));
    let body = |text: &str| text.as_bytes().to_vec();
    vec![
        ("cut off", good[..good.len() - 1].to_vec(), Reason::Malformed),
        ("too long", [good, b"!"].concat(), Reason::Malformed),
        ("a null", body("null"), Reason::Malformed),
        ("not UTF-8", b"{\"model\":\"echo\",\"inputs\":[\"\xff\xfe\"]}".to_vec(), Reason::Malformed),
        ("a lone surrogate", body(r#"{"model":"echo","inputs":["\ud800"]}"#), Reason::Malformed),
        ("no inputs field", body(r#"{"model":"echo"}"#), Reason::Malformed),
        ("an unknown field", body(r#"{"model":"echo","inputs":["x"],"prio":1}"#), Reason::Malformed),
        ("a number as input", body(r#"{"model":"echo","inputs":["x",7]}"#), Reason::Malformed),
        ("a null as input", body(r#"{"model":"echo","inputs":[null]}"#), Reason::Malformed),
        ("an input of another kind", body(r#"{"model":"echo","inputs":[{"image":"x"}]}"#), Reason::Malformed),
        (
            "an input of two kinds",
            body(r#"{"model":"echo","inputs":[{"uri":"x","bytes":"eA=="}]}"#),
            Reason::Malformed,
        ),
        ("bytes that are no base64", body(r#"{"model":"echo","inputs":[{"bytes":"*"}]}"#), Reason::Malformed),
        ("params that are a list", body(r#"{"model":"echo","inputs":["x"],"params":[]}"#), Reason::Malformed),
        ("brackets 60,000 deep", deep.into_bytes(), Reason::Malformed),
    ]
}

async fn bodies_that_are_no_job(env: &mut TestEnv) -> Result<()> {
    let encoding = env.setup.encoding;
    let good = env.job("x", ["text"])?.body;
    let mut cases = match encoding {
        Encoding::Json => broken_json(&good),
        Encoding::MessagePack => broken_message_pack(&good),
        Encoding::Bincode => broken_bincode(&good),
    };
    cases.push(("empty", Vec::new(), Reason::Malformed));
    cases.push((
        "garbage",
        (0..999u32).map(|n| (n * n % 251) as u8).collect(),
        match encoding {
            Encoding::Json | Encoding::MessagePack => Reason::Malformed,
            Encoding::Bincode => Reason::UnsupportedEncoding,
        },
    ));
    let no_inputs = Message::inputs(encoding, MODEL, "x", REPLIES, Vec::new())?.body;
    cases.push(("an empty list of inputs", no_inputs, Reason::Malformed));
    let other_model = Message::texts(encoding, "gpt", "x", REPLIES, ["x"])?.body;
    cases.push(("another model", other_model, Reason::WrongModel));
    let job = vramq_schemas::Job {
        model: MODEL.to_owned(),
        inputs: vec![Input::Text("x".to_owned())],
        params: serde_json::from_value(serde_json::json!({"temperature": 1}))?,
    };
    cases.push(("unknown params", codec::encode(&job, encoding)?, Reason::InvalidInput));

    let cases = cases
        .into_iter()
        .map(|(what, body, reason)| Ok(Rejected::new(what, env.job(what, ["x"])?.with_body(body), reason)));
    let cases = cases.collect::<Result<Vec<_>>>()?;
    let worker = env.worker(&[]).await?;
    rejected_and_reported(env, &cases).await?;
    keeps_serving(env, &worker).await
}

async fn a_body_over_the_cap(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let overhead = env.job("x", [""])?.body.len();
    // bincode and MessagePack write a long length in five bytes rather than one.
    let length_bytes = if env.setup.encoding == Encoding::Json { 0 } else { 4 };
    let text = "x".repeat(BODY_BYTES_MAX - overhead - length_bytes);
    let largest = env.job("largest", [text.as_str()])?;
    ensure!(largest.body.len() == BODY_BYTES_MAX, "{}", largest.body.len());
    let too_large = env.job("one byte more", [format!("{text}x")])?;
    if broker_takes(env, &too_large).await? {
        rejected_and_reported(env, &[Rejected::new("one byte more", too_large, Reason::TooLarge)]).await?;
    }

    // The largest of all jobs is a good one; its reply is a few bytes larger, and so refused with its reason.
    env.announce("job dead-lettered");
    env.client.publish(MODEL, largest.clone()).await?;
    let reply = env.replies().await?.next().await?;
    if reply.kind()? == ReplyKind::Failed {
        ensure!(reply.failure()?.reason == Reason::TooLarge, "{:?}", reply.failure()?);
        let letter = env.dead_letters().await?.next().await?;
        ensure!(letter.body == largest.body);
    } else {
        ensure!(reply.kind()? == ReplyKind::Done);
    }
    keeps_serving(env, &worker).await
}

/// Whether the broker takes a body of this size from anybody. RabbitMQ 4 has the worker's own cap, unless it is
/// configured otherwise; RabbitMQ 3 takes eight times as much.
async fn broker_takes(env: &TestEnv, message: &Message) -> Result<bool> {
    // A refusal closes the channel, so it is not the environment's. No queue has this name.
    let probe = Client::connect(&env.url).await?;
    match probe.publish_to_queue("nowhere", std::slice::from_ref(message)).await {
        Ok(_returned) => Ok(true),
        Err(error) if format!("{error:#}").contains("larger than configured max size") => Ok(false),
        Err(error) => Err(error),
    }
}

async fn jobs_for_nobody(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let to_replies = BasicProperties::default().with_reply_to(REPLIES.into());
    let good = env.job("x", ["x"])?;
    let cases = [
        Rejected::new("no id", good.clone().with(|_| to_replies.clone()), Reason::Malformed),
        Rejected::new(
            "empty ids",
            good.clone().with(|_| to_replies.with_message_id("".into()).with_correlation_id("".into())),
            Reason::Malformed,
        ),
        Rejected::new(
            "content type",
            env.job("type", ["x"])?.with(|p| p.with_content_type("text/plain".into())),
            Reason::UnsupportedEncoding,
        ),
        Rejected::new(
            "empty content type",
            env.job("no type", ["x"])?.with(|p| p.with_content_type("".into())),
            Reason::UnsupportedEncoding,
        ),
        Rejected::new(
            "version in the content type",
            env.job("v2", ["x"])?.with(|p| p.with_content_type("application/vnd.vramq.v2+bincode".into())),
            Reason::UnsupportedEncoding,
        ),
    ];
    rejected_and_reported(env, &cases).await?;
    keeps_serving(env, &worker).await
}

async fn headers_that_make_no_sense(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let text = |text: &str| AMQPValue::LongString(text.into());
    let values = [
        ("batch-hint", AMQPValue::LongInt(0)),
        ("batch-hint", AMQPValue::LongInt(-1)),
        ("batch-hint", AMQPValue::LongLongInt(1 << 32)),
        ("batch-hint", AMQPValue::LongLongInt(i64::MIN)),
        ("batch-hint", text("eight")),
        ("batch-hint", AMQPValue::Double(8.5)),
        ("batch-hint", AMQPValue::FieldTable(FieldTable::default())),
        ("attempt", AMQPValue::ShortInt(-1)),
        ("attempt", AMQPValue::Boolean(true)),
        ("items-done", AMQPValue::LongInt(-1)),
        ("items-done", AMQPValue::LongInt(4)),
        ("items-done", AMQPValue::LongLongInt(u32::MAX.into())),
        ("exclusive", text("yes")),
        ("exclusive", AMQPValue::LongInt(1)),
    ];
    let mut cases = Vec::new();
    for (at, (name, value)) in values.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        cases.push(Rejected::new(&what, job, Reason::Malformed));
    }
    rejected_and_reported(env, &cases).await?;

    // These are odd, but no fault.
    let fine = [
        ("batch-hint", AMQPValue::LongLongInt(u32::MAX.into())),
        ("batch-hint", AMQPValue::ShortShortUInt(1)),
        ("batch-hint", AMQPValue::Void),
        ("exclusive", AMQPValue::Boolean(true)),
        ("items-done", AMQPValue::LongInt(2)),
        ("history", text("was long")),
        ("history", AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1); 1000]))),
        ("traceparent", AMQPValue::LongInt(7)),
        ("reason", text("mine")),
    ];
    let mut replies = env.replies().await?;
    for (at, (name, value)) in fine.into_iter().enumerate() {
        let what = format!("{name} {at}");
        let job = env.job(&what, ["1", "2", "3"])?.with_header(name, value).as_worker();
        env.client.publish(MODEL, job).await?;
        let reply = replies.next().await?;
        ensure!(reply.kind()? == ReplyKind::Done && reply.id() == what, "{what}: {:?}", reply.properties);
        let headers = reply.reply()?;
        let done = if name == "items-done" { 2 } else { 0 };
        ensure!((headers.offset, headers.items, headers.items_total) == (done, 3 - done, 3), "{what}");
    }
    drop(replies);
    keeps_serving(env, &worker).await
}

async fn expired_jobs(env: &mut TestEnv) -> Result<()> {
    // In the hands of a worker: published long ago, by the publisher's clock.
    let worker = env.worker(&[]).await?;
    let old =
        env.job("old", ["x"])?.with(|p| p.with_timestamp(1_500_000_000).with_expiration("60000".into()));
    rejected_and_reported(env, &[Rejected::new("old", old, Reason::Expired)]).await?;
    let odd = env.job("a deadline that is no number", ["x"])?;
    let future = odd.with(|p| p.with_timestamp(u64::MAX / 2).with_expiration("60000".into()));
    env.client.publish(MODEL, future).await?;
    ensure!(env.replies().await?.next().await?.kind()? == ReplyKind::Done);
    keeps_serving(env, &worker).await?;
    worker.drain().await?;

    // In the queue, with no worker there: the broker itself dead-letters it, whole.
    let job = env.job("waited", ["x"])?.with(|p| p.with_expiration("50".into()));
    env.client.publish(MODEL, job.clone()).await?;
    let letter = env.dead_letters().await?.next().await?;
    ensure!(letter.body == job.body && letter.id() == "waited");
    ensure!(letter.headers().inner().contains_key("x-death"), "{:?}", letter.headers());
    Ok(())
}

async fn replies_to_queues_of_jobs(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("job dead-lettered");
    let mut dead = env.dead_letters().await?;
    for queue in [
        topology::jobs_queue(MODEL),
        topology::dead_queue(MODEL),
        topology::jobs_queue("other"),
        topology::suspects_queue(MODEL),
        "vramq.delay.1000".to_owned(),
    ] {
        let job = env.job(&queue, ["x"])?.with(|p| p.with_reply_to(queue.as_str().into()));
        env.client.publish(MODEL, job.clone()).await?;
        let letter = dead.next().await?;
        ensure!(letter.dead_letter()?.reason == Reason::Malformed, "{queue}");
        ensure!(letter.body == job.body && letter.id() == queue);
    }
    drop(dead);
    keeps_serving(env, &worker).await
}

async fn replies_to_nowhere(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("job dead-lettered");
    env.announce("job dead-lettered");
    env.announce("reply could not be delivered to the caller");
    let mut dead = env.dead_letters().await?;

    let nowhere = |p: BasicProperties| p.with_reply_to("no such queue".into());
    let job = env.job("unroutable", ["the result"])?.with(nowhere);
    env.client.publish(MODEL, job.clone()).await?;
    // The results first, then the job: neither is lost.
    let letters = dead.take(2).await?;
    let (results, jobs): (Vec<_>, Vec<_>) = letters.into_iter().partition(|letter| letter.kind().is_ok());
    let [results] = &results[..] else { anyhow::bail!("{} letters with results", results.len()) };
    let [letter] = &jobs[..] else { anyhow::bail!("{} letters with jobs", jobs.len()) };
    ensure!(letter.body == job.body, "the job is not intact");
    for letter_of in [results, letter] {
        ensure!(letter_of.dead_letter()?.reason == Reason::Unroutable);
        ensure!(letter_of.properties.reply_to() == job.properties.reply_to());
        ensure!(letter_of.id() == "unroutable");
    }
    ensure!(results.outputs()?.outputs == [vramq_schemas::Output::Json("the result".into())]);
    ensure!(results.reply()?.items_total == 1);

    // A job that is bad itself, and has nobody to tell: its dead letter is all there is.
    let job = env.job("bad", ["x"])?.with(nowhere).with_body("{");
    env.client.publish(MODEL, job.clone()).await?;
    let letter = dead.next().await?;
    ensure!(letter.dead_letter()?.reason == Reason::Malformed && letter.body == job.body);
    drop(dead);
    keeps_serving(env, &worker).await
}

async fn properties_that_would_stop_a_republish(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let list = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|n| AMQPValue::LongString((*n).into())).collect();
        AMQPValue::FieldArray(FieldArray::from(names))
    };
    // Copies that the dead letter must not make again: one for the publisher's own wish is enough.
    env.client.declare_queue("copies", env.setup.queue.arguments()).await?;
    let copied = env
        .job("copies", ["x"])?
        .with_body("{")
        .with_header("CC", list(&["no such key"]))
        .with_header("BCC", list(&["nor this"]));
    let cases = [
        Rejected::new(
            "user id",
            env.job("user", ["x"])?.with_body("{").with(|p| p.with_user_id("guest".into())),
            Reason::Malformed,
        )
        .losing_user_id(),
        Rejected::new("CC and BCC", copied, Reason::Malformed).losing_headers(&["CC", "BCC"]),
        Rejected::new(
            "priority",
            env.job("priority", ["x"])?.with_body("{").with(|p| p.with_priority(255)),
            Reason::Malformed,
        ),
        Rejected::new(
            "transient",
            env.job("transient", ["x"])?.with_body("{").with(|p| p.with_delivery_mode(1)),
            Reason::Malformed,
        ),
        Rejected::new(
            "all properties",
            env.job("all", ["x"])?.with_body("{").with(|p| {
                p.with_content_encoding("gzip".into())
                    .with_app_id("an app".into())
                    .with_type("done".into())
                    .with_cluster_id("deprecated".into())
                    .with_timestamp(u64::MAX)
                    .with_priority(3)
                    .with_expiration("3600000".into())
            }),
            Reason::Malformed,
        ),
        Rejected::new(
            "properties of 255 bytes",
            env.job(&"i".repeat(200), ["x"])?
                .with_body("{")
                .with(|p| p.with_app_id("ä".repeat(127).into()))
                .with(|p| p.with_correlation_id("c".repeat(255).into())),
            Reason::Malformed,
        ),
    ];
    rejected_and_reported(env, &cases).await?;
    ensure!(env.client.ready("copies").await? == 0);
    keeps_serving(env, &worker).await
}

async fn headers_too_large_to_keep(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    env.announce("header too large to publish again, dropped");
    env.announce("job dead-lettered");
    let (mut dead, mut replies) = (env.dead_letters().await?, env.replies().await?);
    let blob = |bytes: usize| AMQPValue::LongString("h".repeat(bytes).into());
    let mut many = env.job("many", ["x"])?.with_body("{");
    for at in 0..1500 {
        many = many.with_header(&format!("header-{at:04}"), blob(50));
    }
    let one = env
        .job("one", ["x"])?
        .with_body("{")
        .with_header("big", blob(100 * 1024))
        .with_header("small", blob(9));
    for job in [one, many] {
        env.client.publish(MODEL, job.clone()).await?;
        let letter = dead.next().await.context("dead letter")?;
        ensure!(letter.body == job.body && letter.dead_letter()?.reason == Reason::Malformed);
        ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
        let kept = letter.headers();
        ensure!(kept.inner().contains_key("small") || kept.inner().len() > 1000, "small headers are kept");
    }
    // A good job with large headers runs.
    let good = env.job("good", ["x"])?.with_header("big", blob(100 * 1024));
    env.client.publish(MODEL, good).await?;
    ensure!(replies.next().await?.kind()? == ReplyKind::Done);
    until("no letters", async || Ok((env.client.ready(REPLIES).await? == 0).then_some(()))).await?;
    drop((dead, replies));
    keeps_serving(env, &worker).await
}
