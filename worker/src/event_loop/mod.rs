//! The event loop: waits for the next event, passes it to the core, and carries the actions out. It decides nothing.
//!
//! It serves one session with the broker after the other. Core, models and device outlive sessions; jobs do not, because the
//! broker redelivers unacknowledged ones.

mod completion;
mod inputs;
mod live_session;
mod perform;
mod queue_failure;
mod session_consumers;

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt as _;
use futures_util::stream::StreamExt as _;
use tokio::sync::mpsc;
use vramq_core::Core;
use vramq_core::action::SessionEnd;
use vramq_core::event::{Event, Now, SessionFacts};
use vramq_schemas::status::WorkerState;

use self::completion::Completion;
use self::live_session::{Input, LiveSession};
use crate::broker::session::Session;
use crate::context::WorkerContext;
use crate::job_store::JobStore;
use crate::signals::Signals;
use crate::unix_ms;

/// The most completions that wait for the event loop. The senders are threads of the pool and of executors, which may block. There are
/// never more than unacknowledged jobs and passes.
const COMPLETIONS_MAX: usize = 1024;

/// After so many events in a row, passes start and acks are sent anyway. That takes a fraction of a millisecond.
const BURST_MAX: usize = 64;

/// How long the last confirms, and the acks of confirmed jobs, may take when a session is lost. Without these acks the jobs are
/// redelivered; they are then only acknowledged if this worker receives them.
const LAST_ACKS_MAX: Duration = Duration::from_millis(200);

/// The core, and the shell's part of the state.
pub struct EventLoop {
    core: Core,
    context: WorkerContext,
    jobs: JobStore,
    /// `None` between sessions.
    session: Option<LiveSession>,
    /// The session is about to be closed. Acks are still sent; nothing else of the session is used.
    is_closing: bool,
    /// Set by the core's `EndSession`.
    ending: Option<SessionEnd>,
    /// Events that actions caused, applied next.
    ready: VecDeque<Event>,
    completions: mpsc::Sender<Completion>,
    completed: mpsc::Receiver<Completion>,
    /// Inputs that were handled since passes were last started.
    burst: usize,
}

impl std::fmt::Debug for EventLoop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EventLoop").field("core", &self.core).finish_non_exhaustive()
    }
}

impl EventLoop {
    pub fn new(core: Core, context: WorkerContext) -> Self {
        let (completions, completed) = mpsc::channel(COMPLETIONS_MAX);
        Self {
            core,
            context,
            jobs: JobStore::default(),
            session: None,
            is_closing: false,
            ending: None,
            ready: VecDeque::new(),
            completions,
            completed,
            burst: 0,
        }
    }

    pub fn core(&self) -> &Core {
        &self.core
    }

    pub fn context(&self) -> &WorkerContext {
        &self.context
    }

    /// Serves jobs until the session is lost or a drain ends; closes it.
    pub async fn serve(&mut self, session: Session, declares: bool, signals: &mut Signals) -> SessionEnd {
        self.begin(session, declares);
        let end = loop {
            if let Some(end) = self.ending.take() {
                break end;
            }
            if let Some(input) = self.next_in_burst() {
                self.handle(input);
                continue;
            }
            if std::mem::take(&mut self.burst) >= BURST_MAX {
                // lapin's tasks share this thread and send all frames, so let them run.
                tokio::task::yield_now().await;
            }
            self.apply(Event::Idle);
            self.publish_status();
            if self.ending.is_some() {
                continue;
            }
            let input = self.next(signals).await;
            self.handle(input);
        };
        self.finish(&end).await;
        end
    }

    /// Waits for `waiting` between sessions, and handles results meanwhile: passes that are still on the device end and return their
    /// permits.
    pub async fn meanwhile<T>(&mut self, waiting: impl Future<Output = T>) -> T {
        let mut waiting = pin!(waiting);
        loop {
            tokio::select! {
                done = &mut waiting => return done,
                // `self` holds a sender, so the channel is never closed.
                Some(completion) = self.completed.recv() => self.completed(completion),
            }
        }
    }

    fn begin(&mut self, mut session: Session, declares: bool) {
        let meters = &self.context.meters;
        meters.worker.sessions_opened.inc();
        meters.worker.connected.set(1);
        self.context.board.ticked();
        (self.is_closing, self.ending, self.burst) = (false, None, 0);
        let WorkerContext { aux_state, publisher_rules, reporter, .. } = &self.context;
        let (rules, reporter) = (Arc::clone(publisher_rules), Arc::clone(reporter));
        let missing = session.take_missing();
        self.session = Some(LiveSession::new(session, aux_state, rules, reporter));
        self.apply(Event::SessionOpened(SessionFacts { declares, missing }));
        let status = self.core.status();
        let slots: Vec<_> = status.models.iter().map(|model| model.slots).collect();
        match status.state {
            WorkerState::Paused | WorkerState::Sick | WorkerState::Draining => {
                tracing::info!(?slots, reason = status.reason, "connected, but not consuming");
            }
            _ => tracing::info!(?slots, "consuming"),
        }
    }

    /// Applies an event, and all events that its actions cause at once.
    pub(crate) fn apply(&mut self, event: Event) {
        self.ready.push_back(event);
        self.apply_ready();
    }

    pub(crate) fn apply_ready(&mut self) {
        while let Some(event) = self.ready.pop_front() {
            let now = Now { at: Instant::now(), unix_ms: unix_ms() };
            for action in self.core.apply(event, now) {
                self.perform(action);
            }
        }
    }

    /// The next frequent input, if one is ready. In a burst only these are polled, which is cheaper than polling everything each time; the
    /// inputs of a burst share passes and acks.
    fn next_in_burst(&mut self) -> Option<Input> {
        if self.burst >= BURST_MAX {
            return None;
        }
        let live = self.session.as_mut()?;
        let completed = &mut self.completed;
        let input = live.next_frequent(completed).now_or_never()?;
        self.burst += 1;
        Some(input)
    }

    /// Waits for what happens next. Cancel-safe, as each of its arms is.
    async fn next(&mut self, signals: &mut Signals) -> Input {
        let timer = self.core.next_timer();
        let Some(live) = &mut self.session else { return std::future::pending().await };
        tokio::select! {
            // `self` holds a sender, so the channel is never closed.
            Some(completion) = self.completed.recv() => Input::Completed(completion),
            input = live.next() => input,
            signal = signals.next() => Input::Signal(signal),
            () = reached(timer) => Input::Timer,
        }
    }

    /// Ends the session. Confirmed jobs are acknowledged; otherwise they would run again elsewhere.
    async fn finish(&mut self, end: &SessionEnd) {
        self.is_closing = true;
        if *end != SessionEnd::Drained {
            self.send_last_acks().await;
        }
        self.context.board.no_session();
        let mut unconfirmed = 0;
        if let Some(LiveSession { session, control_plane, publishing, progress, .. }) = self.session.take() {
            // These confirms are not waited for. Their jobs are redelivered, and replies may then come twice.
            unconfirmed = publishing.len();
            drop((publishing, progress));
            if *end == SessionEnd::Drained {
                session.flush().await;
            }
            if !matches!(end, SessionEnd::Lost(_)) {
                control_plane.shutdown().await;
            }
            session.close().await;
        }
        self.apply(Event::SessionClosed);
        self.jobs.clear();
        self.ending = None;
        let jobs = self.core.unsettled();
        if jobs > 0 {
            tracing::warn!(
                jobs,
                unconfirmed,
                "session ended: the broker will redeliver the unacknowledged jobs"
            );
        }
        self.context.session_ended(end);
    }

    /// Sends the acks of all confirmed jobs, as long as the broker reads them. Also waits for confirms: one poll would miss confirms that
    /// arrived, because lapin handles everything that arrived with them first.
    async fn send_last_acks(&mut self) {
        let until = tokio::time::Instant::now() + LAST_ACKS_MAX;
        loop {
            self.apply(Event::Idle);
            let Some(LiveSession { acking, publishing, .. }) = &mut self.session else { return };
            if acking.is_empty() && publishing.is_empty() {
                return;
            }
            let input = tokio::select! {
                Some((channel, sent)) = acking.next() => Input::Acked(channel, sent),
                Some((job, sent)) = publishing.next() => Input::Published(job, sent),
                () = tokio::time::sleep_until(until) => return,
            };
            // The others fail because the session ends.
            if !matches!(input, Input::Published(_, Err(_))) {
                self.handle(input);
            }
        }
    }
}

/// Waits until `at`; for ever without it.
async fn reached(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
