//! A channel to the broker for the jobs of a routing key, and these jobs.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use lapin::Connection;
use vramq_amqp::{Limits, MatchBy, Outcomes, PublishPipeline};
use vramq_schemas::BODY_BYTES_MAX;

use crate::key_limits::{KEY_BYTES_MAX, KEY_JOBS_MAX};
use crate::outgoing::Outgoing;

const LIMITS: Limits = Limits { messages: KEY_JOBS_MAX, bytes: KEY_BYTES_MAX, body_bytes: BODY_BYTES_MAX };

/// It knows jobs by their numbers, which are in the order of publishing.
#[derive(Debug, Default)]
pub(crate) struct JobChannel {
    publisher: Publisher,
    /// Jobs to be published.
    waiting: BTreeMap<u64, Outgoing>,
    /// Jobs whose outcome is not known.
    published: BTreeMap<u64, Outgoing>,
}

#[derive(Default)]
enum Publisher {
    #[default]
    Closed,
    Opening(BoxFuture<'static, lapin::Result<PublishPipeline<u64>>>),
    Open(Box<PublishPipeline<u64>>),
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "Closed",
            Self::Opening(_) => "Opening",
            Self::Open(_) => "Open",
        })
    }
}

/// Opens a channel for jobs.
pub(crate) async fn open(connection: &Connection) -> lapin::Result<PublishPipeline<u64>> {
    PublishPipeline::open(connection, LIMITS, MatchBy::MessageId).await
}

impl JobChannel {
    pub(crate) fn with_publisher(publisher: PublishPipeline<u64>) -> Self {
        Self { publisher: Publisher::Open(Box::new(publisher)), ..Self::default() }
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.publisher, Publisher::Open(_))
    }

    /// How many jobs it has.
    pub(crate) fn jobs(&self) -> usize {
        self.waiting.len() + self.published.len()
    }

    pub(crate) fn add(&mut self, number: u64, outgoing: Outgoing) {
        self.waiting.insert(number, outgoing);
    }

    /// A job without an outcome.
    pub(crate) fn get(&self, number: u64) -> Option<&Outgoing> {
        self.published.get(&number).or_else(|| self.waiting.get(&number))
    }

    pub(crate) fn remove(&mut self, number: u64) -> Option<Outgoing> {
        self.published.remove(&number).or_else(|| self.waiting.remove(&number))
    }

    /// Takes out all jobs, by number.
    pub(crate) fn take_jobs(&mut self) -> BTreeMap<u64, Outgoing> {
        self.waiting.append(&mut self.published);
        std::mem::take(&mut self.waiting)
    }

    /// The first job to be published.
    pub(crate) fn first_waiting(&self) -> Option<(u64, &Outgoing)> {
        self.waiting.first_key_value().map(|(number, outgoing)| (*number, outgoing))
    }

    /// Whether a job may be published now. Begins to open the channel if it is closed.
    pub(crate) fn has_room(&mut self, connection: &Arc<Connection>) -> bool {
        match &self.publisher {
            Publisher::Open(publisher) => publisher.has_room(),
            Publisher::Opening(_) => false,
            Publisher::Closed => {
                let connection = Arc::clone(connection);
                self.publisher = Publisher::Opening(async move { open(&connection).await }.boxed());
                false
            }
        }
    }

    /// Publishes a waiting job. To be called only while there is room.
    pub(crate) fn publish(&mut self, number: u64) {
        if let Publisher::Open(publisher) = &mut self.publisher
            && let Some(outgoing) = self.waiting.remove(&number)
        {
            publisher.publish(number, outgoing.message.clone());
            self.published.insert(number, outgoing);
        }
    }

    /// Lets go of the connection. All jobs are to be published again.
    pub(crate) fn close(&mut self) {
        self.publisher = Publisher::Closed;
        self.waiting.append(&mut self.published);
    }

    /// The jobs that the broker may have, without a confirm.
    pub(crate) fn unconfirmed(&self) -> Vec<u64> {
        match &self.publisher {
            Publisher::Open(publisher) => publisher.unconfirmed().copied().collect(),
            _ => Vec::new(),
        }
    }

    /// Sends what was published. Ready when the channel is open, and when outcomes are known.
    ///
    /// # Errors
    /// Why the channel is lost, or cannot be opened.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> Poll<lapin::Result<Outcomes<u64>>> {
        match &mut self.publisher {
            Publisher::Open(publisher) if !publisher.is_empty() => pin!(publisher.next()).poll(context),
            Publisher::Closed | Publisher::Open(_) => Poll::Pending,
            Publisher::Opening(opening) => {
                // After an error it is still opening: the session ends with it.
                let publisher = ready!(opening.as_mut().poll(context))?;
                self.publisher = Publisher::Open(Box::new(publisher));
                Poll::Ready(Ok(Vec::new()))
            }
        }
    }
}
