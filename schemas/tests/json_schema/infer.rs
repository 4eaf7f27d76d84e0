//! Generates JSON Schema from values as the code writes them, and from the comments in the code.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};
use vramq_schemas::ITEMS_MAX;
use vramq_schemas::headers::HISTORY_MAX;
use vramq_schemas::status::HEARTBEATS_MISSED_MAX;

/// Properties whose elements are one of several forms, each with its own keys.
const FORMS: [&str; 2] = ["inputs", "outputs"];

/// Generates schemas. `words` has the paths (such as `outputs.dtype`) of properties whose values are words of a closed list. All words of
/// the list must be among the samples. A property of the same name elsewhere may hold any text.
pub struct Inference<'a> {
    pub words: &'a [&'a str],
}

impl Inference<'_> {
    /// A schema that all samples of the property at `path` fit: the names of the properties that lead to it, with dots between them.
    pub fn infer(&self, path: &str, samples: &[&Value]) -> Value {
        match name_of(path) {
            // Models define these: settings, and any value.
            "params" => return json!({"type": "object"}),
            "json" => return json!({}),
            _ => {}
        }
        let mut by_type: BTreeMap<&str, Vec<&Value>> = BTreeMap::new();
        for sample in samples {
            by_type.entry(type_of(sample)).or_default().push(sample);
        }
        let mut forms: Vec<_> =
            by_type.iter().map(|(kind, samples)| self.of_one_type(path, kind, samples)).collect();
        if forms.len() == 1 { forms.remove(0) } else { json!({"anyOf": forms}) }
    }

    fn of_one_type(&self, path: &str, kind: &str, samples: &[&Value]) -> Value {
        match kind {
            "object" => self.object(path, samples),
            "array" => {
                let elements: Vec<_> =
                    samples.iter().filter_map(|sample| sample.as_array()).flatten().collect();
                let items = if FORMS.contains(&name_of(path)) {
                    self.one_of_forms(path, &elements)
                } else {
                    self.infer(path, &elements)
                };
                json!({"type": "array", "items": items})
            }
            "string" if self.words.contains(&path) => {
                let words: BTreeSet<_> = samples.iter().filter_map(|sample| sample.as_str()).collect();
                json!({"type": "string", "enum": words})
            }
            // Everything that is counted here is counted from 0.
            "integer" => json!({"type": "integer", "minimum": 0}),
            kind => json!({"type": kind}),
        }
    }

    fn object(&self, path: &str, samples: &[&Value]) -> Value {
        let objects: Vec<&Map<String, Value>> =
            samples.iter().filter_map(|sample| sample.as_object()).collect();
        let names: BTreeSet<&String> = objects.iter().flat_map(|object| object.keys()).collect();
        let required: Vec<_> =
            names.iter().filter(|name| objects.iter().all(|object| object.contains_key(**name))).collect();
        let properties: Map<String, Value> = names
            .iter()
            .map(|name| {
                let values: Vec<_> = objects.iter().filter_map(|object| object.get(*name)).collect();
                let path = if path.is_empty() { (*name).clone() } else { format!("{path}.{name}") };
                ((*name).clone(), self.infer(&path, &values))
            })
            .collect();
        json!({"type": "object", "required": required, "properties": properties})
    }

    /// Objects with the same keys are one form.
    fn one_of_forms(&self, path: &str, elements: &[&Value]) -> Value {
        let mut forms: BTreeMap<Vec<String>, Vec<&Value>> = BTreeMap::new();
        for element in elements {
            let keys = element.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default();
            forms.entry(keys).or_default().push(element);
        }
        json!({"anyOf": forms.values().map(|samples| self.infer(path, samples)).collect::<Vec<_>>()})
    }
}

fn name_of(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_u64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Adds the comments of a struct's fields as descriptions. `source` is the file that has the struct.
pub fn describe(schema: &mut Value, source: &str, structure: &str) {
    let comments = comments(source, structure);
    let Some(properties) = schema["properties"].as_object_mut() else { return };
    for (name, property) in properties {
        let field = name.trim_start_matches("vramq-").replace('-', "_");
        if let Some(comment) = comments.get(&field).filter(|comment| !comment.is_empty()) {
            property["description"] = comment.clone().into();
        }
    }
}

/// Constants that comments name, with what they are.
const CONSTANTS: [(&str, usize); 3] = [
    ("HEARTBEATS_MISSED_MAX", HEARTBEATS_MISSED_MAX as usize),
    ("HISTORY_MAX", HISTORY_MAX),
    ("ITEMS_MAX", ITEMS_MAX),
];

/// The comments of a struct's fields. Constants become numbers, and other links to code plain names.
fn comments(source: &str, structure: &str) -> BTreeMap<String, String> {
    let start = format!("pub struct {structure} {{");
    let body = source.lines().skip_while(|line| *line != start).skip(1).take_while(|line| *line != "}");
    let (mut found, mut comment) = (BTreeMap::new(), Vec::new());
    for line in body.map(str::trim) {
        if let Some(text) = line.strip_prefix("///") {
            comment.push(text.trim());
        } else if let Some((name, _)) = line.strip_prefix("pub ").and_then(|rest| rest.split_once(':')) {
            let text = std::mem::take(&mut comment).join(" ").replace(['[', ']', '`'], "");
            let text =
                CONSTANTS.iter().fold(text, |text, (name, value)| text.replace(name, &value.to_string()));
            found.insert(name.to_owned(), text);
        }
    }
    found
}
