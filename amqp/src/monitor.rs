//! What `vramq status` and the gateway read from the broker: heartbeats of workers, and depths of queues.

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Connection, Consumer, ExchangeKind};
use vramq_schemas::topology::STATUS_EXCHANGE;

use crate::reply_code::{ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, is_missing, reply_code};

/// Heartbeats that may wait in the queue; then the broker drops the oldest.
const HEARTBEATS_MAX: i32 = 1_024;

/// The longest name that AMQP has for a queue, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// The broker's answer about a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    Messages {
        ready: u32,
        consumers: u32,
    },
    NoQueue,
    /// The broker's user may not look at the queue, or another connection has it for itself.
    NoPermission,
}

/// Consumes heartbeats from an exclusive queue, which ends with the connection. `None` while their exchange is missing: workers
/// declare it, and a reader changes nothing.
///
/// # Errors
/// The broker refuses a step, or the connection is lost.
pub async fn subscribe_to_heartbeats(connection: &Connection) -> lapin::Result<Option<Consumer>> {
    let channel = connection.create_channel().await?;
    let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let exchange = ShortString::from(STATUS_EXCHANGE);
    let found = channel
        .exchange_declare(exchange.clone(), ExchangeKind::Fanout, passive, FieldTable::default())
        .await;
    match found {
        Ok(()) => {}
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    }
    let own = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(HEARTBEATS_MAX));
    let queue = channel.queue_declare(ShortString::default(), own, arguments).await?.name().clone();
    let (key, none) = (ShortString::default(), FieldTable::default());
    channel
        .queue_bind(queue.clone(), exchange, key.clone(), QueueBindOptions::default(), none.clone())
        .await?;
    let options = BasicConsumeOptions { no_ack: true, exclusive: true, ..BasicConsumeOptions::default() };
    Ok(Some(channel.basic_consume(queue, key, options, none).await?))
}

/// The next delivery; waits for ever while there is no consumer.
pub async fn next_delivery(consumer: &mut Option<Consumer>) -> Option<lapin::Result<Delivery>> {
    match consumer {
        Some(consumer) => consumer.next().await,
        None => std::future::pending().await,
    }
}

/// Counts the messages of a queue. The name may come from any message; a name that AMQP does not allow belongs to no queue.
///
/// # Errors
/// The connection is lost, or the broker refuses for another reason than those of [`Depth`].
pub async fn queue_depth(connection: &Connection, queue: &str) -> lapin::Result<Depth> {
    if !is_queue_name(queue) {
        return Ok(Depth::NoQueue);
    }
    // On a channel of its own, because a refusal closes it.
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(queue.into(), passive, FieldTable::default()).await {
        Ok(queue) => {
            channel.close(200, "counted".into()).await?;
            Ok(Depth::Messages { ready: queue.message_count(), consumers: queue.consumer_count() })
        }
        Err(error) => match reply_code(&error) {
            Some(NOT_FOUND) => Ok(Depth::NoQueue),
            Some(ACCESS_REFUSED | RESOURCE_LOCKED) => Ok(Depth::NoPermission),
            _ => Err(error),
        },
    }
}

/// Whether a queue can have the name. A `ShortString` made of a longer one panics, and the empty one means another queue.
fn is_queue_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_empty_or_too_long_is_of_no_queue() {
        assert!(is_queue_name("q") && is_queue_name(&"q".repeat(255)));
        assert!(!is_queue_name("") && !is_queue_name(&"q".repeat(256)));
    }
}
