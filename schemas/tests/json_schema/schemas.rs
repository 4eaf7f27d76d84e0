//! The schema of each message and of its headers.

use serde_json::{Value, json};
use vramq_schemas::{ITEMS_MAX, Job};

use crate::common::{jobs, outputs, sparse};
use crate::infer::{Inference, describe};
use crate::samples;

const DIALECT: &str = "https://json-schema.org/draft/2020-12/schema";

const JOB_HEADERS: &str = include_str!("../../src/headers/job.rs");
const REPLY_HEADERS: &str = include_str!("../../src/headers/reply.rs");
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
    // Rules of the decoder that no sample shows; `schemas_refuse_what_the_decoder_refuses` compares both. That there is an input is a rule
    // of the worker.
    job["additionalProperties"] = false.into();
    job["required"] = json!(["inputs", "model"]);
    job["properties"]["inputs"]["minItems"] = 1.into();
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
    let mut job_headers = of("Headers of a job", (JOB_HEADERS, "JobHeaders"), &[], &samples::job_headers());
    let attempt = include_str!("../../src/attempt.rs");
    describe(&mut job_headers["properties"]["history"]["items"], attempt, "Attempt");
    job_headers
}

/// The schema of each message and of its headers, by the name of its file.
pub fn schemas() -> Vec<(&'static str, Value)> {
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
        ("reply-headers", of(of_replies, (REPLY_HEADERS, "ReplyHeaders"), &[], &samples::reply_headers())),
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

/// One of them.
pub fn schema(name: &str) -> Value {
    schemas().into_iter().find(|(found, _)| *found == name).unwrap().1
}
