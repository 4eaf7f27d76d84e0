//! One session with the broker after the other, until a drain ends.

use std::time::{Duration, Instant};

use vramq_core::action::SessionEnd;
use vramq_schemas::status::WorkerState;

use super::exit::Exit;
use crate::broker::direct_replies::DirectReplies;
use crate::broker::opening::{SessionError, SessionPlan};
use crate::broker::session::Session;
use crate::broker::topology::TopologyError;
use crate::config::Config;
use crate::event_loop::EventLoop;
use crate::observability::status_board::Status;
use crate::retry::Backoff;
use crate::signals::Signals;

/// A session counts as stable after so long, or once it settled a job. The next reconnect is quick then.
const SESSION_STEADY: Duration = Duration::from_secs(60);

/// Serves until a drain ends.
///
/// # Errors
/// The exit code of a start that fails.
pub(super) async fn serve(
    config: &Config,
    event_loop: &mut EventLoop,
    signals: &mut Signals,
) -> Result<Exit, Exit> {
    let direct_replies = DirectReplies::start(config.broker.url.clone(), &config.name);
    let exit = serve_sessions(config, event_loop, &direct_replies, signals).await;
    direct_replies.close().await;
    exit
}

async fn serve_sessions(
    config: &Config,
    event_loop: &mut EventLoop,
    direct_replies: &DirectReplies,
    signals: &mut Signals,
) -> Result<Exit, Exit> {
    let mut is_first = true;
    let mut backoff = Backoff::reconnect();
    loop {
        let Some(session) = open(config, event_loop, direct_replies, signals, is_first).await? else {
            return Ok(Exit::Drained);
        };
        tracing::info!(broker = %config.broker.url, "session open");
        is_first = false;
        let meters = &event_loop.context().meters;
        let (opened, settled) = (Instant::now(), meters.settled());
        let end = event_loop.serve(session, config.broker.declare, signals).await;
        let core = event_loop.core();
        match end {
            // The broker will redeliver the jobs; the worker has nothing else to do.
            SessionEnd::Lost(error) if core.is_draining() => {
                let jobs = core.unsettled();
                tracing::warn!(
                    error,
                    jobs,
                    "session lost while draining: the broker delivers the unacknowledged jobs again"
                );
                return Ok(if jobs == 0 { Exit::Drained } else { Exit::Killed });
            }
            SessionEnd::Lost(error) => tracing::warn!(error, "session lost, connecting again"),
            SessionEnd::Drained => return Ok(Exit::Drained),
            SessionEnd::Killed => return Ok(Exit::Killed),
        }
        if opened.elapsed() > SESSION_STEADY || event_loop.context().meters.settled() > settled {
            backoff = Backoff::reconnect();
        }
        // A session that ends right after its opening must not cause a storm of connections.
        let wait = tokio::time::sleep(backoff.next_wait());
        if unless_stopped(event_loop, signals, wait).await.is_none() {
            return Ok(Exit::Drained);
        }
    }
}

/// Waits for `work` between sessions. `None` if the worker is asked to stop first.
async fn unless_stopped<T>(
    event_loop: &mut EventLoop,
    signals: &mut Signals,
    waiting: impl Future<Output = T>,
) -> Option<T> {
    event_loop
        .meanwhile(async {
            tokio::select! {
                done = waiting => Some(done),
                signal = signals.next() => {
                    tracing::info!(signal, "stopped while there was no session");
                    None
                }
            }
        })
        .await
}

/// Connects repeatedly: at start for as long as the configuration says, later without limit. `None` if the worker is asked to stop
/// meanwhile.
async fn open(
    config: &Config,
    event_loop: &mut EventLoop,
    direct_replies: &DirectReplies,
    signals: &mut Signals,
    is_first: bool,
) -> Result<Option<Session>, Exit> {
    let started = Instant::now();
    let mut backoff = Backoff::reconnect();
    let context = event_loop.context();
    let (models, aux_state) = (context.models.clone(), context.aux_state.clone());
    let consumer_timeouts = context.consumer_timeouts.clone();
    let silent_queues = context.silent_queues.clone();
    if is_first {
        context.board.set(Status::new(WorkerState::NoSession, "connecting to the broker"));
    }
    loop {
        let body_max = event_loop.context().body_max;
        let plan = SessionPlan {
            broker: &config.broker,
            worker: &config.name,
            models: &models,
            body_max,
            aux_state: &aux_state,
            direct_replies,
            consumer_timeouts: &consumer_timeouts,
            silent_queues: &silent_queues,
            is_first,
        };
        let opening = Session::open(plan);
        let error = match unless_stopped(event_loop, signals, opening).await {
            None => return Ok(None),
            Some(Ok(session)) => return Ok(Some(session)),
            Some(Err(error)) => error,
        };
        if is_first && (!error.is_retryable() || started.elapsed() >= config.broker.connect) {
            tracing::error!("cannot start: {error}");
            return Err(match error {
                SessionError::Topology(TopologyError::Refused { .. }) => Exit::Usage,
                _ => Exit::Unreachable,
            });
        }
        event_loop.context().board.set(Status::new(WorkerState::NoSession, error.to_string()));
        let left = config.broker.connect.saturating_sub(started.elapsed());
        let wait = backoff.next_wait();
        // The last try begins when the time is over that the configuration allows.
        let wait = if is_first { wait.min(left) } else { wait };
        tracing::warn!(%error, wait_ms = wait.as_millis(), "no session yet: the broker cannot be used, trying again");
        if unless_stopped(event_loop, signals, tokio::time::sleep(wait)).await.is_none() {
            return Ok(None);
        }
    }
}
