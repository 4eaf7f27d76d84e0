//! The settings of a job.

use serde::de;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::json_text::fault_in_value;
use crate::limits::PARAMS_BYTES_MAX;
use crate::reading::text;

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
        serde_json::from_str(text).map(Self).map_err(|e| format!("params: {}", fault_in_value(&e)))
    }
}
