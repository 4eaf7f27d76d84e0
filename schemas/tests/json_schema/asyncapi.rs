//! AsyncAPI of the exchanges and queues, from a client's point of view.

use serde_json::{Map, Value, json};
use vramq_schemas::{BODY_BYTES_MAX, codec, topology};

use crate::folder;

/// A message of a channel: its name, and the names of the schemas of its body and of its headers. It fits all of the latter.
struct Message {
    name: &'static str,
    body: &'static str,
    headers: &'static [&'static str],
}

const fn message(name: &'static str, body: &'static str, headers: &'static [&'static str]) -> Message {
    Message { name, body, headers }
}

const JOB: Message = message("job", "job", &["job-headers"]);

const REPLIES: [Message; 4] = [
    message("part", "outputs", &["reply-headers"]),
    message("done", "outputs", &["reply-headers"]),
    message("failed", "failure", &["failure-headers"]),
    message("progress", "progress", &["progress-headers"]),
];

/// A worker adds its headers to those of the job, or of the reply that it could not deliver. The broker adds `x-death` to those of the job.
const DEAD_LETTERS: [Message; 4] = [
    message("job", "job", &["dead-letter-headers", "job-headers"]),
    message("jobOfBroker", "job", &["job-headers"]),
    message("part", "outputs", &["dead-letter-headers", "reply-headers"]),
    message("done", "outputs", &["dead-letter-headers", "reply-headers"]),
];

fn by_reference(name: &str) -> Value {
    json!({"$ref": format!("./{name}.json")})
}

impl Message {
    fn to_json(&self) -> Value {
        let mut message = json!({"contentType": "application/json", "payload": by_reference(self.body)});
        match self.headers {
            [] => {}
            [headers] => message["headers"] = by_reference(headers),
            all => {
                let all: Vec<_> = all.iter().map(|headers| by_reference(headers)).collect();
                message["headers"] = json!({"type": "object", "allOf": all});
            }
        }
        message
    }
}

/// One channel: its address, what it is on the broker, and its messages.
fn channel(address: Option<&str>, binding: Value, description: &str, messages: &[Message]) -> Value {
    let messages: Map<_, _> =
        messages.iter().map(|message| (message.name.to_owned(), message.to_json())).collect();
    let mut channel = json!({"address": address, "description": description, "messages": messages});
    if !binding.is_null() {
        channel["bindings"] = json!({"amqp": binding});
    }
    if address.is_some_and(|address| address.contains("{model}")) {
        channel["parameters"] = json!({"model": {"description": "The model's name, or its key."}});
    }
    channel
}

/// All exchanges are durable: see `docs/rabbitmq.md`.
fn exchange(name: &str, kind: &str, description: &str, messages: &[Message]) -> Value {
    let binding = json!({"is": "routingKey", "exchange": {"name": name, "type": kind, "durable": true, "autoDelete": false}});
    channel(Some(name), binding, description, messages)
}

/// A queue that workers declare.
fn queue(name: &str, description: &str, messages: &[Message]) -> Value {
    let binding = json!({"is": "queue", "queue": {"name": name, "durable": true, "exclusive": false, "autoDelete": false}});
    channel(Some(name), binding, description, messages)
}

fn channels() -> Value {
    json!({
        "jobs": exchange(topology::JOBS_EXCHANGE, "direct", "The routing key is the model's name, or its key.", &[JOB]),
        "replies": queue(&topology::default_reply_queue("{model}"),
            "Or the queue that the job's property `reply_to` names. The property `type` is the message's name.", &REPLIES),
        "deadLetters": queue(&topology::dead_queue("{model}"),
            "`job`: the body is the job's, byte for byte, in the job's encoding. `part` and `done`, with the property `type` of that name: \
             results that could not be delivered. `jobOfBroker`: RabbitMQ dead-lettered the job itself, and says why in `x-death`.",
            &DEAD_LETTERS),
        "status": exchange(topology::STATUS_EXCHANGE, "fanout", "Bind a queue of your own.",
            &[message("heartbeat", "heartbeat", &[])]),
        "control": exchange(topology::CONTROL_EXCHANGE, "direct", "The routing key is `all`, or `worker.NAME`.",
            &[message("command", "command", &[])]),
        "answers": channel(None, Value::Null,
            "The queue that the command's property `reply_to` names. The answer has the command's `correlation_id`.",
            &[message("answer", "answer", &[])]),
        "withdrawals": exchange(topology::WITHDRAWALS_EXCHANGE, "fanout", "Workers declare it, and callers may.",
            &[message("withdrawal", "withdrawal", &[])]),
    })
}

/// An operation with these messages of a channel. `reply` is the channel of the answers, all of whose messages may come.
fn operation(channels: &Value, action: &str, channel: &str, reply: Option<&str>) -> Value {
    let of_channel = |name: &str| {
        let messages = channels[name]["messages"].as_object().unwrap();
        let messages: Vec<_> = messages
            .keys()
            .map(|message| json!({"$ref": format!("#/channels/{name}/messages/{message}")}))
            .collect();
        json!({"channel": {"$ref": format!("#/channels/{name}")}, "messages": messages})
    };
    let mut operation = of_channel(channel);
    operation["action"] = action.into();
    if let Some(reply) = reply {
        // Without an `address`: AsyncAPI finds it in headers or body, and `reply_to` is a property.
        operation["reply"] = of_channel(reply);
    }
    operation
}

pub fn asyncapi() -> Value {
    let channels = channels();
    let operations = json!({
        "submit": operation(&channels, "send", "jobs", Some("replies")),
        "withdraw": operation(&channels, "send", "withdrawals", None),
        "command": operation(&channels, "send", "control", Some("answers")),
        "watch": operation(&channels, "receive", "status", None),
        "inspect": operation(&channels, "receive", "deadLetters", None),
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

fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    found.extend(value["$ref"].as_str());
    let of_list = value.as_array().into_iter().flatten();
    for inner in of_list.chain(value.as_object().into_iter().flat_map(|object| object.values())) {
        references(inner, found);
    }
}

#[test]
fn references_lead_somewhere() {
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
