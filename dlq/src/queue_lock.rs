//! The lock that lets one operator at a time, with `vramq dlq` or at a gateway's page, read a dead queue.

use std::time::Duration;

use lapin::Connection;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use tokio::time::{Instant, sleep};
use vramq_amqp::reply_code::{ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, reply_code};
use vramq_schemas::topology::dead_queue;

use crate::access::{Access, close};
use crate::error::Error;
use crate::stop::Stops;
use crate::text::safe;

const LOCK_POLL: Duration = Duration::from_millis(200);

/// The longest wait until the broker has requeued the letters that were given back.
const REQUEUE_MAX: Duration = Duration::from_secs(10);
const REQUEUE_POLL: Duration = Duration::from_millis(10);

/// A connection that holds the lock of a dead queue. The lock is an exclusive queue: the broker deletes it when the connection
/// ends, however that happens.
#[derive(Debug)]
pub struct QueueLock {
    pub connection: Connection,
    /// The name of the dead queue.
    pub queue: String,
}

/// What a passive declaration of the queue returns.
#[derive(Clone, Copy, Debug)]
pub struct QueueDepth {
    /// Messages that are not delivered to a consumer.
    pub ready: u64,
    consumers: u32,
}

impl QueueLock {
    /// Connects, and waits for the lock.
    ///
    /// # Errors
    /// The broker is unreachable or refuses, there is no such queue, or another operator or program uses it.
    pub async fn open(access: &Access, model: &str) -> Result<Self, Error> {
        let connection = access.connect().await?;
        let this = Self { connection, queue: dead_queue(model) };
        match this.acquire(access).await {
            Ok(()) => Ok(this),
            Err(error) => {
                this.close().await;
                Err(error)
            }
        }
    }

    async fn acquire(&self, access: &Access) -> Result<(), Error> {
        // A queue that does not exist must not leave a lock behind.
        self.count().await?;
        self.lock(access).await?;
        self.wait_for_no_consumers().await
    }

    /// Like [`open`](Self::open), unless a request to end comes first.
    pub(crate) async fn open_unless(access: &Access, model: &str, stops: &mut Stops) -> Result<Self, Error> {
        tokio::select! {
            lock = Self::open(access, model) => lock,
            stop = stops.next() => Err(Error::Stopped(stop)),
        }
    }

    async fn lock(&self, access: &Access) -> Result<(), Error> {
        let name = format!("vramq.dlq-lock.{}", self.queue);
        let queue = safe(&self.queue);
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        let start = Instant::now();
        let mut is_waiting = false;
        loop {
            let channel = self.connection.create_channel().await?;
            let declared = channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await;
            let Err(error) = declared else {
                return Ok(());
            };
            if reply_code(&error) != Some(RESOURCE_LOCKED) {
                return Err(self.explained(error));
            }
            if !std::mem::replace(&mut is_waiting, true) {
                (access.on_lock_wait)(&format!(
                    "waiting: another operator (`vramq dlq`, or a gateway's page) holds the lock of {queue}"
                ));
            }
            if start.elapsed() >= access.lock_wait_max {
                let name = safe(&name);
                return Err(Error::Refused(format!(
                    "another operator (`vramq dlq`, or a gateway's page) holds the lock of {queue}: the exclusive queue {name} of its connection"
                )));
            }
            sleep(LOCK_POLL).await;
        }
    }

    /// Waits until the queue has no consumers. The lock of a killed process is released at once, but its unacknowledged letters are
    /// requeued a little later, when its consumers end. Reading before that would change their order.
    async fn wait_for_no_consumers(&self) -> Result<(), Error> {
        let start = Instant::now();
        while self.count().await?.consumers > 0 {
            if start.elapsed() >= REQUEUE_MAX {
                return Err(Error::Refused(format!(
                    "another program consumes from {}: reading now would share the dead letters with it and change their order",
                    safe(&self.queue)
                )));
            }
            sleep(REQUEUE_POLL).await;
        }
        Ok(())
    }

    /// Asks the broker.
    ///
    /// # Errors
    /// The queue cannot be read, or the connection is lost.
    pub async fn count(&self) -> Result<QueueDepth, Error> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        // On a channel of its own: a refusal closes it.
        let channel = self.connection.create_channel().await?;
        let declared =
            channel.queue_declare(self.queue.as_str().into(), options, FieldTable::default()).await;
        let queue = declared.map_err(|error| self.explained(error))?;
        let _ = channel.close(200, "OK".into()).await;
        Ok(QueueDepth { ready: queue.message_count().into(), consumers: queue.consumer_count() })
    }

    /// Waits until nothing is held unacknowledged and the queue has so many messages again.
    pub(crate) async fn wait_for_requeue(&self, messages: u64) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let QueueDepth { ready, consumers } = self.count().await?;
            if (consumers == 0 && ready >= messages) || start.elapsed() >= REQUEUE_MAX {
                return Ok(());
            }
            sleep(REQUEUE_POLL).await;
        }
    }

    /// An error of the broker, with what an operator can do about it.
    pub(crate) fn explained(&self, error: lapin::Error) -> Error {
        let queue = safe(&self.queue);
        match reply_code(&error) {
            Some(NOT_FOUND) => Error::NoQueue(format!(
                "there is no queue {queue}: no worker has served this model on this virtual host; `rabbitmqctl list_queues \
                 name messages` lists the queues"
            )),
            Some(ACCESS_REFUSED) => Error::Refused(format!(
                "{}; to read {queue} a user needs the permission `read` for it, and `configure` and `write` for \
                 vramq.dlq-lock.*",
                safe(&error.to_string())
            )),
            _ => error.into(),
        }
    }

    /// Closes the connection, which releases the lock.
    pub async fn close(self) {
        close(&self.connection).await;
    }
}
