//! Heartbeats: transient, unconfirmed, and never in the way of jobs.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::watch;
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::STATUS_EXCHANGE;

use crate::amqp::aside::{Aside, is_over};
use crate::board::Now;
use crate::heartbeat::Teller;

/// Changes of the worker's state are told at once, but not more often than this.
const APART_MIN: Duration = Duration::from_millis(200);

const TRANSIENT: u8 = 1;

/// Sends heartbeats until it is time for the last one.
pub async fn send(aside: Aside, teller: Arc<Teller>, over: watch::Receiver<bool>) {
    let changes = teller.board.follow();
    let told = aside.clone();
    aside
        .run("heartbeats", async move |channel| {
            told.exchange(channel, STATUS_EXCHANGE, ExchangeKind::Fanout).await?;
            beat(channel, &teller, changes.clone(), over.clone()).await
        })
        .await;
}

async fn beat(
    channel: &Channel,
    teller: &Teller,
    mut changes: watch::Receiver<Now>,
    mut over: watch::Receiver<bool>,
) -> lapin::Result<()> {
    loop {
        changes.mark_unchanged();
        // For a broker that takes no publishes they would pile up here.
        if teller.meters.worker.blocked.get() == 0 {
            publish(channel, teller, &teller.heartbeat()).await?;
        }
        let next = tokio::time::sleep(teller.interval);
        tokio::select! {
            () = next => {}
            _ = changes.changed() => tokio::time::sleep(APART_MIN).await,
            () = is_over(&mut over) => return publish(channel, teller, &teller.farewell()).await,
        }
    }
}

async fn publish(channel: &Channel, teller: &Teller, heartbeat: &Heartbeat) -> lapin::Result<()> {
    // Names and numbers: cannot fail.
    let body = serde_json::to_vec(heartbeat).unwrap_or_default();
    let properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(TRANSIENT)
        .with_type("heartbeat".into());
    let options = BasicPublishOptions::default();
    let _unconfirmed =
        channel.basic_publish(STATUS_EXCHANGE.into(), "".into(), options, &body, properties).await?;
    teller.meters.worker.heartbeats.inc();
    Ok(())
}
