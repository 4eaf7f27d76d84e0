//! The event loop: `select` waits for what happens next, `apply` acts on it.
//!
//! One loop serves one session with the broker. When the session is lost, the jobs in hand go with it (the broker
//! delivers them again), models and device stay, and a new loop starts on a new session.

mod consumers;
mod deliveries;
mod endings;
mod leaving;
mod memory;
mod passes;
mod queues;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, SelectAll, StreamExt};
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use crate::admission::Budget;
use crate::amqp::message::Identity;
use crate::amqp::publish::BrokerLimits;
use crate::amqp::session::{Deliveries, Session, Waiting, consumer_timeout, message_size_max};
use crate::amqp::settle::{Settled, Settlement};
use crate::batcher::{Batcher, JobKey};
use crate::capacity::Capacity;
use crate::ceiling::Ceilings;
use crate::device::Device;
use crate::device::thread::{DeviceThread, PassEnd};
use crate::disposition::Disposition;
use crate::drain::Signals;
use crate::health::Health;
use crate::job::{Decoded, Received};
use crate::model::Model;
use crate::pressure::{Leak, Pressure};
use crate::remembered::Remembered;
use crate::suspicion::{Losses, Patience};
use crate::telemetry::Totals;

use consumers::Consuming;
use deliveries::DecodeResult;
use endings::{EncodedPart, SentPart};

/// Events that may wait for the loop. Its senders are threads of the pool and of the device, which may block; there
/// are never more events under way than jobs in hand.
const EVENTS_MAX: usize = 1024;

/// The most bytes that the loop decodes or encodes itself, some tens of microseconds' worth; more goes to the pool.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Events that are applied in a row before passes start all the same: a fraction of a millisecond's worth.
const BURST_MAX: usize = 64;

/// How often the device's memory is read, suspects are asked for, and the time of jobs is looked at.
const TICK: Duration = Duration::from_secs(1);

/// What outlives a session.
#[derive(Debug)]
pub struct Host {
    pub identity: Arc<Identity>,
    pub models: Vec<Arc<Model>>,
    /// The slots of each model.
    pub capacities: Vec<Capacity>,
    pub device: Arc<dyn Device>,
    pub thread: DeviceThread,
    /// Failed passes that the loop has heard of from the thread.
    pub failures_known: u64,
    pub budget: Budget,
    /// Bytes that this process held of the device when it started: the weights.
    pub resident: u64,
    /// Bytes of the device that stay free.
    pub reserve: u64,
    pub ceilings: Ceilings,
    pub pressure: Pressure,
    pub leak: Leak,
    /// Threads for decoding, tokenising and encoding.
    pub pool: Arc<rayon::ThreadPool>,
    /// Messages that were settled in sessions that were lost: their acks may never have arrived, even those that were sent.
    pub finished: Remembered,
    /// Messages that could be placed nowhere.
    pub given_back: Remembered,
    pub losses: Losses,
    pub limits: BrokerLimits,
    pub patience: Patience,
    pub health: Health,
    /// How long a job may be in hand, and a pass may take. The broker may ask for less of the first.
    pub job_limit: Duration,
    pub pass_limit: Duration,
    pub totals: Totals,
    /// How long a drain may take.
    pub drain: Duration,
    /// Asked to stop: no session is opened any more.
    pub draining: bool,
    /// Stops in order to be started again.
    pub restarting: bool,
}

impl Host {
    /// What the budget is when nobody else holds anything.
    fn budget_max(&self) -> u64 {
        self.device.memory().total.saturating_sub(self.resident).saturating_sub(self.reserve)
    }
}

/// Why the loop ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Stopped, and nothing is left in hand.
    Drained,
    /// Asked to stop, and out of time or asked twice.
    Killed,
    /// The session is of no use any more.
    Lost(String),
}

enum Event {
    Delivery(usize, Option<lapin::Result<Delivery>>),
    /// The broker sends no more jobs of a model; the stream of those that it sent ends by itself.
    Cancelled(lapin::Result<()>),
    /// What waits at the broker.
    Looked(usize, lapin::Result<Waiting>),
    /// A suspect, if there still was one.
    Suspect(usize, lapin::Result<Option<Delivery>>),
    Decoded(usize, DecodeResult),
    PassEnded(PassEnd),
    PartEncoded(JobKey, EncodedPart),
    Encoded(Settlement),
    Published(lapin::Result<Published>),
    Broker(Option<lapin::Event>),
    Signal(&'static str),
    Tick,
    /// A drain is half over.
    HalfTime,
    OutOfTime,
}

/// What was published and confirmed.
enum Published {
    Settled(Settled),
    /// Some results of a job that goes on here.
    Part(SentPart),
}

/// Whoever publishes in the loop does it in here: see `Publisher::taken` for why.
type Publishing = FuturesUnordered<Pin<Box<dyn Future<Output = lapin::Result<Published>> + Send>>>;

/// Answers of the broker about a model.
type Asked<T> = FuturesUnordered<Pin<Box<dyn Future<Output = (usize, lapin::Result<T>)> + Send>>>;

/// The loop over one session.
struct Loop<'a> {
    host: &'a mut Host,
    session: Session,
    deliveries: SelectAll<Deliveries>,
    /// Consumers that are told to stop.
    cancelling: Asked<()>,
    /// What waits.
    looking: Asked<Waiting>,
    /// A suspect.
    fetching: Asked<Option<Delivery>>,
    /// The model whose suspects are run, and nothing else.
    quiet_for: Option<usize>,
    /// When the first of them was asked for.
    quiet_since: Option<Instant>,
    /// When suspects may be looked for again.
    look_at: Instant,
    /// Of each model: looks at its queue in a row at which jobs waited, and none had been delivered.
    starved: Vec<u32>,
    /// Of each model.
    consuming: Vec<Consuming>,
    sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
    publishing: Publishing,
    /// Jobs whose items wait or run.
    jobs: HashMap<JobKey, (usize, Box<Decoded>)>,
    batchers: Vec<Batcher>,
    next_key: JobKey,
    /// Deliveries of each model that are neither acked nor given back.
    in_hand: Vec<usize>,
    /// Fingerprints of the same, each with the number of such messages.
    holding: HashMap<u64, u32>,
    /// Messages that were settled in this session.
    settled: Remembered,
    passes: usize,
    /// Jobs whose pass failed, and what becomes of them if the device is well.
    accused: Vec<(JobKey, Disposition)>,
    /// The model whose canary is to run as soon as no other pass does.
    canary: Option<usize>,
    /// The last one that was sent.
    canary_model: usize,
    /// No pass starts any more: all jobs go on elsewhere.
    leaving: bool,
    /// The device is of no use any more.
    device_gone: bool,
    /// Since when items wait for memory.
    blocked_since: Option<Instant>,
    /// Since when other processes hold what the next pass needs.
    short_since: Option<Instant>,
    /// A pass failed, and others may be under way that were made before that was known.
    failed_since_idle: bool,
    /// The broker takes no publishes, and answers nothing.
    broker_blocks: bool,
    /// Ticks of the memory's clock without a pass.
    idle_ticks: u32,
    /// Events applied since passes were last started.
    burst: usize,
    tick: Interval,
    /// Set once a drain began; until `half_time` jobs are finished, from then on handed over.
    deadline: Option<Instant>,
    half_time: Option<Instant>,
}

/// Serves jobs until the session is lost or a drain ends.
pub async fn serve(host: &mut Host, session: Session, signals: &mut Signals) -> Outcome {
    let mut this = Loop::new(host, session);
    let outcome = this.run(signals).await;
    let in_hand = this.jobs_in_hand();
    if matches!(outcome, Outcome::Lost(_)) {
        this.remember_settled();
    }
    let Loop { session, host, publishing, .. } = this;
    if in_hand > 0 {
        host.totals.handed_back += in_hand as u64;
        // Publishes under way are given up with their confirms: their jobs come again, and replies may then come twice.
        tracing::warn!(jobs = in_hand, unconfirmed = publishing.len(), "jobs in hand go back to the broker");
    }
    drop(publishing);
    if outcome == Outcome::Drained {
        session.flush().await;
    }
    session.close().await;
    outcome
}

impl<'a> Loop<'a> {
    fn new(host: &'a mut Host, session: Session) -> Self {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        host.health.forget_canary(std::time::Instant::now());
        let leaving = host.health.is_sick();
        Self {
            deliveries: SelectAll::new(),
            cancelling: FuturesUnordered::new(),
            looking: FuturesUnordered::new(),
            fetching: FuturesUnordered::new(),
            quiet_for: None,
            quiet_since: None,
            look_at: Instant::now(),
            starved: vec![0; host.models.len()],
            consuming: host.models.iter().map(|_| Consuming::No).collect(),
            batchers: host.models.iter().map(|model| Batcher::new(model.limits)).collect(),
            in_hand: vec![0; host.models.len()],
            host,
            session,
            sender,
            events,
            publishing: FuturesUnordered::new(),
            jobs: HashMap::new(),
            next_key: 0,
            settled: Remembered::default(),
            passes: 0,
            holding: HashMap::new(),
            accused: Vec::new(),
            canary: None,
            canary_model: 0,
            leaving,
            device_gone: false,
            blocked_since: None,
            short_since: None,
            failed_since_idle: false,
            broker_blocks: false,
            idle_ticks: 0,
            burst: 0,
            tick,
            deadline: None,
            half_time: None,
        }
    }

    async fn run(&mut self, signals: &mut Signals) -> Outcome {
        if let ControlFlow::Break(outcome) = self.follow_capacity().await {
            return outcome;
        }
        tracing::info!(slots = ?self.host.capacities.iter().map(Capacity::slots).collect::<Vec<_>>(), "consuming");
        loop {
            let event = self.next_event(signals).await;
            if let ControlFlow::Break(outcome) = self.apply(event).await {
                return outcome;
            }
        }
    }

    /// Keeps what the next session has to know of this one, which is lost.
    fn remember_settled(&mut self) {
        // Those whose ack was under way.
        while let Some(Some(published)) = self.publishing.next().now_or_never() {
            if let Ok(Published::Settled(settled)) = published {
                self.let_go(&settled);
            }
        }
        self.host.losses.note(std::time::Instant::now());
        self.host.finished.absorb(std::mem::take(&mut self.settled));
        // One like a settled one is still in hand: which of them comes again, nobody can tell.
        self.holding.keys().for_each(|message| self.host.finished.forget(*message));
    }

    fn jobs_in_hand(&self) -> usize {
        self.in_hand.iter().sum()
    }

    /// The next event. Passes start when nothing else is at hand: what has just come in shares a pass then, and a
    /// burst of small jobs costs the device's thread one call rather than one each.
    async fn next_event(&mut self, signals: &mut Signals) -> Event {
        if self.burst < BURST_MAX
            && let Some(event) = self.frequent().now_or_never()
        {
            self.burst += 1;
            return event;
        }
        self.burst = 0;
        self.start_passes();
        self.select(signals).await
    }

    /// Waits for what happens all the time; what is nearest to its end first. A burst looks at nothing else, which saves
    /// it from asking everybody else each time. Cancel-safe, as each of its arms is.
    async fn frequent(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(published) = self.publishing.next() => Event::Published(published),
            Some(event) = self.events.recv() => event,
            Some((model, delivery)) = self.deliveries.next() => Event::Delivery(model, delivery),
            else => std::future::pending().await,
        }
    }

    /// Waits for what happens next. Cancel-safe, as each of its arms is.
    async fn select(&mut self, signals: &mut Signals) -> Event {
        let (half_time, deadline) = (reached(self.half_time), reached(self.deadline));
        tokio::select! {
            // The loop holds a sender itself, so this never ends.
            Some(event) = self.events.recv() => event,
            Some(published) = self.publishing.next() => Event::Published(published),
            Some((model, delivery)) = self.deliveries.next() => Event::Delivery(model, delivery),
            event = self.session.events.next() => Event::Broker(event),
            name = signals.next() => Event::Signal(name),
            Some((_, told)) = self.cancelling.next() => Event::Cancelled(told),
            Some((model, waiting)) = self.looking.next() => Event::Looked(model, waiting),
            Some((model, fetched)) = self.fetching.next() => Event::Suspect(model, fetched),
            _ = self.tick.tick() => Event::Tick,
            () = half_time => Event::HalfTime,
            () = deadline => Event::OutOfTime,
        }
    }

    async fn apply(&mut self, event: Event) -> ControlFlow<Outcome> {
        match event {
            Event::Delivery(model, Some(Ok(delivery))) => {
                self.received(model, Received::now(delivery, false));
            }
            Event::Delivery(_, Some(Err(error))) => return self.lost("consumer", &error),
            Event::Suspect(model, Ok(Some(delivery))) => {
                self.received(model, Received::now(delivery, true));
            }
            Event::Suspect(_, Ok(None)) => self.no_more_suspects().await?,
            Event::Cancelled(Ok(())) => {}
            Event::Cancelled(Err(error)) => return self.lost("stop a consumer", &error),
            Event::Looked(model, Ok(waiting)) => self.looked(model, waiting).await?,
            Event::Suspect(_, Err(error)) | Event::Looked(_, Err(error)) => {
                return self.lost("look at the queues", &error);
            }
            Event::Delivery(model, None) => self.consumer_closed(model).await?,
            Event::Decoded(model, result) => self.decoded(model, result),
            Event::PassEnded(end) => {
                self.passes -= 1;
                self.pass_ended(end).await?;
            }
            Event::PartEncoded(key, part) => self.part_encoded(key, part),
            Event::Encoded(settlement) => self.settle(settlement),
            Event::Published(Ok(Published::Part(part))) => self.part_taken(part),
            Event::Published(Ok(Published::Settled(settled))) => self.settled(settled).await?,
            Event::Published(Err(error)) => return self.lost("publish", &error),
            Event::Broker(event) => self.broker_event(event).await?,
            Event::Signal(name) => self.told_to_stop(name).await?,
            Event::Tick => self.tick().await?,
            Event::HalfTime => self.hand_over_all(),
            Event::OutOfTime => {
                tracing::error!(jobs = self.jobs_in_hand(), "drain deadline passed");
                return ControlFlow::Break(Outcome::Killed);
            }
        }
        if self.deadline.is_some()
            && self.jobs_in_hand() == 0
            && self.consuming.iter().all(Consuming::is_over)
            && self.fetching.is_empty()
        {
            return ControlFlow::Break(Outcome::Drained);
        }
        ControlFlow::Continue(())
    }

    async fn told_to_stop(&mut self, signal: &str) -> ControlFlow<Outcome> {
        if std::mem::take(&mut self.host.restarting) {
            tracing::info!(signal, "told to stop while draining for a restart: there will be none");
            return ControlFlow::Continue(());
        }
        if self.deadline.is_some() {
            tracing::error!(signal, jobs = self.jobs_in_hand(), "asked twice, stopping at once");
            return ControlFlow::Break(Outcome::Killed);
        }
        tracing::info!(signal, jobs = self.jobs_in_hand(), seconds = self.host.drain.as_secs(), "draining");
        self.drain().await
    }

    async fn broker_event(&mut self, event: Option<lapin::Event>) -> ControlFlow<Outcome> {
        match event {
            Some(lapin::Event::Error(error)) => return self.lost("connection", &error),
            Some(lapin::Event::ConnectionBlocked(reason)) => {
                self.broker_blocks = true;
                tracing::warn!(reason, "the broker blocks publishers: replies wait");
            }
            Some(lapin::Event::ConnectionUnblocked) => {
                self.broker_blocks = false;
                tracing::info!("the broker takes messages again");
                return self.follow_capacity().await;
            }
            Some(_) => {}
            None => return ControlFlow::Break(Outcome::Lost("connection closed".to_owned())),
        }
        ControlFlow::Continue(())
    }

    async fn tick(&mut self) -> ControlFlow<Outcome> {
        self.watch_device().await?;
        self.watch_memory().await?;
        self.watch_time().await?;
        self.probe();
        if self.is_quiet_for_too_long() {
            self.no_more_suspects().await?;
        }
        self.look_at_queues();
        ControlFlow::Continue(())
    }

    fn lost(&mut self, what: &str, error: &lapin::Error) -> ControlFlow<Outcome> {
        if let Some(timeout) = consumer_timeout(error) {
            self.learn_timeout(timeout);
        }
        if let Some(bytes) = message_size_max(error) {
            tracing::warn!(
                bytes,
                "the broker takes no message larger than this: larger ones go to the dead letters"
            );
            self.host.limits.body_max = bytes;
        }
        ControlFlow::Break(Outcome::Lost(format!("{what}: {error}")))
    }
}

/// Waits for a moment, if there is one.
async fn reached(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
