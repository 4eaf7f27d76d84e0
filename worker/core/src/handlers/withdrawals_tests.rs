//! Tests of withdrawn jobs in each phase, and of withdrawals with a wrong secret.

use std::time::Duration;

use vramq_schemas::control::Command;
use vramq_schemas::withdrawal::{Digest, REMEMBERED_S};
use vramq_schemas::{JobHeaders, Reason};

use super::test_worker::{CHANNEL, Worker, replied, requeued};
use crate::action::{Action, Answer, Publication};
use crate::device::{OutOfMemory, PassError};
use crate::event::{Delivery, Event, PassResult, PublicationOutcome, Source, Withdrawn};
use crate::ids::{ItemIndex, JobKey, RequestId};
use crate::observation::{End, Observation, PassOutcome};
use crate::rejection::Rejection;

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

/// Bytes of more than one part.
const LARGE: usize = 2 * 1024 * 1024;

/// A worker whose jobs are withdrawn by their own callers.
impl Worker {
    fn withdraw(&mut self, job: u64) -> Vec<Action> {
        let (id, digest) = (job.to_string(), Digest::of(&job.to_string()));
        self.apply(Event::Withdrawn(Withdrawn { id, digest }))
    }

    fn deliver(&mut self, job: u64) -> Vec<Action> {
        self.apply(Event::Delivered(Box::new(Self::delivery(job, self.source(), JobHeaders::default()))))
    }

    /// The job is redelivered: as another message, or the same message again.
    fn deliver_again(&mut self, job: u64, key: u64) -> Vec<Action> {
        let mut delivery = Self::delivery(key, self.source(), JobHeaders::default());
        delivery.id = Some(job.to_string());
        delivery.withdrawal = Some(Digest::of(&job.to_string()));
        self.apply(Event::Delivered(Box::new(delivery)))
    }

    fn is_published(&mut self, job: u64, outcome: PublicationOutcome) -> Vec<Action> {
        self.apply(Event::Published { job: JobKey(job), outcome })
    }

    /// Checks that the job ends as withdrawn: these actions publish only its `failed` reply, an ack follows, and the end is counted.
    fn ends_as_withdrawn(&mut self, job: u64, actions: &[Action]) {
        assert_eq!(notices(actions), [JobKey(job)], "{actions:?}");
        assert!(replied(actions).is_empty() && requeued(actions).is_empty(), "{actions:?}");
        let after = self.is_published(job, CONFIRMED);
        assert!(after.is_empty(), "{after:?}");
        let acks = self.apply(Event::Idle);
        assert!(acks.iter().any(|action| matches!(action, Action::Ack { .. })), "{acks:?}");
        assert!(!acks.iter().any(|action| matches!(action, Action::Run(_))), "{acks:?}");
        let ended = self.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
        let settled = ended.iter().find_map(|action| match action {
            Action::Observe(Observation::Settled(settled)) => Some((settled.job, settled.end)),
            _ => None,
        });
        assert_eq!(settled, Some((JobKey(job), End::Withdrawn)), "{ended:?}");
    }
}

/// The withdrawal came while the job was read, so the rule does not move it.
#[test]
fn a_withdrawn_job_that_a_rule_moves_ends_here() {
    let mut worker = Worker::new();
    worker.deliver(1);
    worker.withdraw(1);
    let actions = worker.apply(Event::Moved { job: JobKey(1), key: "larger".to_owned() });
    worker.ends_as_withdrawn(1, &actions);
}

/// The jobs with a `failed` reply for their withdrawal.
fn notices(actions: &[Action]) -> Vec<JobKey> {
    let notices = actions.iter().filter_map(|action| match action {
        Action::Publish { job, publication: Publication::FailureNotice(rejection) } => {
            assert_eq!(rejection.reason, Reason::Withdrawn);
            Some(*job)
        }
        _ => None,
    });
    notices.collect()
}

fn ran_out() -> PassResult {
    PassResult::Failed(PassError::from(OutOfMemory { asked: 9, free: 1, total: 10, foreign: 0 }))
}

#[test]
fn a_job_that_comes_after_its_withdrawal_is_not_even_read() {
    let mut worker = Worker::new();
    assert!(worker.withdraw(1).is_empty());
    let actions = worker.deliver(1);
    assert!(!actions.iter().any(|action| matches!(action, Action::Decode { .. })), "{actions:?}");
    worker.ends_as_withdrawn(1, &actions);
    // Nor when it is redelivered, from a delay queue or because the ack was lost.
    let again = worker.deliver_again(1, 2);
    worker.ends_as_withdrawn(2, &again);
}

/// A reply to a queue that confirms nothing may delay replies to other callers.
#[test]
fn a_reply_queue_that_confirms_nothing_gets_no_word_of_a_withdrawal() {
    let mut worker = Worker::new();
    worker.is_silent("silent");
    worker.withdraw(1);
    let source = worker.source();
    let to_silent = |key, queue: &str| Delivery {
        reply_queue: Some(queue.to_owned()),
        id: Some("1".to_owned()),
        withdrawal: Some(Digest::of("1")),
        ..Worker::delivery(key, source, JobHeaders::default())
    };
    let actions = worker.apply(Event::Delivered(Box::new(to_silent(1, "silent"))));
    assert!(notices(&actions).is_empty(), "{actions:?}");
    let acks = worker.apply(Event::Idle);
    assert!(acks.iter().any(|action| matches!(action, Action::Ack { .. })), "{acks:?}");
    let actions = worker.apply(Event::Delivered(Box::new(to_silent(2, "other"))));
    assert_eq!(notices(&actions), [JobKey(2)], "{actions:?}");
}

#[test]
fn a_withdrawal_is_forgotten_when_it_is_not_repeated() {
    let mut worker = Worker::new();
    worker.withdraw(1);
    worker.now += Duration::from_secs(REMEMBERED_S + 1);
    let actions = worker.deliver(1);
    assert!(actions.iter().any(|action| matches!(action, Action::Decode { .. })), "{actions:?}");
}

#[test]
fn a_job_that_is_being_read_is_withdrawn_when_it_was_read() {
    let mut worker = Worker::new();
    worker.deliver(1);
    worker.deliver(2);
    assert!(worker.withdraw(1).is_empty() && worker.withdraw(2).is_empty());
    let actions = worker.decoded(1, 3);
    worker.ends_as_withdrawn(1, &actions);
    // The same for a withdrawn job that cannot be read: no dead letter.
    let malformed = Err(Rejection::new(Reason::Malformed, "no JSON"));
    let actions = worker.apply(Event::Decoded { job: JobKey(2), result: malformed });
    worker.ends_as_withdrawn(2, &actions);
}

#[test]
fn a_job_that_waits_for_a_pass_gets_none() {
    let mut worker = Worker::new();
    worker.job(1, 3, worker.source(), JobHeaders::default());
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let actions = worker.withdraw(1);
    assert_eq!(notices(&actions), [JobKey(1)]);
    let order = worker.pass();
    assert_eq!(order.items, [(JobKey(2), ItemIndex(0))], "its neighbour runs");
}

#[test]
fn outputs_of_a_pass_that_runs_are_dropped() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.withdraw(1);
    // A pass that is already on the device ends first; then the job's slot is free.
    assert!(matches!(actions[..], [Action::CancelPass { pass, .. }] if pass == order.pass), "{actions:?}");
    assert!(worker.withdraw(1).is_empty(), "the withdrawal is repeated");
    let actions = worker.ends(&order, PassResult::Done, vec![Some(10), Some(10)]);
    worker.ends_as_withdrawn(1, &actions);
}

#[test]
fn a_pass_that_did_not_begin_is_skipped_unless_others_need_it() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let shared = worker.pass();
    assert_eq!(shared.items.len(), 2);
    worker.job(3, 1, worker.source(), JobHeaders::default());
    let own = worker.pass();
    assert!(worker.withdraw(1).is_empty(), "the pass is its neighbour's, too");
    let actions = worker.withdraw(3);
    assert!(matches!(actions[..], [Action::CancelPass { pass, .. }] if pass == own.pass), "{actions:?}");
    let actions = worker.ends(&own, PassResult::Skipped, vec![]);
    worker.ends_as_withdrawn(3, &actions);
    let actions = worker.ends(&shared, PassResult::Done, vec![Some(10), Some(10)]);
    assert_eq!((notices(&actions), replied(&actions)), (vec![JobKey(1)], vec![(JobKey(2), 1, true)]));
}

#[test]
fn a_pass_that_was_cancelled_ends_its_job_and_counts_as_cancelled() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.withdraw(1);
    // The program had finished an item before it stopped.
    let actions = worker.ends(&order, PassResult::Cancelled, vec![Some(10), None]);
    let is_counted = |action: &Action| {
        let Action::Observe(Observation::PassEnded { outcome, items, .. }) = action else { return false };
        (*outcome, *items) == (PassOutcome::Cancelled, 0)
    };
    assert!(actions.iter().any(is_counted), "{actions:?}");
    worker.ends_as_withdrawn(1, &actions);
}

#[test]
fn a_pass_is_cancelled_when_the_last_of_its_jobs_is_given_up() {
    let mut worker = Worker::new();
    for job in 1..4 {
        worker.job(job, 1, worker.source(), JobHeaders::default());
    }
    let order = worker.pass();
    assert_eq!(order.items.len(), 3);
    assert!(worker.withdraw(1).is_empty());
    let is_cancelled = |actions: &[Action]| {
        actions.iter().any(|action| matches!(action, Action::CancelPass { pass, .. } if *pass == order.pass))
    };
    let cancel = Command::Cancel { job: "2".to_owned() };
    let actions = worker.apply(Event::Command { request: RequestId(1), command: cancel });
    assert!(!is_cancelled(&actions), "the third job needs it: {actions:?}");
    let actions = worker.withdraw(3);
    assert!(is_cancelled(&actions), "{actions:?}");
}

/// A part of the first job was not taken, so the job has ended although its passes still run.
#[test]
fn a_job_that_has_ended_needs_no_pass() {
    let mut worker = Worker::new();
    worker.job(1, 28, worker.source(), JobHeaders::default());
    let own = worker.passes();
    assert_eq!(own.len(), 3);
    worker.job(2, 1, worker.source(), JobHeaders::default());
    let actions = worker.ends(&own[0], PassResult::Done, vec![Some(LARGE); 8]);
    assert_eq!(replied(&actions), [(JobKey(1), 8, false)]);
    let shared = worker.pass();
    let has = |job| shared.items.iter().any(|(key, _)| *key == JobKey(job));
    assert!(has(1) && has(2), "{shared:?}");
    worker.is_published(1, PublicationOutcome::Unroutable { destination: "q".to_owned() });
    let actions = worker.withdraw(2);
    assert!(matches!(actions[..], [Action::CancelPass { pass, .. }] if pass == shared.pass), "{actions:?}");
}

#[test]
fn a_pass_that_fails_leaves_no_dead_letter_of_it() {
    for failed in [ran_out(), PassResult::Failed(PassError::Failed("boom".to_owned()))] {
        let mut worker = Worker::new();
        let headers = JobHeaders { batch_hint: Some(1), exclusive: true, ..JobHeaders::default() };
        worker.job(1, 1, worker.source(), headers);
        let order = worker.pass();
        worker.withdraw(1);
        let actions = worker.ends(&order, failed, vec![None]);
        worker.ends_as_withdrawn(1, &actions);
    }
}

#[test]
fn a_process_that_dies_leaves_no_dead_letter_of_it() {
    let mut worker = Worker::new();
    let headers = JobHeaders { crashes: 4, ..JobHeaders::default() };
    worker.job(1, 1, Source::Quarantine, headers);
    let order = worker.pass();
    worker.withdraw(1);
    let crashed = PassResult::Failed(PassError::Crashed("the process was killed".to_owned()));
    let actions = worker.ends(&order, crashed, vec![None]);
    assert_eq!(notices(&actions), [JobKey(1)], "{actions:?}");
}

/// A job of four passes whose first part is on its way. Three passes have ended, the last one was not made yet.
fn with_a_part_in_flight() -> Worker {
    let mut worker = Worker::new();
    worker.job(1, 32, worker.source(), JobHeaders::default());
    let orders = worker.passes();
    assert_eq!(orders.iter().map(|order| order.items.len()).collect::<Vec<_>>(), [8, 8, 8]);
    let actions = worker.ends(&orders[0], PassResult::Done, vec![Some(LARGE); 8]);
    assert_eq!(replied(&actions), [(JobKey(1), 8, false)]);
    for order in &orders[1..] {
        worker.ends(order, PassResult::Done, vec![Some(LARGE); 8]);
    }
    worker
}

#[test]
fn between_parts_no_pass_and_no_part_follows() {
    let mut worker = with_a_part_in_flight();
    assert!(worker.withdraw(1).is_empty(), "the part arrives first");
    assert!(worker.passes().is_empty());
    let actions = worker.is_published(1, CONFIRMED);
    worker.ends_as_withdrawn(1, &actions);
}

#[test]
fn a_part_that_nobody_takes_is_no_dead_letter() {
    let gone = PublicationOutcome::Unroutable { destination: "q".to_owned() };
    let full = PublicationOutcome::Refused { destination: "q".to_owned() };
    for outcome in [gone, full, PublicationOutcome::TooLarge] {
        let mut worker = with_a_part_in_flight();
        worker.withdraw(1);
        let actions = worker.is_published(1, outcome);
        worker.ends_as_withdrawn(1, &actions);
    }
}

#[test]
fn a_job_that_was_requeued_is_withdrawn_where_it_comes_next() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let actions = worker.ends(&order, ran_out(), vec![None, None]);
    assert_eq!(requeued(&actions).len(), 1);
    assert!(worker.withdraw(1).is_empty(), "its next attempt is on its way");
    assert!(requeued(&worker.is_published(1, CONFIRMED)).is_empty());
    worker.apply(Event::Idle);
    worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    let actions = worker.deliver_again(1, 2);
    worker.ends_as_withdrawn(2, &actions);
}

#[test]
fn only_the_jobs_own_caller_withdraws_it() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    for (id, secret) in [("1", "2"), ("2", "1"), ("", "")] {
        let (id, digest) = (id.to_owned(), Digest::of(secret));
        assert!(worker.apply(Event::Withdrawn(Withdrawn { id, digest })).is_empty());
    }
    // One without a digest cannot be withdrawn by anybody.
    let mut without = Worker::delivery(3, worker.source(), JobHeaders::default());
    without.withdrawal = None;
    worker.apply(Event::Delivered(Box::new(without)));
    worker.decoded(3, 1);
    assert!(worker.withdraw(3).is_empty());
    let order = worker.pass();
    let actions = worker.ends(&order, PassResult::Done, vec![Some(1), Some(1)]);
    assert_eq!(replied(&actions), [(JobKey(1), 1, true), (JobKey(3), 1, true)]);
}

#[test]
fn a_withdrawal_outweighs_an_operators_cancellation() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    let cancel = |request| Event::Command {
        request: RequestId(request),
        command: Command::Cancel { job: "1".to_owned() },
    };
    worker.apply(cancel(1));
    worker.withdraw(1);
    worker.apply(cancel(2));
    let actions = worker.ends(&order, PassResult::Done, vec![Some(1)]);
    assert_eq!(notices(&actions), [JobKey(1)], "{actions:?}");
    worker.is_published(1, CONFIRMED);
    worker.apply(Event::Idle);
    let answers = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    let late = answers.iter().filter(|action| match action {
        Action::Answer { answer: Answer::TooLate, text, .. } => text.contains("its caller withdrew it"),
        _ => false,
    });
    assert_eq!(late.count(), 2, "{answers:?}");
}
