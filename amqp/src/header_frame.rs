//! The frame that carries a message's properties and headers. It cannot be split, and a broker closes the connection over one that is larger
//! than negotiated, so this is checked before a message is sent.

use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Connection};
use vramq_schemas::fields::table_bytes;
use vramq_schemas::headers::PUBLISH_SEQ;

/// RabbitMQ's default `frame_max`. A message with as many headers as jobs may have fits such a frame.
pub const FRAME_MAX_DEFAULT: usize = 128 * 1024;

/// What a frame takes beside its content: type, channel, size and end.
const FRAME_BYTES: usize = 8;

/// What comes before the properties: class, weight, size of the body, and which properties there are.
const BEFORE_PROPERTIES: usize = 14;

/// The header that shows which publish a message belongs to: its name and a number of 64 bits.
const PUBLISH_SEQ_BYTES: usize = 1 + PUBLISH_SEQ.len() + 9;

/// The largest frame of a connection, as client and broker have agreed.
pub fn frame_max(connection: &Connection) -> usize {
    usize::try_from(connection.configuration().frame_max()).unwrap_or(usize::MAX)
}

/// The bytes of the frame with these properties, whose own headers do not count, and these headers. A number that
/// [`ConfirmedPublisher`](crate::ConfirmedPublisher) may add is counted.
pub fn header_frame_bytes(properties: &BasicProperties, headers: &FieldTable) -> usize {
    let texts = [
        properties.content_type(),
        properties.content_encoding(),
        properties.correlation_id(),
        properties.reply_to(),
        properties.expiration(),
        properties.message_id(),
        properties.kind(),
        properties.user_id(),
        properties.app_id(),
        properties.cluster_id(),
    ];
    let text_bytes = |text: &ShortString| 1 + text.as_str().len();
    FRAME_BYTES
        + BEFORE_PROPERTIES
        + texts.into_iter().flatten().map(text_bytes).sum::<usize>()
        + usize::from(properties.delivery_mode().is_some())
        + usize::from(properties.priority().is_some())
        + 8 * usize::from(properties.timestamp().is_some())
        + table_bytes(headers)
        + PUBLISH_SEQ_BYTES
}
