//! Fingerprints of messages: the same when a message is redelivered, different for every other message, also if publishers use
//! the same ids twice, and for the same job at another attempt.

use std::hash::{DefaultHasher, Hash, Hasher};

use lapin::message::Delivery;
use vramq_schemas::fields::value_bytes;

/// Bytes from the start and the end of a body that its fingerprint covers, and of a header: with ids, lengths and time, enough.
const FINGERPRINT_BYTES: usize = 4096;

/// The fingerprint of a message.
pub fn fingerprint(delivery: &Delivery) -> u64 {
    let (properties, body) = (&delivery.properties, &delivery.data);
    let mut hasher = DefaultHasher::new();
    properties.message_id().hash(&mut hasher);
    properties.correlation_id().hash(&mut hasher);
    properties.reply_to().hash(&mut hasher);
    properties.timestamp().hash(&mut hasher);
    // Not the broker's own: they change with every delivery.
    let headers = properties.headers().iter().flatten().filter(|(name, _)| !name.as_str().starts_with("x-"));
    for (name, value) in headers {
        name.hash(&mut hasher);
        match value_bytes(value) {
            0..FINGERPRINT_BYTES => format!("{value:?}").hash(&mut hasher),
            bytes => bytes.hash(&mut hasher),
        }
    }
    body.len().hash(&mut hasher);
    body[..body.len().min(FINGERPRINT_BYTES)].hash(&mut hasher);
    body[body.len().saturating_sub(FINGERPRINT_BYTES)..].hash(&mut hasher);
    hasher.finish()
}
