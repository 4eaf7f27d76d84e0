//! Where one operator at a time is at a dead queue: a connection and a lock.

use std::time::Duration;

use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ErrorKind};
use tokio::time::{Instant, sleep, timeout};
use vramq_schemas::topology::dead_queue;

use super::error::Error;
use crate::broker::Broker;
use crate::output::text::safe;
use crate::signals::Signals;

/// How long an operator waits for the one before: longer than any look takes, shorter than a coffee.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(120);
const LOCK_WAIT: Duration = Duration::from_millis(200);

/// How long the broker may take to have letters back that were given back.
const BACK_MAX: Duration = Duration::from_secs(10);
const BACK_WAIT: Duration = Duration::from_millis(10);

/// How long closing may take before the connection is just dropped.
pub(super) const CLOSE_MAX: Duration = Duration::from_secs(3);

const NOT_FOUND: u16 = 404;
const ACCESS_REFUSED: u16 = 403;
const RESOURCE_LOCKED: u16 = 405;

/// A connection, and the lock of one dead queue, which the broker takes back when the connection ends, however it ends.
pub(super) struct QueueLock {
    pub(super) connection: Connection,
    pub(super) queue: String,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Count {
    /// Letters that wait.
    pub(super) ready: u64,
    consumers: u32,
}

impl QueueLock {
    /// Connects, and waits until nobody else is at the queue.
    pub(super) async fn open(broker: &Broker, model: &str) -> Result<Self, Error> {
        let connection = connect(broker).await?;
        let queue_lock = Self { connection, queue: dead_queue(model) };
        // First of all: a queue that does not exist needs no lock.
        queue_lock.count().await?;
        queue_lock.lock().await?;
        queue_lock.alone().await?;
        Ok(queue_lock)
    }

    /// Waits until nobody consumes from the queue. The lock of somebody who was killed is gone at once, but what they held
    /// comes back a little later, when their consumers go: a reader that begins before gets letters in another order, and
    /// gives them back in that order.
    async fn alone(&self) -> Result<(), Error> {
        let start = Instant::now();
        while self.count().await?.consumers > 0 {
            if start.elapsed() >= BACK_MAX {
                return Err(Error::Refused(format!(
                    "a program consumes from {}: to look now would share the letters with it, and change their order",
                    safe(&self.queue)
                )));
            }
            sleep(BACK_WAIT).await;
        }
        Ok(())
    }

    /// The same, unless a signal ends the wait.
    pub(super) async fn open_unless(
        broker: &Broker,
        model: &str,
        signals: &mut Signals,
    ) -> Result<Self, Error> {
        tokio::select! {
            queue_lock = Self::open(broker, model) => queue_lock,
            (code, name) = signals.next() => Err(Error::Stopped(code, name.to_owned())),
        }
    }

    async fn lock(&self) -> Result<(), Error> {
        let name = format!("vramq.dlq-lock.{}", self.queue);
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        let start = Instant::now();
        let mut is_told = false;
        loop {
            let channel = self.connection.create_channel().await?;
            let declared = channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await;
            let Err(error) = declared else {
                return Ok(());
            };
            if code(&error) != Some(RESOURCE_LOCKED) {
                return Err(self.explained(error));
            }
            if !std::mem::replace(&mut is_told, true) {
                eprintln!("waiting: somebody else is at {}", safe(&self.queue));
            }
            if start.elapsed() >= LOCK_WAIT_MAX {
                return Err(Error::Refused(format!(
                    "somebody else is at {}: their connection has the exclusive queue {}",
                    safe(&self.queue),
                    safe(&name)
                )));
            }
            sleep(LOCK_WAIT).await;
        }
    }

    /// What the queue has at this moment.
    pub(super) async fn count(&self) -> Result<Count, Error> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        // On a channel of its own, because a refusal closes it.
        let channel = self.connection.create_channel().await?;
        let told = channel.queue_declare(self.queue.as_str().into(), options, FieldTable::default()).await;
        let told = told.map_err(|error| self.explained(error))?;
        let _ = channel.close(200, "counted".into()).await;
        Ok(Count { ready: told.message_count().into(), consumers: told.consumer_count() })
    }

    /// Waits until nobody holds letters, and those that were given back are in the queue again.
    pub(super) async fn has_back(&self, letters: u64) -> Result<(), Error> {
        let start = Instant::now();
        loop {
            let Count { ready, consumers } = self.count().await?;
            if (consumers == 0 && ready >= letters) || start.elapsed() >= BACK_MAX {
                return Ok(());
            }
            sleep(BACK_WAIT).await;
        }
    }

    pub(super) fn explained(&self, error: lapin::Error) -> Error {
        let queue = safe(&self.queue);
        match code(&error) {
            Some(NOT_FOUND) => Error::Refused(format!(
                "there is no queue {queue}: no worker has served this model on this virtual host; `rabbitmqctl \
                 list_queues name messages` shows which there are"
            )),
            Some(ACCESS_REFUSED) => Error::Refused(format!(
                "{}; looking at {queue} needs the permissions read on it, and configure and write on vramq.dlq-lock.*",
                safe(&error.to_string())
            )),
            _ => error.into(),
        }
    }

    /// Ends the connection in good order, and with it the lock.
    pub(super) async fn close(self) {
        let _ = timeout(CLOSE_MAX, self.connection.close(200, "bye".into())).await;
    }
}

pub(super) async fn connect(broker: &Broker) -> Result<Connection, Error> {
    Ok(broker.connect("dlq").await?)
}

fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(told) => Some(told.get_id()),
        _ => None,
    }
}
