//! The loop's state over one session, and how it begins.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, SelectAll, StreamExt};
use lapin::message::Delivery;
use tokio::sync::mpsc;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::consumers::Consuming;
use super::control::Cancel;
use super::endings::SentPart;
use super::queues::CALM;
use super::{Event, Host};
use crate::amqp::acks::Acks;
use crate::amqp::commands::Asker;
use crate::amqp::operators::Operators;
use crate::amqp::session::{Deliveries, Session, Waiting};
use crate::amqp::settle::Settled;
use crate::batcher::{Batcher, JobKey};
use crate::disposition::Disposition;
use crate::job::Decoded;
use crate::remembered::Remembered;

/// Events that may wait for the loop. Its senders are threads of the pool and of the device, which may block; there
/// are never more events under way than jobs in hand.
const EVENTS_MAX: usize = 1024;

/// How often the device's memory is read, suspects are asked for, and the time of jobs is looked at.
const TICK: Duration = Duration::from_secs(1);

/// What was published and confirmed.
pub(super) enum Published {
    /// All of a job, whose ack may still be due.
    Settled(Settled),
    /// Some results of a job that goes on here.
    Part(SentPart),
}

/// Whoever publishes in the loop does it in here: see `Publisher::taken` for why.
pub(super) type Publishing = FuturesUnordered<Pin<Box<dyn Future<Output = lapin::Result<Published>> + Send>>>;

/// Acks on their way: of each model one lot at a time.
pub(super) type Acknowledging = FuturesUnordered<Pin<Box<dyn Future<Output = Vec<Settled>> + Send>>>;

/// Answers of the broker about a model.
pub(super) type Asked<T> = FuturesUnordered<Pin<Box<dyn Future<Output = (usize, lapin::Result<T>)> + Send>>>;

/// Messages in hand that are alike.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) copies: u32,
    /// Their job's.
    pub(super) id: Option<String>,
}

/// The loop over one session.
pub(super) struct Loop<'a> {
    pub(super) host: &'a mut Host,
    pub(super) session: Session,
    pub(super) deliveries: SelectAll<Deliveries>,
    /// Consumers that are told to stop.
    pub(super) cancelling: Asked<()>,
    /// What waits.
    pub(super) looking: Asked<Waiting>,
    /// A suspect.
    pub(super) fetching: Asked<Option<Delivery>>,
    /// The model whose suspects are run, and nothing else.
    pub(super) quiet_for: Option<usize>,
    /// When the first of them was asked for.
    pub(super) quiet_since: Option<Instant>,
    /// When suspects may be looked for again.
    pub(super) look_at: Instant,
    /// Of each model: looks at its queue in a row at which jobs waited, and none had been delivered.
    pub(super) starved: Vec<u32>,
    /// Of each model.
    pub(super) consuming: Vec<Consuming>,
    pub(super) sender: mpsc::Sender<Event>,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) publishing: Publishing,
    /// Of each model's channel.
    pub(super) acks: Vec<Acks<Settled>>,
    pub(super) acknowledging: Acknowledging,
    /// Jobs whose items wait or run.
    pub(super) jobs: HashMap<JobKey, (usize, Box<Decoded>)>,
    pub(super) batchers: Vec<Batcher>,
    pub(super) next_key: JobKey,
    /// Deliveries of each model that are neither acked nor given back.
    pub(super) in_hand: Vec<usize>,
    /// The same by their fingerprints.
    pub(super) holding: HashMap<u64, Held>,
    /// From operators.
    pub(super) operators: Operators,
    /// Those who wait for a pause to be true.
    pub(super) pausing: Vec<Asker>,
    /// Jobs that are to be stopped.
    pub(super) cancels: Vec<Cancel>,
    /// Messages that were settled in this session.
    pub(super) settled: Remembered,
    pub(super) passes: usize,
    /// Jobs whose pass failed, and what becomes of them if the device is well.
    pub(super) accused: Vec<(JobKey, Disposition)>,
    /// The model whose canary is to run as soon as no other pass does.
    pub(super) canary: Option<usize>,
    /// The last one that was sent.
    pub(super) canary_model: usize,
    /// No pass starts any more: all jobs go on elsewhere.
    pub(super) leaving: bool,
    /// The device is of no use any more.
    pub(super) device_gone: bool,
    /// Since when items wait for memory.
    pub(super) blocked_since: Option<Instant>,
    /// Since when other processes hold what the next pass needs.
    pub(super) short_since: Option<Instant>,
    /// A pass failed, and others may be under way that were made before that was known.
    pub(super) failed_since_idle: bool,
    /// The broker takes no publishes, and answers nothing.
    pub(super) broker_blocks: bool,
    /// Ticks of the memory's clock without a pass.
    pub(super) idle_ticks: u32,
    /// Events applied since passes were last started.
    pub(super) burst: usize,
    pub(super) tick: Interval,
    /// Set once a drain began; until `half_time` jobs are finished, from then on handed over.
    pub(super) deadline: Option<Instant>,
    pub(super) half_time: Option<Instant>,
}

impl<'a> Loop<'a> {
    pub(super) fn new(host: &'a mut Host, mut session: Session) -> Self {
        let (sender, events) = mpsc::channel(EVENTS_MAX);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let now = std::time::Instant::now();
        host.health.forget_canary(now);
        let after_a_loss = host.losses.begin(now);
        let leaving = host.health.is_sick();
        let models = host.models.len();
        let operators = Operators::open(session.aside(&host.aside), Arc::clone(&host.teller));
        Self {
            deliveries: SelectAll::new(),
            cancelling: FuturesUnordered::new(),
            looking: FuturesUnordered::new(),
            fetching: FuturesUnordered::new(),
            quiet_for: None,
            quiet_since: None,
            look_at: Instant::now() + if after_a_loss { CALM } else { Duration::ZERO },
            starved: vec![0; models],
            consuming: host.models.iter().map(|_| Consuming::No).collect(),
            batchers: host.models.iter().map(|model| Batcher::new(model.limits)).collect(),
            in_hand: vec![0; models],
            host,
            session,
            sender,
            events,
            publishing: FuturesUnordered::new(),
            acks: (0..models).map(|_| Acks::default()).collect(),
            acknowledging: FuturesUnordered::new(),
            jobs: HashMap::new(),
            next_key: 0,
            settled: Remembered::default(),
            passes: 0,
            holding: HashMap::new(),
            operators,
            pausing: Vec::new(),
            cancels: Vec::new(),
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

    /// Keeps what the next session has to know of this one, which is lost.
    pub(super) fn remember_settled(&mut self) {
        // Those whose last confirm has come.
        while let Some(Some(published)) = self.publishing.next().now_or_never() {
            if let Ok(Published::Settled(settled)) = published {
                self.remember(&settled);
            }
        }
        self.host.losses.note(std::time::Instant::now());
        self.host.finished.absorb(std::mem::take(&mut self.settled));
        // One like a settled one is still in hand: which of them comes again, nobody can tell.
        self.holding.keys().for_each(|message| self.host.finished.forget(*message));
    }

    /// The broker sends nothing any more, and has confirmed it.
    pub(super) fn has_stopped_consuming(&self) -> bool {
        self.consuming.iter().all(Consuming::is_over) && self.fetching.is_empty()
    }

    pub(super) fn jobs_in_hand(&self) -> usize {
        self.in_hand.iter().sum()
    }
}
