//! The body of a job: a model's name, inputs, parameters.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::json_text::JsonText;
#[cfg(doc)]
use crate::limits::ITEMS_MAX;
use crate::notation::Notation;
use crate::params::Params;
use crate::reading::{Items, Text, text};

/// The body of a job message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The model to run; also the routing key.
    #[serde(deserialize_with = "text")]
    pub model: String,
    /// The items: at least one, and at most [`ITEMS_MAX`].
    #[serde(deserialize_with = "inputs")]
    pub inputs: Vec<Input>,
    /// Settings for the engine; which ones there are is the engine's own.
    #[serde(default)]
    pub params: Params,
}

/// One item of a job. In JSON: `"text"`, `{"bytes": "<base64>"}`, `{"uri": "s3://…"}` or `{"json": …}`. In MessagePack the same,
/// with the bytes themselves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    Text(String),
    Bytes(Vec<u8>),
    /// A reference to stored bytes.
    Uri(String),
    /// A JSON value. Since version 2 of the bincode encoding.
    Json(JsonText),
}

impl Input {
    /// The variant's name as the wire has it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Bytes(_) => "bytes",
            Self::Uri(_) => "uri",
            Self::Json(_) => "json",
        }
    }
}

/// [`Input`] for formats that are not self-describing. Variants are only ever appended, with a new version of the encoding.
#[derive(Serialize, Deserialize)]
enum TaggedInput<'a> {
    Text(#[serde(borrow)] Cow<'a, str>),
    Bytes(#[serde(borrow, with = "serde_bytes")] Cow<'a, [u8]>),
    Uri(#[serde(borrow)] Cow<'a, str>),
    /// As JSON text.
    Json(#[serde(borrow)] Cow<'a, str>),
}

impl Serialize for Input {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !serializer.is_human_readable() {
            return match self {
                Self::Text(text) => TaggedInput::Text(text.into()),
                Self::Bytes(bytes) => TaggedInput::Bytes(bytes.into()),
                Self::Uri(uri) => TaggedInput::Uri(uri.into()),
                Self::Json(value) => TaggedInput::Json(value.as_str().into()),
            }
            .serialize(serializer);
        }
        if let Self::Text(text) = self {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        match self {
            // Handled above.
            Self::Text(text) => map.serialize_entry("text", text),
            Self::Bytes(bytes) => map.serialize_entry("bytes", &BASE64.encode(bytes)),
            Self::Uri(uri) => map.serialize_entry("uri", uri),
            Self::Json(value) => map.serialize_entry("json", value),
        }?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for Input {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return NotedInput(Notation::Json).deserialize(deserializer);
        }
        Ok(match TaggedInput::deserialize(deserializer)? {
            TaggedInput::Text(text) => Self::Text(text.into_owned()),
            TaggedInput::Bytes(bytes) => Self::Bytes(bytes.into_owned()),
            TaggedInput::Uri(uri) => Self::Uri(uri.into_owned()),
            TaggedInput::Json(text) => Self::Json(JsonText::parse(&text).map_err(de::Error::custom)?),
        })
    }
}

/// Reads an [`Input`] of an encoding that names its fields.
#[derive(Clone, Copy)]
pub(crate) struct NotedInput<'b>(pub(crate) Notation<'b>);

impl<'de> DeserializeSeed<'de> for NotedInput<'_> {
    type Value = Input;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Input, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for NotedInput<'_> {
    type Value = Input;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.bytes_shown();
        write!(f, r#"a text, {{"bytes": {bytes}}}, {{"uri": "<reference>"}} or {{"json": <value>}}"#)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Input, E> {
        Ok(Input::Text(text.to_owned()))
    }

    fn visit_string<E: de::Error>(self, text: String) -> Result<Input, E> {
        Ok(Input::Text(text))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Input, A::Error> {
        let Some(key) = map.next_key_seed(Text)? else {
            return Err(de::Error::invalid_length(0, &self));
        };
        let input = match key.as_str() {
            "bytes" => Input::Bytes(self.0.read_bytes(&mut map)?),
            "uri" => Input::Uri(map.next_value_seed(Text)?),
            "json" => Input::Json(JsonText::of_text(self.0.read_json(&mut map)?).map_err(de::Error::custom)?),
            _ => return Err(de::Error::unknown_field(&key, &["bytes", "uri", "json"])),
        };
        match map.next_key_seed(Text)? {
            None => Ok(input),
            Some(extra) => Err(de::Error::custom(format_args!("unexpected second key `{extra}`"))),
        }
    }
}

/// Reads inputs one by one, so that a fault names its index and a flood of them stops at the cap.
fn inputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Input>, D::Error> {
    deserializer.deserialize_seq(Items { name: "inputs", seed: PhantomData })
}
