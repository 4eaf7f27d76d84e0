//! The fingerprint that identifies a dead letter by its content. Pure.

use std::fmt;

use lapin::BasicProperties;
use lapin::types::FieldTable;
use sha2::{Digest as _, Sha256};
use vramq_schemas::headers::PUBLISH_SEQ;

use crate::header_values;

/// Identifies a dead letter, also without an id or with a repeated one. Export and import preserve it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint([u8; 16]);

/// The hexadecimal digits of a fingerprint that are shown: among 10,000 dead letters, two share them with probability 1/20,000.
const DIGITS_SHOWN: usize = 10;

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.digits()[..DIGITS_SHOWN])
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Fingerprint {
    /// A hash of everything that an import restores. Left out: `user_id`, which only that user may publish; headers that route copies to
    /// other queues; and the publish number, which differs with every publish.
    pub(crate) fn of(queue: &str, properties: &BasicProperties, headers: &FieldTable, body: &[u8]) -> Self {
        let mut digest = Sha256::new();
        let mut part = |bytes: &[u8]| {
            digest.update((bytes.len() as u64).to_le_bytes());
            digest.update(bytes);
        };
        part(queue.as_bytes());
        let p = properties;
        for text in [
            p.content_type(),
            p.content_encoding(),
            p.correlation_id(),
            p.reply_to(),
            p.expiration(),
            p.message_id(),
            p.kind(),
            p.app_id(),
            p.cluster_id(),
        ] {
            part(text.as_ref().map_or(&[], |text| text.as_str().as_bytes()));
        }
        part(format!("{:?} {:?}", p.priority(), p.timestamp()).as_bytes());
        part(header_values::to_json(headers, |name| ![PUBLISH_SEQ, "CC", "BCC"].contains(&name)).as_bytes());
        part(body);
        let mut fingerprint = [0; 16];
        fingerprint.copy_from_slice(&digest.finalize()[..16]);
        Self(fingerprint)
    }

    /// All its hexadecimal digits.
    pub fn digits(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dead_letter::DeadLetter;
    use crate::dead_letter::tests::written;
    use lapin::types::AMQPValue;
    use vramq_schemas::Reason;

    #[test]
    fn deliveries_do_not_change_a_fingerprint() {
        let plain = written("a", Reason::Malformed, |_| {});
        let counted = written("a", Reason::Malformed, |headers| {
            headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(3));
            headers.insert(PUBLISH_SEQ.into(), AMQPValue::LongLongInt(99));
        });
        assert_eq!(plain.fingerprint(), counted.fingerprint());
        assert_eq!(plain.fingerprint().to_string().len(), DIGITS_SHOWN);
        let others = [
            written("b", Reason::Malformed, |_| {}),
            written("a", Reason::TooLarge, |_| {}),
            DeadLetter { body: b"{ }".to_vec(), ..plain.clone() },
            DeadLetter { queue: "vramq.dead.other".to_owned(), ..plain.clone() },
            DeadLetter { properties: plain.properties.clone().with_priority(1), ..plain.clone() },
        ];
        for other in others {
            assert_ne!(plain.fingerprint(), other.fingerprint(), "{other:?}");
        }
    }
}
