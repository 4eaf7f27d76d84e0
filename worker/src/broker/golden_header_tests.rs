//! The headers of the messages that a worker publishes are the frozen ones (`schemas/golden`), to the last.

use serde_json::{Value, json};
use vramq_core::rejection::Rejection;
use vramq_schemas::ItemProgress;
use vramq_schemas::headers::{BATCH_HINT_PREFIXED, PUBLISH_SEQ, REQUEST_ID, RETRIES, TENANT};

use super::golden_headers::{
    self, DEAD_LETTER, FAILED, MODEL_REVISION, PROGRESS, REPLY, REQUEUED, TRACEPARENT, TRACESTATE, WORKER,
    golden, to_json,
};
use super::*;
use crate::device::cpu::CpuDevice;
use crate::engine::echo::Echo;
use crate::engine::{Engine, InvalidInput, Item, PassError, PassShape};

/// `echo` with a revision, as models with weights have one.
struct WithRevision(Echo);

impl Engine for WithRevision {
    fn revision(&self) -> Option<String> {
        Some(MODEL_REVISION.to_owned())
    }

    fn resident_bytes(&self) -> u64 {
        self.0.resident_bytes()
    }

    fn item_cost_max(&self) -> usize {
        self.0.item_cost_max()
    }

    fn pass_bytes(&self, shape: PassShape) -> u64 {
        self.0.pass_bytes(shape)
    }

    fn prepare(
        &self,
        inputs: &[vramq_schemas::Input],
        params: &vramq_schemas::Params,
    ) -> Result<Vec<Item>, InvalidInput> {
        self.0.prepare(inputs, params)
    }

    fn run(&self, items: &[Item]) -> Result<Vec<Output>, PassError> {
        self.0.run(items)
    }
}

fn identity() -> Identity {
    Identity { worker: WORKER.to_owned(), version: "0.3.0" }
}

/// A job of a tenant of the gateway's, with all that publishers, gateways and operators write.
fn job() -> ReceivedJob {
    let properties = BasicProperties::default()
        .with_message_id("j".into())
        .with_user_id("gateway".into())
        .with_timestamp(1_763_000_000)
        .with_expiration("600000".into());
    let frozen = golden(REQUEUED);
    let mut headers = texts(&[(headers::TRACEPARENT, TRACEPARENT), (headers::TRACESTATE, TRACESTATE)]);
    for name in [TENANT, REQUEST_ID, DIGEST, headers::MODEL_REVISION] {
        headers.insert(name.into(), fields::text(frozen[name].as_str().unwrap()));
    }
    for name in [RETRIES, BATCH_HINT_PREFIXED] {
        headers.insert(name.into(), fields::long(frozen[name].as_u64().unwrap()));
    }
    delivered("vramq.jobs", properties, headers)
}

/// What the message's headers are as JSON, with a moment or a duration as it was frozen, if it is at least `least`.
fn normalised(message: &Message, name: &str, least: u64, frozen: &Value) -> Value {
    let mut found = to_json(&message.headers);
    assert!(found[name].as_u64().unwrap() >= least, "{name}: {found}");
    found[name] = frozen[name].clone();
    found
}

/// The frozen headers without the number that [`ConfirmedPublisher`](vramq_amqp::ConfirmedPublisher) adds when it sends the message.
fn unnumbered(name: &str) -> Value {
    let mut frozen = golden(name);
    frozen.as_object_mut().unwrap().remove(PUBLISH_SEQ).unwrap();
    frozen
}

#[test]
fn a_job_that_is_published_again_has_the_frozen_headers() {
    let message = requeue(&job(), &model(), &golden_headers::requeued(), &Route::Now);
    assert_eq!(to_json(&message.headers), golden(REQUEUED));
}

#[test]
fn a_dead_letter_has_the_frozen_headers() {
    let expected = golden_headers::dead_letter();
    let rejection =
        Rejection { requirement: expected.requirement, ..Rejection::new(expected.reason, expected.error) };
    let message = dead_letter(&job(), Some(&golden_headers::requeued()), &model(), &identity(), &rejection);
    let frozen = golden(DEAD_LETTER);
    assert_eq!(normalised(&message, "dead-at-ms", expected.dead_at_ms, &frozen), frozen);
}

#[test]
fn replies_have_the_frozen_headers() {
    let device = CpuDevice::new(1 << 20, 1).unwrap();
    let engine = WithRevision(Echo::new(AnyDevice::Cpu(device)));
    let model = Model { engine: Arc::new(engine), ..model() };
    let received = job();
    let address = ReplyAddress::of(&received, &model, Encoding::Json);
    let expected = golden_headers::reply();
    let run = Run {
        offset: expected.offset,
        items: expected.items,
        items_total: expected.items_total,
        attempt: expected.attempt,
        queued: std::time::Duration::from_millis(expected.queued_ms),
        first_pass_at: std::time::Instant::now() - std::time::Duration::from_millis(expected.ran_ms),
        is_last: true,
        bytes: 0,
    };
    let of_run = RunOutputs {
        outputs: vec![Output::Json(json!(1)), Output::Json(json!(2))],
        tokens: Some(vec![7, 11]),
    };
    let Encoded { messages, rejection } = replies(run, of_run, address, &model, &identity());
    let ([message], None) = (&messages[..], &rejection) else { panic!("{messages:?}, {rejection:?}") };
    let frozen = unnumbered(REPLY);
    assert_eq!(normalised(message, headers::RAN_MS, expected.ran_ms, &frozen), frozen);

    let half = ItemProgress { item: 1, fraction: 0.5, note: String::new() };
    let message = progress(&half, expected.attempt, address, &identity()).unwrap();
    assert_eq!(to_json(&message.headers), unnumbered(PROGRESS));

    let message = failed(&received, &model, &identity(), &Rejection::expired(None, 0, None)).unwrap();
    assert_eq!(to_json(&message.headers), unnumbered(FAILED));
}
