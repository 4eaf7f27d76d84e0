//! The headers in `schemas/golden/headers-*.json` as values of the code, and the way between AMQP's tables and JSON. Tests of the crates
//! that write headers compare with the files; each takes this file in by its path.

#![allow(dead_code, unreachable_pub, reason = "every test binary uses another part of it")]

use std::path::Path;

use serde_json::Value;
use vramq_schemas::{Attempt, DeadLetter, JobHeaders, MinimumRequirement, Reason, ReplyHeaders};

use super::{AMQPValue, FieldArray, FieldTable};

/// A job as its publisher sends it; as a worker publishes it again; and as a worker dead-letters it.
pub const PUBLISHED: &str = "headers-job-published";
pub const REQUEUED: &str = "headers-job-requeued";
pub const DEAD_LETTER: &str = "headers-dead-letter";

/// Replies: `part` and `done`, `failed`, `progress`.
pub const REPLY: &str = "headers-reply";
pub const FAILED: &str = "headers-failed";
pub const PROGRESS: &str = "headers-progress";

/// What all of them have in common.
pub const TRACEPARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
pub const TRACESTATE: &str = "vendor=t61rcWkgMzE";
pub const WORKER: &str = "worker-1";
pub const MODEL_REVISION: &str = "f32-0123456789abcdef";

/// The frozen headers.
pub fn golden(name: &str) -> Value {
    let of_crate = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = of_crate.with_file_name("schemas").join("golden").join(format!("{name}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("read {}: {error}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

/// What a worker says of a job that it publishes again, for the second time: an out-of-memory has halved its hint.
pub fn requeued() -> JobHeaders {
    let attempt = Attempt {
        at_ms: 1_763_000_000_000,
        worker: WORKER.to_owned(),
        device: "cuda:0".to_owned(),
        outcome: "out-of-memory".to_owned(),
        item: 32,
        items: 32,
        longest: 512,
        asked: 3_221_225_472,
        free: 1_073_741_824,
        total: 85_899_345_920,
        foreign: 2_147_483_648,
        alone: true,
    };
    JobHeaders {
        batch_hint: Some(16),
        batch_hint_max: Some(32),
        attempt: 2,
        items_done: 32,
        exclusive: true,
        history: vec![attempt],
        delays: 1,
        expires_at_ms: Some(1_763_000_600_999),
        crashes: 3,
        waits: 4,
        revision_waits: 5,
        store_waits: 6,
        moved: true,
        queue: Some("team-a.jobs".to_owned()),
    }
}

pub fn reply() -> ReplyHeaders {
    ReplyHeaders {
        offset: 32,
        items: 2,
        items_total: 64,
        attempt: 2,
        worker: WORKER.to_owned(),
        queued_ms: 2500,
        ran_ms: 1750,
    }
}

pub fn dead_letter() -> DeadLetter {
    DeadLetter {
        reason: Reason::OutOfMemory,
        error: "item 40 does not fit even alone".to_owned(),
        dead_at_ms: 1_763_000_300_000,
        worker: WORKER.to_owned(),
        worker_version: "0.3.0".to_owned(),
        requirement: Some(MinimumRequirement { item: 40, cost: 8192, needs_bytes: 4_294_967_296 }),
    }
}

/// Headers as the frozen files have them. Only the types that vramq writes: RabbitMQ takes no others in some places, and clients
/// read these.
pub fn to_json(table: &FieldTable) -> Value {
    table.inner().iter().map(|(name, value)| (name.as_str().to_owned(), value_to_json(value))).collect()
}

fn value_to_json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(value) => (*value).into(),
        AMQPValue::LongLongInt(number) => (*number).into(),
        AMQPValue::LongString(text) => String::from_utf8(text.as_bytes().to_vec()).unwrap().into(),
        AMQPValue::FieldTable(table) => to_json(table),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(value_to_json).collect(),
        other => panic!("vramq writes no header of type {:?}", other.get_type()),
    }
}

/// The table that a file stands for.
pub fn to_table(headers: &Value) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in headers.as_object().unwrap() {
        table.insert(name.as_str().into(), to_value(value));
    }
    table
}

fn to_value(value: &Value) -> AMQPValue {
    match value {
        Value::Bool(value) => AMQPValue::Boolean(*value),
        Value::Number(number) => AMQPValue::LongLongInt(number.as_i64().unwrap()),
        Value::String(text) => AMQPValue::LongString(text.as_str().into()),
        Value::Object(_) => AMQPValue::FieldTable(to_table(value)),
        Value::Array(values) => {
            AMQPValue::FieldArray(FieldArray::from(values.iter().map(to_value).collect::<Vec<_>>()))
        }
        Value::Null => panic!("vramq writes no header without a value"),
    }
}

/// The headers with some of these names.
pub fn only(headers: &Value, names: impl Fn(&str) -> bool) -> Value {
    headers
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| names(name))
        .map(|(k, v)| (k.clone(), v.clone()))
        .collect()
}
