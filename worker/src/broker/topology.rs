//! Declares the exchanges and queues of a model, or checks that they exist.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ExchangeKind};
use vramq_schemas::topology::{
    DEAD_EXCHANGE, DELAYS_MS, JOBS_EXCHANGE, RETRY_EXCHANGE, bulk_key, bulk_queue, dead_queue,
    default_reply_queue, delay_key, delay_queue, jobs_queue, quarantine_key, suspects_queue,
};

use crate::config::{BrokerConfig, QueueType};
use crate::model::Model;

/// Priorities of a classic job queue, 0 to 9: each costs the broker a queue of its own, and more than ten help nobody.
const CLASSIC_PRIORITY_MAX: i64 = 9;

/// How often the broker may deliver a job before it dead-letters it itself. RabbitMQ 4 has this default for quorum queues;
/// set explicitly so that 3.x does the same. The poison policy handles jobs long before; this limit is for those that kill a
/// worker before it can count them.
const DELIVERY_LIMIT: i64 = 20;

/// Looking at dead letters must not destroy them, and workers count the crashes of jobs in quarantine themselves. RabbitMQ 4
/// takes -1 for "no limit" and has 20 by default; 3.10 takes -1 too, and then drops a message when it is first given back. A
/// limit that is never reached means the same on both.
const NO_DELIVERY_LIMIT: i64 = i32::MAX as i64;

/// Why the topology cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// It exists with other arguments, or may not be declared. Nothing was changed.
    #[error(
        "{what} `{name}` cannot be used: {broker}. Delete it if it is empty, set [broker] to what it is, or set \
         declare = false to take the broker's queues as they are"
    )]
    Refused { what: &'static str, name: String, broker: String },
    #[error("declare {what} `{name}`: {error}")]
    Lost { what: &'static str, name: String, error: lapin::Error },
}

impl TopologyError {
    fn new(what: &'static str, name: &str, error: lapin::Error) -> Self {
        let name = name.to_owned();
        match error.kind() {
            lapin::ErrorKind::ProtocolError(answer) if error.is_amqp_soft_error() => {
                Self::Refused { what, name, broker: answer.get_message().to_string() }
            }
            _ => Self::Lost { what, name, error },
        }
    }
}

/// Declares exchanges and the queues of a model, or, with `declare = false`, checks that they are there.
///
/// # Errors
/// [`TopologyError`], with the broker's text on what differs.
pub async fn declare(
    connection: &Connection,
    broker: &BrokerConfig,
    model: &Model,
) -> Result<(), TopologyError> {
    let Model { key, name, reply_queue, queues, .. } = model;
    let lost = |error| TopologyError::Lost { what: "channel", name: "topology".to_owned(), error };
    let channel = connection.create_channel().await.map_err(lost)?;
    for name in [JOBS_EXCHANGE, RETRY_EXCHANGE, DEAD_EXCHANGE] {
        exchange(&channel, broker, name, ExchangeKind::Direct).await?;
    }
    // The dead letters first: a job queue must have somewhere to dead-letter to.
    queue(&channel, !broker.declare, &dead_queue(key), dead_arguments(broker)).await?;
    // First the model's own. Further ones get no binding: who publishes there, and through which exchange, is for their owner to say.
    for jobs in queues {
        queue(&channel, !broker.declare, &jobs.name, job_arguments(broker, key)).await?;
    }
    queue(&channel, !broker.declare, &bulk_queue(key), bulk_arguments(broker, key)).await?;
    queue(&channel, !broker.declare, &suspects_queue(key), quarantine_arguments(broker, key)).await?;
    for ms in DELAYS_MS {
        queue(&channel, !broker.declare, &delay_queue(key, ms), delay_arguments(key, ms)).await?;
    }
    // A reply queue that the configuration names belongs to the user: it is only checked.
    let theirs = *reply_queue != default_reply_queue(name);
    queue(&channel, !broker.declare || theirs, reply_queue, reply_arguments(broker)).await?;
    if broker.declare {
        bind(&channel, &jobs_queue(key), JOBS_EXCHANGE, key).await?;
        bind(&channel, &jobs_queue(key), RETRY_EXCHANGE, key).await?;
        bind(&channel, &bulk_queue(key), RETRY_EXCHANGE, &bulk_key(key)).await?;
        bind(&channel, &suspects_queue(key), RETRY_EXCHANGE, &quarantine_key(key)).await?;
        for ms in DELAYS_MS {
            bind(&channel, &delay_queue(key, ms), RETRY_EXCHANGE, &delay_key(key, ms)).await?;
        }
        bind(&channel, &dead_queue(key), DEAD_EXCHANGE, key).await?;
    }
    // Best effort: the connection's close would do it too.
    let _ = channel.close(200, "declared".into()).await;
    Ok(())
}

async fn exchange(
    channel: &Channel,
    broker: &BrokerConfig,
    name: &str,
    kind: ExchangeKind,
) -> Result<(), TopologyError> {
    let options = ExchangeDeclareOptions { durable: true, passive: !broker.declare, ..Default::default() };
    channel
        .exchange_declare(name.into(), kind, options, FieldTable::default())
        .await
        .map_err(|e| TopologyError::new("exchange", name, e))
}

async fn queue(
    channel: &Channel,
    passive: bool,
    name: &str,
    arguments: FieldTable,
) -> Result<(), TopologyError> {
    let options = QueueDeclareOptions { durable: true, passive, ..Default::default() };
    channel
        .queue_declare(name.into(), options, arguments)
        .await
        .map_err(|e| TopologyError::new("queue", name, e))?;
    Ok(())
}

async fn bind(channel: &Channel, queue: &str, exchange: &str, key: &str) -> Result<(), TopologyError> {
    channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            key.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .map_err(|e| TopologyError::new("binding of queue", queue, e))
}

fn job_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let mut arguments = typed(broker);
    bound(&mut arguments, broker);
    arguments.insert("x-dead-letter-exchange".into(), text(DEAD_EXCHANGE));
    arguments.insert("x-dead-letter-routing-key".into(), text(key));
    match broker.queue_type {
        QueueType::Quorum => {
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERY_LIMIT));
            // Expired jobs reach the dead letters even if the broker fails on the way.
            arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        }
        QueueType::Classic => {
            arguments.insert("x-max-priority".into(), AMQPValue::LongLongInt(CLASSIC_PRIORITY_MAX));
        }
    }
    arguments
}

/// As the jobs, from which they come, but without a length limit: they were taken from a queue that has one, and may not be
/// refused.
fn bulk_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let limits = ["x-max-length", "x-overflow"];
    let of_jobs = job_arguments(broker, key);
    let kept = of_jobs.into_iter().filter(|(name, _)| !limits.contains(&name.as_str()));
    kept.map(|(name, value)| (name.clone(), value.clone()))
        .collect::<std::collections::BTreeMap<_, _>>()
        .into()
}

/// Without a length bound: what is published here was taken from a queue that has one, and may not be rejected.
fn quarantine_arguments(broker: &BrokerConfig, key: &str) -> FieldTable {
    let mut arguments = typed(broker);
    // Applies if an operator's policy makes messages expire, for example.
    arguments.insert("x-dead-letter-exchange".into(), text(DEAD_EXCHANGE));
    arguments.insert("x-dead-letter-routing-key".into(), text(key));
    if broker.queue_type == QueueType::Quorum {
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(NO_DELIVERY_LIMIT));
    }
    arguments
}

/// Quorum queues whatever the others are: classic ones drop a message whose queue is full when it comes back.
fn delay_arguments(key: &str, ms: u64) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text(QueueType::Quorum.as_str()));
    arguments.insert("x-message-ttl".into(), AMQPValue::LongLongInt(ms.cast_signed()));
    arguments.insert("x-dead-letter-exchange".into(), text(RETRY_EXCHANGE));
    arguments.insert("x-dead-letter-routing-key".into(), text(key));
    arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
    arguments.insert("x-overflow".into(), text("reject-publish"));
    arguments
}

fn dead_arguments(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = typed(broker);
    if broker.queue_type == QueueType::Quorum {
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(NO_DELIVERY_LIMIT));
    }
    arguments
}

fn reply_arguments(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = typed(broker);
    bound(&mut arguments, broker);
    arguments
}

fn typed(broker: &BrokerConfig) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text(broker.queue_type.as_str()));
    arguments
}

/// A full queue rejects publishes; it never drops a message.
fn bound(arguments: &mut FieldTable, broker: &BrokerConfig) {
    arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(broker.queue_length_max.into()));
    arguments.insert("x-overflow".into(), text("reject-publish"));
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}
