//! A model whose queue takes jobs and confirms none: a client's jobs for other models go on. Each test has its own broker.

use anyhow::{Context as _, Result, bail, ensure};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::time::timeout;
use vramq_producer::{Client, Input, Job, Params, SubmitOptions};
use vramq_schemas::topology::{JOBS_EXCHANGE, jobs_queue};
use vramq_tests::node::Node;
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::DEADLINE;

use crate::silence::Silence;
use crate::silent_replies::loses_its_metadata;

mod a_model_whose_queue_confirms_nothing_holds_up_no_other_model {
    // A quorum queue of two members, one of which is lost. RabbitMQ holds up the channel that publishes its first job there.
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_cluster,
        Quorum,
        Json,
        a_model_whose_queue_confirms_nothing_holds_up_no_other_model,
    );
    // A queue whose process stands still. RabbitMQ holds up the connection that has published several hundred jobs there.
    vramq_tests::test_over!(
        run_on_own_node,
        own_node_classic,
        Classic,
        Json,
        a_model_whose_queue_confirms_nothing_holds_up_no_other_model,
    );
}

const SILENT: &str = "silent";

/// More than RabbitMQ reads for a queue that does not answer.
const FOR_SILENT: usize = 500;

/// More than await their confirm at a time.
const OTHERS: usize = 300;

fn job(model: &str, text: String) -> Job {
    Job { model: model.to_owned(), inputs: vec![Input::Text(text)], params: Params::default() }
}

async fn a_model_whose_queue_confirms_nothing_holds_up_no_other_model(
    env: &mut TestEnv,
    node: &Node,
) -> Result<()> {
    if loses_its_metadata(env).await? {
        return Ok(());
    }
    let worker = env.worker(&[]).await?;
    let queue = jobs_queue(SILENT);
    let silence = Silence::declare(env, node, std::slice::from_ref(&queue)).await?;
    env.client.bind_queue(&queue, JOBS_EXCHANGE, SILENT).await?;
    let client = Client::connect(node.broker().url(&env.vhost.name)).await?;
    silence.begin(env).await?;

    let for_silent =
        (0..FOR_SILENT).map(|at| client.submit(job(SILENT, at.to_string()), SubmitOptions::default()));
    let mut for_silent = Box::pin(join_all(for_silent));
    ensure!((&mut for_silent).now_or_never().is_none());
    let others = (0..OTHERS).map(async |at| {
        let text = format!("text {at}");
        let pending = client.submit(job(MODEL, text.clone()), SubmitOptions::default()).await?;
        let outputs = pending.outputs().await?;
        ensure!(outputs.len() == 1, "{text}: {outputs:?}");
        Ok(())
    });
    let answered = tokio::select! {
        _ = &mut for_silent => bail!("the queue is not silent"),
        answered = timeout(DEADLINE, join_all(others)) => answered.context("the other model's jobs wait")?,
    };
    answered.into_iter().collect::<Result<()>>().with_context(|| worker.log.text())?;

    silence.end(env).await?;
    let published = for_silent.await.into_iter().collect::<Result<Vec<_>, _>>()?;
    let stats = client.stats();
    ensure!(stats.reconnects == 0, "{stats:?}");
    published.into_iter().for_each(drop);
    client.close().await;
    worker.drain().await?;
    env.vhost.delete_queue(&queue).await
}
