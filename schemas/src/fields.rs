//! Values of AMQP's header fields: as Rust's own types, and their bytes on the wire.

use amq_protocol_types::{AMQPValue, FieldTable};

/// The longest text put into one header, in bytes. All headers of a message share one frame of 128 KiB with
/// whatever headers the publisher sent.
pub const TEXT_BYTES_MAX: usize = 2048;

/// A text as a header's value, cut to [`TEXT_BYTES_MAX`].
pub fn text(value: &str) -> AMQPValue {
    cut(value, TEXT_BYTES_MAX)
}

pub(crate) fn cut(value: &str, bytes_max: usize) -> AMQPValue {
    AMQPValue::LongString(value[..value.floor_char_boundary(bytes_max)].into())
}

/// A number as a header's value. AMQP headers have no unsigned 64-bit integers, so numbers saturate at `i64::MAX`.
pub fn long(value: u64) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(value).unwrap_or(i64::MAX))
}

/// A header's value as text, whichever of AMQP's string types it has.
pub fn as_text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(s) => Some(String::from_utf8_lossy(s.as_bytes()).into_owned()),
        AMQPValue::ShortString(s) => Some(s.as_str().to_owned()),
        AMQPValue::ByteArray(b) => Some(String::from_utf8_lossy(b.as_slice()).into_owned()),
        _ => None,
    }
}

/// A header's value of any integer type: client libraries choose the type by the value's size. No other type is a number, timestamps
/// (seconds since 1970) included.
pub fn integer(value: Option<&AMQPValue>) -> Option<i64> {
    match value? {
        AMQPValue::ShortShortInt(n) => Some((*n).into()),
        AMQPValue::ShortShortUInt(n) => Some((*n).into()),
        AMQPValue::ShortInt(n) => Some((*n).into()),
        AMQPValue::ShortUInt(n) => Some((*n).into()),
        AMQPValue::LongInt(n) => Some((*n).into()),
        AMQPValue::LongUInt(n) => Some((*n).into()),
        AMQPValue::LongLongInt(n) => Some(*n),
        _ => None,
    }
}

/// The bytes of headers on the wire.
pub fn table_bytes(table: &FieldTable) -> usize {
    4 + table.into_iter().map(|(name, value)| 1 + name.as_str().len() + value_bytes(value)).sum::<usize>()
}

/// The bytes of a header's value on the wire (AMQP 0-9-1, 4.2.5), its type tag included.
pub fn value_bytes(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) | AMQPValue::ShortShortInt(_) | AMQPValue::ShortShortUInt(_) => 1,
        AMQPValue::ShortInt(_) | AMQPValue::ShortUInt(_) => 2,
        AMQPValue::LongInt(_) | AMQPValue::LongUInt(_) | AMQPValue::Float(_) => 4,
        AMQPValue::DecimalValue(_) => 5,
        AMQPValue::LongLongInt(_) | AMQPValue::Double(_) | AMQPValue::Timestamp(_) => 8,
        AMQPValue::ShortString(s) => 1 + s.as_str().len(),
        AMQPValue::LongString(s) => 4 + s.len(),
        AMQPValue::ByteArray(b) => 4 + b.len(),
        AMQPValue::FieldArray(items) => 4 + items.as_slice().iter().map(value_bytes).sum::<usize>(),
        AMQPValue::FieldTable(table) => table_bytes(table),
    }
}

/// A value for an error message: short, whatever a hostile header holds.
pub(crate) fn shown(value: Option<&AMQPValue>) -> String {
    let Some(value) = value else {
        return "absent".to_owned();
    };
    match (integer(Some(value)), as_text(value)) {
        (Some(number), _) => number.to_string(),
        (_, Some(text)) => format!("the text {:?}", text.chars().take(40).collect::<String>()),
        _ => format!("of type {:?}", value.get_type()),
    }
}
