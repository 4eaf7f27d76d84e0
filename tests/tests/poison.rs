//! Messages that break the reading of a delivery itself: properties that are not UTF-8, headers nested without end.
//!
//! They do not pass today: lapin cannot read such a delivery at all, so the worker has nothing to dead-letter. Run them
//! with `--ignored`.

use anyhow::{Context as _, Result, ensure};
use vramq_tests::on_queue_types;
use vramq_tests::raw::{RawProperties, nested_table, publish};
use vramq_tests::world::{MODEL, REPLIES, World};

on_queue_types!(
    #[ignore = "lapin ends the connection on it: again and again on a classic queue, 21 times on a quorum queue"]
    an_id_that_is_not_utf8,
    #[ignore = "as above"]
    a_header_name_that_is_not_utf8,
    #[ignore = "lapin's reader overflows its stack on it: the worker aborts"]
    headers_nested_without_end,
);

const BODY: &[u8] = br#"{"model":"echo","inputs":["x"]}"#;

/// To find out which message it was may cost a few connections, but not one after the other for ever.
const SESSIONS_MAX: usize = 4;

/// A poisoned job with good ones behind it. They are answered; it has an end of its own, as a reply or as a dead letter
/// with its body.
async fn poisoned(world: &mut World, change: impl FnOnce(&mut RawProperties)) -> Result<()> {
    for text in ["session lost", "jobs in hand", "no session yet", "job dead-lettered", "nobody to tell"] {
        world.announce(text);
    }
    let worker = world.worker(&[]).await?;
    let mut properties = RawProperties {
        message_id: b"poison".to_vec(),
        correlation_id: b"poison".to_vec(),
        reply_to: REPLIES.as_bytes().to_vec(),
        headers: Vec::new(),
    };
    change(&mut properties);
    publish(&world.url, MODEL, &properties, BODY).await?;
    let good = ["0", "1", "2", "3", "4"];
    for id in good {
        world.client.publish(MODEL, world.job(id, ["x"])?).await?;
    }
    let (mut replies, mut dead) = (world.replies().await?, world.dead_letters().await?);
    let (mut answered, mut ended) = (0, false);
    while answered < good.len() || !ended {
        tokio::select! {
            reply = replies.next() => {
                let sessions = || format!("{answered} answered, {} sessions", worker.log.count("\"consuming\""));
                if good.contains(&reply.with_context(sessions)?.id()) { answered += 1 } else { ended = true }
            }
            letter = dead.next() => {
                ensure!(letter?.body == BODY, "a good job was dead-lettered");
                ended = true;
            }
            code = worker.exited() => anyhow::bail!("the worker ended with {:?}", code?),
        }
    }
    let sessions = worker.log.count("\"consuming\"");
    ensure!(sessions <= SESSIONS_MAX, "{sessions} sessions");
    Ok(())
}

async fn an_id_that_is_not_utf8(world: &mut World) -> Result<()> {
    poisoned(world, |properties| properties.message_id = b"\xff\xfe".to_vec()).await
}

async fn a_header_name_that_is_not_utf8(world: &mut World) -> Result<()> {
    poisoned(world, |properties| properties.headers = b"\x02\xff\xfeI\0\0\0\x01".to_vec()).await
}

async fn headers_nested_without_end(world: &mut World) -> Result<()> {
    poisoned(world, |properties| properties.headers = nested_table(15_000)).await
}
