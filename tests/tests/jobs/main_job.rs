//! The main job: a text goes in, its output comes out, and the job is gone from the broker.

use anyhow::{Result, ensure};
use vramq_schemas::topology::{default_reply_queue, jobs_queue};
use vramq_schemas::{Input, Output, ReplyKind};
use vramq_tests::job::{Message, correlation_of};
use vramq_tests::test_env::{MODEL, REPLIES, TestEnv};
use vramq_tests::{in_message_pack, on_all_setups, on_one_setup, on_queue_types};

on_all_setups!(a_job_is_answered_and_gone, inputs_of_all_kinds_come_back_in_order);
in_message_pack!(a_job_is_answered_and_gone, inputs_of_all_kinds_come_back_in_order);
on_queue_types!(without_reply_to_the_models_own_queue_answers, the_id_may_be_the_correlation_id);
on_one_setup!(jobs_of_all_encodings_share_a_worker, several_models_on_one_worker);

async fn a_job_is_answered_and_gone(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let texts = ["one", "", "drei 三 \u{1F468}\u{200D}\u{1F469}"];
    let job = env.job("job-1", texts)?;
    env.client.publish(MODEL, job).await?;

    let reply = env.replies().await?.next().await?;
    ensure!(reply.kind()? == ReplyKind::Done);
    ensure!(reply.id() == "job-1");
    ensure!(reply.correlation_id() == correlation_of("job-1"));
    ensure!(reply.encoding()? == env.setup.encoding);
    ensure!(*reply.properties.delivery_mode() == Some(2), "not persistent");
    let headers = reply.reply()?;
    ensure!((headers.offset, headers.items, headers.items_total) == (0, 3, 3), "{headers:?}");
    ensure!((headers.attempt, &headers.worker) == (0, &worker.name), "{headers:?}");
    for name in ["queued", "ran"] {
        ensure!(reply.headers().inner().contains_key(name), "no header `{name}`");
    }
    let outputs = reply.outputs()?;
    ensure!(outputs.model == MODEL);
    let expected: Vec<_> = texts.iter().map(|text| Output::Json((*text).into())).collect();
    ensure!(outputs.outputs == expected, "{outputs:?}");

    // The ack comes after the reply's confirm; in the end the broker holds nothing of the job.
    env.vhost.until_empty(&[jobs_queue(MODEL)]).await?;
    worker.drain().await?;
    let totals = worker.log.wait_for("totals").await?;
    ensure!(totals.field("jobs").and_then(|n| n.as_u64()) == Some(1), "{}", totals.text());
    ensure!(totals.field("acks_lost").and_then(|n| n.as_u64()) == Some(0), "{}", totals.text());
    Ok(())
}

async fn inputs_of_all_kinds_come_back_in_order(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let bytes: Vec<u8> = (0..=255).collect();
    let inputs = vec![
        Input::Bytes(bytes.clone()),
        Input::Text("text".to_owned()),
        Input::Uri("s3://bucket/key".to_owned()),
        Input::Bytes(Vec::new()),
    ];
    let job = Message::inputs(env.setup.encoding, MODEL, "kinds", REPLIES, inputs)?;
    env.client.publish(MODEL, job).await?;
    let reply = env.replies().await?.next().await?;
    let media_type = "application/octet-stream".to_owned();
    let expected = [
        Output::Bytes { media_type: media_type.clone(), bytes },
        Output::Json("text".into()),
        Output::Uri("s3://bucket/key".to_owned()),
        Output::Bytes { media_type, bytes: Vec::new() },
    ];
    ensure!(reply.outputs()?.outputs == expected);
    Ok(())
}

async fn without_reply_to_the_models_own_queue_answers(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    for (id, reply_to) in [("absent", None), ("empty", Some(""))] {
        let job = env.job(id, ["x"])?;
        let properties = lapin::BasicProperties::default().with_message_id(id.into());
        let properties = match reply_to {
            Some(queue) => properties.with_reply_to(queue.into()),
            None => properties,
        };
        env.client.publish(MODEL, job.with(|_| properties)).await?;
    }
    let mut replies = env.client.mailbox(&default_reply_queue(MODEL)).await?;
    let mut ids: Vec<_> = replies.take(2).await?.iter().map(|reply| reply.id().to_owned()).collect();
    ids.sort();
    ensure!(ids == ["absent", "empty"]);
    Ok(())
}

async fn the_id_may_be_the_correlation_id(env: &mut TestEnv) -> Result<()> {
    env.worker(&[]).await?;
    let properties = lapin::BasicProperties::default()
        .with_correlation_id("only this".into())
        .with_reply_to(REPLIES.into());
    let job = env.job("unused", ["x"])?.with(|_| properties);
    env.client.publish(MODEL, job).await?;
    let reply = env.replies().await?.next().await?;
    ensure!(reply.correlation_id() == "only this" && reply.kind()? == ReplyKind::Done);
    Ok(())
}

async fn jobs_of_all_encodings_share_a_worker(env: &mut TestEnv) -> Result<()> {
    use vramq_schemas::Encoding::{Bincode, Json, MessagePack};
    env.worker(&[]).await?;
    let mut replies = env.replies().await?;
    for (id, encoding) in [("a", Json), ("b", Bincode), ("c", MessagePack), ("d", Json)] {
        let job = Message::texts(encoding, MODEL, id, REPLIES, ["x"])?;
        env.client.publish(MODEL, job).await?;
        let reply = replies.next().await?;
        ensure!((reply.id(), reply.encoding()?) == (id, encoding));
    }
    Ok(())
}

async fn several_models_on_one_worker(env: &mut TestEnv) -> Result<()> {
    env.worker(&["model.other-v1.5.engine=echo"]).await?;
    let mut replies = env.replies().await?;
    for model in [MODEL, "other-v1.5"] {
        let job = Message::texts(env.setup.encoding, model, model, REPLIES, ["x"])?;
        env.client.publish(model, job).await?;
        ensure!(replies.next().await?.outputs()?.model == model);
    }
    Ok(())
}
