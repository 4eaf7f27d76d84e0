//! The configuration's values by dotted key. Reading a value removes it, so the keys that remain are unknown. Collects every fault.

use std::collections::BTreeMap;
use std::fmt;

use toml::{Table, Value};
use vramq_program::{shown, shown_number, toml_fault};

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Dotted key, or the file.
    pub key: String,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.what)
    }
}

/// The values that nobody has taken yet, and the faults so far.
#[derive(Debug, Default)]
pub struct Values {
    left: BTreeMap<String, Value>,
    known: Vec<&'static str>,
    pub faults: Vec<Fault>,
}

impl Values {
    /// Parses the TOML text of a file. A text that cannot be parsed is one fault, and has no values.
    pub fn of(file: &str, text: &str) -> Self {
        let mut values = Self::default();
        match text.parse::<Table>() {
            Ok(table) => flatten(String::new(), table, &mut values.left),
            Err(error) => values.fault(file, toml_fault(&error, text)),
        }
        values
    }

    /// Overrides the value of a key with a text.
    pub fn set(&mut self, key: String, value: String) {
        self.left.insert(key, Value::String(value));
    }

    pub fn fault(&mut self, key: impl Into<String>, what: impl Into<String>) {
        self.faults.push(Fault { key: key.into(), what: what.into() });
    }

    /// Whether a key has a value that nobody has taken yet.
    pub fn has(&self, key: &str) -> bool {
        self.left.contains_key(key)
    }

    /// A text.
    pub fn text(&mut self, key: &'static str) -> Option<String> {
        match self.take(key)? {
            Value::String(text) if !text.is_empty() => Some(text),
            other => {
                self.fault(key, format!("is {}; it must be a text", shown(&other)));
                None
            }
        }
    }

    /// A whole number of at least `least`. The default without a value, or after a fault.
    pub fn number(&mut self, key: &'static str, default: u32, least: u32) -> u32 {
        let Some(value) = self.take(key) else { return default };
        let number = match &value {
            Value::Integer(n) => u32::try_from(*n).ok(),
            Value::String(text) => text.parse().ok(),
            _ => None,
        };
        number.filter(|n| *n >= least).unwrap_or_else(|| {
            self.fault(
                key,
                format!(
                    "is {}; it must be a whole number from {least} to {}",
                    shown_number(&value),
                    u32::MAX
                ),
            );
            default
        })
    }

    /// A boolean; false without a value, or after a fault.
    pub fn flag(&mut self, key: &'static str) -> bool {
        let Some(value) = self.take(key) else { return false };
        let flag = match &value {
            Value::Boolean(flag) => Some(*flag),
            Value::String(text) => text.parse().ok(),
            _ => None,
        };
        flag.unwrap_or_else(|| {
            self.fault(key, format!("is {}; it must be true or false", shown(&value)));
            false
        })
    }

    /// A list of texts; from the environment, with commas between them.
    pub fn list(&mut self, key: &'static str) -> Vec<String> {
        match self.take(key) {
            None => Vec::new(),
            Some(Value::String(text)) => text.split(',').map(|part| part.trim().to_owned()).collect(),
            Some(Value::Array(parts)) if parts.iter().all(Value::is_str) => {
                parts.iter().filter_map(Value::as_str).map(str::to_owned).collect()
            }
            Some(other) => {
                self.fault(key, format!("is {}; it must be a list of texts", shown(&other)));
                Vec::new()
            }
        }
    }

    /// The values of `PREFIX.NAME.KEY` for all names: true or false.
    pub fn flags_by_name(&mut self, prefix: &str, key: &'static str) -> BTreeMap<String, bool> {
        let (start, end) = (format!("{prefix}."), format!(".{key}"));
        // `PREFIX.KEY` has no name: it stays, as an unknown key.
        let name_of = |path: &String| {
            let name = path.strip_prefix(&start)?.strip_suffix(&end)?;
            (!name.is_empty()).then(|| (path.clone(), name.to_owned()))
        };
        let found: Vec<_> = self.left.keys().filter_map(name_of).collect();
        let mut flags = BTreeMap::new();
        for (path, name) in found {
            let Some(value) = self.left.remove(&path) else { continue };
            let flag = match &value {
                Value::Boolean(flag) => Some(*flag),
                Value::String(text) => text.parse().ok(),
                _ => None,
            };
            match flag {
                Some(flag) => drop(flags.insert(name, flag)),
                None => self.fault(path, format!("is {}; it must be true or false", shown(&value))),
            }
        }
        flags
    }

    /// The keys that were asked for, and those of models.
    pub fn keys(&self) -> Vec<String> {
        let of_models = format!("model.{}.matryoshka", vramq_program::NAME);
        self.known.iter().map(|key| (*key).to_owned()).chain([of_models]).collect()
    }

    /// Ends the reading: each remaining key is unknown, and so a fault.
    pub fn finish(mut self) -> Vec<Fault> {
        let known = self.keys().join(", ");
        for key in std::mem::take(&mut self.left).into_keys() {
            self.fault(key, format!("is not a known key; there are {known}"));
        }
        self.faults
    }

    fn take(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.left.remove(key)
    }
}

fn flatten(path: String, table: Table, into: &mut BTreeMap<String, Value>) {
    for (key, value) in table {
        let path = if path.is_empty() { key } else { format!("{path}.{key}") };
        match value {
            Value::Table(inner) => flatten(path, inner, into),
            value => drop(into.insert(path, value)),
        }
    }
}
