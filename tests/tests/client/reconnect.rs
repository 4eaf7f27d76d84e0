//! Connections cut by the broker in the middle of the work; against a real broker.

use std::future::ready;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{Broker, in_time, job, until, worker};
use futures_util::{StreamExt as _, stream};
use lapin::options::QueueDeleteOptions;
use lapin::types::FieldTable;
use vramq_producer::{Client, ConnectError, JobError, Options, PublishError, SubmitOptions};
use vramq_tests::proxy::{Cut, Proxy};

/// Jobs that are answered between two cuts.
const JOBS_A_CUT: usize = 300;

/// Jobs go on being published and answered while the connections are cut again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_in_the_middle() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.part(0..1), received.part(1..2)]).await;
    let mut options = Options::new(broker.url());
    options.connection_name = "cut-me".to_owned();
    let client = Client::connect(options).await.unwrap();
    let (enough, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    // Each cut comes when so many more jobs were answered: jobs flow before the first one, and after the last one.
    let flows = async |jobs: usize| {
        until("jobs are answered", || (answered.load(Ordering::Relaxed) >= jobs).then_some(())).await;
    };
    let work = async {
        stream::iter(0..)
            .take_while(|_| ready(!enough.load(Ordering::Relaxed)))
            .map(|n| {
                let (client, answered) = (&client, &answered);
                async move {
                    let text = format!("text {n}");
                    let job = job("m", &[&text, "x"]);
                    let pending = client.submit(job, SubmitOptions::default()).await.unwrap();
                    assert_eq!(pending.outputs().await.unwrap(), [worker::embed(&text), worker::embed("x")]);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            })
            .buffer_unordered(64)
            .count()
            .await
    };
    let cuts = async {
        for (n, connection) in ["(jobs)", "(replies)", "cut-me"].into_iter().enumerate() {
            flows((n + 1) * JOBS_A_CUT).await;
            broker.cut(connection).await;
            until("the client noticed", || (client.stats().reconnects as usize > n).then_some(())).await;
        }
        flows(4 * JOBS_A_CUT).await;
        enough.store(true, Ordering::Relaxed);
    };
    let (done, ()) = in_time(async { tokio::join!(work, cuts) }).await;
    println!("{done} jobs, {:?}", client.stats());
    assert!(done > 1000);
    client.close().await;
    worker.abort();
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
}

/// With nothing under way the client notices too.
#[tokio::test]
async fn cut_while_idle() {
    let broker = Broker::new();
    let mut options = Options::new(broker.url());
    options.connection_name = "cut-me".to_owned();
    options.replies = false;
    let client = Client::connect(options).await.unwrap();
    broker.cut("cut-me").await;
    until("the client noticed", || (client.stats().reconnects == 1).then_some(())).await;
    client.close().await;
}

/// Replies that come while the client is away wait in its queue.
#[tokio::test]
async fn awaited_jobs_go_on_waiting() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let mut options = Options::new(broker.url());
    options.connection_name = "cut-me".to_owned();
    let client = Client::connect(options).await.unwrap();
    let pending = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    broker.cut("cut-me").await;
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    assert_eq!(in_time(pending.outputs()).await.unwrap(), [worker::embed("x")]);
    until("the client noticed", || (client.stats().reconnects > 0).then_some(())).await;
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn a_deleted_reply_queue_comes_back() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    let queue = client.reply_queue().unwrap().to_owned();
    channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    until("the client noticed", || (client.stats().reconnects == 1).then_some(())).await;
    assert_eq!(client.disconnected_for(), None, "it has a session again");
    assert_eq!(broker.queues("vramq.replies.client."), [queue]);
    let pending = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    assert_eq!(in_time(pending.outputs()).await.unwrap(), [worker::embed("x")]);
    client.close().await;
    worker.abort();
}

/// The broker is out of reach for longer than the client may try, and comes back: then a new client succeeds, and this one does not.
#[tokio::test]
async fn a_client_that_has_given_up_is_to_be_replaced() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    let proxy = Proxy::to(&broker.url()).await.unwrap();
    let mut options = Options::new(proxy.url());
    options.reconnect_for = Some(Duration::from_millis(300));
    let client = Client::connect(options.clone()).await.unwrap();
    proxy.refuse();
    proxy.cut(Cut::Reset);
    let submit =
        async |client: &Client| in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await;
    let lost = submit(&client).await.unwrap_err();
    assert!(matches!(lost, PublishError::Disconnected(_)) && lost.is_retryable(), "{lost:?}");
    proxy.pass();
    let again = submit(&client).await.unwrap_err();
    assert_eq!(again.to_string(), lost.to_string());
    let next = Client::connect(options).await.unwrap();
    assert_eq!(in_time(submit(&next).await.unwrap().outputs()).await.unwrap(), [worker::embed("x")]);
    next.close().await;
    worker.abort();
}

/// The broker refuses the client for longer than that may try.
#[tokio::test]
async fn giving_up_ends_everything() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |_| Vec::new()).await;
    let user = format!("user-{}", uuid::Uuid::new_v4());
    broker.add_user(&user, "hunter2", ".*");
    let mut options = Options::new(broker.url_as(&user, "hunter2"));
    options.reconnect_for = Some(Duration::from_millis(300));
    let client = Client::connect(options).await.unwrap();
    let pending = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    assert_eq!(client.disconnected_for(), None);
    // The broker cuts a deleted user's connections, and takes no new ones.
    broker.remove_user(&user);
    let lost = in_time(pending.outputs()).await.unwrap_err();
    assert!(matches!(lost, JobError::Disconnected(ConnectError::Refused { .. })), "{lost:?}");
    let refused = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap_err();
    assert!(matches!(refused, PublishError::Disconnected(_)), "{refused:?}");
    assert!(!refused.is_retryable(), "a new client would be refused, too");
    assert!(client.disconnected_for().is_some());
    worker.abort();
}
