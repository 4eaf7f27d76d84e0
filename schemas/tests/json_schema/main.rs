//! The contract for tools: JSON Schema of every message, and AsyncAPI of the exchanges, generated from the code. The tests fail
//! if `schemas/json` differs from the generated files, for example after a field was added or removed.
//!
//! For a deliberate change run `VRAMQ_WRITE_GOLDEN=1 cargo test -p vramq-schemas --test json_schema`, and review the diff.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../common/mod.rs"]
mod common;
mod infer;
mod samples;
mod validate;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use common::{jobs, outputs, sparse};
use infer::{Inference, describe};
use serde_json::{Value, json};
use validate::validate;
use vramq_schemas::codec::Body;
use vramq_schemas::{BODY_BYTES_MAX, Encoding, Failure, ITEMS_MAX, Job, Outputs, codec, headers, topology};

const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";

const HEADERS: &str = include_str!("../../src/headers.rs");
const STATUS: &str = include_str!("../../src/status.rs");

/// A schema from samples, with the descriptions of a struct in a source file. `words` are the paths of the texts whose values are all
/// known.
fn of(title: &str, (source, structure): (&str, &str), words: &[&str], samples: &[Value]) -> Value {
    let mut schema = Inference { words }.infer("", &samples.iter().collect::<Vec<_>>());
    describe(&mut schema, source, structure);
    schema["$schema"] = DIALECT.into();
    schema["title"] = title.into();
    schema
}

fn of_job() -> Value {
    let as_json = |job: &Job| serde_json::to_value(job).unwrap();
    let written: Vec<_> = jobs().iter().map(|(_, job)| as_json(job)).collect();
    let mut job = of("The body of a job", (include_str!("../../src/job.rs"), "Job"), &[], &written);
    // Rules of the decoder that no sample shows; `schemas_refuse_what_the_decoder_refuses` compares both.
    job["additionalProperties"] = false.into();
    job["required"] = json!(["inputs", "model"]);
    job["properties"]["inputs"]["maxItems"] = ITEMS_MAX.into();
    close(&mut job["properties"]["inputs"]["items"]);
    job
}

fn of_heartbeat() -> Value {
    let mut heartbeat = of("A worker's heartbeat", (STATUS, "Heartbeat"), &["state"], &samples::heartbeats());
    for (list, structure) in
        [("models", "ModelStatus"), ("devices", "DeviceStatus"), ("ceilings", "CeilingStatus")]
    {
        describe(&mut heartbeat["properties"][list]["items"], STATUS, structure);
    }
    let of_model = &mut heartbeat["properties"]["models"]["items"]["properties"];
    describe(&mut of_model["counters"], STATUS, "Counters");
    describe(&mut of_model["processes"]["items"], STATUS, "ProcessStatus");
    describe(&mut of_model["queues"]["items"], STATUS, "QueueStatus");
    heartbeat
}

fn of_job_headers() -> Value {
    let mut job_headers = of("Headers of a job", (HEADERS, "JobHeaders"), &[], &samples::job_headers());
    let attempt = include_str!("../../src/attempt.rs");
    describe(&mut job_headers["properties"]["history"]["items"], attempt, "Attempt");
    job_headers
}

/// The schema of each message and of its headers, by the name of its file.
fn schemas() -> Vec<(&'static str, Value)> {
    let reply = include_str!("../../src/reply.rs");
    let control = include_str!("../../src/control.rs");
    let withdrawal = include_str!("../../src/withdrawal.rs");
    let dead_letter = include_str!("../../src/dead_letter.rs");
    let of_letters = "What a worker adds to the headers of a job that it dead-letters";
    let of_replies = "Headers of a `part` or `done` reply";
    vec![
        ("job", of_job()),
        (
            "outputs",
            of(
                "The body of a `part` or `done` reply",
                (reply, "Outputs"),
                &["outputs.dtype"],
                &[json!(outputs()), json!(sparse())],
            ),
        ),
        (
            "failure",
            of("The body of a `failed` reply", (reply, "Failure"), &["reason"], &samples::failures()),
        ),
        (
            "progress",
            of("The body of a `progress` reply", (reply, "ItemProgress"), &[], &samples::progress()),
        ),
        ("heartbeat", of_heartbeat()),
        ("command", of("A command to workers", (control, "Command"), &["command"], &samples::commands())),
        (
            "answer",
            of("An answer to a command", (control, "Answer"), &["outcome", "state"], &samples::answers()),
        ),
        ("withdrawal", of("A withdrawal", (withdrawal, "Withdrawal"), &[], &samples::withdrawals())),
        ("job-headers", of_job_headers()),
        ("reply-headers", of(of_replies, (HEADERS, "ReplyHeaders"), &[], &samples::reply_headers())),
        (
            "failure-headers",
            of("Headers of a `failed` reply", (reply, "FailureHeaders"), &[], &samples::failure_headers()),
        ),
        (
            "progress-headers",
            of(
                "Headers of a `progress` reply",
                (reply, "ProgressHeaders"),
                &[],
                &samples::progress_headers(),
            ),
        ),
        (
            "dead-letter-headers",
            of(of_letters, (dead_letter, "DeadLetter"), &["reason"], &samples::dead_letter_headers()),
        ),
    ]
}

/// No keys but those of the form.
fn close(forms: &mut Value) {
    for form in forms["anyOf"].as_array_mut().unwrap() {
        if form["type"] == "object" {
            form["additionalProperties"] = false.into();
        }
    }
}

/// One channel: its address, what it is, and its messages with the schemas of body and headers.
fn channel(
    address: String,
    exchange: Option<&str>,
    description: &str,
    messages: &[(&str, &str, Option<&str>)],
) -> Value {
    let by_reference = |name: &str| json!({"$ref": format!("./{name}.json")});
    let messages: serde_json::Map<String, Value> = messages
        .iter()
        .map(|(name, payload, headers)| {
            let mut message = json!({"contentType": "application/json", "payload": by_reference(payload)});
            if let Some(headers) = headers {
                message["headers"] = by_reference(headers);
            }
            ((*name).to_owned(), message)
        })
        .collect();
    let binding = match exchange {
        Some(kind) => {
            json!({"is": "routingKey", "exchange": {"name": address, "type": kind, "durable": true}})
        }
        None => json!({"is": "queue"}),
    };
    let mut channel = json!({"address": address, "description": description, "messages": messages, "bindings": {"amqp": binding}});
    if address.contains("{model}") {
        channel["parameters"] = json!({"model": {"description": "The model's name, or its key."}});
    }
    channel
}

fn asyncapi() -> Value {
    let letter = [("deadLetter", "job", Some("dead-letter-headers"))];
    let replies = [
        ("part", "outputs", Some("reply-headers")),
        ("done", "outputs", Some("reply-headers")),
        ("failed", "failure", Some("failure-headers")),
        ("progress", "progress", Some("progress-headers")),
    ];
    let channels = json!({
        "jobs": channel(topology::JOBS_EXCHANGE.to_owned(), Some("direct"), "The routing key is the model's name, or its key.",
            &[("job", "job", Some("job-headers"))]),
        "replies": channel(topology::default_reply_queue("{model}"), None,
            "Or the queue that the job's `reply_to` names. The property `type` is the message's name.", &replies),
        "deadLetters": channel(topology::dead_queue("{model}"), None,
            "The body is the job's, byte for byte, in the job's encoding.", &letter),
        "status": channel(topology::STATUS_EXCHANGE.to_owned(), Some("fanout"), "Bind a queue of your own.",
            &[("heartbeat", "heartbeat", None)]),
        "control": channel(topology::CONTROL_EXCHANGE.to_owned(), Some("direct"),
            "The routing key is `all`, or `worker.NAME`. Answers go to `reply_to`.",
            &[("command", "command", None), ("answer", "answer", None)]),
        "withdrawals": channel(topology::WITHDRAWALS_EXCHANGE.to_owned(), Some("fanout"), "Callers declare it.",
            &[("withdrawal", "withdrawal", None)]),
    });
    // From a client's point of view.
    let operations = json!({
        "submit": {"action": "send", "channel": {"$ref": "#/channels/jobs"},
            "reply": {"channel": {"$ref": "#/channels/replies"}, "address": {"location": "$message.header#/reply_to"}}},
        "withdraw": {"action": "send", "channel": {"$ref": "#/channels/withdrawals"}},
        "command": {"action": "send", "channel": {"$ref": "#/channels/control"}},
        "watch": {"action": "receive", "channel": {"$ref": "#/channels/status"}},
        "inspect": {"action": "receive", "channel": {"$ref": "#/channels/deadLetters"}},
    });
    json!({
        "asyncapi": "3.0.0",
        "info": {
            "title": "vramq",
            "version": env!("CARGO_PKG_VERSION"),
            "description": format!("Inference jobs over RabbitMQ (AMQP 0-9-1). Bodies have at most {BODY_BYTES_MAX} bytes. Jobs may also be {}: the same fields, with `bin` in the place of base64; or {}. Their replies and dead letters are as the job. docs/wire.md has the contract in words.", codec::MESSAGE_PACK, codec::BINCODE),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": operations,
    })
}

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

fn schema(name: &str) -> Value {
    schemas().into_iter().find(|(found, _)| *found == name).unwrap().1
}

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

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

/// Schema and decoder take the same of what a body may be changed into: keys left out, values of another type, unknown keys.
fn agree<T: Body>(kind: &str, body: &Value) {
    let schema = schema(kind);
    let object = body.as_object().unwrap();
    let mut changed = vec![json!([]), json!("text"), json!({})];
    for name in object.keys() {
        let mut without = object.clone();
        without.remove(name);
        changed.push(without.into());
        for value in [json!(null), json!(true), json!([[]]), json!(7)] {
            let mut other = object.clone();
            other.insert(name.clone(), value);
            changed.push(other.into());
        }
    }
    let mut more = object.clone();
    more.insert("unknown".to_owned(), json!(1));
    changed.push(more.into());
    for value in changed {
        let decoded = codec::decode::<T>(value.to_string().as_bytes(), Encoding::Json);
        assert_eq!(
            validate(&schema, &value).is_ok(),
            decoded.is_ok(),
            "{kind}: {value}: {:?}",
            decoded.err()
        );
    }
}

#[test]
fn schemas_refuse_what_the_decoder_refuses() {
    agree::<Job>("job", &golden("job-params.json"));
    agree::<Outputs>("outputs", &golden("outputs.json"));
    agree::<Outputs>("outputs", &golden("sparse.json"));
    agree::<Failure>("failure", &golden("failure.json"));
    let of_input = |input: &Value| json!({"model": "m", "inputs": [input]});
    for input in [
        json!("a"),
        json!({"bytes": "AA=="}),
        json!({"uri": "x"}),
        json!({}),
        json!({"text": "a"}),
        json!(1),
        json!(null),
    ] {
        let body = of_input(&input);
        let decoded = codec::decode::<Job>(body.to_string().as_bytes(), Encoding::Json);
        assert_eq!(validate(&schema("job"), &body).is_ok(), decoded.is_ok(), "{body}");
    }
}

/// A struct's `Debug` names its fields, those too that are left out when they are empty.
#[test]
fn every_field_of_a_heartbeat_is_in_its_schema() {
    let schema = schema("heartbeat");
    for (shown, pointer) in samples::heartbeat_structs() {
        let (structure, fields) = shown.split_once(" { ").unwrap();
        // The fields of a struct within this one are looked for where that one is.
        let fields = fields.split(" { ").next().unwrap();
        let properties = &schema.pointer(pointer).unwrap()["properties"];
        let names = fields.split(", ").filter_map(|field| field.split_once(':')).map(|(name, _)| name);
        for name in names {
            assert!(properties.get(name).is_some(), "{structure}.{name} is in no sample of `samples.rs`");
        }
    }
}

/// A worker and an instance of a program both have a `state`; only the worker's is a word of a closed list.
#[test]
fn an_instance_of_a_program_may_be_in_any_state() {
    let schema = schema("heartbeat");
    let mut heartbeat = samples::heartbeats().remove(0);
    heartbeat["models"][0]["processes"][0]["state"] = "running".into();
    validate(&schema, &heartbeat).unwrap();
    heartbeat["state"] = "running".into();
    validate(&schema, &heartbeat).unwrap_err();
}

#[test]
fn every_header_of_a_job_is_in_its_schema() {
    let schema = schema("job-headers");
    for name in headers::OF_JOBS {
        assert!(schema["properties"].get(name).is_some(), "{name} is in no sample of `samples.rs`");
    }
}

#[test]
fn references_lead_somewhere() {
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        found.extend(value["$ref"].as_str());
        let of_list = value.as_array().into_iter().flatten();
        for inner in of_list.chain(value.as_object().into_iter().flat_map(|object| object.values())) {
            references(inner, found);
        }
    }
    let api = asyncapi();
    let mut found = Vec::new();
    references(&api, &mut found);
    assert!(found.len() > 10, "{found:?}");
    for reference in found {
        let leads = match reference.strip_prefix('#') {
            Some(pointer) => api.pointer(pointer).is_some(),
            None => folder().join(reference).exists(),
        };
        assert!(leads, "{reference}");
    }
}
