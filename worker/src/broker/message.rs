//! The messages that a worker publishes, built from the job that they are about. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_core::action::{Route, Run};
use vramq_core::rejection::Rejection;
use vramq_schemas::dead_letter::{EXPIRATION, OF_DEAD_LETTERS};
use vramq_schemas::fields;
use vramq_schemas::headers::{self, MODEL_REVISION, TOKENS};
use vramq_schemas::topology::{DEAD_EXCHANGE, RETRY_EXCHANGE, bulk_key, delay_key, quarantine_key};
use vramq_schemas::{
    BODY_BYTES_MAX, DeadLetter, Encoding, Failure, FailureHeaders, ItemProgress, JobHeaders, Outputs,
    ProgressHeaders, Reason, ReplyHeaders, ReplyKind, codec,
};

use super::received::ReceivedJob;
use super::republished::{PERSISTENT, foreign_headers, priority_again, republished, write_origin};
use crate::failpoint::Site;
use crate::identity::Identity;
use crate::model::Model;
use crate::publishers::direct_address::is_direct;
use crate::run_outputs::RunOutputs;
use crate::unix_ms;
use crate::wire_size::items_within;

/// The most bytes of headers that a job may have. The broker adds its own to a job that it delivers again
/// (`x-delivery-count`, `x-death`), also beyond the frame. A job that leaves no space for them is rejected the first time it is
/// delivered, before clients get it that end their session over such a frame. A worker takes it (`third-party/lapin`).
pub const JOB_HEADER_BYTES_MAX: usize = 120 * 1024;

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

    /// The id of the job that it is about.
    pub fn id(&self) -> Option<&str> {
        self.properties.message_id().as_ref().map(ShortString::as_str)
    }

    /// Where it goes, in words: the queue, or the exchange with the routing key.
    pub fn destination(&self) -> String {
        match self.exchange.as_str() {
            "" => self.routing_key.to_string(),
            exchange => format!("{exchange} with the key {}", self.routing_key),
        }
    }

    /// What the publisher takes. The body is not copied.
    pub fn to_send(&self) -> vramq_amqp::Message<&[u8]> {
        vramq_amqp::Message {
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            properties: self.properties.clone(),
            headers: self.headers.clone(),
            body: &self.body,
            mandatory: true,
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

/// The messages of a publication, in order.
#[derive(Debug)]
pub struct Encoded {
    pub messages: Vec<Message>,
    /// Why what comes after these messages cannot be one.
    pub rejection: Option<Rejection>,
}

impl Encoded {
    pub fn all(messages: Vec<Message>) -> Self {
        Self { messages, rejection: None }
    }

    pub fn nothing(rejection: Rejection) -> Self {
        Self { messages: Vec::new(), rejection: Some(rejection) }
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
/// that is not the last. They end before an output that alone is above the body cap, or more than a client reads.
pub fn replies(
    run: Run,
    of_run: RunOutputs,
    address: ReplyAddress<'_>,
    model: &Model,
    identity: &Identity,
) -> Encoded {
    let mut messages = Vec::with_capacity(1);
    let rejection = add_replies(&mut messages, run, of_run, address, model, identity).err();
    Encoded { messages, rejection }
}

/// Adds replies up to the first output that fits none.
fn add_replies(
    messages: &mut Vec<Message>,
    run: Run,
    of_run: RunOutputs,
    address: ReplyAddress<'_>,
    model: &Model,
    identity: &Identity,
) -> Result<(), Rejection> {
    let RunOutputs { outputs: mut left, mut tokens } = of_run;
    let mut offset = run.offset;
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
    Ok(())
}

/// A `progress` reply: transient, and short-lived. `None` if it has no form in the encoding.
pub fn progress(
    progress: &ItemProgress,
    attempt: u32,
    address: ReplyAddress<'_>,
    identity: &Identity,
) -> Option<Message> {
    let body = codec::encode(progress, address.encoding).ok()?;
    let table = ProgressHeaders { attempt, worker: identity.worker.clone() }.to_table();
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
    let table = FailureHeaders { worker: identity.worker.clone() }.to_table();
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
        requirement: rejection.requirement,
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

fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[path = "message_tests.rs"]
mod tests;
