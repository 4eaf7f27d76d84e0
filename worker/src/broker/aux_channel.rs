//! Channels of heartbeats, withdrawals, commands and answers. Their failure never affects jobs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};

use tokio::sync::watch;

use super::direct_replies::DirectReplies;
use crate::retry::Backoff;

/// Waits before a channel that broke is opened again: an operator who repairs an exchange waits half a minute at most.
const REOPEN_MIN: Duration = Duration::from_secs(1);
const REOPEN_MAX: Duration = Duration::from_secs(30);

/// Waits until the session is over. Cancel-safe.
pub async fn is_over(over: &mut watch::Receiver<bool>) {
    // An `Err`: the session is gone, and with it who would have said so.
    drop(over.wait_for(|over| *over).await);
}

/// What was learned of auxiliary channels. Outlives the session.
#[derive(Debug, Default)]
pub struct AuxChannelState {
    /// A warning that they fail was logged: once is enough.
    warned: AtomicBool,
    /// When the broker last allowed none, and ended the connection that tried.
    refused: Mutex<Option<Instant>>,
    /// The same for the channels of first replies, which are opened last.
    no_first_replies: Mutex<Option<Instant>>,
}

/// How long to do without. The limit is that of a user, over all connections, and for a while the broker may count those of a
/// connection that has ended.
const REFUSED_FOR: Duration = Duration::from_secs(600);

impl AuxChannelState {
    /// The broker ended a connection over a channel that was one too many.
    pub fn refuse(&self, error: &lapin::Error) {
        note(&self.refused);
        tracing::warn!(
            %error,
            minutes = REFUSED_FOR.as_secs() / 60,
            "the broker allows this user no channels for heartbeats, withdrawals and commands: the worker continues to run jobs, and tries again after some minutes"
        );
    }

    pub fn is_refused(&self) -> bool {
        is_recent(&self.refused)
    }

    /// The broker ended a connection over a channel for a first reply.
    pub fn refuse_first_replies(&self, error: &lapin::Error) {
        note(&self.no_first_replies);
        tracing::warn!(
            %error,
            minutes = REFUSED_FOR.as_secs() / 60,
            "the broker allows this user no further channels: first replies to queues share the channel of all replies, where a queue \
             without its majority holds up the others. The worker tries again after some minutes. Raise max-channels of the user"
        );
    }

    pub fn has_first_replies(&self) -> bool {
        !self.is_refused() && !is_recent(&self.no_first_replies)
    }
}

fn note(refused: &Mutex<Option<Instant>>) {
    *refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

fn is_recent(refused: &Mutex<Option<Instant>>) -> bool {
    let at = *refused.lock().unwrap_or_else(PoisonError::into_inner);
    at.is_some_and(|at| at.elapsed() < REFUSED_FOR)
}

/// A channel that is opened again when it breaks.
#[derive(Clone, Debug)]
pub struct AuxChannel {
    pub connection: Arc<Connection>,
    /// Exchanges are declared, rather than only checked.
    pub declare: bool,
    pub state: Arc<AuxChannelState>,
    pub direct_replies: DirectReplies,
    /// The one that was opened with the session.
    pub channel: Option<Channel>,
}

impl AuxChannel {
    /// Does `work` on a channel, and on another one when that breaks, until it returns or the connection is closed.
    pub async fn run(mut self, what: &'static str, mut work: impl AsyncFnMut(&Channel) -> lapin::Result<()>) {
        let mut waits = Backoff::between(REOPEN_MIN, REOPEN_MAX);
        loop {
            let error = match self.on_a_channel(&mut work).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if !self.connection.status().connected() {
                return;
            }
            if self.state.warned.swap(true, Ordering::Relaxed) {
                tracing::debug!(error = error.to_string(), "{what} are unavailable");
            } else {
                tracing::warn!(
                    error = error.to_string(),
                    "{what} are unavailable; jobs are not affected; reopening the channel"
                );
            }
            tokio::time::sleep(waits.next_wait()).await;
        }
    }

    async fn on_a_channel(
        &mut self,
        work: &mut impl AsyncFnMut(&Channel) -> lapin::Result<()>,
    ) -> lapin::Result<()> {
        let channel = match self.channel.take() {
            Some(first) => first,
            None => self.connection.create_channel().await?,
        };
        let done = work(&channel).await;
        if done.is_err() && channel.status().connected() {
            // Best effort: it goes with the connection.
            let _ = channel.close(200, "again".into()).await;
        }
        done
    }

    /// # Errors
    /// The exchange does not exist, or with other properties; the channel is closed then.
    pub async fn exchange(&self, channel: &Channel, name: &str, kind: ExchangeKind) -> lapin::Result<()> {
        let options = ExchangeDeclareOptions { durable: true, passive: !self.declare, ..Default::default() };
        channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await
    }
}
