//! Jobs of several publishers share passes, and each publisher gets the replies to its own jobs, and progress if it asks for it.

use anyhow::{Context as _, Result, ensure};
use tempfile::NamedTempFile;
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{Input, Job, Params, ReplyKind, codec};
use vramq_tests::answers::answered_once;
use vramq_tests::client::{Client, Received};
use vramq_tests::job::Message;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::{on_all_setups, on_queue_types};

on_all_setups!(jobs_of_several_publishers_share_passes);
on_queue_types!(each_job_of_a_pass_reports_that_it_has_begun);

/// Each has a connection and a reply queue of its own, and publishes one job: fewer passes than publishers are passes with
/// jobs of several.
const PUBLISHERS: usize = 12;

async fn jobs_of_several_publishers_share_passes(env: &mut TestEnv) -> Result<()> {
    env.announce("a failpoint is set");
    // The first pass holds the device until all jobs are delivered.
    let held = NamedTempFile::new().context("make a file")?;
    let drill = format!("worker.drill=pass=hang,times=1,while={}", held.path().display());
    let worker = env.worker(&[&drill]).await?;
    let mut publishers = Vec::with_capacity(PUBLISHERS);
    for number in 0..PUBLISHERS {
        let client = Client::connect(&env.url).await?;
        let (id, replies, text) =
            (format!("job {number}"), format!("replies-{number}"), format!("text {number}"));
        client.declare_queue(&replies, env.setup.queue.arguments()).await?;
        client
            .publish(MODEL, Message::texts(env.setup.encoding, MODEL, &id, &replies, [text.as_str()])?)
            .await?;
        publishers.push((client, id, replies, text));
    }
    env.vhost.until_unacked(&jobs_queue(MODEL), PUBLISHERS as u64).await?;
    held.close().context("remove the file")?;

    for (client, id, replies, text) in publishers {
        let mut replies = client.mailbox(&replies).await?;
        answered_once(&mut replies, &id, &[text]).await?;
        client.close().await?;
    }
    worker.drain().await?;
    ensure!(worker.total("jobs").await? == PUBLISHERS as u64);
    let passes = worker.total("passes").await?;
    ensure!(passes <= PUBLISHERS as u64 / 2, "{passes} passes for the jobs of {PUBLISHERS} publishers");
    Ok(())
}

/// Reply queues of one user: more than it may have reports on their way at a time.
const REPLY_QUEUES: usize = 20;

async fn each_job_of_a_pass_reports_that_it_has_begun(env: &mut TestEnv) -> Result<()> {
    env.announce("a failpoint is set");
    // The first pass holds the device until all jobs are delivered. The others begin together.
    let held = NamedTempFile::new().context("make a file")?;
    let drill = format!("worker.drill=pass=hang,times=1,while={}", held.path().display());
    let worker = env.worker(&[&drill]).await?;
    let mut params = Params::default();
    params.ask_for_progress();
    let job = Job { model: MODEL.to_owned(), inputs: vec![Input::Text("x".to_owned())], params };
    let body = codec::encode(&job, env.setup.encoding)?;
    let queues: Vec<_> = (0..REPLY_QUEUES).map(|at| format!("replies-{at}")).collect();
    for queue in &queues {
        env.client.declare_queue(queue, env.setup.queue.arguments()).await?;
        let job = Message::texts(env.setup.encoding, MODEL, queue, queue, ["x"])?.with_body(body.clone());
        env.client.publish(MODEL, job).await?;
    }
    env.vhost.until_unacked(&jobs_queue(MODEL), REPLY_QUEUES as u64).await?;
    held.close().context("remove the file")?;

    for queue in &queues {
        let both = env.client.mailbox(queue).await?.take(2).await.with_context(|| worker.log.text())?;
        let kinds = both.iter().map(Received::kind).collect::<Result<Vec<_>>>()?;
        ensure!(
            kinds.contains(&ReplyKind::Progress) && kinds.contains(&ReplyKind::Done),
            "{queue}: {kinds:?}"
        );
    }
    worker.drain().await
}
