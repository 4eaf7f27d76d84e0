//! Bodies in MessagePack: the fields of the JSON bodies, with bytes and vectors as `bin`. The only user of rmp-serde.

use serde::de::{self, DeserializeSeed as _};
use serde::ser::{self, SerializeMap};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_bytes::Bytes;
use serde_json::Value;

use crate::embedding::{Embedding, Values};
use crate::job::{Input, Job, NotedInput};
use crate::json_budget::{JsonBudget, TEXT_MAX};
use crate::limits::{BODY_BYTES_MAX, PARAMS_BYTES_MAX};
use crate::notation::Notation;
use crate::output::{NotedOutput, Output};
use crate::params::Params;
use crate::reading::{Items, text};
use crate::reply::{Failure, ItemProgress, Outputs};
use crate::transcript::{JsonValue, TextBudget};

/// How deep a body may be nested: enough for a JSON value of 127 levels, in an input, in the inputs, in a job; rmp-serde counts one
/// more. [`JsonText`](crate::JsonText) says exactly how deep a value may be.
const DEPTH_MAX: usize = 128 + 4;

/// A body's form in MessagePack.
pub trait MessagePack: Sized {
    /// # Errors
    /// A part of the body has no form in MessagePack.
    fn serialize_msgpack<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;

    /// # Errors
    /// What is read is no such body.
    fn deserialize_msgpack<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error>;
}

/// Writes a body.
pub(crate) fn write<T: MessagePack>(body: &T) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
    body.serialize_msgpack(&mut serializer).map_err(|e| e.to_string())?;
    Ok(bytes)
}

/// Reads a body. Texts and bytes are borrowed from it at first, so that a length is compared with what is there before anything
/// is allocated.
pub(crate) fn read<T: MessagePack>(bytes: &[u8]) -> Result<T, String> {
    // A list of a body's values in their order would be read, too.
    if matches!(bytes, [0x90..=0x9f | 0xdc | 0xdd, ..]) {
        return Err("the body is a list; it must be a map".to_owned());
    }
    let mut deserializer = rmp_serde::Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(DEPTH_MAX);
    let body = T::deserialize_msgpack(&mut deserializer).map_err(|e| e.to_string())?;
    // The deserializer does not report its position. Reading one more scalar fails at its first byte only at the end of the body.
    match bool::deserialize(&mut deserializer) {
        Err(rmp_serde::decode::Error::InvalidMarkerRead(_)) => Ok(body),
        _ => Err("bytes follow the body".to_owned()),
    }
}

/// Bodies without bytes, vectors or JSON values have the form that they have in JSON.
macro_rules! as_in_json {
    ($($body:ty),+) => { $(
        impl MessagePack for $body {
            fn serialize_msgpack<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.serialize(serializer)
            }

            fn deserialize_msgpack<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::deserialize(deserializer)
            }
        }
    )+ };
}

as_in_json!(Failure, ItemProgress);

/// Bodies whose fields have forms of their own, in a struct that mirrors them.
macro_rules! mirrored {
    ($($body:ty, $mirror:ty);+) => { $(
        impl MessagePack for $body {
            fn serialize_msgpack<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                <$mirror>::serialize(self, serializer)
            }

            fn deserialize_msgpack<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <$mirror>::deserialize(deserializer)
            }
        }
    )+ };
}

mirrored!(Job, MirroredJob; Outputs, MirroredOutputs);

#[derive(Serialize, Deserialize)]
#[serde(remote = "Job", deny_unknown_fields)]
struct MirroredJob {
    #[serde(deserialize_with = "text")]
    model: String,
    #[serde(serialize_with = "write_inputs", deserialize_with = "read_inputs")]
    inputs: Vec<Input>,
    #[serde(default, serialize_with = "write_params", deserialize_with = "read_params")]
    params: Params,
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Outputs")]
struct MirroredOutputs {
    #[serde(deserialize_with = "text")]
    model: String,
    #[serde(serialize_with = "write_outputs", deserialize_with = "read_outputs")]
    outputs: Vec<Output>,
}

fn write_inputs<S: Serializer>(inputs: &[Input], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(inputs.iter().map(WrittenInput))
}

fn read_inputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Input>, D::Error> {
    let budget = TextBudget::new(BODY_BYTES_MAX);
    let seed = NotedInput(Notation::MessagePack(&budget));
    deserializer.deserialize_seq(Items { name: "inputs", seed })
}

fn write_params<S: Serializer>(params: &Params, serializer: S) -> Result<S::Ok, S::Error> {
    params.0.serialize(serializer)
}

fn read_params<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Params, D::Error> {
    let budget = TextBudget::new(PARAMS_BYTES_MAX);
    let text = JsonValue(&budget)
        .deserialize(deserializer)
        .map_err(|e| de::Error::custom(format_args!("params: {e}")))?;
    Params::of_text(&text).map_err(de::Error::custom)
}

fn write_outputs<S: Serializer>(outputs: &[Output], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(outputs.iter().map(WrittenOutput))
}

fn read_outputs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Output>, D::Error> {
    let (budget, texts) = (JsonBudget::default(), TextBudget::new(TEXT_MAX));
    let seed = NotedOutput { budget: &budget, notation: Notation::MessagePack(&texts) };
    deserializer.deserialize_seq(Items { name: "outputs", seed })
}

struct WrittenInput<'a>(&'a Input);

impl Serialize for WrittenInput<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Input::Text(text) = self.0 {
            return serializer.serialize_str(text);
        }
        let mut map = serializer.serialize_map(Some(1))?;
        match self.0 {
            // Handled above.
            Input::Text(text) => map.serialize_entry("text", text),
            Input::Bytes(bytes) => map.serialize_entry("bytes", Bytes::new(bytes)),
            Input::Uri(uri) => map.serialize_entry("uri", uri),
            Input::Json(value) => {
                let value: Value = serde_json::from_str(value.as_str()).map_err(ser::Error::custom)?;
                map.serialize_entry("json", &value)
            }
        }?;
        map.end()
    }
}

struct WrittenOutput<'a>(&'a Output);

impl Serialize for WrittenOutput<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entries = match self.0 {
            Output::Embedding(Embedding { values: Values::F32(_), base64: false })
            | Output::Json(_)
            | Output::Uri(_)
            | Output::Sparse(_) => 1,
            Output::Embedding(_) | Output::Bytes { .. } => 2,
        };
        let mut map = serializer.serialize_map(Some(entries))?;
        match self.0 {
            Output::Embedding(Embedding { values, base64: true }) => {
                map.serialize_entry("embedding", Bytes::new(&values.to_le_bytes()))?;
                map.serialize_entry("dtype", &values.dtype())?;
            }
            Output::Embedding(Embedding { values: Values::F32(numbers), .. }) => {
                map.serialize_entry("embedding", numbers)?;
            }
            Output::Embedding(Embedding { values, .. }) => {
                map.serialize_entry("embedding", &values.to_f32())?;
                map.serialize_entry("dtype", &values.dtype())?;
            }
            Output::Json(value) => map.serialize_entry("json", value)?,
            Output::Bytes { media_type, bytes } => {
                map.serialize_entry("bytes", Bytes::new(bytes))?;
                map.serialize_entry("media_type", media_type)?;
            }
            Output::Uri(uri) => map.serialize_entry("uri", uri)?,
            Output::Sparse(sparse) => map.serialize_entry("sparse", sparse)?,
        }
        map.end()
    }
}
