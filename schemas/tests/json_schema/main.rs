//! The contract for tools: JSON Schema of every message, and AsyncAPI of the exchanges, generated from the code. The tests fail
//! if `schemas/json` differs from the generated files, for example after a field was added or removed.
//! `tests/tests/docs/schemas.rs` checks the same files with validators of others.
//!
//! For a deliberate change run `VRAMQ_WRITE_GOLDEN=1 cargo test -p vramq-schemas --test json_schema`, and review the diff.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod agreement;
mod asyncapi;
#[path = "../common/mod.rs"]
mod common;
mod golden;
mod infer;
mod samples;
mod schemas;
mod validate;

use std::path::{Path, PathBuf};

use asyncapi::asyncapi;
use schemas::schemas;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("json")
}

#[test]
fn the_files_are_what_the_code_makes() {
    let made = schemas().into_iter().chain([("asyncapi", asyncapi())]);
    let mut names: Vec<_> = made
        .map(|(name, schema)| {
            let path = folder().join(format!("{name}.json"));
            let text = serde_json::to_string_pretty(&schema).unwrap() + "\n";
            if std::env::var_os("VRAMQ_WRITE_GOLDEN").is_some() {
                std::fs::write(&path, &text).unwrap();
            }
            assert_eq!(
                std::fs::read_to_string(&path).unwrap_or_default(),
                text,
                "{} is not current",
                path.display()
            );
            path
        })
        .collect();
    names.sort();
    let mut there: Vec<_> = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path()).collect();
    there.sort();
    assert_eq!(there, names, "a file that nothing makes, or none that is made");
}

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
