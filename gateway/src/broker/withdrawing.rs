//! Publishes the withdrawals of jobs whose callers have hung up. Where the gateway's user may not, those jobs run, and the log says
//! which permission is missing.

use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};
use tokio::time::{MissedTickBehavior, interval};
use vramq_amqp::{
    Excess, LastError, REPEAT_EVERY, WITHDRAWN_MAX, Withdrawals, publish_withdrawals, reply_code,
};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::Withdrawal;

use super::link::answered;

/// Outlives sessions, so that the same refusal is logged once.
#[derive(Debug, Default)]
pub struct Withdrawing {
    logged: Mutex<Logged>,
}

#[derive(Debug, Default)]
struct Logged {
    refusal: LastError,
    excess: Excess,
}

impl Withdrawing {
    /// Publishes new withdrawals at once, and repeats all, for as long as the connection lasts. Publishes none without the permission.
    ///
    /// # Errors
    /// The connection is lost, or the broker does not answer.
    pub async fn run(&self, connection: &Connection, withdrawals: &Withdrawals) -> lapin::Result<Infallible> {
        let mut channel = answered(self.open(connection)).await?;
        let mut repeat = interval(REPEAT_EVERY);
        repeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = repeat.tick() => {
                    self.report(withdrawals.excess());
                    let open = withdrawals.all();
                    if open.is_empty() {
                        continue;
                    }
                    let is_open = channel.as_ref().is_some_and(|channel| channel.status().connected());
                    if !is_open {
                        channel = answered(self.open(connection)).await?;
                    }
                    publish(channel.as_ref(), &open).await?;
                }
                () = withdrawals.added.notified() => publish(channel.as_ref(), &withdrawals.take_unsent()).await?,
            }
        }
    }

    /// Opens a channel for withdrawals; `None` without the permission.
    async fn open(&self, connection: &Connection) -> lapin::Result<Option<Channel>> {
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let exchange = WITHDRAWALS_EXCHANGE.into();
        let declared =
            channel.exchange_declare(exchange, ExchangeKind::Fanout, durable, FieldTable::default()).await;
        match declared {
            Ok(()) => Ok(Some(channel)),
            Err(error) if reply_code(&error).is_some() => {
                self.refused(&error);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Logs the error with which the broker closed a channel, which may be another one than this.
    pub fn channel_was_closed(&self, error: &lapin::Error) {
        if error.to_string().contains(WITHDRAWALS_EXCHANGE) {
            self.refused(error);
        }
    }

    /// Logs how many more withdrawals are not repeated.
    fn report(&self, excess: Excess) {
        let before = std::mem::replace(&mut self.logged().excess, excess);
        if excess != before {
            tracing::warn!(
                sent_once = excess.sent_once - before.sent_once,
                not_sent = excess.not_sent - before.not_sent,
                repeated = WITHDRAWN_MAX,
                "too many withdrawn jobs have not ended: further withdrawals are sent once, or not at all. Their jobs may run although \
                 their callers have hung up"
            );
        }
    }

    fn refused(&self, error: &lapin::Error) {
        if self.logged().refusal.note(&error.to_string()) {
            tracing::warn!(
                %error,
                "withdrawals are off: the gateway's user may not declare the exchange {WITHDRAWALS_EXCHANGE}, or not write to it. Jobs \
                 run although their callers have hung up. Give the user the permissions of docs/security.md"
            );
        }
    }

    fn logged(&self) -> MutexGuard<'_, Logged> {
        // Nothing panics while it holds the lock.
        self.logged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes without confirms: lost withdrawals are repeated.
async fn publish(channel: Option<&Channel>, withdrawals: &[Withdrawal]) -> lapin::Result<()> {
    let Some(channel) = channel else { return Ok(()) };
    match publish_withdrawals(channel, withdrawals).await {
        // The broker has closed this channel. The reason comes as an event.
        Err(_) if !channel.status().connected() => Ok(()),
        published => published,
    }
}
