//! Where dead letters are stored before they leave their queue: another queue, or a file.

use std::time::Duration;

use lapin::Connection;
use tokio::time::Instant;
use vramq_amqp::{CONFIRMS_IN_FLIGHT, Limits, MatchBy, Outcomes, PublishOutcome, PublishPipeline};

use crate::access::Access;
use crate::archive::Archive;
use crate::dead_letter::Fingerprint;
use crate::error::Error;
use crate::plan::Kind;
use crate::reader::Unacked;
use crate::republish::{self, Changes};
use crate::text::unix_ms;

/// Dead letters that are archived between two writes to the disk.
const ARCHIVED_MAX: usize = 500;

/// What may await its confirm. 512 MiB is the most that RabbitMQ can be configured to accept as one message.
const LIMITS: Limits =
    Limits { messages: CONFIRMS_IN_FLIGHT, bytes: 32 * 1024 * 1024, body_bytes: 512 * 1024 * 1024 };

/// Why a dead letter is kept whose publishing ended as [`PublishOutcome::TooLarge`].
pub const TOO_LARGE: &str = "its body is larger than RabbitMQ accepts, or its headers do not fit a frame of the connection (frame_max)";

/// Opens a channel that publishes dead letters with confirms.
///
/// # Errors
/// The broker does not open it.
pub async fn publisher<T>(connection: &Connection) -> lapin::Result<PublishPipeline<T>> {
    PublishPipeline::open(connection, LIMITS, MatchBy::PublishSeq).await
}

/// What a destination is to be.
#[derive(Debug)]
pub enum Target<'a> {
    /// The queues that jobs and results belong in, with at most `rate` per second.
    Queues {
        changes: &'a Changes,
        rate: Option<u32>,
    },
    File(&'a mut Archive),
}

#[derive(Debug)]
pub(crate) enum Destination<'a> {
    /// Stores by publishing with confirms. Uses a connection of its own: on the reading connection, confirms would wait behind deliveries
    /// that its byte limiter holds back.
    Queues {
        _connection: Box<Connection>,
        publisher: Box<PublishPipeline<PendingLetter>>,
        changes: &'a Changes,
        rate_limit: Option<RateLimit>,
    },
    /// Stores with a write to the disk.
    File { archive: &'a mut Archive, pending: Vec<PendingLetter> },
}

/// A dead letter that is not acknowledged yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingLetter {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) tag: u64,
    /// It holds results, not a job.
    pub(crate) results: bool,
}

/// What became of a dead letter that was to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Started {
    /// [`Destination::settled`] will return it.
    Pending,
    /// It stays in its queue, for this reason.
    Kept(String),
}

/// Limits the dead letters per second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RateLimit {
    every: Duration,
    next: Instant,
}

impl RateLimit {
    fn per_second(rate: u32) -> Self {
        Self { every: Duration::from_secs(1) / rate.max(1), next: Instant::now() }
    }

    fn sent(&mut self) {
        // Never catch up after a delay by a burst.
        self.next = (self.next + self.every).max(Instant::now());
    }
}

impl<'a> Destination<'a> {
    pub(crate) async fn open<'t: 'a>(access: &Access, target: &'a mut Target<'t>) -> Result<Self, Error> {
        Ok(match target {
            Target::Queues { changes, rate } => {
                let connection = access.connect().await?;
                let publisher = Box::new(publisher(&connection).await?);
                let rate_limit = rate.map(RateLimit::per_second);
                Self::Queues { _connection: Box::new(connection), publisher, changes, rate_limit }
            }
            Target::File(archive) => Self::File { archive, pending: Vec::new() },
        })
    }

    pub(crate) fn has_room(&self) -> bool {
        match self {
            Self::Queues { publisher, .. } => publisher.has_room(),
            Self::File { pending, .. } => pending.len() < ARCHIVED_MAX,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Queues { publisher, .. } => publisher.is_empty(),
            Self::File { pending, .. } => pending.is_empty(),
        }
    }

    /// Whether [`settled`](Self::settled) should be called now. For a file, only when many letters are pending.
    pub(crate) fn is_due(&self) -> bool {
        match self {
            Self::Queues { publisher, .. } => !publisher.is_empty(),
            Self::File { .. } => !self.has_room(),
        }
    }

    /// Whether the destination delivers results to their reply queue, which answers their job.
    pub(crate) fn delivers_results(&self) -> bool {
        matches!(self, Self::Queues { .. })
    }

    /// Forgets the letters that were published and have no answer of the broker; which these are. Their acknowledgements belong to one reading
    /// of the queue, so none may be settled in the next one.
    pub(crate) fn forget(&mut self) -> Vec<Fingerprint> {
        match self {
            Self::Queues { publisher, .. } => {
                publisher.forget().into_iter().map(|pending| pending.fingerprint).collect()
            }
            Self::File { pending, .. } => {
                pending.clear();
                Vec::new()
            }
        }
    }

    /// When the next dead letter may be taken.
    pub(crate) fn next_at(&self) -> Option<Instant> {
        match self {
            Self::Queues { rate_limit, .. } => rate_limit.map(|limit| limit.next),
            Self::File { .. } => None,
        }
    }

    /// Starts to store a dead letter.
    ///
    /// # Errors
    /// The archive cannot be written.
    pub(crate) fn take(&mut self, unacked: Unacked, kind: &Kind) -> Result<Started, Error> {
        let Unacked { letter, tag, .. } = unacked;
        let results = *kind == Kind::Results;
        let token = PendingLetter { fingerprint: letter.fingerprint(), tag, results };
        match self {
            Self::Queues { publisher, changes, rate_limit, .. } => {
                let message = match kind {
                    Kind::Results => republish::results(letter),
                    Kind::Job | Kind::AnsweredBy(_) => republish::job(letter, changes, unix_ms()),
                };
                match message {
                    Ok(message) => publisher.publish(token, message),
                    Err(cannot_publish) => return Ok(Started::Kept(cannot_publish.to_string())),
                }
                if let Some(limit) = rate_limit {
                    limit.sent();
                }
            }
            Self::File { archive, pending } => {
                archive.write(&letter)?;
                pending.push(token);
            }
        }
        Ok(Started::Pending)
    }

    /// Waits until some dead letters are stored, or cannot be.
    ///
    /// Cancel safety: what a dropped call has not returned is returned by the next one.
    pub(crate) async fn settled(&mut self) -> Result<Outcomes<PendingLetter>, Error> {
        match self {
            Self::Queues { publisher, .. } => Ok(publisher.next().await?),
            Self::File { archive, pending } => {
                archive.sync()?;
                Ok(pending.drain(..).map(|token| (token, PublishOutcome::Confirmed)).collect())
            }
        }
    }
}
