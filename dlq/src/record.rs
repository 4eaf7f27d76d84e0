//! The file format: a dead letter as a line of JSON, from which it is restored exactly. Pure.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use lapin::BasicProperties;
use lapin::types::ShortString;
use serde::{Deserialize, Serialize};

use crate::dead_letter::DeadLetter;
use crate::header_values::{HeaderValue, InvalidField, bytes_from, short_from, table_from, table_to};

/// The version of the format.
const VERSION: u32 = 1;

/// One line of an archive.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    /// The first field, so that every version reads it before the others.
    vramq_letter: u32,
    queue: String,
    /// For people, and for searching a file. Ignored on reading, because it is computed from the rest.
    fingerprint: String,
    properties: Properties,
    headers: BTreeMap<String, HeaderValue>,
    body: String,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Properties {
    #[serde(skip_serializing_if = "Option::is_none")]
    message_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reply_to: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", rename = "type")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_encoding: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delivery_mode: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    priority: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expiration: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timestamp: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    app_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster_id: Option<String>,
}

/// Why a line is not a dead letter.
#[derive(Debug, thiserror::Error)]
pub enum InvalidRecord {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("version {0} is unknown; this program reads version {VERSION}")]
    Version(u32),
    #[error(transparent)]
    Field(#[from] InvalidField),
}

/// The line, without its end.
///
/// # Errors
/// The dead letter cannot be written as JSON.
pub fn write(letter: &DeadLetter) -> Result<String, serde_json::Error> {
    let p = &letter.properties;
    let text = |text: &Option<ShortString>| text.as_ref().map(|text| text.as_str().to_owned());
    serde_json::to_string(&Record {
        vramq_letter: VERSION,
        queue: letter.queue.clone(),
        fingerprint: letter.fingerprint().to_string(),
        properties: Properties {
            message_id: text(p.message_id()),
            correlation_id: text(p.correlation_id()),
            reply_to: text(p.reply_to()),
            kind: text(p.kind()),
            content_type: text(p.content_type()),
            content_encoding: text(p.content_encoding()),
            delivery_mode: *p.delivery_mode(),
            priority: *p.priority(),
            expiration: text(p.expiration()),
            timestamp: *p.timestamp(),
            user_id: text(p.user_id()),
            app_id: text(p.app_id()),
            cluster_id: text(p.cluster_id()),
        },
        headers: table_to(&letter.headers),
        body: BASE64.encode(&letter.body),
    })
}

/// # Errors
/// What is wrong with the line.
pub fn read(line: &str) -> Result<DeadLetter, InvalidRecord> {
    #[derive(Deserialize)]
    struct Version {
        vramq_letter: u32,
    }
    // A later version may have fields that are unknown here.
    let Version { vramq_letter } = serde_json::from_str(line)?;
    if vramq_letter != VERSION {
        return Err(InvalidRecord::Version(vramq_letter));
    }
    let record: Record = serde_json::from_str(line)?;
    let mut properties = BasicProperties::default();
    let p = record.properties;
    macro_rules! texts {
        ($($field:ident => $with:ident),*) => {
            $(if let Some(text) = p.$field { properties = properties.$with(short_from(stringify!($field), text)?); })*
        };
    }
    texts!(
        message_id => with_message_id, correlation_id => with_correlation_id, reply_to => with_reply_to,
        kind => with_type, content_type => with_content_type, content_encoding => with_content_encoding,
        expiration => with_expiration, user_id => with_user_id, app_id => with_app_id, cluster_id => with_cluster_id
    );
    if let Some(mode) = p.delivery_mode {
        properties = properties.with_delivery_mode(mode);
    }
    if let Some(priority) = p.priority {
        properties = properties.with_priority(priority);
    }
    if let Some(at) = p.timestamp {
        properties = properties.with_timestamp(at);
    }
    let body = bytes_from("body", &record.body)?;
    let letter = DeadLetter::new(&record.queue, properties, body);
    Ok(DeadLetter { headers: table_from(record.headers)?, ..letter })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::{AMQPValue, DecimalValue};
    use proptest::collection::{btree_map, vec};
    use proptest::option;
    use proptest::prelude::*;

    fn any_value() -> impl Strategy<Value = AMQPValue> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(AMQPValue::Boolean),
            any::<i8>().prop_map(AMQPValue::ShortShortInt),
            any::<u8>().prop_map(AMQPValue::ShortShortUInt),
            any::<i16>().prop_map(AMQPValue::ShortInt),
            any::<u16>().prop_map(AMQPValue::ShortUInt),
            any::<i32>().prop_map(AMQPValue::LongInt),
            any::<u32>().prop_map(AMQPValue::LongUInt),
            any::<i64>().prop_map(AMQPValue::LongLongInt),
            any::<u32>().prop_map(|bits| AMQPValue::Float(f32::from_bits(bits))),
            any::<u64>().prop_map(|bits| AMQPValue::Double(f64::from_bits(bits))),
            (any::<u8>(), any::<u32>())
                .prop_map(|(scale, value)| AMQPValue::DecimalValue(DecimalValue { scale, value })),
            any_short().prop_map(AMQPValue::ShortString),
            vec(any::<u8>(), 0..40).prop_map(|bytes| AMQPValue::LongString(bytes.into())),
            any::<String>().prop_map(|text| AMQPValue::LongString(text.into())),
            vec(any::<u8>(), 0..40).prop_map(|bytes| AMQPValue::ByteArray(bytes.into())),
            any::<u64>().prop_map(AMQPValue::Timestamp),
            Just(AMQPValue::Void),
        ];
        leaf.prop_recursive(3, 24, 5, |inner| {
            prop_oneof![
                vec(inner.clone(), 0..5).prop_map(|items| AMQPValue::FieldArray(items.into())),
                btree_map(any_short(), inner, 0..5).prop_map(|table| AMQPValue::FieldTable(table.into())),
            ]
        })
    }

    fn any_short() -> impl Strategy<Value = ShortString> {
        any::<String>().prop_map(|text| text[..text.floor_char_boundary(255)].into())
    }

    prop_compose! {
        fn any_properties()(
            texts in vec(option::of(any_short()), 10),
            mode in option::of(any::<u8>()),
            priority in option::of(any::<u8>()),
            at in option::of(any::<u64>()),
        ) -> BasicProperties {
            let mut p = BasicProperties::default();
            let with = [
                BasicProperties::with_message_id, BasicProperties::with_correlation_id,
                BasicProperties::with_reply_to, BasicProperties::with_type, BasicProperties::with_content_type,
                BasicProperties::with_content_encoding, BasicProperties::with_expiration,
                BasicProperties::with_user_id, BasicProperties::with_app_id, BasicProperties::with_cluster_id,
            ];
            for (with, text) in with.into_iter().zip(texts) {
                if let Some(text) = text {
                    p = with(p, text);
                }
            }
            if let Some(mode) = mode { p = p.with_delivery_mode(mode); }
            if let Some(priority) = priority { p = p.with_priority(priority); }
            if let Some(at) = at { p = p.with_timestamp(at); }
            p
        }
    }

    proptest! {
        /// Compared as debug texts, because a NaN does not equal itself; its bits are in the line.
        #[test]
        fn every_letter_comes_back_exactly(
            queue in any::<String>(),
            properties in any_properties(),
            headers in btree_map(any_short(), any_value(), 0..6),
            body in vec(any::<u8>(), 0..200),
        ) {
            let letter = DeadLetter { headers: headers.into(), ..DeadLetter::new(&queue, properties, body) };
            let line = write(&letter).unwrap();
            prop_assert!(!line.contains('\n'));
            let back = read(&line).unwrap();
            prop_assert_eq!(format!("{:?}", back), format!("{:?}", letter));
            prop_assert_eq!(write(&back).unwrap(), line);
            prop_assert_eq!(back.fingerprint(), letter.fingerprint());
        }

        #[test]
        fn no_line_is_a_panic(line in any::<String>()) {
            let _ = read(&line);
        }
    }

    #[test]
    fn an_invalid_line_is_explained() {
        let error_of = |line: &str| read(line).unwrap_err().to_string();
        assert!(error_of("").contains("EOF"));
        assert!(error_of("{}").contains("vramq_letter"));
        assert_eq!(
            error_of(r#"{"vramq_letter": 2, "new": 1}"#),
            "version 2 is unknown; this program reads version 1"
        );
        let line = |body: &str| {
            format!(
                r#"{{"vramq_letter":1,"queue":"q","fingerprint":"","properties":{{}},"headers":{{}},"body":"{body}"}}"#
            )
        };
        assert!(read(&line("AAEC")).is_ok());
        assert!(error_of(&line("?")).starts_with("body is not base64"));
        let long = format!(r#""message_id":"{}""#, "x".repeat(256));
        let error = error_of(&line("").replace(r#""properties":{"#, &format!(r#""properties":{{{long}"#)));
        assert_eq!(error, "message_id is 256 bytes long; at most 255 fit AMQP");
    }

    /// Files that were written by any version must stay readable.
    #[test]
    fn the_format_is_frozen() {
        let line = r#"{"vramq_letter":1,"queue":"vramq.dead.m","fingerprint":"1e5b0b1b5c","properties":{"message_id":"a","type":"done","delivery_mode":2},"headers":{"n":{"i64":7},"s":{"text":"t"},"t":{"table":{"x":"void"}}},"body":"AAEC"}"#;
        let letter = read(line).unwrap();
        assert_eq!((letter.id(), letter.body.as_slice()), (Some("a"), &[0, 1, 2][..]));
        let again = write(&letter).unwrap();
        let without = |line: &str| {
            line.split(r#""fingerprint":"#).map(|part| part.split_once(',').unwrap().1.to_owned()).last()
        };
        assert_eq!(without(&again), without(line));
    }
}
