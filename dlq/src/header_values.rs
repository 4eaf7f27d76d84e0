//! The values of headers, with their AMQP types, as JSON from which they are restored exactly. Pure.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use lapin::types::{AMQPValue, DecimalValue, FieldTable, ShortString};
use serde::{Deserialize, Serialize};

/// A header's value with its AMQP type, because the broker and client libraries distinguish them.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HeaderValue {
    Bool(bool),
    I8(i8),
    U8(u8),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    /// The bits in hexadecimal: JSON has no NaN, and readers round.
    F32Bits(String),
    F64Bits(String),
    Decimal {
        scale: u8,
        value: u32,
    },
    ShortText(String),
    Text(String),
    /// A text that is not UTF-8, in base64.
    TextBytes(String),
    Bytes(String),
    /// Seconds since 1970.
    Timestamp(u64),
    List(Vec<HeaderValue>),
    Table(BTreeMap<String, HeaderValue>),
    Void,
}

/// A value that AMQP does not take, or that is not what it says.
#[derive(Debug, thiserror::Error)]
#[error("{what} is {problem}")]
pub struct InvalidField {
    what: &'static str,
    problem: String,
}

/// The headers whose names satisfy `with`, as JSON.
pub(crate) fn to_json(table: &FieldTable, with: impl Fn(&str) -> bool) -> String {
    let mut table = table_to(table);
    table.retain(|name, _| with(name));
    // Cannot fail: names are texts, and floats are written as texts.
    serde_json::to_string(&table).unwrap_or_default()
}

pub(crate) fn table_to(table: &FieldTable) -> BTreeMap<String, HeaderValue> {
    table.into_iter().map(|(name, value)| (name.as_str().to_owned(), value_to(value))).collect()
}

fn value_to(value: &AMQPValue) -> HeaderValue {
    match value {
        AMQPValue::Boolean(b) => HeaderValue::Bool(*b),
        AMQPValue::ShortShortInt(n) => HeaderValue::I8(*n),
        AMQPValue::ShortShortUInt(n) => HeaderValue::U8(*n),
        AMQPValue::ShortInt(n) => HeaderValue::I16(*n),
        AMQPValue::ShortUInt(n) => HeaderValue::U16(*n),
        AMQPValue::LongInt(n) => HeaderValue::I32(*n),
        AMQPValue::LongUInt(n) => HeaderValue::U32(*n),
        AMQPValue::LongLongInt(n) => HeaderValue::I64(*n),
        AMQPValue::Float(x) => HeaderValue::F32Bits(format!("{:08x}", x.to_bits())),
        AMQPValue::Double(x) => HeaderValue::F64Bits(format!("{:016x}", x.to_bits())),
        AMQPValue::DecimalValue(DecimalValue { scale, value }) => {
            HeaderValue::Decimal { scale: *scale, value: *value }
        }
        AMQPValue::ShortString(s) => HeaderValue::ShortText(s.as_str().to_owned()),
        AMQPValue::LongString(s) => match std::str::from_utf8(s.as_bytes()) {
            Ok(text) => HeaderValue::Text(text.to_owned()),
            Err(_) => HeaderValue::TextBytes(BASE64.encode(s.as_bytes())),
        },
        AMQPValue::ByteArray(b) => HeaderValue::Bytes(BASE64.encode(b.as_slice())),
        AMQPValue::Timestamp(at) => HeaderValue::Timestamp(*at),
        AMQPValue::FieldArray(items) => HeaderValue::List(items.as_slice().iter().map(value_to).collect()),
        AMQPValue::FieldTable(table) => HeaderValue::Table(table_to(table)),
        AMQPValue::Void => HeaderValue::Void,
    }
}

pub(crate) fn table_from(table: BTreeMap<String, HeaderValue>) -> Result<FieldTable, InvalidField> {
    let mut read = FieldTable::default();
    for (name, value) in table {
        read.insert(short_from("header name", name)?, value_from(value)?);
    }
    Ok(read)
}

fn value_from(value: HeaderValue) -> Result<AMQPValue, InvalidField> {
    let bits = |text: &str| {
        u64::from_str_radix(text, 16)
            .map_err(|_| field("header", format!("not the bits of a number: {text:?}")))
    };
    Ok(match value {
        HeaderValue::Bool(b) => AMQPValue::Boolean(b),
        HeaderValue::I8(n) => AMQPValue::ShortShortInt(n),
        HeaderValue::U8(n) => AMQPValue::ShortShortUInt(n),
        HeaderValue::I16(n) => AMQPValue::ShortInt(n),
        HeaderValue::U16(n) => AMQPValue::ShortUInt(n),
        HeaderValue::I32(n) => AMQPValue::LongInt(n),
        HeaderValue::U32(n) => AMQPValue::LongUInt(n),
        HeaderValue::I64(n) => AMQPValue::LongLongInt(n),
        HeaderValue::F32Bits(text) => {
            let bits = u32::try_from(bits(&text)?)
                .map_err(|_| field("header", format!("not the bits of an f32: {text:?}")))?;
            AMQPValue::Float(f32::from_bits(bits))
        }
        HeaderValue::F64Bits(text) => AMQPValue::Double(f64::from_bits(bits(&text)?)),
        HeaderValue::Decimal { scale, value } => AMQPValue::DecimalValue(DecimalValue { scale, value }),
        HeaderValue::ShortText(text) => AMQPValue::ShortString(short_from("header", text)?),
        HeaderValue::Text(text) => AMQPValue::LongString(text.into()),
        HeaderValue::TextBytes(text) => AMQPValue::LongString(bytes_from("header", &text)?.into()),
        HeaderValue::Bytes(text) => AMQPValue::ByteArray(bytes_from("header", &text)?.into()),
        HeaderValue::Timestamp(at) => AMQPValue::Timestamp(at),
        HeaderValue::List(items) => {
            AMQPValue::FieldArray(items.into_iter().map(value_from).collect::<Result<Vec<_>, _>>()?.into())
        }
        HeaderValue::Table(table) => AMQPValue::FieldTable(table_from(table)?),
        HeaderValue::Void => AMQPValue::Void,
    })
}

pub(crate) fn short_from(what: &'static str, text: String) -> Result<ShortString, InvalidField> {
    let bytes = text.len();
    ShortString::try_new(text).map_err(|_| field(what, format!("{bytes} bytes long; at most 255 fit AMQP")))
}

pub(crate) fn bytes_from(what: &'static str, text: &str) -> Result<Vec<u8>, InvalidField> {
    BASE64.decode(text).map_err(|error| field(what, format!("not base64: {error}")))
}

fn field(what: &'static str, problem: String) -> InvalidField {
    InvalidField { what, problem }
}
