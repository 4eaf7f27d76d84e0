//! The event loop: `select` waits for what happens next, `apply` acts on it.
//!
//! One loop serves one session with the broker. When the session is lost, the jobs in hand go with it (the broker
//! delivers them again), models and device stay, and a new loop starts on a new session.

mod consumers;
mod control;
mod deliveries;
mod endings;
mod host;
mod leaving;
mod memory;
mod passes;
mod queues;
mod state;
mod telling;

use std::ops::ControlFlow;

use futures_util::future::FutureExt;
use futures_util::stream::StreamExt;
use lapin::message::Delivery;
use tokio::time::Instant;

use crate::amqp::commands::Asked;
use crate::amqp::session::{Session, Waiting, consumer_timeout, message_size_max};
use crate::amqp::settle::{Settled, Settlement};
use crate::batcher::JobKey;
use crate::capacity::Capacity;
use crate::device::thread::PassEnd;
use crate::drain::Signals;
use crate::job::Received;

use deliveries::DecodeResult;
use endings::EncodedPart;
pub use host::Host;
use state::{Loop, Published};

/// The most bytes that the loop decodes or encodes itself, some tens of microseconds' worth; more goes to the pool.
const INLINE_BYTES_MAX: usize = 16 * 1024;

/// Events that are applied in a row before passes start all the same: a fraction of a millisecond's worth.
const BURST_MAX: usize = 64;

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
    /// All of a model whose acks were under way.
    Acknowledged(Vec<Settled>),
    Broker(Option<lapin::Event>),
    Command(Asked),
    Signal(&'static str),
    Tick,
    /// A drain is half over.
    HalfTime,
    OutOfTime,
}

/// Serves jobs until the session is lost or a drain ends.
pub async fn serve(host: &mut Host, session: Session, signals: &mut Signals) -> Outcome {
    host.meters.worker.sessions_opened.inc();
    host.meters.worker.connected.set(1);
    host.board.ticked();
    let mut this = Loop::new(host, session);
    let outcome = this.run(signals).await;
    if outcome != Outcome::Drained {
        this.acknowledge_last().await;
    }
    let in_hand = this.jobs_in_hand();
    if matches!(outcome, Outcome::Lost(_)) {
        this.remember_settled();
    }
    let Loop { session, host, publishing, operators, in_hand: of_models, .. } = this;
    host.board.no_loop();
    if in_hand > 0 {
        // Publishes under way are given up with their confirms: their jobs come again, and replies may then come twice.
        tracing::warn!(jobs = in_hand, unconfirmed = publishing.len(), "jobs in hand go back to the broker");
    }
    drop(publishing);
    if outcome == Outcome::Drained {
        session.flush().await;
    }
    if !matches!(outcome, Outcome::Lost(_)) {
        operators.farewell().await;
    }
    session.close().await;
    host.session_ended(&outcome, &of_models);
    outcome
}

impl Loop<'_> {
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

    /// The next event. Passes start and acks go out when nothing else is at hand: what has just come in shares a pass
    /// then, what has just been confirmed shares an ack, and a burst of small jobs costs one of each rather than one a job.
    async fn next_event(&mut self, signals: &mut Signals) -> Event {
        if self.burst < BURST_MAX
            && let Some(event) = self.frequent().now_or_never()
        {
            self.burst += 1;
            return event;
        }
        if std::mem::take(&mut self.burst) == BURST_MAX {
            // lapin's tasks share this thread, and all that is sent goes by them.
            tokio::task::yield_now().await;
        }
        self.acknowledge();
        self.start_passes();
        self.tell();
        self.select(signals).await
    }

    /// Waits for what happens all the time; what is nearest to its end first. A burst looks at nothing else, which saves
    /// it from asking everybody else each time. Cancel-safe, as each of its arms is.
    async fn frequent(&mut self) -> Event {
        tokio::select! {
            biased;
            Some(settled) = self.acknowledging.next() => Event::Acknowledged(settled),
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
            Some(settled) = self.acknowledging.next() => Event::Acknowledged(settled),
            Some(published) = self.publishing.next() => Event::Published(published),
            Some((model, delivery)) = self.deliveries.next() => Event::Delivery(model, delivery),
            event = self.session.events.next() => Event::Broker(event),
            name = signals.next() => Event::Signal(name),
            asked = self.operators.next() => Event::Command(asked),
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
            Event::Acknowledged(settled) => self.acknowledged(settled).await?,
            Event::Broker(event) => self.broker_event(event).await?,
            Event::Signal(name) => self.told_to_stop(name).await?,
            Event::Command(asked) => self.obey(asked).await?,
            Event::Tick => self.tick().await?,
            Event::HalfTime => self.hand_over_all(),
            Event::OutOfTime => {
                tracing::error!(jobs = self.jobs_in_hand(), "drain deadline passed");
                return ControlFlow::Break(Outcome::Killed);
            }
        }
        self.answer_pauses();
        if self.deadline.is_some() && self.jobs_in_hand() == 0 && self.has_stopped_consuming() {
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
            // lapin tells of every channel's end here, also of those beside the jobs.
            Some(lapin::Event::Error(error)) if self.session.is_whole() => {
                tracing::debug!(%error, "a channel beside the jobs was closed");
            }
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
        self.tell_slowly();
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
