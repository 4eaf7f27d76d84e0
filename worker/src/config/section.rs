//! A table of the configuration while it is read: takes keys out by type and collects every fault.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::RangeInclusive;
use std::rc::Rc;

use toml::{Table, Value};
use vramq_program::{shown, shown_number};

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Dotted path of the key.
    pub key: String,
    pub what: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.what)
    }
}

/// Faults of a whole configuration, shared by its sections.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    found: Rc<RefCell<Vec<Fault>>>,
    /// Things that this machine lacks.
    missing: Rc<RefCell<Vec<Fault>>>,
    /// Files and folders that do not exist on this machine.
    absent: Rc<RefCell<Vec<Fault>>>,
    /// The dotted paths of the keys that were asked for, whether they were set or not.
    asked: Rc<RefCell<BTreeSet<String>>>,
}

impl Faults {
    pub fn add(&self, key: impl Into<String>, what: impl Into<String>) {
        self.found.borrow_mut().push(Fault { key: key.into(), what: what.into() });
    }

    /// Adds something that this machine lacks but another may have; only for checks of the configuration. It is reported together with
    /// other faults, so that nobody finds out about it only after fixing those. Without other faults it is not reported.
    pub fn add_missing(&self, key: impl Into<String>, what: impl Into<String>) {
        self.missing.borrow_mut().push(Fault { key: key.into(), what: what.into() });
    }

    /// Adds a file or folder that does not exist on this machine, but may on another: a note for checks of the configuration, and a fault
    /// for all other commands.
    pub fn add_absent(&self, key: impl Into<String>, what: impl Into<String>) {
        self.absent.borrow_mut().push(Fault { key: key.into(), what: what.into() });
    }

    /// The files and folders that do not exist on this machine.
    pub fn absent(&self) -> Vec<Fault> {
        self.absent.borrow().clone()
    }

    /// The dotted paths of the keys that a value was asked of.
    pub fn asked(&self) -> BTreeSet<String> {
        self.asked.borrow().clone()
    }

    pub fn into_vec(self) -> Vec<Fault> {
        let mut faults = self.found.take();
        if !faults.is_empty() {
            faults.append(&mut self.absent.borrow_mut());
            faults.append(&mut self.missing.borrow_mut());
        }
        faults
    }
}

/// A table and its dotted path. [`finish`](Self::finish) reports the keys that were not read.
#[derive(Debug)]
pub struct Section {
    path: String,
    table: Table,
    known: Vec<&'static str>,
    faults: Faults,
}

impl Section {
    pub fn root(table: Table, faults: Faults) -> Self {
        Self { path: String::new(), table, known: Vec::new(), faults }
    }

    /// The dotted path of a key of this table.
    pub fn key(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub fn fault(&self, key: &str, what: impl Into<String>) {
        self.faults.add(self.key(key), what);
    }

    /// Adds a file or folder that does not exist on this machine, but may on another.
    pub fn absent(&self, key: &str, what: impl Into<String>) {
        self.faults.add_absent(self.key(key), what);
    }

    /// Whether the key was set.
    pub fn has(&self, key: &str) -> bool {
        self.table.contains_key(key)
    }

    /// Whether the key is not set, or is a table without keys.
    pub fn is_empty_at(&self, key: &str) -> bool {
        match self.table.get(key) {
            None => true,
            Some(Value::Table(table)) => table.is_empty(),
            Some(_) => false,
        }
    }

    /// Removes and reads a value. `None` if it is absent; if it is wrong, also adds a fault.
    pub fn take<T: FromValue>(&mut self, key: &'static str) -> Option<T> {
        let value = self.remove(key)?;
        let found = shown(&value);
        let taken = T::from_value(value);
        if taken.is_none() {
            self.fault(key, format!("is {found}; it must be {}", T::EXPECTED));
        }
        taken
    }

    /// Removes and reads a whole number within a range. `None` as for [`take`](Self::take).
    pub fn number(&mut self, key: &'static str, range: RangeInclusive<u32>) -> Option<u32> {
        let value = self.remove(key)?;
        let number = whole(&value).filter(|number| range.contains(number));
        if number.is_none() {
            let (found, least, most) = (shown_number(&value), range.start(), range.end());
            self.fault(key, format!("is {found}; it must be a whole number from {least} to {most}"));
        }
        number
    }

    fn remove(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.faults.asked.borrow_mut().insert(self.key(key));
        self.table.remove(key)
    }

    /// A sub-table; an absent one is empty.
    pub fn section(&mut self, key: &'static str) -> Self {
        self.known.push(key);
        let table = match self.table.remove(key) {
            None => Table::new(),
            Some(Value::Table(table)) => table,
            Some(other) => {
                self.fault(key, format!("is {}; it must be a table", shown(&other)));
                Table::new()
            }
        };
        Self { path: self.key(key), table, known: Vec::new(), faults: self.faults.clone() }
    }

    /// All sub-tables of a table whose keys are chosen by the user. Two names that differ only in case are a fault: one of them comes from
    /// a variable or flag and was meant for the other.
    pub fn named_sections(&mut self, key: &'static str) -> Vec<(String, Self)> {
        let Self { path, table, faults, .. } = self.section(key);
        let mut sections = Vec::new();
        let names: Vec<_> = table.keys().collect();
        for (at, name) in names.iter().enumerate() {
            if let Some(other) = names[..at].iter().find(|other| other.eq_ignore_ascii_case(name)) {
                let what = format!(
                    "differs from {path}.{other} only in capitals; a variable in capitals, as VRAMQ__MODEL__MINILM__PATH, names \
                     `minilm`: write the name as it is, as in VRAMQ__MODEL__MiniLM__PATH"
                );
                faults.add(format!("{path}.{name}"), what);
            }
        }
        for (name, value) in table {
            let path = format!("{path}.{name}");
            match value {
                Value::Table(table) => {
                    sections.push((name, Self { path, table, known: Vec::new(), faults: faults.clone() }));
                }
                other => faults.add(path, format!("is {}; it must be a table", shown(&other))),
            }
        }
        sections
    }

    /// Ends the reading and returns the remaining keys for another reader.
    pub fn into_rest(self) -> Table {
        self.table
    }

    /// Where other readers of this configuration report faults.
    pub fn faults(&self) -> Faults {
        self.faults.clone()
    }

    /// Ends the reading: the remaining keys are unknown, and faults.
    pub fn finish(self) {
        for key in self.table.keys() {
            self.faults
                .add(self.key(key), format!("is not a known key; there are {}", self.known.join(", ")));
        }
    }
}

/// A whole number. Numbers may also be given as strings, as in the environment.
pub fn whole(value: &Value) -> Option<u32> {
    match value {
        Value::Integer(n) => u32::try_from(*n).ok(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

/// A type of configuration values. Booleans may also be given as strings, as in the environment.
pub trait FromValue: Sized {
    const EXPECTED: &'static str;

    fn from_value(value: Value) -> Option<Self>;
}

impl FromValue for String {
    const EXPECTED: &'static str = "a text";

    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::String(text) if !text.is_empty() => Some(text),
            _ => None,
        }
    }
}

impl FromValue for bool {
    const EXPECTED: &'static str = "true or false";

    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Boolean(b) => Some(b),
            Value::String(text) => text.parse().ok(),
            _ => None,
        }
    }
}

impl FromValue for Vec<String> {
    const EXPECTED: &'static str = "a list of texts, or one text with commas between them";

    fn from_value(value: Value) -> Option<Self> {
        match value {
            Value::Array(values) => values.into_iter().map(String::from_value).collect(),
            Value::String(text) if text.is_empty() => Some(Self::new()),
            Value::String(text) => {
                text.split(',').map(|part| String::from_value(part.trim().into())).collect()
            }
            _ => None,
        }
    }
}
