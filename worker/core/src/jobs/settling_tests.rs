//! Tests of settling: every outcome of every publication.

use std::time::Duration;

use proptest::prelude::*;
use vramq_schemas::Reason;

use super::*;
use crate::action::Route;
use crate::disposition::{Otherwise, Requeue, WAITS_MAX};
use crate::event::{Delivery, Now, Source};
use crate::ids::{ChannelId, ConsumerId, DeliveryTag, Fingerprint, JobKey, ModelIndex, QueueIndex};
use crate::observation::Cause;
use crate::rejection::Rejection;

fn received() -> Received {
    let delivery = Delivery {
        job: JobKey(1),
        model: ModelIndex(0),
        source: Source::Jobs(QueueIndex::OWN, ConsumerId(1)),
        channel: ChannelId { model: ModelIndex(0), number: 0 },
        tag: DeliveryTag(1),
        fingerprint: Fingerprint(1),
        redelivered: false,
        delivery_count: None,
        id: Some("a".to_owned()),
        caller: None,
        withdrawal: None,
        reply_queue: None,
        trace_id: None,
        bytes: 10,
        headers: Some(JobHeaders::default()),
        expires_at_ms: None,
        published_ms: None,
    };
    Received::new(delivery, Now { at: Instant::now(), unix_ms: 0 })
}

fn run() -> Run {
    let (queued, first_pass_at) = (Duration::ZERO, Instant::now());
    Run { offset: 2, items: 3, items_total: 5, attempt: 0, queued, first_pass_at, is_last: false, bytes: 1 }
}

fn settling(outcome: JobOutcome, run: Option<Run>) -> Settling {
    let headers = JobHeaders { items_done: 2, ..JobHeaders::default() };
    Settling::new(received(), outcome, run, Some(headers), Instant::now())
}

fn requeue(otherwise: Option<Box<Otherwise>>) -> JobOutcome {
    let headers = Box::new(JobHeaders { items_done: 5, ..JobHeaders::default() });
    JobOutcome::Requeue(Requeue { route: Route::Now, headers, cause: Cause::Smaller, otherwise })
}

/// A job for other workers that has already waited so many times for their queue.
fn for_others(waits: u32) -> JobOutcome {
    let back = JobHeaders { items_done: 5, waits, ..JobHeaders::default() };
    let reason = |reason| Rejection::new(reason, "too large");
    requeue(Some(Otherwise::new("xl", reason(Reason::OutOfMemory), &back, reason(Reason::Unroutable))))
}

fn dead_letter() -> JobOutcome {
    let headers = JobHeaders { items_done: 5, ..JobHeaders::default() };
    JobOutcome::dead_letter(headers, Rejection::new(Reason::EngineFailed, "boom"))
}

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

fn unroutable() -> PublicationOutcome {
    PublicationOutcome::Unroutable { destination: "q".to_owned() }
}

fn refused() -> PublicationOutcome {
    PublicationOutcome::Refused { destination: "q".to_owned() }
}

#[test]
fn only_a_job_for_a_larger_device_is_read_by_other_workers() {
    for (outcome, reader) in [(for_others(0), Reader::OtherWorkers), (requeue(None), Reader::OwnQueues)] {
        let mut settling = settling(outcome, None);
        settling.begin();
        assert_eq!(settling.reader(), reader);
    }
}

/// A step in a word; a dead letter with its reason and the items that are answered.
fn word(step: &Step) -> String {
    match step {
        Step::Publish(Publication::Reply(_)) => "reply".to_owned(),
        Step::Publish(Publication::ReplyAgain) => "reply again".to_owned(),
        Step::Publish(Publication::Requeue { route, .. }) => format!("requeue {route:?}"),
        Step::Publish(Publication::DeadReplies(_)) => "dead replies".to_owned(),
        Step::Publish(Publication::DeadLetter { headers, rejection }) => {
            let items_done = headers.as_ref().map_or(0, |headers| headers.items_done);
            format!("dead letter {} at {items_done}", rejection.reason)
        }
        Step::Publish(Publication::FailureNotice(_)) => "notice".to_owned(),
        Step::Retry => "retry".to_owned(),
        Step::GiveBack => "give back".to_owned(),
        Step::Reject => "reject".to_owned(),
        Step::Ack(_) => "ack".to_owned(),
        Step::SessionUnusable(_) => "session unusable".to_owned(),
    }
}

#[test]
fn only_replies_after_which_the_job_goes_on_count_as_a_part() {
    let is_part = |outcome, run| {
        let mut settling = settling(outcome, run);
        settling.begin();
        settling.is_part()
    };
    assert!(is_part(requeue(None), Some(run())) && is_part(dead_letter(), Some(run())));
    assert!(!is_part(JobOutcome::Reply, Some(run())) && !is_part(requeue(None), None));
}

/// Refused publications are not offered again.
fn policy(declares: bool) -> PublishPolicy {
    PublishPolicy { may_retry: false, declares }
}

/// All steps, from the first on, given the outcomes of the publications.
fn steps(mut settling: Settling, outcomes: &[PublicationOutcome], declares: bool) -> (Vec<String>, End) {
    let mut steps = vec![word(&settling.begin())];
    for outcome in outcomes {
        steps.push(word(&settling.published(outcome.clone(), policy(declares))));
    }
    (steps, settling.end)
}

/// A job, how its publications go, and the steps and the end that follow.
struct Row {
    settling: Settling,
    outcomes: Vec<PublicationOutcome>,
    /// Sessions declare the queues.
    declares: bool,
    steps: &'static str,
    end: End,
}

/// A row in which sessions declare the queues.
fn row<const N: usize>(
    settling: Settling,
    outcomes: [PublicationOutcome; N],
    steps: &'static str,
    end: End,
) -> Row {
    Row { settling, outcomes: outcomes.into(), declares: true, steps, end }
}

/// The row where sessions do not declare them.
fn undeclared(row: Row) -> Row {
    Row { declares: false, ..row }
}

fn check(rows: impl IntoIterator<Item = Row>) {
    for (at, Row { settling, outcomes, declares, steps: expected, end }) in rows.into_iter().enumerate() {
        let (steps, ended) = steps(settling, &outcomes, declares);
        assert_eq!((steps.join(", "), ended), (expected.to_owned(), end), "row {at}");
    }
}

#[test]
fn every_row_of_jobs_that_are_not_run() {
    let withdrawn = || settling(JobOutcome::Withdrawn, None);
    check([
        row(settling(JobOutcome::AckOnly, None), [], "ack", End::AlreadySettled),
        row(withdrawn(), [CONFIRMED], "notice, ack", End::Withdrawn),
        row(withdrawn(), [unroutable()], "notice, ack", End::Withdrawn),
        undeclared(row(withdrawn(), [refused()], "notice, ack", End::Withdrawn)),
    ]);
}

#[test]
fn every_row_of_replies() {
    let rejection = Rejection::new(Reason::TooLarge, "output");
    let cut = PublicationOutcome::Cut { confirmed: 1, rejection };
    let replies = || settling(JobOutcome::Reply, Some(run()));
    check([
        row(replies(), [CONFIRMED], "reply, ack", End::Replied),
        row(
            replies(),
            [unroutable(), CONFIRMED, CONFIRMED],
            "reply, dead replies, dead letter unroutable at 2, ack",
            End::DeadLettered(Reason::Unroutable),
        ),
        row(
            replies(),
            [PublicationOutcome::TooLarge, PublicationOutcome::TooLarge, CONFIRMED, CONFIRMED],
            "reply, dead replies, dead letter too-large at 2, notice, ack",
            End::DeadLettered(Reason::TooLarge),
        ),
        row(
            replies(),
            [unroutable(), unroutable()],
            "reply, dead replies, session unusable",
            End::DeadLettered(Reason::Unroutable),
        ),
        // Without the replies, the dead letter would say that they are beside it.
        row(
            replies(),
            [unroutable(), refused(), CONFIRMED],
            "reply, dead replies, requeue Later(30000), ack",
            End::Requeued(Cause::DeadQueueFull),
        ),
        row(
            replies(),
            [cut, CONFIRMED, unroutable()],
            "reply, dead letter too-large at 2, notice, ack",
            End::DeadLettered(Reason::TooLarge),
        ),
    ]);
}

#[test]
fn every_row_of_requeues() {
    let job = || settling(requeue(None), None);
    let with_replies = || settling(requeue(None), Some(run()));
    let requeued = End::Requeued(Cause::Smaller);
    check([
        row(job(), [CONFIRMED], "requeue Now, ack", requeued),
        row(
            with_replies(),
            [CONFIRMED, refused(), CONFIRMED],
            "reply, requeue Now, requeue Later(1000), ack",
            requeued,
        ),
        row(
            with_replies(),
            [refused(), CONFIRMED, CONFIRMED],
            "reply, dead replies, dead letter unroutable at 2, ack",
            End::DeadLettered(Reason::Unroutable),
        ),
        row(job(), [unroutable()], "requeue Now, session unusable", requeued),
        undeclared(row(job(), [unroutable()], "requeue Now, give back", End::GivenBack)),
        row(job(), [refused(), unroutable()], "requeue Now, requeue Later(1000), session unusable", requeued),
        row(job(), [refused(), refused()], "requeue Now, requeue Later(1000), give back", End::GivenBack),
        undeclared(row(
            job(),
            [refused(), unroutable()],
            "requeue Now, requeue Later(1000), give back",
            End::GivenBack,
        )),
        row(
            job(),
            [PublicationOutcome::TooLarge, CONFIRMED, CONFIRMED],
            "requeue Now, dead letter too-large at 5, notice, ack",
            End::DeadLettered(Reason::TooLarge),
        ),
    ]);
}

#[test]
fn every_row_of_jobs_for_other_workers() {
    let job = |waits| settling(for_others(waits), None);
    check([
        row(
            job(0),
            [unroutable(), CONFIRMED, CONFIRMED],
            "requeue Now, dead letter out-of-memory at 5, notice, ack",
            End::DeadLettered(Reason::OutOfMemory),
        ),
        row(
            job(1),
            [refused(), CONFIRMED],
            "requeue Now, requeue Later(5000), ack",
            End::Requeued(Cause::TargetQueueFull),
        ),
        row(
            job(WAITS_MAX),
            [refused(), CONFIRMED, CONFIRMED],
            "requeue Now, dead letter unroutable at 5, notice, ack",
            End::DeadLettered(Reason::Unroutable),
        ),
        row(
            job(0),
            [PublicationOutcome::TooLarge, CONFIRMED, CONFIRMED],
            "requeue Now, dead letter too-large at 5, notice, ack",
            End::DeadLettered(Reason::TooLarge),
        ),
    ]);
}

#[test]
fn every_row_of_dead_letters() {
    let job = || settling(dead_letter(), None);
    let with_replies = || settling(dead_letter(), Some(run()));
    let dead_lettered = End::DeadLettered(Reason::EngineFailed);
    let rejection = Rejection::new(Reason::InvalidInput, "no headers");
    let unread = JobOutcome::DeadLetter { headers: None, rejection };
    check([
        row(
            with_replies(),
            [CONFIRMED, CONFIRMED, CONFIRMED],
            "reply, dead letter engine-failed at 5, notice, ack",
            dead_lettered,
        ),
        row(
            with_replies(),
            [unroutable(), CONFIRMED, CONFIRMED, CONFIRMED],
            "reply, dead replies, dead letter engine-failed at 2, notice, ack",
            dead_lettered,
        ),
        row(
            settling(unread, Some(run())),
            [unroutable(), CONFIRMED, CONFIRMED, CONFIRMED],
            "reply, dead replies, dead letter invalid-input at 0, notice, ack",
            End::DeadLettered(Reason::InvalidInput),
        ),
        row(
            job(),
            [PublicationOutcome::TooLarge, CONFIRMED],
            "dead letter engine-failed at 5, notice, reject",
            End::Rejected(Reason::EngineFailed),
        ),
        undeclared(row(
            job(),
            [PublicationOutcome::TooLarge],
            "dead letter engine-failed at 5, give back",
            End::GivenBack,
        )),
        row(
            job(),
            [refused(), CONFIRMED],
            "dead letter engine-failed at 5, requeue Later(30000), ack",
            End::Requeued(Cause::DeadQueueFull),
        ),
        row(
            job(),
            [refused(), refused()],
            "dead letter engine-failed at 5, requeue Later(30000), give back",
            End::GivenBack,
        ),
        row(job(), [unroutable()], "dead letter engine-failed at 5, session unusable", dead_lettered),
    ]);
}

/// It is decided about again when it comes back, and its caller gets no item twice.
#[test]
fn a_job_whose_dead_letter_is_refused_waits_as_it_was_delivered_after_the_items_that_were_answered() {
    let crashed = JobHeaders { crashes: 2, items_done: 4, attempt: 1, ..JobHeaders::default() };
    let outcome = JobOutcome::dead_letter(crashed, Rejection::new(Reason::Crashed, "five crashes"));
    let mut settling = settling(outcome, None);
    settling.received.set_crashes(5);
    settling.begin();
    let step = settling.published(refused(), policy(true));
    let Step::Publish(Publication::Requeue { headers, .. }) = step else { panic!("{step:?}") };
    // Not the two with which a retry by an operator runs in the quarantine.
    assert_eq!(*headers, JobHeaders { crashes: 5, items_done: 4, ..JobHeaders::default() });
}

#[test]
fn a_refused_publication_is_offered_again() {
    let mut settling = settling(JobOutcome::Reply, Some(run()));
    settling.begin();
    assert_eq!((settling.count_refusal(), settling.reader()), (1, Reader::Caller));
    let may_retry = PublishPolicy { may_retry: true, declares: true };
    assert_eq!(word(&settling.published(refused(), may_retry)), "retry");
    assert_eq!(word(&settling.again()), "reply again");
    assert_eq!(settling.count_refusal(), 2);
    assert_eq!(word(&settling.published(CONFIRMED, policy(true))), "ack");
}

/// A retry of the dead letter continues after the confirmed replies. The replies beside the dead letter are exactly the missing ones.
#[test]
fn replies_that_were_confirmed_before_a_refused_one_count_as_answered() {
    let outcomes =
        [(JobOutcome::Reply, "unroutable"), (requeue(None), "unroutable"), (dead_letter(), "engine-failed")];
    for (outcome, reason) in outcomes {
        let mut settling = settling(outcome, Some(run()));
        settling.begin();
        settling.replies_taken(4);
        assert_eq!(word(&settling.published(refused(), policy(true))), "dead replies");
        let letter = word(&settling.published(CONFIRMED, policy(true)));
        assert_eq!(letter, format!("dead letter {reason} at 4"));
    }
}

#[test]
fn a_run_of_replies_only_gets_shorter() {
    let mut run = run();
    for (taken, left) in [(0, (2, 3)), (4, (4, 1)), (3, (4, 1)), (99, (5, 0))] {
        run.skip_to(taken);
        assert_eq!((run.offset, run.items), left);
    }
}

fn outcome() -> impl Strategy<Value = PublicationOutcome> {
    prop_oneof![
        Just(CONFIRMED),
        Just(unroutable()),
        Just(refused()),
        Just(PublicationOutcome::TooLarge),
        Just(PublicationOutcome::Cut { confirmed: 1, rejection: Rejection::new(Reason::EngineFailed, "x") }),
    ]
}

proptest! {
    /// Whatever the broker answers, a job ends after a few publications, and it is acknowledged only after a confirm of its last
    /// reply, its next attempt, or its dead letter.
    #[test]
    fn nothing_is_acknowledged_without_a_confirm(
        outcomes in prop::collection::vec(outcome(), 8),
        kind in 0u8..4,
        has_run in any::<bool>(),
        declares in any::<bool>(),
    ) {
        let plan = match kind {
            0 => JobOutcome::Reply,
            1 => requeue(None),
            2 => for_others(0),
            _ => dead_letter(),
        };
        let has_run = has_run || kind == 0;
        let mut settling = settling(plan, has_run.then(run));
        let mut step = settling.begin();
        let mut confirmed: Vec<String> = Vec::new();
        for outcome in outcomes {
            let Step::Publish(publication) = &step else { break };
            if matches!(outcome, PublicationOutcome::Confirmed { .. }) {
                confirmed.push(word(&Step::Publish(publication.clone())));
            }
            step = settling.published(outcome, policy(declares));
        }
        match &step {
            Step::Ack(_) => {
                let kept = |what: &str| confirmed.iter().any(|word| word.starts_with(what));
                prop_assert!(match settling.end {
                    End::Replied => kept("reply"),
                    End::Requeued(_) => kept("requeue"),
                    End::DeadLettered(_) => kept("dead letter"),
                    _ => false,
                }, "{:?} after {confirmed:?}", settling.end);
            }
            Step::GiveBack => prop_assert_eq!(settling.end, End::GivenBack),
            Step::Reject => prop_assert!(declares && matches!(settling.end, End::Rejected(_))),
            Step::SessionUnusable(_) => prop_assert!(declares),
            Step::Publish(_) | Step::Retry => prop_assert!(false, "no end: {step:?}"),
        }
    }
}
