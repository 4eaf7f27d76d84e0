//! What the core does every second: memory that is kept, memory that stays missing, and jobs that wait for the broker.

use std::time::Duration;

use vramq_schemas::JobHeaders;
use vramq_schemas::control::Command;

use super::test_worker::{MEMORY, MODEL, Worker};
use crate::action::{Action, JobQueue, PassOrder, Publication};
use crate::device::Memory;
use crate::event::{
    DecodedJob, Event, PassResult, PublicationOutcome, QueueCount, QueueCounts, SessionFacts, Source,
};
use crate::ids::{ConsumerId, JobKey, QueueIndex, RequestId};

/// The seconds, out of so many, at which the worker gives kept memory back to the system.
fn trims(worker: &mut Worker, seconds: u64) -> Vec<u64> {
    let trims_at = |_: &u64| {
        worker.now += Duration::from_secs(1);
        let actions = worker.quiet_tick();
        actions.iter().any(|action| matches!(action, Action::TrimDevice))
    };
    (1..=seconds).filter(trims_at).collect()
}

#[test]
fn memory_kept_for_the_next_pass_goes_back_once_after_ten_quiet_seconds() {
    let mut worker = Worker::new();
    assert_eq!(trims(&mut worker, 25), [10]);

    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    assert_eq!(trims(&mut worker, 25), [0; 0], "a pass runs");
    worker.ends(&order, PassResult::Done, vec![Some(1)]);
    assert_eq!(trims(&mut worker, 25), [10]);
}

#[test]
fn memory_stays_for_a_worker_that_had_a_pass_between_two_seconds() {
    let mut worker = Worker::new();
    assert_eq!(trims(&mut worker, 9), [0; 0]);
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let order = worker.pass();
    worker.ends(&order, PassResult::Done, vec![Some(1)]);
    assert_eq!(trims(&mut worker, 25), [10]);
}

/// A broker that never runs out of jobs in the model's own queue, and fills every live consumer.
#[derive(Default)]
struct Backlog {
    live: Vec<(ConsumerId, usize)>,
    /// Unacknowledged jobs.
    held: Vec<(JobKey, ConsumerId)>,
    /// Those whose replies the broker has not confirmed.
    published: Vec<JobKey>,
    sent: u64,
    runs: Option<PassOrder>,
}

/// Jobs that keep the worker's device busy: two passes, and half a pass for half a second, at one job per pass.
const CREDIT: usize = 3;

impl Backlog {
    /// The worker begins a new session.
    fn open(worker: &mut Worker) -> Self {
        let mut backlog = Self::default();
        worker.apply(Event::SessionFailed("broken".to_owned()));
        worker.apply(Event::SessionClosed);
        backlog.event(worker, Event::SessionOpened(SessionFacts { declares: true, missing: Vec::new() }));
        backlog
    }

    fn event(&mut self, worker: &mut Worker, event: Event) {
        let actions = worker.apply(event);
        self.carry_out(worker, actions);
    }

    fn carry_out(&mut self, worker: &mut Worker, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Consume { queue: JobQueue::Jobs(_), consumer, prefetch, .. } => {
                    self.live.push((consumer, prefetch.get().into()));
                }
                Action::StopConsumer { consumer, .. } => {
                    self.live.retain(|(live, _)| *live != consumer);
                    self.event(worker, Event::ConsumerEnded { consumer });
                }
                Action::Publish { job, publication: Publication::Reply(_) } => self.published.push(job),
                Action::Ack { channel, frames } => {
                    self.event(worker, Event::AcksSent { channel, sent: vec![true; frames.len()] });
                }
                Action::Run(order) => self.runs = Some(order),
                _ => {}
            }
        }
    }

    fn may_be_sent(&self) -> usize {
        self.live.iter().map(|(_, prefetch)| prefetch).sum()
    }

    fn send(&mut self, worker: &mut Worker) {
        let free = |backlog: &Self| {
            let held = |of: ConsumerId| backlog.held.iter().filter(|(_, consumer)| *consumer == of).count();
            backlog
                .live
                .iter()
                .find(|(consumer, prefetch)| held(*consumer) < *prefetch)
                .map(|(consumer, _)| *consumer)
        };
        while let Some(consumer) = free(self) {
            self.sent += 1;
            self.held.push((JobKey(self.sent), consumer));
            let source = Source::Jobs(QueueIndex::OWN, consumer);
            let arrived = worker.arrives(self.sent, source, JobHeaders::default());
            self.carry_out(worker, arrived);
            // One item, of a full pass.
            let decoded = Ok(DecodedJob { items_total: 1, costs: vec![8] });
            self.event(worker, Event::Decoded { job: JobKey(self.sent), result: decoded });
        }
    }

    /// The broker sends jobs, and a pass of a second runs.
    fn second(&mut self, worker: &mut Worker) {
        self.send(worker);
        self.event(worker, Event::Idle);
        worker.now += Duration::from_secs(1);
        if let Some(order) = self.runs.take() {
            let ended = worker.ends(&order, PassResult::Done, vec![Some(1); order.items.len()]);
            self.carry_out(worker, ended);
        }
        let ticked = worker.quiet_tick();
        self.carry_out(worker, ticked);
    }

    /// The broker confirms all replies at once, and takes the acks of their jobs.
    fn confirm(&mut self, worker: &mut Worker) {
        for job in std::mem::take(&mut self.published) {
            self.held.retain(|(held, _)| *held != job);
            self.event(
                worker,
                Event::Published { job, outcome: PublicationOutcome::Confirmed { messages: 1 } },
            );
        }
        self.event(worker, Event::Idle);
    }
}

/// Jobs whose replies are not taken, as with a full reply queue for each. Other callers' jobs keep the device busy meanwhile. But the
/// number is bounded: when the broker takes the replies again, it sends as many jobs that have not run.
#[test]
fn beside_jobs_whose_replies_are_not_taken_others_run_up_to_twice_the_credit() {
    for is_blocked in [false, true] {
        let mut worker = Worker::one_by_one();
        let mut backlog = Backlog::open(&mut worker);
        for _ in 0..20 {
            backlog.second(&mut worker);
            backlog.confirm(&mut worker);
        }
        let before = backlog.may_be_sent();
        assert!((CREDIT..2 * CREDIT).contains(&before), "{before}");
        if is_blocked {
            worker.apply(Event::BrokerBlocked { reason: "low on memory".to_owned() });
        }
        (0..20).for_each(|_| backlog.second(&mut worker));
        let most = if is_blocked { before } else { 2 * CREDIT };
        assert_eq!(backlog.published.len(), most, "jobs that ran, blocked: {is_blocked}");
        backlog.confirm(&mut worker);
        backlog.send(&mut worker);
        assert!(backlog.held.len() <= 2 * CREDIT, "{} jobs", backlog.held.len());
        assert!(worker.unacked() <= 2 * CREDIT, "{} jobs", worker.unacked());
    }
}

#[test]
fn a_new_session_holds_no_jobs_beside_those_of_the_last_one() {
    let mut worker = Worker::one_by_one();
    let mut backlog = Backlog::open(&mut worker);
    (0..20).for_each(|_| backlog.second(&mut worker));
    assert_eq!(backlog.may_be_sent(), 2 * CREDIT);
    let again = Backlog::open(&mut worker).may_be_sent();
    assert!((CREDIT..2 * CREDIT).contains(&again), "{again}");
}

#[test]
fn memory_that_only_a_restart_frees_leads_to_one_unless_the_worker_ends_anyway() {
    let missing = || Event::MemoryWithheld {
        model: MODEL,
        bytes: 1 << 20,
        lasted: Duration::from_secs(60),
        has_ended: true,
    };
    let exchanged = || Event::OtherRevision { model: MODEL, revision: "f32-other".to_owned() };
    for event in [&missing as &dyn Fn() -> Event, &exchanged] {
        let mut worker = Worker::new();
        worker.apply(event());
        assert!(worker.is_draining() && worker.wants_restart());
        // A stop request meanwhile ends the worker without a restart.
        worker.apply(Event::StopRequested { signal: "SIGTERM" });
        assert!(worker.is_draining() && !worker.wants_restart());

        let mut worker = Worker::new();
        worker.apply(Event::StopRequested { signal: "SIGTERM" });
        worker.apply(event());
        assert!(worker.is_draining() && !worker.wants_restart());
    }
}

#[test]
fn memory_that_grows_with_each_answered_job_is_a_leak_of_so_much_a_job() {
    const GROWTH: u64 = 4 << 20;
    let mut worker = Worker::one_by_one();
    for job in 1..=40 {
        worker.job(job, 1, worker.source(), JobHeaders::default());
        let pass = worker.pass();
        let memory = Memory { free: MEMORY.free - GROWTH * job, ..MEMORY };
        worker.ends_with(&pass, PassResult::Done, vec![Some(1)], memory);
        let outcome = PublicationOutcome::Confirmed { messages: 1 };
        worker.apply(Event::Published { job: JobKey(job), outcome });
        for action in worker.apply(Event::Idle) {
            if let Action::Ack { channel, frames } = action {
                worker.apply(Event::AcksSent { channel, sent: vec![true; frames.len()] });
            }
        }
    }
    assert_eq!(worker.leaked_per_job(), GROWTH);
}

/// Whether the broker is asked how many jobs wait.
fn counts(worker: &mut Worker) -> bool {
    worker.now += Duration::from_secs(1);
    let is_asked = worker.quiet_tick().iter().any(|action| matches!(action, Action::CountQueues { .. }));
    if is_asked {
        let counts = QueueCounts { jobs: vec![QueueCount::default()], ..QueueCounts::default() };
        worker.apply(Event::QueuesCounted { model: MODEL, counts });
    }
    is_asked
}

#[test]
fn queues_are_counted_every_second_while_the_worker_may_run_their_jobs() {
    let mut worker = Worker::new();
    assert!(counts(&mut worker) && counts(&mut worker));
    let command =
        |worker: &mut Worker, command| worker.apply(Event::Command { request: RequestId(1), command });
    command(&mut worker, Command::Pause);
    assert!(!counts(&mut worker), "paused");
    command(&mut worker, Command::Resume);
    assert!(counts(&mut worker));
    worker.apply(Event::StopRequested { signal: "SIGTERM" });
    assert!(!counts(&mut worker), "draining");

    let mut worker = Worker::new();
    worker.job(1, 1, worker.source(), JobHeaders::default());
    let pass = worker.pass();
    worker.ends(&pass, PassResult::Unavailable("no such program".to_owned()), vec![None]);
    assert!(!counts(&mut worker), "no process can run the model");
    worker.apply(Event::ModelAvailable { model: MODEL });
    assert!(counts(&mut worker));
}

#[test]
fn memory_of_the_device_thread_at_the_end_of_a_pass_is_no_leak() {
    const RESIDENT: u64 = 80 << 20;
    const PASS: u64 = 20 << 20;
    let holding = |bytes| Memory { free: MEMORY.free - bytes, ..MEMORY };
    let mut worker = Worker::beside_a_program();
    let mut round = |of_program: u64, after: u64| {
        worker.job_of_program(of_program);
        let program = worker.pass();
        worker.job(of_program + 1, 1, worker.source(), JobHeaders::default());
        let pass = worker.pass();
        assert_eq!((program.model == MODEL, pass.model), (false, MODEL));
        worker.ends_with(&program, PassResult::Done, vec![Some(1)], holding(RESIDENT + PASS));
        let beside = worker.leaked();
        worker.ends_with(&pass, PassResult::Done, vec![Some(1)], holding(after));
        (beside, worker.leaked())
    };
    for job in (1..60).step_by(2) {
        assert_eq!(round(job, RESIDENT), (0, 0), "job {job}");
    }
    // Memory that stays after a pass of the device thread is a leak.
    assert_eq!(round(61, RESIDENT + PASS), (0, PASS));
}
