//! Checks a value against a schema, with the part of JSON Schema that is used here.

use serde_json::Value;

/// Whether the value fits; if not, where it does not.
pub fn validate(schema: &Value, value: &Value) -> Result<(), String> {
    if let Some(forms) = schema["anyOf"].as_array() {
        return if forms.iter().any(|form| validate(form, value).is_ok()) {
            Ok(())
        } else {
            Err(format!("{value} has none of the forms"))
        };
    }
    if let Some(kind) = schema["type"].as_str().filter(|kind| !is(kind, value)) {
        return Err(format!("{value} is no {kind}"));
    }
    if schema["enum"].as_array().is_some_and(|words| !words.contains(value)) {
        return Err(format!("{value} is not listed"));
    }
    let count = |name: &str| schema[name].as_u64();
    let length = value.as_array().map(|elements| elements.len() as u64);
    if length.is_some_and(|n| n < count("minItems").unwrap_or(0) || n > count("maxItems").unwrap_or(u64::MAX))
    {
        return Err(format!("{} elements", length.unwrap_or(0)));
    }
    for element in value.as_array().into_iter().flatten() {
        validate(&schema["items"], element)?;
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !object.contains_key(name) {
            return Err(format!("`{name}` is missing"));
        }
    }
    for (name, value) in object {
        match schema["properties"].get(name) {
            Some(property) => validate(property, value).map_err(|error| format!("{name}: {error}"))?,
            None if schema["additionalProperties"] == false => return Err(format!("`{name}` is unknown")),
            None => {}
        }
    }
    Ok(())
}

fn is(kind: &str, value: &Value) -> bool {
    match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        _ => value.is_null(),
    }
}
