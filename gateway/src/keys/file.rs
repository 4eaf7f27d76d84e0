//! The file of API keys: its entries, or every fault with its line and entry. No fault repeats a value that may be a secret.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};
use vramq_program::{line_at, read_lasting_text, toml_fault};
use vramq_schemas::TENANT_BYTES_MAX;

use super::{NAME_BYTES_MAX, is_name, unhex};

/// One entry of the file.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) digest: [u8; 32],
    pub(super) models: Option<Vec<String>>,
    pub(super) in_flight_max: Option<usize>,
    pub(super) requests_per_minute: Option<u32>,
    pub(super) priority: Option<u8>,
    pub(super) tenant: Option<String>,
    pub(super) operator: bool,
}

/// Reads the file's text.
///
/// # Errors
/// The file's name, and what is wrong with it.
pub(super) fn read(path: &Path) -> Result<String, String> {
    read_lasting_text(path).map_err(|what| format!("{}, which {what}", path.display()))
}

/// Parses the file's text.
///
/// # Errors
/// Every fault, with its line and entry.
pub(super) fn parse(text: &str) -> Result<Vec<Entry>, Vec<String>> {
    let root = DeTable::parse(text).map_err(|error| vec![toml_fault(&error, text)])?.into_inner();
    let mut faults = Faults { text, found: Vec::new() };
    let (mut entries, mut lines) = (Vec::new(), HashMap::new());
    for (key, value) in root {
        let span = value.span();
        match (key.get_ref().as_ref(), value.into_inner()) {
            ("key", DeValue::Array(found)) => {
                for (at, value) in found.into_iter().enumerate() {
                    entries.extend(entry(at + 1, value, &mut lines, &mut faults));
                }
            }
            ("key", _) => {
                faults.add(&span, "`key` is no list: an entry begins with the line [[key]]".to_owned());
            }
            _ => {
                let what = format!("`{}` is not known: the file has entries [[key]]", key.get_ref());
                faults.add(&key.span(), what);
            }
        }
    }
    if faults.found.is_empty() { Ok(entries) } else { Err(faults.found) }
}

/// Reads the entry with this number. `None` after a fault. `lines` has the lines of the digests so far.
fn entry(
    number: usize,
    value: Spanned<DeValue<'_>>,
    lines: &mut HashMap<[u8; 32], String>,
    faults: &mut Faults<'_>,
) -> Option<Entry> {
    let span = value.span();
    let DeValue::Table(table) = value.into_inner() else {
        faults.add(&span, format!("entry {number}: is no table: an entry begins with the line [[key]]"));
        return None;
    };
    let mut fields = Fields { table, span, entry: format!("entry {number}"), faults };
    let name = fields.needed("name").and_then(|(name, span): (String, _)| {
        if !is_name(&name) {
            let what = format!(
                "`name` needs 1 to {NAME_BYTES_MAX} characters of a-z, A-Z, 0-9, `-`, `_`, `.`: correct it"
            );
            fields.fault(&span, &what);
            return None;
        }
        fields.entry = format!("{} (`{name}`)", fields.entry);
        Some(name)
    });
    let digest = fields.needed("sha256").and_then(|(text, span): (String, _)| {
        let Some(digest) = unhex(&text) else {
            fields.fault(
                &span,
                "`sha256` is not a SHA-256 in 64 hexadecimal digits: vramq-gateway new-key makes one",
            );
            return None;
        };
        let line = line_at(fields.faults.text, span.start);
        if let Some(first) = lines.insert(digest, line) {
            fields.fault(
                &span,
                &format!("another entry has the same `sha256`, in {first}: remove one of them"),
            );
            return None;
        }
        Some(digest)
    });
    let tenant_expected = format!("a text of at most {TENANT_BYTES_MAX} bytes, without control characters");
    let read = (
        fields.take("models", "a list of texts"),
        fields.take_if("in_flight_max", "a whole number from 1", |most: &usize| *most > 0),
        fields.take("requests_per_minute", "a whole number from 0 to 4294967295"),
        fields.take("priority", "a whole number from 0 to 255"),
        fields.take_if("tenant", &tenant_expected, |tenant: &String| is_tenant(tenant)),
        fields.take("operator", "true or false").unwrap_or_default(),
    );
    fields.finish();
    let (models, in_flight_max, requests_per_minute, priority, tenant, operator) = read;
    Some(Entry {
        name: name?,
        digest: digest?,
        models,
        in_flight_max,
        requests_per_minute,
        priority,
        tenant,
        operator,
    })
}

/// Whether a text can name a tenant. Workers would count the jobs of a longer one as the gateway's own, and say nothing.
fn is_tenant(text: &str) -> bool {
    text.len() <= TENANT_BYTES_MAX && !text.contains(char::is_control)
}

struct Faults<'a> {
    text: &'a str,
    found: Vec<String>,
}

impl Faults<'_> {
    fn add(&mut self, span: &Range<usize>, what: String) {
        self.found.push(format!("{}, {what}", line_at(self.text, span.start)));
    }
}

/// The fields of an entry that nobody has taken yet.
struct Fields<'a, 'f, 't> {
    table: DeTable<'a>,
    span: Range<usize>,
    /// The entry in words.
    entry: String,
    faults: &'f mut Faults<'t>,
}

impl Fields<'_, '_, '_> {
    fn fault(&mut self, span: &Range<usize>, what: &str) {
        self.faults.add(span, format!("{}: {what}", self.entry));
    }

    fn needed(&mut self, key: &str) -> Option<(String, Range<usize>)> {
        let span = self.table.get(key).map(Spanned::span);
        match span {
            Some(span) => Some((self.take(key, "a text")?, span)),
            None => {
                let span = self.span.clone();
                self.fault(&span, &format!("`{key}` is missing: vramq-gateway new-key writes an entry"));
                None
            }
        }
    }

    fn take<T: DeserializeOwned>(&mut self, key: &str, expected: &str) -> Option<T> {
        self.take_if(key, expected, |_| true)
    }

    fn take_if<T: DeserializeOwned>(
        &mut self,
        key: &str,
        expected: &str,
        is_right: impl FnOnce(&T) -> bool,
    ) -> Option<T> {
        let value = self.table.remove(key)?;
        let span = value.span();
        // serde's errors repeat a text, which may be a key that stands at the wrong place.
        let found = match value.get_ref() {
            DeValue::Integer(number) => number.to_string(),
            DeValue::String(text) => format!("a text of {} bytes", text.len()),
            other => format!("a value of type {}", other.type_str()),
        };
        let read = T::deserialize(ValueDeserializer::from(value)).ok().filter(is_right);
        if read.is_none() {
            self.fault(&span, &format!("`{key}` is {found}; it must be {expected}"));
        }
        read
    }

    /// The fields that remain are unknown.
    fn finish(mut self) {
        for key in std::mem::take(&mut self.table).into_iter().map(|(key, _)| key) {
            let known =
                "name, sha256, models, in_flight_max, requests_per_minute, priority, tenant, operator";
            self.fault(&key.span(), &format!("`{}` is not a known key; there are {known}", key.get_ref()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::new_key;
    use super::*;

    #[test]
    fn every_fault_is_reported_with_its_line_and_entry_and_without_its_digest() {
        let (_, good) = new_key("a");
        let text = format!(
            "{good}{good}[[key]]\nname = \"a b\"\nsha256 = \"hunter2\"\n[[key]]\nname = \"c\"\nmodels = 3\n\
             priority = 256\noperator = \"hunter2\"\ncolour = 1\n[other]\n"
        );
        let faults = parse(&text).unwrap_err();
        let expected = [
            "line 6, entry 2 (`a`): another entry has the same `sha256`, in line 3: remove one of them",
            "line 8, entry 3: `name` needs 1 to 64 characters",
            "line 9, entry 3: `sha256` is not a SHA-256",
            "line 10, entry 4 (`c`): `sha256` is missing",
            "line 12, entry 4 (`c`): `models` is 3; it must be a list of texts",
            "line 13, entry 4 (`c`): `priority` is 256; it must be a whole number from 0 to 255",
            "line 14, entry 4 (`c`): `operator` is a text of 7 bytes; it must be true or false",
            "line 15, entry 4 (`c`): `colour` is not a known key",
            "line 16, `other` is not known",
        ];
        assert_eq!(faults.len(), expected.len(), "{faults:#?}");
        for (fault, expected) in faults.iter().zip(expected) {
            assert!(fault.starts_with(expected), "{fault}\nis not\n{expected}");
            assert!(!fault.contains("hunter2"), "{fault}");
        }
    }

    #[test]
    fn a_tenant_that_workers_ignore_and_a_key_without_requests_are_faults() {
        let (_, entry) = new_key("a");
        let faults_of = |line: &str| parse(&format!("{entry}{line}\n")).err().unwrap_or_default();
        let longest = "é".repeat(TENANT_BYTES_MAX / 2);
        let longest_line = format!("tenant = \"{longest}\"");
        for right in [longest_line.as_str(), "tenant = \"team a/b\"", "in_flight_max = 1"] {
            assert!(faults_of(right).is_empty(), "{right}: {:?}", faults_of(right));
        }
        let tenant = "a text of at most 128 bytes, without control characters";
        for (wrong, fault) in [
            (
                format!("tenant = \"{longest}x\""),
                format!("`tenant` is a text of 129 bytes; it must be {tenant}"),
            ),
            ("tenant = \"a\\nb\"".to_owned(), format!("`tenant` is a text of 3 bytes; it must be {tenant}")),
            ("tenant = 1".to_owned(), format!("`tenant` is 1; it must be {tenant}")),
            (
                "in_flight_max = 0".to_owned(),
                "`in_flight_max` is 0; it must be a whole number from 1".to_owned(),
            ),
        ] {
            assert_eq!(faults_of(&wrong), [format!("line 4, entry 1 (`a`): {fault}")], "{wrong}");
        }
    }

    #[test]
    fn a_text_that_is_no_list_of_entries_is_a_fault() {
        for (text, fault) in [
            ("key = 1", "line 1, `key` is no list"),
            ("key = [1]", "line 1, entry 1: is no table"),
            ("\n[[key]]\nname = \"a\"\nname = \"b\"", "line 4, column 1: `name` is set twice"),
        ] {
            let faults = parse(text).unwrap_err();
            assert!(faults.len() == 1 && faults[0].starts_with(fault), "{text}: {faults:?}");
        }
        assert!(parse("").unwrap().is_empty());
    }
}
