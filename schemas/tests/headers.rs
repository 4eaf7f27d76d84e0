//! Headers: round trips, and headers that others write, which are accepted or rejected with an error that names them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use amq_protocol_types::{AMQPValue, FieldArray, FieldTable};
use proptest::prelude::*;
use vramq_schemas::fields::{self, TEXT_BYTES_MAX};
use vramq_schemas::headers::{self, HISTORY_MAX};
use vramq_schemas::{Attempt, DeadLetter, JobHeaders, MinimumRequirement, Reason, ReplyHeaders};

fn attempt(n: u32) -> Attempt {
    Attempt {
        at_ms: 1_763_000_000_000 + u64::from(n),
        worker: "worker-1".to_owned(),
        device: "cuda:0".to_owned(),
        outcome: "out-of-memory".to_owned(),
        item: 7,
        items: n,
        longest: 512,
        asked: 1 << 40,
        free: 1,
        total: 2,
        foreign: 1 << 41,
        alone: n.is_multiple_of(2),
    }
}

fn table(name: &str, value: AMQPValue) -> FieldTable {
    let mut table = FieldTable::default();
    table.insert(name.into(), value);
    table
}

proptest! {
    #[test]
    fn job_headers_come_back(
        batch_hint in proptest::option::of(1..=u32::MAX),
        batch_hint_max in proptest::option::of(1..=u32::MAX),
        attempts in any::<u32>(),
        items_done in any::<u32>(),
        exclusive in any::<bool>(),
        history in 0..=HISTORY_MAX as u32,
        delays in any::<u32>(),
        crashes in any::<u32>(),
        expires_at_ms in proptest::option::of(0..=i64::MAX as u64),
    ) {
        let headers = JobHeaders {
            batch_hint,
            batch_hint_max,
            attempt: attempts,
            items_done,
            exclusive,
            history: (0..history).map(attempt).collect(),
            delays,
            expires_at_ms,
            crashes,
            waits: 7,
            revision_waits: 9,
            store_waits: 11,
            moved: exclusive,
            queue: exclusive.then(|| "team-a.jobs".to_owned()),
        };
        let mut table = FieldTable::default();
        headers.write(&mut table);
        prop_assert_eq!(JobHeaders::read(&table), Ok(headers));
    }

    #[test]
    fn reply_headers_come_back(
        numbers in any::<[u32; 4]>(),
        queued_ms in 0..=i64::MAX as u64,
        ran_ms in 0..=i64::MAX as u64,
        worker in ".{0,64}",
    ) {
        let [offset, items, items_total, attempt] = numbers;
        let headers = ReplyHeaders { offset, items, items_total, attempt, worker, queued_ms, ran_ms };
        prop_assert_eq!(ReplyHeaders::read(&headers.to_table()), Ok(headers));
    }
}

#[test]
fn a_lowered_hint_grows_back_to_what_the_publisher_wished() {
    let failed = Attempt { items: 10, ..attempt(1) };
    let lowered = JobHeaders {
        batch_hint: Some(1),
        batch_hint_max: Some(30),
        attempt: 1,
        exclusive: true,
        history: vec![failed],
        ..Default::default()
    };
    let mut headers = lowered.clone();
    let hints = (1..=50).map(|pass| {
        headers.fitted(headers.batch_hint.unwrap(), pass);
        assert!(!headers.exclusive);
        headers.batch_hint.unwrap()
    });
    let hints: Vec<_> = hints.collect();
    // Sizes below the failed one come back at once, that one and larger ones later. The hint never exceeds the publisher's.
    assert_eq!(hints[..4], [2, 4, 8, 8]);
    assert_eq!((hints[14], hints[15], hints[30], hints[31], hints[49]), (8, 16, 16, 30, 30));
    // A pass below the hint proves nothing.
    let mut small = JobHeaders { batch_hint: Some(4), ..lowered };
    small.fitted(3, 16);
    assert_eq!(small.batch_hint, Some(4));
    // A hint that nothing lowered is the publisher's.
    let mut wished = JobHeaders { batch_hint: Some(3), ..Default::default() };
    wished.fitted(3, 16);
    assert_eq!(wished.batch_hint, Some(3));
}

#[test]
fn every_integer_type_is_taken() {
    for value in [
        AMQPValue::ShortShortInt(7),
        AMQPValue::ShortShortUInt(7),
        AMQPValue::ShortInt(7),
        AMQPValue::ShortUInt(7),
        AMQPValue::LongInt(7),
        AMQPValue::LongUInt(7),
        AMQPValue::LongLongInt(7),
    ] {
        let read = JobHeaders::read(&table(headers::BATCH_HINT, value)).unwrap();
        assert_eq!(read.batch_hint, Some(7));
    }
    let none = JobHeaders::read(&table(headers::BATCH_HINT, AMQPValue::Void)).unwrap();
    assert_eq!(none, JobHeaders::default());
}

#[test]
fn a_batch_hint_may_have_the_prefix_and_workers_write_the_older_name() {
    for hint in [headers::BATCH_HINT, headers::BATCH_HINT_PREFIXED] {
        let of_publisher = table(hint, AMQPValue::LongLongInt(32));
        assert_eq!(JobHeaders::read_of_publisher(&of_publisher).unwrap().batch_hint, Some(32), "{hint}");
        assert!(!JobHeaders::has_of_workers(&of_publisher), "{hint}");
        let wrong = JobHeaders::read_of_publisher(&table(hint, AMQPValue::LongLongInt(0))).unwrap_err();
        assert_eq!(wrong.name, hint);
    }
    // A worker halves the hint, and keeps headers that are not its own.
    let mut requeued = table(headers::BATCH_HINT_PREFIXED, AMQPValue::LongLongInt(32));
    let read = JobHeaders::read(&requeued).unwrap();
    JobHeaders { batch_hint: Some(16), ..read }.write(&mut requeued);
    assert_eq!(JobHeaders::read(&requeued).unwrap().batch_hint, Some(16));
}

/// Celery's messages have `retries` and `id`; a publisher may write any header.
#[test]
fn headers_of_other_systems_say_nothing_about_attempts() {
    let mut of_celery = table("retries", AMQPValue::LongLongInt(3));
    of_celery.insert(headers::ATTEMPT.into(), AMQPValue::LongLongInt(5));
    of_celery.insert(headers::ITEMS_DONE.into(), AMQPValue::LongString("all".into()));
    assert_eq!(JobHeaders::read_of_publisher(&of_celery).unwrap(), JobHeaders::default());
    assert_ne!(headers::RETRIES, "retries");
}

#[test]
fn absurd_values_are_named() {
    for value in [
        AMQPValue::LongInt(0),
        AMQPValue::LongInt(-1),
        AMQPValue::LongLongInt(1 << 40),
        AMQPValue::LongLongInt(i64::MIN),
        AMQPValue::Timestamp(8),
        AMQPValue::Timestamp(u64::MAX),
        AMQPValue::LongString("8".into()),
        AMQPValue::Double(8.0),
        AMQPValue::Boolean(true),
        AMQPValue::FieldTable(FieldTable::default()),
    ] {
        let error = JobHeaders::read(&table(headers::BATCH_HINT, value.clone())).unwrap_err();
        assert_eq!(error.name, "batch-hint", "{value:?}");
        assert!(error.to_string().contains("a whole number from 1 to"), "{error}");
    }
    for (name, value) in [
        (headers::ATTEMPT, AMQPValue::LongInt(-1)),
        (headers::ITEMS_DONE, AMQPValue::LongLongInt(1 << 32)),
        (headers::EXPIRES_AT_MS, AMQPValue::LongLongInt(i64::MIN)),
        (headers::EXPIRES_AT_MS, AMQPValue::Timestamp(1_763_000_000)),
        (headers::EXCLUSIVE, AMQPValue::LongInt(1)),
        (headers::EXCLUSIVE, AMQPValue::LongString("true".into())),
    ] {
        assert_eq!(JobHeaders::read(&table(name, value)).unwrap_err().name, name);
    }
    let long = AMQPValue::LongString("é".repeat(10_000).as_str().into());
    let error = JobHeaders::read(&table(headers::ATTEMPT, long)).unwrap_err();
    assert!(error.to_string().len() < 300, "{error}");
}

/// A model has none that is longer, so the job could never run; and it has to fit a frame when it is published again.
#[test]
fn a_demanded_revision_is_no_longer_than_those_of_models() {
    let demanded = |bytes: usize| {
        let revision = AMQPValue::LongString("r".repeat(bytes).into());
        headers::demanded_revision(&table(headers::MODEL_REVISION, revision))
    };
    assert_eq!(demanded(TEXT_BYTES_MAX).unwrap().unwrap().len(), TEXT_BYTES_MAX);
    let error = demanded(TEXT_BYTES_MAX + 1).unwrap_err().to_string();
    let expected = format!(
        "is a text of {} bytes; it must be a text of at most {TEXT_BYTES_MAX} bytes",
        TEXT_BYTES_MAX + 1
    );
    assert!(error.ends_with(&expected), "{error}");
}

#[test]
fn a_faulty_history_is_dropped() {
    for value in [
        AMQPValue::LongString("x".into()),
        AMQPValue::FieldTable(FieldTable::default()),
        AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::LongInt(1), AMQPValue::Void])),
    ] {
        assert_eq!(JobHeaders::read(&table(headers::HISTORY, value)).unwrap().history, []);
    }
    let odd = table("items", AMQPValue::LongLongInt(i64::MAX));
    let entries = AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(odd)]));
    let history = JobHeaders::read(&table(headers::HISTORY, entries)).unwrap().history;
    assert_eq!(history[0].items, u32::MAX);
}

#[test]
fn foreign_headers_stay_and_own_ones_are_replaced() {
    let mut table = table("x-foreign", AMQPValue::Double(1.5));
    table.insert(headers::ATTEMPT.into(), AMQPValue::LongInt(1));
    let headers = JobHeaders { attempt: 2, ..JobHeaders::default() };
    headers.write(&mut table);
    assert_eq!(table.inner().get("x-foreign"), Some(&AMQPValue::Double(1.5)));
    assert_eq!(JobHeaders::read(&table).unwrap().attempt, 2);
}

#[test]
fn history_keeps_the_newest() {
    let headers = JobHeaders { history: (0..40).map(attempt).collect(), ..JobHeaders::default() };
    let mut table = FieldTable::default();
    headers.write(&mut table);
    let kept = JobHeaders::read(&table).unwrap().history;
    assert_eq!(kept.iter().map(|a| a.items).collect::<Vec<_>>(), (24..40).collect::<Vec<_>>());
    // Another program may have written more entries.
    let many = (0..40).map(|n| {
        AMQPValue::FieldTable({
            let mut entry = FieldTable::default();
            entry.insert("items".into(), AMQPValue::LongInt(n));
            entry
        })
    });
    table.insert(headers::HISTORY.into(), AMQPValue::FieldArray(FieldArray::from(many.collect::<Vec<_>>())));
    assert_eq!(JobHeaders::read(&table).unwrap().history.len(), HISTORY_MAX);
}

/// All headers share a frame of 128 KiB; ours must leave room for the publisher's.
#[test]
fn the_longest_history_fits_its_frame() {
    let mut long = attempt(1);
    for text in [&mut long.worker, &mut long.device, &mut long.outcome] {
        *text = "é".repeat(5_000);
    }
    let headers = JobHeaders { history: vec![long; 40], ..JobHeaders::default() };
    let mut table = FieldTable::default();
    headers.write(&mut table);
    let dossier = DeadLetter {
        reason: Reason::OutOfMemory,
        error: "é".repeat(5_000),
        dead_at_ms: u64::MAX,
        worker: "é".repeat(5_000),
        worker_version: "0.1.0".to_owned(),
        requirement: Some(MinimumRequirement { item: u32::MAX, cost: u32::MAX, needs_bytes: u64::MAX }),
    };
    dossier.write(&mut table);
    let bytes = fields::table_bytes(&table);
    assert!(bytes <= 32 * 1024, "{bytes} bytes");
}

#[test]
fn texts_are_cut_between_characters() {
    let AMQPValue::LongString(cut) = fields::text(&"é".repeat(TEXT_BYTES_MAX)) else {
        panic!("a text is a long string")
    };
    assert_eq!(cut.len(), TEXT_BYTES_MAX);
    let AMQPValue::LongString(cut) = fields::text(&format!("x{}", "é".repeat(TEXT_BYTES_MAX))) else {
        panic!("a text is a long string")
    };
    assert_eq!(cut.len(), TEXT_BYTES_MAX - 1);
    assert!(std::str::from_utf8(cut.as_bytes()).is_ok());
}

#[test]
fn replies_must_say_where_they_belong() {
    let whole = ReplyHeaders::default().to_table();
    for name in [headers::OFFSET, headers::ITEMS, headers::ITEMS_TOTAL] {
        let mut part = whole.clone();
        part.insert(name.into(), AMQPValue::Void);
        assert_eq!(ReplyHeaders::read(&part).unwrap_err().name, name);
        part.insert(name.into(), AMQPValue::LongInt(-1));
        assert_eq!(ReplyHeaders::read(&part).unwrap_err().name, name);
    }
}

#[test]
fn dead_letters_come_back_whatever_the_integer_type() {
    let letter = DeadLetter {
        reason: Reason::EngineFailed,
        error: "x".to_owned(),
        dead_at_ms: 1_763_000_000_000,
        worker: "w".to_owned(),
        worker_version: "0.1.0".to_owned(),
        requirement: Some(MinimumRequirement { item: 3, cost: 512, needs_bytes: 1 << 33 }),
    };
    let mut table = FieldTable::default();
    letter.write(&mut table);
    assert_eq!(DeadLetter::read(&table), Some(letter));
    table.insert("dead-at-ms".into(), AMQPValue::LongInt(7));
    assert_eq!(DeadLetter::read(&table).unwrap().dead_at_ms, 7);
    for no_moment in [AMQPValue::LongInt(-7), AMQPValue::Timestamp(7)] {
        table.insert("dead-at-ms".into(), no_moment);
        assert_eq!(DeadLetter::read(&table), None);
    }
    assert_eq!(DeadLetter::read(&FieldTable::default()), None);
}

#[test]
fn reasons_have_names() {
    for reason in Reason::ALL {
        assert_eq!(reason.as_str().parse(), Ok(reason));
        assert_eq!(serde_json::to_value(reason).unwrap(), reason.as_str());
    }
}
