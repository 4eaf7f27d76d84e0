//! Publishes heartbeats: transient, unconfirmed messages on a separate channel. Nothing else uses it, because a queue that confirms nothing
//! would hold them up.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::watch;
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::STATUS_EXCHANGE;

use super::aux_channel::{AuxChannel, WorksSince, is_over};
use super::message::TRANSIENT;
use crate::observability::status_board::Status;
use crate::observability::status_reporter::StatusReporter;

/// Changes of the worker's state are published at once, but at most this often.
const INTERVAL_MIN: Duration = Duration::from_millis(200);

/// Publishes heartbeats until the session is over, then the last one.
pub async fn send(aux: AuxChannel, reporter: Arc<StatusReporter>, over: watch::Receiver<bool>) {
    let changes = reporter.board.follow();
    let declaring = aux.clone();
    aux.run("heartbeats", async move |channel, works| {
        declaring.exchange(channel, STATUS_EXCHANGE, ExchangeKind::Fanout).await?;
        let beat = Beat { channel, works, reporter: &reporter };
        beat.run(changes.clone(), over.clone()).await
    })
    .await;
}

/// Publishes on one channel.
struct Beat<'a> {
    channel: &'a Channel,
    works: &'a WorksSince,
    reporter: &'a StatusReporter,
}

impl Beat<'_> {
    async fn run(
        &self,
        mut changes: watch::Receiver<Status>,
        mut over: watch::Receiver<bool>,
    ) -> lapin::Result<()> {
        let reporter = self.reporter;
        loop {
            changes.mark_unchanged();
            if !self.is_blocked() {
                publish(self.channel, reporter, &reporter.heartbeat()).await?;
                self.works.note();
            }
            tokio::select! {
                () = tokio::time::sleep(reporter.interval) => {}
                _ = changes.changed() => tokio::time::sleep(INTERVAL_MIN).await,
                () = is_over(&mut over) => {
                    return publish(self.channel, reporter, &reporter.last_heartbeat()).await;
                }
            }
        }
    }

    /// While the broker blocks publishes, heartbeats would pile up here.
    fn is_blocked(&self) -> bool {
        self.reporter.meters.worker.blocked.get() != 0
    }
}

async fn publish(channel: &Channel, reporter: &StatusReporter, heartbeat: &Heartbeat) -> lapin::Result<()> {
    // Cannot fail: only names and numbers.
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
