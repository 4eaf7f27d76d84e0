//! The dead letters of a model for the operators' page. The gateway reads them without removing them.

use std::time::Duration;

use lapin::Connection;
use lapin::options::{BasicGetOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use serde::Serialize;
use tokio::time::sleep;
use vramq_amqp::{Depth, queue_depth};
use vramq_dlq::dead_letter::{DeadLetter, Group, Summary};
use vramq_dlq::explain::explain;
use vramq_dlq::groups::{Count, Groups};
use vramq_schemas::dead_letter::NEEDS_BYTES;
use vramq_schemas::topology::dead_queue;

/// Dead letters that are shown: a page with more is slow to read, for browsers and for people.
pub const SHOWN_MAX: usize = 200;

/// The longest error text that is shown, in characters.
const ERROR_CHARS_MAX: usize = 600;

/// How often the broker is asked whether it has put back what was read: it takes some milliseconds.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// One dead letter, without its body.
#[derive(Clone, Debug, Serialize)]
pub struct LetterView {
    /// Identifies the dead letter, even without a message id. Actions select letters by it.
    pub fingerprint: String,
    pub group: String,
    pub job: String,
    pub reason: String,
    pub error: String,
    pub dead_at_ms: Option<u64>,
    pub worker: String,
    pub attempts: u32,
    pub retries: u32,
    /// It holds results that could not be delivered, not a job.
    pub results: bool,
    pub body_bytes: usize,
    pub needs_bytes: Option<u64>,
    pub explanation: Vec<Paragraph>,
}

/// A paragraph of the explanation of a dead letter.
#[derive(Clone, Debug, Serialize)]
pub struct Paragraph {
    pub heading: &'static str,
    pub lines: Vec<String>,
}

/// Dead letters with the same reason, model and version of the worker.
#[derive(Clone, Debug, Serialize)]
pub struct GroupView {
    /// `REASON/MODEL/VERSION`, as actions take it.
    pub group: String,
    pub reason: String,
    pub worker_version: String,
    pub letters: u64,
    pub retried: u64,
    pub results: u64,
    pub oldest_ms: Option<u64>,
    pub newest_ms: Option<u64>,
}

/// The content of a dead queue.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Letters {
    pub total: u64,
    /// Of the letters that were read, the largest first.
    pub groups: Vec<GroupView>,
    /// The oldest ones.
    pub letters: Vec<LetterView>,
}

/// Collects what is shown of letters that are read one by one.
#[derive(Debug, Default)]
pub struct Collected {
    groups: Groups,
    letters: Vec<LetterView>,
}

impl Collected {
    /// Counts the next letter, and shows it if it is among the oldest [`SHOWN_MAX`].
    pub fn add(&mut self, letter: &DeadLetter) {
        let summary = letter.summary();
        self.groups.add(&summary);
        if self.letters.len() < SHOWN_MAX {
            self.letters.push(view(letter, summary));
        }
    }

    /// All of it, of a queue with so many letters.
    pub fn finish(self, total: u64) -> Letters {
        let groups = self.groups.sorted().into_iter().map(|(group, count)| group_view(group, count));
        Letters { total, groups: groups.collect(), letters: self.letters }
    }
}

fn view(letter: &DeadLetter, summary: Summary) -> LetterView {
    let paragraphs = explain(letter).into_iter().map(|(heading, lines)| Paragraph { heading, lines });
    LetterView {
        fingerprint: summary.fingerprint.to_string(),
        group: summary.group.to_string(),
        job: summary.id.unwrap_or_default(),
        reason: summary.group.reason,
        error: letter.cause().error.chars().take(ERROR_CHARS_MAX).collect(),
        dead_at_ms: summary.dead_at_ms,
        worker: summary.worker.unwrap_or_default(),
        attempts: summary.attempts,
        retries: summary.retries,
        results: summary.results.is_some(),
        body_bytes: summary.body_bytes,
        needs_bytes: letter.number(NEEDS_BYTES),
        explanation: paragraphs.collect(),
    }
}

fn group_view(group: &Group, count: &Count) -> GroupView {
    GroupView {
        group: group.to_string(),
        reason: group.reason.clone(),
        worker_version: group.version.clone(),
        letters: count.dead_letters,
        retried: count.retried,
        results: count.results,
        oldest_ms: count.oldest_ms,
        newest_ms: count.newest_ms,
    }
}

/// Reads the oldest letters, then closes the channel, so that the broker puts them back in their places. The queue has no delivery limit,
/// so reading never drops a letter.
///
/// # Errors
/// The broker's: no such queue, no permission, no connection.
pub async fn read(connection: &Connection, model: &str) -> lapin::Result<Letters> {
    let channel = connection.create_channel().await?;
    let queue = dead_queue(model);
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let total =
        channel.queue_declare(queue.as_str().into(), passive, FieldTable::default()).await?.message_count();
    let mut collected = Collected::default();
    for _ in 0..SHOWN_MAX {
        let got = channel.basic_get(queue.as_str().into(), BasicGetOptions::default()).await?;
        let Some(message) = got else { break };
        let lapin::message::Delivery { properties, data, .. } = message.delivery;
        collected.add(&DeadLetter::new(&queue, properties, data));
    }
    channel.close(200, "looked".into()).await?;
    Ok(collected.finish(total.into()))
}

/// Waits until the queue has so many messages again. The broker puts back what was read a little after it has closed the channel, and the next
/// reader would miss it.
///
/// # Errors
/// The broker's.
pub(super) async fn until_put_back(connection: &Connection, model: &str, total: u64) -> lapin::Result<()> {
    let queue = dead_queue(model);
    while let Depth::Messages { ready, .. } = queue_depth(connection, &queue).await?
        && u64::from(ready) < total
    {
        sleep(LOOK_EVERY).await;
    }
    Ok(())
}
