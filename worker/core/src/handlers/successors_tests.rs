//! Tests of next attempts that come back before the message that they follow is settled.

use std::time::Duration;

use vramq_schemas::JobHeaders;
use vramq_schemas::control::Command;
use vramq_schemas::withdrawal::Digest;

use crate::action::{Action, Publication, Route, SessionEnd};
use crate::event::{Delivery, Event, PublicationOutcome, SessionFacts, Source, Withdrawn};
use crate::handlers::test_worker::{CHANNEL, Worker, requeued};
use crate::ids::{ItemIndex, JobKey, RequestId};

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

/// The first message of the job, and the message of its next attempt.
const FIRST: u64 = 1;
const NEXT: u64 = 2;

impl Worker {
    /// Delivers the job in the message with this number.
    fn comes(&mut self, key: u64, headers: JobHeaders) -> Vec<Action> {
        self.delivers(Self::message(self.source(), key, headers))
    }

    fn message(source: Source, key: u64, headers: JobHeaders) -> Delivery {
        let (id, withdrawal) = (Some("the job".to_owned()), Some(Digest::of("the secret")));
        Delivery { id, withdrawal, ..Self::delivery(key, source, headers) }
    }

    fn delivers(&mut self, delivery: Delivery) -> Vec<Action> {
        self.apply(Event::Delivered(Box::new(delivery)))
    }

    fn answers(&mut self, outcome: PublicationOutcome) -> Vec<Action> {
        self.apply(Event::Published { job: JobKey(FIRST), outcome })
    }
}

/// A worker that has counted a crash of a job and published the job again. Also returns the headers of the next attempt.
fn counting() -> (Worker, JobHeaders) {
    let mut worker = Worker::new();
    let first = Worker::message(worker.source(), FIRST, JobHeaders::default());
    // Classic queues do not count deliveries, so the worker records the crash in the headers.
    let actions = worker.delivers(Delivery { redelivered: true, delivery_count: None, ..first });
    let (job, headers, route) = requeued(&actions).pop().expect("its crash is counted");
    assert!((job, headers.crashes) == (JobKey(FIRST), 1) && matches!(route, Route::Later(_)));
    (worker, headers)
}

fn is_read(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Decode { job: JobKey(NEXT), .. }))
}

/// If the next attempt ran and killed the worker, both messages would come back.
#[test]
fn a_next_attempt_waits_until_the_message_before_it_is_acknowledged() {
    let (mut worker, headers) = counting();
    let actions = worker.comes(NEXT, headers);
    assert!(!is_read(&actions), "{actions:?}");
    assert!(!is_read(&worker.answers(CONFIRMED)), "the ack can still be lost");
    assert!(!is_read(&worker.apply(Event::Idle)));
    let actions = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    assert!(is_read(&actions), "{actions:?}");
    worker.decoded(NEXT, 1);
    assert_eq!(worker.pass().items, [(JobKey(NEXT), ItemIndex(0))]);
}

#[test]
fn only_the_next_attempt_waits() {
    let (mut worker, headers) = counting();
    let other_id = Worker::delivery(NEXT, worker.source(), headers.clone());
    assert!(is_read(&worker.delivers(other_id)));
    let (mut worker, headers) = counting();
    let later = JobHeaders { attempt: headers.attempt + 1, ..headers };
    assert!(is_read(&worker.comes(NEXT, later)), "another attempt of the same job");
    let (mut worker, headers) = counting();
    worker.answers(CONFIRMED);
    worker.apply(Event::Idle);
    worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    assert!(is_read(&worker.comes(NEXT, headers)), "nothing is here any more");
}

/// The broker refuses every publication. The first message is given back, and only the next attempt has the crash in its headers.
#[test]
fn a_next_attempt_runs_when_the_message_before_it_was_given_back() {
    let (mut worker, headers) = counting();
    worker.comes(NEXT, headers);
    let mut actions = Vec::new();
    for _ in 0..40 {
        let refused = PublicationOutcome::Refused { destination: "full".to_owned() };
        actions = worker.answers(refused);
        // No action means that a wait has begun.
        if actions.is_empty() {
            actions = worker.until_next_timer();
        }
        assert!(!is_read(&actions), "{actions:?}");
        if actions.iter().any(|action| matches!(action, Action::GiveBack { .. })) {
            break;
        }
    }
    assert!(matches!(actions[..], [Action::GiveBack { job: JobKey(FIRST) }]), "{actions:?}");
    assert!(is_read(&worker.apply(Event::NackSent { job: JobKey(FIRST), sent: true })));
}

/// The broker blocks publishers, so confirms do not come.
#[test]
fn a_next_attempt_does_not_wait_for_ever() {
    let (mut worker, headers) = counting();
    worker.comes(NEXT, headers);
    worker.now += Duration::from_secs(30);
    assert!(!is_read(&worker.quiet_tick()));
    worker.now += Duration::from_secs(1);
    assert!(is_read(&worker.quiet_tick()));
    // It is not read a second time when the first message is settled.
    worker.answers(CONFIRMED);
    worker.apply(Event::Idle);
    assert!(!is_read(&worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] })));
}

#[test]
fn a_next_attempt_that_waits_can_be_withdrawn() {
    let (mut worker, headers) = counting();
    worker.comes(NEXT, headers);
    let (id, digest) = ("the job".to_owned(), Digest::of("the secret"));
    let actions = worker.apply(Event::Withdrawn(Withdrawn { id, digest }));
    let notice = |action: &Action| {
        matches!(action, Action::Publish { job: JobKey(NEXT), publication: Publication::FailureNotice(_) })
    };
    assert!(actions.iter().any(notice), "{actions:?}");
    worker.answers(CONFIRMED);
    worker.apply(Event::Idle);
    assert!(!is_read(&worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] })));
}

/// If it ended before, and the session was lost, the first message would come back and run although the caller was answered.
#[test]
fn a_next_attempt_that_waits_is_cancelled_when_the_message_before_it_is_acknowledged() {
    let (mut worker, headers) = counting();
    worker.comes(NEXT, headers);
    let is_dead = |actions: &[Action]| {
        let of_next = |action: &Action| {
            matches!(
                action,
                Action::Publish { job: JobKey(NEXT), publication: Publication::DeadLetter { .. } }
            )
        };
        actions.iter().any(of_next)
    };
    let command = Command::Cancel { job: "the job".to_owned() };
    let actions = worker.apply(Event::Command { request: RequestId(1), command });
    assert!(!is_dead(&actions), "{actions:?}");
    assert!(!is_dead(&worker.answers(CONFIRMED)) && !is_dead(&worker.apply(Event::Idle)));
    let actions = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    assert!(is_dead(&actions) && !is_read(&actions), "{actions:?}");
}

#[test]
fn a_session_takes_along_what_waits() {
    let (mut worker, headers) = counting();
    worker.comes(NEXT, headers.clone());
    let actions = worker.apply(Event::SessionFailed("cut".to_owned()));
    assert!(matches!(actions[..], [Action::EndSession(SessionEnd::Lost(_))]), "{actions:?}");
    assert!(!is_read(&worker.apply(Event::SessionClosed)));
    worker.apply(Event::SessionOpened(SessionFacts { declares: true, missing: Vec::new() }));
    assert!(is_read(&worker.comes(NEXT, headers)));
}
