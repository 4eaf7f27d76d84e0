//! Connecting: refused connections, and what a client leaves at the broker; against a real broker.

use std::time::Duration;

use crate::common::{Broker, in_time, job, until, worker};
use lapin::options::BasicGetOptions;
use lapin::types::FieldTable;
use vramq_producer::{Client, ConnectError, Options, PublishError, SubmitOptions};
use vramq_schemas::topology::default_reply_queue;

#[tokio::test]
async fn a_user_without_permission_is_refused_and_the_client_lives() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let user = format!("user-{}", uuid::Uuid::new_v4());
    broker.add_user(&user, "hunter2", "nothing");
    let client = Client::connect(broker.url_as(&user, "hunter2")).await.unwrap();
    for _ in 0..2 {
        let refused = in_time(client.publish(job("m", &["x"]), SubmitOptions::default())).await;
        assert!(matches!(refused, Err(PublishError::Refused { code: 403, .. })), "{refused:?}");
    }
    client.close().await;
    broker.remove_user(&user);
}

#[tokio::test]
async fn connection_errors_are_typed_and_keep_credentials() {
    let broker = Broker::new();
    let refused = Client::connect(broker.url_as("guest", "hunter2")).await.unwrap_err();
    assert!(matches!(refused, ConnectError::Refused { .. }), "{refused:?}");
    assert!(!refused.is_retryable());
    let vhost = Client::connect(format!("{}-missing", broker.url())).await.unwrap_err();
    assert!(matches!(vhost, ConnectError::Refused { .. }), "{vhost:?}");
    let nobody = Client::connect("amqp://guest:hunter2@127.0.0.1:1/%2f").await.unwrap_err();
    assert!(matches!(nobody, ConnectError::Unreachable { .. }), "{nobody:?}");
    assert!(nobody.is_retryable());
    // A server that accepts and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut options = Options::new(format!("amqp://guest:hunter2@{}", silent.local_addr().unwrap()));
    options.connect_timeout = Duration::from_millis(100);
    let hung = in_time(Client::connect(options)).await.unwrap_err();
    assert!(matches!(hung, ConnectError::Timeout { .. }), "{hung:?}");
    let plain = broker.url_as("guest", "hunter2").replace("amqp://", "amqps://");
    let plain = in_time(Client::connect(plain)).await.unwrap_err();
    assert!(plain.to_string().contains("does not speak TLS"), "{plain:?}");
    for error in [refused, vhost, nobody, hung, plain] {
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
    }
}

/// Each client starts with a random host, so some of them try the silent one first.
#[tokio::test]
async fn a_client_connects_although_a_host_of_several_is_silent() {
    let broker = Broker::new();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let hosts = format!("@{},", silent.local_addr().unwrap());
    let url = broker.url().replacen('@', &hosts, 1);
    let connecting = (0..6).map(|_| async {
        let mut options = Options::new(url.clone());
        options.connect_timeout = Duration::from_secs(3);
        Client::connect(options).await
    });
    for client in in_time(futures_util::future::join_all(connecting)).await {
        client.unwrap().close().await;
    }
}

/// Dropping everything is as good as closing.
#[tokio::test]
async fn the_reply_queue_goes_with_the_last_handle() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let pending = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    drop(client);
    assert_eq!(broker.queues("vramq.replies.client.").len(), 1);
    drop(pending);
    until("the reply queue is deleted", || broker.queues("vramq.replies.client.").is_empty().then_some(()))
        .await;
}

#[tokio::test]
async fn without_reply_queue_replies_go_to_the_models() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    let mut options = Options::new(broker.url());
    options.replies = false;
    let client = Client::connect(options).await.unwrap();
    let id = in_time(client.publish(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    assert_eq!(uuid::Uuid::parse_str(&id).unwrap().get_version_num(), 7);
    let refused = client.submit(job("m", &["x"]), SubmitOptions::default()).await;
    assert!(matches!(refused, Err(PublishError::NoReplyQueue)), "{refused:?}");
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    let queue = default_reply_queue("m");
    let reply = in_time(async {
        loop {
            let got = channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: true });
            match got.await.unwrap() {
                Some(message) => break message.delivery,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    });
    let reply = reply.await;
    assert_eq!(reply.properties.correlation_id().clone().unwrap().as_str(), id);
    client.close().await;
    worker.abort();
}
