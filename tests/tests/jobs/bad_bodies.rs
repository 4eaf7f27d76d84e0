//! Rejected bodies: broken in one of the encodings, not a job, or too large. Each ends once, and its caller gets a report.

use anyhow::{Result, ensure};
use vramq_schemas::{BODY_BYTES_MAX, Encoding, Input, Reason, ReplyKind, codec};
use vramq_tests::client::Client;
use vramq_tests::job::Message;
use vramq_tests::rejections::{Rejected, keeps_serving, rejected_and_reported};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::{in_message_pack, on_all_setups};

on_all_setups!(bodies_that_are_no_job, a_body_over_the_cap);
in_message_pack!(bodies_that_are_no_job, a_body_over_the_cap);

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

    // The largest possible job is valid, but its reply is a few bytes larger, and is refused with a reason.
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
