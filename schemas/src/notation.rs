//! The differences between JSON and MessagePack: bytes, vectors and JSON values. Bodies have the same fields in both.

use std::fmt;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::Deserializer;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use crate::embedding::{Dtype, Embedding, EmbeddingFormat, Values};
use crate::limits::BODY_BYTES_MAX;
use crate::transcript::{JsonValue, TextBudget};

/// An encoding that names its fields.
#[derive(Clone, Copy)]
pub(crate) enum Notation<'b> {
    /// Bytes are base64.
    Json,
    /// Bytes are `bin`, and JSON values are MessagePack's own. The budget bounds their text.
    MessagePack(&'b TextBudget),
}

impl Notation<'_> {
    /// How an error message shows where bytes stand.
    pub(crate) fn bytes_shown(self) -> &'static str {
        match self {
            Self::Json => r#""<base64>""#,
            Self::MessagePack(_) => "<bin>",
        }
    }

    /// Reads the value of a key as bytes.
    pub(crate) fn read_bytes<'de, A: MapAccess<'de>>(self, map: &mut A) -> Result<Vec<u8>, A::Error> {
        match map.next_value_seed(Content { notation: self, numbers: false })? {
            Vector::Bytes(bytes) => Ok(bytes),
            Vector::Numbers(_) => Err(de::Error::custom("bytes are not a list of numbers")),
        }
    }

    /// Reads the value of a key as a vector.
    pub(crate) fn read_vector<'de, A: MapAccess<'de>>(self, map: &mut A) -> Result<Vector, A::Error> {
        map.next_value_seed(Content { notation: self, numbers: true })
    }

    /// Reads the value of a key as the text of a JSON value. JSON's own text still has to be checked.
    pub(crate) fn read_json<'de, A: MapAccess<'de>>(self, map: &mut A) -> Result<Box<str>, A::Error> {
        match self {
            Self::Json => Ok(map.next_value::<Box<RawValue>>()?.into()),
            Self::MessagePack(budget) => map.next_value_seed(JsonValue(budget)),
        }
    }
}

/// The most elements of a vector: more would not fit a body as f32. A small number takes one byte, and four once decoded.
pub(crate) const ELEMENTS_MAX: usize = BODY_BYTES_MAX / size_of::<f32>();

/// A vector as a body has it: numbers, or their little-endian bytes.
pub(crate) enum Vector {
    Bytes(Vec<u8>),
    Numbers(Vec<f32>),
}

impl Vector {
    pub(crate) fn into_embedding(self, dtype: Dtype) -> Result<Embedding, String> {
        match self {
            Self::Numbers(values) => {
                Ok(EmbeddingFormat { dtype, ..EmbeddingFormat::default() }.embedding(values))
            }
            Self::Bytes(bytes) => {
                Ok(Embedding { values: Values::from_le_bytes(dtype, &bytes)?, base64: true })
            }
        }
    }
}

/// Reads bytes, or numbers if numbers are allowed here.
struct Content<'b> {
    notation: Notation<'b>,
    numbers: bool,
}

impl<'de> DeserializeSeed<'de> for Content<'_> {
    type Value = Vector;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vector, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Content<'_> {
    type Value = Vector;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.notation.bytes_shown();
        match self.numbers {
            true => write!(f, "numbers, or {bytes} of their little-endian bytes"),
            false => f.write_str(bytes),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vector, E> {
        match self.notation {
            Notation::Json => BASE64
                .decode(text)
                .map(Vector::Bytes)
                .map_err(|e| E::custom(format_args!("bytes are not base64: {e}"))),
            // Reject: base64 taken for the bytes themselves would give wrong results without an error.
            Notation::MessagePack(_) => Err(E::custom("bytes are a text; MessagePack has `bin` for them")),
        }
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Vector, E> {
        Ok(Vector::Bytes(bytes.to_vec()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vector, A::Error> {
        if !self.numbers {
            return Err(de::Error::invalid_type(de::Unexpected::Seq, &self));
        }
        let mut numbers = Vec::new();
        while let Some(number) = seq.next_element::<f32>()? {
            if numbers.len() == ELEMENTS_MAX {
                return Err(de::Error::custom(format_args!("a vector has at most {ELEMENTS_MAX} elements")));
            }
            numbers.push(number);
        }
        // The unused capacity of a doubling list would add up over the vectors of a body.
        numbers.shrink_to_fit();
        Ok(Vector::Numbers(numbers))
    }
}
