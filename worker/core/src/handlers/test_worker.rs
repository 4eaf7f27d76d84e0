//! A worker for tests: the core with one or two models, and helpers that read its actions.

use std::num::{NonZeroU16, NonZeroU32};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vramq_schemas::JobHeaders;
use vramq_schemas::withdrawal::Digest;

use crate::Core;
use crate::action::{Action, JobQueue, PassOrder, Publication, Route};
use crate::admission::Budget;
use crate::credit::Wanted;
use crate::device::{Memory, PassShape};
use crate::event::{
    DecodedJob, Delivery, Event, Now, OnDevice, OutputSize, PassBytes, PassEnd, PassResult,
    PublicationOutcome, Reading, SessionFacts, Source,
};
use crate::ids::{
    ChannelId, ConsumerId, DeliveryTag, ExecutorIndex, Fingerprint, JobKey, ModelIndex, QueueIndex,
};
use crate::jobs::Running;
use crate::learned_limits::LearnedLimits;
use crate::poison_policy::PoisonPolicy;
use crate::settings::{ExecutorFacts, ModelFacts, QueueFacts, Settings};
use crate::status::Status;

pub(super) const MODEL: ModelIndex = ModelIndex(0);
pub(super) const CHANNEL: ChannelId = ChannelId { model: MODEL, number: 0 };
/// The second model, a program, if there is one.
const PROGRAM: ModelIndex = ModelIndex(1);
/// Large jobs that may wait in their queue.
pub(super) const BULK_JOBS_MAX: u32 = 10;
/// Device time that a large job may have in one go.
pub(super) const LARGE_TURN: Duration = Duration::from_secs(30);
/// The most bytes of the replies to a job.
pub(super) const REPLY_MAX: u64 = 1 << 30;
pub(super) const MEMORY: Memory = Memory { free: 1 << 30, total: 1 << 30, foreign: 0 };

/// A worker with one model (a program of up to three processes, or one on the device's own thread) or with both.
pub(super) struct Worker {
    core: Core,
    /// The time of the next event.
    pub(super) now: Instant,
    pub(super) unix_ms: u64,
    /// For the jobs that arrive.
    pub(super) expires_at_ms: Option<u64>,
    pub(super) caller: Option<String>,
    /// How long its passes take.
    pub(super) pass_takes: Duration,
    /// The first consumer of each queue of the model's jobs.
    consumers: Vec<ConsumerId>,
    /// The first consumer of large jobs.
    bulk_consumer: ConsumerId,
    /// The first consumer of the program's jobs, if there is a program beside the model.
    program_consumer: Option<ConsumerId>,
}

impl Worker {
    pub(super) fn new() -> Self {
        Self::with(ExecutorFacts { passes_max: 3, is_serial: false }, &[QueueFacts::own("m")])
    }

    /// A worker whose model's jobs come from these queues.
    pub(super) fn with_queues(queues: &[QueueFacts]) -> Self {
        Self::with(ExecutorFacts { passes_max: 3, is_serial: false }, queues)
    }

    /// A worker of a model with a queue of weight 3 and a further one of weight 1.
    pub(super) fn with_a_further_queue(name: &str) -> Self {
        let own = QueueFacts { weight: NonZeroU32::MIN.saturating_add(2), ..QueueFacts::own("m") };
        Self::with_queues(&[own, QueueFacts { name: name.to_owned(), weight: NonZeroU32::MIN }])
    }

    /// A worker whose model runs on the device's own thread. Only such models need health probes.
    pub(super) fn on_device() -> Self {
        Self::with(ExecutorFacts { passes_max: 2, is_serial: true }, &[QueueFacts::own("m")])
    }

    /// A worker whose model has one pass at a time.
    pub(super) fn one_by_one() -> Self {
        Self::with(ExecutorFacts { passes_max: 1, is_serial: true }, &[QueueFacts::own("m")])
    }

    /// A worker as [`on_device`](Self::on_device), and a second model, a program of up to three processes.
    pub(super) fn beside_a_program() -> Self {
        let thread = ExecutorFacts { passes_max: 2, is_serial: true };
        let program = ExecutorFacts { passes_max: 3, is_serial: false };
        Self::with_executors(&[thread, program], &[QueueFacts::own("m")])
    }

    fn with(executor: ExecutorFacts, queues: &[QueueFacts]) -> Self {
        Self::with_executors(&[executor], queues)
    }

    /// A worker with a model for each executor. The queues are those of the first model.
    fn with_executors(executors: &[ExecutorFacts], queues: &[QueueFacts]) -> Self {
        let start = Instant::now();
        let settings = Settings {
            worker: "w".to_owned(),
            device: "cpu".to_owned(),
            job_limit: Duration::from_secs(600),
            pass_limit: Duration::from_secs(600),
            drain: Duration::from_secs(10),
            poison: PoisonPolicy { suspect_after: 2, crashes_max: 5 },
            reserve: 0,
            resident: 0,
            total: MEMORY.total,
            pressure_percent: 90,
            pressure_tolerated: Duration::from_secs(300),
            bulk_jobs_max: BULK_JOBS_MAX,
            large_turn: LARGE_TURN,
            confirm_max: Duration::from_secs(30),
            executors: executors.to_vec(),
            started_at: start,
            seed: 7,
        };
        let shape = PassShape::default().with(1);
        let model = |executor: usize| ModelFacts {
            name: if executor == 0 { "m".to_owned() } else { "program".to_owned() },
            queues: if executor == 0 { queues.to_vec() } else { vec![QueueFacts::own("program")] },
            larger: None,
            slots_max: NonZeroU16::MAX,
            slots: NonZeroU16::new(64).unwrap(),
            pass_cost_max: 8,
            job_shape: shape,
            reply_max: REPLY_MAX,
            share: NonZeroU32::MIN,
            weights: 0,
            executor: ExecutorIndex(executor),
            probe: shape,
            pass_bytes: Arc::new(|shape| shape.cost as u64),
        };
        let limits = LearnedLimits::new("cpu", MEMORY.total, Default::default());
        let models = (0..executors.len()).map(model).collect();
        let core = Core::new(settings, models, limits, Budget::new(MEMORY.free));
        let mut worker = Self {
            core,
            now: start,
            unix_ms: 1,
            expires_at_ms: None,
            caller: None,
            pass_takes: Duration::from_secs(1),
            consumers: Vec::new(),
            bulk_consumer: ConsumerId(0),
            program_consumer: None,
        };
        let actions =
            worker.apply(Event::SessionOpened(SessionFacts { declares: true, missing: Vec::new() }));
        let first = |queue| first_consumer_of(queue, &actions);
        worker.consumers = (0..queues.len()).map(|at| first(JobQueue::Jobs(QueueIndex(at)))).collect();
        worker.bulk_consumer = first(JobQueue::Bulk);
        worker.program_consumer = actions.iter().find_map(|action| match action {
            Action::Consume { model: PROGRAM, queue: JobQueue::Jobs(_), consumer, .. } => Some(*consumer),
            _ => None,
        });
        worker
    }

    pub(super) fn apply(&mut self, event: Event) -> Vec<Action> {
        self.core.apply(event, Now { at: self.now, unix_ms: self.unix_ms })
    }

    /// A reply queue twice did not confirm a reply.
    pub(super) fn is_silent(&mut self, queue: &str) {
        for _ in 0..2 {
            let outcome =
                PublicationOutcome::Unreachable { destination: queue.to_owned(), why: "did not confirm" };
            self.core.destinations.published(Some(queue), &outcome, self.now);
            self.now += self.core.settings.confirm_max;
        }
    }

    /// A delivery of job `key`. The secret of its withdrawal is the job's number.
    pub(super) fn delivery(key: u64, source: Source, headers: JobHeaders) -> Delivery {
        Delivery {
            job: JobKey(key),
            model: MODEL,
            source,
            channel: CHANNEL,
            tag: DeliveryTag(key),
            fingerprint: Fingerprint(key),
            redelivered: false,
            delivery_count: Some(0),
            id: Some(key.to_string()),
            caller: None,
            withdrawal: Some(Digest::of(&key.to_string())),
            reply_queue: None,
            trace_id: None,
            bytes: 10,
            headers: Some(headers),
            expires_at_ms: None,
            published_ms: None,
        }
    }

    /// A job of so many items arrives and is read.
    pub(super) fn job(&mut self, key: u64, items: u32, source: Source, headers: JobHeaders) {
        self.arrives(key, source, headers);
        self.decoded(key, items);
    }

    /// A job of one item for the program beside the model arrives and is read.
    pub(super) fn job_of_program(&mut self, key: u64) {
        let source = Source::Jobs(QueueIndex(0), self.program_consumer.expect("there is a program"));
        let delivery = Delivery {
            model: PROGRAM,
            channel: ChannelId { model: PROGRAM, number: 0 },
            ..Self::delivery(key, source, JobHeaders::default())
        };
        self.apply(Event::Delivered(Box::new(delivery)));
        self.decoded(key, 1);
    }

    pub(super) fn arrives(&mut self, key: u64, source: Source, headers: JobHeaders) -> Vec<Action> {
        let (expires_at_ms, caller) = (self.expires_at_ms, self.caller.clone());
        let delivery = Delivery { expires_at_ms, caller, ..Self::delivery(key, source, headers) };
        self.apply(Event::Delivered(Box::new(delivery)))
    }

    /// A job was read: it has so many items.
    pub(super) fn decoded(&mut self, key: u64, items: u32) -> Vec<Action> {
        let result = Ok(DecodedJob { items_total: items, costs: vec![1; items as usize] });
        self.apply(Event::Decoded { job: JobKey(key), result })
    }

    /// The first pass that is started when no other event waits.
    pub(super) fn pass(&mut self) -> PassOrder {
        self.passes().into_iter().next().expect("a pass is started")
    }

    /// All passes that are started when no other event waits.
    pub(super) fn passes(&mut self) -> Vec<PassOrder> {
        let actions = self.apply(Event::Idle);
        let orders = actions.into_iter().filter_map(|action| match action {
            Action::Run(order) => Some(order),
            _ => None,
        });
        orders.collect()
    }

    pub(super) fn ends(
        &mut self,
        order: &PassOrder,
        result: PassResult,
        outputs: Vec<Option<usize>>,
    ) -> Vec<Action> {
        self.ends_with(order, result, outputs, MEMORY)
    }

    /// A pass ends; afterwards the device's memory is `memory`.
    pub(super) fn ends_with(
        &mut self,
        order: &PassOrder,
        result: PassResult,
        outputs: Vec<Option<usize>>,
        memory: Memory,
    ) -> Vec<Action> {
        self.apply(Event::PassEnded(PassEnd {
            pass: order.pass,
            result,
            outputs: outputs.into_iter().map(|bytes| bytes.map(OutputSize::inline)).collect(),
            failures: 1,
            took: self.pass_takes,
            memory,
        }))
    }

    /// Bytes that the worker holds more than after its first passes.
    pub(super) fn leaked(&self) -> u64 {
        self.core.memory_status(self.now).leaked
    }

    /// Bytes of them for each answered job.
    pub(super) fn leaked_per_job(&self) -> u64 {
        self.core.memory_status(self.now).leaked_per_job
    }

    /// Lets time pass second by second while a pass is on the device. Returns whether the worker gave the device up.
    pub(super) fn seconds(&mut self, seconds: u64, on_device: OnDevice) -> bool {
        for _ in 0..seconds {
            self.now += Duration::from_secs(1);
            self.tick(on_device);
        }
        self.wants_restart()
    }

    pub(super) fn tick(&mut self, on_device: OnDevice) -> Vec<Action> {
        self.tick_with(Some(on_device))
    }

    /// A second's reading while no pass is on the device.
    pub(super) fn quiet_tick(&mut self) -> Vec<Action> {
        self.tick_with(None)
    }

    fn tick_with(&mut self, on_device: Option<OnDevice>) -> Vec<Action> {
        self.apply(Event::Tick(Reading {
            memory: MEMORY,
            passes: PassBytes::default(),
            lost: None,
            on_device,
            culprit: None,
        }))
    }

    /// When the worker wants to be woken.
    pub(super) fn next_timer(&self) -> Option<Instant> {
        self.core.next_timer()
    }

    /// Lets time pass until the next timer is due.
    pub(super) fn until_next_timer(&mut self) -> Vec<Action> {
        self.now = self.core.next_timer().expect("a timer is set");
        self.apply(Event::Timer)
    }

    pub(super) fn wants_restart(&self) -> bool {
        self.core.wants_restart()
    }

    /// How many jobs the worker wants to hold.
    pub(super) fn wanted(&self) -> Wanted {
        self.core.credit[MODEL.0].wanted(self.core.models[MODEL.0].pass_cost_max)
    }

    pub(super) fn unacked(&self) -> usize {
        self.core.unacked()
    }

    /// How many entries a collection of the core has.
    pub(super) fn size_of(&self, what: &str) -> usize {
        self.core.sizes().find(|size| size.what == what).expect("a collection of this name").entries
    }

    pub(super) fn status(&self) -> Status {
        self.core.status()
    }

    pub(super) fn limits(&self) -> &LearnedLimits {
        self.core.learned_limits()
    }

    /// Jobs that the last session left unacknowledged.
    pub(super) fn unsettled(&self) -> usize {
        self.core.unsettled()
    }

    pub(super) fn is_draining(&self) -> bool {
        self.core.is_draining()
    }

    pub(super) fn write_until(&self, received_at: Instant) -> Instant {
        self.core.write_until(received_at)
    }

    /// The broker confirms the end of the consumers that these actions stop.
    pub(super) fn consumers_end(&mut self, actions: &[Action]) -> Vec<Action> {
        let stopped = actions.iter().filter_map(|action| match action {
            Action::StopConsumer { consumer, .. } => Some(*consumer),
            _ => None,
        });
        stopped.flat_map(|consumer| self.apply(Event::ConsumerEnded { consumer })).collect()
    }

    pub(super) fn source(&self) -> Source {
        self.source_of(QueueIndex(0))
    }

    /// The queue of large jobs.
    pub(super) fn source_of_large(&self) -> Source {
        Source::Bulk(self.bulk_consumer)
    }

    /// Whether further passes of a job follow.
    pub(super) fn goes_on(&self, key: u64) -> bool {
        self.core.jobs.running(JobKey(key)).is_some_and(Running::goes_on)
    }

    /// One of the queues of the model's jobs.
    pub(super) fn source_of(&self, queue: QueueIndex) -> Source {
        Source::Jobs(queue, self.consumers[queue.0])
    }
}

/// Consumers of the model's jobs that these actions start.
pub(super) fn consumers(actions: &[Action]) -> Vec<ConsumerId> {
    let of_jobs = started(actions).filter(|(queue, _)| matches!(queue, JobQueue::Jobs(_)));
    of_jobs.map(|(_, consumer)| consumer).collect()
}

/// The first consumer of a queue among those that these actions start.
fn first_consumer_of(queue: JobQueue, actions: &[Action]) -> ConsumerId {
    started(actions).find(|(of, _)| *of == queue).expect("a consumer of each queue").1
}

/// The consumers that these actions start, with their queues.
pub(super) fn started(actions: &[Action]) -> impl Iterator<Item = (JobQueue, ConsumerId)> {
    actions.iter().filter_map(|action| match action {
        Action::Consume { consumer, queue, .. } => Some((*queue, *consumer)),
        _ => None,
    })
}

/// The jobs that are requeued, with their headers.
pub(super) fn requeued(actions: &[Action]) -> Vec<(JobKey, JobHeaders, Route)> {
    let requeues = actions.iter().filter_map(|action| match action {
        Action::Publish { job, publication: Publication::Requeue { headers, route } } => {
            Some((*job, (**headers).clone(), route.clone()))
        }
        _ => None,
    });
    requeues.collect()
}

pub(super) fn replied(actions: &[Action]) -> Vec<(JobKey, u32, bool)> {
    let replies = actions.iter().filter_map(|action| match action {
        Action::Publish { job, publication: Publication::Reply(run) } => Some((*job, run.items, run.is_last)),
        _ => None,
    });
    replies.collect()
}
