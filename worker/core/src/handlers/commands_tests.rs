//! Operators' commands: what each does, and when it is answered.

use vramq_schemas::control::Command;
use vramq_schemas::{JobHeaders, Reason};

use super::test_worker::{CHANNEL, Worker};
use crate::action::{Action, Answer, Publication, SessionEnd};
use crate::device::PassError;
use crate::event::{Delivery, Event, PassResult, PublicationOutcome};
use crate::ids::{JobKey, RequestId, StoreIndex};

const CONFIRMED: PublicationOutcome = PublicationOutcome::Confirmed { messages: 1 };

impl Worker {
    fn command(&mut self, request: u64, command: Command) -> Vec<Action> {
        self.apply(Event::Command { request: RequestId(request), command })
    }
}

/// The answers to commands, each with its text and whether it is the last.
fn answers(actions: &[Action]) -> Vec<(u64, Answer, &str, bool)> {
    let answers = actions.iter().filter_map(|action| match action {
        Action::Answer { request, answer, text, last } => Some((request.0, *answer, text.as_str(), *last)),
        _ => None,
    });
    answers.collect()
}

/// The dead letters, each with its reason.
fn dead_letters(actions: &[Action]) -> Vec<(JobKey, Reason)> {
    let letters = actions.iter().filter_map(|action| match action {
        Action::Publish { job, publication: Publication::DeadLetter { rejection, .. } } => {
            Some((*job, rejection.reason))
        }
        _ => None,
    });
    letters.collect()
}

fn cancel(job: &str) -> Command {
    Command::Cancel { job: job.to_owned() }
}

#[test]
fn a_pause_is_answered_once_the_broker_sends_no_more() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let paused = worker.command(1, Command::Pause);
    assert!(answers(&paused).is_empty(), "{paused:?}");
    let ended = worker.consumers_end(&paused);
    let text = "takes no more jobs; 1 unacknowledged jobs go on";
    assert_eq!(answers(&ended), [(1, Answer::Done, text, true)]);
    assert_eq!(worker.pass().items.len(), 2, "what the worker has goes on");
    // Each pause is answered once.
    assert!(answers(&worker.apply(Event::Idle)).is_empty());
    let again = worker.command(2, Command::Pause);
    assert_eq!(answers(&again), [(2, Answer::Done, text, true)], "it consumes nothing already");
}

#[test]
fn a_worker_that_is_resumed_takes_jobs_and_refuses_the_pause_that_waited() {
    let mut worker = Worker::new();
    let paused = worker.command(1, Command::Pause);
    let resumed = worker.command(2, Command::Resume);
    let expected = [
        (1, Answer::Refused, "an operator resumed the worker meanwhile", true),
        (2, Answer::Done, "takes jobs", true),
    ];
    assert_eq!(answers(&resumed), expected);
    let ended = worker.consumers_end(&paused);
    assert!(answers(&ended).is_empty(), "{ended:?}");
    let again = worker.command(3, Command::Resume);
    assert_eq!(answers(&again), [(3, Answer::Done, "was not paused", true)]);
}

#[test]
fn pauses_beyond_a_bound_are_refused_and_change_nothing() {
    let mut worker = Worker::new();
    let mut request = 0;
    let refused = loop {
        request += 1;
        let actions = worker.command(request, Command::Pause);
        if !answers(&actions).is_empty() {
            break actions;
        }
        assert!(request < 1_000, "no bound");
    };
    let text = "too many pauses at a time: try again";
    assert_eq!(answers(&refused), [(request, Answer::Refused, text, true)]);
}

#[test]
fn a_signal_lets_a_drain_by_command_go_on_and_a_second_one_ends_it() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    worker.command(1, Command::Drain);
    let mut signal = || worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(signal().is_empty());
    assert!(matches!(signal()[..], [Action::EndSession(SessionEnd::Killed)]));
}

#[test]
fn a_drain_is_answered_at_once_and_refuses_what_would_take_jobs() {
    let mut worker = Worker::new();
    worker.job(1, 2, worker.source(), JobHeaders::default());
    let drained = worker.command(1, Command::Drain);
    let text = "drains, and ends in 10 s at most; 1 unacknowledged jobs";
    assert_eq!(answers(&drained), [(1, Answer::Done, text, true)]);
    assert!(worker.is_draining());
    let twice = worker.command(2, Command::Drain);
    assert_eq!(answers(&twice), [(2, Answer::Done, "drains already; 1 unacknowledged jobs", true)]);
    for (request, command) in [(3, Command::Pause), (4, Command::Resume)] {
        let refused = worker.command(request, command);
        let text = "the worker is draining: it takes no more jobs";
        assert_eq!(answers(&refused), [(request, Answer::Refused, text, true)]);
    }
}

#[test]
fn a_filter_for_logs_is_bounded() {
    let mut worker = Worker::new();
    let longest = "x".repeat(1024);
    let taken = worker.command(1, Command::Set { log: longest.clone() });
    let is_set =
        |action: &Action| matches!(action, Action::SetLog { directives, .. } if *directives == longest);
    assert!(taken.iter().any(is_set) && answers(&taken).is_empty(), "{taken:?}");
    let refused = worker.command(2, Command::Set { log: longest + "x" });
    assert_eq!(answers(&refused), [(2, Answer::Refused, "the filter is longer than 1024 bytes", true)]);
    assert!(!refused.iter().any(|action| matches!(action, Action::SetLog { .. })), "{refused:?}");
}

#[test]
fn a_cancelled_job_becomes_a_dead_letter_and_the_operator_hears_of_each_step() {
    let mut worker = Worker::new();
    let unknown = worker.command(1, cancel("1"));
    assert_eq!(answers(&unknown), [(1, Answer::NotHere, "this worker holds no job of that id", true)]);

    worker.job(1, 2, worker.source(), JobHeaders::default());
    let cancelled = worker.command(2, cancel("1"));
    let expected = [
        (2, Answer::Requested, "the worker holds the job, and will stop it", false),
        (2, Answer::Stopped, "the job is stopped: no pass of it waits or runs", false),
    ];
    assert_eq!(answers(&cancelled), expected);
    assert_eq!(dead_letters(&cancelled), [(JobKey(1), Reason::Cancelled)]);
    assert!(worker.passes().is_empty());

    let noticed = worker.apply(Event::Published { job: JobKey(1), outcome: CONFIRMED });
    let is_notice = |action: &Action| {
        matches!(action, Action::Publish { publication: Publication::FailureNotice(_), .. })
    };
    assert!(noticed.iter().any(is_notice), "{noticed:?}");
    worker.apply(Event::Published { job: JobKey(1), outcome: CONFIRMED });
    worker.apply(Event::Idle);
    let ended = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    let text = "the job is a dead letter, its slot and its memory are free";
    assert_eq!(answers(&ended), [(2, Answer::MemoryBack, text, true)]);
}

#[test]
fn cancelling_a_job_that_ends_first_is_answered_with_too_late() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.ends(&order, PassResult::Done, vec![Some(1)]);
    let late = worker.command(1, cancel("1"));
    let text = "the worker holds the job, and will stop it";
    assert_eq!(answers(&late), [(1, Answer::Requested, text, false)]);
    worker.apply(Event::Published { job: JobKey(1), outcome: CONFIRMED });
    worker.apply(Event::Idle);
    let ended = worker.apply(Event::AcksSent { channel: CHANNEL, sent: vec![true] });
    assert_eq!(answers(&ended), [(1, Answer::TooLate, "the job had already ended: it was answered", true)]);
}

#[test]
fn a_cancellation_is_stopped_when_the_last_job_of_the_id_is() {
    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass();
    let same_id =
        Delivery { id: Some("1".to_owned()), ..Worker::delivery(2, worker.source(), JobHeaders::default()) };
    worker.apply(Event::Delivered(Box::new(same_id)));
    worker.decoded(2, 1);
    let cancelled = worker.command(1, cancel("1"));
    let requested = "the worker holds the job, and will stop it";
    assert_eq!(answers(&cancelled), [(1, Answer::Requested, requested, false)], "one is in a pass");
    let ended = worker.ends(&pass, PassResult::Cancelled, vec![None]);
    let stopped = "the job is stopped: no pass of it waits or runs";
    assert_eq!(answers(&ended), [(1, Answer::Stopped, stopped, false)]);
}

/// A store may take minutes.
#[test]
fn a_cancelled_job_does_not_wait_for_its_inputs() {
    let mut worker = Worker::new();
    worker.arrives(1, worker.source(), JobHeaders::default());
    worker.apply(Event::Referring { job: JobKey(1), stores: vec![StoreIndex(0)] });
    let cancelled = worker.command(1, cancel("1"));
    let expected = [
        (1, Answer::Requested, "the worker holds the job, and will stop it", false),
        (1, Answer::Stopped, "the job is stopped: no pass of it waits or runs", false),
    ];
    assert_eq!(answers(&cancelled), expected);
    assert_eq!(dead_letters(&cancelled), [(JobKey(1), Reason::Cancelled)]);
    assert!(worker.apply(Event::Fetched { job: JobKey(1), result: Ok(()) }).is_empty(), "it comes too late");
}

#[test]
fn a_job_that_was_cancelled_while_it_was_read_is_not_sent_elsewhere() {
    let mut worker = Worker::new();
    for key in [1, 2] {
        worker.arrives(key, worker.source(), JobHeaders::default());
    }
    let requested = worker.command(1, cancel("1"));
    let text = "the worker holds the job, and will stop it";
    assert_eq!(answers(&requested), [(1, Answer::Requested, text, false)]);
    let moved = |job| Event::Moved { job: JobKey(job), key: "larger".to_owned() };
    assert_eq!(dead_letters(&worker.apply(moved(1))), [(JobKey(1), Reason::Cancelled)]);
    assert!(dead_letters(&worker.apply(moved(2))).is_empty(), "another job");
}

/// One of its passes has failed and waits for a health probe, and its first part is on its way.
#[test]
fn a_job_whose_failed_pass_waits_for_a_probe_ends_as_cancelled() {
    const LARGE: usize = 2 * 1024 * 1024;
    let mut worker = Worker::on_device();
    worker.job(1, 16, worker.source(), JobHeaders::default());
    let passes = worker.passes();
    worker.ends(&passes[0], PassResult::Done, vec![Some(LARGE); 8]);
    let failed = PassResult::Failed(PassError::Failed("the engine cannot run this".to_owned()));
    worker.ends(&passes[1], failed, vec![None; 8]);
    let probe = worker.pass();
    assert!(probe.items.is_empty(), "{probe:?}");
    worker.command(1, cancel("1"));
    assert!(dead_letters(&worker.ends(&probe, PassResult::Done, Vec::new())).is_empty(), "the part is first");
    let ended = worker.apply(Event::Published { job: JobKey(1), outcome: CONFIRMED });
    assert_eq!(dead_letters(&ended), [(JobKey(1), Reason::Cancelled)]);
    let stopped = "the job is stopped: no pass of it waits or runs";
    assert_eq!(answers(&ended), [(1, Answer::Stopped, stopped, false)]);
}
