//! Tests of large jobs that are requeued to make room for others: when, how much of them, and at whose expense.

use std::time::Duration;

use vramq_schemas::JobHeaders;

use super::super::test_worker::{BULK_JOBS_MAX, LARGE_TURN, MODEL, Worker, replied, requeued, started};
use crate::action::{Action, JobQueue, Route};
use crate::event::{DecodedJob, Delivery, Event, PassResult, PublicationOutcome, QueueCount, QueueCounts};
use crate::ids::JobKey;
use crate::observation::{Cause, End, Observation};

/// Passes of eight items that a large job needs.
const PASSES: u32 = 40;
const LARGE: u32 = 8 * PASSES;

/// Passes until a large job has had its turn: each takes a second.
const TURN: u64 = LARGE_TURN.as_secs();

/// The bytes of a large job, and the bytes of other jobs that must be consumed before it may be requeued (ten times its own in all).
const BYTES: usize = 100;
const BESIDE: usize = 9 * BYTES;

impl Worker {
    /// A large job arrives from the queue of large jobs and is read; `LARGE` items of it are left.
    fn large_arrives(&mut self, key: u64, headers: JobHeaders) {
        let items_total = headers.items_done + LARGE;
        let delivery = Delivery { bytes: BYTES, ..Self::delivery(key, self.source_of_large(), headers) };
        self.apply(Event::Delivered(Box::new(delivery)));
        let result = Ok(DecodedJob { items_total, costs: vec![1; LARGE as usize] });
        self.apply(Event::Decoded { job: JobKey(key), result });
    }

    /// The worker consumes so many bytes of jobs that end at once.
    fn consumes(&mut self, bytes: usize) {
        let delivery = Delivery { bytes, ..Self::delivery(99, self.source(), JobHeaders::default()) };
        self.apply(Event::Delivered(Box::new(delivery)));
        // It has no items, so it ends at once.
        self.decoded(99, 0);
        self.apply(confirmed(99));
    }

    /// So many passes run, one after the other.
    fn runs(&mut self, passes: u64) {
        for _ in 0..passes {
            let order = self.pass();
            let outputs = vec![Some(1); order.items.len()];
            self.ends(&order, PassResult::Done, outputs);
        }
    }

    /// So many large jobs wait.
    fn large_wait(&mut self, waiting: u32) -> Vec<Action> {
        self.large_wait_of(waiting, 1)
    }

    /// So many large jobs wait, and so many consumers of all workers take them.
    fn large_wait_of(&mut self, waiting: u32, consumers: u32) -> Vec<Action> {
        let bulk = QueueCount { waiting, consumers };
        let counts = QueueCounts { jobs: vec![QueueCount::default()], bulk, quarantined: 0 };
        self.apply(Event::QueuesCounted { model: MODEL, counts })
    }

    /// How the jobs end whose acks are sent now.
    fn ends_of_acked(&mut self) -> Vec<End> {
        let acks = self.apply(Event::Idle).into_iter().filter_map(|action| match action {
            Action::Ack { channel, frames } => {
                Some(Event::AcksSent { channel, sent: vec![true; frames.len()] })
            }
            _ => None,
        });
        let acks: Vec<_> = acks.collect();
        let settled = acks.into_iter().flat_map(|sent| self.apply(sent)).filter_map(|action| match action {
            Action::Observe(Observation::Settled(settled)) => Some(settled.end),
            _ => None,
        });
        settled.collect()
    }
}

fn confirmed(job: u64) -> Event {
    Event::Published { job: JobKey(job), outcome: PublicationOutcome::Confirmed { messages: 1 } }
}

/// A worker that has run a large job for so many passes and may requeue it.
fn running_for(passes: u64) -> Worker {
    let mut worker = Worker::one_by_one();
    worker.consumes(BESIDE);
    assert_eq!(worker.ends_of_acked(), [End::Replied]);
    worker.large_arrives(1, JobHeaders::default());
    worker.runs(passes);
    worker
}

#[test]
fn a_large_job_that_had_its_turn_goes_back_while_others_wait() {
    let mut worker = running_for(TURN);
    let pass = worker.pass();
    let waiting = worker.large_wait(1);
    assert!(requeued(&waiting).is_empty() && !worker.goes_on(1), "it waits for its pass: {waiting:?}");
    let ended = worker.ends(&pass, PassResult::Done, vec![Some(1); pass.items.len()]);
    // The finished items are published first.
    let done = 8 * (u32::try_from(TURN).unwrap() + 1);
    assert_eq!(replied(&ended), [(JobKey(1), done, false)]);
    let requeue = worker.apply(confirmed(1));
    let [(job, headers, route)] = &requeued(&requeue)[..] else { panic!("{requeue:?}") };
    assert_eq!((*job, route), (JobKey(1), &Route::Bulk));
    let expected = JobHeaders { items_done: done, ..JobHeaders::default() };
    assert_eq!(headers, &expected, "no attempt is charged");
    worker.apply(confirmed(1));
    assert_eq!(worker.ends_of_acked(), [End::Requeued(Cause::Turn)]);
}

#[test]
fn a_large_job_stays_while_none_waits_and_until_it_had_its_turn() {
    let mut worker = running_for(TURN - 1);
    worker.large_wait(5);
    worker.runs(1);
    worker.large_wait(0);
    worker.runs(1);
    assert!(worker.goes_on(1));
    worker.large_wait(1);
    assert!(!worker.goes_on(1), "no further pass of it starts");
}

/// After it was requeued, the rest of a job gets a full turn again.
#[test]
fn the_rest_of_a_job_has_a_turn_again() {
    let mut worker = Worker::one_by_one();
    let before = JobHeaders { items_done: 5_000, ..JobHeaders::default() };
    worker.large_arrives(1, before);
    worker.consumes(BESIDE);
    worker.runs(TURN - 1);
    worker.large_wait(1);
    assert!(worker.goes_on(1));
}

#[test]
fn a_large_job_that_is_nearly_done_is_not_requeued() {
    // Five passes are left, which still make a large job.
    let mut worker = running_for(u64::from(PASSES) - 5);
    worker.large_wait(1);
    assert!(!worker.goes_on(1));
    let mut worker = running_for(u64::from(PASSES) - 4);
    worker.large_wait(1);
    assert!(worker.goes_on(1));
}

#[test]
fn requeuing_costs_a_tenth_of_what_was_consumed() {
    let mut worker = Worker::one_by_one();
    worker.large_arrives(1, JobHeaders::default());
    worker.consumes(BESIDE - 1);
    worker.runs(TURN);
    worker.large_wait(1);
    assert!(worker.goes_on(1));
    worker.consumes(1);
    worker.large_wait(1);
    assert!(!worker.goes_on(1));
}

#[test]
fn jobs_that_are_not_from_the_queue_of_large_jobs_never_make_room() {
    let mut worker = Worker::one_by_one();
    // While the queue of large jobs is full, a large job runs like others.
    worker.large_wait(BULK_JOBS_MAX);
    worker.arrives(1, worker.source(), JobHeaders::default());
    worker.decoded(1, LARGE);
    worker.consumes(10 * BESIDE);
    worker.runs(TURN + 1);
    worker.large_wait(1);
    assert!(worker.goes_on(1));
}

/// Not every worker requeues a job for a single waiting one; but a worker that is the only one able to does so soon.
#[test]
fn not_all_workers_make_room_for_one_job() {
    let mut worker = running_for(TURN);
    let checks = (1..1000).find(|_| {
        worker.large_wait_of(1, 1_000_000);
        !worker.goes_on(1)
    });
    assert!(checks.is_some_and(|checks| (2..60).contains(&checks)), "{checks:?} checks");
    let mut worker = running_for(TURN);
    worker.large_wait_of(1_000_000, 1_000_000);
    assert!(!worker.goes_on(1));
}

#[test]
fn a_second_large_job_is_held_only_while_they_are_short() {
    let mut worker = Worker::one_by_one();
    let started_of_large = |worker: &mut Worker| {
        started(&worker.quiet_tick()).filter(|(queue, _)| *queue == JobQueue::Bulk).count()
    };
    worker.large_arrives(1, JobHeaders::default());
    worker.runs(1);
    assert_eq!(started_of_large(&mut worker), 0, "a job takes 40 s");
    worker.pass_takes = Duration::from_millis(10);
    worker.runs(30);
    assert_eq!(started_of_large(&mut worker), 1, "now it takes less than a second");
}
