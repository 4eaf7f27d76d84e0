//! What goes on beside the jobs, each on a channel of its own: whatever becomes of it, they go on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};

use tokio::sync::watch;

use crate::amqp::direct_replies::DirectReplies;
use crate::retry::Waits;

/// Waits before a channel that broke is opened again: an operator who repairs an exchange waits half a minute at most.
const AGAIN_MIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(30);

/// Waits until the session is over. Cancel-safe.
pub async fn is_over(over: &mut watch::Receiver<bool>) {
    // An `Err` means that nobody could say it any more.
    drop(over.wait_for(|over| *over).await);
}

/// What was learned of channels beside the jobs. Outlives the session.
#[derive(Debug, Default)]
pub struct Experience {
    /// Somebody was told that they do not work: once is enough.
    warned: AtomicBool,
    /// When the broker last allowed none, and ended the connection of whoever tried.
    refused: Mutex<Option<Instant>>,
}

/// How long to go on without. The limit is that of a user, over all connections, and the broker may count those of a connection
/// that is gone for a while.
const WITHOUT: Duration = Duration::from_secs(600);

impl Experience {
    /// The broker ended a connection over a channel that was one too many.
    pub fn refuse(&self, error: &lapin::Error) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        tracing::warn!(
            %error,
            minutes = WITHOUT.as_secs() / 60,
            "the broker allows this user no channels for heartbeats and commands: sessions of the next minutes go without"
        );
    }

    pub fn is_refused(&self) -> bool {
        let at = *self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        at.is_some_and(|at| at.elapsed() < WITHOUT)
    }
}

/// Something beside the jobs.
#[derive(Clone, Debug)]
pub struct Aside {
    pub connection: Arc<Connection>,
    /// Exchanges are declared, rather than only checked.
    pub declare: bool,
    pub experience: Arc<Experience>,
    pub direct_replies: DirectReplies,
    /// Opened with the session; there are others when it breaks.
    pub channel: Option<Channel>,
}

impl Aside {
    /// Does it on a channel, and on another when that breaks, until it ends by itself or the connection is gone.
    pub async fn run(mut self, what: &'static str, mut work: impl AsyncFnMut(&Channel) -> lapin::Result<()>) {
        let mut waits = Waits::between(AGAIN_MIN, AGAIN_MAX);
        loop {
            let error = match self.on_a_channel(&mut work).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if !self.connection.status().connected() {
                return;
            }
            if self.experience.warned.swap(true, Ordering::Relaxed) {
                tracing::debug!(%error, "{what} do not work");
            } else {
                tracing::warn!(%error, "{what} do not work; jobs go on, and so do attempts");
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
    /// The exchange is not there, or is another; the channel is closed then.
    pub async fn exchange(&self, channel: &Channel, name: &str, kind: ExchangeKind) -> lapin::Result<()> {
        let options = ExchangeDeclareOptions { durable: true, passive: !self.declare, ..Default::default() };
        channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await
    }
}
