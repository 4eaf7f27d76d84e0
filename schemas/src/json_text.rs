//! A JSON value as text: checked once, and passed on byte for byte without being parsed into a tree.

use std::fmt;

use serde::de::{self, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// The text of one JSON value, which serde_json can parse: at most 127 levels deep, numbers within the range of an f64, no lone surrogates.
/// Kept as text, because a parsed tree can take a hundred times the memory, and most code only passes the value on. Equality compares
/// texts: `1.0` is not `1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JsonText(Box<str>);

/// Why a text is not a JSON value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidJson(String);

impl JsonText {
    /// # Errors
    /// The text is not one JSON value, or one that parsers refuse (see the type).
    pub fn parse(text: &str) -> Result<Self, InvalidJson> {
        let text = text.trim_ascii();
        check(text).map_err(|error| InvalidJson(error.to_string()))?;
        Ok(Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text of a value as a body has it.
    pub(crate) fn of_text(text: Box<str>) -> Result<Self, InvalidJson> {
        check(&text).map_err(|error| InvalidJson(fault_in_value(&error)))?;
        Ok(Self(text))
    }

    /// Serializes the text as it stands. Only for a serializer of serde_json.
    pub(crate) fn raw(&self) -> Result<&RawValue, serde_json::Error> {
        serde_json::from_str(&self.0)
    }
}

impl From<&Value> for JsonText {
    /// A value deeper than 127 levels makes a text that workers reject.
    fn from(value: &Value) -> Self {
        Self(value.to_string().into())
    }
}

impl From<Value> for JsonText {
    fn from(value: Value) -> Self {
        Self::from(&value)
    }
}

impl fmt::Display for JsonText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw().map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

fn check(text: &str) -> serde_json::Result<()> {
    serde_json::from_str::<Checked>(text).map(|Checked| ())
}

/// What is wrong with the text of a value that stands in a body. serde_json takes a position at the end of a message for the one in the
/// body, and would not add that.
pub(crate) fn fault_in_value(error: &serde_json::Error) -> String {
    let (line, column, whole) = (error.line(), error.column(), error.to_string());
    match whole.strip_suffix(&format!(" at line {line} column {column}")) {
        Some(what) => format!("{what} in line {line}, column {column} of the value"),
        None => whole,
    }
}

/// Checks a value without keeping it. Unlike `IgnoredAny`, for which serde_json skips the text, this checks everything that a parser does:
/// depth, numbers, escapes.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(CheckedVisitor)
    }
}

struct CheckedVisitor;

impl<'de> Visitor<'de> for CheckedVisitor {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Checked, A::Error> {
        while items.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Checked, A::Error> {
        while entries.next_entry::<Checked, Checked>()?.is_some() {}
        Ok(Checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_keeps_its_text() {
        for text in [
            "null",
            "true",
            "-7",
            "1.50",
            "\"\\u00e9\"",
            "{\"b\": [1, {}],  \"a\":\"x\"}",
            "18446744073709551615",
        ] {
            assert_eq!(JsonText::parse(&format!(" {text}\n")).unwrap().as_str(), text);
            assert_eq!(serde_json::to_string(&JsonText::parse(text).unwrap()).unwrap(), text);
        }
    }

    #[test]
    fn a_text_that_parsers_refuse_is_refused() {
        let deep = format!("{}{}", "[".repeat(128), "]".repeat(128));
        for text in ["", "{", "1 2", "{\"a\":1,}", "nul", "\"\\ud800\"", "1e999", "{1:2}", "'x'", &deep] {
            assert!(JsonText::parse(text).is_err(), "{text}");
        }
        let fits = format!("{}{}", "[".repeat(127), "]".repeat(127));
        serde_json::from_str::<Value>(JsonText::parse(&fits).unwrap().as_str()).unwrap();
    }
}
