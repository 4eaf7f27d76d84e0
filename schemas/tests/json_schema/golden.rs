//! The frozen bodies and headers fit their schemas.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::golden;
use crate::schemas::schema;
use crate::validate::validate;

#[test]
fn the_golden_bytes_fit() {
    for (name, kind) in [
        ("job-text.json", "job"),
        ("job-bytes.json", "job"),
        ("job-json.json", "job"),
        ("job-uri.json", "job"),
        ("job-params.json", "job"),
        ("outputs.json", "outputs"),
        ("sparse.json", "outputs"),
        ("failure.json", "failure"),
        ("progress.json", "progress"),
    ] {
        validate(&schema(kind), &golden(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

/// The frozen headers of each kind, and the schema of each of them; a dead letter has the headers of its job, too.
const GOLDEN_HEADERS: [(&str, &[&str]); 6] = [
    ("headers-job-published.json", &["job-headers"]),
    ("headers-job-requeued.json", &["job-headers"]),
    ("headers-dead-letter.json", &["dead-letter-headers", "job-headers"]),
    ("headers-reply.json", &["reply-headers"]),
    ("headers-failed.json", &["failure-headers"]),
    ("headers-progress.json", &["progress-headers"]),
];

/// The paths of the values within objects and lists of objects.
fn paths_of(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    for (name, inner) in value.as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        paths_of(inner, &path, found);
        for element in inner.as_array().into_iter().flatten() {
            paths_of(element, &path, found);
        }
        found.insert(path);
    }
}

/// The same of the values that a schema knows.
fn paths_known(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}/{name}");
        paths_known(inner, &path, found);
        paths_known(&inner["items"], &path, found);
        found.insert(path);
    }
}

#[test]
fn the_golden_headers_fit_and_are_all_that_the_schemas_know() {
    let mut frozen: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for (name, kinds) in GOLDEN_HEADERS {
        let (headers, mut known, mut found) = (golden(name), BTreeSet::new(), BTreeSet::new());
        paths_of(&headers, "", &mut found);
        for kind in kinds {
            let schema = schema(kind);
            validate(&schema, &headers).unwrap_or_else(|error| panic!("{name} as {kind}: {error}"));
            paths_known(&schema, "", &mut known);
            frozen.entry(kind).or_default().extend(found.iter().cloned());
        }
        let unknown: Vec<_> = found.difference(&known).collect();
        assert!(unknown.is_empty(), "{name} has headers that no schema knows: {unknown:?}");
    }
    // A header that is new in the code has to be frozen, too.
    for (kind, found) in frozen {
        let mut known = BTreeSet::new();
        paths_known(&schema(kind), "", &mut known);
        let missing: Vec<_> = known.difference(&found).collect();
        assert!(missing.is_empty(), "no golden file has these headers of {kind}: {missing:?}");
    }
}
