//! Remembers which jobs this worker has published again while it still holds the messages that they came in. What comes in are such
//! publications and deliveries; what goes out is whether a delivery is the next attempt of a job that is still here.
//!
//! A broker may deliver a message before it confirms it. If the worker died with both, the message that the job came in and the next
//! attempt, the broker would deliver both again, and the job would be there twice. A job that kills workers would multiply each time.
//! So the next attempt is not read before the first message is acknowledged or given back.

use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;

use crate::event::Delivery;
use crate::ids::JobKey;
use crate::sizes::Size;

/// How far a job has come. With the job's id it tells one attempt from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    attempt: u32,
    crashes: u32,
    items_done: u32,
}

impl Standing {
    fn of(headers: &JobHeaders) -> Self {
        let JobHeaders { attempt, crashes, items_done, .. } = *headers;
        Self { attempt, crashes, items_done }
    }
}

/// A job that was published again and whose own message is not settled yet.
#[derive(Debug)]
struct Predecessor {
    job: JobKey,
    id: String,
    /// As the next attempt has it.
    standing: Standing,
}

/// A delivery that waits until its predecessor's message is settled.
#[derive(Clone, Copy, Debug)]
struct Held {
    job: JobKey,
    predecessor: JobKey,
    since: Instant,
}

/// Jobs that were published again, and next attempts that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Successors {
    predecessors: Vec<Predecessor>,
    held: Vec<Held>,
}

impl Successors {
    /// Given so many unacknowledged jobs.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let published_again = Size::of("jobs that are published again", self.predecessors.len(), unacked);
        [published_again, Size::of("next attempts that wait", self.held.len(), unacked)]
    }

    /// A job is published again, with these headers; or once more, by another way.
    pub(crate) fn published_again(&mut self, job: JobKey, id: Option<&str>, headers: &JobHeaders) {
        self.predecessors.retain(|known| known.job != job);
        if let Some(id) = id {
            let (id, standing) = (id.to_owned(), Standing::of(headers));
            self.predecessors.push(Predecessor { job, id, standing });
        }
    }

    /// Holds a delivery if it is the next attempt of a job that is still here. Gives whether it is.
    pub(crate) fn hold(&mut self, delivery: &Delivery, now: Instant) -> bool {
        let (Some(id), Some(headers)) = (&delivery.id, &delivery.headers) else { return false };
        let standing = Standing::of(headers);
        let mut predecessors = self.predecessors.iter();
        let Some(known) = predecessors.find(|known| known.id == *id && known.standing == standing) else {
            return false;
        };
        self.held.push(Held { job: delivery.job, predecessor: known.job, since: now });
        true
    }

    pub(crate) fn is_held(&self, job: JobKey) -> bool {
        self.held.iter().any(|held| held.job == job)
    }

    /// A delivery that waits has ended unread.
    pub(crate) fn ended_unread(&mut self, job: JobKey) {
        self.held.retain(|held| held.job != job);
    }

    /// The message of a job is settled. Gives the next attempts that waited for that.
    pub(crate) fn settled(&mut self, job: JobKey) -> Vec<JobKey> {
        self.predecessors.retain(|known| known.job != job);
        self.release(|held| held.predecessor == job)
    }

    /// The next attempts that have waited for so long, and wait no longer.
    pub(crate) fn overdue(&mut self, longest: Duration, now: Instant) -> Vec<JobKey> {
        self.release(|held| now.saturating_duration_since(held.since) > longest)
    }

    /// All jobs went with their session.
    pub(crate) fn session_closed(&mut self) {
        *self = Self::default();
    }

    fn release(&mut self, is_due: impl Fn(&Held) -> bool) -> Vec<JobKey> {
        self.held.extract_if(.., |held| is_due(held)).map(|held| held.job).collect()
    }
}
