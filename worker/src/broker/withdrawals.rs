//! Receives withdrawals, by which callers cancel their own jobs. Works with and without operators' commands.

use lapin::message::Delivery;
use lapin::options::BasicAckOptions;
use lapin::{Channel, ExchangeKind};
use tokio::sync::{mpsc, watch};
use vramq_core::event::Withdrawn;
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::{TYPE, WITHDRAWAL_BYTES_MAX, Withdrawal};

use super::aux_channel::{AuxChannel, WorksSince, is_over};
use super::own_queue::{Intake, OwnQueue};

/// The most withdrawals that wait for the event loop. Further ones wait at the broker.
const WITHDRAWALS_MAX: usize = 64;

/// The most withdrawals that the broker keeps for this worker: some seconds of the largest repeat rate of a gateway. Beyond that it drops
/// the oldest; callers repeat those that still matter.
const QUEUE_LENGTH_MAX: i64 = 10_000;

/// The most bytes of these withdrawals.
const QUEUE_BYTES_MAX: i64 = 16 * 1024 * 1024;

/// The longest id of a job: AMQP's short string.
const ID_BYTES_MAX: usize = 255;

/// The most withdrawals delivered ahead.
const PREFETCH: u16 = 64;

/// A channel for withdrawals on their way to the event loop.
pub fn channel() -> (mpsc::Sender<Withdrawn>, mpsc::Receiver<Withdrawn>) {
    mpsc::channel(WITHDRAWALS_MAX)
}

/// Receives withdrawals until the session is over. `declared` changes when the worker has declared exchanges, which may have been deleted.
pub async fn receive(
    aux: AuxChannel,
    withdrawals: mpsc::Sender<Withdrawn>,
    declared: watch::Receiver<()>,
    over: watch::Receiver<bool>,
) {
    let declaring = aux.clone();
    aux.run("withdrawals", async move |channel, works| {
        let mut over = over.clone();
        tokio::select! {
            ended = serve((channel, works), &declaring, &withdrawals, declared.clone()) => ended,
            () = is_over(&mut over) => Ok(()),
        }
    })
    .await;
}

async fn serve(
    (channel, works): (&Channel, &WorksSince),
    declaring: &AuxChannel,
    withdrawals: &mpsc::Sender<Withdrawn>,
    declared: watch::Receiver<()>,
) -> lapin::Result<()> {
    let intake = Intake {
        what: "withdrawals",
        exchange: WITHDRAWALS_EXCHANGE,
        kind: ExchangeKind::Fanout,
        routing_keys: vec![String::new()],
        length_max: QUEUE_LENGTH_MAX,
        bytes_max: Some(QUEUE_BYTES_MAX),
        prefetch: PREFETCH,
    };
    let mut queue = OwnQueue::consume(channel, declaring, intake, declared).await?;
    works.note();
    loop {
        let delivery = queue.next().await?;
        match read(&delivery) {
            // An `Err` means that the session is over, which also ends this task.
            Some(withdrawn) => drop(withdrawals.send(withdrawn).await),
            // At debug level, so that a flood of unreadable messages does not fill the log.
            None => tracing::debug!(bytes = delivery.data.len(), "ignored an unreadable withdrawal"),
        }
        delivery.acker.ack(BasicAckOptions::default()).await?;
    }
}

fn read(delivery: &Delivery) -> Option<Withdrawn> {
    let is_withdrawal = delivery.properties.kind().as_ref().is_some_and(|kind| kind.as_str() == TYPE);
    if !is_withdrawal || delivery.data.len() > WITHDRAWAL_BYTES_MAX {
        return None;
    }
    let withdrawal: Withdrawal = serde_json::from_slice(&delivery.data).ok()?;
    // No job has a longer id, and the worker would remember the withdrawal for an hour.
    if withdrawal.job.len() > ID_BYTES_MAX {
        return None;
    }
    let digest = withdrawal.digest();
    Some(Withdrawn { id: withdrawal.job, digest })
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;

    use super::*;

    fn withdrawal(job: &str, kind: &str) -> Delivery {
        let body = serde_json::json!({ "job": job, "secret": "s" }).to_string().into_bytes();
        let mut delivery = Delivery::mock(1, WITHDRAWALS_EXCHANGE.into(), "".into(), false, body);
        delivery.properties = BasicProperties::default().with_type(kind.into());
        delivery
    }

    #[test]
    fn an_invalid_withdrawal_is_not_remembered() {
        let longest = "i".repeat(ID_BYTES_MAX);
        assert_eq!(read(&withdrawal(&longest, TYPE)).map(|withdrawn| withdrawn.id), Some(longest.clone()));
        assert_eq!(read(&withdrawal(&format!("{longest}i"), TYPE)), None);
        assert_eq!(read(&withdrawal("j", "order")), None);
    }
}
