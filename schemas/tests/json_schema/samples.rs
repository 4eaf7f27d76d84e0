//! One value of every form of every message, of the code's own types. A schema has only fields that occur here.

use amq_protocol_types::{AMQPValue, FieldTable};
use serde_json::{Value, json};
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::fields::{as_text, integer};
use vramq_schemas::status::{
    CeilingStatus, Counters, DeviceStatus, Heartbeat, ModelStatus, ProcessStatus, QueueStatus, WorkerState,
};
use vramq_schemas::withdrawal::Withdrawal;
use vramq_schemas::{
    Attempt, DeadLetter, Failure, FailureHeaders, ItemProgress, JobHeaders, MinimumRequirement,
    ProgressHeaders, Reason, ReplyHeaders, dead_letter, headers, withdrawal,
};

pub fn failures() -> Vec<Value> {
    let failure = |reason| json!(Failure { reason, error: "why".to_owned() });
    Reason::ALL.map(failure).to_vec()
}

pub fn progress() -> Vec<Value> {
    vec![json!(ItemProgress { item: 1, fraction: 0.5, note: "text".to_owned() })]
}

pub fn heartbeats() -> Vec<Value> {
    let device = DeviceStatus {
        device: "cuda:0".to_owned(),
        utilization_percent: Some(1),
        temperature_celsius: Some(1),
        throttled: vec!["hw_slowdown".to_owned()],
        ..DeviceStatus::default()
    };
    let model = ModelStatus {
        revision: Some("f32-0123456789abcdef".to_owned()),
        queues: vec![QueueStatus { missing: true, ..QueueStatus::default() }, QueueStatus::default()],
        processes: vec![ProcessStatus { pid: Some(1), ..ProcessStatus::default() }, ProcessStatus::default()],
        ..ModelStatus::default()
    };
    let full = Heartbeat {
        reason: Some("why".to_owned()),
        models: vec![model, ModelStatus::default()],
        devices: vec![device, DeviceStatus::default()],
        ceilings: vec![CeilingStatus::default()],
        ..Heartbeat::default()
    };
    let in_state = |state| json!(Heartbeat { state, reason: None, ..full.clone() });
    WorkerState::ALL
        .into_iter()
        .map(in_state)
        .chain([json!(Heartbeat { state: WorkerState::Gone, ..full.clone() })])
        .collect()
}

/// The heartbeat's structs with all their fields, and where a schema has them.
pub fn heartbeat_structs() -> [(String, &'static str); 7] {
    [
        (format!("{:?}", Heartbeat::default()), ""),
        (
            format!("{:?}", ModelStatus { counters: Counters::default(), ..ModelStatus::default() }),
            "/properties/models/items",
        ),
        (format!("{:?}", Counters::default()), "/properties/models/items/properties/counters"),
        (format!("{:?}", QueueStatus::default()), "/properties/models/items/properties/queues/items"),
        (format!("{:?}", ProcessStatus::default()), "/properties/models/items/properties/processes/items"),
        (format!("{:?}", DeviceStatus::default()), "/properties/devices/items"),
        (format!("{:?}", CeilingStatus::default()), "/properties/ceilings/items"),
    ]
}

pub fn commands() -> Vec<Value> {
    let (job, log) = ("id".to_owned(), "debug".to_owned());
    [Command::Pause, Command::Resume, Command::Drain, Command::Cancel { job }, Command::Set { log }]
        .map(|it| json!(it))
        .to_vec()
}

pub fn answers() -> Vec<Value> {
    let memory_back = Outcome::MemoryBack { device: "cpu".to_owned(), free_bytes: 1 };
    let outcomes = [
        Outcome::Done,
        Outcome::Refused,
        Outcome::Requested,
        Outcome::Stopped,
        memory_back,
        Outcome::TooLate,
        Outcome::NotHere,
    ];
    let text = || "why".to_owned();
    let answer =
        |outcome, state| json!(Answer { worker: text(), at_ms: 1, outcome, text: text(), last: true, state });
    let states = WorkerState::ALL.map(|state| answer(Outcome::Done, state));
    outcomes.map(|outcome| answer(outcome, WorkerState::Gone)).into_iter().chain(states).collect()
}

pub fn withdrawals() -> Vec<Value> {
    vec![json!(Withdrawal { job: "id".to_owned(), secret: "digits".to_owned() })]
}

/// Headers of a job: all of them, and none, which is what a new job has.
pub fn job_headers() -> Vec<Value> {
    let attempt = Attempt { outcome: "out-of-memory".to_owned(), ..Attempt::default() };
    let full = JobHeaders {
        batch_hint: Some(1),
        batch_hint_max: Some(1),
        attempt: 1,
        items_done: 1,
        exclusive: true,
        history: vec![attempt],
        delays: 1,
        expires_at_ms: Some(1),
        crashes: 1,
        waits: 1,
        revision_waits: 1,
        store_waits: 1,
        moved: true,
        queue: Some("text".to_owned()),
    };
    let mut table = FieldTable::default();
    full.write(&mut table);
    let texts = [
        headers::USER,
        headers::CALLER,
        headers::TENANT,
        headers::REQUEST_ID,
        headers::TRACEPARENT,
        headers::TRACESTATE,
        headers::MODEL_REVISION,
        withdrawal::DIGEST,
    ];
    for name in texts {
        table.insert(name.into(), AMQPValue::LongString("text".into()));
    }
    for name in [headers::RETRIES, headers::BATCH_HINT_PREFIXED] {
        table.insert(name.into(), AMQPValue::LongLongInt(1));
    }
    vec![of_table(&table), json!({})]
}

pub fn reply_headers() -> Vec<Value> {
    let mut table = ReplyHeaders::default().to_table();
    table.insert(headers::PUBLISH_SEQ.into(), AMQPValue::LongLongInt(1));
    let without = of_table(&table);
    table.insert(headers::TOKENS.into(), AMQPValue::LongLongInt(1));
    table.insert(headers::MODEL_REVISION.into(), AMQPValue::LongString("f32-0123456789abcdef".into()));
    vec![traced(table), without]
}

pub fn failure_headers() -> Vec<Value> {
    let mut table = FailureHeaders::default().to_table();
    table.insert(headers::PUBLISH_SEQ.into(), AMQPValue::LongLongInt(1));
    vec![of_table(&table), traced(table)]
}

pub fn progress_headers() -> Vec<Value> {
    let mut table = ProgressHeaders::default().to_table();
    let without = of_table(&table);
    // Only a direct one is confirmed.
    table.insert(headers::PUBLISH_SEQ.into(), AMQPValue::LongLongInt(1));
    vec![traced(table), without]
}

/// The headers of a reply to a job with a trace.
fn traced(mut table: FieldTable) -> Value {
    for name in [headers::TRACEPARENT, headers::TRACESTATE] {
        table.insert(name.into(), AMQPValue::LongString("text".into()));
    }
    of_table(&table)
}

pub fn dead_letter_headers() -> Vec<Value> {
    let of = |reason, requirement| {
        let text = || "text".to_owned();
        let letter = DeadLetter {
            reason,
            error: text(),
            dead_at_ms: 1,
            worker: text(),
            worker_version: text(),
            requirement,
        };
        let mut table = FieldTable::default();
        letter.write(&mut table);
        table
    };
    let mut out_of_memory =
        of(Reason::OutOfMemory, Some(MinimumRequirement { item: 1, cost: 1, needs_bytes: 1 }));
    // Of a job that had the property.
    out_of_memory.insert(dead_letter::EXPIRATION.into(), AMQPValue::LongString("600000".into()));
    // A withdrawn job leaves no dead letter.
    let reasons = Reason::ALL.into_iter().filter(|reason| *reason != Reason::Withdrawn);
    reasons.map(|reason| of(reason, None)).chain([out_of_memory]).map(|table| of_table(&table)).collect()
}

fn of_table(table: &FieldTable) -> Value {
    table.inner().iter().map(|(name, value)| (name.as_str().to_owned(), of_header(value))).collect()
}

fn of_header(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(value) => json!(value),
        AMQPValue::FieldTable(table) => of_table(table),
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(of_header).collect(),
        value => integer(Some(value)).map_or_else(|| json!(as_text(value)), |number| json!(number)),
    }
}
