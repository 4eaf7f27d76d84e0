//! Tests of isolation: what becomes of the jobs that are held, and how long other callers wait.

use std::time::Duration;

use vramq_schemas::{JobHeaders, Reason};

use crate::action::{Action, PassOrder, Publication, Route};
use crate::event::{Event, PassResult, PublicationOutcome, QueueCount, QueueCounts, SessionFacts, Source};
use crate::handlers::test_worker::{CHANNEL, MODEL, Worker, consumers, requeued};
use crate::ids::{JobKey, StoreIndex};

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

impl Worker {
    /// The broker counts so many quarantined jobs, and one consumer of the model's jobs.
    fn counts(&mut self, quarantined: u32) -> Vec<Action> {
        let counts = QueueCounts {
            jobs: vec![QueueCount { waiting: 0, consumers: 1 }],
            quarantined,
            ..QueueCounts::default()
        };
        self.apply(Event::QueuesCounted { model: MODEL, counts })
    }

    /// A quarantined job waits, so the worker stops its consumers. The broker confirms that.
    fn isolates(&mut self) -> Vec<Action> {
        let stopping = self.counts(1);
        let stops =
            |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::StopConsumer { .. }));
        assert!(stops(&stopping), "{stopping:?}");
        let (mut all, mut last) = (Vec::new(), stopping);
        while stops(&last) {
            let next = self.consumers_end(&last);
            all.append(&mut std::mem::replace(&mut last, next));
        }
        all.append(&mut last);
        all
    }

    fn second(&mut self) -> Vec<Action> {
        self.now += Duration::from_secs(1);
        self.quiet_tick()
    }
}

impl Worker {
    /// All these passes end, and the broker confirms what is published. Returns how many items of the first job they had, and the requeued
    /// jobs.
    fn end_all(&mut self, passes: &[PassOrder]) -> (usize, Vec<(JobKey, JobHeaders, Route)>) {
        let (mut done, mut back, mut actions) = (0, Vec::new(), Vec::new());
        for pass in passes {
            done += pass.items.iter().filter(|(job, _)| *job == JobKey(1)).count();
            actions.extend(self.ends(pass, PassResult::Done, vec![Some(10); pass.items.len()]));
        }
        while let Some(action) = actions.pop() {
            if let Action::Publish { job, publication: Publication::Reply(_) } = action {
                actions.extend(self.apply(Event::Published { job, outcome: CONFIRMED }));
            } else {
                back.extend(requeued(&[action]));
            }
        }
        (done, back)
    }
}

/// A worker that takes quarantined jobs, while a pass of a lost session still holds the device's memory.
fn isolated_without_room() -> Worker {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders { exclusive: true, ..JobHeaders::default() });
    worker.pass();
    worker.apply(Event::SessionClosed);
    worker.apply(Event::SessionOpened(SessionFacts { declares: true, missing: Vec::new() }));
    worker.now += Duration::from_secs(10);
    assert!(takes_quarantined(&worker.isolates()));
    worker
}

fn requeued_jobs(actions: &[Action]) -> Vec<JobKey> {
    requeued(actions).into_iter().map(|(job, ..)| job).collect()
}

fn takes_quarantined(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::TakeQuarantined { .. }))
}

#[test]
fn a_quarantined_job_waits_for_no_large_job() {
    let mut worker = Worker::on_device();
    worker.arrives(1, worker.source(), JobHeaders::default());
    // The job fills the credit, so the newest consumer is stopped. The broker confirms its end.
    let actions = worker.decoded(1, 31);
    worker.consumers_end(&actions);
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    // The job is in passes, which end first. Then its finished items are published, and the rest is requeued.
    assert!(requeued(&worker.isolates()).is_empty());
    let (done, back) = worker.end_all(&passes);
    let [(JobKey(1), headers, Route::Now)] = &back[..] else { panic!("{back:?}") };
    assert_eq!((headers.items_done as usize, headers.attempt, headers.crashes), (done, 0, 0));
    assert!(done > 0 && done < 31);
}

#[test]
fn jobs_left_at_half_time_are_requeued_and_the_quarantined_job_runs() {
    let mut worker = Worker::new();
    // The jobs cannot share passes, and the program has three processes.
    let alone = JobHeaders { batch_hint: Some(1), ..JobHeaders::default() };
    for key in 1..=5 {
        worker.job(key, 1, worker.source(), alone.clone());
    }
    let passes = worker.passes();
    assert_eq!(passes.len(), 3);
    worker.isolates();
    for _ in 0..4 {
        assert!(requeued(&worker.second()).is_empty(), "they may be finished in time");
    }
    assert_eq!(requeued_jobs(&worker.second()), [JobKey(4), JobKey(5)]);
}

#[test]
fn other_jobs_are_taken_again_after_ten_seconds_although_a_pass_goes_on() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.pass();
    worker.isolates();
    let started: Vec<usize> = (0..10).map(|_| consumers(&worker.second()).len()).collect();
    assert!(started[..9].iter().all(|count| *count == 0) && started[9] > 0, "{started:?}");
}

#[test]
fn a_worker_whose_quarantined_job_others_took_goes_on_at_once() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.pass();
    worker.isolates();
    worker.second();
    assert!(consumers(&worker.counts(1)).is_empty());
    worker.second();
    assert!(!consumers(&worker.counts(0)).is_empty());
}

/// The broker was asked for a quarantined job, and is slow: the job must not come beside others.
#[test]
fn other_jobs_are_not_taken_while_a_quarantined_job_may_still_come() {
    let mut worker = Worker::new();
    assert!(takes_quarantined(&worker.isolates()));
    let started: usize = (0..30).map(|_| consumers(&worker.second()).len()).sum();
    assert_eq!(started, 0);
    assert!(!consumers(&worker.apply(Event::QuarantineEmpty)).is_empty());
}

/// A quarantined job of many passes runs until its time is over. Then its finished items are published and the rest goes back to the
/// quarantine.
#[test]
fn a_long_quarantined_job_does_not_keep_the_worker_from_others() {
    let mut worker = Worker::new();
    assert!(takes_quarantined(&worker.isolates()));
    worker.job(1, 100, Source::Quarantine, JobHeaders { crashes: 2, ..JobHeaders::default() });
    let passes = worker.passes();
    for _ in 0..10 {
        assert!(requeued(&worker.second()).is_empty());
    }
    let (done, back) = worker.end_all(&passes);
    let [(JobKey(1), headers, Route::Quarantine)] = &back[..] else { panic!("{back:?}") };
    assert_eq!((headers.items_done as usize, headers.crashes, headers.attempt), (done, 2, 0));
    assert!(done > 0 && done < 100);
}

#[test]
fn a_quarantined_job_that_cannot_start_holds_up_others_for_a_minute_only() {
    let mut worker = isolated_without_room();
    worker.job(2, 1, Source::Quarantine, JobHeaders { crashes: 2, ..JobHeaders::default() });
    assert!(worker.passes().is_empty());
    for second in 1..60 {
        assert!(requeued(&worker.second()).is_empty(), "{second}");
    }
    let back = requeued(&worker.second());
    let [(JobKey(2), headers, Route::Later(_))] = &back[..] else { panic!("{back:?}") };
    assert_eq!((headers.crashes, headers.attempt, headers.store_waits), (2, 0, 1));
}

/// Otherwise each of its turns would stop a worker for a minute, for ever.
#[test]
fn a_quarantined_job_that_can_never_start_is_dead_lettered_after_64_waits() {
    for (waits, ends) in [(62, false), (63, false), (64, true)] {
        let mut worker = isolated_without_room();
        let headers = JobHeaders { crashes: 2, store_waits: waits, ..JobHeaders::default() };
        worker.job(2, 1, Source::Quarantine, headers);
        worker.now += Duration::from_secs(59);
        let actions = worker.second();
        let error = actions.iter().find_map(|action| match action {
            Action::Publish { publication: Publication::DeadLetter { rejection, .. }, .. } => {
                Some((rejection.reason, rejection.error.as_str()))
            }
            _ => None,
        });
        assert_eq!((requeued(&actions).is_empty(), error.is_some()), (ends, ends), "{actions:?}");
        let says_why = |(reason, error): (Reason, &str)| {
            reason == Reason::OutOfMemory && error.contains("no room") && error.contains("64 times")
        };
        assert!(error.is_none_or(says_why), "{error:?}");
    }
}

/// Its inputs take minutes. Their fetch has a limit of its own, and the job its minute after that.
#[test]
fn a_quarantined_job_waits_for_its_inputs() {
    let mut worker = Worker::new();
    assert!(takes_quarantined(&worker.isolates()));
    let headers = JobHeaders { crashes: 2, ..JobHeaders::default() };
    worker.arrives(1, Source::Quarantine, headers);
    worker.apply(Event::Referring { job: JobKey(1), stores: vec![StoreIndex(0)] });
    for second in 1..300 {
        assert!(requeued(&worker.second()).is_empty(), "{second}");
    }
    worker.apply(Event::Fetched { job: JobKey(1), result: Ok(()) });
    worker.decoded(1, 1);
    assert!(requeued(&worker.second()).is_empty());
    assert_eq!(worker.pass().items.len(), 1);
}

/// The job was being read when the isolation began. Next time its fetch has a minute.
#[test]
fn an_isolation_that_interrupted_a_fetch_is_followed_by_the_next_after_a_minute() {
    let mut worker = Worker::new();
    worker.arrives(1, worker.source(), JobHeaders::default());
    let stopping = worker.counts(1);
    let actions = worker.apply(Event::Referring { job: JobKey(1), stores: vec![StoreIndex(0)] });
    assert!(matches!(actions[..], [Action::Fetch { .. }]), "{actions:?}");
    assert_eq!(requeued_jobs(&worker.consumers_end(&stopping)), [JobKey(1)]);
    worker.apply(Event::Published { job: JobKey(1), outcome: CONFIRMED });
    worker.apply(Event::Idle);
    let acked = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    assert!(takes_quarantined(&acked), "{acked:?}");
    worker.apply(Event::QuarantineEmpty);
    let isolates =
        |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::StopConsumer { .. }));
    worker.now += Duration::from_secs(59);
    assert!(!isolates(&worker.counts(1)));
    worker.now += Duration::from_secs(1);
    assert!(isolates(&worker.counts(1)));
}

#[test]
fn an_isolation_that_interrupted_no_fetches_may_soon_follow_another() {
    let mut worker = Worker::new();
    assert!(takes_quarantined(&worker.isolates()));
    worker.apply(Event::QuarantineEmpty);
    worker.second();
    assert!(takes_quarantined(&worker.isolates()));
}
