//! A client that allows one job at a time: however a job ends, the next one can be submitted; against a real broker.

use std::time::Duration;

use crate::common::{Broker, bounded, in_time, job, until, worker};
use futures_util::FutureExt as _;
use lapin::options::QueueDeleteOptions;
use lapin::types::FieldTable;
use vramq_producer::{Client, JobError, Options, PublishError, Reason, SubmitOptions};

/// A worker that answers every text but "silent" and "fail".
async fn work(broker: &Broker) -> tokio::task::JoinHandle<()> {
    worker::work(broker, "m", |received| match received.text(0) {
        "silent" => Vec::new(),
        "fail" => vec![received.failed(Reason::EngineFailed, "made to fail")],
        _ => vec![received.done()],
    })
    .await
}

async fn client(broker: &Broker, change: impl FnOnce(&mut Options)) -> Client {
    let mut options = Options::new(broker.url());
    options.jobs_in_flight = 1;
    change(&mut options);
    Client::connect(options).await.unwrap()
}

/// A job gets through, so the only permit was free.
async fn assert_free(client: &Client, after: &str) {
    let free = in_time(client.submit(job("m", &[after]), SubmitOptions::default())).await.unwrap();
    assert_eq!(in_time(free.outputs()).await.unwrap(), [worker::embed(after)], "after {after}");
}

#[tokio::test]
async fn permits_come_back_however_a_job_ends() {
    let broker = Broker::new();
    let worker = work(&broker).await;
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "full", bounded(1)).await;
    let client = client(&broker, |_| {}).await;
    in_time(client.publish(job("full", &["x"]), SubmitOptions::default())).await.unwrap();
    let submit = |model: &str, text: &str| client.submit(job(model, &[text]), SubmitOptions::default());
    for _ in 0..3 {
        drop(in_time(submit("m", "silent")).await.unwrap());
        assert_free(&client, "a handle that was dropped").await;

        drop(in_time(submit("m", "silent")).await.unwrap().outputs());
        assert_free(&client, "a wait that was dropped").await;

        assert!(submit("m", "silent").now_or_never().is_none());
        assert_free(&client, "a call that was dropped").await;

        let failed = in_time(in_time(submit("m", "fail")).await.unwrap().outputs()).await;
        assert!(matches!(failed, Err(JobError::Failed(_))), "{failed:?}");
        assert_free(&client, "a failed job").await;

        let short = SubmitOptions { timeout: Some(Duration::from_millis(50)), ..SubmitOptions::default() };
        match in_time(client.submit(job("m", &["silent"]), short)).await {
            Ok(pending) => {
                let late = in_time(pending.outputs()).await;
                assert!(matches!(late, Err(JobError::Timeout { .. })), "{late:?}");
            }
            Err(late) => assert!(matches!(late, PublishError::Timeout { .. }), "{late:?}"),
        }
        assert_free(&client, "a timeout").await;

        let unroutable = in_time(submit("nobody", "x")).await;
        assert!(matches!(unroutable, Err(PublishError::Unroutable { .. })), "{unroutable:?}");
        let full = in_time(submit("full", "x")).await;
        assert!(matches!(full, Err(PublishError::QueueFull { .. })), "{full:?}");
        assert_free(&client, "jobs that the broker did not accept").await;
    }
    client.close().await;
    worker.abort();
}

/// Without a timeout of its own a job has the client's.
#[tokio::test]
async fn a_job_without_a_timeout_has_the_clients() {
    let broker = Broker::new();
    let worker = work(&broker).await;
    assert_eq!(Options::new(broker.url()).timeout, Some(Duration::from_secs(3600)));
    let after = Duration::from_millis(300);
    let client = client(&broker, |options| options.timeout = Some(after)).await;
    let ended = in_time(async {
        match client.submit(job("m", &["silent"]), SubmitOptions::default()).await {
            Ok(pending) => pending.outputs().await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    });
    let error = ended.await.unwrap_err();
    assert!(error.contains("300ms"), "{error}");
    client.close().await;
    worker.abort();
}

/// Nobody can reply to a queue that is gone. A waiting caller gets an error instead of waiting for ever, and can go on.
#[tokio::test]
async fn a_lost_reply_queue_fails_the_jobs_that_wait() {
    let broker = Broker::new();
    let worker = work(&broker).await;
    let client = client(&broker, |options| options.timeout = None).await;
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    for lost in 1..=2 {
        let waiting = in_time(client.submit(job("m", &["silent"]), SubmitOptions::default())).await.unwrap();
        let queue = client.reply_queue().unwrap().to_owned();
        channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        let error = in_time(waiting.outputs()).await.unwrap_err();
        assert!(matches!(error, JobError::ReplyQueueLost), "{error:?}");
        until("the session is back", || (client.stats().reconnects >= lost).then_some(())).await;
        assert_free(&client, "a lost reply queue").await;
    }
    client.close().await;
    worker.abort();
}

/// The reply queue is deleted while the client is away, and a job is waiting for the client to come back.
#[tokio::test]
async fn a_reply_queue_that_is_lost_during_an_outage_fails_only_what_was_confirmed() {
    let broker = Broker::new();
    let user = format!("user-{}", uuid::Uuid::new_v4());
    broker.add_user(&user, "hunter2", ".*");
    let mut options = Options::new(broker.url_as(&user, "hunter2"));
    options.jobs_in_flight = 2;
    options.timeout = None;
    let client = Client::connect(options).await.unwrap();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let published = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    // The broker cuts the connections of a user that is removed, and accepts no new ones.
    broker.remove_user(&user);
    until("the connections are cut", || broker.connections("vramq-producer").is_empty().then_some(())).await;
    let queue = client.reply_queue().unwrap().to_owned();
    channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    let later = client.submit(job("m", &["later"]), SubmitOptions::default());
    let later = async { in_time(later.await.unwrap().outputs()).await.unwrap() };
    #[allow(clippy::async_yields_async, reason = "the worker goes on while the client is asked")]
    let back = async {
        broker.add_user(&user, "hunter2", ".*");
        until("the client is back", || (client.stats().reconnects >= 1).then_some(())).await;
        worker::work(&broker, "m", |received| vec![received.done()]).await
    };
    let (error, later, worker) = tokio::join!(in_time(published.outputs()), later, back);
    assert!(matches!(error, Err(JobError::ReplyQueueLost)), "{error:?}");
    assert_eq!(later, [worker::embed("later")]);
    client.close().await;
    worker.abort();
    broker.remove_user(&user);
}
