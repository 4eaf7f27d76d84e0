//! Publishes the withdrawals of jobs whose callers have given up on them, on a channel of its own.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lapin::options::ConfirmSelectOptions;
use lapin::{Channel, Connection, ErrorKind};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};
use vramq_amqp::{LastError, REPEAT_EVERY, publish_withdrawals};
use vramq_schemas::topology::WITHDRAWALS_EXCHANGE;
use vramq_schemas::withdrawal::Withdrawal;

use crate::registry::Registry;
use crate::session::CLOSE_TIMEOUT;

/// How long closing waits for the ends of the jobs that it withdraws. A worker that is not busy reports them within milliseconds. Jobs that
/// wait in a queue may end much later, and are not worth waiting for.
const ENDS_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the broker may take to confirm withdrawals. It confirms each when the queues of all workers have it, and new ones wait
/// meanwhile. The largest job (16 MiB) that is sent before them arrives in this time at 5 Mbit/s; on a slower network the next repeat sends
/// them.
const CONFIRM_MAX: Duration = Duration::from_secs(30);

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
        let task = tokio::spawn(async move { run(&connection, &registry, &stopped).await });
        Self { task, stop }
    }

    /// Withdraws all jobs in flight, and waits for the ends of the withdrawn ones. Both steps have short time limits.
    pub(crate) async fn finish(mut self, connection: &Connection, registry: &Registry) {
        match timeout(CLOSE_TIMEOUT, self.publish_rest(connection, registry)).await {
            Ok(Ok(())) => {
                let _ = timeout(ENDS_TIMEOUT, registry.withdrawals.all_ended()).await;
            }
            // The count of withdrawn jobs tells the caller.
            Ok(Err(error)) => tracing::debug!(%error, "withdraw unanswered jobs"),
            Err(_) => tracing::debug!("withdraw unanswered jobs: no confirm in time"),
        }
    }

    async fn publish_rest(&mut self, connection: &Connection, registry: &Registry) -> lapin::Result<()> {
        // Let the task finish what it is publishing: aborted, it would not count withdrawals that the broker has.
        self.stop.notify_one();
        let _ = (&mut self.task).await;
        registry.withdraw_all();
        publish(connection, &mut None, registry, true).await
    }
}

impl Drop for Withdrawing {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Publishes new withdrawals at once, and repeats all. After a failure new ones wait for the next repeat: a broker that refuses them
/// closes the channel each time.
async fn run(connection: &Connection, registry: &Registry, stop: &Notify) {
    let (mut channel, mut last, mut is_taken) = (None, LastError::default(), true);
    let mut repeat = interval(REPEAT_EVERY);
    repeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let repeats = tokio::select! {
            () = stop.notified() => return,
            _ = repeat.tick() => true,
            () = registry.withdrawals.added.notified(), if is_taken => false,
        };
        let published = publish(connection, &mut channel, registry, repeats).await;
        is_taken = published.is_ok();
        let Err(error) = published else { continue };
        let error = error.to_string();
        // With the connection lost, a new session publishes them.
        if connection.status().connected() && last.note(&error) {
            tracing::warn!(
                error,
                "the broker does not take withdrawals of jobs, trying again: these jobs may run although their callers have given up. The \
                 exchange {WITHDRAWALS_EXCHANGE} is missing, the client's user may not write to it, or the queue of a worker does not answer"
            );
        }
    }
}

/// Publishes new withdrawals and, if it `repeats`, all others.
async fn publish(
    connection: &Connection,
    channel: &mut Option<Channel>,
    registry: &Registry,
    repeats: bool,
) -> lapin::Result<()> {
    let withdrawals = &registry.withdrawals;
    let unsent = withdrawals.take_unsent();
    let mut due = unsent.clone();
    if repeats {
        let new = unsent.iter().map(|withdrawal| withdrawal.job.as_str()).collect::<HashSet<_>>();
        due.extend(withdrawals.all().into_iter().filter(|withdrawal| !new.contains(withdrawal.job.as_str())));
    }
    let published = timeout(CONFIRM_MAX, publish_on(connection, channel, &due)).await;
    let published = published.unwrap_or_else(|_| Err(no_confirm()));
    if published.is_ok() {
        registry.withdrawn.fetch_add(unsent.len() as u64, Ordering::Relaxed);
    } else {
        // The next attempt opens another one.
        *channel = None;
        withdrawals.put_back(unsent);
    }
    published
}

fn no_confirm() -> lapin::Error {
    let why = format!("no confirm within {} s", CONFIRM_MAX.as_secs());
    ErrorKind::IOError(Arc::new(io::Error::new(io::ErrorKind::TimedOut, why))).into()
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
