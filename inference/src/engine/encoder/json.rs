//! Reads JSON files, with errors that name the key.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::LoadError;

type Keys = Map<String, Value>;

/// Reads the text of a file.
pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, LoadError> {
    serde_json::from_slice(text).map_err(|source| {
        // What is no table has no keys.
        let keys: Keys = serde_json::from_slice(text).unwrap_or_default();
        malformed::<T>(path, source, &keys)
    })
}

/// Reads the keys of a file.
pub(super) fn of_keys<T: DeserializeOwned>(path: &Path, keys: &Keys) -> Result<T, LoadError> {
    read(keys).map_err(|source| malformed::<T>(path, source, keys))
}

fn read<T: DeserializeOwned>(keys: &Keys) -> Result<T, serde_json::Error> {
    serde_json::from_value(Value::Object(keys.clone()))
}

fn malformed<T: DeserializeOwned>(path: &Path, source: serde_json::Error, keys: &Keys) -> LoadError {
    let path = path.to_owned();
    match faulty::<T>(keys) {
        Some((key, source)) => LoadError::JsonKey { path, key, source },
        None => LoadError::Json { path, source },
    }
}

/// The key whose value is wrong, and what is wrong with it. serde does not name it, and where structs share a table (`flatten`) it shows the
/// file's last line. So it is looked up: it has the value that the error quotes, and without it the error is another one.
fn faulty<T: DeserializeOwned>(keys: &Keys) -> Option<(String, serde_json::Error)> {
    let error = read::<T>(keys).err()?;
    let said = error.to_string();
    let is_quoted = |value: &Value| {
        let quoted = quoted(value);
        ["type", "value"].iter().any(|what| said.starts_with(&format!("invalid {what}: {quoted}, expected ")))
    };
    let is_cause = |key: &str| {
        let mut others = keys.clone();
        others.remove(key);
        read::<T>(&others).err().is_none_or(|error| error.to_string() != said)
    };
    let key = keys.iter().find(|(key, value)| is_quoted(value) && is_cause(key))?.0.clone();
    Some((key, error))
}

/// A value as serde's errors quote it.
fn quoted(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(own) => format!("boolean `{own}`"),
        Value::Number(own) if own.is_f64() => format!("floating point `{own}`"),
        Value::Number(own) => format!("integer `{own}`"),
        Value::String(own) => format!("string {own:?}"),
        Value::Array(_) => "sequence".to_owned(),
        Value::Object(_) => "map".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only the errors count")]
    struct Inner {
        heads: usize,
        kind: Option<String>,
    }

    #[derive(Debug, Deserialize)]
    #[expect(dead_code, reason = "only the errors count")]
    struct Outer {
        layers: usize,
        eps: Option<f64>,
        #[serde(flatten)]
        inner: Inner,
    }

    #[test]
    fn an_error_names_the_key() {
        for (text, expected) in [
            (
                r#"{"kind": null, "heads": null, "layers": 2}"#,
                "parse config.json: the key `heads`: invalid type: null, expected usize",
            ),
            (
                r#"{"kind": "2", "heads": 2, "layers": "2"}"#,
                "parse config.json: the key `layers`: invalid type: string \"2\", expected usize",
            ),
            (
                r#"{"heads": -2, "layers": 2}"#,
                "parse config.json: the key `heads`: invalid value: integer `-2`, expected usize",
            ),
            (
                r#"{"heads": 2, "layers": 2, "eps": [2]}"#,
                "parse config.json: the key `eps`: invalid type: sequence, expected f64",
            ),
            (r#"{"heads": 2}"#, "parse config.json: missing field `layers` at line 1"),
            (r#"{"heads": 2"#, "parse config.json: EOF while parsing an object at line 1"),
        ] {
            let error = parse::<Outer>(Path::new("config.json"), text.as_bytes()).unwrap_err();
            let source = std::error::Error::source(&error).unwrap();
            let shown = format!("{error}: {source}");
            assert!(shown.starts_with(expected), "{text}: {shown}");
        }
    }
}
