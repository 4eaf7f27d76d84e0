//! Publishes the withdrawals of jobs whose callers have hung up. Where the gateway's user may not, those jobs run, and the log says
//! which permission is missing.

use lapin::options::ExchangeDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ExchangeKind};
use vramq_amqp::{Excess, LastError, WITHDRAWN_MAX, publish_withdrawals, reply_code};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::Withdrawal;

/// Outlives sessions, so that the same refusal is logged once.
#[derive(Debug, Default)]
pub struct Withdrawing {
    channel: Option<Channel>,
    refusal: LastError,
    /// The excess that was already logged.
    excess: Excess,
}

impl Withdrawing {
    /// Opens a channel for withdrawals if there is none, or the broker closed it. Opens none without the permission.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn open(&mut self, connection: &Connection) -> lapin::Result<()> {
        if self.channel.as_ref().is_some_and(|channel| channel.status().connected()) {
            return Ok(());
        }
        let channel = connection.create_channel().await?;
        let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let exchange = WITHDRAWALS_EXCHANGE.into();
        let declared =
            channel.exchange_declare(exchange, ExchangeKind::Fanout, durable, FieldTable::default()).await;
        self.channel = match declared {
            Ok(()) => Some(channel),
            Err(error) if reply_code(&error).is_some() => {
                self.refused(&error);
                None
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Publishes without confirms: lost withdrawals are repeated.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn publish(&mut self, withdrawals: &[Withdrawal]) -> lapin::Result<()> {
        let Some(channel) = &self.channel else { return Ok(()) };
        match publish_withdrawals(channel, withdrawals).await {
            // The broker has closed this channel. The reason comes as an event.
            Err(_) if !channel.status().connected() => {
                self.channel = None;
                Ok(())
            }
            published => published,
        }
    }

    /// Logs the error with which the broker closed a channel, which may be another one than this.
    pub fn channel_was_closed(&mut self, error: &lapin::Error) {
        if error.to_string().contains(WITHDRAWALS_EXCHANGE) {
            self.refused(error);
        }
    }

    /// Logs how many more withdrawals are not repeated.
    pub fn report(&mut self, excess: Excess) {
        if excess != self.excess {
            tracing::warn!(
                sent_once = excess.sent_once - self.excess.sent_once,
                not_sent = excess.not_sent - self.excess.not_sent,
                repeated = WITHDRAWN_MAX,
                "too many withdrawn jobs have not ended: further withdrawals are sent once, or not at all. Their jobs may run although \
                 their callers have hung up"
            );
            self.excess = excess;
        }
    }

    fn refused(&mut self, error: &lapin::Error) {
        if self.refusal.is_new(&error.to_string()) {
            tracing::warn!(
                %error,
                "withdrawals are off: the gateway's user may not declare the exchange {WITHDRAWALS_EXCHANGE}, or not write to it. Jobs \
                 run although their callers have hung up. Give the user the permissions of docs/security.md"
            );
        }
    }
}
