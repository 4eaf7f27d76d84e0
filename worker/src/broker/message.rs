//! The messages that a worker publishes, built from the job that they are about. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_core::action::{Route, Run};
use vramq_core::rejection::Rejection;
use vramq_schemas::dead_letter::{EXPIRATION, OF_DEAD_LETTERS};
use vramq_schemas::fields::{self, value_bytes};
use vramq_schemas::headers::{self, MODEL_REVISION, TOKENS};
use vramq_schemas::topology::{DEAD_EXCHANGE, RETRY_EXCHANGE, bulk_key, delay_key, quarantine_key};
use vramq_schemas::{
    BODY_BYTES_MAX, DeadLetter, Encoding, Failure, ItemProgress, JobHeaders, Outputs, Reason, ReplyHeaders,
    ReplyKind, codec,
};

use super::received::ReceivedJob;
use crate::failpoint::Site;
use crate::identity::Identity;
use crate::model::Model;
use crate::publishers::direct_address::{DIRECT_REPLIES, is_direct};
use crate::run_outputs::RunOutputs;
use crate::unix_ms;
use crate::wire_size::items_within;

/// The most bytes of headers that a message is published with. Headers have to fit one frame (128 KiB by default)
/// with the other properties; above that the broker closes the connection.
const HEADER_BYTES_MAX: usize = 100 * 1024;

/// The most bytes of headers that a job may have. The broker adds its own to a job that it delivers again
/// (`x-delivery-count`, `x-death`), also beyond the frame. A job that leaves no space for them is rejected the first time it is
/// delivered, before clients get it that end their session over such a frame. A worker takes it (`third-party/lapin`).
pub const JOB_HEADER_BYTES_MAX: usize = 120 * 1024;

/// The most bytes that [`DeadLetter`] and [`JobHeaders`] write; foreign headers are dropped to make space for them.
const OWN_HEADER_BYTES: usize = 16 * 1024;

/// The priorities that a job is raised to when it is tried again, so that it does not wait behind the whole backlog once
/// more. Quorum queues of RabbitMQ 4.0 to 4.2 have two levels, of which the upper one starts at 5; from 4.3 on a job without a
/// priority counts as one of 4. Classic queues have levels up to 9.
const PRIORITY_AGAIN_MIN: u8 = 5;
const PRIORITY_AGAIN_MAX: u8 = 9;

const PERSISTENT: u8 = 2;
const TRANSIENT: u8 = 1;

/// The expiration of a `progress` reply, in milliseconds, so that a caller who is away finds results in its queue, and not many
/// old reports of progress.
const PROGRESS_EXPIRATION_MS: &str = "30000";

/// A message to publish; persistent, but for `progress`.
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
    /// The failpoints that publishing it reaches: before the confirm, and after it.
    pub fn failpoints(&self) -> (Site, Site) {
        let kind = self.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str()));
        match kind {
            _ if self.exchange.as_str() == DEAD_EXCHANGE => (Site::SentLetter, Site::ConfirmedLetter),
            Some(ReplyKind::Part | ReplyKind::Progress) => (Site::SentPart, Site::ConfirmedPart),
            Some(_) => (Site::SentReply, Site::ConfirmedReply),
            None => (Site::SentJob, Site::ConfirmedJob),
        }
    }

    /// Where it goes, in words: the queue, or the exchange with the routing key.
    pub fn destination(&self) -> String {
        match self.exchange.as_str() {
            "" => self.routing_key.to_string(),
            exchange => format!("{exchange} with the key {}", self.routing_key),
        }
    }

    /// Whether it is a reply; all else goes to exchanges of the workers' own.
    pub fn is_for_caller(&self) -> bool {
        self.exchange.as_str().is_empty()
    }

    /// Whether it goes to a caller's channel rather than to a queue (RabbitMQ's direct reply-to).
    pub fn is_direct_reply(&self) -> bool {
        self.exchange.as_str().is_empty() && is_direct(self.routing_key.as_str())
    }
}

/// Where a job's replies go, and what each of them repeats of the job.
#[derive(Clone, Copy, Debug)]
pub struct ReplyAddress<'a> {
    pub encoding: Encoding,
    received: &'a ReceivedJob,
    /// Of jobs without a `reply_to`.
    default_queue: &'a str,
}

impl<'a> ReplyAddress<'a> {
    pub fn of(received: &'a ReceivedJob, model: &'a Model, encoding: Encoding) -> Self {
        Self { encoding, received, default_queue: &model.reply_queue }
    }

    fn reply(&self, kind: ReplyKind, mut headers: FieldTable, body: Vec<u8>) -> Message {
        if let Some(trace) = &self.received.summary.trace {
            trace.write(&mut headers);
        }
        Message {
            exchange: "".into(),
            routing_key: self.queue(),
            properties: self.properties(kind),
            headers,
            body,
        }
    }

    fn queue(&self) -> ShortString {
        let reply_to = self.received.delivery.properties.reply_to().as_ref();
        reply_to
            .filter(|queue| !queue.as_str().is_empty())
            .cloned()
            .unwrap_or_else(|| self.default_queue.into())
    }

    fn properties(&self, kind: ReplyKind) -> BasicProperties {
        let of_job = &self.received.delivery.properties;
        let mut properties = BasicProperties::default()
            .with_delivery_mode(PERSISTENT)
            .with_content_type(self.encoding.content_type().into())
            .with_type(kind.as_str().into())
            .with_timestamp(unix_ms() / 1000);
        if let Some(id) = of_job.message_id() {
            properties = properties.with_message_id(id.clone());
        }
        if let Some(id) = of_job.correlation_id().as_ref().or(of_job.message_id().as_ref()) {
            properties = properties.with_correlation_id(id.clone());
        }
        if let Some(app) = of_job.app_id() {
            properties = properties.with_app_id(app.clone());
        }
        properties
    }
}

/// The replies with a run of outputs: `part`s, and if nothing comes after the run, `done` at the end. None for an empty run
/// that is not the last.
///
/// # Errors
/// [`Rejection`] when one item's output alone is above the body cap, or more than a client reads.
pub fn replies(
    run: Run,
    of_run: RunOutputs,
    address: ReplyAddress<'_>,
    model: &Model,
    identity: &Identity,
) -> Result<Vec<Message>, Rejection> {
    let RunOutputs { outputs: mut left, mut tokens } = of_run;
    let mut offset = run.offset;
    let mut messages = Vec::with_capacity(1);
    let revision = model.engine.revision();
    while !left.is_empty() || (run.is_last && messages.is_empty()) {
        let rest = left.split_off(items_within(&left, address.encoding)?);
        let kind = if run.is_last && rest.is_empty() { ReplyKind::Done } else { ReplyKind::Part };
        let items = u32::try_from(left.len()).unwrap_or(u32::MAX);
        let reply = ReplyHeaders {
            offset,
            items,
            items_total: run.items_total,
            attempt: run.attempt,
            worker: identity.worker.clone(),
            queued_ms: millis(run.queued),
            ran_ms: millis(run.first_pass_at.elapsed()),
        };
        let body = codec::encode(&Outputs { model: model.name.clone(), outputs: left }, address.encoding)
            .map_err(|e| Rejection::new(Reason::EngineFailed, e.to_string()))?;
        if body.len() > BODY_BYTES_MAX {
            let error =
                format!("the output takes {} bytes, a reply holds at most {BODY_BYTES_MAX}", body.len());
            return Err(Rejection::new(Reason::TooLarge, error));
        }
        let mut headers = reply.to_table();
        if let Some(tokens) = &mut tokens {
            let of_items = tokens.drain(..tokens.len().min(items as usize)).map(u64::from);
            headers.insert(TOKENS.into(), fields::long(of_items.sum()));
        }
        if let Some(revision) = &revision {
            headers.insert(MODEL_REVISION.into(), fields::text(revision));
        }
        messages.push(address.reply(kind, headers, body));
        offset += items;
        left = rest;
    }
    Ok(messages)
}

/// A `progress` reply: transient, and short-lived. `None` if it has no form in the encoding.
pub fn progress(
    progress: &ItemProgress,
    attempt: u32,
    address: ReplyAddress<'_>,
    identity: &Identity,
) -> Option<Message> {
    let body = codec::encode(progress, address.encoding).ok()?;
    let mut table = FieldTable::default();
    table.insert(headers::ATTEMPT.into(), fields::long(attempt.into()));
    table.insert(headers::WORKER.into(), fields::text(&identity.worker));
    let reply = address.reply(ReplyKind::Progress, table, body);
    let properties =
        reply.properties.with_delivery_mode(TRANSIENT).with_expiration(PROGRESS_EXPIRATION_MS.into());
    Some(Message { properties, ..reply })
}

/// The `failed` reply that goes out besides a dead letter, so that no caller hangs. `None` if the job's `reply_to` cannot take
/// replies.
pub fn failed(
    received: &ReceivedJob,
    model: &Model,
    identity: &Identity,
    rejection: &Rejection,
) -> Option<Message> {
    let properties = &received.delivery.properties;
    let encoding = Encoding::of(properties.content_type().as_ref().map(|t| t.as_str())).unwrap_or_default();
    if received.reply_to_fault().is_some() {
        return None;
    }
    let failure = Failure { reason: rejection.reason, error: rejection.error.clone() };
    let body = codec::encode(&failure, encoding).ok()?;
    let mut table = FieldTable::default();
    table.insert(headers::WORKER.into(), fields::text(&identity.worker));
    Some(ReplyAddress::of(received, model, encoding).reply(ReplyKind::Failed, table, body))
}

/// A job for the dead letters: body and properties as they came, the reason in headers; and, if the job could be read, how
/// far it came.
pub fn dead_letter(
    received: &ReceivedJob,
    reached: Option<&JobHeaders>,
    model: &Model,
    identity: &Identity,
    rejection: &Rejection,
) -> Message {
    let of_job = &received.delivery.properties;
    // Of a job that cannot be read, what workers wrote is kept, and the hint that its publisher may write. Other words about
    // attempts, and about the end of a job, are a publisher's invention: they would be believed when the letter is retried.
    let is_kept = |name: &str| {
        let is_of_workers = headers::OF_JOBS.contains(&name) || OF_DEAD_LETTERS.contains(&name);
        let unread = reached.is_none() && (name == headers::BATCH_HINT || received.is_from_worker());
        !is_of_workers || (unread && headers::OF_JOBS.contains(&name))
    };
    let mut headers = foreign_headers(of_job, is_kept);
    if let Some(reached) = reached {
        reached.write(&mut headers);
    }
    write_origin(received, &mut headers);
    if let Some(expiration) = of_job.expiration() {
        headers.insert(EXPIRATION.into(), fields::text(expiration.as_str()));
    }
    dossier(identity, rejection).write(&mut headers);
    Message {
        exchange: DEAD_EXCHANGE.into(),
        routing_key: model.key.as_str().into(),
        properties: republished(of_job),
        headers,
        body: received.delivery.data.clone(),
    }
}

/// A reply that could not be delivered, for the dead letters beside its job, so that the results are kept. It names the job's
/// publisher, as the job does.
pub fn dead_reply(
    mut reply: Message,
    received: &ReceivedJob,
    model: &Model,
    identity: &Identity,
    rejection: &Rejection,
) -> Message {
    write_origin(received, &mut reply.headers);
    dossier(identity, rejection).write(&mut reply.headers);
    Message {
        exchange: DEAD_EXCHANGE.into(),
        properties: reply.properties.with_reply_to(reply.routing_key),
        routing_key: model.key.as_str().into(),
        headers: reply.headers,
        body: reply.body,
    }
}

fn dossier(identity: &Identity, rejection: &Rejection) -> DeadLetter {
    DeadLetter {
        reason: rejection.reason,
        error: rejection.error.clone(),
        dead_at_ms: unix_ms(),
        worker: identity.worker.clone(),
        worker_version: identity.version.to_owned(),
        misfit: rejection.requirement,
    }
}

/// A job to be tried again. Without the property `expiration`, which would start again from the beginning, and by which the
/// broker would drop the job silently: the worker that takes it reads `expires-at-ms`.
pub fn requeue(received: &ReceivedJob, model: &Model, next: &JobHeaders, route: &Route) -> Message {
    let of_job = &received.delivery.properties;
    let mut headers = foreign_headers(of_job, |name| !headers::OF_JOBS.contains(&name));
    let expires_at_ms = received.expires_at_ms();
    JobHeaders { expires_at_ms, ..next.clone() }.write(&mut headers);
    write_origin(received, &mut headers);
    let mut properties = republished(of_job);
    if matches!(route, Route::Now | Route::Later(_)) {
        properties = properties.with_priority(priority_again(of_job.priority().unwrap_or(0)));
    }
    let key = model.key.as_str().into();
    let routing_key = match route {
        Route::Now => key,
        Route::Bulk => bulk_key(&model.key).into(),
        Route::Quarantine => quarantine_key(&model.key).into(),
        Route::Later(ms) => delay_key(&model.key, *ms).into(),
        Route::LargerDevice(key) => key.as_str().into(),
    };
    Message {
        exchange: RETRY_EXCHANGE.into(),
        routing_key,
        properties,
        headers,
        body: received.delivery.data.clone(),
    }
}

/// The priority of a job that is tried again: above its own, and never below. From RabbitMQ 4.3 on a quorum queue has 32 levels, and
/// a job may be above those that others are raised to.
fn priority_again(own: u8) -> u8 {
    own.saturating_add(1).clamp(PRIORITY_AGAIN_MIN, PRIORITY_AGAIN_MAX).max(own)
}

/// Who published the job, in headers that workers believe each other: the property `user_id` is lost when it is published again.
fn write_origin(received: &ReceivedJob, headers: &mut FieldTable) {
    for (name, value) in [(headers::USER, received.user()), (headers::CALLER, received.caller())] {
        if let Some(value) = value {
            headers.insert(name.into(), fields::text(&value));
        }
    }
}

/// The properties of a job that is published again: all but headers and `expiration`, which the caller decides on, and
/// `user_id`, because the broker closes the channel of a publisher with another one.
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
        // The broker takes no publish with the placeholder, which says nothing.
        properties = properties.with_reply_to("".into());
    }
    properties
}

/// The headers of a job that is published again, without those that would route copies of it elsewhere or say who published it
/// (see [`write_origin`]), without the broker's, and cut to what fits a frame with ours: the largest are dropped first. `is_kept`
/// decides on the others.
fn foreign_headers(of_job: &BasicProperties, is_kept: impl Fn(&str) -> bool) -> FieldTable {
    let Some(table) = of_job.headers() else {
        return FieldTable::default();
    };
    let mut sized: Vec<_> = table
        .into_iter()
        .filter(|(name, _)| !matches!(name.as_str(), "CC" | "BCC" | headers::USER | headers::CALLER))
        .filter(|(name, _)| !is_of_broker(name.as_str()) && is_kept(name.as_str()))
        .map(|(name, value)| (1 + name.as_str().len() + value_bytes(value), name, value))
        .collect();
    sized.sort_by_key(|(bytes, ..)| *bytes);
    let mut free = HEADER_BYTES_MAX - OWN_HEADER_BYTES;
    let mut kept = FieldTable::default();
    for (bytes, name, value) in sized {
        let Some(left) = free.checked_sub(bytes) else {
            tracing::warn!(header = name.as_str(), bytes, "header too large to publish again, dropped");
            continue;
        };
        free = left;
        kept.insert(name.clone(), value.clone());
    }
    kept
}

/// Headers that the broker writes: by `x-death` of an earlier cycle it would drop a job that goes through a delay queue as one that
/// goes round in circles; and a dead letter with `x-death` is taken for one of the broker's.
fn is_of_broker(name: &str) -> bool {
    ["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count"]
        .iter()
        .any(|of_broker| name.starts_with(of_broker))
}

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
