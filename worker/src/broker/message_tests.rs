//! Tests of messages about jobs: where replies may go, and how they name the publisher of a job.

use std::num::NonZeroU16;
use std::sync::Arc;

use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldArray};
use vramq_core::event::Source;
use vramq_core::ids::ModelIndex;
use vramq_schemas::Output;
use vramq_schemas::withdrawal::DIGEST;

use super::*;
use crate::config::Config;
use crate::device::any::AnyDevice;
use crate::device::cpu::CpuDevice;
use crate::engine::echo::Echo;
use crate::publishers::{Pattern, PublisherRules};

fn model() -> Model {
    let config = Config::read(Some("[model.m]\nengine = 'echo'"), &[]).unwrap();
    let echo = Echo::new(AnyDevice::Cpu(CpuDevice::new(1 << 20, 1).unwrap()));
    Model::new(ModelIndex(0), &config.models[0], NonZeroU16::MIN, Arc::new(echo))
}

fn rules() -> Arc<PublisherRules> {
    let reply_allow = Some(vec![Pattern::new("replies.*")]);
    Arc::new(PublisherRules { reply_allow, tenant_users: vec!["gateway".to_owned()], job_queues: Vec::new() })
}

/// A job that was published to an exchange.
fn delivered(exchange: &str, properties: BasicProperties, headers: FieldTable) -> ReceivedJob {
    let mut delivery = Delivery::mock(1, exchange.into(), "m".into(), false, b"{}".to_vec());
    delivery.properties = properties.with_headers(headers);
    ReceivedJob::now(delivery, Source::Quarantine, &rules())
}

fn texts(pairs: &[(&str, &str)]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in pairs {
        table.insert((*name).into(), fields::text(value));
    }
    table
}

fn origin(received: &ReceivedJob) -> (Option<String>, Option<String>) {
    (received.user(), received.caller())
}

#[test]
fn an_address_that_the_broker_has_not_filled_in_is_not_published() {
    let job = |queue: &str| BasicProperties::default().with_reply_to(queue.into());
    for (queue, kept) in
        [("amq.rabbitmq.reply-to", ""), ("amq.rabbitmq.reply-to.g1h2", "amq.rabbitmq.reply-to.g1h2")]
    {
        let again = republished(&job(queue));
        assert_eq!(again.reply_to().as_ref().map(|queue| queue.as_str()), Some(kept));
    }
}

/// Otherwise `vramq dlq retry` would deliver the job's body as results instead of running the job.
#[test]
fn no_dead_lettered_job_claims_to_hold_results() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Unroutable, "its reply queue does not exist");
    let job = |kind: &str| BasicProperties::default().with_message_id("j".into()).with_type(kind.into());
    for (kind, kept) in
        [("part", None), ("done", None), ("failed", None), ("progress", None), ("order", Some("order"))]
    {
        let received = delivered("vramq.jobs", job(kind), FieldTable::default());
        let letter = dead_letter(&received, None, &model(), &identity, &rejection);
        let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Now);
        for message in [letter, again] {
            assert_eq!(message.properties.kind().as_ref().map(|kind| kind.as_str()), kept, "{kind}");
        }
    }
}

#[test]
fn only_replies_to_a_channel_are_not_mandatory() {
    let to = |exchange: &str, key: &str| Message {
        exchange: exchange.into(),
        routing_key: key.into(),
        properties: BasicProperties::default(),
        headers: FieldTable::default(),
        body: Vec::new(),
    };
    assert!(to("", "amq.rabbitmq.reply-to.g1h2").is_direct_reply());
    for (exchange, key) in
        [("", "amq.rabbitmq.reply-to"), ("", "replies"), (RETRY_EXCHANGE, "amq.rabbitmq.reply-to.x")]
    {
        assert!(!to(exchange, key).is_direct_reply());
    }
}

#[test]
fn the_publisher_of_a_job_is_known_after_a_republish() {
    let forged = [(headers::USER, "eve"), (headers::CALLER, "eve"), (headers::TENANT, "acme")];
    let of_gateway = BasicProperties::default().with_message_id("j".into()).with_user_id("gateway".into());
    let first = delivered("vramq.jobs", of_gateway, texts(&forged));
    let known = (Some("gateway".to_owned()), Some("gateway/acme".to_owned()));
    assert_eq!(origin(&first), known);
    assert!(first.has_ignored_headers());
    let mut received = first;
    for route in [Route::Bulk, Route::Now, Route::Quarantine, Route::Later(1000)] {
        let again = requeue(&received, &model(), &JobHeaders::default(), &route);
        assert_eq!(again.properties.user_id().as_ref(), None, "the broker would refuse it");
        received = delivered(again.exchange.as_str(), again.properties, again.headers);
        assert_eq!(origin(&received), known, "{route:?}");
    }
}

/// The job could not be dead-lettered, and waited. It must end as it would have: not run without the header.
#[test]
fn headers_that_cannot_be_read_cannot_be_read_in_the_next_attempt_either() {
    for (exchange, has_attempt) in [("vramq.jobs", false), (RETRY_EXCHANGE, true)] {
        let invalid = texts(&[(headers::BATCH_HINT, "many"), (headers::ATTEMPT, "forged, or not")]);
        let received = delivered(exchange, BasicProperties::default(), invalid);
        assert!(received.job_headers().is_err());
        let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Later(30_000));
        assert_eq!(again.headers.contains_key(headers::ATTEMPT), has_attempt, "{exchange}");
        let again = delivered(again.exchange.as_str(), again.properties, again.headers);
        assert!(again.job_headers().is_err(), "{exchange}");
    }
}

#[test]
fn nobody_gives_an_unknown_publisher_a_name() {
    let forged = texts(&[(headers::USER, "eve"), (headers::CALLER, "eve"), (headers::TENANT, "acme")]);
    let received = delivered("vramq.jobs", BasicProperties::default().with_message_id("j".into()), forged);
    assert_eq!(origin(&received), (None, None));
    let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Now);
    let again = delivered(again.exchange.as_str(), again.properties, again.headers);
    assert_eq!(origin(&again), (None, None));
}

#[test]
fn an_empty_id_leaves_the_name_to_the_other_one() {
    for (message_id, correlation_id) in [("", "c"), ("c", "")] {
        let job = BasicProperties::default()
            .with_message_id(message_id.into())
            .with_correlation_id(correlation_id.into());
        let received = delivered("vramq.jobs", job, FieldTable::default());
        assert_eq!(received.id(), Some("c"));
        let model = model();
        let address = ReplyAddress::of(&received, &model, Encoding::Json);
        let reply = address.reply(ReplyKind::Done, FieldTable::default(), Vec::new());
        let named = reply.properties.correlation_id().as_ref().map(|id| id.as_str());
        assert_eq!(named, Some("c"), "{message_id:?} {correlation_id:?}");
    }
}

/// For example, inputs were fetched for minutes and the clock was set meanwhile.
#[test]
fn a_clock_that_is_set_after_the_delivery_expires_no_job() {
    let hour = BasicProperties::default().with_message_id("j".into()).with_expiration("3600000".into());
    let mut received = delivered("vramq.jobs", hour, FieldTable::default());
    let mut came = (*received.summary).clone();
    // The clock was a day slow at the delivery, and is right now.
    came.at_ms -= 24 * 3_600_000;
    received.summary = Arc::new(came.clone());
    assert!(!received.is_expired());
    came.at -= std::time::Duration::from_secs(3601);
    received.summary = Arc::new(came);
    assert!(received.is_expired(), "an hour has passed");
}

#[test]
fn a_dead_letter_names_the_publisher() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Malformed, "it is");
    let bob = || BasicProperties::default().with_message_id("j".into()).with_user_id("bob".into());
    let received = delivered("vramq.jobs", bob(), texts(&[(headers::USER, "eve")]));
    for reached in [None, Some(JobHeaders::default())] {
        let letter = dead_letter(&received, reached.as_ref(), &model(), &identity, &rejection);
        let user = letter.headers.inner().get(headers::USER).and_then(fields::as_text);
        assert_eq!(user.as_deref(), Some("bob"));
    }
}

#[test]
fn a_dead_lettered_reply_names_the_publisher_of_its_job() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Unroutable, "no queue takes it");
    let job = BasicProperties::default()
        .with_message_id("j".into())
        .with_reply_to("replies.gone".into())
        .with_user_id("gateway".into());
    let received = delivered("vramq.jobs", job, texts(&[(headers::USER, "eve"), (headers::TENANT, "acme")]));
    let model = model();
    let address = ReplyAddress::of(&received, &model, Encoding::Json);
    let reply = address.reply(ReplyKind::Done, FieldTable::default(), Vec::new());
    let letter = dead_reply(reply, &received, &model, &identity, &rejection);
    let named = |header| letter.headers.inner().get(header).and_then(fields::as_text);
    assert_eq!(named(headers::USER).as_deref(), Some("gateway"));
    assert_eq!(named(headers::CALLER).as_deref(), Some("gateway/acme"));
    assert_eq!(letter.properties.reply_to().as_ref().map(|queue| queue.as_str()), Some("replies.gone"));
}

#[test]
fn a_job_that_is_tried_again_never_loses_its_priority() {
    assert_eq!([0, 3, 4, 5, 8, 9].map(priority_again), [5, 5, 5, 6, 9, 9]);
    assert!((0..=u8::MAX).all(|own| priority_again(own) >= own));
    // Large jobs that make room for each other keep their publishers' priority.
    for (route, of_three) in
        [(Route::Now, 5), (Route::Later(1000), 5), (Route::Bulk, 3), (Route::Quarantine, 3)]
    {
        for (own, expected) in [(31, 31), (3, of_three)] {
            let job = BasicProperties::default().with_message_id("j".into()).with_priority(own);
            let received = delivered("vramq.jobs", job, FieldTable::default());
            let again = requeue(&received, &model(), &JobHeaders::default(), &route);
            assert_eq!(*again.properties.priority(), Some(expected), "{own} by {route:?}");
        }
    }
}

#[test]
fn no_failure_is_reported_where_no_reply_may_go() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Malformed, "it is");
    let report = |reply_to: &str| {
        let properties =
            BasicProperties::default().with_message_id("j".into()).with_reply_to(reply_to.into());
        failed(&delivered("vramq.jobs", properties, FieldTable::default()), &model(), &identity, &rejection)
    };
    assert!(report("payroll").is_none() && report("replies.\u{fffd}").is_none());
    assert_eq!(report("replies.bob").unwrap().routing_key.as_str(), "replies.bob");
    // The model's own reply queue is the operator's choice, so it is allowed.
    assert_eq!(report("").unwrap().routing_key.as_str(), "vramq.replies.m");
}

/// A retry of the dead letter trusts these headers, so only workers may have written them.
#[test]
fn a_dead_letter_copies_no_worker_headers_that_a_publisher_forged() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Malformed, "it is");
    let names = ["mine", "x-death", "x-last-death-queue", "needs-bytes"];
    let forged =
        &texts(&names.into_iter().chain(headers::OF_JOBS).map(|name| (name, "1")).collect::<Vec<_>>());
    let letter = |exchange: &str, reached: Option<&JobHeaders>| {
        let job = BasicProperties::default().with_message_id("j".into());
        let received = delivered(exchange, job, forged.clone());
        let letter = dead_letter(&received, reached, &model(), &identity, &rejection);
        let kept = forged.into_iter().map(|(name, _)| name.to_string());
        kept.filter(|name| letter.headers.inner().get(name.as_str()) == Some(&fields::text("1")))
            .collect::<Vec<_>>()
    };
    assert_eq!(letter("vramq.jobs", None), ["batch-hint", "mine"]);
    assert_eq!(letter("vramq.jobs", Some(&JobHeaders::default())), ["mine"]);
    let of_worker = letter(RETRY_EXCHANGE, None);
    assert_eq!(of_worker.len(), 1 + headers::OF_JOBS.len(), "{of_worker:?}");
}

/// Otherwise the job would run with a revision that its publisher does not want, or could not be withdrawn.
#[test]
fn headers_that_a_job_relies_on_are_kept_before_all_others() {
    let (revision, digest) = ("r".repeat(2048), "0".repeat(64));
    let relied_on =
        [(MODEL_REVISION, revision.as_str()), (DIGEST, digest.as_str()), (headers::TENANT, "acme")];
    let relied_on = texts(&relied_on);
    let mut table = relied_on.clone();
    for at in 0..15_000 {
        table.insert(format!("{at:05}").into(), AMQPValue::Boolean(true));
    }
    let job = BasicProperties::default().with_message_id("j".into());
    let received = delivered("vramq.jobs", job, table);
    let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Now);
    assert!(again.headers.inner().len() < 15_000, "not all fit");
    for (name, value) in &relied_on {
        assert_eq!(again.headers.inner().get(name.as_str()), Some(value), "{name}");
    }
}

#[test]
fn a_demanded_revision_that_is_too_large_to_keep_is_not_forgotten() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Malformed, "it is");
    let mut table = FieldTable::default();
    table.insert(MODEL_REVISION.into(), AMQPValue::LongString("r".repeat(110_000).into()));
    let received = delivered("vramq.jobs", BasicProperties::default().with_message_id("j".into()), table);
    let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Now);
    let letter = dead_letter(&received, None, &model(), &identity, &rejection);
    for message in [again, letter] {
        assert!(headers::demanded_revision(&message.headers).is_err(), "a retry runs with any revision");
    }
}

/// Otherwise the job would run the next time.
#[test]
fn headers_that_cannot_be_read_are_not_forgotten_whatever_their_size() {
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let rejection = Rejection::new(Reason::Malformed, "it is");
    for bytes in [100, 110_000] {
        let mut table = FieldTable::default();
        table.insert(headers::UNREADABLE.into(), AMQPValue::ByteArray(vec![1; bytes].into()));
        let received = delivered("vramq.jobs", BasicProperties::default().with_message_id("j".into()), table);
        let again = requeue(&received, &model(), &JobHeaders::default(), &Route::Now);
        let letter = dead_letter(&received, None, &model(), &identity, &rejection);
        for message in [again, letter] {
            assert!(headers::unreadable(&message.headers).is_some(), "{bytes} bytes");
        }
    }
}

/// The replies with these JSON outputs, as a client reads them; and why an output fits no reply.
fn read_replies(
    values: Vec<serde_json::Value>,
    encoding: Encoding,
) -> (Vec<(ReplyKind, usize)>, Option<Rejection>) {
    let received = delivered("", BasicProperties::default(), FieldTable::default());
    let model = model();
    let address = ReplyAddress::of(&received, &model, encoding);
    let identity = Identity { worker: "w".to_owned(), version: "1" };
    let items = u32::try_from(values.len()).unwrap();
    let run = Run {
        offset: 0,
        items,
        items_total: items,
        attempt: 0,
        queued: std::time::Duration::ZERO,
        first_pass_at: std::time::Instant::now(),
        is_last: true,
        bytes: 0,
    };
    let of_run = RunOutputs { outputs: values.into_iter().map(Output::Json).collect(), tokens: None };
    let Encoded { messages, rejection } = replies(run, of_run, address, &model, &identity);
    let read = |message: &Message| {
        let kind = message.properties.kind().as_ref().and_then(|kind| ReplyKind::of(kind.as_str())).unwrap();
        (kind, codec::decode::<Outputs>(&message.body, encoding).unwrap().outputs.len())
    };
    (messages.iter().map(read).collect(), rejection)
}

/// Many small objects take much more memory when decoded: even far less than a part's bytes exceed what clients accept.
#[test]
fn a_reply_that_no_client_could_read_is_cut_into_parts_that_every_client_reads() {
    let objects = |count: usize| serde_json::Value::from(vec![serde_json::json!({}); count]);
    for encoding in [Encoding::Json, Encoding::MessagePack, Encoding::Bincode] {
        let (parts, rejection) = read_replies(vec![objects(30_000); 5], encoding);
        let expected = [(ReplyKind::Part, 2), (ReplyKind::Part, 2), (ReplyKind::Done, 1)];
        assert_eq!((&parts[..], rejection.is_none()), (&expected[..], true), "{encoding:?}");
        let (parts, rejection) = read_replies(vec![objects(30); 5], encoding);
        assert_eq!((&parts[..], rejection.is_none()), (&[(ReplyKind::Done, 5)][..], true), "{encoding:?}");
        let (parts, refused) = read_replies(vec![objects(3), objects(80_000), objects(3)], encoding);
        assert_eq!(parts, [(ReplyKind::Part, 1)], "{encoding:?}");
        let refused = refused.unwrap();
        assert_eq!(refused.reason, Reason::TooLarge);
        assert!(refused.error.contains("704 more for an object"), "{}", refused.error);
    }
}

#[path = "../../../schemas/tests/common/golden_headers.rs"]
mod golden_headers;

#[path = "golden_header_tests.rs"]
mod golden_header_tests;
