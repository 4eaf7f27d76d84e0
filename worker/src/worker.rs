//! The event loop: `select` waits for what happens next, `apply` acts on it.
//!
//! One loop serves one session with the broker. When the session is lost, the jobs in hand go with it (the broker
//! delivers them again), models and device stay, and a new loop starts on a new session.

mod endings;
mod passes;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, Stream, StreamExt};
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::Instant;
use vramq_schemas::JobHeaders;

use crate::admission::Budget;
use crate::amqp::message::Identity;
use crate::amqp::session::Session;
use crate::amqp::settle::{Settled, Settlement, Verdict};
use crate::batcher::{Batcher, JobKey, Waiting};
use crate::device::thread::{DeviceThread, PassEnd};
use crate::drain::Signals;
use crate::finished::Finished;
use crate::job::{Decoded, Received, Refusal};
use crate::model::Model;
use crate::telemetry::Totals;

/// Events that may wait for the loop. Its senders are threads of the pool and of the device, which may block; there
/// are never more events under way than jobs in hand.
const EVENTS_MAX: usize = 1024;

/// The most bytes that the loop decodes or encodes itself, some tens of microseconds' worth; more goes to the pool.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Events that are applied in a row before passes start all the same: a fraction of a millisecond's worth.
const BURST_MAX: usize = 64;

/// What outlives a session.
#[derive(Debug)]
pub struct Host {
    pub identity: Arc<Identity>,
    pub models: Vec<Arc<Model>>,
    pub device: DeviceThread,
    pub device_name: String,
    pub budget: Budget,
    /// Threads for decoding, tokenising and encoding.
    pub pool: Arc<rayon::ThreadPool>,
    pub finished: Finished,
    pub totals: Totals,
    /// How long a drain may take.
    pub drain: Duration,
    /// Asked to stop: no session is opened any more.
    pub draining: bool,
}

/// Why the loop ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Asked to stop, and nothing is left in hand.
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
    Encoded(Settlement),
    Settled(lapin::Result<Settled>),
    Broker(Option<lapin::Event>),
    Signal(&'static str),
    OutOfTime,
}

/// A job that was understood, and its items; or the delivery and what is wrong with it.
type DecodeResult = Result<(Decoded, Waiting), Box<(Received, Refusal)>>;

/// What the consumer of a model, by its index, gives; nothing when it has ended.
type FromConsumer = (usize, Option<lapin::Result<Delivery>>);

type Settling = FuturesUnordered<Pin<Box<dyn Future<Output = lapin::Result<Settled>> + Send>>>;

/// The loop over one session.
struct Loop<'a> {
    host: &'a mut Host,
    session: Session,
    deliveries: Pin<Box<dyn Stream<Item = FromConsumer> + Send>>,
    sender: mpsc::Sender<Event>,
    events: mpsc::Receiver<Event>,
    settling: Settling,
    /// Jobs whose items wait or run.
    jobs: HashMap<JobKey, (usize, Decoded)>,
    batchers: Vec<Batcher>,
    next_key: JobKey,
    /// Deliveries that are neither acked nor given back.
    in_hand: usize,
    passes: usize,
    /// Events applied since passes were last started.
    burst: usize,
    consumers_open: usize,
    /// Set once a drain began.
    deadline: Option<Instant>,
}

/// Serves jobs until the session is lost or a drain ends.
pub async fn serve(host: &mut Host, session: Session, signals: &mut Signals) -> Outcome {
    let mut this = Loop::new(host, session);
    let outcome = loop {
        let event = this.next_event(signals).await;
        if let ControlFlow::Break(outcome) = this.apply(event).await {
            break outcome;
        }
    };
    let Loop { session, in_hand, host, settling, .. } = this;
    // Publishes under way are dropped with their confirms: their jobs come again, and replies may then come twice.
    drop(settling);
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
        let models = host.models.len();
        Self {
            deliveries: Box::pin(session.deliveries()),
            batchers: host.models.iter().map(|model| Batcher::new(model.limits)).collect(),
            host,
            session,
            sender,
            events,
            settling: FuturesUnordered::new(),
            jobs: HashMap::new(),
            next_key: 0,
            in_hand: 0,
            passes: 0,
            burst: 0,
            consumers_open: models,
            deadline: None,
        }
    }

    /// The next event. Passes start when nothing else is at hand: what has just come in shares a pass then, and a
    /// burst of small jobs costs the device's thread one call rather than one each.
    async fn next_event(&mut self, signals: &mut Signals) -> Event {
        if self.burst < BURST_MAX
            && let Some(event) = self.select(signals).now_or_never()
        {
            self.burst += 1;
            return event;
        }
        self.burst = 0;
        self.start_passes();
        self.select(signals).await
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
            Some(settled) = self.settling.next() => Event::Settled(settled),
            Some((model, delivery)) = self.deliveries.next() => Event::Delivery(model, delivery),
            event = self.session.events.next() => Event::Broker(event),
            name = signals.next() => Event::Signal(name),
            () = out_of_time => Event::OutOfTime,
        }
    }

    async fn apply(&mut self, event: Event) -> ControlFlow<Outcome> {
        match event {
            Event::Delivery(model, Some(Ok(delivery))) => self.received(model, Received::now(delivery)),
            Event::Delivery(model, Some(Err(error))) => return lost(&self.host.models[model].name, &error),
            Event::Delivery(model, None) => return self.consumer_closed(model),
            Event::Decoded(model, result) => self.decoded(model, result),
            Event::PassEnded(end) => {
                self.passes -= 1;
                self.pass_ended(end)?;
            }
            Event::Encoded(settlement) => self.settle(settlement),
            Event::Settled(Ok(settled)) => self.settled(settled),
            Event::Settled(Err(error)) => return lost("settle", &error),
            Event::Broker(event) => broker_event(event)?,
            Event::Signal(name) => return self.drain(name).await,
            Event::OutOfTime => {
                tracing::error!(jobs = self.in_hand, "drain deadline passed");
                return ControlFlow::Break(Outcome::Killed);
            }
        }
        if self.deadline.is_some() && self.in_hand == 0 && self.consumers_open == 0 {
            return ControlFlow::Break(Outcome::Drained);
        }
        ControlFlow::Continue(())
    }

    fn received(&mut self, model_index: usize, received: Received) {
        self.in_hand += 1;
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
                self.bury(model, received, refusal);
            }
        }
    }

    fn consumer_closed(&mut self, model: usize) -> ControlFlow<Outcome> {
        self.consumers_open -= 1;
        if self.deadline.is_none() {
            let model = &self.host.models[model].name;
            return ControlFlow::Break(Outcome::Lost(format!(
                "the broker cancelled the consumer of `{model}`"
            )));
        }
        if self.in_hand == 0 && self.consumers_open == 0 {
            return ControlFlow::Break(Outcome::Drained);
        }
        ControlFlow::Continue(())
    }

    async fn drain(&mut self, signal: &str) -> ControlFlow<Outcome> {
        if self.deadline.is_some() {
            tracing::error!(signal, jobs = self.in_hand, "asked twice, stopping at once");
            return ControlFlow::Break(Outcome::Killed);
        }
        tracing::info!(signal, jobs = self.in_hand, seconds = self.host.drain.as_secs(), "draining");
        self.deadline = Some(Instant::now() + self.host.drain);
        self.host.draining = true;
        match self.session.stop_consuming().await {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => ControlFlow::Break(Outcome::Lost(format!("stop consuming: {error}"))),
        }
    }
}

/// Reads a job and makes its items ready. CPU work.
fn decode(received: Received, model: &Model, key: JobKey) -> DecodeResult {
    received.decode(model).map(|(decoded, items)| {
        let JobHeaders { batch_hint: hint, exclusive, .. } = decoded.headers;
        (decoded, Waiting { key, hint, exclusive, isolated: false, items })
    })
}

fn lost(what: &str, error: &lapin::Error) -> ControlFlow<Outcome> {
    ControlFlow::Break(Outcome::Lost(format!("{what}: {error}")))
}

fn broker_event(event: Option<lapin::Event>) -> ControlFlow<Outcome> {
    match event {
        Some(lapin::Event::Error(error)) => lost("connection", &error),
        Some(lapin::Event::ConnectionBlocked(reason)) => {
            tracing::warn!(reason, "the broker blocks publishers: replies wait");
            ControlFlow::Continue(())
        }
        Some(lapin::Event::ConnectionUnblocked) => {
            tracing::info!("the broker takes messages again");
            ControlFlow::Continue(())
        }
        Some(_) => ControlFlow::Continue(()),
        None => ControlFlow::Break(Outcome::Lost("connection closed".to_owned())),
    }
}
