//! Where letters become safe before they leave their queue: another queue, or a file.

use std::time::Duration;

use lapin::Connection;
use tokio::time::Instant;
use vramq_amqp::Verdict;

use super::archive::Archive;
use super::dead_letter::Fingerprint;
use super::error::Error;
use super::outbox::Outbox;
use super::plan::Kind;
use super::queue_lock::connect;
use super::reader::Unacked;
use super::republish::{self, Changes};
use super::select::unix_ms;
use crate::broker::Broker;

/// Letters that are archived between two writes to the disk.
const ARCHIVED_MAX: usize = 500;

pub(super) enum Destination<'a> {
    /// By the broker's confirm.
    Queue {
        _connection: Box<Connection>,
        outbox: Box<Outbox<PendingLetter>>,
        changes: &'a Changes,
        rate_limit: Option<RateLimit>,
    },
    /// By the disk.
    File { archive: &'a mut Archive, held: Vec<PendingLetter> },
}

/// A letter that is not acknowledged yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingLetter {
    pub(super) fingerprint: Fingerprint,
    pub(super) tag: u64,
    pub(super) results: bool,
}

/// At most so many letters in a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateLimit {
    every: Duration,
    next: Instant,
}

impl RateLimit {
    pub(super) fn per_second(rate: u32) -> Self {
        Self { every: Duration::from_secs(1) / rate.max(1), next: Instant::now() }
    }

    fn sent(&mut self) {
        // Late is no reason to hurry afterwards.
        self.next = (self.next + self.every).max(Instant::now());
    }
}

impl<'a> Destination<'a> {
    /// By a connection of its own, so that confirms are heard while the one that reads letters waits at its limiter.
    pub(super) async fn queue(
        broker: &Broker,
        changes: &'a Changes,
        rate: Option<u32>,
    ) -> Result<Self, Error> {
        let connection = connect(broker).await?;
        let outbox = Box::new(Outbox::open(&connection).await?);
        Ok(Self::Queue {
            _connection: Box::new(connection),
            outbox,
            changes,
            rate_limit: rate.map(RateLimit::per_second),
        })
    }

    pub(super) fn file(archive: &'a mut Archive) -> Self {
        Self::File { archive, held: Vec::new() }
    }

    pub(super) fn has_room(&self) -> bool {
        match self {
            Self::Queue { outbox, .. } => outbox.has_room(),
            Self::File { held, .. } => held.len() < ARCHIVED_MAX,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Queue { outbox, .. } => outbox.is_empty(),
            Self::File { held, .. } => held.is_empty(),
        }
    }

    /// Whether to ask at once what became of those under way: of a file, only when there are many.
    pub(super) fn is_due(&self) -> bool {
        match self {
            Self::Queue { outbox, .. } => !outbox.is_empty(),
            Self::File { .. } => !self.has_room(),
        }
    }

    /// When the next letter may go.
    pub(super) fn next_at(&self) -> Option<Instant> {
        match self {
            Self::Queue { rate_limit, .. } => rate_limit.map(|rate_limit| rate_limit.next),
            Self::File { .. } => None,
        }
    }

    /// Starts to bring a letter to safety. The inner error says why it has to stay where it is.
    pub(super) fn take(&mut self, taken: Unacked, kind: &Kind) -> Result<Result<(), String>, Error> {
        let results = *kind == Kind::Results;
        let held = PendingLetter { fingerprint: taken.letter.fingerprint(), tag: taken.tag, results };
        match self {
            Self::Queue { outbox, changes, rate_limit, .. } => {
                let message = match kind {
                    Kind::Results => republish::results(taken.letter),
                    Kind::Job | Kind::AnsweredBy(_) => republish::job(taken.letter, changes, unix_ms()),
                };
                let message = match message {
                    Ok(message) => message,
                    Err(cannot_publish) => return Ok(Err(cannot_publish.to_string())),
                };
                outbox.send(held, message);
                if let Some(rate_limit) = rate_limit {
                    rate_limit.sent();
                }
            }
            Self::File { archive, held: all } => {
                archive.write(&taken.letter)?;
                all.push(held);
            }
        }
        Ok(Ok(()))
    }

    /// Waits until some are safe, or are known not to be.
    ///
    /// Cancel safety: what is dropped is asked for again by the next call.
    pub(super) async fn judged(&mut self) -> Result<Vec<(PendingLetter, Verdict)>, Error> {
        match self {
            Self::Queue { outbox, .. } => outbox.judged().await,
            Self::File { archive, held } => {
                archive.sync()?;
                Ok(held.drain(..).map(|held| (held, Verdict::Accepted)).collect())
            }
        }
    }
}
