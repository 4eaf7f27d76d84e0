//! Publishing: confirms, returned messages, nacks, rejected jobs, limits; against a real broker.

use std::collections::HashSet;
use std::time::Duration;

use crate::common::{Broker, bounded, in_time, job, worker};
use futures_util::{StreamExt as _, stream};
use lapin::options::BasicGetOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use vramq_producer::{Client, Encoding, Input, Options, PublishError, SubmitOptions};
use vramq_schemas::codec::{BINCODE, JSON, MESSAGE_PACK};
use vramq_schemas::topology::jobs_queue;
use vramq_schemas::{BODY_BYTES_MAX, codec};

#[tokio::test]
async fn thousands_of_jobs_with_confirms_in_flight_in_both_encodings() {
    const JOBS: usize = 4_000;
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    for encoding in [Encoding::Bincode, Encoding::Json] {
        let mut options = Options::new(broker.url());
        options.encoding = encoding;
        let client = Client::connect(options).await.unwrap();
        let answers = stream::iter(0..JOBS)
            .map(|n| {
                let client = &client;
                async move {
                    let (a, b) = (format!("text {n}"), format!("another {n}"));
                    let pending = client.submit(job("m", &[&a, &b]), SubmitOptions::default()).await?;
                    let outputs = pending.outputs().await.unwrap();
                    assert_eq!(outputs, [worker::embed(&a), worker::embed(&b)]);
                    Ok::<_, PublishError>(())
                }
            })
            .buffer_unordered(500)
            .fold(0, |sum, answer| async move { answer.map(|()| sum + 1).unwrap() });
        assert_eq!(in_time(answers).await, JOBS);
        assert_eq!(client.stats(), vramq_producer::Stats::default());
        client.close().await;
    }
    assert_eq!(broker.queues("vramq.replies.client."), Vec::<String>::new());
    worker.abort();
}

/// A return is matched with the job that it belongs to, whichever confirm carries it.
#[tokio::test]
async fn unroutable_among_routed() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "known", FieldTable::default()).await;
    let client = Client::connect(broker.url()).await.unwrap();
    for _ in 0..20 {
        let verdicts = stream::iter(0..200)
            .map(|n| {
                let client = &client;
                let model = if n % 3 == 0 { "unknown" } else { "known" };
                async move { (model, client.publish(job(model, &["x"]), SubmitOptions::default()).await) }
            })
            .buffer_unordered(200)
            .collect::<Vec<_>>();
        for (model, verdict) in in_time(verdicts).await {
            match (model, verdict) {
                ("known", Ok(_)) => {}
                ("unknown", Err(PublishError::Unroutable { model, .. })) => assert_eq!(model, "unknown"),
                (model, verdict) => panic!("{model}: {verdict:?}"),
            }
        }
    }
    client.close().await;
}

#[tokio::test]
async fn before_any_worker_was_ever_there() {
    let broker = Broker::new();
    let client = Client::connect(broker.url()).await.unwrap();
    let error = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap_err();
    assert!(matches!(&error, PublishError::Unroutable { model, .. } if model == "m"), "{error:?}");
    assert!(error.is_retryable());
    assert!(error.to_string().contains("no queue for model `m`: is a worker for it configured?"), "{error}");

    // The same client works as soon as there is one.
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    let pending = in_time(client.submit(job("m", &["x"]), SubmitOptions::default())).await.unwrap();
    assert_eq!(in_time(pending.outputs()).await.unwrap(), [worker::embed("x")]);
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn a_full_queue_is_a_retryable_error() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    let mut quorum = bounded(3);
    quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    for (model, arguments) in [("classic", bounded(3)), ("quorum", quorum)] {
        broker.declare(&channel, model, arguments).await;
        let client = Client::connect(broker.url()).await.unwrap();
        let mut full = None;
        // A quorum queue takes a few more before it notices.
        for _ in 0..100 {
            match in_time(client.publish(job(model, &["x"]), SubmitOptions::default())).await {
                Ok(_) => {}
                Err(error) => {
                    full = Some(error);
                    break;
                }
            }
        }
        let full = full.unwrap_or_else(|| panic!("{model}: never full"));
        assert!(matches!(&full, PublishError::QueueFull { model: at, .. } if at == model), "{full:?}");
        assert!(full.is_retryable());
        client.close().await;
    }
}

/// The broker closes the connection over a channel too many. Then models share channels.
#[tokio::test]
async fn there_may_be_more_models_than_channels() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    let models = (0..8).map(|at| format!("m{at}")).collect::<Vec<_>>();
    for model in &models {
        broker.declare(&channel, model, FieldTable::default()).await;
    }
    let user = format!("user-{}", uuid::Uuid::new_v4());
    broker.add_user(&user, "hunter2", ".*");
    // One for replies, one for withdrawals.
    broker.limit_channels(&user, 4);
    let client = Client::connect(broker.url_as(&user, "hunter2")).await.unwrap();
    for round in 0..2 {
        let jobs = models.iter().flat_map(|model| (0..50).map(move |_| job(model, &["x"])));
        let publishing = jobs.map(|job| client.publish(job, SubmitOptions::default()));
        let published = in_time(futures_util::future::join_all(publishing)).await;
        for published in published {
            published.unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
    let stats = client.stats();
    // The broker counts the channels of a connection that it has closed for a moment longer.
    assert!((1..=3).contains(&stats.reconnects), "{stats:?}");
    client.close().await;
    broker.remove_user(&user);
}

/// The message as a foreign consumer sees it.
#[tokio::test]
async fn the_message_is_as_the_contract_says() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let encodings =
        [(Encoding::Json, JSON), (Encoding::MessagePack, MESSAGE_PACK), (Encoding::Bincode, BINCODE)];
    for (encoding, content_type) in encodings {
        let mut options = Options::new(broker.url());
        options.encoding = encoding;
        let client = Client::connect(options).await.unwrap();
        let asked = SubmitOptions {
            id: Some("my-id".to_owned()),
            priority: Some(3),
            expiration: Some(Duration::from_millis(90_500)),
            batch_hint: Some(8),
            traceparent: Some("00-ab-cd-01".to_owned()),
            ..SubmitOptions::default()
        };
        let pending = in_time(client.submit(job("m", &["x"]), asked)).await.unwrap();
        assert_eq!(pending.id(), "my-id");
        let message = channel.basic_get(jobs_queue("m").into(), BasicGetOptions { no_ack: true });
        let message = message.await.unwrap().expect("a message").delivery;
        let properties = &message.properties;
        let text = |value: &Option<ShortString>| value.clone().expect("set").to_string();
        assert_eq!(text(properties.message_id()), "my-id");
        assert_eq!(text(properties.correlation_id()), "my-id");
        assert_eq!(text(properties.content_type()), content_type);
        assert_eq!(text(properties.reply_to()), client.reply_queue().unwrap());
        assert_eq!(text(properties.expiration()), "90500");
        assert_eq!(*properties.delivery_mode(), Some(2));
        assert_eq!(*properties.priority(), Some(3));
        assert!(properties.timestamp().expect("set") > 1_700_000_000);
        assert!(properties.timestamp().expect("set") < 100_000_000_000, "seconds, not milliseconds");
        let headers = properties.headers().clone().expect("set");
        assert_eq!(headers.inner().get("batch-hint"), Some(&AMQPValue::LongLongInt(8)));
        assert_eq!(headers.inner().get("traceparent"), Some(&AMQPValue::LongString("00-ab-cd-01".into())));
        assert_eq!(message.routing_key.as_str(), "m");
        assert_eq!(message.exchange.as_str(), "vramq.jobs");
        assert_eq!(codec::decode::<vramq_producer::Job>(&message.data, encoding).unwrap(), job("m", &["x"]));
        client.close().await;
    }
}

#[tokio::test]
async fn a_key_says_where_a_job_goes() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m-large", FieldTable::default()).await;
    let mut options = Options::new(broker.url());
    options.encoding = Encoding::Json;
    let client = Client::connect(options).await.unwrap();
    let under = |key: &str| SubmitOptions { key: Some(key.to_owned()), ..SubmitOptions::default() };
    in_time(client.publish(job("m", &["x"]), under("m-large"))).await.unwrap();
    let message = channel.basic_get(jobs_queue("m-large").into(), BasicGetOptions { no_ack: true });
    let message = message.await.unwrap().expect("a message").delivery;
    let sent: vramq_producer::Job = codec::decode(&message.data, Encoding::Json).unwrap();
    assert_eq!(sent, job("m", &["x"]));
    let nowhere = in_time(client.publish(job("m", &["x"]), under("nobody"))).await.unwrap_err();
    assert!(nowhere.to_string().contains("no queue for model `m` with key `nobody`:"), "{nowhere}");
    assert!(
        matches!(&nowhere, PublishError::Unroutable { model, key, .. } if model == "m" && key == "nobody"),
        "{nowhere:?}"
    );
    let wrong = in_time(client.publish(job("m", &["x"]), under("~bulk.m"))).await.unwrap_err();
    assert!(matches!(wrong, PublishError::Model(_)), "{wrong:?}");
    client.close().await;
}

#[tokio::test]
async fn caps_and_options_are_checked_before_publishing() {
    let broker = Broker::new();
    let client = Client::connect(broker.url()).await.unwrap();
    let submit = |job, options| in_time(client.submit(job, options));
    let plain = SubmitOptions::default;

    let huge = submit(job("m", &[&"x".repeat(BODY_BYTES_MAX)]), plain()).await.unwrap_err();
    assert!(
        matches!(huge, PublishError::TooLarge { bytes, cap: BODY_BYTES_MAX } if bytes > BODY_BYTES_MAX),
        "{huge:?}"
    );
    let many = submit(job("m", &["x"; 65_537]), plain()).await.unwrap_err();
    assert!(matches!(many, PublishError::TooManyItems { items: 65_537, .. }), "{many:?}");
    let none = submit(job("m", &[]), plain()).await.unwrap_err();
    assert!(matches!(none, PublishError::NoInputs), "{none:?}");
    let name = submit(job("no such#name", &["x"]), plain()).await.unwrap_err();
    assert!(matches!(name, PublishError::Model(_)), "{name:?}");
    for options in [
        SubmitOptions { id: Some("x".repeat(256)), ..plain() },
        SubmitOptions { id: Some(String::new()), ..plain() },
        SubmitOptions { batch_hint: Some(0), ..plain() },
        SubmitOptions { model_revision: Some("x".repeat(2049)), ..plain() },
        SubmitOptions { expiration: Some(Duration::from_secs(5_000_000)), ..plain() },
        SubmitOptions { timeout: Some(Duration::MAX), ..plain() },
    ] {
        let refused = submit(job("m", &["x"]), options.clone()).await;
        assert!(matches!(refused, Err(PublishError::Option { .. })), "{options:?}: {refused:?}");
    }
    client.close().await;
    let closed = submit(job("m", &["x"]), plain()).await;
    assert!(matches!(closed, Err(PublishError::Closed)), "{closed:?}");
}

#[tokio::test]
async fn the_largest_job_passes() {
    let broker = Broker::new();
    let worker = worker::work(&broker, "m", |received| vec![received.done()]).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let mut largest = job("m", &[&"x".repeat(BODY_BYTES_MAX - 64)]);
    let spare = BODY_BYTES_MAX - codec::encode(&largest, Encoding::Bincode).unwrap().len();
    let Input::Text(text) = &mut largest.inputs[0] else { unreachable!("it was just made of a text") };
    text.push_str(&"x".repeat(spare));
    assert_eq!(codec::encode(&largest, Encoding::Bincode).unwrap().len(), BODY_BYTES_MAX);
    let pending = in_time(client.submit(largest, SubmitOptions::default())).await.unwrap();
    assert_eq!(in_time(pending.outputs()).await.unwrap().len(), 1);
    client.close().await;
    worker.abort();
}

#[tokio::test]
async fn an_id_is_in_flight_once() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let named = || SubmitOptions { id: Some("one".to_owned()), ..SubmitOptions::default() };
    let pending = in_time(client.submit(job("m", &["x"]), named())).await.unwrap();
    let again = in_time(client.submit(job("m", &["x"]), named())).await;
    assert!(matches!(again, Err(PublishError::DuplicateId { .. })), "{again:?}");
    drop(pending);
    let _third = in_time(client.submit(job("m", &["x"]), named())).await.unwrap();
    client.close().await;
}

#[tokio::test]
async fn jobs_in_flight_are_bounded() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let mut options = Options::new(broker.url());
    options.jobs_in_flight = 2;
    let client = Client::connect(options).await.unwrap();
    let submit = |timeout| {
        let options = SubmitOptions { timeout, ..SubmitOptions::default() };
        client.submit(job("m", &["x"]), options)
    };
    let first = in_time(submit(None)).await.unwrap();
    let _second = in_time(submit(None)).await.unwrap();
    let third = in_time(submit(Some(Duration::from_millis(50)))).await;
    assert!(matches!(third, Err(PublishError::Timeout { .. })), "{third:?}");
    drop(first);
    let _fourth = in_time(submit(None)).await.unwrap();
    client.close().await;
}

/// Ids are unique.
#[tokio::test]
async fn ids_are_unique() {
    let broker = Broker::new();
    let connection = broker.connect().await;
    let channel = connection.create_channel().await.unwrap();
    broker.declare(&channel, "m", FieldTable::default()).await;
    let client = Client::connect(broker.url()).await.unwrap();
    let ids = stream::iter(0..500)
        .map(|_| client.publish(job("m", &["x"]), SubmitOptions::default()))
        .buffered(100)
        .map(Result::unwrap)
        .collect::<Vec<_>>();
    let ids = in_time(ids).await;
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 500);
    client.close().await;
}
