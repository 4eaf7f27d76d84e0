//! The event loop: `select` waits for what happens next, `apply` acts on it.
//!
//! One loop serves one session with the broker. When the session is lost, the jobs in hand go with it (the broker
//! delivers them again), models and device stay, and a new loop starts on a new session.

mod consumers;
mod endings;
mod memory;
mod passes;

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, SelectAll, StreamExt};
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};
use vramq_schemas::JobHeaders;

use crate::admission::Budget;
use crate::amqp::message::Identity;
use crate::amqp::session::{Deliveries, Session};
use crate::amqp::settle::{Burial, Settled, Settlement, Verdict};
use crate::batcher::{Batcher, JobKey, Waiting};
use crate::capacity::Capacity;
use crate::ceiling::Ceilings;
use crate::device::Device;
use crate::device::thread::{DeviceThread, PassEnd};
use crate::drain::Signals;
use crate::finished::Finished;
use crate::job::{Decoded, Received, Refusal};
use crate::model::Model;
use crate::pressure::{Leak, Pressure};
use crate::telemetry::Totals;

use consumers::Consuming;
use endings::{EncodedPart, SentPart};

/// Events that may wait for the loop. Its senders are threads of the pool and of the device, which may block; there
/// are never more events under way than jobs in hand.
const EVENTS_MAX: usize = 1024;

/// The most bytes that the loop decodes or encodes itself, some tens of microseconds' worth; more goes to the pool.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Events that are applied in a row before passes start all the same: a fraction of a millisecond's worth.
const BURST_MAX: usize = 64;

/// How often the device's memory is read.
const MEMORY_INTERVAL: Duration = Duration::from_secs(1);

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
    pub finished: Finished,
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
    /// The device is of no use until the process restarts.
    DeviceLost(String),
}

enum Event {
    Delivery(usize, Option<lapin::Result<Delivery>>),
    Decoded(usize, DecodeResult),
    PassEnded(PassEnd),
    PartEncoded(JobKey, EncodedPart),
    Encoded(Settlement),
    Published(lapin::Result<Published>),
    Broker(Option<lapin::Event>),
    Signal(&'static str),
    MemoryDue,
    OutOfTime,
}

/// What was published and confirmed.
enum Published {
    Settled(Settled),
    /// Some results of a job that goes on here.
    Part(SentPart),
}

/// A job that was understood, and its items; or the delivery and what is wrong with it.
type DecodeResult = Result<(Box<Decoded>, Waiting), Box<(Received, Refusal)>>;

/// Whoever publishes in the loop does it in here: see `Publisher::taken` for why.
type Publishing = FuturesUnordered<Pin<Box<dyn Future<Output = lapin::Result<Published>> + Send>>>;

/// The loop over one session.
struct Loop<'a> {
    host: &'a mut Host,
    session: Session,
    deliveries: SelectAll<Deliveries>,
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
    passes: usize,
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
    memory_due: Interval,
    /// Set once a drain began.
    deadline: Option<Instant>,
}

/// Serves jobs until the session is lost or a drain ends.
pub async fn serve(host: &mut Host, session: Session, signals: &mut Signals) -> Outcome {
    let mut this = Loop::new(host, session);
    let outcome = this.run(signals).await;
    let in_hand = this.jobs_in_hand();
    let Loop { session, host, publishing, .. } = this;
    // Publishes under way are dropped with their confirms: their jobs come again, and replies may then come twice.
    drop(publishing);
    if in_hand > 0 {
        host.totals.handed_back += in_hand as u64;
        tracing::warn!(jobs = in_hand, "jobs in hand go back to the broker");
    }
    session.close().await;
    outcome
}

impl<'a> Loop<'a> {
    fn new(host: &'a mut Host, session: Session) -> Self {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let mut memory_due = tokio::time::interval(MEMORY_INTERVAL);
        memory_due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self {
            deliveries: SelectAll::new(),
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
            passes: 0,
            blocked_since: None,
            short_since: None,
            failed_since_idle: false,
            broker_blocks: false,
            idle_ticks: 0,
            burst: 0,
            memory_due,
            deadline: None,
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
        let deadline = self.deadline;
        let out_of_time = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The loop holds a sender itself, so this never ends.
            Some(event) = self.events.recv() => event,
            Some(published) = self.publishing.next() => Event::Published(published),
            Some((model, delivery)) = self.deliveries.next() => Event::Delivery(model, delivery),
            event = self.session.events.next() => Event::Broker(event),
            name = signals.next() => Event::Signal(name),
            _ = self.memory_due.tick() => Event::MemoryDue,
            () = out_of_time => Event::OutOfTime,
        }
    }

    async fn apply(&mut self, event: Event) -> ControlFlow<Outcome> {
        match event {
            Event::Delivery(model, Some(Ok(delivery))) => self.received(model, Received::now(delivery)),
            Event::Delivery(model, Some(Err(error))) => return lost(&self.host.models[model].name, &error),
            Event::Delivery(model, None) => self.consumer_closed(model).await?,
            Event::Decoded(model, result) => self.decoded(model, result),
            Event::PassEnded(end) => {
                self.passes -= 1;
                self.pass_ended(end)?;
            }
            Event::PartEncoded(key, part) => self.part_encoded(key, part),
            Event::Encoded(settlement) => self.settle(settlement),
            Event::Published(Ok(Published::Part(part))) => self.part_taken(part),
            Event::Published(Ok(Published::Settled(settled))) => self.settled(settled).await?,
            Event::Published(Err(error)) => return lost("publish", &error),
            Event::Broker(event) => self.broker_event(event).await?,
            Event::Signal(name) => self.told_to_stop(name).await?,
            Event::MemoryDue => self.watch_memory().await?,
            Event::OutOfTime => {
                tracing::error!(jobs = self.jobs_in_hand(), "drain deadline passed");
                return ControlFlow::Break(Outcome::Killed);
            }
        }
        if self.deadline.is_some()
            && self.jobs_in_hand() == 0
            && self.consuming.iter().all(Consuming::is_over)
        {
            return ControlFlow::Break(Outcome::Drained);
        }
        ControlFlow::Continue(())
    }

    fn received(&mut self, model_index: usize, received: Received) {
        self.in_hand[model_index] += 1;
        let model = Arc::clone(&self.host.models[model_index]);
        if received.delivery.redelivered && self.host.finished.contains(received.fingerprint()) {
            tracing::info!(job = received.id(), "answered before, acknowledged without running");
            return self.settle(Settlement { received, model, verdict: Verdict::Forget });
        }
        let key = self.next_key;
        self.next_key += 1;
        if model.engine.takes_inputs_as_they_come() && received.delivery.data.len() <= INLINE_BYTES_MAX {
            return self.decoded(model_index, decode(received, &model, key));
        }
        let sender = self.sender.clone();
        self.host.pool.spawn(move || {
            // An `Err` means that the loop ended: the broker has the job again.
            let _ = sender.blocking_send(Event::Decoded(model_index, decode(received, &model, key)));
        });
    }

    fn decoded(&mut self, model: usize, result: DecodeResult) {
        match result {
            Ok((job, waiting)) if job.is_complete() => self.finish(model, job, waiting.key),
            Ok((job, waiting)) => {
                self.jobs.insert(waiting.key, (model, job));
                self.batchers[model].push(waiting);
            }
            Err(refused) => {
                let (received, refusal) = *refused;
                let model = Arc::clone(&self.host.models[model]);
                let verdict = Verdict::Bury(Box::new(Burial::of(refusal)));
                self.settle(Settlement { received, model, verdict });
            }
        }
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
            Some(lapin::Event::Error(error)) => return lost("connection", &error),
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

    async fn drain(&mut self) -> ControlFlow<Outcome> {
        self.deadline = Some(Instant::now() + self.host.drain);
        self.host.draining = true;
        self.follow_capacity().await
    }
}

/// Reads a job and makes its items ready. CPU work.
fn decode(received: Received, model: &Model, key: JobKey) -> DecodeResult {
    received.decode(model).map(|(decoded, items)| {
        let waiting = Waiting { items, ..waits(key, &decoded.headers) };
        (Box::new(decoded), waiting)
    })
}

/// How a job waits, without its items.
fn waits(key: JobKey, headers: &JobHeaders) -> Waiting {
    Waiting {
        key,
        hint: headers.batch_hint,
        exclusive: headers.exclusive,
        tried_at_ms: headers.history.first().map_or(0, |attempt| attempt.at_ms),
        isolated: false,
        items: VecDeque::new(),
    }
}

fn lost(what: &str, error: &lapin::Error) -> ControlFlow<Outcome> {
    ControlFlow::Break(Outcome::Lost(format!("{what}: {error}")))
}
