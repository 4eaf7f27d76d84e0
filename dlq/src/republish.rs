//! Builds the messages that an action publishes for a dead letter: the job, its results, or the dead letter itself. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_amqp::Message;
use vramq_schemas::dead_letter::{EXPIRATION, OF_DEAD_LETTERS, REASON, WORKER};
use vramq_schemas::fields::{long, table_bytes};
use vramq_schemas::headers::{
    ATTEMPT, BATCH_HINT, BATCH_HINT_MAX, CALLER, CRASHES, DELAYS, EXCLUSIVE, EXPIRES_AT_MS, ITEMS_DONE,
    MOVED, OF_JOBS, RETRIES, REVISION_WAITS, STORE_WAITS, USER, WAITS,
};
use vramq_schemas::topology::RETRY_EXCHANGE;
use vramq_schemas::withdrawal::DIGEST;
use vramq_schemas::{JobHeaders, Reason};

use crate::dead_letter::DeadLetter;

/// The delivery mode of messages that survive a restart of the broker.
const PERSISTENT: u8 = 2;

/// The most bytes of headers that are published: they share a frame of 128 KiB with the other properties, and the broker
/// closes the connection over more.
const HEADER_BYTES_MAX: usize = 120 * 1024;

/// RabbitMQ's direct reply-to: the name that a publisher writes. The broker replaces it by the address of the publisher's channel.
const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

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
    pub batch_hint: Option<u32>,
    pub priority: Option<u8>,
    pub expiration_ms: Option<u32>,
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
pub fn job(letter: DeadLetter, changes: &Changes, now_ms: u64) -> Result<Message, CannotPublish> {
    let crashed = letter.text(REASON).as_deref() == Some(Reason::Crashed.as_str());
    // The publisher may have invented these headers. Republished through the retry exchange, workers would trust them.
    let by_broker = letter.is_by_broker();
    let retries = letter.count(RETRIES).saturating_add(1);
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
pub fn letter(letter: DeadLetter) -> Result<Message, CannotPublish> {
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
mod tests {
    use super::*;
    use crate::dead_letter::tests::written;
    use lapin::types::AMQPValue;
    use vramq_schemas::{Attempt, fields};

    fn out_of_memory(hint_max: Option<u32>) -> DeadLetter {
        written("a", Reason::OutOfMemory, |table| {
            let attempt = Attempt { outcome: "out-of-memory".to_owned(), items: 8, ..Attempt::default() };
            JobHeaders {
                batch_hint: Some(1),
                batch_hint_max: hint_max,
                attempt: 4,
                items_done: 7,
                exclusive: true,
                history: vec![attempt],
                delays: 3,
                expires_at_ms: Some(5),
                crashes: 2,
                waits: 2,
                revision_waits: 2,
                store_waits: 2,
                moved: true,
                queue: Some("team-a.jobs".to_owned()),
            }
            .write(table);
            for (name, value) in [("mine", 1), ("item", 3), ("x-last-death-queue", 1), ("CC", 1), (DIGEST, 1)]
            {
                table.insert(name.into(), AMQPValue::LongLongInt(value));
            }
            table.insert(EXPIRATION.into(), AMQPValue::LongString("1000".into()));
        })
    }

    fn names(headers: &FieldTable) -> Vec<&str> {
        headers.into_iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn a_retried_job_keeps_its_history_and_its_answers() {
        let sent = job(out_of_memory(Some(20)), &Changes::default(), 0).unwrap();
        assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), (RETRY_EXCHANGE, "minilm"));
        assert_eq!(
            names(&sent.headers),
            ["batch-hint", "batch-hint-max", "history", "items-done", "mine", "vramq-queue", "vramq-retries"]
        );
        let read = JobHeaders::read(&sent.headers).unwrap();
        assert_eq!((read.batch_hint, read.batch_hint_max, read.items_done), (Some(20), Some(20), 7));
        assert_eq!((read.attempt, read.exclusive, read.delays, read.crashes), (0, false, 0, 0));
        assert_eq!((read.waits, read.revision_waits, read.store_waits, read.moved), (0, 0, 0, false));
        assert_eq!(fields::integer(sent.headers.inner().get(RETRIES)), Some(1));
        assert_eq!(*sent.properties.delivery_mode(), Some(2));
    }

    #[test]
    fn the_publishers_own_hint_comes_back() {
        let hint = |letter, changes: &Changes| {
            let read = JobHeaders::read(&job(letter, changes, 0).unwrap().headers).unwrap();
            (read.batch_hint, read.batch_hint_max)
        };
        let set = Changes { batch_hint: Some(4), ..Changes::default() };
        assert_eq!(hint(out_of_memory(None), &Changes::default()), (None, None));
        assert_eq!(hint(out_of_memory(Some(9)), &Changes::default()), (Some(9), Some(9)));
        assert_eq!(hint(out_of_memory(Some(9)), &set), (Some(4), Some(4)));
        let never_lowered = written("a", Reason::EngineFailed, |table| {
            table.insert(BATCH_HINT.into(), AMQPValue::LongLongInt(6));
        });
        assert_eq!(hint(never_lowered, &Changes::default()), (Some(6), Some(6)));
    }

    #[test]
    fn what_an_operator_changes() {
        let changes = Changes {
            priority: Some(7),
            expiration_ms: Some(60_000),
            from_start: true,
            to: Some("elsewhere".to_owned()),
            ..Changes::default()
        };
        let sent = job(out_of_memory(None), &changes, 5_000).unwrap();
        assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "elsewhere"));
        assert_eq!(sent.headers.inner().get(ITEMS_DONE), None);
        let p = &sent.properties;
        assert_eq!((*p.priority(), *p.timestamp()), (Some(7), Some(5)));
        assert_eq!(p.expiration().as_ref().map(ShortString::as_str), Some("60000"));
    }

    #[test]
    fn a_job_that_crashed_workers_keeps_its_count() {
        let crashed = written("a", Reason::Crashed, |table| {
            table.insert(CRASHES.into(), AMQPValue::LongLongInt(2));
        });
        let sent = job(crashed, &Changes::default(), 0).unwrap();
        assert_eq!(JobHeaders::read(&sent.headers).unwrap().crashes, 2);
    }

    #[test]
    fn a_message_that_the_broker_dead_lettered_loses_the_headers_of_workers() {
        let deaths = crate::dead_letter::tests::dead_lettered_by_broker("expired").headers;
        for forges_reason in [false, true] {
            let mut letter = out_of_memory(Some(20));
            letter.headers.insert(CALLER.into(), AMQPValue::LongString("victim".into()));
            letter.headers.insert("x-death".into(), deaths.inner()["x-death"].clone());
            if !forges_reason {
                letter.headers = without(&letter.headers, |name| name == REASON);
            }
            let sent = job(letter, &Changes::default(), 0).unwrap();
            assert_eq!(names(&sent.headers), ["batch-hint", "batch-hint-max", "mine", "vramq-retries"]);
        }
    }

    #[test]
    fn retries_are_counted() {
        let mut letter = out_of_memory(None);
        for n in 1..4 {
            let sent = job(letter.clone(), &Changes::default(), 0).unwrap();
            assert_eq!(fields::integer(sent.headers.inner().get(RETRIES)), Some(n));
            letter.headers = sent.headers;
        }
    }

    #[test]
    fn results_go_to_their_reply_queue_unchanged() {
        let letter = |reply_to: &str| {
            let letter = written("a", Reason::Unroutable, |table| {
                table.insert("offset".into(), AMQPValue::LongLongInt(0));
                table.insert("items".into(), AMQPValue::LongLongInt(2));
            });
            let properties = letter.properties.with_type("done".into()).with_reply_to(reply_to.into());
            DeadLetter { properties, ..letter }
        };
        let sent = results(letter("replies")).unwrap();
        assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "replies"));
        assert_eq!(names(&sent.headers), ["items", "offset", "worker"]);
        assert_eq!(sent.properties.reply_to(), &None);
        assert_eq!(sent.properties.kind().as_ref().map(ShortString::as_str), Some("done"));
        assert_eq!(results(letter("")), Err(CannotPublish::NoReplyTo));
        assert_eq!(results(letter("amq.rabbitmq.reply-to.g1h2")), Err(CannotPublish::CallerLeft));
    }

    #[test]
    fn a_restored_dead_letter_is_unchanged() {
        let before = out_of_memory(None);
        let fingerprint = before.fingerprint();
        let user = before.properties.clone().with_user_id("somebody".into());
        let sent = letter(DeadLetter { properties: user, ..before.clone() }).unwrap();
        assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "vramq.dead.minilm"));
        assert_eq!(sent.properties.user_id(), &None);
        let back =
            DeadLetter::new(&before.queue, sent.properties.with_headers(sent.headers), sent.body.to_vec());
        assert_eq!(back.fingerprint(), fingerprint);
    }

    #[test]
    fn headers_that_fit_no_frame_are_not_published() {
        let large = written("a", Reason::Malformed, |table| {
            table.insert("large".into(), AMQPValue::LongString(vec![b'x'; HEADER_BYTES_MAX].into()));
        });
        assert!(matches!(job(large.clone(), &Changes::default(), 0), Err(CannotPublish::Headers(_))));
        assert!(matches!(letter(large), Err(CannotPublish::Headers(_))));
    }
}
