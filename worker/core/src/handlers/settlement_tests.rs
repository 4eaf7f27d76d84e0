//! Tests of parts that are not taken, and of jobs whose replies would be too large.

use std::time::Duration;

use vramq_schemas::{JobHeaders, Reason};

use crate::action::{Action, Publication, Route};
use crate::device::{OutOfMemory, PassError};
use crate::event::{Delivery, Event, PassResult, PublicationOutcome};
use crate::handlers::test_worker::{REPLY_MAX, Worker, replied, requeued};
use crate::ids::{ItemIndex, JobKey};
use crate::observation::Observation;
use crate::rejection::Rejection;

const JOB: JobKey = JobKey(1);

/// Bytes of more than one part.
const LARGE: usize = 2 * 1024 * 1024;

/// The first pass takes half a second, the next one minutes.
#[test]
fn a_finished_item_is_published_after_a_second_although_the_next_pass_goes_on() {
    let mut worker = Worker::one_by_one();
    worker.job(JOB.0, 16, worker.source(), JobHeaders::default());
    let first = worker.pass();
    worker.now += Duration::from_millis(500);
    let actions = worker.ends(&first, PassResult::Done, vec![Some(10); 8]);
    assert!(replied(&actions).is_empty(), "{actions:?}");
    let second = worker.pass();
    worker.now += Duration::from_millis(400);
    assert!(replied(&worker.quiet_tick()).is_empty(), "a second has not passed");
    worker.now += Duration::from_millis(100);
    assert_eq!(replied(&worker.quiet_tick()), [(JOB, 8, false)]);
    worker.now += Duration::from_secs(5);
    assert!(replied(&worker.quiet_tick()).is_empty(), "the part is in flight, and nothing new is finished");
    let outcome = PublicationOutcome::Confirmed { messages: 1 };
    assert!(replied(&worker.apply(Event::Published { job: JOB, outcome })).is_empty());
    let actions = worker.ends(&second, PassResult::Done, vec![Some(10); 8]);
    assert_eq!(replied(&actions), [(JOB, 8, true)]);
}

/// The queue was deleted after it had taken some replies of the part.
#[test]
fn a_dead_letter_counts_the_items_of_a_part_that_the_caller_has() {
    let mut worker = Worker::new();
    worker.job(JOB.0, 16, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(LARGE); 8]);
    assert_eq!(replied(&actions), [(JOB, 8, false)]);
    assert!(worker.apply(Event::RepliesTaken { job: JOB, up_to: 5 }).is_empty());
    let outcome = PublicationOutcome::Unroutable { destination: "replies".to_owned() };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    let is_beside =
        |action: &Action| matches!(action, Action::Publish { publication: Publication::DeadReplies(_), .. });
    assert!(actions.iter().any(is_beside), "{actions:?}");
    let outcome = PublicationOutcome::Confirmed { messages: 1 };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    assert_eq!(dead_letter(&actions), Some((5, Reason::Unroutable)), "{actions:?}");
}

/// An output fits no reply. The replies before it reached the caller, and were meant to end with the last item.
#[test]
fn a_dead_letter_counts_the_items_before_an_output_that_cannot_be_encoded() {
    let mut worker = Worker::new();
    worker.job(JOB.0, 3, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(1); 3]);
    assert_eq!(replied(&actions), [(JOB, 3, true)]);
    assert!(worker.apply(Event::RepliesTaken { job: JOB, up_to: 2 }).is_empty());
    let rejection = Rejection::new(Reason::TooLarge, "17 MiB");
    let outcome = PublicationOutcome::Cut { confirmed: 1, rejection };
    let actions = worker.apply(Event::Published { job: JOB, outcome });
    let counts_part =
        |action: &Action| matches!(action, Action::Observe(Observation::Parts { count: 1, .. }));
    assert!(actions.iter().any(counts_part), "{actions:?}");
    assert_eq!(dead_letter(&actions), Some((2, Reason::TooLarge)), "{actions:?}");
}

/// A program's outputs are larger than all replies to a job may be together.
#[test]
fn a_job_ends_before_the_output_that_its_replies_have_no_room_for() {
    let mut worker = Worker::one_by_one();
    worker.job(JOB.0, 4, worker.source(), JobHeaders::default());
    worker.job(2, 4, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let half = usize::try_from(REPLY_MAX / 2).unwrap();
    // The first two outputs of the job together reach the limit exactly. The third has one byte, the last none; the other job's are small.
    let output = |(job, index): &(JobKey, ItemIndex)| match (*job, index.0) {
        (JOB, 0 | 1) => half,
        (JOB, 2) => 1,
        (JOB, _) => 0,
        _ => 10,
    };
    let outputs = order.items.iter().map(|item| Some(output(item))).collect();
    let actions = worker.ends(&order, PassResult::Done, outputs);
    let mut replied = replied(&actions);
    replied.sort_unstable();
    assert_eq!(replied, [(JOB, 2, false), (JobKey(2), 4, true)], "{actions:?}");
    let actions =
        worker.apply(Event::Published { job: JOB, outcome: PublicationOutcome::Confirmed { messages: 1 } });
    assert_eq!(dead_letter(&actions), Some((2, Reason::TooLarge)), "{actions:?}");
}

/// A part that was already published counts towards the limit.
#[test]
fn parts_that_were_taken_count_in_what_all_replies_may_take() {
    let mut worker = Worker::one_by_one();
    worker.job(JOB.0, 16, worker.source(), JobHeaders::default());
    let part = usize::try_from(REPLY_MAX / 8).unwrap();
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(part); 8]);
    assert_eq!(replied(&actions), [(JOB, 8, false)]);
    worker.apply(Event::Published { job: JOB, outcome: PublicationOutcome::Confirmed { messages: 1 } });
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(1); 8]);
    assert_eq!(dead_letter(&actions), Some((8, Reason::TooLarge)), "{actions:?}");
}

/// The second item was finished before the first, whose output is too large for any reply.
#[test]
fn outputs_of_a_dead_letter_do_not_count_as_computed_again() {
    let mut worker = Worker::new();
    worker.job(JOB.0, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    assert_eq!(order.items, [(JOB, ItemIndex(0)), (JOB, ItemIndex(1))]);
    worker.ends(&order, PassResult::Skipped, vec![None, Some(1)]);
    let order = worker.pass();
    assert_eq!(order.items, [(JOB, ItemIndex(0))]);
    let too_large = usize::try_from(REPLY_MAX).unwrap() + 1;
    let actions = worker.ends(&order, PassResult::Done, vec![Some(too_large)]);
    assert_eq!(dead_letter(&actions), Some((0, Reason::TooLarge)), "{actions:?}");
    let is_recomputed = |action: &Action| matches!(action, Action::Observe(Observation::Recomputed { .. }));
    assert!(!actions.iter().any(is_recomputed), "{actions:?}");
}

/// The other pass filled the replies: another attempt would compute again the outputs that have no room.
#[test]
fn a_job_whose_replies_are_full_gets_no_other_attempt_after_an_out_of_memory() {
    let mut worker = Worker::new();
    worker.job(JOB.0, 16, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    let oom = PassError::from(OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 });
    worker.ends(&passes[1], PassResult::Failed(oom), vec![None; 8]);
    let half = usize::try_from(REPLY_MAX / 2).unwrap();
    let actions = worker.ends(&passes[0], PassResult::Done, vec![Some(half); 8]);
    assert_eq!(replied(&actions), [(JOB, 2, false)], "{actions:?}");
    let confirmed = PublicationOutcome::Confirmed { messages: 1 };
    let actions = worker.apply(Event::Published { job: JOB, outcome: confirmed });
    assert_eq!(dead_letter(&actions), Some((2, Reason::TooLarge)), "{actions:?}");
    let history = actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers: Some(headers), .. }, .. } => {
            Some(headers.history.len())
        }
        _ => None,
    });
    assert_eq!(history, Some(1), "the out-of-memory is in the history: {actions:?}");
}

#[test]
fn a_reply_that_is_refused_four_times_is_not_offered_again() {
    // The last reply, and a part of a job that goes on.
    for items in [1, 16] {
        let mut worker = Worker::new();
        worker.job(JOB.0, items, worker.source(), JobHeaders::default());
        let order = worker.pass();
        worker.ends(&order, PassResult::Done, vec![Some(LARGE); order.items.len()]);
        let mut refusals = 0;
        let given_up = loop {
            refusals += 1;
            let outcome = PublicationOutcome::Refused { destination: "replies".to_owned() };
            let mut actions = worker.apply(Event::Published { job: JOB, outcome });
            if actions.iter().any(|action| matches!(action, Action::Publish { .. })) || refusals == 8 {
                break actions;
            }
            while !actions.iter().any(|action| matches!(action, Action::Publish { .. })) {
                actions = worker.until_next_timer();
            }
        };
        assert_eq!(refusals, 4);
        let letters = |action: &Action| {
            matches!(action, Action::Publish { publication: Publication::DeadReplies(_), .. })
        };
        assert!(given_up.iter().any(letters), "{given_up:?}");
    }
}

/// Jobs of others need the slot.
#[test]
fn a_job_whose_dead_letter_is_refused_four_times_goes_to_a_delay_queue() {
    let mut worker = Worker::new();
    worker.arrives(JOB.0, worker.source(), JobHeaders::default());
    let result = Err(Rejection::new(Reason::Malformed, "no JSON"));
    let mut actions = worker.apply(Event::Decoded { job: JOB, result });
    let mut offered = 0;
    while requeued(&actions).is_empty() {
        assert!(dead_letter_of(&actions) == Some(Reason::Malformed) && offered < 8, "{actions:?}");
        offered += 1;
        let outcome = PublicationOutcome::Refused { destination: "vramq.dead".to_owned() };
        actions = worker.apply(Event::Published { job: JOB, outcome });
        while dead_letter_of(&actions).is_none() && requeued(&actions).is_empty() {
            actions = worker.until_next_timer();
        }
    }
    assert_eq!(offered, 4);
    assert_eq!(requeued(&actions), [(JOB, JobHeaders::default(), Route::Later(30_000))]);
}

/// They come back each half minute, before others.
#[test]
fn of_many_jobs_with_refused_dead_letters_most_go_to_a_delay_queue_at_once() {
    let mut worker = Worker::new();
    let mut delayed = 0;
    for key in 1..=40 {
        worker.arrives(key, worker.source(), JobHeaders::default());
        let result = Err(Rejection::new(Reason::Malformed, "no JSON"));
        let actions = worker.apply(Event::Decoded { job: JobKey(key), result });
        assert_eq!(dead_letter_of(&actions), Some(Reason::Malformed), "{actions:?}");
        let outcome = PublicationOutcome::Refused { destination: "vramq.dead".to_owned() };
        delayed += requeued(&worker.apply(Event::Published { job: JobKey(key), outcome })).len();
    }
    // The others have a quarter of the 64 slots.
    assert_eq!(delayed, 40 - 16);
}

#[test]
fn what_is_finished_is_published_a_second_after_the_first_pass_while_more_follows() {
    let mut worker = Worker::one_by_one();
    worker.job(JOB.0, 32, worker.source(), JobHeaders::default());
    let mut parts = [0, 999, 1].into_iter().map(|millis| {
        worker.now += Duration::from_millis(millis);
        let order = worker.pass();
        replied(&worker.ends(&order, PassResult::Done, vec![Some(1); 8]))
    });
    assert_eq!(parts.next(), Some(vec![]));
    assert_eq!(parts.next(), Some(vec![]));
    assert_eq!(parts.next(), Some(vec![(JOB, 24, false)]));
}

#[test]
fn the_wait_for_the_first_pass_counts_from_publishing() {
    let mut worker = Worker::new();
    worker.unix_ms = 10_000;
    let delivery = Delivery {
        published_ms: Some(7_000),
        ..Worker::delivery(JOB.0, worker.source(), JobHeaders::default())
    };
    worker.apply(Event::Delivered(Box::new(delivery)));
    worker.decoded(JOB.0, 1);
    worker.now += Duration::from_secs(2);
    let waits = worker.apply(Event::Idle).into_iter().filter_map(|action| match action {
        Action::Observe(Observation::FirstPass { waited, .. }) => Some(waited),
        _ => None,
    });
    assert_eq!(waits.collect::<Vec<_>>(), [Duration::from_secs(5)]);
}

fn dead_letter_of(actions: &[Action]) -> Option<Reason> {
    actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { rejection, .. }, .. } => {
            Some(rejection.reason)
        }
        _ => None,
    })
}

/// The answered items and the reason in the dead letter among these actions.
fn dead_letter(actions: &[Action]) -> Option<(u32, Reason)> {
    actions.iter().find_map(|action| match action {
        Action::Publish { publication: Publication::DeadLetter { headers, rejection }, .. } => {
            Some((headers.as_ref()?.items_done, rejection.reason))
        }
        _ => None,
    })
}
