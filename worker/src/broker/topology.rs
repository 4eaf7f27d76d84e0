//! Declares the exchanges and queues of a model, or checks that they exist.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ExchangeKind};
use vramq_amqp::reply_code::{ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED};
use vramq_core::settings::QueueFacts;
use vramq_schemas::topology::{
    CONTROL_EXCHANGE, DEAD_EXCHANGE, DELAYS_MS, JOBS_EXCHANGE, RETRY_EXCHANGE, WITHDRAWALS_EXCHANGE,
    bulk_key, bulk_queue, dead_queue, default_reply_queue, delay_key, delay_queue, jobs_queue,
    quarantine_key, suspects_queue,
};

use super::queue_arguments::{
    bulk_arguments, dead_arguments, delay_arguments, job_arguments, quarantine_arguments, reply_arguments,
};
use crate::config::BrokerConfig;
use crate::model::Model;

/// Why the topology cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// The queue or exchange exists with other arguments, or may not be declared. Nothing was changed.
    #[error("{what} `{name}` cannot be used: {broker}. {}", advice(*.code))]
    Refused { what: &'static str, name: String, broker: String, code: u16 },
    #[error("declare {what} `{name}`: {error}")]
    Lost { what: &'static str, name: String, error: lapin::Error },
}

impl TopologyError {
    fn new(what: &'static str, name: &str, error: lapin::Error) -> Self {
        let name = name.to_owned();
        match error.kind() {
            lapin::ErrorKind::ProtocolError(answer) if error.is_amqp_soft_error() => {
                Self::Refused { what, name, broker: answer.get_message().to_string(), code: answer.get_id() }
            }
            _ => Self::Lost { what, name, error },
        }
    }

    pub fn no_channel(error: lapin::Error) -> Self {
        Self::Lost { what: "channel", name: "topology".to_owned(), error }
    }

    /// What does not exist, or is on a node that is down, with the broker's text.
    pub fn missing(&self) -> Option<String> {
        match self {
            Self::Refused { what, name, broker, code: NOT_FOUND } => {
                Some(format!("{what} `{name}`: {broker}"))
            }
            _ => None,
        }
    }
}

/// What to do about a queue or exchange, by AMQP's code of the broker's answer.
fn advice(code: u16) -> &'static str {
    match code {
        ACCESS_REFUSED => "Give the worker's user permission on it (docs/security.md, least permissions)",
        NOT_FOUND => {
            "Start the node that it is on, if that is down, or declare it. Workers declare only their own queues and exchanges, and \
             only with declare = true in [broker]"
        }
        RESOURCE_LOCKED => "It is exclusive to another connection: close that one, or choose another name",
        _ => {
            "Move what it holds and replace it (docs/upgrading.md), set [broker] to what it is, or set declare = false to take the broker's \
             queues as they are"
        }
    }
}

/// A further queue of a model. Workers declare it or check that it exists, but bind it to no exchange: that is up to its owner.
#[derive(Clone, Debug)]
pub struct FurtherQueue {
    pub name: ShortString,
    passive: bool,
    arguments: FieldTable,
}

impl FurtherQueue {
    /// The further queues of a model, in order. The model's dead letter queue must already exist.
    pub fn of(broker: &BrokerConfig, model: &Model) -> Vec<Self> {
        let of = |queue: &QueueFacts| Self {
            name: queue.name.as_str().into(),
            passive: !broker.declare,
            arguments: job_arguments(broker, &model.key),
        };
        model.queues.iter().skip(1).map(of).collect()
    }

    /// # Errors
    /// [`TopologyError`], with the broker's text. The broker has closed the channel then.
    pub async fn declare(&self, channel: &Channel) -> Result<(), TopologyError> {
        queue(channel, self.passive, self.name.as_str(), self.arguments.clone()).await
    }
}

/// An exchange or a queue that workers need.
#[derive(Clone, Debug)]
pub struct Entity {
    kind: Kind,
    name: ShortString,
    /// Only checked, not declared.
    passive: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    Exchange,
    Queue(FieldTable),
}

impl Entity {
    /// The exchanges and queues of a model without its further queues, in the order in which they are declared.
    pub fn of(broker: &BrokerConfig, model: &Model) -> Vec<Self> {
        let Model { key, name, reply_queue, .. } = model;
        let passive = !broker.declare;
        let exchanges = [JOBS_EXCHANGE, RETRY_EXCHANGE, DEAD_EXCHANGE];
        let mut entities: Vec<_> =
            exchanges.map(|name| Self { kind: Kind::Exchange, name: name.into(), passive }).into();
        let mut queue = |name: &str, passive, arguments| {
            entities.push(Self { kind: Kind::Queue(arguments), name: name.into(), passive });
        };
        // Dead letters first: the target of a job queue's dead letters must exist.
        queue(&dead_queue(key), passive, dead_arguments(broker));
        queue(&jobs_queue(key), passive, job_arguments(broker, key));
        queue(&bulk_queue(key), passive, bulk_arguments(broker, key));
        queue(&suspects_queue(key), passive, quarantine_arguments(broker, key));
        for ms in DELAYS_MS {
            queue(&delay_queue(key, ms), passive, delay_arguments(key, ms));
        }
        // A reply queue that the configuration names belongs to the user: it is only checked.
        let theirs = *reply_queue != default_reply_queue(name);
        queue(reply_queue, passive || theirs, reply_arguments(broker));
        entities
    }

    /// The exchanges of withdrawals and, with `broker.control`, of commands.
    pub fn of_control_plane(broker: &BrokerConfig) -> Vec<Self> {
        let passive = !broker.declare;
        let exchange = |name: &str| Self { kind: Kind::Exchange, name: name.into(), passive };
        let control = broker.control.then(|| exchange(CONTROL_EXCHANGE));
        control.into_iter().chain([exchange(WITHDRAWALS_EXCHANGE)]).collect()
    }

    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Whether workers declare it. Others belong to the user.
    pub fn is_declared(&self) -> bool {
        !self.passive
    }

    /// Declares it.
    ///
    /// # Errors
    /// [`TopologyError`]. The broker has closed the channel then.
    async fn declare(&self, channel: &Channel) -> Result<(), TopologyError> {
        let Self { kind, name, passive } = self;
        match kind {
            Kind::Exchange => exchange(channel, *passive, name.as_str()).await,
            Kind::Queue(arguments) => queue(channel, *passive, name.as_str(), arguments.clone()).await,
        }
    }

    /// Checks that it exists. Says nothing about its arguments.
    ///
    /// # Errors
    /// [`TopologyError`]. The broker has closed the channel then.
    pub async fn check(&self, channel: &Channel) -> Result<(), TopologyError> {
        Self { passive: true, ..self.clone() }.declare(channel).await
    }
}

/// Declares the exchanges and the queues of a model, without its further queues; or checks that they exist, with `declare = false`.
///
/// # Errors
/// [`TopologyError`], with the broker's text about the difference.
pub async fn declare(
    connection: &Connection,
    broker: &BrokerConfig,
    model: &Model,
) -> Result<(), TopologyError> {
    let channel = connection.create_channel().await.map_err(TopologyError::no_channel)?;
    declare_on(&channel, broker, model).await?;
    // Best effort: closing the connection closes the channel too.
    let _ = channel.close(200, "declared".into()).await;
    Ok(())
}

/// The same, on a channel that there is.
///
/// # Errors
/// As for [`declare`]. The broker has closed the channel then, unless the connection is closed.
pub async fn declare_on(
    channel: &Channel,
    broker: &BrokerConfig,
    model: &Model,
) -> Result<(), TopologyError> {
    let key = &model.key;
    // The user's own queues last: if one is missing, those of workers are bound all the same.
    let (checked, declared): (Vec<_>, Vec<_>) =
        Entity::of(broker, model).into_iter().partition(|entity| entity.passive);
    for entity in declared {
        entity.declare(channel).await?;
    }
    if broker.declare {
        bind(channel, &jobs_queue(key), JOBS_EXCHANGE, key).await?;
        bind(channel, &jobs_queue(key), RETRY_EXCHANGE, key).await?;
        bind(channel, &bulk_queue(key), RETRY_EXCHANGE, &bulk_key(key)).await?;
        bind(channel, &suspects_queue(key), RETRY_EXCHANGE, &quarantine_key(key)).await?;
        for ms in DELAYS_MS {
            bind(channel, &delay_queue(key, ms), RETRY_EXCHANGE, &delay_key(key, ms)).await?;
        }
        bind(channel, &dead_queue(key), DEAD_EXCHANGE, key).await?;
    }
    for entity in checked {
        entity.declare(channel).await?;
    }
    Ok(())
}

async fn exchange(channel: &Channel, passive: bool, name: &str) -> Result<(), TopologyError> {
    let options = ExchangeDeclareOptions { durable: true, passive, ..Default::default() };
    channel
        .exchange_declare(name.into(), ExchangeKind::Direct, options, FieldTable::default())
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

#[cfg(test)]
mod tests {
    use lapin::ErrorKind;
    use lapin::protocol::{AMQPError, AMQPHardError, AMQPSoftError};

    use super::*;

    #[test]
    fn each_refusal_has_its_own_advice() {
        let told = |kind| {
            let error = ErrorKind::ProtocolError(AMQPError::new(kind, "broker's text".into()));
            TopologyError::new("queue", "q", error.into()).to_string()
        };
        let table = [
            (AMQPSoftError::ACCESSREFUSED, "permission"),
            (AMQPSoftError::NOTFOUND, "declare it"),
            (AMQPSoftError::RESOURCELOCKED, "exclusive"),
            (AMQPSoftError::PRECONDITIONFAILED, "replace it"),
        ];
        for (kind, advice) in table {
            let text = told(kind.into());
            assert!(
                text.starts_with("queue `q` cannot be used: broker's text. ") && text.contains(advice),
                "{text}"
            );
        }
        assert!(told(AMQPHardError::INTERNALERROR.into()).starts_with("declare queue `q`: "));
    }
}
