//! One life of the connections to the broker: opened whole, lost whole.

use std::io;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeleteOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection, Consumer, ErrorKind};
use tokio::time::timeout;
use vramq_amqp::Address;
use vramq_schemas::topology::JOBS_EXCHANGE;

use crate::error::ConnectError;
use crate::options::Options;
use crate::outgoing::Outgoing;
use crate::reply_queue;

/// How long closing may take before the connections are just dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Opens sessions.
#[derive(Debug)]
pub(crate) struct Connector {
    options: Options,
    address: Address,
    reply_queue: Option<ShortString>,
}

/// Publishing and consuming have a connection each: a broker short of memory stops reading from those that publish,
/// and it would not hear the acknowledgements of the replies that fill its memory.
pub(crate) struct Session {
    publishing: Connection,
    pub(crate) jobs: Channel,
    pub(crate) replies: Option<Replies>,
}

pub(crate) struct Replies {
    connection: Connection,
    channel: Channel,
    pub(crate) consumer: Consumer,
}

impl Connector {
    pub(crate) fn new(options: Options) -> Result<Self, ConnectError> {
        let address = options.address()?;
        let reply_queue =
            options.replies.then(|| format!("vramq.replies.client.{}", uuid::Uuid::new_v4()).into());
        Ok(Self { options, address, reply_queue })
    }

    pub(crate) fn reply_queue(&self) -> Option<&ShortString> {
        self.reply_queue.as_ref()
    }

    pub(crate) fn broker(&self) -> String {
        self.address.to_string()
    }

    /// Connects, in the order that leaves no gap: connection, channel, confirms; then queue, qos, consumer.
    pub(crate) async fn open(&self) -> Result<Session, ConnectError> {
        let after = self.options.connect_timeout;
        match timeout(after, self.open_unbounded()).await {
            Ok(opened) => opened.map_err(|error| self.explain(&error)),
            Err(_) => Err(ConnectError::Timeout { broker: self.broker(), after }),
        }
    }

    async fn open_unbounded(&self) -> lapin::Result<Session> {
        let publishing = self.connect("jobs").await?;
        let jobs = publishing.create_channel().await?;
        jobs.confirm_select(ConfirmSelectOptions::default()).await?;
        let replies = match &self.reply_queue {
            None => None,
            Some(queue) => {
                let connection = self.connect("replies").await?;
                let channel = connection.create_channel().await?;
                let expires = self.options.reply_queue_expires;
                let consumer = reply_queue::consume(&channel, queue, expires).await?;
                Some(Replies { connection, channel, consumer })
            }
        };
        Ok(Session { publishing, jobs, replies })
    }

    async fn connect(&self, what: &str) -> lapin::Result<Connection> {
        let name = format!("{} ({what})", self.options.connection_name);
        self.address.connect(&name).await.map_err(|told| told.error)
    }

    fn explain(&self, error: &lapin::Error) -> ConnectError {
        let broker = self.broker();
        match error.kind() {
            ErrorKind::ProtocolError(said) => {
                ConnectError::Refused { broker, error: said.get_message().to_string() }
            }
            ErrorKind::IOError(io) if io.kind() == io::ErrorKind::ConnectionRefused => {
                ConnectError::Unreachable { broker, error: "nobody listens there".to_owned() }
            }
            _ => ConnectError::Unreachable { broker, error: error.to_string() },
        }
    }
}

impl Session {
    /// What happens to the connection that publishes.
    pub(crate) fn events(&self) -> BoxStream<'static, lapin::Event> {
        self.publishing.events_listener().boxed()
    }

    /// Ends the session in good order; the reply queue is deleted with whatever is in it.
    pub(crate) async fn close(self, reply_queue: Option<&ShortString>) {
        let closing = async {
            if let (Some(replies), Some(queue)) = (&self.replies, reply_queue) {
                let options = QueueDeleteOptions::default();
                replies.channel.queue_delete(queue.clone(), options).await?;
                replies.connection.close(200, "OK".into()).await?;
            }
            self.publishing.close(200, "OK".into()).await
        };
        match timeout(CLOSE_TIMEOUT, closing).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%error, "close connection"),
            Err(_) => tracing::debug!("close connection: no answer in time"),
        }
    }
}

/// Publishes a job and awaits what the broker makes of it.
///
/// Cancel safety: none; dropped half-way, the message may or may not be out.
pub(crate) fn publish(
    channel: Channel,
    outgoing: &Outgoing,
) -> impl Future<Output = lapin::Result<Confirmation>> + Send + use<> {
    let model = outgoing.model.clone();
    let body = outgoing.body.clone();
    let properties = outgoing.properties.clone();
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    async move { channel.basic_publish(JOBS_EXCHANGE.into(), model, options, &body, properties).await?.await }
}
