//! Writes a value of MessagePack as JSON text, without making a tree of it.

use std::cell::Cell;
use std::fmt;
use std::io;

use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserializer, Serialize};

/// How many bytes of JSON text the JSON values of a body may still take: a byte of MessagePack may become six of text.
pub(crate) struct TextBudget {
    max: usize,
    left: Cell<usize>,
}

impl TextBudget {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, left: Cell::new(max) }
    }
}

/// Transcribes a MessagePack value into JSON text, without a tree. Values that JSON cannot express are errors: bytes, extensions, keys that
/// are not texts, numbers that are not finite.
#[derive(Clone, Copy)]
pub(crate) struct JsonValue<'b>(pub(crate) &'b TextBudget);

impl<'de> DeserializeSeed<'de> for JsonValue<'_> {
    type Value = Box<str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Box<str>, D::Error> {
        let mut text = JsonWriter { budget: self.0, text: Vec::new() };
        WriteValue { text: &mut text, after: "" }.deserialize(deserializer)?;
        let text = String::from_utf8(text.text).map_err(de::Error::custom)?;
        Ok(text.into_boxed_str())
    }
}

/// A JSON text as far as it is written.
struct JsonWriter<'b> {
    budget: &'b TextBudget,
    text: Vec<u8>,
}

impl JsonWriter<'_> {
    fn put<E: de::Error>(&mut self, text: &str) -> Result<(), E> {
        io::Write::write_all(self, text.as_bytes()).map_err(E::custom)
    }

    fn put_value<E: de::Error>(&mut self, value: impl Serialize) -> Result<(), E> {
        serde_json::to_writer(self, &value).map_err(E::custom)
    }
}

impl io::Write for JsonWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let TextBudget { max, left } = self.budget;
        let rest = left.get().checked_sub(bytes.len()).ok_or_else(|| {
            io::Error::other(format!("the JSON values take more than {max} bytes as JSON text"))
        })?;
        left.set(rest);
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes the value that it reads, after what separates it from the one before.
struct WriteValue<'t, 'b> {
    text: &'t mut JsonWriter<'b>,
    after: &'static str,
}

impl<'de> DeserializeSeed<'de> for WriteValue<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.text.put::<D::Error>(self.after)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for WriteValue<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value that JSON has, too")
    }

    fn visit_unit<E: de::Error>(self) -> Result<(), E> {
        self.text.put("null")
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<(), E> {
        self.text.put_value(value)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<(), E> {
        self.text.put_value(value)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<(), E> {
        self.text.put_value(value)
    }

    fn visit_f32<E: de::Error>(self, value: f32) -> Result<(), E> {
        match value.is_finite() {
            // In as few digits as tell it from other f32.
            true => self.text.put_value(value),
            false => Err(E::invalid_value(de::Unexpected::Float(value.into()), &self)),
        }
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<(), E> {
        match value.is_finite() {
            true => self.text.put_value(value),
            false => Err(E::invalid_value(de::Unexpected::Float(value), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<(), E> {
        self.text.put_value(value)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        self.text.put::<A::Error>("[")?;
        let mut after = "";
        while seq.next_element_seed(WriteValue { text: &mut *self.text, after })?.is_some() {
            after = ",";
        }
        self.text.put("]")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        self.text.put::<A::Error>("{")?;
        let mut after = "";
        while map.next_key_seed(WriteKey(WriteValue { text: &mut *self.text, after }))?.is_some() {
            map.next_value_seed(WriteValue { text: &mut *self.text, after: ":" })?;
            after = ",";
        }
        self.text.put("}")
    }
}

/// Writes the key that it reads: a text, and nothing else that MessagePack has for keys.
struct WriteKey<'t, 'b>(WriteValue<'t, 'b>);

impl<'de> DeserializeSeed<'de> for WriteKey<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.0.text.put::<D::Error>(self.0.after)?;
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for WriteKey<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text as key")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<(), E> {
        self.0.text.put_value(key)
    }
}
