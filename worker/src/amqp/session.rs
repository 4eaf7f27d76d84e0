//! A connection with its channels and consumers, opened in the order that makes them right: connection, topology,
//! confirms, qos, consume. lapin's own recovery stays off: it brings consumers back without their prefetch.

use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{Stream, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, ConfirmSelectOptions};
use lapin::types::FieldTable;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, Consumer, Event};
use vramq_schemas::topology::jobs_queue;

use crate::amqp::publish::Publisher;
use crate::amqp::topology::{self, TopologyError};
use crate::config::BrokerConfig;
use crate::model::Model;

/// Seconds between heartbeats, unless the URL says otherwise: a dead peer is noticed within two of them.
const HEARTBEAT_S: u16 = 20;

/// How long an orderly close may take; after it the connection is dropped, which has the same effect for our jobs.
const CLOSE_MAX: Duration = Duration::from_secs(2);

/// How long the broker may take to stop a consumer.
const CANCEL_MAX: Duration = Duration::from_secs(3);

/// Milliseconds for the TCP connection, unless the URL says otherwise.
const CONNECT_TIMEOUT_MS: u64 = 10_000;

/// An open session. Whatever breaks, the whole of it is thrown away and a new one opened.
pub struct Session {
    connection: Connection,
    /// In confirm mode; everything is published here.
    pub publisher: Publisher,
    consumers: Vec<(Channel, Consumer)>,
    pub events: Pin<Box<dyn Stream<Item = Event> + Send>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("consumers", &self.consumers.len()).finish_non_exhaustive()
    }
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("connect to {broker}: {error}")]
    Unreachable { broker: String, error: lapin::Error },
    /// The broker answered, and said no: credentials, vhost or permissions.
    #[error("{broker} refuses the connection: {error}")]
    Refused { broker: String, error: lapin::Error },
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error("{step}: {error}")]
    Lost { step: &'static str, error: lapin::Error },
}

impl SessionError {
    /// Whether trying again without changing anything can help.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Topology(TopologyError::Refused { .. }))
    }
}

impl Session {
    /// Connects, declares or verifies the topology, and consumes each model's jobs with its slots as prefetch.
    ///
    /// # Errors
    /// [`SessionError`]; nothing stays open.
    pub async fn open(
        broker: &BrokerConfig,
        worker: &str,
        models: &[(Arc<Model>, NonZeroU16)],
    ) -> Result<Self, SessionError> {
        let connection = connect(broker, worker).await?;
        let lost = |step| move |error| SessionError::Lost { step, error };
        let events = Box::pin(connection.events_listener());
        for (model, _) in models {
            topology::declare(&connection, broker, &model.name, &model.reply_queue).await?;
        }
        let publisher = connection.create_channel().await.map_err(lost("open channel"))?;
        publisher.confirm_select(ConfirmSelectOptions::default()).await.map_err(lost("ask for confirms"))?;
        let mut consumers = Vec::with_capacity(models.len());
        for (model, slots) in models {
            consumers.push(consume(&connection, worker, &model.name, *slots).await.map_err(lost("consume"))?);
        }
        Ok(Self { connection, publisher: Publisher::new(publisher), consumers, events })
    }

    /// The consumers' streams, with their model's index.
    pub fn deliveries(&self) -> impl Stream<Item = (usize, Option<lapin::Result<Delivery>>)> + Send + use<> {
        let streams = self.consumers.iter().enumerate().map(|(model, (_, consumer))| {
            let closed = futures_util::stream::once(async move { (model, None) });
            consumer.clone().map(move |delivery| (model, Some(delivery))).chain(closed).boxed()
        });
        futures_util::stream::select_all(streams)
    }

    /// Tells the broker to send no more. What it already sent still comes.
    ///
    /// # Errors
    /// The channel is gone, or the broker does not answer: in words.
    pub async fn stop_consuming(&mut self) -> Result<(), String> {
        for (channel, consumer) in &self.consumers {
            let cancel = channel.basic_cancel(consumer.tag(), BasicCancelOptions::default());
            match tokio::time::timeout(CANCEL_MAX, cancel).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(error.to_string()),
                Err(_) => return Err("the broker does not answer".to_owned()),
            }
        }
        Ok(())
    }

    /// Closes in good order; deliveries that are not settled go back to the broker.
    pub async fn close(self) {
        // A broker that blocks publishers reads nothing from us, and would never answer.
        match tokio::time::timeout(CLOSE_MAX, self.connection.close(200, "bye".into())).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "close connection"),
            Err(_) => tracing::debug!("the broker does not answer the close"),
        }
    }
}

async fn connect(broker: &BrokerConfig, worker: &str) -> Result<Connection, SessionError> {
    let mut uri: AMQPUri = broker.url.uri().clone();
    uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
    uri.query.connection_timeout.get_or_insert(CONNECT_TIMEOUT_MS);
    let properties =
        ConnectionProperties::default().with_connection_name(format!("vramq-worker {worker}").into());
    Connection::connect_uri(uri, properties).await.map_err(|error| {
        let broker = broker.url.to_string();
        if is_refusal(&error) {
            SessionError::Refused { broker, error }
        } else {
            SessionError::Unreachable { broker, error }
        }
    })
}

/// 403 is a bad password, 530 an unknown vhost; others (320, a broker that shuts down) pass.
fn is_refusal(error: &lapin::Error) -> bool {
    matches!(error.kind(), lapin::ErrorKind::ProtocolError(told) if matches!(told.get_id(), 403 | 530))
}

async fn consume(
    connection: &Connection,
    worker: &str,
    model: &str,
    slots: NonZeroU16,
) -> lapin::Result<(Channel, Consumer)> {
    // Each on a channel of its own: qos is set before the consumer and holds for it alone.
    let channel = connection.create_channel().await?;
    channel.basic_qos(slots.get(), BasicQosOptions { global: false }).await?;
    let tag = format!("{worker}.{model}");
    let tag = &tag[..tag.floor_char_boundary(255)];
    let consumer = channel
        .basic_consume(
            jobs_queue(model).into(),
            tag.into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    Ok((channel, consumer))
}
