//! The result for one item.

use std::borrow::Cow;
use std::fmt;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};
use serde::ser::{self, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::embedding::{Dtype, Embedding, Values};
use crate::json_budget::JsonBudget;
use crate::notation::Notation;
use crate::reading::{Items, Text};
use crate::sparse::{Sparse, SparseFields};

/// The result for one item. In JSON one of `{"embedding": […]}`, `{"embedding": "<base64>", "dtype": "f32"}`,
/// `{"json": …}`, `{"bytes": "<base64>", "media_type": "…"}`, `{"uri": "…"}`, `{"sparse": {"indices": […], "values": […]}}`.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    Embedding(Embedding),
    Json(Value),
    Bytes {
        media_type: String,
        bytes: Vec<u8>,
    },
    Uri(String),
    /// Since version 3 of the bincode encoding.
    Sparse(Sparse),
}

/// Reads the outputs of a reply, which share one budget.
pub(crate) fn outputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Output>, D::Error> {
    let budget = JsonBudget::default();
    deserializer.deserialize_seq(Items { name: "outputs", seed: &budget })
}

/// [`Output`] for formats that are not self-describing. Variants are only ever appended, with a new version of the encoding.
#[derive(Serialize, Deserialize)]
enum TaggedOutput<'a> {
    Embedding {
        dtype: Dtype,
        #[serde(borrow, with = "serde_bytes")]
        le_bytes: Cow<'a, [u8]>,
        base64: bool,
    },
    /// As JSON text.
    Json(#[serde(borrow)] Cow<'a, str>),
    Bytes {
        #[serde(borrow)]
        media_type: Cow<'a, str>,
        #[serde(borrow, with = "serde_bytes")]
        bytes: Cow<'a, [u8]>,
    },
    Uri(#[serde(borrow)] Cow<'a, str>),
    Sparse {
        /// Little-endian u32.
        #[serde(borrow, with = "serde_bytes")]
        indices: Cow<'a, [u8]>,
        /// Little-endian f32.
        #[serde(borrow, with = "serde_bytes")]
        values: Cow<'a, [u8]>,
    },
}

impl Serialize for Output {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            self.serialize_json(serializer)
        } else {
            self.serialize_tagged(serializer)
        }
    }
}

impl Output {
    fn serialize_json<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Self::Embedding(Embedding { values, base64: false }) = self
            && values.first_not_finite().is_some()
        {
            // serde_json would write `null`, which no reader takes for a number.
            return Err(ser::Error::custom(
                "the embedding has elements that are not finite, which JSON numbers cannot express",
            ));
        }
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::Embedding(Embedding { values, base64: true }) => {
                map.serialize_entry("embedding", &BASE64.encode(values.to_le_bytes()))?;
                map.serialize_entry("dtype", &values.dtype())?;
            }
            Self::Embedding(Embedding { values: Values::F32(numbers), .. }) => {
                map.serialize_entry("embedding", numbers)?;
            }
            Self::Embedding(Embedding { values, .. }) => {
                map.serialize_entry("embedding", &values.to_f32())?;
                map.serialize_entry("dtype", &values.dtype())?;
            }
            Self::Json(value) => map.serialize_entry("json", value)?,
            Self::Bytes { media_type, bytes } => {
                map.serialize_entry("bytes", &BASE64.encode(bytes))?;
                map.serialize_entry("media_type", media_type)?;
            }
            Self::Uri(uri) => map.serialize_entry("uri", uri)?,
            Self::Sparse(sparse) => map.serialize_entry("sparse", sparse)?,
        }
        map.end()
    }

    fn serialize_tagged<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Embedding(Embedding { values, base64 }) => TaggedOutput::Embedding {
                dtype: values.dtype(),
                le_bytes: values.to_le_bytes().into(),
                base64: *base64,
            },
            Self::Json(value) => TaggedOutput::Json(value.to_string().into()),
            Self::Bytes { media_type, bytes } => {
                TaggedOutput::Bytes { media_type: media_type.into(), bytes: bytes.into() }
            }
            Self::Uri(uri) => TaggedOutput::Uri(uri.into()),
            Self::Sparse(sparse) => {
                let (indices, values) = sparse.to_le_bytes();
                TaggedOutput::Sparse { indices: indices.into(), values: values.into() }
            }
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Output {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        JsonBudget::default().deserialize(deserializer)
    }
}

impl<'de> DeserializeSeed<'de> for &JsonBudget {
    type Value = Output;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Output, D::Error> {
        if deserializer.is_human_readable() {
            return NotedOutput { budget: self, notation: Notation::Json }.deserialize(deserializer);
        }
        Ok(match TaggedOutput::deserialize(deserializer)? {
            TaggedOutput::Embedding { dtype, le_bytes, base64 } => Output::Embedding(Embedding {
                values: Values::from_le_bytes(dtype, &le_bytes).map_err(de::Error::custom)?,
                base64,
            }),
            TaggedOutput::Json(text) => Output::Json(self.parse(&text)?),
            TaggedOutput::Bytes { media_type, bytes } => {
                Output::Bytes { media_type: media_type.into_owned(), bytes: bytes.into_owned() }
            }
            TaggedOutput::Uri(uri) => Output::Uri(uri.into_owned()),
            TaggedOutput::Sparse { indices, values } => {
                Output::Sparse(Sparse::from_le_bytes(&indices, &values).map_err(de::Error::custom)?)
            }
        })
    }
}

/// The keys that say what an output is.
const KINDS: &str = "`embedding`, `json`, `bytes`, `uri`, `sparse`";

/// Reads an [`Output`] of an encoding that names its fields.
#[derive(Clone, Copy)]
pub(crate) struct NotedOutput<'b> {
    pub(crate) budget: &'b JsonBudget,
    pub(crate) notation: Notation<'b>,
}

impl<'de> DeserializeSeed<'de> for NotedOutput<'_> {
    type Value = Output;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Output, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for NotedOutput<'_> {
    type Value = Output;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an output with one of the keys {KINDS}")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Output, A::Error> {
        let Self { budget, notation } = self;
        let (mut vector, mut dtype, mut json, mut bytes, mut media_type, mut uri, mut sparse) =
            (None, Dtype::default(), None, None, String::new(), None, None);
        while let Some(key) = map.next_key_seed(Text)? {
            match key.as_str() {
                "embedding" => vector = Some(notation.read_vector(&mut map)?),
                "dtype" => dtype = map.next_value()?,
                "json" => json = Some(notation.read_json(&mut map)?),
                "bytes" => bytes = Some(notation.read_bytes(&mut map)?),
                "media_type" => media_type = map.next_value_seed(Text)?,
                "uri" => uri = Some(map.next_value_seed(Text)?),
                "sparse" => sparse = Some(map.next_value_seed(SparseFields)?),
                _ => {
                    return Err(de::Error::custom(format_args!("unknown field `{key}`, expected {KINDS}")));
                }
            }
        }
        match (vector, json, bytes, uri, sparse) {
            (Some(vector), None, None, None, None) => {
                vector.into_embedding(dtype).map(Output::Embedding).map_err(de::Error::custom)
            }
            (None, Some(text), None, None, None) => budget.parse(&text).map(Output::Json),
            (None, None, Some(bytes), None, None) => Ok(Output::Bytes { media_type, bytes }),
            (None, None, None, Some(uri), None) => Ok(Output::Uri(uri)),
            (None, None, None, None, Some(sparse)) => Ok(Output::Sparse(sparse)),
            _ => Err(de::Error::custom(format_args!("an output has exactly one of {KINDS}"))),
        }
    }
}
