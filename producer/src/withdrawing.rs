//! Publishes the withdrawals of jobs whose callers have given up on them, on a channel of its own.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};
use vramq_amqp::{REPEAT_EVERY, publish_withdrawals};
use vramq_schemas::withdrawal::Withdrawal;

use crate::registry::Registry;
use crate::session::CLOSE_TIMEOUT;

/// How long closing waits for the ends of the jobs that it withdraws. A worker that is not busy answers within milliseconds; the ends
/// of jobs that wait in a queue are not to be waited for.
const ENDS_TIMEOUT: Duration = Duration::from_secs(1);

/// The task that publishes withdrawals while a session lasts.
pub(crate) struct Withdrawing {
    task: JoinHandle<()>,
    /// Tells it to end after what it publishes at the moment.
    stop: Arc<Notify>,
}

impl Withdrawing {
    pub(crate) fn start(connection: Arc<Connection>, registry: Arc<Registry>) -> Self {
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            // The channel is lost. Other jobs are none the worse for that; if the connection is lost with it, a new session follows.
            if let Err(error) = publish(&connection, &registry, &stopped).await {
                tracing::debug!(%error, "withdrawals have no effect on this connection");
            }
        });
        Self { task, stop }
    }

    /// Withdraws all jobs in flight, and waits for the ends of those that are withdrawn. Both have little time.
    pub(crate) async fn finish(mut self, connection: &Connection, registry: &Registry) {
        match timeout(CLOSE_TIMEOUT, self.publish_rest(connection, registry)).await {
            Ok(Ok(())) => {
                let _ = timeout(ENDS_TIMEOUT, registry.withdrawals.all_ended()).await;
            }
            Ok(Err(error)) => tracing::debug!(%error, "withdraw unanswered jobs"),
            Err(_) => tracing::debug!("withdraw unanswered jobs: no confirm in time"),
        }
    }

    async fn publish_rest(&mut self, connection: &Connection, registry: &Registry) -> lapin::Result<()> {
        // What the task has taken to publish it also counts: aborted, it would lose the count of withdrawals that the broker has.
        self.stop.notify_one();
        let _ = (&mut self.task).await;
        registry.withdraw_all();
        let withdrawals = &registry.withdrawals;
        let unsent = withdrawals.take_unsent();
        let new = unsent.iter().map(|withdrawal| withdrawal.job.as_str()).collect::<HashSet<_>>();
        let mut due = withdrawals.all();
        due.retain(|withdrawal| !new.contains(withdrawal.job.as_str()));
        due.extend(unsent.iter().cloned());
        publish_on(connection, &mut None, &due).await?;
        registry.withdrawn.fetch_add(unsent.len() as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Withdrawing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn publish(connection: &Connection, registry: &Registry, stop: &Notify) -> lapin::Result<()> {
    let withdrawals = &registry.withdrawals;
    let mut channel = None;
    let mut repeat = interval(REPEAT_EVERY);
    repeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.notified() => return Ok(()),
            _ = repeat.tick() => publish_on(connection, &mut channel, &withdrawals.all()).await?,
            () = withdrawals.added.notified() => {
                let unsent = withdrawals.take_unsent();
                publish_on(connection, &mut channel, &unsent).await?;
                registry.withdrawn.fetch_add(unsent.len() as u64, Ordering::Relaxed);
            }
        }
    }
}

/// The channel is opened for the first withdrawal: most clients have none.
async fn publish_on(
    connection: &Connection,
    channel: &mut Option<Channel>,
    withdrawals: &[Withdrawal],
) -> lapin::Result<()> {
    if withdrawals.is_empty() {
        return Ok(());
    }
    let channel = match channel {
        Some(channel) => channel,
        None => {
            let opened = connection.create_channel().await?;
            opened.confirm_select(ConfirmSelectOptions::default()).await?;
            channel.insert(opened)
        }
    };
    publish_withdrawals(channel, withdrawals).await
}
