//! A session with the broker, as the simulated shell keeps it: how it opens, and how it ends.

use std::collections::{BTreeMap, BTreeSet};

use vramq_core::action::{JobQueue, SessionEnd};
use vramq_core::event::{Event, SessionFacts};
use vramq_core::ids::{self, ConsumerId, ModelIndex, QueueIndex};

use super::channels::Channels;
use super::confirms::{Confirms, Sent};
use super::publications::Outbox;
use super::{Exit, Shell};
use crate::simulation::agenda::{Happening, MILLI, Micros, SECOND};
use crate::simulation::broker::{ChannelId, Command, ConnectionId, Name};
use crate::simulation::env::{Env, Owner};

/// Waits between two attempts to connect: doubled from the first to the last.
const RECONNECT_MIN: Micros = 250 * MILLI;
const RECONNECT_MAX: Micros = 30 * SECOND;

/// After so long a session counts as stable.
const SESSION_STEADY: Micros = 60 * SECOND;

/// A consumer that the worker has requested.
#[derive(Debug)]
pub(super) struct Lease {
    pub(super) consumer: ConsumerId,
    pub(super) model: ModelIndex,
    pub(super) queue: JobQueue,
    pub(super) prefetch: u16,
    pub(super) tag: Name,
    /// Whether the broker was asked to stop it.
    pub(super) is_stopping: bool,
}

#[derive(Debug)]
pub(super) struct Session {
    pub(super) number: u32,
    pub(super) consuming: ConnectionId,
    pub(super) publishing: ConnectionId,
    pub(super) channels: Channels,
    pub(super) publisher: ChannelId,
    pub(super) opened_at: Micros,
    pub(super) leases: Vec<Lease>,
    pub(super) taking: Option<ModelIndex>,
    /// Deliveries that were given back, by channel and tag.
    pub(super) nacked: BTreeSet<(ids::ChannelId, u64)>,
    pub(super) published: u64,
    pub(super) confirms: BTreeMap<u64, Sent>,
    pub(super) judge: Confirms,
    pub(super) outboxes: BTreeMap<ids::JobKey, Outbox>,
}

impl Shell {
    /// Opens a session, if the broker is up.
    pub fn connect(&mut self, env: &mut Env) {
        if self.session.is_some() || self.exit.is_some() {
            return;
        }
        if env.broker_is_down {
            return self.connect_later(env);
        }
        let (consuming, publishing) =
            (env.connect(Owner::Worker(self.life)), env.connect(Owner::Worker(self.life)));
        env.declare_topology();
        let (channels, missing) = self.open_channels(env, consuming);
        let Some(publisher) = env.open_channel(publishing) else { return self.connect_later(env) };
        env.send(publisher, Command::ConfirmSelect);
        self.sessions += 1;
        (self.is_closing, self.ending) = (false, None);
        self.settled_at_open = self.settled;
        (self.is_blocked, self.observations.busy_at) = (false, env.now);
        self.session = Some(Session {
            number: self.sessions,
            consuming,
            publishing,
            channels,
            publisher,
            opened_at: env.now,
            leases: Vec::new(),
            taking: None,
            nacked: BTreeSet::new(),
            published: 0,
            confirms: BTreeMap::new(),
            judge: Confirms::default(),
            outboxes: BTreeMap::new(),
        });
        env.trace.line(env.now, self.who(), || "session opened".to_owned());
        self.handle(env, Event::SessionOpened(SessionFacts { declares: true, missing }));
    }

    /// Opens the channels of all models. Also returns the further queues that cannot be consumed.
    fn open_channels(
        &self,
        env: &mut Env,
        consuming: ConnectionId,
    ) -> (Channels, Vec<(ModelIndex, QueueIndex, String)>) {
        let (mut channels, mut missing) = (Channels::default(), Vec::new());
        for (at, facts) in self.models.iter().enumerate() {
            let model = ModelIndex(at);
            for queue in (0..facts.queues.len()).map(QueueIndex) {
                if queue.is_further() && !env.declare_further(at, queue.0) {
                    missing.push((model, queue, FORBIDDEN.to_owned()));
                } else if let Some(wire) = env.open_channel(consuming) {
                    channels.found(model, queue, wire);
                }
            }
        }
        (channels, missing)
    }

    fn connect_later(&mut self, env: &mut Env) {
        let wait = (RECONNECT_MIN << self.backoff.min(10)).min(RECONNECT_MAX);
        self.backoff += 1;
        let at = env.now + wait / 2 + env.random.bits() % wait;
        env.agenda.at(at, Happening::Connect(self.life));
    }

    /// The connections of the session.
    pub fn connections(&self) -> Vec<ConnectionId> {
        self.session.iter().flat_map(|session| [session.consuming, session.publishing]).collect()
    }

    /// Handles an answer, if its session is still open.
    pub fn in_session(&mut self, env: &mut Env, session: u32, event: Event) {
        if self.session.as_ref().is_some_and(|open| open.number == session) {
            self.handle(env, event);
        }
    }

    /// The session's connections broke.
    pub fn session_cut(&mut self, env: &mut Env) {
        self.session_failed(env, "the connection broke");
    }

    /// The session's connections are gone.
    pub fn session_failed(&mut self, env: &mut Env, error: &str) {
        if self.session.is_some() {
            self.handle(env, Event::SessionFailed(error.to_owned()));
        }
    }

    /// Closes the session. Confirmed jobs are acknowledged first; otherwise they would run again elsewhere.
    pub(super) fn finish(&mut self, env: &mut Env, end: SessionEnd) {
        self.is_closing = true;
        self.check_end(env, &end);
        if end != SessionEnd::Drained {
            self.apply(env, Event::Idle);
            self.apply(env, Event::Idle);
        }
        let Some(session) = self.session.take() else { return };
        self.operators.session_ended();
        self.memories.session_ended();
        self.shares.session_ended();
        if end == SessionEnd::Drained {
            self.check_drained(env);
            env.flush(session.consuming);
        } else if env.random.chance(50) {
            env.run_broker();
        }
        env.lose(session.consuming);
        env.lose(session.publishing);
        env.trace.line(env.now, self.who(), || format!("session closed: {end:?}"));
        self.apply(env, Event::SessionClosed);
        self.check_timers_of_session(env);
        self.jobs.clear();
        self.ending = None;
        match end {
            SessionEnd::Drained => self.exit = Some(Exit::Drained),
            SessionEnd::Killed => self.exit = Some(Exit::Killed),
            SessionEnd::Lost(_) if self.core.is_draining() => self.exit = Some(Exit::Killed),
            SessionEnd::Lost(_) => {
                if env.now > session.opened_at + SESSION_STEADY || self.settled > self.settled_at_open {
                    self.backoff = 0;
                }
                self.connect_later(env);
            }
        }
    }
}

/// The broker's error for a queue that its owner has declared with other arguments.
pub(super) const FORBIDDEN: &str = "PRECONDITION_FAILED - inequivalent arg for the queue";
