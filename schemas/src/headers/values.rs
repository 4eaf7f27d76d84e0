//! Numbers and booleans in headers, which a publisher may have got wrong.

use amq_protocol_types::{AMQPValue, FieldTable};

use crate::fields::{integer, shown};

/// A header that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("header `{name}` is {found}; it must be {expected}")]
pub struct InvalidHeader {
    pub name: &'static str,
    pub found: String,
    pub expected: &'static str,
}

pub(super) fn unsigned(table: &FieldTable, name: &'static str) -> Result<Option<u32>, InvalidHeader> {
    number(table, name, "a whole number from 0 to 4294967295")
}

/// A time in Unix milliseconds.
pub(super) fn moment_ms(table: &FieldTable, name: &'static str) -> Result<Option<u64>, InvalidHeader> {
    number(table, name, "a whole number of at least 0")
}

fn number<N: TryFrom<i64>>(
    table: &FieldTable,
    name: &'static str,
    expected: &'static str,
) -> Result<Option<N>, InvalidHeader> {
    let value = match table.inner().get(name) {
        None | Some(AMQPValue::Void) => return Ok(None),
        value => value,
    };
    let read = integer(value).and_then(|n| N::try_from(n).ok());
    read.map(Some).ok_or_else(|| InvalidHeader { name, found: shown(value), expected })
}

pub(super) fn boolean(table: &FieldTable, name: &'static str) -> Result<bool, InvalidHeader> {
    match table.inner().get(name) {
        None | Some(AMQPValue::Void) => Ok(false),
        Some(AMQPValue::Boolean(b)) => Ok(*b),
        value => Err(InvalidHeader { name, found: shown(value), expected: "a boolean" }),
    }
}
