//! The client's reply queue: declares and consumes it, gives replies to the jobs that await them, acknowledges them.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, ErrorKind};
use vramq_schemas::fields::as_text;
use vramq_schemas::{Encoding, Failure, ItemProgress, Outputs, ReplyHeaders, ReplyKind, codec, headers};

use crate::options::REPLY_PREFETCH;
use crate::outgoing::off_runtime;
use crate::registry::{Registry, Reply};

/// Replies acknowledged with one frame at most; a quarter of the prefetch, so that the broker always has room to
/// send the next.
const REPLIES_PER_ACK: usize = REPLY_PREFETCH as usize / 4;

/// AMQP's code for a queue that does not exist.
const NOT_FOUND: u16 = 404;

/// Whether the queue still exists. It does not if it was deleted, if it expired while the client was away, or if its node
/// lost it; then replies were lost with it.
pub(crate) async fn exists(connection: &Connection, queue: &ShortString) -> lapin::Result<bool> {
    // On a channel of its own: the broker closes it if there is no such queue.
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(queue.clone(), passive, FieldTable::default()).await {
        Ok(_) => channel.close(200, "OK".into()).await.map(|()| true),
        Err(error) => match error.kind() {
            ErrorKind::ProtocolError(refusal) if refusal.get_id() == NOT_FOUND => Ok(false),
            _ => Err(error),
        },
    }
}

/// Declares the queue and starts to consume it. Durable and not exclusive: it and the replies in it survive this
/// client's connection, for as long as `expires`.
pub(crate) async fn consume(
    channel: &Channel,
    queue: &ShortString,
    expires: Duration,
) -> lapin::Result<Consumer> {
    let mut arguments = FieldTable::default();
    let expires_ms = i64::try_from(expires.as_millis()).unwrap_or(i64::MAX);
    arguments.insert("x-expires".into(), AMQPValue::LongLongInt(expires_ms));
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.clone(), durable, arguments).await?;
    channel.basic_qos(REPLY_PREFETCH, BasicQosOptions::default()).await?;
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
pub(crate) async fn hand_over(consumer: Consumer, registry: Arc<Registry>) -> lapin::Result<()> {
    let mut batches = consumer.ready_chunks(REPLIES_PER_ACK);
    while let Some(batch) = batches.next().await {
        let mut last = None;
        for delivery in batch {
            let Delivery { properties, data, acker, .. } = delivery?;
            let known = [properties.correlation_id(), properties.message_id()]
                .into_iter()
                .flatten()
                .find(|id| registry.contains(id.as_str()));
            match known {
                Some(id) => registry.take(id.as_str(), read(&properties, data).await),
                None => registry.count_stray(),
            }
            last = Some(acker);
        }
        if let Some(acker) = last {
            acker.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    Ok(())
}

async fn read(properties: &lapin::BasicProperties, data: Vec<u8>) -> Reply {
    let parsed = parse(properties, data).await;
    parsed.unwrap_or_else(Reply::Invalid)
}

async fn parse(properties: &lapin::BasicProperties, data: Vec<u8>) -> Result<Reply, String> {
    let named = properties.kind().as_ref().map_or("", |kind| kind.as_str());
    let kind = ReplyKind::of(named).ok_or_else(|| format!("its type is `{named}`"))?;
    let content_type = properties.content_type().as_ref().map(|named| named.as_str());
    let encoding = Encoding::of(content_type).map_err(|e| e.to_string())?;
    let bytes = data.len();
    if kind == ReplyKind::Failed {
        return off_runtime(bytes, move || codec::decode::<Failure>(&data, encoding))
            .await
            .map(Reply::Failed)
            .map_err(|e| e.to_string());
    }
    if kind == ReplyKind::Progress {
        let progress = off_runtime(bytes, move || codec::decode::<ItemProgress>(&data, encoding)).await;
        return Ok(Reply::Progress(progress.ok()));
    }
    let empty = FieldTable::default();
    let table = properties.headers().as_ref().unwrap_or(&empty);
    let read = ReplyHeaders::read(table).map_err(|e| e.to_string())?;
    let body = off_runtime(bytes, move || codec::decode::<Outputs>(&data, encoding))
        .await
        .map_err(|e| e.to_string())?;
    let revision = table.inner().get(headers::MODEL_REVISION).and_then(as_text);
    Ok(Reply::Outputs { headers: read, tokens: headers::tokens(table), revision, outputs: body.outputs })
}
