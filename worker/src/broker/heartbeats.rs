//! Publishes transient, unconfirmed messages on a separate channel: heartbeats, and `progress` replies.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::{mpsc, watch};
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::STATUS_EXCHANGE;

use super::aux_channel::{AuxChannel, is_over};
use super::direct_replies::DirectReplies;
use super::message::{Message, TRANSIENT};
use crate::observability::status_board::Status;
use crate::observability::status_reporter::StatusReporter;

/// Changes of the worker's state are published at once, but at most this often.
const INTERVAL_MIN: Duration = Duration::from_millis(200);

/// Publishes heartbeats and `progress` until the session is over, then the last heartbeat.
pub async fn send(
    aux: AuxChannel,
    reporter: Arc<StatusReporter>,
    mut progress: mpsc::Receiver<Message>,
    over: watch::Receiver<bool>,
) {
    let changes = reporter.board.follow();
    let declaring = aux.clone();
    aux.run("heartbeats", async move |channel| {
        declaring.exchange(channel, STATUS_EXCHANGE, ExchangeKind::Fanout).await?;
        let direct_replies = &declaring.direct_replies;
        let beat = Beat { channel, direct_replies, reporter: &reporter };
        beat.run(changes.clone(), &mut progress, over.clone()).await
    })
    .await;
}

/// Publishes on one channel.
struct Beat<'a> {
    channel: &'a Channel,
    direct_replies: &'a DirectReplies,
    reporter: &'a StatusReporter,
}

impl Beat<'_> {
    async fn run(
        &self,
        mut changes: watch::Receiver<Status>,
        progress: &mut mpsc::Receiver<Message>,
        mut over: watch::Receiver<bool>,
    ) -> lapin::Result<()> {
        let reporter = self.reporter;
        loop {
            changes.mark_unchanged();
            if !self.is_blocked() {
                publish(self.channel, reporter, &reporter.heartbeat()).await?;
            }
            let mut next = pin!(tokio::time::sleep(reporter.interval));
            loop {
                tokio::select! {
                    () = &mut next => break,
                    _ = changes.changed() => {
                        tokio::time::sleep(INTERVAL_MIN).await;
                        break;
                    }
                    Some(message) = progress.recv() => self.progress(message).await?,
                    () = is_over(&mut over) => {
                        return publish(self.channel, reporter, &reporter.last_heartbeat()).await;
                    }
                }
            }
        }
    }

    /// While the broker blocks publishes, heartbeats would pile up here.
    fn is_blocked(&self) -> bool {
        self.reporter.meters.worker.blocked.get() != 0
    }

    async fn progress(&self, message: Message) -> lapin::Result<()> {
        if message.is_direct_reply() {
            if !self.direct_replies.try_publish(message) {
                tracing::debug!("dropped a progress reply: too many direct replies wait");
            }
            return Ok(());
        }
        if self.is_blocked() {
            return Ok(());
        }
        let Message { exchange, routing_key, properties, headers, body } = message;
        let (options, properties) = (BasicPublishOptions::default(), properties.with_headers(headers));
        // Without a confirm. If no queue is bound, nobody needs the message.
        self.channel.basic_publish(exchange, routing_key, options, &body, properties).await.map(drop)
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
