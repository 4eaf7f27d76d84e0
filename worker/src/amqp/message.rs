//! The messages that a worker publishes, built from the job that they are about. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_schemas::dead_letter::EXPIRATION;
use vramq_schemas::fields::{self, value_bytes};
use vramq_schemas::headers::{self, TRACEPARENT};
use vramq_schemas::topology::{
    DEAD_EXCHANGE, DELAYS_MS, JOBS_EXCHANGE, dead_queue, delay, jobs_queue, suspects_queue,
};
use vramq_schemas::{
    BODY_BYTES_MAX, DeadLetter, Encoding, Failure, JobHeaders, Output, Outputs, Reason, ReplyHeaders,
    ReplyKind, Traceparent, codec,
};

use crate::amqp::direct_address::{self, DIRECT_REPLIES};
use crate::amqp::wire_size::wire_bytes;
use crate::drill::Point;
use crate::job::{Received, Results, unix_ms};
use crate::model::Model;
use crate::refusal::Refusal;

/// Replies are cut into parts of about this many bytes, and a part goes out as soon as so much of a job is finished:
/// large enough that framing costs nothing, small enough that a caller sees progress every few hundred texts and that
/// finished items do not pile up here; far below the body cap.
pub const PART_BYTES: usize = 1024 * 1024;

/// The most bytes of headers that a message is published with. Headers have to fit one frame (128 KiB by default)
/// with the other properties; above that the broker closes the connection.
const HEADER_BYTES_MAX: usize = 100 * 1024;

/// The most bytes of headers that a job may have. The broker adds its own to a job that comes again (`x-delivery-count`,
/// `x-death`), also beyond the frame, and lapin ends the session over a frame that is too large: so a job that leaves no room
/// for them ends the first time it comes.
pub const JOB_HEADER_BYTES_MAX: usize = 120 * 1024;

/// The most bytes that [`DeadLetter`] and [`JobHeaders`] write; room for them is made among foreign headers.
const OWN_HEADER_BYTES: usize = 16 * 1024;

/// The priorities that a job is given for another attempt: above its own, so that it does not wait behind the whole
/// backlog once more. Quorum queues of RabbitMQ 4 have two levels, of which the upper one starts at 5.
const PRIORITY_AGAIN_MIN: u8 = 5;
const PRIORITY_MAX: u8 = 9;

const PERSISTENT: u8 = 2;

/// Who publishes: named in replies and dead letters.
#[derive(Clone, Debug)]
pub struct Identity {
    pub worker: String,
    pub version: &'static str,
}

/// A message to publish; always persistent.
#[derive(Clone, Debug)]
pub struct Message {
    /// Empty for the default exchange, which routes to the queue that the routing key names.
    pub exchange: ShortString,
    pub routing_key: ShortString,
    /// All but the headers.
    pub properties: BasicProperties,
    pub headers: FieldTable,
    pub body: Vec<u8>,
}

impl Message {
    /// Where a drill may strike when it is published: before the confirm, and after it.
    pub fn drill_points(&self) -> (Point, Point) {
        let kind = self.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str()));
        match kind {
            _ if self.exchange.as_str() == DEAD_EXCHANGE => (Point::SentLetter, Point::ConfirmedLetter),
            Some(ReplyKind::Part) => (Point::SentPart, Point::ConfirmedPart),
            Some(_) => (Point::SentReply, Point::ConfirmedReply),
            None => (Point::SentJob, Point::ConfirmedJob),
        }
    }

    /// Whether it goes to a caller's channel rather than to a queue (RabbitMQ's direct reply-to).
    pub fn is_direct_reply(&self) -> bool {
        self.exchange.as_str().is_empty() && direct_address::is_direct(self.routing_key.as_str())
    }
}

/// Why no reply may be sent there, if so: it would come back as a job, or crash the broker's channel that it is published on.
pub fn reply_to_fault(name: &str) -> Option<String> {
    if is_internal_queue(name) {
        return Some("which is no queue for replies".to_owned());
    }
    let forgery = direct_address::check(name).err()?;
    Some(format!("an address for direct replies that no broker made: {forgery}"))
}

/// Whether replies to it would reach nobody: a queue that the worker itself consumes or fills, from which a reply would
/// come back as a job; or what the broker replaces by a caller's own address, when it has not.
pub fn is_internal_queue(name: &str) -> bool {
    let ours = [jobs_queue(""), suspects_queue(""), dead_queue(""), "vramq.delay.".to_owned()];
    ours.iter().any(|prefix| name.starts_with(prefix)) || name == DIRECT_REPLIES
}

/// Where a job's replies go, and what each of them repeats of the job.
#[derive(Debug)]
pub struct Address {
    pub encoding: Encoding,
    routing_key: ShortString,
    /// All but type and timestamp.
    properties: BasicProperties,
    trace: Option<Traceparent>,
}

impl Address {
    pub fn of(received: &Received, model: &Model, encoding: Encoding) -> Self {
        let of_job = &received.delivery.properties;
        let mut properties = BasicProperties::default()
            .with_delivery_mode(PERSISTENT)
            .with_content_type(encoding.content_type().into());
        if let Some(id) = of_job.message_id() {
            properties = properties.with_message_id(id.clone());
        }
        if let Some(id) = of_job.correlation_id().as_ref().or(of_job.message_id().as_ref()) {
            properties = properties.with_correlation_id(id.clone());
        }
        let reply_to = of_job.reply_to().clone().filter(|queue| !queue.as_str().is_empty());
        Self {
            encoding,
            routing_key: reply_to.unwrap_or_else(|| model.reply_queue.as_str().into()),
            properties,
            trace: received.trace.clone(),
        }
    }

    fn reply(&self, kind: ReplyKind, mut headers: FieldTable, body: Vec<u8>) -> Message {
        if let Some(trace) = &self.trace {
            headers.insert(TRACEPARENT.into(), fields::text(trace.as_str()));
        }
        let properties =
            self.properties.clone().with_type(kind.as_str().into()).with_timestamp(unix_ms() / 1000);
        Message { exchange: "".into(), routing_key: self.routing_key.clone(), properties, headers, body }
    }
}

/// The replies with a finished run: `part`s, and if nothing comes after it, `done` at the end. None for an empty run
/// that is not the last.
///
/// # Errors
/// [`Refusal`] when one item's output alone is above the body cap.
pub fn replies(results: Results, model: &Model, identity: &Identity) -> Result<Vec<Message>, Refusal> {
    let Results { address, mut offset, outputs: mut left, .. } = results;
    let mut messages = Vec::with_capacity(1);
    while !left.is_empty() || (results.last && messages.is_empty()) {
        let rest = left.split_off(items_within(&left, address.encoding));
        let kind = if results.last && rest.is_empty() { ReplyKind::Done } else { ReplyKind::Part };
        let items = u32::try_from(left.len()).unwrap_or(u32::MAX);
        let reply = ReplyHeaders {
            offset,
            items,
            items_total: results.items_total,
            attempt: results.attempt,
            worker: identity.worker.clone(),
            queued_ms: millis(results.queued),
            ran_ms: millis(results.first_pass_at.elapsed()),
        };
        let body = codec::encode(&Outputs { model: model.name.clone(), outputs: left }, address.encoding)
            .map_err(|e| Refusal::new(Reason::EngineFailed, e.to_string()))?;
        if body.len() > BODY_BYTES_MAX {
            let error =
                format!("the output takes {} bytes, a reply holds at most {BODY_BYTES_MAX}", body.len());
            return Err(Refusal::new(Reason::TooLarge, error));
        }
        messages.push(address.reply(kind, reply.to_table(), body));
        offset += items;
        left = rest;
    }
    Ok(messages)
}

/// How many outputs from the start fit one reply: at least 1, if there is one.
fn items_within(outputs: &[Output], encoding: Encoding) -> usize {
    let mut bytes = 0;
    let fitting = outputs.iter().take_while(|output| {
        bytes += wire_bytes(output, encoding);
        bytes <= PART_BYTES
    });
    fitting.count().max(outputs.len().min(1))
}

/// The `failed` reply that goes out besides a dead letter, so that no caller hangs. `None` if the job says neither
/// where to nor, by the model's default queue, has a place for it.
pub fn failed(received: &Received, model: &Model, identity: &Identity, refusal: &Refusal) -> Option<Message> {
    let properties = &received.delivery.properties;
    let encoding = Encoding::of(properties.content_type().as_ref().map(|t| t.as_str())).unwrap_or_default();
    if properties.reply_to().as_ref().is_some_and(|queue| reply_to_fault(queue.as_str()).is_some()) {
        return None;
    }
    let failure = Failure { reason: refusal.reason, error: refusal.error.clone() };
    let body = codec::encode(&failure, encoding).ok()?;
    let mut table = FieldTable::default();
    table.insert(headers::WORKER.into(), fields::text(&identity.worker));
    Some(Address::of(received, model, encoding).reply(ReplyKind::Failed, table, body))
}

/// A job on its way to the dead letters: the body as it came, the properties as they came, the reason in headers; and, if
/// the job was understood, how far it came.
pub fn dead_letter(
    received: &Received,
    reached: Option<&JobHeaders>,
    model: &Model,
    identity: &Identity,
    refusal: &Refusal,
) -> Message {
    let of_job = &received.delivery.properties;
    let mut headers = foreign_headers(of_job, reached.is_some());
    if let Some(reached) = reached {
        reached.write(&mut headers);
    }
    if let Some(expiration) = of_job.expiration() {
        headers.insert(EXPIRATION.into(), fields::text(expiration.as_str()));
    }
    epitaph(identity, refusal).write(&mut headers);
    Message {
        exchange: DEAD_EXCHANGE.into(),
        routing_key: model.key.as_str().into(),
        properties: republished(of_job),
        headers,
        body: received.delivery.data.clone(),
    }
}

/// A reply that nobody could be given, on its way to the dead letters beside its job, so that the results are kept.
pub fn dead_reply(mut reply: Message, model: &Model, identity: &Identity, refusal: &Refusal) -> Message {
    epitaph(identity, refusal).write(&mut reply.headers);
    Message {
        exchange: DEAD_EXCHANGE.into(),
        properties: reply.properties.with_reply_to(reply.routing_key),
        routing_key: model.key.as_str().into(),
        headers: reply.headers,
        body: reply.body,
    }
}

fn epitaph(identity: &Identity, refusal: &Refusal) -> DeadLetter {
    DeadLetter {
        reason: refusal.reason,
        error: refusal.error.clone(),
        dead_at_ms: unix_ms(),
        worker: identity.worker.clone(),
        worker_version: identity.version.to_owned(),
        misfit: refusal.misfit,
    }
}

/// Where a job goes for another attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Onward {
    /// Back to its queue.
    Queue,
    /// Back to its queue after so many milliseconds.
    Delay(u64),
    /// To the suspects, which run alone.
    Suspects,
    /// To workers with larger devices: those that take jobs with this routing key.
    Larger(String),
}

/// A job on its way to another attempt. Without the property `expiration`, which would start anew, and by which the broker
/// would drop the job without a word to the caller: the worker that takes it looks at `expires-at-ms`.
pub fn requeue(received: &Received, model: &Model, next: &JobHeaders, onward: &Onward) -> Message {
    let of_job = &received.delivery.properties;
    let mut headers = foreign_headers(of_job, true);
    let expires_at_ms = received.expires_at_ms();
    JobHeaders { expires_at_ms, ..next.clone() }.write(&mut headers);
    let mut properties = republished(of_job);
    if matches!(onward, Onward::Queue | Onward::Delay(_)) {
        let own = of_job.priority().unwrap_or(0);
        properties = properties.with_priority(own.saturating_add(1).clamp(PRIORITY_AGAIN_MIN, PRIORITY_MAX));
    }
    let key = model.key.as_str().into();
    let (exchange, routing_key) = match onward {
        Onward::Queue => (JOBS_EXCHANGE.into(), key),
        Onward::Suspects => ("".into(), suspects_queue(&model.key).into()),
        Onward::Delay(ms) => (delay(*ms).into(), key),
        Onward::Larger(key) => (JOBS_EXCHANGE.into(), key.as_str().into()),
    };
    Message { exchange, routing_key, properties, headers, body: received.delivery.data.clone() }
}

/// A job on its way to another attempt, by way of the shortest wait, wherever it was to go: from there it comes to the jobs
/// of its model.
pub fn delayed(job: Message, model: &Model) -> Message {
    Message { exchange: delay(DELAYS_MS[0]).into(), routing_key: model.key.as_str().into(), ..job }
}

/// The properties of a job that is published again: all but headers and `expiration`, which the caller decides on, and
/// `user_id`, because the broker closes the channel of a publisher that is somebody else.
fn republished(of_job: &BasicProperties) -> BasicProperties {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    macro_rules! keep {
        ($($get:ident => $with:ident),*) => {
            $(if let Some(value) = of_job.$get() { properties = properties.$with(value.clone()); })*
        };
    }
    keep!(
        content_type => with_content_type, content_encoding => with_content_encoding, priority => with_priority,
        correlation_id => with_correlation_id, reply_to => with_reply_to, message_id => with_message_id,
        timestamp => with_timestamp, kind => with_type, app_id => with_app_id
    );
    if of_job.reply_to().as_ref().is_some_and(|queue| queue.as_str() == DIRECT_REPLIES) {
        // There is no way to publish it, and it says nothing.
        properties = properties.with_reply_to("".into());
    }
    properties
}

/// The headers of a job that is published again, without those that would route copies of it elsewhere, and cut to
/// what fits a frame with ours: the largest go first. `anew` leaves out those that an attempt writes anew.
fn foreign_headers(of_job: &BasicProperties, anew: bool) -> FieldTable {
    let Some(table) = of_job.headers() else {
        return FieldTable::default();
    };
    let mut sized: Vec<_> = table
        .into_iter()
        .filter(|(name, _)| !matches!(name.as_str(), "CC" | "BCC"))
        .filter(|(name, _)| !(anew && is_of_attempt(name.as_str())))
        .map(|(name, value)| (1 + name.as_str().len() + value_bytes(value), name, value))
        .collect();
    sized.sort_by_key(|(bytes, ..)| *bytes);
    let mut room = HEADER_BYTES_MAX - OWN_HEADER_BYTES;
    let mut kept = FieldTable::default();
    for (bytes, name, value) in sized {
        let Some(left) = room.checked_sub(bytes) else {
            tracing::warn!(header = name.as_str(), bytes, "header too large to publish again, dropped");
            continue;
        };
        room = left;
        kept.insert(name.clone(), value.clone());
    }
    kept
}

/// Headers that an attempt writes anew, or the broker: of what it dead-lettered before, it would take a job that goes
/// through a delay queue for one that goes round in circles.
fn is_of_attempt(name: &str) -> bool {
    headers::OF_JOBS.contains(&name)
        || ["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count"]
            .iter()
            .any(|of_broker| name.starts_with(of_broker))
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_the_broker_has_not_filled_in_is_not_published() {
        assert!(is_internal_queue("amq.rabbitmq.reply-to"));
        assert!(!is_internal_queue("amq.rabbitmq.reply-to.g1h2"));
        let job = |queue: &str| BasicProperties::default().with_reply_to(queue.into());
        for (queue, kept) in
            [("amq.rabbitmq.reply-to", ""), ("amq.rabbitmq.reply-to.g1h2", "amq.rabbitmq.reply-to.g1h2")]
        {
            let again = republished(&job(queue));
            assert_eq!(again.reply_to().as_ref().map(|queue| queue.as_str()), Some(kept));
        }
    }

    #[test]
    fn only_replies_to_a_channel_are_not_mandatory() {
        let to = |exchange: &str, key: &str| Message {
            exchange: exchange.into(),
            routing_key: key.into(),
            properties: BasicProperties::default(),
            headers: FieldTable::default(),
            body: Vec::new(),
        };
        assert!(to("", "amq.rabbitmq.reply-to.g1h2").is_direct_reply());
        for (exchange, key) in
            [("", "amq.rabbitmq.reply-to"), ("", "replies"), (JOBS_EXCHANGE, "amq.rabbitmq.reply-to.x")]
        {
            assert!(!to(exchange, key).is_direct_reply());
        }
    }
}
