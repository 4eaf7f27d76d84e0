//! Confirmed publishing against a real broker: every message gets its own outcome, whatever happens to the others.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};

use lapin::options::{BasicGetOptions, ConfirmSelectOptions, QueueDeclareOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection};
use vramq_amqp::{
    Address, ConfirmedPublisher, Limits, MatchBy, Message, Outcomes, PublishOutcome, PublishPipeline,
    frame_max, header_frame_bytes,
};

/// Far beyond what a loaded machine needs.
const DEADLINE: Duration = Duration::from_secs(60);

const LIMITS: Limits = Limits { messages: 64, bytes: 1 << 20, body_bytes: 4096 };

async fn connect() -> Connection {
    let url = std::env::var("VRAMQ_TEST_AMQP_URL")
        .expect("VRAMQ_TEST_AMQP_URL is not set: run `make test`, or scripts/with-rabbitmq");
    url.parse::<Address>().unwrap().connect("test amqp").await.unwrap()
}

/// A queue that is deleted with its connection. With `max`, it refuses messages beyond that many.
async fn queue(channel: &Channel, max: Option<i64>) -> ShortString {
    let mut arguments = FieldTable::default();
    if let Some(max) = max {
        arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(max));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    }
    let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare("".into(), options, arguments).await.unwrap().name().clone()
}

/// A queue that takes messages, one that does not exist, and one that refuses all messages after the first.
async fn destinations(channel: &Channel) -> [ShortString; 3] {
    let (routed, full) = (queue(channel, None).await, queue(channel, Some(1)).await);
    [routed, "vramq.test.no-such-queue".into(), full]
}

fn message(queue: &ShortString, number: usize, body: usize) -> Message {
    Message {
        routing_key: queue.clone(),
        properties: BasicProperties::default().with_message_id(number.to_string().into()),
        body: vec![b'x'; body].into(),
        mandatory: true,
        ..Message::default()
    }
}

async fn next<T>(publisher: &mut PublishPipeline<T>) -> lapin::Result<Outcomes<T>> {
    tokio::time::timeout(DEADLINE, publisher.next()).await.expect("in time")
}

/// Publishes all of them, never more than there is room for; each number with its outcome.
async fn publish_all(
    publisher: &mut PublishPipeline<usize>,
    messages: impl IntoIterator<Item = Message>,
) -> HashMap<usize, PublishOutcome> {
    let mut messages = messages.into_iter().enumerate().peekable();
    let mut outcomes = HashMap::new();
    while messages.peek().is_some() || !publisher.is_empty() {
        while publisher.has_room()
            && let Some((number, message)) = messages.next()
        {
            publisher.publish(number, message);
        }
        assert!(publisher.unconfirmed().count() <= LIMITS.messages);
        for (number, outcome) in next(publisher).await.unwrap() {
            assert_eq!(outcomes.insert(number, outcome), None, "{number} twice");
        }
    }
    outcomes
}

/// Many in flight at once, of all four kinds in turn: lapin hands a returned message to whichever confirm completes next,
/// so a mistake in matching shows as a wrong outcome.
#[tokio::test]
async fn every_message_gets_its_own_outcome() {
    let connection = connect().await;
    let channel = connection.create_channel().await.unwrap();
    let [routed, missing, full] = destinations(&channel).await;
    for match_by in [MatchBy::PublishSeq, MatchBy::MessageId] {
        let mut publisher = PublishPipeline::open(&connection, LIMITS, match_by).await.unwrap();
        // The first one fills the queue, whichever of the two rounds this is.
        publish_all(&mut publisher, [message(&full, 0, 1)]).await;
        let messages = (0..4_000).map(|number| match number % 4 {
            0 => message(&routed, number, 10),
            1 => message(&missing, number, 10),
            2 => message(&full, number, 10),
            _ => message(&routed, number, LIMITS.body_bytes + 1),
        });
        let outcomes = publish_all(&mut publisher, messages).await;
        assert_eq!(outcomes.len(), 4_000);
        for (number, outcome) in outcomes {
            let expected = match number % 4 {
                0 => PublishOutcome::Confirmed,
                1 => PublishOutcome::Returned,
                2 => PublishOutcome::Refused,
                _ => PublishOutcome::TooLarge,
            };
            assert_eq!(outcome, expected, "{match_by:?}, message {number}");
        }
    }
    let arrived = channel.queue_purge(routed, QueuePurgeOptions::default()).await.unwrap();
    assert_eq!(arrived, 2_000);
}

/// The same, as the worker publishes: a future for each message, and each future waits for its own outcome.
#[tokio::test]
async fn every_future_gets_the_outcome_of_its_own_message() {
    let connection = connect().await;
    let channel = connection.create_channel().await.unwrap();
    let [routed, missing, full] = destinations(&channel).await;
    for match_by in [MatchBy::PublishSeq, MatchBy::MessageId] {
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        let publisher = ConfirmedPublisher::new(channel, match_by, Some(60));
        let publish = async |number: usize, queue: &ShortString| {
            let unconfirmed = publisher.send(message(queue, number, 10)).await.unwrap();
            (number, publisher.outcome(unconfirmed).await.unwrap())
        };
        // The first one fills the queue, whichever of the two rounds this is.
        publish(0, &full).await;
        let kinds = [
            (&routed, PublishOutcome::Confirmed),
            (&missing, PublishOutcome::Returned),
            (&full, PublishOutcome::Refused),
        ];
        let mut numbers = 0..3_000;
        let mut publishing = FuturesUnordered::new();
        let mut ended = 0;
        loop {
            while publishing.len() < LIMITS.messages
                && let Some(number) = numbers.next()
            {
                publishing.push(publish(number, kinds[number % 3].0));
            }
            let next = tokio::time::timeout(DEADLINE, publishing.next()).await.expect("in time");
            let Some((number, outcome)) = next else { break };
            assert_eq!(outcome, kinds[number % 3].1, "{match_by:?}, message {number}");
            ended += 1;
        }
        assert_eq!(ended, 3_000);
    }
}

#[tokio::test]
async fn the_bytes_in_flight_are_bounded() {
    let connection = connect().await;
    let channel = connection.create_channel().await.unwrap();
    let queue = queue(&channel, None).await;
    let limits = Limits { messages: 1_000, bytes: 10_000, body_bytes: 4_096 };
    let mut publisher = PublishPipeline::open(&connection, limits, MatchBy::PublishSeq).await.unwrap();
    let mut taken = 0;
    while publisher.has_room() {
        publisher.publish(taken, message(&queue, taken, 4_000));
        taken += 1;
    }
    assert_eq!((taken, publisher.unconfirmed().count()), (3, 3));
    while !publisher.is_empty() {
        let outcomes = next(&mut publisher).await.unwrap();
        assert!(outcomes.iter().all(|(_, outcome)| *outcome == PublishOutcome::Confirmed));
    }
    assert!(publisher.has_room());
}

/// A larger frame than negotiated may cost the connection (RabbitMQ takes eight bytes more).
#[tokio::test]
async fn headers_that_fill_a_frame_are_sent_and_larger_ones_are_not() {
    let connection = connect().await;
    let channel = connection.create_channel().await.unwrap();
    let queue = queue(&channel, None).await;
    let mut publisher = PublishPipeline::open(&connection, LIMITS, MatchBy::PublishSeq).await.unwrap();
    let properties = || {
        BasicProperties::default()
            .with_content_type("text/plain".into())
            .with_content_encoding("utf-8".into())
            .with_delivery_mode(1)
            .with_priority(3)
            .with_correlation_id("c".repeat(255).into())
            .with_reply_to("replies".into())
            .with_expiration("3600000".into())
            .with_message_id("a message".into())
            .with_timestamp(1_700_000_000)
            .with_type("order".into())
            .with_app_id("an app".into())
            .with_cluster_id("a cluster".into())
    };
    let of_bytes = |bytes: usize| {
        let mut headers = FieldTable::default();
        headers.insert("number".into(), AMQPValue::LongInt(7));
        headers.insert("large".into(), AMQPValue::LongString("x".repeat(bytes).into()));
        Message { properties: properties(), headers, ..message(&queue, 0, 10) }
    };
    let empty = of_bytes(0);
    let fills = frame_max(&connection) - header_frame_bytes(&empty.properties, &empty.headers);
    let outcomes = publish_all(&mut publisher, [fills + 1, fills, 0].map(of_bytes)).await;
    let expected = [PublishOutcome::TooLarge, PublishOutcome::Confirmed, PublishOutcome::Confirmed];
    assert_eq!([0, 1, 2].map(|number| outcomes[&number]), expected);
}

/// Equal messages differ by their numbers; messages that are matched by their id arrive as they were given.
#[tokio::test]
async fn only_numbered_messages_get_a_header() {
    let connection = connect().await;
    let channel = connection.create_channel().await.unwrap();
    let queue = queue(&channel, None).await;
    for (match_by, headers) in [(MatchBy::PublishSeq, 1), (MatchBy::MessageId, 0)] {
        let mut publisher = PublishPipeline::open(&connection, LIMITS, match_by).await.unwrap();
        publish_all(&mut publisher, [message(&queue, 7, 3), message(&queue, 8, 3)]).await;
        let mut seen = Vec::new();
        for _ in 0..2 {
            let options = BasicGetOptions { no_ack: true };
            let message = channel.basic_get(queue.clone(), options).await.unwrap().expect("a message");
            seen.push(message.delivery.properties.headers().clone().unwrap_or_default());
        }
        assert!(seen.iter().all(|table| table.inner().len() == headers), "{match_by:?}: {seen:?}");
        assert_eq!(seen[0] != seen[1], match_by == MatchBy::PublishSeq);
    }
}

/// The broker closes the channel because of a message: the error says so, and the messages without a confirm are known.
#[tokio::test]
async fn a_lost_channel_reports_what_is_unconfirmed() {
    let connection = connect().await;
    let mut publisher = PublishPipeline::open(&connection, LIMITS, MatchBy::PublishSeq).await.unwrap();
    let faulty = Message { exchange: "vramq.test.no-such-exchange".into(), ..message(&"x".into(), 0, 1) };
    for token in 0..3 {
        publisher.publish(token, faulty.clone());
    }
    let lost = next(&mut publisher).await.expect_err("the channel is closed");
    assert!(lost.is_amqp_soft_error() && lost.to_string().contains("NOT_FOUND"), "{lost}");
    let mut unconfirmed: Vec<_> = publisher.unconfirmed().copied().collect();
    unconfirmed.sort_unstable();
    assert_eq!(unconfirmed, [0, 1, 2]);
    // The next call returns it again, and does not wait for confirms that will not come.
    assert!(next(&mut publisher).await.is_err_and(|error| error.is_amqp_soft_error()));
    assert!(!publisher.is_empty());
    publisher.forget();
    assert!(publisher.is_empty() && publisher.unconfirmed().count() == 0);
}
