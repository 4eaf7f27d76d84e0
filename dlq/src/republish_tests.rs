//! What is published again, and what is refused.

use super::*;
use crate::dead_letter::tests::written;
use lapin::types::AMQPValue;
use vramq_schemas::headers::demanded_revision;
use vramq_schemas::{Attempt, fields};

fn out_of_memory(hint_max: Option<u32>) -> DeadLetter {
    written("a", Reason::OutOfMemory, |table| {
        let attempt = Attempt { outcome: "out-of-memory".to_owned(), items: 8, ..Attempt::default() };
        JobHeaders {
            batch_hint: Some(1),
            batch_hint_max: hint_max,
            attempt: 4,
            items_done: 7,
            exclusive: true,
            history: vec![attempt],
            delays: 3,
            expires_at_ms: Some(5),
            crashes: 2,
            waits: 2,
            revision_waits: 2,
            store_waits: 2,
            moved: true,
            queue: Some("team-a.jobs".to_owned()),
        }
        .write(table);
        for (name, value) in [("mine", 1), ("item", 3), ("x-last-death-queue", 1), ("CC", 1), (DIGEST, 1)] {
            table.insert(name.into(), AMQPValue::LongLongInt(value));
        }
        table.insert(EXPIRATION.into(), AMQPValue::LongString("1000".into()));
    })
}

fn names(headers: &FieldTable) -> Vec<&str> {
    headers.into_iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn a_retried_job_keeps_its_history_and_its_answers() {
    let sent = job(out_of_memory(Some(20)), &Changes::default(), 0).unwrap();
    assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), (RETRY_EXCHANGE, "minilm"));
    assert_eq!(
        names(&sent.headers),
        ["batch-hint", "batch-hint-max", "history", "items-done", "mine", "vramq-queue", "vramq-retries"]
    );
    let read = JobHeaders::read(&sent.headers).unwrap();
    assert_eq!((read.batch_hint, read.batch_hint_max, read.items_done), (Some(20), Some(20), 7));
    assert_eq!((read.attempt, read.exclusive, read.delays, read.crashes), (0, false, 0, 0));
    assert_eq!((read.waits, read.revision_waits, read.store_waits, read.moved), (0, 0, 0, false));
    assert_eq!(fields::integer(sent.headers.inner().get(RETRIES)), Some(1));
    assert_eq!(*sent.properties.delivery_mode(), Some(2));
}

#[test]
fn the_publishers_own_hint_comes_back() {
    let hint = |letter, changes: &Changes| {
        let read = JobHeaders::read(&job(letter, changes, 0).unwrap().headers).unwrap();
        (read.batch_hint, read.batch_hint_max)
    };
    let set = Changes { batch_hint: Some(4), ..Changes::default() };
    assert_eq!(hint(out_of_memory(None), &Changes::default()), (None, None));
    assert_eq!(hint(out_of_memory(Some(9)), &Changes::default()), (Some(9), Some(9)));
    assert_eq!(hint(out_of_memory(Some(9)), &set), (Some(4), Some(4)));
    let never_lowered = written("a", Reason::EngineFailed, |table| {
        table.insert(BATCH_HINT.into(), AMQPValue::LongLongInt(6));
    });
    assert_eq!(hint(never_lowered, &Changes::default()), (Some(6), Some(6)));
}

#[test]
fn a_job_gets_no_results_of_two_revisions() {
    let changes =
        |from_start| Changes { model_revision: Some("f32-0a".to_owned()), from_start, ..Changes::default() };
    let with_results = |done: i64| {
        written("a", Reason::WrongRevision, |table| {
            table.insert(ITEMS_DONE.into(), AMQPValue::LongLongInt(done));
        })
    };
    assert_eq!(job(with_results(3), &changes(false), 0).err(), Some(CannotPublish::OtherRevision(3)));
    assert!(job(with_results(3), &changes(true), 0).is_ok());
    assert!(job(with_results(0), &changes(false), 0).is_ok());
    assert!(job(with_results(3), &Changes::default(), 0).is_ok());
}

#[test]
fn what_an_operator_changes() {
    let changes = Changes {
        priority: Some(7),
        expiration_ms: Some(60_000),
        model_revision: Some("f32-0a".to_owned()),
        from_start: true,
        to: Some("elsewhere".to_owned()),
        ..Changes::default()
    };
    let sent = job(out_of_memory(None), &changes, 5_000).unwrap();
    assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "elsewhere"));
    assert_eq!(sent.headers.inner().get(ITEMS_DONE), None);
    assert_eq!(demanded_revision(&sent.headers).unwrap().as_deref(), Some("f32-0a"));
    let p = &sent.properties;
    assert_eq!((*p.priority(), *p.timestamp()), (Some(7), Some(5)));
    assert_eq!(p.expiration().as_ref().map(ShortString::as_str), Some("60000"));
}

#[test]
fn a_job_that_crashed_workers_keeps_its_count() {
    let crashed = written("a", Reason::Crashed, |table| {
        table.insert(CRASHES.into(), AMQPValue::LongLongInt(2));
    });
    let sent = job(crashed, &Changes::default(), 0).unwrap();
    assert_eq!(JobHeaders::read(&sent.headers).unwrap().crashes, 2);
}

#[test]
fn a_message_that_the_broker_dead_lettered_loses_the_headers_of_workers() {
    let deaths = crate::dead_letter::tests::dead_lettered_by_broker("expired").headers;
    for forges_reason in [false, true] {
        let mut letter = out_of_memory(Some(20));
        letter.headers.insert(CALLER.into(), AMQPValue::LongString("victim".into()));
        letter.headers.insert("x-death".into(), deaths.inner()["x-death"].clone());
        if !forges_reason {
            letter.headers = without(&letter.headers, |name| name == REASON);
        }
        let sent = job(letter, &Changes::default(), 0).unwrap();
        assert_eq!(names(&sent.headers), ["batch-hint", "batch-hint-max", "mine", "vramq-retries"]);
    }
}

#[test]
fn retries_are_counted() {
    let mut letter = out_of_memory(None);
    for n in 1..4 {
        let sent = job(letter.clone(), &Changes::default(), 0).unwrap();
        assert_eq!(fields::integer(sent.headers.inner().get(RETRIES)), Some(n));
        letter.headers = sent.headers;
    }
}

#[test]
fn results_go_to_their_reply_queue_unchanged() {
    let letter = |reply_to: &str| {
        let letter = written("a", Reason::Unroutable, |table| {
            table.insert("offset".into(), AMQPValue::LongLongInt(0));
            table.insert("items".into(), AMQPValue::LongLongInt(2));
        });
        let properties = letter.properties.with_type("done".into()).with_reply_to(reply_to.into());
        DeadLetter { properties, ..letter }
    };
    let sent = results(letter("replies")).unwrap();
    assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "replies"));
    assert_eq!(names(&sent.headers), ["items", "offset", "worker"]);
    assert_eq!(sent.properties.reply_to(), &None);
    assert_eq!(sent.properties.kind().as_ref().map(ShortString::as_str), Some("done"));
    assert_eq!(results(letter("")), Err(CannotPublish::NoReplyTo));
    assert_eq!(results(letter("amq.rabbitmq.reply-to.g1h2")), Err(CannotPublish::CallerLeft));
}

#[test]
fn a_restored_dead_letter_is_unchanged() {
    let before = out_of_memory(None);
    let fingerprint = before.fingerprint();
    let user = before.properties.clone().with_user_id("somebody".into());
    let sent = unchanged(DeadLetter { properties: user, ..before.clone() }).unwrap();
    assert_eq!((sent.exchange.as_str(), sent.routing_key.as_str()), ("", "vramq.dead.minilm"));
    assert_eq!(sent.properties.user_id(), &None);
    let back = DeadLetter::new(&before.queue, sent.properties.with_headers(sent.headers), sent.body.to_vec());
    assert_eq!(back.fingerprint(), fingerprint);
}

#[test]
fn headers_that_fit_no_frame_are_not_published() {
    let large = written("a", Reason::Malformed, |table| {
        table.insert("large".into(), AMQPValue::LongString(vec![b'x'; HEADER_BYTES_MAX].into()));
    });
    assert!(matches!(job(large.clone(), &Changes::default(), 0), Err(CannotPublish::Headers(_))));
    assert!(matches!(unchanged(large), Err(CannotPublish::Headers(_))));
}
