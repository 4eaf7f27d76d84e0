//! Tests of inputs by reference: which are fetched, in which order jobs continue, and how often a failed fetch is tried again.

use std::time::Duration;

use vramq_schemas::withdrawal::Digest;
use vramq_schemas::{JobHeaders, Reason};

use super::*;
use crate::action::Publication;
use crate::event::{Event, Source, Withdrawn};
use crate::handlers::test_worker::{Worker, requeued};
use crate::ids::ItemIndex;

const JOB: JobKey = JobKey(1);
const STORE: StoreIndex = StoreIndex(0);

/// A worker with a job whose inputs are being fetched.
fn fetching(headers: JobHeaders) -> Worker {
    let mut worker = Worker::new();
    worker.arrives(JOB.0, worker.source(), headers);
    let actions = worker.apply(Event::Referring { job: JOB, stores: vec![STORE] });
    assert!(matches!(actions[..], [Action::Fetch { job: JOB, .. }]), "{actions:?}");
    worker
}

fn fault(reason: Reason, is_transient: bool) -> Event {
    let rejection = Rejection::new(reason, "why");
    let result = Err(FetchFault { rejection, is_transient, stores: vec![STORE], took: Duration::ZERO });
    Event::Fetched { job: JOB, result }
}

fn dead_letter(actions: &[Action]) -> Option<(JobHeaders, Rejection)> {
    actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
            Some(((**headers.as_ref()?).clone(), (**rejection).clone()))
        }
        _ => None,
    })
}

#[test]
fn a_job_is_read_again_when_its_inputs_are_there() {
    let mut worker = fetching(JobHeaders::default());
    let actions = worker.apply(Event::Fetched { job: JOB, result: Ok(()) });
    assert!(matches!(actions[..], [Action::Decode { job: JOB, .. }]), "{actions:?}");
    worker.decoded(JOB.0, 2);
    assert_eq!(worker.pass().items, [(JOB, ItemIndex(0)), (JOB, ItemIndex(1))]);
}

#[test]
fn a_store_that_does_not_work_makes_the_job_wait_and_not_for_ever() {
    let mut headers = JobHeaders { items_done: 1, ..JobHeaders::default() };
    for waits in 1..=STORE_WAITS_MAX {
        let actions = fetching(headers).apply(fault(Reason::StoreUnavailable, true));
        let (job, next, route) = requeued(&actions).pop().expect("it waits");
        assert!(matches!(route, Route::Later(_)), "{route:?}");
        assert_eq!((job, next.store_waits, next.attempt, next.items_done), (JOB, waits, 0, 1));
        headers = next;
    }
    let actions = fetching(headers).apply(fault(Reason::StoreUnavailable, true));
    let (reached, rejection) = dead_letter(&actions).expect("it is given up");
    assert_eq!((rejection.reason, reached.items_done), (Reason::StoreUnavailable, 1));
    assert_eq!(rejection.error, "why; the job waited for it 64 times");
}

#[test]
fn a_reference_that_leads_nowhere_ends_its_job_at_once() {
    let actions = fetching(JobHeaders::default()).apply(fault(Reason::ReferenceMissing, false));
    let (_, rejection) = dead_letter(&actions).expect("a dead letter");
    assert_eq!((rejection.reason, rejection.error.as_str()), (Reason::ReferenceMissing, "why"));
}

#[test]
fn a_job_that_is_withdrawn_is_not_waited_for() {
    let mut worker = fetching(JobHeaders::default());
    let id = JOB.to_string();
    let digest = Digest::of(&id);
    let actions = worker.apply(Event::Withdrawn(Withdrawn { id, digest }));
    let is_notice = |action: &Action| match action {
        Action::Publish { publication: Publication::FailureNotice(rejection), .. } => {
            rejection.reason == Reason::Withdrawn
        }
        _ => false,
    };
    assert!(actions.iter().any(is_notice), "{actions:?}");
    // Late results of the fetch are ignored.
    assert!(worker.apply(Event::Fetched { job: JOB, result: Ok(()) }).is_empty());
    assert!(worker.apply(fault(Reason::StoreUnavailable, true)).is_empty());
}

#[test]
fn a_drain_waits_for_no_store() {
    let mut worker = fetching(JobHeaders::default());
    let actions = worker.apply(Event::StopRequested { signal: "SIGTERM" });
    // Requeued only after its own consumers have ended. They could receive it again, and that would count as a lost worker.
    assert!(requeued(&actions).is_empty(), "{actions:?}");
    let actions = worker.consumers_end(&actions);
    let (job, next, route) = requeued(&actions).pop().expect("it is requeued");
    assert_eq!((job, route, next), (JOB, Route::Now, JobHeaders::default()));
    // The same for a job that was being read at the stop.
    let mut worker = Worker::new();
    worker.arrives(JOB.0, worker.source(), JobHeaders::default());
    let stopping = worker.apply(Event::StopRequested { signal: "SIGTERM" });
    let actions = worker.apply(Event::Referring { job: JOB, stores: vec![STORE] });
    assert!(actions.is_empty(), "{actions:?}");
    let actions = worker.consumers_end(&stopping);
    assert_eq!(requeued(&actions).len(), 1, "{actions:?}");
}

/// The broker's `consumer_timeout` would end the session over a job that is held for longer.
#[test]
fn a_fetch_may_take_as_long_as_its_job_may_be_held_and_its_callers_other_jobs_then_wait_unfetched() {
    let mut worker = Worker::new();
    let (until, began) = (worker.now + Duration::from_secs(600), worker.now + Duration::from_secs(1));
    worker.arrives(JOB.0, worker.source(), JobHeaders::default());
    worker.now = began;
    let actions = worker.apply(Event::Referring { job: JOB, stores: vec![STORE] });
    assert!(
        matches!(actions[..], [Action::Fetch { job: JOB, until: given }] if given == until),
        "{actions:?}"
    );
    // The store hangs.
    worker.now = until;
    let rejection = Rejection::new(Reason::StoreUnavailable, "not fetched within 599 s");
    let took = until - began;
    let result = Err(FetchFault { rejection, is_transient: true, stores: vec![STORE], took });
    let actions = worker.apply(Event::Fetched { job: JOB, result });
    assert_eq!(requeued(&actions).len(), 1, "{actions:?}");
    worker.arrives(2, worker.source(), JobHeaders::default());
    let actions = worker.apply(Event::Referring { job: JobKey(2), stores: vec![STORE] });
    let (job, next, _) = requeued(&actions).pop().expect("it waits unfetched");
    assert_eq!((job, next.store_waits), (JobKey(2), 1));
}

/// As when the limit becomes shorter meanwhile.
#[test]
fn a_fetch_that_does_not_end_in_time_is_ended() {
    let mut worker = fetching(JobHeaders::default());
    worker.now += Duration::from_secs(602);
    assert!(requeued(&worker.quiet_tick()).is_empty());
    worker.now += Duration::from_secs(1);
    let (job, next, route) = requeued(&worker.quiet_tick()).pop().expect("it waits");
    assert!(matches!(route, Route::Later(_)), "{route:?}");
    assert_eq!((job, next.store_waits, next.attempt), (JOB, 1, 0));
    assert!(worker.apply(Event::Fetched { job: JOB, result: Ok(()) }).is_empty(), "it comes too late");

    // With the last of its waits it ends, and says for how long the fetch was waited for.
    let headers = JobHeaders { store_waits: STORE_WAITS_MAX, ..JobHeaders::default() };
    let mut worker = fetching(headers);
    worker.now += Duration::from_secs(603);
    let actions = worker.quiet_tick();
    let (_, rejection) = dead_letter(&actions).expect("it is given up");
    assert_eq!(rejection.reason, Reason::StoreUnavailable);
    assert!(rejection.error.contains("not fetched within 600 s"), "{rejection:?}");
}

#[test]
fn a_drain_requeues_a_job_with_unfetched_inputs_to_the_queue_that_it_came_from() {
    for (source, back_to) in
        [(Worker::new().source_of_large(), Route::Bulk), (Source::Quarantine, Route::Quarantine)]
    {
        let mut worker = Worker::new();
        worker.arrives(JOB.0, source, JobHeaders::default());
        worker.apply(Event::Referring { job: JOB, stores: vec![STORE] });
        let stopping = worker.apply(Event::StopRequested { signal: "SIGTERM" });
        let actions = worker.consumers_end(&stopping);
        let (job, _, route) = requeued(&actions).pop().expect("it is requeued");
        assert_eq!((job, route), (JOB, back_to));
    }
}

#[test]
fn a_job_whose_time_is_over_fetches_nothing() {
    let mut worker = Worker::new();
    worker.expires_at_ms = Some(60_000);
    worker.arrives(JOB.0, worker.source(), JobHeaders::default());
    worker.now += Duration::from_secs(61);
    let actions = worker.apply(Event::Referring { job: JOB, stores: vec![STORE] });
    assert_eq!(dead_letter(&actions).map(|(_, rejection)| rejection.reason), Some(Reason::Expired));
}

/// Reading for a job of caller `a` failed after half a minute. The worker has 64 slots.
#[test]
fn jobs_for_a_store_that_does_not_answer_have_an_eighth_of_the_slots() {
    let mut worker = Worker::new();
    let refers = |worker: &mut Worker, key: u64, caller: &str, stores: &[StoreIndex]| {
        worker.caller = Some(caller.to_owned());
        worker.arrives(key, worker.source(), JobHeaders::default());
        worker.apply(Event::Referring { job: JobKey(key), stores: stores.to_vec() })
    };
    let fetches = |actions: &[Action]| matches!(actions, [Action::Fetch { .. }]);
    let waiting =
        |actions: &[Action]| requeued(actions).into_iter().map(|(job, ..)| job.0).collect::<Vec<_>>();
    let other = StoreIndex(1);
    assert!((1..=12).all(|key| fetches(&refers(&mut worker, key, "a", &[STORE]))));
    assert!(
        fetches(&refers(&mut worker, 13, "b", &[STORE])) && fetches(&refers(&mut worker, 14, "a", &[other]))
    );
    worker.now += Duration::from_secs(30);
    let rejection = Rejection::new(Reason::StoreUnavailable, "no answer within 30 s");
    let took = Duration::from_secs(30);
    let result = Err(FetchFault { rejection, is_transient: true, stores: vec![STORE], took });
    let actions = worker.apply(Event::Fetched { job: JobKey(1), result });
    // Of the eleven that still fetch, the last three give their slots up.
    assert_eq!(waiting(&actions), [10, 11, 12, 1]);
    assert!(requeued(&actions).iter().all(|(_, headers, route)| {
        matches!(route, Route::Later(_)) && headers.store_waits == 1 && headers.attempt == 0
    }));
    // Jobs for other stores and of other callers do not wait.
    assert_eq!(waiting(&refers(&mut worker, 20, "a", &[other, STORE])), [20]);
    assert!(
        fetches(&refers(&mut worker, 21, "a", &[other])) && fetches(&refers(&mut worker, 22, "b", &[STORE]))
    );
    // After the pause the others fetch, eight at a time, also when one of them has succeeded.
    worker.now += Duration::from_secs(30);
    assert_eq!(waiting(&refers(&mut worker, 23, "a", &[STORE])), [23], "eight are still under way");
    worker.apply(Event::Fetched { job: JobKey(2), result: Ok(()) });
    assert!(fetches(&refers(&mut worker, 24, "a", &[STORE])));
    assert_eq!(waiting(&refers(&mut worker, 25, "a", &[STORE])), [25]);
    // In the end it is forgotten.
    worker.now += Duration::from_secs(60);
    assert!(fetches(&refers(&mut worker, 26, "a", &[STORE])));
}

#[test]
fn a_job_that_waited_unfetched_too_often_is_a_dead_letter_that_says_so() {
    let mut worker = fetching(JobHeaders::default());
    let rejection = Rejection::new(Reason::StoreUnavailable, "why");
    let took = Duration::from_secs(30);
    let result = Err(FetchFault { rejection, is_transient: true, stores: vec![STORE], took });
    worker.apply(Event::Fetched { job: JOB, result });
    let headers = JobHeaders { store_waits: STORE_WAITS_MAX, ..JobHeaders::default() };
    worker.arrives(2, worker.source(), headers);
    let actions = worker.apply(Event::Referring { job: JobKey(2), stores: vec![STORE] });
    let (_, rejection) = dead_letter(&actions).expect("it is given up");
    assert!(rejection.error.contains("were not fetched"), "{rejection:?}");
}

#[test]
fn other_jobs_are_held_beside_those_that_wait_for_a_store() {
    let mut worker = Worker::new();
    let before = worker.wanted();
    for key in 1..=2 {
        worker.arrives(key, worker.source(), JobHeaders::default());
        worker.apply(Event::Referring { job: JobKey(key), stores: vec![STORE] });
    }
    let after = |worker: &mut Worker, waited: Duration| {
        worker.now += waited;
        worker.quiet_tick();
        (worker.wanted().jobs, worker.wanted().beside)
    };
    assert_eq!(
        after(&mut worker, Duration::from_millis(100)),
        (before.jobs, 0),
        "a quick fetch changes nothing"
    );
    assert_eq!(after(&mut worker, Duration::from_secs(1)), (before.jobs, 2));
    worker.apply(Event::Fetched { job: JobKey(1), result: Ok(()) });
    assert_eq!(after(&mut worker, Duration::from_secs(1)), (before.jobs, 1));
}
