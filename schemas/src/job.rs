//! The body of a job: a model's name, inputs, parameters.

use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::json_text::JsonText;
use crate::notation::Notation;

/// The most inputs of one job. Bounds what a body of many tiny inputs unfolds to in memory: an input costs
/// 3 bytes of JSON but 32 bytes once decoded, so this caps that overhead at 2 MiB.
pub const ITEMS_MAX: usize = 65_536;

/// The most bytes of a job's `params`, as JSON text. They are settings, not data; parsed JSON can take ten times
/// its text.
pub const PARAMS_BYTES_MAX: usize = 64 * 1024;

/// The longest name of a model, in bytes: with the prefixes of [`topology`](crate::topology) it still fits an
/// AMQP short string of 255.
pub const MODEL_NAME_BYTES_MAX: usize = 128;

/// The body of a job message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// The model to run; also the routing key.
    #[serde(deserialize_with = "text")]
    pub model: String,
    /// The items, at most [`ITEMS_MAX`].
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

/// Engine settings: a JSON object, at most [`PARAMS_BYTES_MAX`] as text. Travels as JSON text in bincode.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Params(pub Map<String, Value>);

/// The one parameter that every model has, because workers take it before the engine sees the others: whether the caller wants
/// replies of type `progress`.
const PROGRESS: &str = "progress";

impl Params {
    /// Asks for replies of type `progress`.
    pub fn ask_for_progress(&mut self) {
        self.0.insert(PROGRESS.to_owned(), Value::Bool(true));
    }

    /// Takes the parameter `progress` out; what is left is for the engine.
    ///
    /// # Errors
    /// The parameter is neither true nor false.
    pub fn take_progress(&mut self) -> Result<bool, String> {
        match self.0.remove(PROGRESS) {
            None => Ok(false),
            Some(Value::Bool(wanted)) => Ok(wanted),
            Some(_) => Err(format!("params.{PROGRESS} must be true or false")),
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

/// Reads a text by way of a borrowed one, so that its length is checked before it is allocated (see
/// [`codec`](crate::codec)).
pub(crate) fn text<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    Text.deserialize(deserializer)
}

/// [`text`], and nothing that would pass for one: MessagePack has bytes beside texts.
pub(crate) struct Text;

impl<'de> DeserializeSeed<'de> for Text {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

/// Reads inputs one by one, so that a fault names its index and a flood of them stops at the cap.
fn inputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Input>, D::Error> {
    deserializer.deserialize_seq(Items { name: "inputs", seed: PhantomData })
}

/// A bounded list under construction; shared with replies, which have the same cap.
pub(crate) struct Items<S> {
    pub(crate) name: &'static str,
    /// Reads one item.
    pub(crate) seed: S,
}

impl<'de, S: DeserializeSeed<'de> + Copy> Visitor<'de> for Items<S> {
    type Value = Vec<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {ITEMS_MAX} {}", self.name)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<S::Value>, A::Error> {
        let mut items = Vec::new();
        loop {
            let at = items.len();
            let item = seq
                .next_element_seed(self.seed)
                .map_err(|e| de::Error::custom(format_args!("{}[{at}]: {e}", self.name)))?;
            match item {
                None => return Ok(items),
                Some(_) if at == ITEMS_MAX => return Err(de::Error::invalid_length(at + 1, &self)),
                Some(item) => items.push(item),
            }
        }
    }
}

impl Serialize for Params {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            return self.0.serialize(serializer);
        }
        serde_json::to_string(&self.0).map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Params {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = if deserializer.is_human_readable() {
            Box::<RawValue>::deserialize(deserializer)?.get().to_owned()
        } else {
            text(deserializer)?
        };
        Self::of_text(&text).map_err(de::Error::custom)
    }
}

impl Params {
    /// Reads JSON text. Its size is checked before it is parsed.
    pub(crate) fn of_text(text: &str) -> Result<Self, String> {
        if text.len() > PARAMS_BYTES_MAX {
            return Err(format!("params take {} bytes, at most {PARAMS_BYTES_MAX} are allowed", text.len()));
        }
        serde_json::from_str(text).map(Self).map_err(|e| format!("params: {e}"))
    }
}
