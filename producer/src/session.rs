//! The connections to the broker. They are opened together, and dropped together when one of them is lost.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use lapin::options::QueueDeleteOptions;
use lapin::types::ShortString;
use lapin::{Channel, Connection, Consumer, ErrorKind};
use tokio::time::timeout;
use vramq_amqp::reply_code::{ACCESS_REFUSED, NOT_ALLOWED, NOT_FOUND, reply_code};
use vramq_amqp::{Address, BrokerHost, PublishPipeline};
use vramq_schemas::topology::CLIENT_REPLIES;

use crate::error::ConnectError;
use crate::held::HELD_MAX;
use crate::options::{Options, REPLY_PREFETCH};
use crate::{job_channel, reply_queue};

/// How long closing may take before the connections are dropped.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Unacknowledged replies of a client that holds them: the broker must have room to send the next.
const HOLDING_PREFETCH: u16 = HELD_MAX + REPLY_PREFETCH;

/// Opens sessions.
#[derive(Debug)]
pub(crate) struct Connector {
    options: Options,
    address: Address,
    reply_queue: Option<ShortString>,
    reply_queue_state: ReplyQueueState,
}

/// What the attempts to open a session have found out about the reply queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplyQueueState {
    /// No session has consumed it yet.
    NotCreated,
    /// A session has consumed it, and it is not known to be lost since then.
    Created,
    /// It was lost after a session had consumed it. No session has reported that yet.
    Missing,
}

/// Publishing and consuming have a connection each: a broker that is short of memory stops reading from connections that
/// publish, and on a shared one it would not read the acknowledgements of the replies that fill its memory.
pub(crate) struct Session {
    /// Shared with the jobs' channels, and with the task that publishes withdrawals.
    pub(crate) publishing: Arc<Connection>,
    /// Until it is taken. It is opened with the session, so that a broker that refuses it refuses the session.
    pub(crate) first_job_channel: Option<PublishPipeline<u64>>,
    pub(crate) replies: Option<Replies>,
    /// The reply queue of an earlier session did not exist any more, and was created again.
    pub(crate) lost_replies: bool,
}

/// Why a session was not opened.
#[derive(Debug)]
pub(crate) struct NotOpened {
    pub(crate) error: ConnectError,
    /// The broker refuses the user, or what the user may not do.
    pub(crate) is_forbidden: bool,
}

pub(crate) struct Replies {
    connection: Connection,
    channel: Channel,
    pub(crate) consumer: Consumer,
}

impl Connector {
    pub(crate) fn new(options: Options) -> Result<Self, ConnectError> {
        let mut address = options.address()?;
        if address.host_count() > 1 {
            // Whatever the URL allows a host: one that is silent leaves time for the next.
            address = address.answering_within(options.connect_timeout);
        }
        let reply_queue = match &options.adopt {
            Some(queue) => Some(ShortString::try_new(queue.as_str()).map_err(|_| ConnectError::Refused {
                broker: address.to_string(),
                error: "no queue can have a name of more than 255 bytes".to_owned(),
            })?),
            None => options.replies.then(|| format!("{CLIENT_REPLIES}{}", uuid::Uuid::new_v4()).into()),
        };
        Ok(Self { options, address, reply_queue, reply_queue_state: ReplyQueueState::NotCreated })
    }

    pub(crate) fn reply_queue(&self) -> Option<&ShortString> {
        self.reply_queue.as_ref()
    }

    /// Whether replies are held until their job is released.
    pub(crate) fn holds(&self) -> bool {
        self.options.hold_replies || self.adopts()
    }

    /// Whether the reply queue is that of another client.
    pub(crate) fn adopts(&self) -> bool {
        self.options.adopt.is_some()
    }

    /// The reply queue, if it can be deleted because no other client needs it. `done` says whether all jobs have ended.
    pub(crate) fn queue_to_delete(&self, done: bool) -> Option<&ShortString> {
        self.reply_queue.as_ref().filter(|_| !self.adopts() && (done || !self.holds()))
    }

    fn prefetch(&self) -> u16 {
        match (self.adopts(), self.holds()) {
            // Replies to jobs that nobody asks for are held, too, and must not keep out the others.
            (true, _) => u16::MAX,
            (false, true) => HOLDING_PREFETCH,
            (false, false) => REPLY_PREFETCH,
        }
    }

    pub(crate) fn broker(&self) -> String {
        self.address.to_string()
    }

    /// Connects, in the order that leaves no gap: connection, channel, confirms; then queue, qos, consumer.
    pub(crate) async fn open(&mut self) -> Result<Session, NotOpened> {
        let after = self.open_timeout();
        let opened = timeout(after, self.open_without_deadline()).await;
        match opened {
            Ok(opened) => opened.map_err(|error| NotOpened {
                is_forbidden: reply_code(&error) == Some(ACCESS_REFUSED),
                error: self.explain(&error),
            }),
            Err(_) => Err(NotOpened {
                is_forbidden: false,
                error: ConnectError::Timeout { broker: self.broker(), after },
            }),
        }
    }

    /// How long an attempt may take. Each host but the last one may be silent for its whole time before the next one is tried.
    fn open_timeout(&self) -> Duration {
        let hosts = u32::try_from(self.address.host_count()).unwrap_or(u32::MAX);
        self.options.connect_timeout.saturating_mul(hosts)
    }

    /// Whether a refusal that lasts ends the client.
    pub(crate) fn gives_up_when_refused(&self) -> bool {
        self.options.give_up_when_refused
    }

    async fn open_without_deadline(&mut self) -> lapin::Result<Session> {
        let (publishing, host) = self.connect(&self.address, "jobs").await?;
        let first_job_channel = Some(job_channel::open(&publishing).await?);
        let (mut replies, mut lost_replies) = (None, false);
        if let Some(queue) = &self.reply_queue {
            // To the same host, so that a host that was silent a moment ago costs no time again.
            let (connection, _) = self.connect(&self.address.starting_with(&host), "replies").await?;
            let before = self.reply_queue_state;
            let is_missing =
                before != ReplyQueueState::NotCreated && !reply_queue::exists(&connection, queue).await?;
            let channel = connection.create_channel().await?;
            if is_missing {
                // Kept if this attempt fails from here on: the next one finds the queue that this one creates.
                self.reply_queue_state = ReplyQueueState::Missing;
            }
            if !self.adopts() {
                let declared = reply_queue::declare(&channel, queue, self.options.reply_queue_expires).await;
                if let Err(error) = declared {
                    if error.is_amqp_soft_error() {
                        // Nothing was created: the queue's node is down. The queue and the replies in it are there when it is back.
                        self.reply_queue_state = before;
                    }
                    return Err(error);
                }
            }
            let consumer = reply_queue::consume(&channel, queue, self.prefetch()).await?;
            lost_replies = self.reply_queue_state == ReplyQueueState::Missing;
            self.reply_queue_state = ReplyQueueState::Created;
            replies = Some(Replies { connection, channel, consumer });
        }
        Ok(Session { publishing: Arc::new(publishing), first_job_channel, replies, lost_replies })
    }

    async fn connect(&self, address: &Address, what: &str) -> lapin::Result<(Connection, BrokerHost)> {
        let name = format!("{} ({what})", self.options.connection_name);
        address.connect_with_host(&name).await.map_err(|error| error.error)
    }

    fn explain(&self, error: &lapin::Error) -> ConnectError {
        let broker = self.broker();
        match error.kind() {
            // Other codes mean that the broker goes away or is down in part: 320 CONNECTION_FORCED, 541 INTERNAL_ERROR. 404 means that the
            // node of our own queue is down; a queue to adopt may simply not exist.
            ErrorKind::ProtocolError(refusal)
                if match refusal.get_id() {
                    NOT_FOUND => self.adopts(),
                    NOT_ALLOWED => true,
                    _ => error.is_amqp_soft_error(),
                } =>
            {
                ConnectError::Refused { broker, error: refusal.get_message().to_string() }
            }
            ErrorKind::IOError(io) if io.kind() == io::ErrorKind::ConnectionRefused => {
                ConnectError::Unreachable {
                    broker,
                    error: "connection refused: no broker listens there".to_owned(),
                }
            }
            _ => ConnectError::Unreachable { broker, error: error.to_string() },
        }
    }
}

impl Session {
    /// Events of the publishing connection.
    pub(crate) fn events(&self) -> BoxStream<'static, lapin::Event> {
        self.publishing.events_listener().boxed()
    }

    /// Deletes a reply queue with everything in it, if one is given, and closes the connections properly.
    pub(crate) async fn close(self, to_delete: Option<&ShortString>) {
        let closing = async {
            if let Some(replies) = &self.replies {
                if let Some(queue) = to_delete {
                    let options = QueueDeleteOptions::default();
                    replies.channel.queue_delete(queue.clone(), options).await?;
                }
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

#[cfg(test)]
mod tests {
    use lapin::protocol::AMQPError;

    use super::*;

    fn explained(options: Options, code: u16) -> ConnectError {
        let error = ErrorKind::ProtocolError(AMQPError::from_id(code, "why".into()).unwrap()).into();
        Connector::new(options).unwrap().explain(&error)
    }

    #[test]
    fn an_attempt_to_connect_has_the_time_for_each_host() {
        for (url, seconds) in [("amqp://a/%2f", 10), ("amqp://a,b,c/%2f", 30)] {
            let connector = Connector::new(Options::new(url)).unwrap();
            assert_eq!(connector.open_timeout(), Duration::from_secs(seconds), "{url}");
        }
    }

    #[test]
    fn a_broker_that_is_down_in_part_refuses_nothing() {
        let options = || Options::new("amqp://localhost/%2f");
        for (code, is_refused) in [(403, true), (530, true), (320, false), (541, false), (404, false)] {
            let error = explained(options(), code);
            assert_eq!(!error.is_retryable(), is_refused, "{code}: {error}");
            assert!(error.to_string().contains("why"), "{error}");
        }
        // Nobody declares the queue that is to be adopted.
        let mut adopting = options();
        adopting.adopt = Some("gone".to_owned());
        assert!(!explained(adopting, 404).is_retryable());
    }
}
