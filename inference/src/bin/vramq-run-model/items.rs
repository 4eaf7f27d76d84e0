//! Lines of standard input as items, and which of them a worker would run.

use serde_json::Value;
use vramq_inference::process::rule::{self, Consequence};
use vramq_inference::process::{Costs, Item, Pool};
use vramq_schemas::Input;

/// A line as an item.
pub(crate) fn read(line: &str) -> Result<Item, String> {
    let object = match serde_json::from_str(line) {
        Ok(Value::Object(object)) => object,
        Err(error) if line.starts_with('{') => {
            return Err(format!(
                "begins with {{ and is no JSON: {error}; write {{\"text\": …}} if it is a text"
            ));
        }
        _ => return Ok(Item::Text(line.to_owned())),
    };
    // Keys that job bodies do not have: a job's text is a JSON string, and a job cannot name a file of the caller.
    let only = |key: &str| object.get(key).filter(|_| object.len() == 1).and_then(Value::as_str);
    if let Some(text) = only("text") {
        return Ok(Item::Text(text.to_owned()));
    }
    if let Some(path) = only("file") {
        let bytes = std::fs::read(path).map_err(|error| format!("read {path}: {error}"))?;
        return Ok(Item::bytes(bytes));
    }
    let input = serde_json::from_str::<Input>(line)
        .map_err(|error| format!("an object has one of the keys json, bytes, uri, text, file: {error}"))?;
    Ok(Item::from(input))
}

/// What a worker would do with an item besides running it.
pub(crate) enum Admission {
    /// It runs. The text is a remark on the item, if there is one.
    Runs(Option<String>),
    Refused(String),
}

/// Judges an item as a worker does before it runs a job.
pub(crate) fn admit(pool: &Pool, item: &Item) -> Admission {
    if let Some(why) = pool.accepts().refusal(item) {
        return Admission::Refused(format!("the item {why}"));
    }
    match rule::decide(&pool.config().rules, &Costs::new(item)) {
        Some(Consequence::Refuse(reason)) => Admission::Refused(format!("the item is refused: {reason}")),
        Some(Consequence::To(key)) => {
            let what = format!(
                "a worker moves the job of this item to the workers with key = {key:?}; it runs here"
            );
            Admission::Runs(Some(what))
        }
        Some(Consequence::Exclusive) | None => Admission::Runs(None),
    }
}
