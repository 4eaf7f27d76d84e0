//! Tests of jobs that end before they run: their reply queue stays full, they have expired, they cannot be read, they crash workers.

use std::time::Duration;

use crate::action::Publication;
use crate::event::{Event, PassResult, PublicationOutcome};
use crate::handlers::test_worker::{CHANNEL, Worker, requeued};
use crate::ids::Fingerprint;

use super::*;

/// The reason and the text of the dead letter among these actions, and the crashes in its headers.
fn dead_letter(actions: &[Action]) -> Option<(Reason, &str, Option<u32>)> {
    actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
            let crashes = headers.as_ref().map(|headers| headers.crashes);
            Some((rejection.reason, rejection.error.as_str(), crashes))
        }
        _ => None,
    })
}

/// A job with a reply queue arrives.
fn answers_to(worker: &mut Worker, key: u64, queue: &str, headers: JobHeaders) -> Vec<Action> {
    let delivery =
        Delivery { reply_queue: Some(queue.to_owned()), ..Worker::delivery(key, worker.source(), headers) };
    worker.apply(Event::Delivered(Box::new(delivery)))
}

#[test]
fn a_job_whose_reply_queue_stays_full_waits_64_times_and_is_then_dead_lettered_unrun() {
    let mut worker = Worker::new();
    answers_to(&mut worker, 1, "full", JobHeaders::default());
    worker.decoded(1, 1);
    let pass = worker.pass();
    worker.ends(&pass, PassResult::Done, vec![Some(1)]);
    let refused = PublicationOutcome::Refused { destination: "full".to_owned() };
    worker.apply(Event::Published { job: JobKey(1), outcome: refused });
    for (key, waits) in [(2, 0), (3, WAITS_MAX - 1)] {
        let headers = JobHeaders { waits, ..JobHeaders::default() };
        let actions = answers_to(&mut worker, key, "full", headers);
        let [(_, headers, Route::Later(_))] = &requeued(&actions)[..] else { panic!("{actions:?}") };
        assert_eq!(headers.waits, waits + 1);
    }
    let headers = JobHeaders { waits: WAITS_MAX, ..JobHeaders::default() };
    let actions = answers_to(&mut worker, 4, "full", headers);
    let Some((Reason::Unroutable, text, _)) = dead_letter(&actions) else { panic!("{actions:?}") };
    assert!(text.contains("`full`") && text.contains("the job was not run"), "{text}");
}

#[test]
fn a_job_that_expires_while_it_is_read_is_not_run() {
    let mut worker = Worker::new();
    worker.expires_at_ms = Some(worker.unix_ms + 1000);
    for key in [1, 2] {
        worker.arrives(key, worker.source(), JobHeaders::default());
    }
    worker.now += Duration::from_millis(1000);
    assert_eq!(dead_letter(&worker.decoded(1, 1)), None, "not yet");
    worker.now += Duration::from_millis(1);
    let actions = worker.decoded(2, 1);
    assert_eq!(dead_letter(&actions).map(|(reason, ..)| reason), Some(Reason::Expired));
}

/// The publisher's clock may be slow: the job has just been published, or has waited for hours.
#[test]
fn a_job_whose_time_was_over_when_it_came_says_when_it_was_published() {
    let expired = |published_s_ago: Option<u64>, expires_at_ms: u64| {
        let mut worker = Worker::new();
        worker.unix_ms = 10_000_000;
        let published_ms = published_s_ago.map(|seconds| worker.unix_ms - seconds * 1000);
        let delivery = Delivery {
            published_ms,
            expires_at_ms: Some(expires_at_ms),
            ..Worker::delivery(1, worker.source(), JobHeaders::default())
        };
        worker.apply(Event::Delivered(Box::new(delivery)));
        worker.now += Duration::from_secs(2);
        let actions = worker.decoded(1, 1);
        let Some((Reason::Expired, error, _)) = dead_letter(&actions) else { panic!("{actions:?}") };
        error.to_owned()
    };
    let error = expired(Some(7200), 6_400_000);
    assert!(error.contains("published 7200 s before") && error.contains("clock"), "{error}");
    let short = "the job's expiration passed before it ran";
    assert_eq!(expired(None, 6_400_000), short, "its publisher gave no time");
    assert_eq!(expired(Some(1), 10_001_000), short, "its time was over later, in this worker's hands");
}

#[test]
fn a_job_that_cannot_be_read_is_a_dead_letter_and_one_for_another_revision_waits() {
    let mut worker = Worker::new();
    for key in [1, 2] {
        worker.arrives(key, worker.source(), JobHeaders::default());
    }
    let mut rejected = |key, reason| {
        let result = Err(Rejection::new(reason, "as the job says"));
        worker.apply(Event::Decoded { job: JobKey(key), result })
    };
    let actions = rejected(1, Reason::InvalidInput);
    assert_eq!(dead_letter(&actions), Some((Reason::InvalidInput, "as the job says", None)));
    let actions = rejected(2, Reason::WrongRevision);
    assert!(matches!(requeued(&actions)[..], [(_, _, Route::Later(_))]), "{actions:?}");
}

#[test]
fn a_job_that_crashed_workers_while_it_ran_alone_says_so_in_its_dead_letter() {
    let mut worker = Worker::new();
    let headers = JobHeaders { crashes: 5, ..JobHeaders::default() };
    let actions = worker.arrives(1, Source::Quarantine, headers);
    let Some((Reason::Crashed, text, crashes)) = dead_letter(&actions) else { panic!("{actions:?}") };
    assert!(text.contains("5 workers crashed"), "{text}");
    assert_eq!(crashes, Some(2), "retried, it runs in the quarantine again");
}

#[test]
fn the_cost_of_what_is_left_is_estimated_from_what_is_prepared() {
    assert_eq!(estimate(7, 2, 2), 7, "all of it is known");
    assert_eq!(estimate(100, 10, 50), 500);
    assert_eq!(estimate(0, 0, 50), 0);
}

#[test]
fn a_job_that_is_done_and_whose_ack_was_not_sent_is_not_run_again() {
    // Acks that were sent arrive while the session lasts: what is redelivered then is another job with the same content.
    for (is_sent, is_run) in [(false, false), (true, true)] {
        let mut worker = Worker::new();
        worker.job(1, 1, worker.source(), JobHeaders::default());
        let pass = worker.pass();
        worker.ends(&pass, PassResult::Done, vec![Some(1)]);
        let confirmed = PublicationOutcome::Confirmed { messages: 1 };
        worker.apply(Event::Published { job: JobKey(1), outcome: confirmed });
        worker.apply(Event::Idle);
        worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![is_sent] });
        let again = Delivery {
            redelivered: true,
            fingerprint: Fingerprint(1),
            ..Worker::delivery(2, worker.source(), JobHeaders::default())
        };
        let actions = worker.apply(Event::Delivered(Box::new(again)));
        let is_read = actions.iter().any(|action| matches!(action, Action::Decode { .. }));
        assert_eq!(is_read, is_run, "{actions:?}");
    }
}

/// An operator who reads the dead letter sees that a worker was lost with the job.
#[test]
fn a_dead_letter_of_a_job_that_did_not_run_keeps_the_crash_that_the_broker_counted() {
    let returned = |worker: &mut Worker, key| {
        let delivery = Delivery {
            redelivered: true,
            delivery_count: Some(1),
            expires_at_ms: worker.expires_at_ms,
            ..Worker::delivery(key, worker.source(), JobHeaders::default())
        };
        worker.apply(Event::Delivered(Box::new(delivery)));
    };
    let mut worker = Worker::new();
    worker.expires_at_ms = Some(worker.unix_ms + 1000);
    returned(&mut worker, 1);
    let rejected = Err(Rejection::new(Reason::InvalidInput, "no such input"));
    let actions = worker.apply(Event::Decoded { job: JobKey(1), result: rejected });
    let letter = dead_letter(&actions).map(|(reason, _, crashes)| (reason, crashes));
    assert_eq!(letter, Some((Reason::InvalidInput, Some(1))), "{actions:?}");
    // It expires while it waits for a pass.
    returned(&mut worker, 2);
    worker.decoded(2, 1);
    worker.now += Duration::from_secs(2);
    let actions = worker.apply(Event::Idle);
    let letter = dead_letter(&actions).map(|(reason, _, crashes)| (reason, crashes));
    assert_eq!(letter, Some((Reason::Expired, Some(1))), "{actions:?}");
    // Nothing is known of a job whose headers cannot be read.
    let unread = Delivery { headers: None, ..Worker::delivery(3, worker.source(), JobHeaders::default()) };
    worker.apply(Event::Delivered(Box::new(unread)));
    let rejected = Err(Rejection::new(Reason::Malformed, "no headers"));
    let actions = worker.apply(Event::Decoded { job: JobKey(3), result: rejected });
    assert_eq!(dead_letter(&actions).map(|(_, _, crashes)| crashes), Some(None), "{actions:?}");
}
