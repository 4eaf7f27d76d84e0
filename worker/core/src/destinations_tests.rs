//! Tests of reply queues that are full or silent: how often they are tried, and how many jobs of all of them may run.

use super::*;
use crate::event::Source;
use crate::ids::{ChannelId, ConsumerId, DeliveryTag, Fingerprint, QueueIndex};

const CONFIRM: Duration = Duration::from_secs(30);
const MODEL: ModelIndex = ModelIndex(0);

const SLOTS: u16 = 16;

fn silent() -> PublicationOutcome {
    PublicationOutcome::Unreachable { destination: "silent".to_owned(), why: "did not confirm" }
}

fn refused() -> PublicationOutcome {
    PublicationOutcome::Refused { destination: "full".to_owned() }
}

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

fn delivery(job: u64, queue: &str, caller: &str) -> Delivery {
    Delivery {
        job: JobKey(job),
        model: MODEL,
        source: Source::Jobs(QueueIndex(0), ConsumerId(0)),
        channel: ChannelId { model: MODEL, number: 0 },
        tag: DeliveryTag(job),
        fingerprint: Fingerprint(job),
        redelivered: false,
        delivery_count: None,
        id: None,
        caller: Some(caller.to_owned()),
        withdrawal: None,
        reply_queue: Some(queue.to_owned()),
        trace_id: None,
        bytes: 10,
        headers: None,
        expires_at_ms: None,
        published_ms: None,
    }
}

/// The destinations, and the jobs that run for them.
struct Worker {
    destinations: Destinations,
    now: Instant,
    jobs: Vec<Delivery>,
    last_job: u64,
}

impl Worker {
    fn new() -> Self {
        Self { destinations: Destinations::new(CONFIRM), now: Instant::now(), jobs: Vec::new(), last_job: 0 }
    }

    /// Delivers a job. Returns whether it runs; if not, it is no longer held.
    fn runs(&mut self, queue: &str, caller: &str) -> bool {
        self.last_job += 1;
        let delivery = delivery(self.last_job, queue, caller);
        self.destinations.delivered(&delivery);
        let waits = self.destinations.must_wait(&delivery, SLOTS, self.now);
        if waits {
            self.destinations.released(&delivery);
        } else {
            self.jobs.push(delivery);
        }
        !waits
    }

    fn published(&mut self, queue: &str, outcome: &PublicationOutcome) {
        self.destinations.published(Some(queue), outcome, self.now);
    }

    /// All jobs that have run for the queue are acknowledged.
    fn end(&mut self, queue: &str) {
        let is_ended = |job: &mut Delivery| job.reply_queue.as_deref() == Some(queue);
        self.jobs.extract_if(.., is_ended).for_each(|job| self.destinations.released(&job));
    }

    fn is_silent(&self, queue: &str) -> bool {
        self.destinations.is_silent(queue, self.now)
    }

    /// Of a caller whose reply was refused.
    fn hold_too_many(&self, caller: &str) -> bool {
        let delivery = self.jobs.iter().find(|job| job.caller.as_deref() == Some(caller)).unwrap();
        self.destinations.hold_too_many(delivery, SLOTS, self.now)
    }
}

#[test]
fn a_silent_queue_counts_as_full_until_it_would_be_noticed_again() {
    let mut worker = Worker::new();
    assert!(worker.runs("silent", "a"));
    worker.published("silent", &silent());
    // A caller gets half of the two jobs that may try silent queues.
    worker.now += FULL_FOR;
    assert!(!worker.runs("silent", "a"));
    assert!(worker.runs("silent", "b"), "two may try");
    assert!(!worker.runs("silent", "c"));
    worker.end("silent");
    worker.now += CONFIRM * SILENT_FOR * 2;
    assert!((0..9).all(|_| worker.runs("silent", "a")), "it is forgotten");
}

/// Each try may hold up the replies to other callers.
#[test]
fn a_queue_that_stays_silent_is_tried_less_and_less_often_by_one_job_at_a_time() {
    let mut worker = Worker::new();
    worker.published("silent", &silent());
    // Two jobs tried the queue at once.
    worker.now += CONFIRM;
    worker.published("silent", &silent());
    let noticed = worker.now;
    worker.now += CONFIRM / 2;
    worker.published("silent", &silent());
    worker.now = noticed;
    let mut lasts = CONFIRM * SILENT_FOR;
    for _ in 0..9 {
        let noticed = worker.now;
        worker.now = noticed + lasts - Duration::from_secs(1);
        assert!(!worker.runs("silent", "a") && worker.is_silent("silent"));
        worker.now = noticed + lasts;
        assert!(!worker.is_silent("silent") && worker.runs("silent", "a"), "one tries it");
        assert!(!worker.runs("silent", "b"));
        worker.end("silent");
        worker.now += CONFIRM;
        worker.published("silent", &silent());
        lasts = (lasts * 2).min(SILENT_MAX);
    }
    assert_eq!(lasts, SILENT_MAX, "at least every ten minutes");
    worker.published("silent", &CONFIRMED);
    assert!((0..9).all(|_| worker.runs("silent", "a")), "it confirms again");
}

#[test]
fn a_full_queue_is_tried_less_and_less_often_by_one_job_at_a_time_until_it_takes_a_reply() {
    let mut worker = Worker::new();
    assert!((0..5).all(|_| worker.runs("full", "a")) && worker.runs("other", "a"));
    // Replies in flight together, and those published again, count once.
    (0..9).for_each(|_| worker.published("full", &refused()));
    worker.end("full");
    let mut lasts = FULL_FOR;
    for _ in 0..9 {
        let noticed = worker.now;
        worker.now = noticed + lasts - Duration::from_millis(1);
        assert!(!worker.runs("full", "a") && worker.runs("other", "a"));
        worker.now = noticed + lasts;
        assert!(worker.runs("full", "a"), "one tries it");
        assert!(!worker.runs("full", "b"));
        worker.published("full", &refused());
        worker.end("full");
        lasts = (lasts * 2).min(FULL_FOR_MAX);
    }
    assert_eq!(lasts, FULL_FOR_MAX);
    assert!(!worker.is_silent("full"), "it answers");
    worker.now += lasts;
    assert!(worker.runs("full", "a"));
    worker.published("full", &CONFIRMED);
    assert!((0..9).all(|_| worker.runs("full", "a")), "it has room again");
    worker.end("full");
    worker.end("other");
    assert!(worker.destinations.held.is_empty());
}

/// If each full queue had its own two jobs, twenty of them would take all slots.
#[test]
fn all_full_queues_together_have_a_few_slots_and_a_caller_half_of_them() {
    let mut worker = Worker::new();
    let queues: Vec<_> = (0..20).map(|at| format!("full {at}")).collect();
    queues.iter().for_each(|queue| worker.published(queue, &refused()));
    worker.now += FULL_FOR;
    let of_hostile = queues.iter().filter(|queue| worker.runs(queue, "hostile")).count();
    assert_eq!(of_hostile, 1);
    // Its queue was full once, and takes replies again.
    worker.published("theirs", &refused());
    worker.now += FULL_FOR;
    assert!(worker.runs("theirs", "other"), "another caller's queue is tried");
    assert!(!worker.runs(&queues[5], "third"), "two have run");
    worker.published("theirs", &CONFIRMED);
    assert!((0..9).all(|_| worker.runs("theirs", "other")));
    assert!(worker.runs(&queues[5], "third"));
    let mut other_model = delivery(99, &queues[6], "hostile");
    other_model.model = ModelIndex(1);
    worker.destinations.delivered(&other_model);
    assert!(!worker.destinations.must_wait(&other_model, SLOTS, worker.now), "each model has its own slots");
}

/// Queues that were never tried are not known to be full.
#[test]
fn a_refused_reply_is_not_offered_again_while_such_jobs_have_a_quarter_of_the_slots_and_its_caller_more_than_a_share()
 {
    let mut worker = Worker::new();
    let most = usize::from(SLOTS) / OFFERED_PART;
    let queues: Vec<_> = (0..=most).map(|at| format!("new {at}")).collect();
    assert!(queues.iter().all(|queue| worker.runs(queue, "hostile")));
    assert!((0..9).all(|_| worker.runs("good", "other")));
    for queue in &queues[..most] {
        worker.published(queue, &refused());
        assert!(!worker.hold_too_many("hostile"));
    }
    worker.published(&queues[most], &refused());
    assert!(worker.hold_too_many("hostile"));
    // The other's queue was full for a moment.
    worker.published("good", &refused());
    assert!(worker.hold_too_many("other"), "nine of its jobs are for a full queue");
    worker.end("good");
    assert!((0..most / 2).all(|at| worker.runs(&format!("good {at}"), "other")));
    (0..most / 2).for_each(|at| worker.published(&format!("good {at}"), &refused()));
    assert!(!worker.hold_too_many("other") && worker.hold_too_many("hostile"));
    (0..most).for_each(|at| worker.end(&queues[at]));
    assert!(!worker.hold_too_many("hostile"));
}

/// As many as can have a job each in that quarter, and one whose queue is full for a moment.
#[test]
fn many_callers_with_full_queues_have_a_quarter_of_the_slots_together() {
    let mut worker = Worker::new();
    let most = usize::from(SLOTS) / OFFERED_PART;
    let callers: Vec<_> = (1..most).map(|at| format!("hostile {at}")).collect();
    for caller in &callers {
        for at in 0..3 {
            assert!(worker.runs(&format!("{at} of {caller}"), caller));
        }
    }
    assert!(worker.runs("momentarily", "other"));
    for caller in &callers {
        (0..3).for_each(|at| worker.published(&format!("{at} of {caller}"), &refused()));
    }
    worker.published("momentarily", &refused());
    // Each gives up those that it holds too many.
    for at in 0..3 {
        for caller in &callers {
            assert!(!worker.hold_too_many("other"));
            if worker.hold_too_many(caller) {
                worker.end(&format!("{at} of {caller}"));
            }
        }
    }
    assert_eq!(worker.jobs.len(), most);
}

#[test]
fn of_too_many_queues_the_full_ones_that_were_noticed_first_are_forgotten() {
    let mut worker = Worker::new();
    (0..2).for_each(|_| {
        worker.published("silent", &silent());
        worker.now += CONFIRM;
    });
    for at in 0..FAULTY_MAX {
        worker.published(&format!("full {at}"), &refused());
        worker.now += Duration::from_millis(1);
    }
    assert_eq!(worker.destinations.faulty.len(), FAULTY_MAX);
    assert!(worker.is_silent("silent") && worker.runs("full 0", "a") && !worker.runs("full 1", "a"));
}

#[test]
fn an_eighth_of_the_slots_may_try_queues_that_are_faulty() {
    let mut worker = Worker::new();
    let queues: Vec<_> = (0..9).map(|queue| queue.to_string()).collect();
    queues.iter().for_each(|queue| worker.published(queue, &silent()));
    let mut running = 0;
    for (queue, job) in queues.iter().zip(1..) {
        let delivery = delivery(job, queue, queue);
        worker.destinations.delivered(&delivery);
        if worker.destinations.must_wait(&delivery, 40, worker.now) {
            worker.destinations.released(&delivery);
        } else {
            running += 1;
        }
    }
    assert_eq!(running, 5);
}
