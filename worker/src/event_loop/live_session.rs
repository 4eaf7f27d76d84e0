//! A live session: its connections, and the futures of all pending operations on them.

use std::collections::HashMap;
use std::num::NonZeroU16;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt as _};
use lapin::Channel;
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use vramq_amqp::UnknownOutcome;
use vramq_core::action::JobQueue;
use vramq_core::ids::{ChannelId, ConsumerId, JobKey, ModelIndex, QueueIndex, RequestId};

use super::completion::{Completion, Sent};
use super::session_consumers::{SessionConsumers, StopTime};
use crate::broker::aux_channel::AuxChannelState;
use crate::broker::commands::Responder;
use crate::broker::control_plane::{ControlPlane, ControlRequest};
use crate::broker::job_channel::{JobChannel, QueueError};
use crate::broker::model_channels::{ConsumeError, Counted, Delivered, Deliveries, StartedConsumer};
use crate::broker::session::{Session, Side};
use crate::broker::silent_queues::SilentQueues;
use crate::observability::status_reporter::StatusReporter;
use crate::publishers::PublisherRules;

/// How often the device is read and the core checks its time limits.
const TICK: Duration = Duration::from_secs(1);

/// Futures that complete in any order.
pub(crate) type Pending<T> = FuturesUnordered<Pin<Box<dyn Future<Output = T> + Send>>>;

/// A job from the quarantine, if there was one.
type Quarantined = Result<Option<(Arc<JobChannel>, Delivery)>, QueueError>;

/// Something that happened.
pub(crate) enum Input {
    Completed(Completion),
    Delivered(ModelIndex, Delivered),
    /// A consumer was started, or cannot be.
    Started(ModelIndex, JobQueue, ConsumerId, Result<StartedConsumer, ConsumeError>),
    /// A consumer was stopped; its stream ends by itself.
    Stopped(ModelIndex, JobQueue, lapin::Result<()>),
    Counted(ModelIndex, Result<Counted, QueueError>),
    /// The answer to looking for a further queue: a channel to consume it, or why it cannot be consumed.
    LookedFor(ModelIndex, QueueIndex, Result<Channel, String>),
    QuarantineTaken(ModelIndex, Quarantined),
    Published(JobKey, Result<Sent, UnknownOutcome>),
    Acked(ChannelId, Vec<bool>),
    Nacked(JobKey, bool),
    /// What happened to a connection; `None` if it ended.
    Broker(Side, Option<lapin::Event>),
    Request(ControlRequest),
    Signal(&'static str),
    Tick,
    Timer,
}

/// A session that is being served.
pub(crate) struct LiveSession {
    pub(crate) session: Session,
    pub(crate) control_plane: ControlPlane,
    /// Commands that wait for an answer.
    pub(crate) requests: HashMap<RequestId, Responder>,
    last_request: u64,
    deliveries: SelectAll<BoxStream<'static, (ModelIndex, Delivered)>>,
    pub(crate) starting: Pending<(ModelIndex, JobQueue, ConsumerId, Result<StartedConsumer, ConsumeError>)>,
    consumers: SessionConsumers<Arc<JobChannel>>,
    pub(crate) stopping: Pending<(ModelIndex, JobQueue, lapin::Result<()>)>,
    counting: Pending<(ModelIndex, Result<Counted, QueueError>)>,
    looking: Pending<(ModelIndex, QueueIndex, Result<Channel, String>)>,
    taking: Pending<(ModelIndex, Quarantined)>,
    /// Must contain every publish about a job: `ConfirmedPublisher` explains why.
    pub(crate) publishing: Pending<(JobKey, Result<Sent, UnknownOutcome>)>,
    /// Progress on its way. Nothing waits for it but other progress.
    pub(crate) progress: Pending<()>,
    pub(crate) acking: Pending<(ChannelId, Vec<bool>)>,
    pub(crate) nacking: Pending<(JobKey, bool)>,
    tick: Interval,
}

impl LiveSession {
    pub(crate) fn new(
        mut session: Session,
        aux_state: &Arc<AuxChannelState>,
        rules: Arc<PublisherRules>,
        reporter: Arc<StatusReporter>,
    ) -> Self {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (plan, channels) = (session.plan(), session.take_aux(aux_state));
        let control_plane = ControlPlane::open(channels, plan, rules, reporter);
        Self {
            session,
            control_plane,
            requests: HashMap::new(),
            last_request: 0,
            deliveries: SelectAll::new(),
            starting: FuturesUnordered::new(),
            consumers: SessionConsumers::default(),
            stopping: FuturesUnordered::new(),
            counting: FuturesUnordered::new(),
            looking: FuturesUnordered::new(),
            taking: FuturesUnordered::new(),
            publishing: FuturesUnordered::new(),
            progress: FuturesUnordered::new(),
            acking: FuturesUnordered::new(),
            nacking: FuturesUnordered::new(),
            tick,
        }
    }

    /// Asks the broker to start a consumer. The answer comes as [`Input::Started`], for [`consumer_started`](Self::consumer_started).
    pub(crate) fn start_consumer(
        &mut self,
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
        prefetch: NonZeroU16,
        hold_max: Duration,
    ) {
        let consume = self.session.channels(model).consume(queue, consumer, prefetch, hold_max);
        self.consumers.add(consumer);
        self.starting.push(Box::pin(async move { (model, queue, consumer, consume.await) }));
    }

    /// Stops a consumer: now, or as soon as it has started.
    pub(crate) fn stop_consumer(&mut self, model: ModelIndex, queue: JobQueue, consumer: ConsumerId) {
        if let StopTime::Now(channel) = self.consumers.stop(consumer) {
            self.stop_on(channel, model, queue, consumer);
        }
    }

    fn stop_on(
        &mut self,
        channel: Arc<JobChannel>,
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
    ) {
        let stop = self.session.channels(model).stop(consumer, channel);
        self.stopping.push(Box::pin(async move { (model, queue, stop.await) }));
    }

    /// A consumer has started, or could not.
    pub(crate) fn consumer_started(
        &mut self,
        model: ModelIndex,
        queue: JobQueue,
        consumer: ConsumerId,
        started: Option<StartedConsumer>,
    ) {
        let Some((channel, deliveries)) = started else { return self.consumer_ended(consumer) };
        self.add_consumer(model, deliveries);
        if let Some(channel) = self.consumers.started(consumer, channel) {
            self.stop_on(channel, model, queue, consumer);
        }
    }

    /// A consumer has ended, or could not be started.
    pub(crate) fn consumer_ended(&mut self, consumer: ConsumerId) {
        self.consumers.ended(consumer);
    }

    /// Takes deliveries of a consumer from now on.
    fn add_consumer(&mut self, model: ModelIndex, deliveries: Deliveries) {
        self.deliveries.push(deliveries.map(move |delivered| (model, delivered)).boxed());
    }

    /// Asks the broker how many messages wait for a model. The answer comes as [`Input::Counted`].
    pub(crate) fn count_queues(&mut self, model: ModelIndex) {
        let count = self.session.channels(model).count();
        self.counting.push(Box::pin(async move { (model, count.await) }));
    }

    /// Looks for a further queue, on a new channel. The answer comes as [`Input::LookedFor`].
    pub(crate) fn look_for_queue(&mut self, model: ModelIndex, queue: QueueIndex, silent: &SilentQueues) {
        let look = self.session.look_for(model, queue, silent);
        self.looking.push(Box::pin(async move { (model, queue, look.await) }));
    }

    /// Takes one job from a model's quarantine. The answer comes as [`Input::QuarantineTaken`].
    pub(crate) fn take_quarantined(&mut self, model: ModelIndex) {
        let take = self.session.channels(model).take_quarantined();
        self.taking.push(Box::pin(async move { (model, take.await) }));
    }

    /// Keeps a command until it is answered.
    pub(crate) fn add_request(&mut self, responder: Responder) -> RequestId {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        self.requests.insert(request, responder);
        request
    }

    /// Publishes the progress that may go out now.
    pub(crate) fn start_progress(&mut self) {
        while let Some(publishing) = self.session.publisher.next_progress() {
            self.progress.push(Box::pin(publishing));
        }
    }

    /// Waits for the next frequent input, preferring the steps closest to a job's end. Cancel-safe, as each of its arms is.
    pub(crate) async fn next_frequent(&mut self, completed: &mut mpsc::Receiver<Completion>) -> Input {
        loop {
            return tokio::select! {
                biased;
                // First, because nothing else polls it in a burst. It may come after later replies all the same.
                Some(()) = self.progress.next() => {
                    self.start_progress();
                    continue;
                }
                Some((channel, sent)) = self.acking.next() => Input::Acked(channel, sent),
                Some((job, sent)) = self.publishing.next() => Input::Published(job, sent),
                Some(completion) = completed.recv() => Input::Completed(completion),
                Some((model, delivered)) = self.deliveries.next() => Input::Delivered(model, delivered),
                else => std::future::pending().await,
            };
        }
    }

    /// Waits for what happens next. Cancel-safe, as each of its arms is.
    pub(crate) async fn next(&mut self) -> Input {
        loop {
            return tokio::select! {
                Some(()) = self.progress.next() => {
                    self.start_progress();
                    continue;
                }
                Some((channel, sent)) = self.acking.next() => Input::Acked(channel, sent),
                Some((job, sent)) = self.publishing.next() => Input::Published(job, sent),
                Some((model, delivered)) = self.deliveries.next() => Input::Delivered(model, delivered),
                // Its streams end with an item that says so.
                Some((side, event)) = self.session.events.next() => Input::Broker(side, event),
                request = self.control_plane.next() => Input::Request(request),
                Some((model, queue, consumer, started)) = self.starting.next() => Input::Started(model, queue, consumer, started),
                Some((model, queue, stopped)) = self.stopping.next() => Input::Stopped(model, queue, stopped),
                Some((model, counts)) = self.counting.next() => Input::Counted(model, counts),
                Some((model, queue, found)) = self.looking.next() => Input::LookedFor(model, queue, found),
                Some((model, taken)) = self.taking.next() => Input::QuarantineTaken(model, taken),
                Some((job, sent)) = self.nacking.next() => Input::Nacked(job, sent),
                _ = self.tick.tick() => Input::Tick,
            };
        }
    }
}
