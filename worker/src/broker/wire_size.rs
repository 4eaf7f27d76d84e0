//! What outputs take on the wire, before they are written.

use vramq_schemas::{Embedding, Encoding, Output, Values};

/// About the bytes that an output takes on the wire; only where to cut depends on it.
pub fn wire_bytes(output: &Output, encoding: Encoding) -> usize {
    let json = encoding == Encoding::Json;
    16 + match output {
        Output::Embedding(Embedding { values, base64 }) => {
            let raw = match values {
                Values::F32(v) => v.len() * 4,
                Values::F16(v) => v.len() * 2,
            };
            match (json, base64) {
                (false, _) => raw,
                (true, true) => raw * 4 / 3,
                // "-0.012345678," and the like.
                (true, false) => values.len() * 13,
            }
        }
        Output::Json(value) => json_bytes(value),
        Output::Bytes { bytes, .. } => bytes.len() * if json { 4 } else { 3 } / 3,
        Output::Uri(uri) => uri.len(),
    }
}

/// The most bytes that a JSON value takes as text, without writing it. Text that needs escapes may take six times its
/// length, so a mere estimate could cut a reply above the cap.
fn json_bytes(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::String(text) => text_bytes(text),
        serde_json::Value::Array(items) => 2 + items.iter().map(|item| json_bytes(item) + 1).sum::<usize>(),
        serde_json::Value::Object(map) => {
            let entries = map.iter().map(|(key, value)| text_bytes(key) + json_bytes(value) + 2);
            2 + entries.sum::<usize>()
        }
        // The longest f64: "-1.2345678901234567e-100".
        serde_json::Value::Number(_) => 24,
        serde_json::Value::Bool(_) | serde_json::Value::Null => 5,
    }
}

fn text_bytes(text: &str) -> usize {
    let escaped = |byte| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 2,
        0..0x20 => 6,
        _ => 1,
    };
    2 + text.bytes().map(escaped).sum::<usize>()
}
