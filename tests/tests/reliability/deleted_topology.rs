//! Exchanges and queues that an operator deletes while a worker runs, and that the worker would miss only when it publishes: it looks for
//! them. What costs a session is in `session.rs`.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties, ExchangeKind};
use vramq_schemas::Reason;
use vramq_schemas::control::{Command, Outcome};
use vramq_schemas::topology::{
    CONTROL_EXCHANGE, DEAD_EXCHANGE, DELAYS_MS, JOBS_EXCHANGE, RETRY_EXCHANGE, WITHDRAWALS_EXCHANGE,
    dead_queue, default_reply_queue, delay_key, delay_queue,
};
use vramq_tests::client::Client;
use vramq_tests::job::Message;
use vramq_tests::on_one_setup;
use vramq_tests::operator::Operator;
use vramq_tests::reply_counter::{ReplyCounter, publish_many};
use vramq_tests::test_env::{MODEL, TestEnv};
use vramq_tests::wait::until;
use vramq_tests::worker::Worker;

on_one_setup!(
    what_is_deleted_is_declared_again_in_the_same_session,
    what_is_deleted_is_named_where_workers_declare_nothing,
    an_exchange_that_another_worker_declared_again_is_bound_again,
    a_queue_that_the_worker_may_not_look_at_hides_no_deletion,
);

const JOBS: usize = 20;

/// A command without an answer for so long was lost. The late answer to a command that was not would be taken for that to a later one.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);

const AGAIN: &str = "an exchange or a queue is missing: declaring it again";
const DECLARE_IT: &str = "workers do not declare it: declare it";

async fn what_is_deleted_is_declared_again_in_the_same_session(env: &mut TestEnv) -> Result<()> {
    env.announce(AGAIN);
    env.announce("job dead-lettered");
    let worker = env.worker(&[]).await?;
    hears_commands(&mut Operator::new(env).await?, &worker).await?;
    let exchanges = [JOBS_EXCHANGE, RETRY_EXCHANGE, DEAD_EXCHANGE, CONTROL_EXCHANGE, WITHDRAWALS_EXCHANGE];
    for exchange in exchanges {
        env.vhost.delete_exchange(exchange).await?;
    }
    let default = default_reply_queue(MODEL);
    let queues = [dead_queue(MODEL), delay_queue(MODEL, DELAYS_MS[0]), default.clone()];
    for queue in &queues {
        env.vhost.delete_queue(queue).await?;
    }
    for name in exchanges.into_iter().chain(queues.iter().map(String::as_str)) {
        let is_named =
            || worker.log.find_all(AGAIN).iter().any(|line| line.text().contains(&format!("`{name}`")));
        let warned = until("a warning", async || Ok(is_named().then_some(()))).await;
        warned.with_context(|| format!("`{name}` is not in {}", worker.log.text()))?;
    }

    // The worker's own queues are bound again.
    let mut operator = Operator::new(env).await?;
    let answer = operator.ask(&worker, &Command::Set { log: "info".to_owned() }).await?;
    ensure!(answer.outcome == Outcome::Done, "{answer:?}");
    until("a queue of withdrawals", async || {
        let withdrawal =
            Message { properties: BasicProperties::default(), body: Vec::new(), as_worker: false };
        let confirmation = env.client.publish_to(WITHDRAWALS_EXCHANGE, "", withdrawal).await?;
        Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
    })
    .await?;

    let (mut replies, mut defaults) = (env.replies().await?, env.client.mailbox(&default).await?);
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut replies, JOBS).await?;
    let later = env.job("later", ["x"])?.with(|properties| properties.with_reply_to("".into()));
    env.client.publish_to(RETRY_EXCHANGE, &delay_key(MODEL, DELAYS_MS[0]), later).await?;
    ensure!(defaults.next().await?.id() == "later");
    env.client.publish(MODEL, env.job("bad", ["x"])?.with_body("no job")).await?;
    ensure!(env.dead_letters().await?.next().await?.id() == "bad");
    ensure!(replies.next().await?.failure()?.reason == Reason::Malformed);
    worker.log.counts("\"consuming\"", 1).await?;
    Ok(())
}

/// It is named once, for as long as it is missing.
async fn what_is_deleted_is_named_where_workers_declare_nothing(env: &mut TestEnv) -> Result<()> {
    env.announce(DECLARE_IT);
    env.worker(&[]).await?.drain().await?;
    let worker = env.worker(&["broker.declare=false"]).await?;
    let queue = dead_queue(MODEL);
    env.vhost.delete_queue(&queue).await?;
    let line = worker.log.wait_for(DECLARE_IT).await?;
    ensure!(line.text().contains(&queue), "{}", line.text());
    ensure!(!env.vhost.queues().await?.contains(&queue));
    publish_many(env, 1, JOBS, |job| job).await?;
    ReplyCounter::default().collect(&mut env.replies().await?, JOBS).await?;
    // Another one is missing in a later look.
    let later = default_reply_queue(MODEL);
    env.vhost.delete_queue(&later).await?;
    let is_named = || worker.log.find_all(DECLARE_IT).iter().any(|line| line.text().contains(&later));
    until("the later one's name", async || Ok(is_named().then_some(()))).await?;
    worker.drain().await?;
    let log = worker.log.text();
    ensure!(worker.log.count(DECLARE_IT) == 2 && worker.log.count("\"consuming\"") == 1, "{log}");
    Ok(())
}

/// The worker finds the exchange there, and has to bind its queues all the same.
async fn an_exchange_that_another_worker_declared_again_is_bound_again(env: &mut TestEnv) -> Result<()> {
    let worker = env.worker(&[]).await?;
    let mut operator = Operator::new(env).await?;
    hears_commands(&mut operator, &worker).await?;
    for (exchange, kind) in [(JOBS_EXCHANGE, ExchangeKind::Direct), (CONTROL_EXCHANGE, ExchangeKind::Direct)]
    {
        env.vhost.delete_exchange(exchange).await?;
        env.client.declare_exchange(exchange, kind).await?;
    }
    let job = env.job("bound again", ["x"])?;
    until("the queue of jobs to be bound", async || {
        let confirmation = env.client.publish_to(JOBS_EXCHANGE, MODEL, job.clone()).await?;
        Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
    })
    .await?;
    ensure!(env.replies().await?.next().await?.id() == "bound again");
    hears_commands(&mut operator, &worker).await
}

/// A reply queue of the user's own, which is now exclusive to a connection.
async fn a_queue_that_the_worker_may_not_look_at_hides_no_deletion(env: &mut TestEnv) -> Result<()> {
    const MINE: &str = "mine";
    const REFUSED: &str = "cannot declare the exchanges and queues again";
    [AGAIN, DECLARE_IT, REFUSED].into_iter().for_each(|text| env.announce(text));
    env.client.declare_queue(MINE, FieldTable::default()).await?;
    let worker = env.worker(&["model.echo.reply_queue=mine"]).await?;
    env.vhost.delete_queue(MINE).await?;
    let owner = Connection::connect(&env.url, ConnectionProperties::default()).await?;
    let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
    let channel = owner.create_channel().await?;
    channel.queue_declare(MINE.into(), options, FieldTable::default()).await?;
    let line = worker.log.wait_for(REFUSED).await?;
    ensure!(line.text().contains("exclusive"), "{}", line.text());

    env.vhost.delete_exchange(JOBS_EXCHANGE).await?;
    worker.log.wait_for(AGAIN).await?;
    let job = env.job("bound again", ["x"])?;
    until("the exchange, and the queue of jobs to be bound to it", async || {
        // The broker closes the channel of a publisher to an exchange that is not there.
        let client = Client::connect(&env.url).await?;
        let published = client.publish_to(JOBS_EXCHANGE, MODEL, job.clone()).await;
        client.close().await?;
        Ok(matches!(published, Ok(Confirmation::Ack(None))).then_some(()))
    })
    .await?;
    ensure!(env.replies().await?.next().await?.id() == "bound again");
    ensure!(worker.log.count(AGAIN) == 1 && worker.log.count("\"consuming\"") == 1, "{}", worker.log.text());
    Ok(owner.close(200, "bye".into()).await?)
}

/// A worker declares the exchange of commands, and binds its queue to it, while it consumes already.
async fn hears_commands(operator: &mut Operator, worker: &Worker) -> Result<()> {
    let command = Command::Set { log: "info".to_owned() };
    until("the worker to hear commands", async || {
        operator.tell(worker, &command).await?;
        Ok(operator.hears_within(ANSWERED_WITHIN).await?.then_some(()))
    })
    .await
}
