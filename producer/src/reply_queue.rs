//! The client's reply queue: declares and consumes it, gives replies to the jobs that await them, acknowledges them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Acker, BasicProperties, Channel, Connection, Consumer};
use tokio::time::{Instant, interval};
use vramq_amqp::is_missing;
use vramq_schemas::fields::as_text;
use vramq_schemas::{
    Encoding, Failure, ItemProgress, Output, Outputs, ReplyHeaders, ReplyKind, codec, headers,
};

use crate::held::Due;
use crate::options::REPLY_PREFETCH;
use crate::outgoing::off_runtime;
use crate::registry::{Registry, Reply};

/// Replies acknowledged with one frame at most; a quarter of the prefetch, so that the broker always has room to
/// send the next.
const REPLIES_PER_ACK: usize = REPLY_PREFETCH as usize / 4;

/// How often a client looks for replies that it holds for too long.
const HELD_LOOK_EVERY: Duration = Duration::from_secs(60);

/// Whether the queue still exists. It does not if it was deleted, if it expired while the client was away, or if its node
/// lost it; then replies were lost with it.
pub(crate) async fn exists(connection: &Connection, queue: &ShortString) -> lapin::Result<bool> {
    // On a channel of its own: the broker closes it if there is no such queue.
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(queue.clone(), passive, FieldTable::default()).await {
        Ok(_) => channel.close(200, "OK".into()).await.map(|()| true),
        Err(error) if is_missing(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Declares the queue. Durable and not exclusive: it and the replies in it survive this client's connection, for as long as `expires`.
pub(crate) async fn declare(channel: &Channel, queue: &ShortString, expires: Duration) -> lapin::Result<()> {
    let mut arguments = FieldTable::default();
    let expires_ms = i64::try_from(expires.as_millis()).unwrap_or(i64::MAX);
    arguments.insert("x-expires".into(), AMQPValue::LongLongInt(expires_ms));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.clone(), durable, arguments).await.map(drop)
}

/// Starts to consume the queue.
pub(crate) async fn consume(
    channel: &Channel,
    queue: &ShortString,
    prefetch: u16,
) -> lapin::Result<Consumer> {
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel
        .basic_consume(
            queue.clone(),
            ShortString::default(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
}

/// Gives replies to the jobs that await them, and acknowledges them afterwards; ends with the consumer.
///
/// # Errors
/// What ended the consumer; none if the broker cancelled it, for example because the queue was deleted.
pub(crate) async fn dispatch_replies(consumer: Consumer, registry: Arc<Registry>) -> lapin::Result<()> {
    let mut batches = consumer.ready_chunks(REPLIES_PER_ACK);
    while let Some(batch) = batches.next().await {
        let mut last = None;
        for delivery in batch {
            let Delivery { properties, data, acker, .. } = delivery?;
            dispatch(&registry, &properties, data, None).await;
            last = Some(acker);
        }
        if let Some(acker) = last {
            acker.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    Ok(())
}

/// Like [`dispatch_replies`], for a client that holds its replies: acknowledges each when its job is released. Drops replies to unknown jobs,
/// unless the client has `adopted` the queue: then a caller may ask for these jobs later, so their replies are held.
///
/// # Errors
/// As for [`dispatch_replies`].
pub(crate) async fn dispatch_held_replies(
    mut consumer: Consumer,
    registry: Arc<Registry>,
    adopted: bool,
) -> lapin::Result<()> {
    let mut look = interval(HELD_LOOK_EVERY);
    loop {
        tokio::select! {
            delivery = consumer.next() => {
                let Some(delivery) = delivery else { return Ok(()) };
                on_held_delivery(&registry, delivery?, adopted).await;
            }
            () = registry.held.due() => {}
            _ = look.tick() => registry.held.requeue_old(Instant::now()),
        }
        settle(&registry).await?;
    }
}

/// Gives a reply to its job, and holds it. A reply that is not to be held is acknowledged.
async fn on_held_delivery(registry: &Registry, delivery: Delivery, adopted: bool) {
    let Delivery { properties, data, acker, .. } = delivery;
    let is_report = kind(&properties) == Some(ReplyKind::Progress);
    let mut unheld = dispatch(registry, &properties, data, Some(acker)).await;
    if !is_report {
        unheld = unheld.and_then(|acker| hold_again(registry, &properties, acker));
    }
    match unheld {
        Some(acker) if adopted && !is_report => {
            let id = unknown_id(&properties);
            registry.held.hold_stray(id, acker, Instant::now());
            if registry.contains(id) {
                // A caller may have asked for the job at this moment.
                registry.held.requeue_strays(id);
            }
        }
        Some(acker) => registry.held.acknowledge(acker),
        None => {}
    }
}

/// Settles the held replies that are due.
///
/// # Errors
/// Why the channel was lost.
pub(crate) async fn settle(registry: &Registry) -> lapin::Result<()> {
    let Due { acknowledge, requeue } = registry.held.take_due();
    for acker in acknowledge {
        acker.ack(BasicAckOptions::default()).await?;
    }
    for acker in requeue {
        acker.nack(BasicNackOptions { requeue: true, multiple: false }).await?;
    }
    Ok(())
}

/// Gives a reply to the job that awaits it. Returns the acker, unless the reply is held for the job.
async fn dispatch(
    registry: &Registry,
    properties: &BasicProperties,
    data: Vec<u8>,
    acker: Option<Acker>,
) -> Option<Acker> {
    let Some(id) = known_id(registry, properties) else {
        registry.count_stray();
        if matches!(kind(properties), Some(ReplyKind::Done | ReplyKind::Failed)) {
            registry.withdrawals.ended(unknown_id(properties));
        }
        return acker;
    };
    registry.on_reply(id.as_str(), read(properties, data).await, acker)
}

/// The id of the job that a reply is to, if the job is in flight.
fn known_id<'a>(registry: &Registry, properties: &'a BasicProperties) -> Option<&'a ShortString> {
    let mut named = [properties.correlation_id(), properties.message_id()].into_iter().flatten();
    named.find(|id| registry.contains(id.as_str()))
}

/// Holds a reply to a job that is answered and not released: it comes again after a lost session. Returns the acker if it is none.
fn hold_again(registry: &Registry, properties: &BasicProperties, acker: Acker) -> Option<Acker> {
    let mut named = [properties.correlation_id(), properties.message_id()].into_iter().flatten();
    let now = Instant::now();
    named.try_fold(acker, |acker, id| registry.held.hold_again(id.as_str(), acker, now))
}

/// The id of the unknown job that a reply belongs to. This library sets a job's id as its correlation id, too.
fn unknown_id(properties: &BasicProperties) -> &str {
    properties.correlation_id().as_ref().map_or("", |id| id.as_str())
}

fn kind(properties: &BasicProperties) -> Option<ReplyKind> {
    ReplyKind::of(properties.kind().as_ref().map_or("", |kind| kind.as_str()))
}

async fn read(properties: &BasicProperties, data: Vec<u8>) -> Reply {
    let parsed = parse(properties, data).await;
    parsed.unwrap_or_else(Reply::Invalid)
}

async fn parse(properties: &BasicProperties, data: Vec<u8>) -> Result<Reply, String> {
    let kind = kind(properties).ok_or_else(|| {
        format!("its type is `{}`", properties.kind().as_ref().map_or("", |kind| kind.as_str()))
    })?;
    let content_type = properties.content_type().as_ref().map(|named| named.as_str());
    let encoding = Encoding::of(content_type).map_err(|e| e.to_string())?;
    if kind == ReplyKind::Failed {
        return decode::<Failure>(data, encoding).await.map(Reply::Failed);
    }
    if kind == ReplyKind::Progress {
        return Ok(Reply::Progress(decode::<ItemProgress>(data, encoding).await.ok()));
    }
    let empty = FieldTable::default();
    let table = properties.headers().as_ref().unwrap_or(&empty);
    let read = ReplyHeaders::read(table).map_err(|e| e.to_string())?;
    let body = decode_checked::<Outputs>(data, encoding, check_finite).await?;
    let revision = table.inner().get(headers::MODEL_REVISION).and_then(as_text);
    Ok(Reply::Outputs { headers: read, tokens: headers::tokens(table), revision, outputs: body.outputs })
}

async fn decode<T: codec::Body + Send + 'static>(data: Vec<u8>, encoding: Encoding) -> Result<T, String> {
    decode_checked(data, encoding, |_| Ok(())).await
}

async fn decode_checked<T: codec::Body + Send + 'static>(
    data: Vec<u8>,
    encoding: Encoding,
    check: fn(&T) -> Result<(), String>,
) -> Result<T, String> {
    let bytes = data.len();
    let decode = move || -> Result<T, String> {
        let body = codec::decode::<T>(&data, encoding).map_err(|error| error.to_string())?;
        check(&body)?;
        Ok(body)
    };
    match off_runtime(bytes, decode).await {
        Some(decoded) => decoded,
        // The runtime ends, and this task with it.
        None => std::future::pending().await,
    }
}

/// # Errors
/// A vector has an element that is infinite or not a number: callers could not write it as JSON.
fn check_finite(body: &Outputs) -> Result<(), String> {
    let wrong = |(item, output): (usize, &Output)| match output {
        Output::Embedding(vector) => Some((item, vector.values.first_not_finite()?)),
        _ => None,
    };
    match body.outputs.iter().enumerate().find_map(wrong) {
        Some((item, at)) => Err(format!("element {at} of the vector in its output {item} is not finite")),
        None => Ok(()),
    }
}
