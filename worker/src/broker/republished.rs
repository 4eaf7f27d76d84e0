//! What a republished job keeps: its properties, its publisher, and the headers that are not the workers' own. Pure.

use lapin::BasicProperties;
use lapin::types::{FieldTable, ShortString};
use vramq_schemas::ReplyKind;
use vramq_schemas::fields::{self, value_bytes};
use vramq_schemas::headers;

use super::received::ReceivedJob;
use crate::publishers::direct_address::DIRECT_REPLIES;

/// The most bytes of headers that a message is published with. Headers have to fit one frame (128 KiB by default)
/// with the other properties; above that the broker closes the connection.
const HEADER_BYTES_MAX: usize = 100 * 1024;

/// The most bytes that [`DeadLetter`](vramq_schemas::DeadLetter) and [`JobHeaders`](vramq_schemas::JobHeaders) write; foreign headers are
/// dropped to make space for them.
const OWN_HEADER_BYTES: usize = 16 * 1024;

/// The priorities that a job is raised to when it is tried again, so that it does not wait behind the whole backlog once
/// more. Quorum queues of RabbitMQ 4.0 to 4.2 have two levels, of which the upper one starts at 5; from 4.3 on a job without a
/// priority counts as one of 4. Classic queues have levels up to 9.
const PRIORITY_AGAIN_MIN: u8 = 5;
const PRIORITY_AGAIN_MAX: u8 = 9;

/// The delivery mode of messages that the broker keeps when it restarts.
pub(super) const PERSISTENT: u8 = 2;

/// The priority of a job that is tried again: above its own, and never below. From RabbitMQ 4.3 on a quorum queue has 32 levels, and
/// a job may be above those that others are raised to.
pub(super) fn priority_again(own: u8) -> u8 {
    own.saturating_add(1).clamp(PRIORITY_AGAIN_MIN, PRIORITY_AGAIN_MAX).max(own)
}

/// Who published the job, in headers that workers believe each other: the property `user_id` is lost when it is published again.
pub(super) fn write_origin(received: &ReceivedJob, headers: &mut FieldTable) {
    for (name, value) in [(headers::USER, received.user()), (headers::CALLER, received.caller())] {
        if let Some(value) = value {
            headers.insert(name.into(), fields::text(&value));
        }
    }
}

/// The properties of a job that is published again: all but headers and `expiration`, which the caller decides on, `user_id`,
/// because the broker closes the channel of a publisher with another one, and a `type` that is one of replies.
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
    // By the type of a reply, a dead letter is told to hold results rather than a job: no job may claim to be one.
    if let Some(kind) = of_job.kind().clone().filter(|kind| ReplyKind::of(kind.as_str()).is_none()) {
        properties = properties.with_type(kind);
    }
    if of_job.reply_to().as_ref().is_some_and(|queue| queue.as_str() == DIRECT_REPLIES) {
        // The broker takes no publish with the placeholder, which says nothing.
        properties = properties.with_reply_to("".into());
    }
    properties
}

/// The headers of a job that is published again, without those that would route copies of it elsewhere or say who published it
/// (see [`write_origin`]), without the broker's, and cut to what fits a frame with ours: the largest are dropped first. `is_kept`
/// decides on the others.
pub(super) fn foreign_headers(of_job: &BasicProperties, is_kept: impl Fn(&str) -> bool) -> FieldTable {
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

/// One line for a message, however many headers it has: a publisher chooses their number.
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

/// Headers that the broker writes: by `x-death` of an earlier cycle it would drop a job that goes through a delay queue as one that
/// goes round in circles; and a dead letter with `x-death` is taken for one of the broker's.
fn is_of_broker(name: &str) -> bool {
    ["x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count"]
        .iter()
        .any(|of_broker| name.starts_with(of_broker))
}
