//! A live session: its connections, and the futures of all pending operations on them.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt as _};
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::{Interval, MissedTickBehavior};
use vramq_core::event::QueueCounts;
use vramq_core::event::Source;
use vramq_core::ids::{JobKey, ModelIndex, RequestId};

use crate::broker::aux_channel::AuxChannelState;
use crate::broker::commands::Responder;
use crate::broker::control_plane::{ControlPlane, ControlRequest};
use crate::broker::model_channel::{ConsumeError, Deliveries};
use crate::broker::publisher::PublishError;
use crate::broker::publisher_rules::PublisherRules;
use crate::broker::session::{Session, Side};
use crate::event_loop::Completion;
use crate::observability::status_reporter::StatusReporter;
use crate::perform::publications::Sent;

/// How often the device is read and the core looks at the time.
const TICK: Duration = Duration::from_secs(1);

/// Futures that give answers in any order.
pub(crate) type Pending<T> = FuturesUnordered<Pin<Box<dyn Future<Output = T> + Send>>>;

/// A consumer's delivery, or `None` for its end.
type Delivered = (ModelIndex, Source, Option<lapin::Result<Delivery>>);

/// Something that happened.
pub(crate) enum Input {
    Completed(Completion),
    Delivered(ModelIndex, Source, Option<lapin::Result<Delivery>>),
    /// A consumer was started, or cannot be.
    Started(ModelIndex, Result<Deliveries, ConsumeError>),
    /// A consumer was stopped; its stream ends by itself.
    Stopped(lapin::Result<()>),
    Counted(ModelIndex, lapin::Result<QueueCounts>),
    /// A job of the quarantine, if there was one.
    Fetched(ModelIndex, lapin::Result<Option<Delivery>>),
    Published(JobKey, Result<Sent, PublishError>),
    Acked(ModelIndex, Vec<bool>),
    GivenBack(JobKey, bool),
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
    deliveries: SelectAll<BoxStream<'static, Delivered>>,
    pub(crate) starting: Pending<(ModelIndex, Result<Deliveries, ConsumeError>)>,
    pub(crate) stopping: Pending<lapin::Result<()>>,
    pub(crate) counting: Pending<(ModelIndex, lapin::Result<QueueCounts>)>,
    pub(crate) fetching: Pending<(ModelIndex, lapin::Result<Option<Delivery>>)>,
    /// Every publish about a job is in here: see `Publisher::publish` for why.
    pub(crate) publishing: Pending<(JobKey, Result<Sent, PublishError>)>,
    pub(crate) acking: Pending<(ModelIndex, Vec<bool>)>,
    pub(crate) giving_back: Pending<(JobKey, bool)>,
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
        let control_plane = ControlPlane::open(session.take_aux(aux_state), rules, reporter);
        Self {
            session,
            control_plane,
            requests: HashMap::new(),
            last_request: 0,
            deliveries: SelectAll::new(),
            starting: FuturesUnordered::new(),
            stopping: FuturesUnordered::new(),
            counting: FuturesUnordered::new(),
            fetching: FuturesUnordered::new(),
            publishing: FuturesUnordered::new(),
            acking: FuturesUnordered::new(),
            giving_back: FuturesUnordered::new(),
            tick,
        }
    }

    /// Takes deliveries of a consumer from now on.
    pub(crate) fn add_consumer(&mut self, model: ModelIndex, deliveries: Deliveries) {
        let stream = deliveries.map(move |(source, delivery)| (model, source, delivery));
        self.deliveries.push(stream.boxed());
    }

    /// Keeps a command until it is answered.
    pub(crate) fn add_request(&mut self, responder: Responder) -> RequestId {
        self.last_request += 1;
        let request = RequestId(self.last_request);
        self.requests.insert(request, responder);
        request
    }

    /// Waits for what happens all the time; what is nearest to its end first. Cancel-safe, as each of its arms is.
    pub(crate) async fn next_frequent(&mut self, completed: &mut mpsc::Receiver<Completion>) -> Input {
        tokio::select! {
            biased;
            Some((model, sent)) = self.acking.next() => Input::Acked(model, sent),
            Some((job, sent)) = self.publishing.next() => Input::Published(job, sent),
            Some(completion) = completed.recv() => Input::Completed(completion),
            Some((model, source, delivery)) = self.deliveries.next() => {
                Input::Delivered(model, source, delivery)
            }
            else => std::future::pending().await,
        }
    }

    /// Waits for what happens next. Cancel-safe, as each of its arms is.
    pub(crate) async fn next(&mut self) -> Input {
        tokio::select! {
            Some((model, sent)) = self.acking.next() => Input::Acked(model, sent),
            Some((job, sent)) = self.publishing.next() => Input::Published(job, sent),
            Some((model, source, delivery)) = self.deliveries.next() => {
                Input::Delivered(model, source, delivery)
            }
            // Its streams end with an item that says so.
            Some((side, event)) = self.session.events.next() => Input::Broker(side, event),
            request = self.control_plane.next() => Input::Request(request),
            Some((model, started)) = self.starting.next() => Input::Started(model, started),
            Some(stopped) = self.stopping.next() => Input::Stopped(stopped),
            Some((model, counts)) = self.counting.next() => Input::Counted(model, counts),
            Some((model, fetched)) = self.fetching.next() => Input::Fetched(model, fetched),
            Some((job, sent)) = self.giving_back.next() => Input::GivenBack(job, sent),
            _ = self.tick.tick() => Input::Tick,
        }
    }
}
