//! What a caller can set, and the limits behind the defaults.

use std::fmt;
use std::time::Duration;

use lapin::uri::AMQPUri;
use vramq_schemas::Encoding;

use crate::error::ConnectError;

/// Jobs that one client has out, published or about to be, by default. Each costs its inputs until the confirm and
/// its outputs until the last reply: 1,024 jobs of 32 embeddings of 1,536 bytes are 48 MiB, and more than the slots
/// of many workers together.
pub const JOBS_IN_FLIGHT: usize = 1024;

/// Publishes awaiting their confirm. One at a time gives about 1/15 of the pipelined rate; 64 in flight reach it on
/// a local broker, and 256 leave room for the round trip of a remote one.
pub const CONFIRMS_IN_FLIGHT: usize = 256;

/// Bytes of bodies that wait for their confirm, whatever their number: four of the largest allowed.
pub const BODY_BYTES_IN_FLIGHT: usize = 64 * 1024 * 1024;

/// Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
pub const REPLY_PREFETCH: u16 = 128;

/// The heartbeat asked of the broker, unless the URL names one: a dead peer is noticed after about two.
const HEARTBEAT_S: u16 = 20;

/// How a [`Client`](crate::Client) connects. Made from a URL; `Debug` does not show its credentials.
#[derive(Clone)]
pub struct Options {
    url: String,
    /// Shown in the broker's list of connections.
    pub connection_name: String,
    /// How jobs are written; replies come in the same encoding. Bincode by default: embeddings take a third of
    /// their JSON.
    pub encoding: Encoding,
    /// The most jobs that are out at a time; [`Client::submit`](crate::Client::submit) waits for room.
    pub jobs_in_flight: usize,
    /// For one attempt to connect, handshake included.
    pub connect_timeout: Duration,
    /// How long to try to get a lost connection back before everything in flight fails. `None`: for ever.
    pub reconnect_for: Option<Duration>,
    /// How long the broker keeps the reply queue, and the replies in it, while this client is away.
    pub reply_queue_expires: Duration,
    /// Without a reply queue only [`Client::publish`](crate::Client::publish) works.
    pub replies: bool,
}

impl Options {
    /// `url` as in `amqp://user:password@host:5672/vhost`, or `amqps://…`.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            connection_name: format!("vramq-producer {}", std::process::id()),
            encoding: Encoding::Bincode,
            jobs_in_flight: JOBS_IN_FLIGHT,
            connect_timeout: Duration::from_secs(10),
            reconnect_for: None,
            reply_queue_expires: Duration::from_secs(600),
            replies: true,
        }
    }

    pub(crate) fn uri(&self) -> Result<AMQPUri, ConnectError> {
        let mut uri = self.url.parse::<AMQPUri>().map_err(|problem| {
            // Some parse errors quote the whole URL, credentials included.
            let quotes_url = problem.contains(&self.url) || problem.contains('@');
            ConnectError::Url(if quotes_url { "not a URL".to_owned() } else { problem })
        })?;
        uri.query.heartbeat.get_or_insert(HEARTBEAT_S);
        Ok(uri)
    }
}

/// Where a URI leads, without who asks.
pub(crate) fn address(uri: &AMQPUri) -> String {
    format!("{}:{}", uri.authority.host, uri.authority.port)
}

impl From<&str> for Options {
    fn from(url: &str) -> Self {
        Self::new(url)
    }
}

impl From<String> for Options {
    fn from(url: String) -> Self {
        Self::new(url)
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            url: _,
            connection_name,
            encoding,
            jobs_in_flight,
            connect_timeout,
            reconnect_for,
            reply_queue_expires,
            replies,
        } = self;
        let broker = self.uri().map_or_else(|_| "invalid".to_owned(), |uri| address(&uri));
        f.debug_struct("Options")
            .field("broker", &broker)
            .field("connection_name", connection_name)
            .field("encoding", encoding)
            .field("jobs_in_flight", jobs_in_flight)
            .field("connect_timeout", connect_timeout)
            .field("reconnect_for", reconnect_for)
            .field("reply_queue_expires", reply_queue_expires)
            .field("replies", replies)
            .finish()
    }
}

/// What one job asks of broker and worker.
#[derive(Clone, Debug, Default)]
pub struct SubmitOptions {
    /// The job id, at most 255 bytes; a new UUIDv7 if `None`.
    pub id: Option<String>,
    /// From the call of `submit` to the last reply. `None`: for ever.
    pub timeout: Option<Duration>,
    /// Takes effect on queues declared with priorities.
    pub priority: Option<u8>,
    /// How long the job may wait in its queue; then it is expired, not run.
    pub expiration: Option<Duration>,
    /// The most items that may share a pass with this job, at least 1.
    pub batch_hint: Option<u32>,
    /// W3C trace context, handed through to the worker.
    pub traceparent: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_stay_out_of_debug_and_errors() {
        for url in [
            "amqp://user:hunter2@host:5672/%2f",
            "amqp://user:hunter2@host:99999/%2f",
            "amqp:user:hunter2@host",
            "hunter2",
            "http://user:hunter2@host/",
            "amqp://user:hunter2@host/?heartbeat=hunter2",
        ] {
            let options = Options::new(url);
            let shown = format!("{options:?} {:?}", options.uri().map(|uri| address(&uri)));
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }

    #[test]
    fn a_heartbeat_in_the_url_is_kept() {
        let heartbeat = |url: &str| Options::new(url).uri().unwrap().query.heartbeat;
        assert_eq!(heartbeat("amqp://localhost/%2f?heartbeat=7"), Some(7));
        assert_eq!(heartbeat("amqp://localhost/%2f"), Some(HEARTBEAT_S));
    }
}
