//! What a republished job keeps: its properties, its publisher, and the headers that do not belong to workers. Pure.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use vramq_amqp::PERSISTENT;
use vramq_schemas::ReplyKind;
use vramq_schemas::fields::{self, value_bytes};
use vramq_schemas::headers::{
    self, BATCH_HINT, BATCH_HINT_PREFIXED, MODEL_REVISION, OF_JOBS, REQUEST_ID, RETRIES, TENANT, TRACEPARENT,
    TRACESTATE,
};
use vramq_schemas::withdrawal::DIGEST;

use super::received::ReceivedJob;
use crate::publishers::direct_address::DIRECT_REPLIES;

/// The most bytes of headers that a message is published with. Headers and the other properties must fit one frame (128 KiB by default);
/// otherwise the broker closes the connection.
const HEADER_BYTES_MAX: usize = 100 * 1024;

/// The most bytes that [`DeadLetter`](vramq_schemas::DeadLetter) and [`JobHeaders`](vramq_schemas::JobHeaders) write. Foreign headers are
/// dropped to make space for them.
const OWN_HEADER_BYTES: usize = 16 * 1024;

/// Headers of publishers that mean something to workers and clients. They are kept before all others.
const OF_CONTRACT: [&str; 9] = [
    BATCH_HINT,
    BATCH_HINT_PREFIXED,
    MODEL_REVISION,
    DIGEST,
    TENANT,
    REQUEST_ID,
    RETRIES,
    TRACEPARENT,
    TRACESTATE,
];

/// The most bytes of such a header's value: a text of [`TEXT_BYTES_MAX`](fields::TEXT_BYTES_MAX), as the longest revision of a model. Larger
/// ones have no effect, except that a job does not run with such a revision.
const OF_CONTRACT_BYTES_MAX: usize = 5 + fields::TEXT_BYTES_MAX;

/// The most bytes of the headers that a worker could not read (`unreadable-headers`). Larger ones have no effect, except that the job stays
/// malformed.
const UNREADABLE_BYTES_MAX: usize = 32 * 1024;

/// In the place of a header that is too large to be kept, without which the job would run when it is tried again. With this value it stays
/// malformed.
static MALFORMED: AMQPValue = AMQPValue::Boolean(false);

/// The range of priorities of a job that is tried again, so that it does not wait behind the whole backlog again. Quorum queues of RabbitMQ
/// 4.0 to 4.2 have two levels, and the upper one starts at 5. From 4.3 on a job without a priority counts as priority 4. Classic queues
/// have levels up to 9.
const PRIORITY_AGAIN_MIN: u8 = 5;
const PRIORITY_AGAIN_MAX: u8 = 9;

/// The priority of a job that is tried again: higher than before, and never lower. Quorum queues have 32 levels from RabbitMQ 4.3 on, so a
/// job may already be above `PRIORITY_AGAIN_MAX`.
pub(super) fn priority_again(own: u8) -> u8 {
    own.saturating_add(1).clamp(PRIORITY_AGAIN_MIN, PRIORITY_AGAIN_MAX).max(own)
}

/// Writes the job's publisher to headers that workers trust. The property `user_id` cannot be kept when a worker publishes the job.
pub(super) fn write_origin(received: &ReceivedJob, headers: &mut FieldTable) {
    for (name, value) in [(headers::USER, received.user()), (headers::CALLER, received.caller())] {
        if let Some(value) = value {
            headers.insert(name.into(), fields::text(&value));
        }
    }
}

/// The properties of a job that is published again. Left out: headers and `expiration`, which the caller sets; `user_id`, because the
/// broker closes the channel of another user; and a `type` of replies.
pub(super) fn republished(of_job: &BasicProperties) -> BasicProperties {
    let mut properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    macro_rules! keep {
        ($($get:ident => $with:ident),*) => {
            $(if let Some(value) = of_job.$get() { properties = properties.$with(value.clone()); })*
        };
    }
    keep!(
        content_type => with_content_type, content_encoding => with_content_encoding, priority => with_priority,
        correlation_id => with_correlation_id, reply_to => with_reply_to, message_id => with_message_id,
        timestamp => with_timestamp, app_id => with_app_id
    );
    // The type of a reply marks a dead letter as results. A job must not have that type.
    if let Some(kind) = of_job.kind().clone().filter(|kind| ReplyKind::of(kind.as_str()).is_none()) {
        properties = properties.with_type(kind);
    }
    if of_job.reply_to().as_ref().is_some_and(|queue| queue.as_str() == DIRECT_REPLIES) {
        // The broker rejects a publish with this placeholder.
        properties = properties.with_reply_to("".into());
    }
    properties
}

/// The headers of a job that is published again. Left out: headers that would route copies elsewhere or name the publisher (see
/// [`write_origin`]), the broker's, those that `is_kept` rejects, and the largest if all together do not fit a frame. None that a job can
/// rely on is left out for its size.
pub(super) fn foreign_headers(of_job: &BasicProperties, is_kept: impl Fn(&str) -> bool) -> FieldTable {
    let Some(table) = of_job.headers() else {
        return FieldTable::default();
    };
    let mut sized: Vec<_> = table
        .into_iter()
        .filter(|(name, _)| !matches!(name.as_str(), "CC" | "BCC" | headers::USER | headers::CALLER))
        .filter(|(name, _)| !is_of_broker(name.as_str()) && is_kept(name.as_str()))
        .map(|(name, value)| {
            (name, if must_stay_malformed(name.as_str(), value) { &MALFORMED } else { value })
        })
        .map(|(name, value)| (1 + name.as_str().len() + value_bytes(value), name, value))
        .collect();
    sized.sort_by_key(|(bytes, name, value)| (!is_of_contract(name.as_str(), value), *bytes));
    let mut free = HEADER_BYTES_MAX - OWN_HEADER_BYTES;
    let mut kept = FieldTable::default();
    let mut dropped = Vec::new();
    for (bytes, name, value) in sized {
        match free.checked_sub(bytes) {
            Some(left) => {
                free = left;
                kept.insert(name.clone(), value.clone());
            }
            None => dropped.push((name, bytes)),
        }
    }
    warn_of_dropped(of_job, &dropped);
    kept
}

/// Whether the header makes a job malformed, and is too large to be kept: a revision that no model can have, or headers that could not be
/// read.
fn must_stay_malformed(name: &str, value: &AMQPValue) -> bool {
    let most = match name {
        MODEL_REVISION => OF_CONTRACT_BYTES_MAX,
        headers::UNREADABLE => UNREADABLE_BYTES_MAX,
        _ => return false,
    };
    value_bytes(value) > most
}

/// Whether a job may rely on the header.
fn is_of_contract(name: &str, value: &AMQPValue) -> bool {
    if name == headers::UNREADABLE {
        return true;
    }
    let is_known = OF_CONTRACT.contains(&name) || OF_JOBS.contains(&name);
    is_known && value_bytes(value) <= OF_CONTRACT_BYTES_MAX
}

/// Logs one line per message. The number of headers is the publisher's choice.
fn warn_of_dropped(of_job: &BasicProperties, dropped: &[(&ShortString, usize)]) {
    let Some((largest, _)) = dropped.last() else { return };
    let job = of_job.message_id().as_ref().map(ShortString::as_str);
    let (headers, largest) = (dropped.len(), largest.as_str());
    let bytes: usize = dropped.iter().map(|(_, bytes)| bytes).sum();
    tracing::warn!(
        job,
        headers,
        bytes,
        largest,
        "dropped headers that are too large to publish again: the job's next message does not have them"
    );
}

/// Whether the broker writes this header. With an old `x-death` the broker would drop a job in a delay queue as a cycle, and a dead letter
/// with `x-death` looks like one of the broker's.
fn is_of_broker(name: &str) -> bool {
    ["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count"]
        .iter()
        .any(|of_broker| name.starts_with(of_broker))
}
