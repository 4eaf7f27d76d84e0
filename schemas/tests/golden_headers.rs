//! The frozen headers: every version writes and reads exactly these. Here, what the wire contract's own types write and read of them; the
//! whole headers of messages are compared where they are put together, in `producer/src/outgoing.rs` and `worker/src/broker/message.rs`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "common/golden_headers.rs"]
mod golden_headers;

use amq_protocol_types::{AMQPValue, FieldArray, FieldTable};
use golden_headers::{
    DEAD_LETTER, FAILED, PROGRESS, PUBLISHED, REPLY, REQUEUED, WORKER, golden, only, to_json, to_table,
};
use vramq_schemas::dead_letter::OF_DEAD_LETTERS;
use vramq_schemas::headers::{
    self, CALLER, MODEL_REVISION, OF_JOBS, PUBLISH_SEQ, TOKENS, TRACEPARENT, TRACESTATE, USER,
};
use vramq_schemas::{DeadLetter, FailureHeaders, JobHeaders, ProgressHeaders, ReplyHeaders, TraceContext};

/// Headers of jobs that [`JobHeaders`] reads and writes.
fn is_of_job(name: &str) -> bool {
    OF_JOBS.contains(&name) && ![USER, CALLER].contains(&name)
}

#[test]
fn a_publisher_says_its_hint_and_nothing_else() {
    let table = to_table(&golden(PUBLISHED));
    let expected = JobHeaders { batch_hint: Some(32), ..JobHeaders::default() };
    assert_eq!(JobHeaders::read_of_publisher(&table), Ok(expected.clone()));
    assert_eq!(JobHeaders::read(&table), Ok(expected));
    assert!(!JobHeaders::has_of_workers(&table));
}

#[test]
fn a_job_that_was_published_again_is_written_and_read_as_frozen() {
    for name in [REQUEUED, DEAD_LETTER] {
        let frozen = golden(name);
        assert_eq!(JobHeaders::read(&to_table(&frozen)), Ok(golden_headers::requeued()), "{name}");
        let mut table = FieldTable::default();
        golden_headers::requeued().write(&mut table);
        assert_eq!(to_json(&table), only(&frozen, is_of_job), "{name}");
    }
}

#[test]
fn replies_are_written_and_read_as_frozen() {
    let frozen = golden(REPLY);
    let table = to_table(&frozen);
    assert_eq!(ReplyHeaders::read(&table), Ok(golden_headers::reply()));
    assert_eq!(headers::tokens(&table), Some(18));
    // The worker adds these (`message.rs`), and its publisher a number.
    let of_others = [TOKENS, MODEL_REVISION, TRACEPARENT, TRACESTATE, PUBLISH_SEQ];
    let written = to_json(&golden_headers::reply().to_table());
    assert_eq!(written, only(&frozen, |name| !of_others.contains(&name)));
    for name in [REPLY, FAILED, PROGRESS, REQUEUED, DEAD_LETTER, PUBLISHED] {
        let trace = TraceContext::of(&to_table(&golden(name))).unwrap();
        assert_eq!(trace.parent.as_str(), golden_headers::TRACEPARENT, "{name}");
        assert_eq!(trace.state(), Some(golden_headers::TRACESTATE), "{name}");
    }
    let worker = || WORKER.to_owned();
    let written = to_json(&FailureHeaders { worker: worker() }.to_table());
    assert_eq!(written, only(&golden(FAILED), |name| name == "worker"));
    let written = to_json(&ProgressHeaders { attempt: 2, worker: worker() }.to_table());
    assert_eq!(written, only(&golden(PROGRESS), |name| ["attempt", "worker"].contains(&name)));
}

#[test]
fn dead_letters_are_written_and_read_as_frozen() {
    let frozen = golden(DEAD_LETTER);
    assert_eq!(DeadLetter::read(&to_table(&frozen)), Some(golden_headers::dead_letter()));
    let mut table = FieldTable::default();
    golden_headers::dead_letter().write(&mut table);
    assert_eq!(to_json(&table), only(&frozen, |name| OF_DEAD_LETTERS.contains(&name)));
}
