//! Options of a client and of a job, with their defaults.

use std::fmt;
use std::time::Duration;

use lapin::types::ShortString;
use vramq_amqp::{Address, Credentials};
use vramq_schemas::{Encoding, Job};

use crate::error::ConnectError;

/// Jobs that a client has in flight, published or about to be, by default. Each costs its inputs until the confirm and
/// its outputs until the last reply: 1,024 jobs of 32 embeddings of 1,536 bytes are 48 MiB, and more than the slots
/// of many workers together.
pub(crate) const JOBS_IN_FLIGHT: usize = 1024;

/// How long a job may take from [`Client::submit`](crate::Client::submit) to its last reply, by default. Longer than a worker
/// works on one job (24 minutes by default) after a long wait in the queue; without a limit a caller whose reply was lost would
/// wait for ever.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3600);

/// Unacknowledged replies: with 64 to 256 a consumer reaches the broker's full rate.
pub(crate) const REPLY_PREFETCH: u16 = 128;

/// How a [`Client`](crate::Client) connects. Made from a URL; `Debug` does not show its credentials.
#[derive(Clone)]
pub struct Options {
    url: String,
    ca_pem: Option<String>,
    credentials: Credentials,
    /// Shown in the broker's list of connections.
    pub connection_name: String,
    /// How jobs are written; replies come in the same encoding. Bincode by default: embeddings take a third of
    /// their JSON.
    pub encoding: Encoding,
    /// The most jobs in flight at a time; [`Client::submit`](crate::Client::submit) waits until there are fewer.
    pub jobs_in_flight: usize,
    /// For jobs whose [`SubmitOptions::timeout`] is `None`. `None`: no limit.
    pub timeout: Option<Duration>,
    /// How long one attempt to connect may take for each host of the URL, 10 s by default. An attempt opens two connections with their
    /// handshakes (one without replies), a channel on each, and the reply queue. `connection_timeout` of the URL may give a host less for its
    /// handshake.
    pub connect_timeout: Duration,
    /// How long to try to get a lost connection back before everything in flight fails. An attempt that has begun is not cut short. `None`: for ever.
    pub reconnect_for: Option<Duration>,
    /// Whether everything in flight fails when the broker has refused for about 10 s to let the client reconnect (403): the user is gone, or
    /// has another password, or fewer permissions for queues. If not, the client tries again until `reconnect_for` is over, because a password
    /// in a file may be replaced, or an operator may correct it. After 530 it always tries again: the user may no longer use the virtual
    /// host, or that is gone. [`Client::refusal`](crate::Client::refusal) has the broker's words.
    pub give_up_when_refused: bool,
    /// How long the broker keeps the reply queue, and the replies in it, while this client is away.
    pub reply_queue_expires: Duration,
    /// Without a reply queue only [`Client::publish`](crate::Client::publish) works.
    pub replies: bool,
    /// Acknowledges the replies to a job only when the job's handle ([`Pending`](crate::Pending) or [`Receipt`](crate::Receipt)) is
    /// dropped. If this client dies before, the broker gives all of them to a client that adopts the reply queue. That client needs the
    /// jobs to go on, so a client with this option withdraws no jobs.
    pub hold_replies: bool,
    /// The reply queue of a client that is gone, to consume instead of an own one: see
    /// [`Client::await_published`](crate::Client::await_published). It must exist. Replies to jobs that are not awaited stay in it. Implies
    /// `hold_replies`.
    pub adopt: Option<String>,
    /// Leaves the URL's user out of the jobs, which otherwise name it as `user_id`. By `user_id` workers share passes between users, and
    /// decide who may name tenants. Needed if the connection's user is another one, as with a token: the broker closes the channel over a
    /// wrong `user_id`.
    pub anonymous: bool,
}

impl Options {
    /// `url` as in `amqp://user:password@host:5672/vhost`, or `amqps://…`; `host:5672,host:5672` for several hosts of
    /// a cluster.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            ca_pem: None,
            credentials: Credentials::default(),
            connection_name: format!("vramq-producer {}", std::process::id()),
            encoding: Encoding::Bincode,
            jobs_in_flight: JOBS_IN_FLIGHT,
            timeout: Some(TIMEOUT),
            connect_timeout: Duration::from_secs(10),
            reconnect_for: None,
            give_up_when_refused: false,
            reply_queue_expires: Duration::from_secs(600),
            replies: true,
            hold_replies: false,
            adopt: None,
            anonymous: false,
        }
    }

    /// Trusts the certificates in a PEM text besides those that the system trusts: for `amqps://` with a private
    /// authority.
    #[must_use]
    pub fn trusting(mut self, ca_pem: impl Into<String>) -> Self {
        self.ca_pem = Some(ca_pem.into());
        self
    }

    /// Says who the client is by files: a certificate with its key for `amqps://`, or the password of the URL's user. They are read
    /// for each connection, so that they can be replaced. With `?auth_mechanism=external` in the URL the certificate names the user.
    #[must_use]
    pub fn with_credentials(mut self, credentials: Credentials) -> Self {
        self.credentials = credentials;
        self
    }

    pub(crate) fn address(&self) -> Result<Address, ConnectError> {
        let address: Address = self.url.parse().map_err(ConnectError::Url)?;
        let address = self.ca_pem.iter().cloned().fold(address, Address::trusting);
        // An error has at least one fault.
        address
            .with_credentials(self.credentials.clone())
            .map_err(|mut faults| ConnectError::Credentials(faults.swap_remove(0)))
    }

    /// The user that jobs name.
    pub(crate) fn user_id(&self) -> Result<Option<ShortString>, ConnectError> {
        let address = self.address()?;
        // A longer one cannot be a user of the broker.
        let user = address.user_id().and_then(|user| ShortString::try_new(user).ok());
        Ok(user.filter(|_| !self.anonymous))
    }
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
            ca_pem: _,
            credentials,
            connection_name,
            encoding,
            jobs_in_flight,
            timeout,
            connect_timeout,
            reconnect_for,
            give_up_when_refused,
            reply_queue_expires,
            replies,
            hold_replies,
            adopt,
            anonymous,
        } = self;
        let broker = self.address().map_or_else(|_| "invalid".to_owned(), |address| address.to_string());
        f.debug_struct("Options")
            .field("broker", &broker)
            .field("credentials", credentials)
            .field("connection_name", connection_name)
            .field("encoding", encoding)
            .field("jobs_in_flight", jobs_in_flight)
            .field("timeout", timeout)
            .field("connect_timeout", connect_timeout)
            .field("reconnect_for", reconnect_for)
            .field("give_up_when_refused", give_up_when_refused)
            .field("reply_queue_expires", reply_queue_expires)
            .field("replies", replies)
            .field("hold_replies", hold_replies)
            .field("adopt", adopt)
            .field("anonymous", anonymous)
            .finish()
    }
}

/// What one job asks of broker and worker.
#[derive(Clone, Debug, Default)]
pub struct SubmitOptions {
    /// The job id, at most 255 bytes; a new UUIDv7 if `None`.
    pub id: Option<String>,
    /// Routing key of the job, where the model's workers set a `key`; the model's name if `None`.
    pub key: Option<String>,
    /// From the call of `submit` to the last reply. `None`: [`Options::timeout`].
    pub timeout: Option<Duration>,
    /// Takes effect on queues declared with priorities.
    pub priority: Option<u8>,
    /// How long the job may wait in its queue; then it is expired, not run.
    pub expiration: Option<Duration>,
    /// The most items that may share a pass with this job, at least 1.
    pub batch_hint: Option<u32>,
    /// Asks the model to report progress of its items; see [`Pending::progress`](crate::Pending::progress). Models without progress ignore
    /// this. Workers of 0.2.0 pass it to the model as a parameter, which the encoder rejects.
    pub progress: bool,
    /// The revision of the model that is to run the job, as [`Answer::model_revisions`](crate::Answer::model_revisions) or
    /// heartbeats have it. Workers with another revision requeue the job; after some minutes it fails as
    /// [`WrongRevision`](vramq_schemas::Reason::WrongRevision). At most 2,048 bytes. Workers of 0.2.0 ignore it.
    pub model_revision: Option<String>,
    /// W3C trace context, handed through to the worker.
    pub traceparent: Option<String>,
    /// W3C `tracestate`, which workers forward only beside a valid `traceparent`. An invalid one is left out, and so is one above the
    /// standard's 512 bytes and 32 entries.
    pub tracestate: Option<String>,
    /// The application that publishes the job, as replies and dead letters repeat it; at most 255 bytes.
    pub app_id: Option<String>,
    /// Further headers with texts, such as [`TENANT`](vramq_schemas::headers::TENANT): all headers together take at most 120 KiB. With the
    /// header
    /// [`DIGEST`](vramq_schemas::withdrawal::DIGEST) of the caller's own secret, only the caller can withdraw the job; the client never
    /// does.
    pub headers: Vec<(String, String)>,
}

impl SubmitOptions {
    /// The routing key of a job.
    pub(crate) fn key_of<'a>(&'a self, job: &'a Job) -> &'a str {
        self.key.as_deref().unwrap_or(&job.model)
    }
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
            let shown = format!("{options:?} {:?}", options.address());
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }

    #[test]
    fn jobs_name_the_user_of_the_url_unless_they_are_anonymous() {
        let user = |url: &str, anonymous| {
            let options = Options { anonymous, ..Options::new(url) };
            options.user_id().unwrap().map(|user| user.to_string())
        };
        assert_eq!(user("amqp://m%40e:hunter2@host/", false).as_deref(), Some("m@e"));
        assert_eq!(user("amqp://me:hunter2@host/", true), None);
        assert_eq!(user("amqp://:token@host/", false), None);
    }

    #[test]
    fn a_heartbeat_in_the_url_is_kept() {
        let heartbeat_s = |url: &str| Options::new(url).address().unwrap().heartbeat_s();
        assert_eq!(heartbeat_s("amqp://localhost/%2f?heartbeat=7"), 7);
        assert_eq!(heartbeat_s("amqp://localhost/%2f"), 20);
    }
}
