//! Parses a field that has texts or lists of token ids. Values that are neither are read but dropped, because many small objects would take
//! a hundred times the memory of their text.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// The deepest nesting of lists: a list of lists of token ids.
const LISTS_MAX: u32 = 2;

/// Parses the field, for `deserialize_with`. Objects lose their fields, and lists nested deeper than [`LISTS_MAX`] their items.
///
/// # Errors
/// It is no value.
pub fn texts_or_ids<'de, D: Deserializer<'de>>(field: D) -> Result<Value, D::Error> {
    Shallow { lists: 0 }.deserialize(field)
}

/// Reads a value inside this many lists.
#[derive(Clone, Copy)]
struct Shallow {
    lists: u32,
}

impl<'de> DeserializeSeed<'de> for Shallow {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Shallow {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, or a list")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut kept = Vec::new();
        if self.lists < LISTS_MAX {
            let within = Self { lists: self.lists + 1 };
            while let Some(item) = items.next_element_seed(within)? {
                kept.push(item);
            }
            // A new list has room for four items, so many lists of one id would waste memory.
            kept.shrink_to_fit();
        } else {
            while items.next_element::<IgnoredAny>()?.is_some() {}
        }
        Ok(Value::Array(kept))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Object(Map::new()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> serde_json::Result<Value> {
        texts_or_ids(&mut serde_json::Deserializer::from_str(text))
    }

    #[test]
    fn inputs_are_read_as_they_are() {
        for input in [
            json!("a"),
            json!(["a", "b"]),
            json!([1, -2, 3.5]),
            json!([[1], [2, u64::MAX]]),
            json!([]),
            json!([[]]),
            json!(null),
            json!(["a", null, true]),
        ] {
            assert_eq!(read(&input.to_string()).unwrap(), input);
        }
    }

    #[test]
    fn values_that_cannot_be_inputs_are_not_kept() {
        for (text, kept) in [
            (r#"{"a": [1]}"#, json!({})),
            (r#"["a", {"b": {"c": 1}}, "d"]"#, json!(["a", {}, "d"])),
            ("[[[1, 2], 3], 4]", json!([[[], 3], 4])),
        ] {
            assert_eq!(read(text).unwrap(), kept, "{text}");
        }
        for malformed in ["[{]", r#"[{"a"}]"#, "[[[1,]]]", "[1", ""] {
            assert!(read(malformed).is_err(), "{malformed}");
        }
    }
}
