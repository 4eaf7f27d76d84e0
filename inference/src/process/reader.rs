//! Takes keys out of a TOML table by type, and collects every fault on the way.

use std::path::PathBuf;
use std::time::Duration;

use toml::{Table, Value};

use super::config::Fault;

/// The longest time that a configuration may name: a year.
const SECONDS_MAX: f64 = 31_536_000.0;

/// A table that is being read. Keys that nobody takes are faults at the end.
#[derive(Debug)]
pub(super) struct Reader {
    path: String,
    table: Table,
    known: Vec<&'static str>,
    faults: Vec<Fault>,
    /// Files and folders that this machine lacks, of this table alone.
    absent: Vec<Fault>,
}

impl Reader {
    pub fn new(path: String, table: Table) -> Self {
        Self { path, table, known: Vec::new(), faults: Vec::new(), absent: Vec::new() }
    }

    pub fn fault(&mut self, key: &str, what: impl Into<String>) {
        self.faults.push(Fault { key: format!("{}.{key}", self.path), what: what.into() });
    }

    /// Adds a file or folder that does not exist on this machine, but may on another.
    pub fn absent(&mut self, key: &str, what: impl Into<String>) {
        self.absent.push(Fault { key: format!("{}.{key}", self.path), what: what.into() });
    }

    /// Adds a fault, unless the key has one already because its value was wrong and read as absent.
    pub fn fault_if_absent(&mut self, key: &str, what: &str) {
        let path = format!("{}.{key}", self.path);
        if self.faults.iter().all(|fault| fault.key != path) {
            self.fault(key, format!("is missing; it {what}"));
        }
    }

    pub fn value(&mut self, key: &'static str) -> Option<Value> {
        self.known.push(key);
        self.table.remove(key)
    }

    fn take<T>(
        &mut self,
        key: &'static str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        let value = self.value(key)?;
        let taken = read(&value);
        if taken.is_none() {
            self.fault(key, format!("is {value}; it must be {expected}"));
        }
        taken
    }

    pub fn text(&mut self, key: &'static str) -> Option<String> {
        self.take(key, "a text", |value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned))
    }

    pub fn path(&mut self, key: &'static str) -> Option<PathBuf> {
        self.text(key).map(PathBuf::from)
    }

    pub fn texts(&mut self, key: &'static str) -> Option<Vec<String>> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.take(key, "a list of texts", |value| value.as_array()?.iter().map(text).collect())
    }

    pub fn flag(&mut self, key: &'static str) -> Option<bool> {
        self.take(key, "true or false", Value::as_bool)
    }

    pub fn whole(&mut self, key: &'static str, least: u64, most: u64) -> Option<u64> {
        self.take(key, &format!("a whole number from {least} to {most}"), |value| {
            value.as_integer()?.try_into().ok().filter(|number| (least..=most).contains(number))
        })
    }

    pub fn number(&mut self, key: &'static str, least: f64) -> Option<f64> {
        self.take(key, &format!("a number from {least}"), |value| {
            let number = value.as_float().or_else(|| value.as_integer().map(|number| number as f64))?;
            (number.is_finite() && number >= least).then_some(number)
        })
    }

    /// A time in seconds. A wrong value is a fault, and read as the default.
    pub fn seconds(&mut self, key: &'static str, default: f64) -> Option<Duration> {
        if !self.table.contains_key(key) {
            self.known.push(key);
            return Some(Duration::from_secs_f64(default));
        }
        let read = self.number(key, 0.0);
        if read.is_some_and(|seconds| seconds > SECONDS_MAX) {
            self.fault(key, "is longer than a year");
        }
        read.filter(|seconds| *seconds <= SECONDS_MAX).or(Some(default)).map(Duration::from_secs_f64)
    }

    /// A table whose keys the user chooses.
    pub fn table(&mut self, key: &'static str) -> Table {
        self.take(key, "a table", |value| value.as_table().cloned()).unwrap_or_default()
    }

    /// A table whose keys are known. Return it to [`absorb`](Self::absorb).
    pub fn section(&mut self, key: &'static str) -> Option<Self> {
        let table = self.take(key, "a table", |value| value.as_table().cloned())?;
        Some(Self::new(format!("{}.{key}", self.path), table))
    }

    pub fn empty_section(&self, key: &str) -> Self {
        Self::new(format!("{}.{key}", self.path), Table::new())
    }

    /// The tables of a list.
    pub fn sections(&mut self, key: &'static str) -> Vec<Self> {
        let tables: Option<Vec<Table>> = self.take(key, "a list of tables ([[…]])", |value| {
            value.as_array()?.iter().map(|value| value.as_table().cloned()).collect()
        });
        let tables = tables.unwrap_or_default().into_iter().enumerate();
        tables.map(|(at, table)| Self::new(format!("{}.{key}[{at}]", self.path), table)).collect()
    }

    /// Ends the reading of a section.
    pub fn absorb(&mut self, section: Self) {
        if let Err(faults) = section.finish() {
            self.faults.extend(faults);
        }
    }

    /// Ends the reading. The remaining keys are unknown. Returns the files and folders that this machine lacks; with a fault they are faults,
    /// too.
    pub fn finish(mut self) -> Result<Vec<Fault>, Vec<Fault>> {
        let unknown: Vec<String> = self.table.keys().cloned().collect();
        let known = self.known.join(", ");
        for key in unknown {
            self.fault(&key, format!("is not a known key; there are {known}"));
        }
        if self.faults.is_empty() { Ok(self.absent) } else { Err([self.faults, self.absent].concat()) }
    }
}
