//! Channels of heartbeats, withdrawals, commands and answers. Their failure never affects jobs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};

use tokio::sync::watch;

use super::direct_replies::DirectReplies;
use crate::retry::Backoff;

/// Waits before a broken channel is opened again. An operator who repairs an exchange waits 45 s at most.
const REOPEN_MIN: Duration = Duration::from_secs(1);
const REOPEN_MAX: Duration = Duration::from_secs(30);

/// Waits until the session is over. Cancel-safe.
pub async fn is_over(over: &mut watch::Receiver<bool>) {
    // An `Err` means that the session, which owns the sender, is gone.
    drop(over.wait_for(|over| *over).await);
}

/// State of the auxiliary channels that outlives a session.
#[derive(Debug, Default)]
pub struct AuxChannelState {
    /// Whether a warning about their failure was logged. It is logged once.
    warned: AtomicBool,
    /// When the broker last refused such a channel, and closed the connection for it.
    refused: Mutex<Option<Instant>>,
    /// The same for the channels of first replies, which are opened last.
    no_first_replies: Mutex<Option<Instant>>,
}

/// How long the worker does without these channels. The limit applies to all connections of a user, and the broker may still count channels
/// of a connection that has just ended.
const REFUSED_FOR: Duration = Duration::from_secs(600);

impl AuxChannelState {
    /// Records that the broker closed a connection because it had one channel too many.
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
             without its majority holds up the others, and progress is dropped. The worker tries again after some minutes. Raise \
             max-channels of the user"
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

/// The waits before a broken channel is opened again.
#[derive(Debug)]
struct ReopenWaits(Backoff);

impl Default for ReopenWaits {
    fn default() -> Self {
        Self(Backoff::between(REOPEN_MIN, REOPEN_MAX))
    }
}

impl ReopenWaits {
    /// The wait after a channel that worked for so long. If that was longer than [`REOPEN_MAX`], it did not break for the reason of those before
    /// it, so the waits begin again.
    fn next_wait(&mut self, worked: Duration) -> Duration {
        if worked > REOPEN_MAX {
            *self = Self::default();
        }
        self.0.next_wait()
    }
}

/// Since when a channel has done its work. It does not work while the broker opens it or declares what it needs: that may take long, and fail.
#[derive(Debug, Default)]
pub struct WorksSince(OnceLock<Instant>);

impl WorksSince {
    /// The channel has done its work. The first time counts.
    pub fn note(&self) {
        self.0.get_or_init(Instant::now);
    }

    fn worked(&self) -> Duration {
        self.0.get().map_or(Duration::ZERO, Instant::elapsed)
    }
}

/// A channel that is opened again when it breaks.
#[derive(Clone, Debug)]
pub struct AuxChannel {
    pub connection: Arc<Connection>,
    /// Whether exchanges are declared, or only checked.
    pub declare: bool,
    pub state: Arc<AuxChannelState>,
    pub direct_replies: DirectReplies,
    /// The one that was opened with the session.
    pub channel: Option<Channel>,
}

impl AuxChannel {
    /// Runs `work` on a channel, and again on a new channel if that breaks. Ends when `work` returns or the connection is closed.
    pub async fn run(
        mut self,
        what: &'static str,
        mut work: impl AsyncFnMut(&Channel, &WorksSince) -> lapin::Result<()>,
    ) {
        let mut waits = ReopenWaits::default();
        loop {
            let works = WorksSince::default();
            let error = match self.on_a_channel(&mut work, &works).await {
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
            tokio::time::sleep(waits.next_wait(works.worked())).await;
        }
    }

    /// Takes the channel that is there, or opens one.
    ///
    /// # Errors
    /// The connection is closed, or allows no more channels.
    pub async fn open(&mut self) -> lapin::Result<Channel> {
        match self.channel.take().filter(|channel| channel.status().connected()) {
            Some(channel) => Ok(channel),
            None => self.connection.create_channel().await,
        }
    }

    async fn on_a_channel(
        &mut self,
        work: &mut impl AsyncFnMut(&Channel, &WorksSince) -> lapin::Result<()>,
        works: &WorksSince,
    ) -> lapin::Result<()> {
        let channel = self.open().await?;
        let done = work(&channel, works).await;
        if done.is_err() && channel.status().connected() {
            // Best effort: the channel ends with its connection.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits differ randomly by up to a half.
    #[test]
    fn a_channel_that_worked_for_a_while_is_opened_again_soon() {
        let mut waits = ReopenWaits::default();
        for _ in 0..10 {
            waits.next_wait(Duration::ZERO);
        }
        assert!(waits.next_wait(REOPEN_MAX) >= REOPEN_MAX / 2);
        assert!(waits.next_wait(REOPEN_MAX + REOPEN_MIN) <= REOPEN_MIN * 3 / 2);
        assert!(waits.next_wait(Duration::ZERO) <= REOPEN_MIN * 3);
    }

    #[test]
    fn a_channel_works_from_its_first_success_on() {
        assert_eq!(WorksSince::default().worked(), Duration::ZERO, "it was only opened");
        let works = WorksSince(Instant::now().checked_sub(REOPEN_MAX).unwrap().into());
        works.note();
        assert!(works.worked() >= REOPEN_MAX);
    }
}
