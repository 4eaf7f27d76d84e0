//! The connection for direct replies: opens it, publishes on it and waits for confirms, closes it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection};
use vramq_amqp::{Address, ConfirmTime, ConnectError, Transfer};

use super::deadline::within;
use super::message::Message;
use super::opening::STEP_MAX;
use super::publisher::MessageOutcome;
use crate::failpoint;

/// How many seconds a confirm may take, unless the broker says that it blocks publishers, and beside the time for bytes that are on their
/// way. The broker does not store direct replies, so a working one needs far less.
const CONFIRM_S: u32 = 30;

/// How long closing may take when the worker ends, including replies in flight.
pub(super) const CLOSE_MAX: Duration = Duration::from_secs(2);

/// A connection with a channel in confirm mode.
#[derive(Clone)]
pub(super) struct Link {
    connection: Arc<Connection>,
    channel: Channel,
    transfer: Transfer,
}

/// Why there is no confirm.
#[derive(Debug, thiserror::Error)]
pub(super) enum Loss {
    #[error(transparent)]
    Closed(#[from] lapin::Error),
    #[error("the broker did not confirm a direct reply within {0}")]
    NoConfirm(ConfirmTime),
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("open a channel for confirms: {0}")]
    Channel(#[from] lapin::Error),
    #[error("open a channel for confirms: the broker does not answer within {} s", STEP_MAX.as_secs())]
    Silent,
}

impl Link {
    /// Connects to one of the broker's hosts. If that host does not answer a frame, tries the next one.
    pub(super) async fn open(broker: &Address, name: &str) -> Result<Self, OpenError> {
        for host in broker.in_turn() {
            match Self::open_at(&host, name).await {
                Err(OpenError::Silent) => {
                    tracing::warn!(broker = %host, "no channel for direct replies: the host does not answer; trying the next one, if there is one");
                }
                opened => return opened,
            }
        }
        Err(OpenError::Silent)
    }

    async fn open_at(host: &Address, name: &str) -> Result<Self, OpenError> {
        let connection = Arc::new(host.connect(name).await?);
        let opened = within(STEP_MAX, async {
            let channel = connection.create_channel().await?;
            channel.confirm_select(ConfirmSelectOptions::default()).await?;
            Ok::<_, lapin::Error>(channel)
        });
        let error = match opened.await {
            Some(Ok(channel)) => return Ok(Self { connection, channel, transfer: Transfer::default() }),
            Some(Err(error)) => error.into(),
            None => OpenError::Silent,
        };
        // A dropped connection would stay open in lapin as long as the host sends heartbeats.
        abandon(connection);
        Err(error)
    }

    pub(super) fn is_open(&self) -> bool {
        self.connection.status().connected() && self.channel.status().connected()
    }

    /// Publishes a reply and waits for its confirm. Not mandatory: the broker would deliver the reply and still return it, because no queue
    /// has that name.
    pub(super) async fn publish(&self, message: &Message) -> Result<MessageOutcome, Loss> {
        let properties = message.properties.clone().with_headers(message.headers.clone());
        let (exchange, key) = (message.exchange.clone(), message.routing_key.clone());
        let (sent, _) = message.failpoints();
        let end = self.transfer.publish(message.body.len());
        // The replies before it, and itself.
        let mut unread = self.transfer.unread(end);
        let mut confirmed = pin!(async {
            let options = BasicPublishOptions::default();
            let confirm =
                self.channel.basic_publish(exchange, key, options, &message.body, properties).await?;
            let id = message.properties.message_id().as_ref().map(ShortString::as_str);
            failpoint::reach(sent, [id]);
            let confirmation = confirm.await?;
            self.transfer.confirmed(end);
            Ok::<_, lapin::Error>(confirmation)
        });
        loop {
            let time = ConfirmTime::new(CONFIRM_S, unread);
            match within(Duration::from_secs(time.seconds().into()), &mut confirmed).await {
                Some(Ok(Confirmation::Ack(_))) => return Ok(MessageOutcome::Confirmed),
                Some(Ok(_)) => return Ok(MessageOutcome::Refused),
                Some(Err(error)) => return Err(error.into()),
                // A broker that lacks memory or disk space reads nothing, and has said so.
                None if self.is_open() && self.connection.status().blocked() => {}
                // The broker has confirmed replies before this one, so it reads, slowly.
                None if self.transfer.unread(end) < unread => unread = self.transfer.unread(end),
                None => return Err(Loss::NoConfirm(time)),
            }
        }
    }

    /// Closes the connection after the replies in flight. The caller limits the time.
    pub(super) async fn close(self) {
        let _ = self.connection.close(200, "bye".into()).await;
    }

    /// Closes the connection without waiting for it.
    pub(super) fn abandon(self) {
        abandon(self.connection);
    }
}

/// Closes a connection without waiting for the peer, which may not answer any more.
fn abandon(connection: Arc<Connection>) {
    tokio::spawn(tokio::time::timeout(CLOSE_MAX, async move {
        let _ = connection.close(200, "bye".into()).await;
    }));
}
