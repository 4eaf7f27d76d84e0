//! Publishes heartbeats: transient and unconfirmed, on a channel of their own.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::watch;
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::STATUS_EXCHANGE;

use super::aux_channel::{AuxChannel, is_over};
use crate::observability::status_board::Now;
use crate::observability::status_reporter::StatusReporter;

/// Changes of the worker's state are published at once, but not more often than this.
const INTERVAL_MIN: Duration = Duration::from_millis(200);

const TRANSIENT: u8 = 1;

/// Publishes heartbeats until the session is over, then the last one.
pub async fn send(aux: AuxChannel, reporter: Arc<StatusReporter>, over: watch::Receiver<bool>) {
    let changes = reporter.board.follow();
    let declaring = aux.clone();
    aux.run("heartbeats", async move |channel| {
        declaring.exchange(channel, STATUS_EXCHANGE, ExchangeKind::Fanout).await?;
        beat(channel, &reporter, changes.clone(), over.clone()).await
    })
    .await;
}

async fn beat(
    channel: &Channel,
    reporter: &StatusReporter,
    mut changes: watch::Receiver<Now>,
    mut over: watch::Receiver<bool>,
) -> lapin::Result<()> {
    loop {
        changes.mark_unchanged();
        // While the broker takes no publishes they would pile up here.
        if reporter.meters.worker.blocked.get() == 0 {
            publish(channel, reporter, &reporter.heartbeat()).await?;
        }
        let next = tokio::time::sleep(reporter.interval);
        tokio::select! {
            () = next => {}
            _ = changes.changed() => tokio::time::sleep(INTERVAL_MIN).await,
            () = is_over(&mut over) => return publish(channel, reporter, &reporter.farewell()).await,
        }
    }
}

async fn publish(channel: &Channel, reporter: &StatusReporter, heartbeat: &Heartbeat) -> lapin::Result<()> {
    // Names and numbers: cannot fail.
    let body = serde_json::to_vec(heartbeat).unwrap_or_default();
    let properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(TRANSIENT)
        .with_type("heartbeat".into());
    let options = BasicPublishOptions::default();
    let _unconfirmed =
        channel.basic_publish(STATUS_EXCHANGE.into(), "".into(), options, &body, properties).await?;
    reporter.meters.worker.heartbeats.inc();
    Ok(())
}
