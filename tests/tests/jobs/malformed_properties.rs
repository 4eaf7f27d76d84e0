//! Messages that are hard to read: properties that are not UTF-8, deeply nested headers, invalid headers. A reader that fails on
//! one loses its session, and the next session with the same message.

use anyhow::{Context as _, Result, ensure};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Reason, ReplyKind};
use vramq_tests::on_queue_types;
use vramq_tests::raw::{RawProperties, nested_table, publish};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};

on_queue_types!(
    ids_that_are_not_utf8,
    a_reply_queue_that_is_not_utf8,
    a_content_type_that_is_not_utf8,
    properties_of_others_that_are_not_utf8,
    headers_nested_too_deep,
    headers_that_the_broker_refuses,
);

const BODY: &[u8] = br#"{"model":"echo","inputs":["x"]}"#;
const NOT_UTF8: &[u8] = b"\xff\xfe";

/// How a poisoned job is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It can be understood anyway.
    Answered,
    /// One dead letter with its body, and a `failed` reply.
    Buried(Reason),
    /// The same for one that names no queue for the reply.
    BuriedUntold(Reason),
}

/// A poisoned job with good ones behind it. They are answered; it has its end; and it costs no session.
async fn poisoned(env: &mut TestEnv, end: End, change: impl FnOnce(&mut RawProperties)) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let mut properties = RawProperties {
        message_id: b"poison".to_vec(),
        correlation_id: b"poison".to_vec(),
        reply_to: REPLIES.as_bytes().to_vec(),
        ..RawProperties::default()
    };
    change(&mut properties);
    publish(&env.url, MODEL, &properties, BODY).await?;
    let good = ["0", "1", "2", "3", "4"];
    for id in good {
        env.client.publish(MODEL, env.job(id, ["x"])?).await?;
    }
    let (mut replies, mut dead) = (env.replies().await?, env.dead_letters().await?);
    let own_replies = usize::from(!matches!(end, End::BuriedUntold(_)));
    let mut of_the_job = Vec::new();
    for reply in replies.take(good.len() + own_replies).await? {
        if good.contains(&reply.id()) {
            ensure!(reply.kind()? == ReplyKind::Done, "a good job failed");
        } else {
            of_the_job.push(reply);
        }
    }
    ensure!(of_the_job.len() == own_replies, "{} replies to the poisoned job", of_the_job.len());
    match end {
        End::Answered => ensure!(of_the_job[0].kind()? == ReplyKind::Done, "{:?}", of_the_job[0].failure()),
        End::Buried(reason) | End::BuriedUntold(reason) => {
            env.announce("job dead-lettered");
            let letter = dead.next().await.context("no dead letter")?;
            ensure!(letter.body == BODY, "the body is not the job's");
            let epitaph = letter.dead_letter()?;
            ensure!(epitaph.reason == reason, "{epitaph:?}");
            for reply in &of_the_job {
                ensure!(reply.failure()?.error == epitaph.error);
            }
        }
    }
    // A second letter or reply would be found in its queue by the harness.
    ensure!(worker.is_running());
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions == 1, "{sessions} sessions");
    worker.drain().await
}

async fn ids_that_are_not_utf8(env: &mut TestEnv) -> Result<()> {
    let buried = End::Buried(Reason::Malformed);
    poisoned(env, buried, |properties| properties.message_id = NOT_UTF8.to_vec()).await?;
    poisoned(env, buried, |properties| properties.correlation_id = NOT_UTF8.to_vec()).await?;
    // Read as text, it would take three times its bytes.
    poisoned(env, buried, |properties| properties.message_id = vec![0xff; 255]).await
}

async fn a_reply_queue_that_is_not_utf8(env: &mut TestEnv) -> Result<()> {
    // Another caller's queue, whose name is what the worker reads.
    const READ_AS: &str = "\u{fffd}\u{fffd}";
    env.client.declare_queue(READ_AS, env.setup.queue.arguments()).await?;
    let untold = End::BuriedUntold(Reason::Malformed);
    poisoned(env, untold, |properties| properties.reply_to = NOT_UTF8.to_vec()).await?;
    ensure!(env.client.ready(READ_AS).await? == 0, "the reply went to another caller's queue");
    Ok(())
}

async fn a_content_type_that_is_not_utf8(env: &mut TestEnv) -> Result<()> {
    let buried = End::Buried(Reason::UnsupportedEncoding);
    poisoned(env, buried, |properties| properties.content_type = NOT_UTF8.to_vec()).await
}

async fn properties_of_others_that_are_not_utf8(env: &mut TestEnv) -> Result<()> {
    poisoned(env, End::Answered, |properties| {
        properties.content_encoding = NOT_UTF8.to_vec();
        properties.kind = NOT_UTF8.to_vec();
        properties.app_id = vec![0xff; 255];
        properties.cluster_id = NOT_UTF8.to_vec();
        // Two names that are read as the same one.
        properties.headers = b"\x02\xff\xfeI\0\0\0\x01\x02\xfe\xffI\0\0\0\x02".to_vec();
    })
    .await?;
    // The same properties in a dead letter, which the broker has to take.
    poisoned(env, End::Buried(Reason::UnsupportedEncoding), |properties| {
        properties.content_type = b"text/plain".to_vec();
        properties.content_encoding = NOT_UTF8.to_vec();
        properties.kind = NOT_UTF8.to_vec();
        properties.app_id = vec![0xff; 255];
        properties.headers = [b"\xff", &[0xff; 255][..], b"I\0\0\0\x01"].concat();
    })
    .await
}

async fn headers_nested_too_deep(env: &mut TestEnv) -> Result<()> {
    // The headers themselves are the first of the 32 tables.
    poisoned(env, End::Answered, |properties| properties.headers = nested_table(31)).await?;
    let buried = End::Buried(Reason::Malformed);
    poisoned(env, buried, |properties| properties.headers = nested_table(32)).await?;
    // What comes before and after it is refused as well: a job does not run with half of its headers.
    poisoned(env, buried, |properties| {
        let wish = b"\x0abatch-hintI\0\0\0\x01";
        properties.headers = [&wish[..], &nested_table(1000), wish].concat();
    })
    .await?;
    env.announce("dropped headers that are too large to publish again");
    poisoned(env, buried, |properties| properties.headers = nested_table(15_000)).await
}

/// RabbitMQ reads headers before it takes a message. Should another version be less strict, the worker is not.
async fn headers_that_the_broker_refuses(env: &mut TestEnv) -> Result<()> {
    let headers: [&[u8]; 6] = [
        b"\x01aZ\0\0\0\x01",             // no such type
        b"\x01aI\0\0",                   // ends within a number
        b"\x09aI\0\0\0\x01",             // a name that would be longer than everything
        b"\x01aS\xff\xff\xff\xff",       // a text of 4 GiB
        b"\x01aF\0\0\0\x09\x01bI\0\0\0", // a table that would end after the one around it
        b"\x01aA\0\0\0\x03I\0\0",        // a list that ends within a number
    ];
    // For its queue and exchange.
    env.worker(&[]).await?.drain().await?;
    for headers in headers {
        let properties = RawProperties {
            message_id: b"poison".to_vec(),
            reply_to: REPLIES.as_bytes().to_vec(),
            headers: headers.to_vec(),
            ..RawProperties::default()
        };
        if let Err(error) = publish(&env.url, MODEL, &properties, BODY).await {
            let closed = format!("{error:#}");
            ensure!(closed.contains("(10, 50)"), "not a close of the connection: {closed}");
            continue;
        }
        env.client.purge(&jobs_queue(MODEL)).await?;
        let again = |properties: &mut RawProperties| properties.headers = headers.to_vec();
        poisoned(env, End::Buried(Reason::Malformed), again).await?;
    }
    Ok(())
}
