//! Dotted keys, as variables and flags name them: `broker.url`, `model.NAME.path`.

use toml::{Table, Value};

/// Tables within a model's table. A model whose own name ends in `.env` or `.vram` can be configured in the file only.
const MODEL_TABLES: [&str; 2] = ["env", "vram"];

/// Sets a value at a dotted path, and creates the tables on the way. In `model.NAME.key` the name may contain dots.
pub(super) fn put(table: &mut Table, path: &str, value: &str) -> Result<(), String> {
    let parts = split(path);
    let Some((last, parents)) = parts.split_last() else {
        return Err("names no key".to_owned());
    };
    let mut at = table;
    for parent in parents {
        at = match at.entry((*parent).to_owned()).or_insert_with(|| Value::Table(Table::new())) {
            Value::Table(inner) => inner,
            _ => return Err(format!("`{parent}` is not a table")),
        };
    }
    at.insert((*last).to_owned(), Value::String(value.to_owned()));
    Ok(())
}

fn split(path: &str) -> Vec<&str> {
    let parts: Vec<_> = path.split('.').collect();
    match (path.strip_prefix("model."), parts.len()) {
        (Some(rest), 4..) => match rest.rsplit_once('.') {
            Some((before, key)) => match before.rsplit_once('.') {
                Some((name, table)) if MODEL_TABLES.contains(&table) => vec!["model", name, table, key],
                _ => vec!["model", before, key],
            },
            None => parts,
        },
        _ => parts,
    }
}
