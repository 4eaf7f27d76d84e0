//! Remembers which jobs this worker has published again while it still holds the messages that they came in. These publications and all
//! deliveries come in; whether a delivery is the next attempt of a job that is still here goes out.
//!
//! A broker may deliver a message before it confirms it. If the worker died while it held both the old message and the next attempt, the
//! broker would deliver both again. The job would then exist twice, and a job that kills workers would multiply each time. So the next
//! attempt is not read before the first message is acknowledged or given back.

use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;

use crate::event::Delivery;
use crate::ids::JobKey;
use crate::sizes::Size;

/// How far a job has come. With the id of the job it identifies an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttemptId {
    attempt: u32,
    crashes: u32,
    items_done: u32,
}

impl AttemptId {
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
    /// The next attempt.
    attempt: AttemptId,
}

/// A delivery that waits until the message that it follows is settled.
#[derive(Debug)]
struct Successor {
    job: JobKey,
    id: String,
    attempt: AttemptId,
    since: Instant,
}

/// Jobs that were published again, and next attempts that wait for them.
#[derive(Debug, Default)]
pub(crate) struct Successors {
    predecessors: Vec<Predecessor>,
    held: Vec<Successor>,
}

impl Successors {
    /// `unacked`: the unacknowledged jobs, which bound both.
    pub(crate) fn sizes(&self, unacked: usize) -> [Size; 2] {
        let published_again = Size::of("jobs that are published again", self.predecessors.len(), unacked);
        [published_again, Size::of("next attempts that wait", self.held.len(), unacked)]
    }

    /// A job is published again with these headers. Replaces an earlier record of the same message.
    pub(crate) fn published_again(&mut self, job: JobKey, id: Option<&str>, headers: &JobHeaders) {
        self.predecessors.retain(|known| known.job != job);
        if let Some(id) = id {
            let (id, attempt) = (id.to_owned(), AttemptId::of(headers));
            self.predecessors.push(Predecessor { job, id, attempt });
        }
    }

    /// Holds a delivery back if it is the next attempt of a job that is still here. Returns whether it is.
    pub(crate) fn hold(&mut self, delivery: &Delivery, now: Instant) -> bool {
        let (Some(id), Some(headers)) = (&delivery.id, &delivery.headers) else { return false };
        let attempt = AttemptId::of(headers);
        let follows = self.has_predecessor(id, attempt);
        if follows {
            self.held.push(Successor { job: delivery.job, id: id.clone(), attempt, since: now });
        }
        follows
    }

    /// Several messages can have the same id and attempt: a wait that counts no attempt (for example for a full reply queue) does not
    /// change it, and a job may be published twice. Which of them a delivery follows is unknown, so the delivery waits for all.
    fn has_predecessor(&self, id: &str, attempt: AttemptId) -> bool {
        self.predecessors.iter().any(|known| known.id == id && known.attempt == attempt)
    }

    pub(crate) fn is_held(&self, job: JobKey) -> bool {
        self.held.iter().any(|held| held.job == job)
    }

    /// A delivery that was held back has ended unread.
    pub(crate) fn ended_unread(&mut self, job: JobKey) {
        self.held.retain(|held| held.job != job);
    }

    /// The message of a job is settled. Returns the next attempts that waited only for it.
    pub(crate) fn take_freed_by(&mut self, job: JobKey) -> Vec<JobKey> {
        self.predecessors.retain(|known| known.job != job);
        if self.held.is_empty() {
            return Vec::new();
        }
        let (free, held) = std::mem::take(&mut self.held)
            .into_iter()
            .partition(|held: &Successor| !self.has_predecessor(&held.id, held.attempt));
        self.held = held;
        Self::jobs(free)
    }

    /// Returns the next attempts that have waited for longer than `longest`. They wait no longer.
    pub(crate) fn overdue(&mut self, longest: Duration, now: Instant) -> Vec<JobKey> {
        let is_over = |held: &mut Successor| now.saturating_duration_since(held.since) > longest;
        let over = self.held.extract_if(.., is_over).collect();
        Self::jobs(over)
    }

    /// All jobs are gone with their session.
    pub(crate) fn session_closed(&mut self) {
        *self = Self::default();
    }

    fn jobs(held: Vec<Successor>) -> Vec<JobKey> {
        held.into_iter().map(|held| held.job).collect()
    }
}
