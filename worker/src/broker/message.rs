//! The messages that a worker publishes, built from the job that they are about. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_amqp::PERSISTENT;
use vramq_core::action::{Route, Run};
use vramq_core::rejection::Rejection;
use vramq_schemas::dead_letter::{EXPIRATION, OF_DEAD_LETTERS};
use vramq_schemas::fields;
use vramq_schemas::headers::{self, MODEL_REVISION, TOKENS};
use vramq_schemas::topology::{DEAD_EXCHANGE, RETRY_EXCHANGE, bulk_key, delay_key, quarantine_key};
use vramq_schemas::{
    DeadLetter, Encoding, Failure, FailureHeaders, HEADER_BYTES_MAX, ItemProgress, JobHeaders, Outputs,
    ProgressHeaders, Reason, ReplyHeaders, ReplyKind, codec,
};

use super::received::ReceivedJob;
use super::republished::{foreign_headers, priority_again, republished, write_origin};
use crate::failpoint::Site;
use crate::identity::Identity;
use crate::model::Model;
use crate::publishers::direct_address::is_direct;
use crate::run_outputs::RunOutputs;
use crate::unix_ms;
use crate::wire_size::{check_body_bytes, items_within};

/// The most bytes of headers that a job may have. The broker adds headers to a job that it redelivers (`x-delivery-count`, `x-death`), even
/// beyond the size of a frame. Clients end their session over such a frame; only this worker's lapin reads it (`third-party/lapin`). So a
/// job that leaves no space for these headers is rejected at its first delivery.
pub const JOB_HEADER_BYTES_MAX: usize = HEADER_BYTES_MAX;

/// The delivery mode of messages that the broker does not store.
pub(super) const TRANSIENT: u8 = 1;

/// The expiration of a `progress` reply, in milliseconds. A caller who returns later finds results in the queue instead of old progress.
const PROGRESS_EXPIRATION_MS: &str = "30000";

/// A message to publish. Persistent, except `progress`.
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
    /// The failpoints for publishing this message: before the confirm, and after it.
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

    /// The form that the publisher needs. Does not copy the body.
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

    /// Whether it is a reply. All other messages go to exchanges of the workers.
    pub fn is_for_caller(&self) -> bool {
        self.exchange.as_str().is_empty()
    }

    /// Whether it goes directly to a caller's channel (RabbitMQ's direct reply-to), not to a queue.
    pub fn is_direct_reply(&self) -> bool {
        self.exchange.as_str().is_empty() && is_direct(self.routing_key.as_str())
    }
}

/// The messages of a publication, in order.
#[derive(Debug)]
pub struct Encoded {
    pub messages: Vec<Message>,
    /// Why the output after these messages cannot be encoded.
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

/// Where a job's replies go, and the properties of the job that each reply repeats.
#[derive(Clone, Copy, Debug)]
pub struct ReplyAddress<'a> {
    pub encoding: Encoding,
    received: &'a ReceivedJob,
    /// For jobs without a `reply_to`.
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
        // An empty one is none.
        let [message_id, correlation_id] = [of_job.message_id(), of_job.correlation_id()]
            .map(|id| id.as_ref().filter(|id| !id.as_str().is_empty()));
        if let Some(id) = message_id {
            properties = properties.with_message_id(id.clone());
        }
        if let Some(id) = correlation_id.or(message_id) {
            properties = properties.with_correlation_id(id.clone());
        }
        if let Some(app) = of_job.app_id() {
            properties = properties.with_app_id(app.clone());
        }
        properties
    }
}

/// The replies with a run of outputs: `part`s, and a final `done` if the run is the last. Empty for an empty run that is not the last.
/// Stops before an output that alone exceeds the body limit, or what a client reads.
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

/// Adds replies up to the first output that fits no reply.
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
        check_body_bytes(body.len())?;
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

/// A `progress` reply: transient, with a short expiration. `None` if the encoding cannot represent it.
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

/// The `failed` reply that accompanies a dead letter, so that the caller does not wait for ever. `None` if the job's `reply_to` cannot
/// receive replies.
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

/// The dead letter of a job: body and properties unchanged, the reason in headers, and its progress if the job could be read.
pub fn dead_letter(
    received: &ReceivedJob,
    reached: Option<&JobHeaders>,
    model: &Model,
    identity: &Identity,
    rejection: &Rejection,
) -> Message {
    let of_job = &received.delivery.properties;
    let is_kept = |name: &str| match headers::OF_JOBS.contains(&name) {
        true => reached.is_none() && is_kept_unread(received, name),
        false => !OF_DEAD_LETTERS.contains(&name),
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

/// The dead letter of a reply that could not be delivered, so that the results are kept. It names the same publisher as the job.
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

/// Whether a message about a job whose headers cannot be read keeps this one of [`OF_JOBS`](headers::OF_JOBS): it does if a worker wrote it,
/// and publishers may write the batch hint. Others about attempts are forged by the publisher, and would be trusted from then on.
fn is_kept_unread(received: &ReceivedJob, name: &str) -> bool {
    name == headers::BATCH_HINT || received.is_from_worker()
}

/// The message for another attempt of a job. Headers that cannot be read stay as they are, and its next end is the same.
///
/// Without the property `expiration`: it would start again, and the broker would silently drop the job when it ends. Workers read
/// `expires-at-ms` instead.
pub fn requeue(received: &ReceivedJob, model: &Model, next: &JobHeaders, route: &Route) -> Message {
    let of_job = &received.delivery.properties;
    let is_read = received.job_headers().is_ok();
    let is_kept =
        |name: &str| !headers::OF_JOBS.contains(&name) || (!is_read && is_kept_unread(received, name));
    let mut headers = foreign_headers(of_job, is_kept);
    if is_read {
        let expires_at_ms = received.expires_at_ms();
        JobHeaders { expires_at_ms, ..next.clone() }.write(&mut headers);
    }
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
        Route::OtherWorkers(key) => key.as_str().into(),
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
