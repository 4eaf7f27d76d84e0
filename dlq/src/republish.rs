//! Builds the messages that an action publishes for a dead letter: the job, its results, or the dead letter itself. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_amqp::{Message, PERSISTENT};
use vramq_schemas::dead_letter::{EXPIRATION, OF_DEAD_LETTERS, REASON, WORKER};
use vramq_schemas::fields::{long, table_bytes, text};
use vramq_schemas::headers::{
    ATTEMPT, BATCH_HINT, BATCH_HINT_MAX, CALLER, CRASHES, DELAYS, EXCLUSIVE, EXPIRES_AT_MS, ITEMS_DONE,
    MODEL_REVISION, MOVED, OF_JOBS, RETRIES, REVISION_WAITS, STORE_WAITS, USER, WAITS,
};
use vramq_schemas::topology::RETRY_EXCHANGE;
use vramq_schemas::withdrawal::DIGEST;
use vramq_schemas::{HEADER_BYTES_MAX, JobHeaders, Reason};

use crate::dead_letter::DeadLetter;

/// RabbitMQ's direct reply-to: the name that a publisher writes. The broker replaces it by the address of the publisher's channel.
/// No queue has a name that begins so.
pub const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

/// Headers that count or describe earlier attempts. A retried job starts without them; otherwise it would be dead-lettered again at once.
const OF_ENDED_ATTEMPTS: [&str; 11] = [
    EXPIRATION,
    ATTEMPT,
    EXCLUSIVE,
    DELAYS,
    EXPIRES_AT_MS,
    BATCH_HINT,
    BATCH_HINT_MAX,
    WAITS,
    REVISION_WAITS,
    STORE_WAITS,
    MOVED,
];

/// An operator's changes to a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The header `batch-hint`, in place of the publisher's.
    pub batch_hint: Option<u32>,
    pub priority: Option<u8>,
    /// How long the job may wait, from the retry on. Without it, a retried job does not expire.
    pub expiration_ms: Option<u32>,
    /// The revision of the model that must run it.
    pub model_revision: Option<String>,
    /// Run items again that are already answered.
    pub from_start: bool,
    /// A queue to publish to instead of the model's.
    pub to: Option<String>,
}

/// Why a dead letter cannot be published.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CannotPublish {
    #[error("its caller used direct reply-to and has disconnected: the results cannot be delivered")]
    CallerLeft,
    #[error("it has no reply queue")]
    NoReplyTo,
    #[error(
        "{0} of its items have results of the revision that it demanded; with --from-start all items are computed by the other one"
    )]
    OtherRevision(u64),
    #[error("its headers take {0} bytes; at most {HEADER_BYTES_MAX} can be published")]
    Headers(usize),
    #[error("the name of its queue is longer than the 255 bytes that AMQP allows")]
    Name,
}

/// # Errors
/// The message does not fit AMQP.
fn checked(
    exchange: &str,
    routing_key: String,
    properties: BasicProperties,
    headers: FieldTable,
    body: Vec<u8>,
) -> Result<Message, CannotPublish> {
    let bytes = table_bytes(&headers);
    if bytes > HEADER_BYTES_MAX {
        return Err(CannotPublish::Headers(bytes));
    }
    let routing_key = ShortString::try_new(routing_key).map_err(|_| CannotPublish::Name)?;
    let (exchange, body) = (exchange.into(), body.into());
    Ok(Message { exchange, routing_key, properties, headers, body, mandatory: true })
}

/// The job in a dead letter, to be run again. Attempts are counted from zero. `history` keeps what happened, and `items-done` which items
/// are answered.
///
/// # Errors
/// The message does not fit AMQP, or the job would get results of two revisions.
pub fn job(letter: DeadLetter, changes: &Changes, now_ms: u64) -> Result<Message, CannotPublish> {
    let done = letter.number(ITEMS_DONE).unwrap_or(0);
    if changes.model_revision.is_some() && !changes.from_start && done > 0 {
        return Err(CannotPublish::OtherRevision(done));
    }
    let crashed = letter.text(REASON).as_deref() == Some(Reason::Crashed.as_str());
    // The publisher may have invented these headers. Republished through the retry exchange, workers would trust them.
    let by_broker = letter.is_by_broker();
    let retries = letter.number_u32(RETRIES).saturating_add(1);
    let hint = match (changes.batch_hint, !by_broker && was_lowered(&letter.headers)) {
        (Some(hint), _) => Some(long(hint.into())),
        (None, true) => letter.headers.inner().get(BATCH_HINT_MAX).cloned(),
        (None, false) => letter.headers.inner().get(BATCH_HINT).cloned(),
    };
    let key = letter.model().to_owned();
    let mut headers = without(&letter.headers, |name| {
        OF_DEAD_LETTERS.contains(&name)
            || OF_ENDED_ATTEMPTS.contains(&name)
            // A job that crashed workers keeps its count: it runs in isolation, so that a crash costs no other job.
            || (name == CRASHES && !crashed)
            || (name == ITEMS_DONE && changes.from_start)
            // Without a digest the caller's withdrawal has no effect: the operator wants the job to run.
            || name == DIGEST
            || (by_broker && OF_JOBS.contains(&name))
            || is_routing(name)
    });
    if let Some(hint) = hint {
        // BATCH_HINT_MAX bounds what a lowered hint grows back to; after an out-of-memory in `history` it would be unbounded.
        headers.insert(BATCH_HINT_MAX.into(), hint.clone());
        headers.insert(BATCH_HINT.into(), hint);
    }
    headers.insert(RETRIES.into(), long(retries.into()));
    if let Some(revision) = &changes.model_revision {
        headers.insert(MODEL_REVISION.into(), text(revision));
    }
    let mut properties = with_reply_to(republished(&letter.properties), &letter.properties);
    if let Some(priority) = changes.priority {
        properties = properties.with_priority(priority);
    }
    if let Some(ms) = changes.expiration_ms {
        // Workers count the expiration from the timestamp.
        properties = properties.with_expiration(ms.to_string().into()).with_timestamp(now_ms / 1000);
    }
    let (exchange, routing_key) = match &changes.to {
        Some(queue) => ("", queue.clone()),
        // Workers trust headers about earlier attempts only from this exchange.
        None => (RETRY_EXCHANGE, key),
    };
    checked(exchange, routing_key, properties, headers, letter.body)
}

/// Whether an out-of-memory has lowered the job's `batch-hint`.
fn was_lowered(headers: &FieldTable) -> bool {
    let history = vramq_schemas::headers::history(headers);
    JobHeaders { history, ..JobHeaders::default() }.last_out_of_memory().is_some()
}

/// The results in a dead letter, for the reply queue that they did not reach, as the worker published them.
///
/// # Errors
/// The message does not fit AMQP, or its caller cannot be reached.
pub fn results(letter: DeadLetter) -> Result<Message, CannotPublish> {
    let reply_to = letter.properties.reply_to().as_ref().map(ShortString::as_str).unwrap_or_default();
    if reply_to.is_empty() {
        return Err(CannotPublish::NoReplyTo);
    }
    if reply_to.starts_with(DIRECT_REPLIES) {
        return Err(CannotPublish::CallerLeft);
    }
    // Replies have the header WORKER too. Only operators may see who published the job.
    let headers = without(&letter.headers, |name| {
        (OF_DEAD_LETTERS.contains(&name) && name != WORKER)
            || [USER, CALLER].contains(&name)
            || is_routing(name)
    });
    let (routing_key, properties) = (reply_to.to_owned(), republished(&letter.properties));
    checked("", routing_key, properties, headers, letter.body)
}

/// The dead letter itself, for the queue that it came from.
///
/// # Errors
/// The message does not fit AMQP.
pub fn unchanged(letter: DeadLetter) -> Result<Message, CannotPublish> {
    let headers = without(&letter.headers, |name| matches!(name, "CC" | "BCC"));
    let mut properties = with_reply_to(republished(&letter.properties), &letter.properties);
    if let Some(expiration) = letter.properties.expiration().clone() {
        properties = properties.with_expiration(expiration);
    }
    checked("", letter.queue, properties, headers, letter.body)
}

/// Headers that route copies to other queues, and those in which the broker counts its own dead-lettering. With the latter, the broker
/// would take a job that passes a delay queue again for a cycle, and drop it.
fn is_routing(name: &str) -> bool {
    matches!(name, "CC" | "BCC")
        || ["x-death", "x-first-death-", "x-last-death-"].iter().any(|of_broker| name.starts_with(of_broker))
}

fn without(table: &FieldTable, left_out: impl Fn(&str) -> bool) -> FieldTable {
    let mut kept = FieldTable::default();
    for (name, value) in table.into_iter().filter(|(name, _)| !left_out(name.as_str())) {
        kept.insert(name.clone(), value.clone());
    }
    kept
}

/// Adds the `reply_to` of a dead letter, except the name by which a publisher asks for direct replies: the broker would replace it by the
/// address of the channel that publishes now.
fn with_reply_to(properties: BasicProperties, of: &BasicProperties) -> BasicProperties {
    match of.reply_to() {
        Some(queue) if queue.as_str() != DIRECT_REPLIES => properties.with_reply_to(queue.clone()),
        _ => properties,
    }
}

/// The properties without headers, `reply_to` and `expiration`, which callers set, and without `user_id`: the broker closes the
/// channel if it differs from the publisher's user.
fn republished(of: &BasicProperties) -> BasicProperties {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    macro_rules! keep {
        ($($get:ident => $with:ident),*) => {
            $(if let Some(value) = of.$get() { properties = properties.$with(value.clone()); })*
        };
    }
    keep!(
        content_type => with_content_type, content_encoding => with_content_encoding, priority => with_priority,
        correlation_id => with_correlation_id, message_id => with_message_id, timestamp => with_timestamp,
        kind => with_type, app_id => with_app_id, cluster_id => with_cluster_id
    );
    properties
}

#[cfg(test)]
#[path = "republish_tests.rs"]
mod tests;
