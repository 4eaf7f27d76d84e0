//! Fingerprints of messages. A redelivered message has the same fingerprint. Different messages have different ones, even if publishers use
//! an id twice, and so do the attempts of a job.

use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::LazyLock;

use foldhash::quality::RandomState;
use lapin::message::Delivery;
use vramq_schemas::fields::value_bytes;

/// Of a header that is at least so long the fingerprint covers only the length.
const HEADER_BYTES_MAX: usize = 4096;

/// Random, so that no publisher can write a message that has the fingerprint of somebody else's. Fingerprints stay in this process.
static STATE: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// The fingerprint of a message. Covers the whole body: publishers may use an id for many bodies that differ only in the middle. 16 MiB take
/// less than a millisecond.
pub fn fingerprint(delivery: &Delivery) -> u64 {
    let (properties, body) = (&delivery.properties, &delivery.data);
    let mut hasher = STATE.build_hasher();
    properties.message_id().hash(&mut hasher);
    properties.correlation_id().hash(&mut hasher);
    properties.reply_to().hash(&mut hasher);
    properties.timestamp().hash(&mut hasher);
    // The broker verifies the user, so that a copy of someone else's job is not taken for that job.
    properties.user_id().hash(&mut hasher);
    // Without the broker's headers, which change with every delivery.
    let headers = properties.headers().iter().flatten().filter(|(name, _)| !name.as_str().starts_with("x-"));
    for (name, value) in headers {
        name.hash(&mut hasher);
        match value_bytes(value) {
            0..HEADER_BYTES_MAX => format!("{value:?}").hash(&mut hasher),
            bytes => bytes.hash(&mut hasher),
        }
    }
    body.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::types::{AMQPValue, FieldTable};

    use super::*;

    fn message(properties: BasicProperties, headers: &[(&str, i64)], body: &[u8]) -> u64 {
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert((*name).into(), AMQPValue::LongLongInt(*value));
        }
        let mut delivery = Delivery::mock(1, "vramq.jobs".into(), "m".into(), false, body.to_vec());
        delivery.properties = properties.with_headers(table);
        fingerprint(&delivery)
    }

    #[test]
    fn a_redelivered_message_has_the_same_fingerprint_and_every_other_one_another() {
        let of =
            |user: &str| BasicProperties::default().with_message_id("j".into()).with_user_id(user.into());
        let first = message(of("bob"), &[("attempt", 1)], b"{}");
        assert_eq!(message(of("bob"), &[("attempt", 1), ("x-delivery-count", 1)], b"{}"), first);
        for other in [
            message(of("eve"), &[("attempt", 1)], b"{}"),
            message(BasicProperties::default().with_message_id("j".into()), &[("attempt", 1)], b"{}"),
            message(of("bob").with_message_id("k".into()), &[("attempt", 1)], b"{}"),
            message(of("bob"), &[("attempt", 2)], b"{}"),
            message(of("bob"), &[("attempt", 1)], b"[]"),
        ] {
            assert_ne!(other, first);
        }
    }

    #[test]
    fn every_byte_of_a_body_counts() {
        for bytes in [1, 7, 100, 20_000] {
            let body = vec![b'x'; bytes];
            let of = |body: &[u8]| message(BasicProperties::default(), &[], body);
            for changed in [0, bytes / 2, bytes - 1] {
                let mut other = body.clone();
                other[changed] = b'y';
                assert_ne!(of(&other), of(&body), "byte {changed} of {bytes}");
            }
        }
    }
}
