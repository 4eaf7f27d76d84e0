//! The AMQP side of `vramq status`: receives heartbeats, counts queues, and reconnects for ever.

use std::convert::Infallible;
use std::time::Duration;

use lapin::Connection;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use vramq_amqp::{Address, next_delivery, queue_depth, subscribe_to_heartbeats};
use vramq_schemas::topology::{bulk_queue, dead_queue, jobs_queue, suspects_queue};

use super::fleet::{Counted, ToCount};
use super::worker_snapshot::Down;
use crate::broker::{close, is_refusal};

/// How often queues are counted, and a missing exchange is looked for again.
const COUNT_EVERY: Duration = Duration::from_secs(2);

/// How long to wait before the next attempt to connect.
const RECONNECT_WAIT: Duration = Duration::from_secs(1);

/// What the listener reports.
#[derive(Debug)]
pub(super) enum Event {
    Connected,
    Lost(Down),
    /// Whether the exchange of heartbeats exists.
    Exchange(bool),
    Heartbeat(Vec<u8>),
    Counted(String, Counted),
}

/// Listens until the receiver of its events is dropped.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) address: Address,
    /// The name in the broker's list of connections.
    pub(super) name: String,
    pub(super) to_count: watch::Receiver<ToCount>,
    pub(super) events: mpsc::Sender<Event>,
}

/// Why a session ended.
enum End {
    Lost(Down),
    /// The receiver of the events was dropped.
    Unwanted,
}

impl From<lapin::Error> for End {
    fn from(error: lapin::Error) -> Self {
        let text = error.to_string();
        Self::Lost(if is_refusal(&error) { Down::Refused(text) } else { Down::Unreachable(text) })
    }
}

impl Listener {
    /// Opens one session after another.
    pub(super) async fn run(mut self) {
        loop {
            let why = match self.session().await {
                Ok(never) => match never {},
                Err(End::Unwanted) => return,
                Err(End::Lost(why)) => why,
            };
            if self.events.send(Event::Lost(why)).await.is_err() {
                return;
            }
            tokio::select! {
                () = sleep(RECONNECT_WAIT) => {}
                () = self.events.closed() => return,
            }
        }
    }

    async fn session(&mut self) -> Result<Infallible, End> {
        let connection = tokio::select! {
            connected = self.address.connect(&self.name) => {
                connected.map_err(|error| {
                    let text = error.to_string();
                    End::Lost(if error.is_refusal() { Down::Refused(text) } else { Down::Unreachable(text) })
                })?
            }
            () = self.events.closed() => return Err(End::Unwanted),
        };
        let ended = self.listen(&connection).await;
        if matches!(ended, Err(End::Unwanted)) {
            close(&connection).await;
        }
        ended
    }

    async fn listen(&mut self, connection: &Connection) -> Result<Infallible, End> {
        self.tell(Event::Connected).await?;
        let mut consumer = None;
        let mut ticks = interval(COUNT_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.events.closed() => return Err(End::Unwanted),
                delivery = next_delivery(&mut consumer) => {
                    let delivery = delivery.ok_or_else(|| End::Lost(Down::Unreachable("the connection ended".to_owned())))??;
                    self.tell(Event::Heartbeat(delivery.data)).await?;
                }
                changed = self.to_count.changed() => {
                    changed.map_err(|_| End::Unwanted)?;
                    self.count(connection).await?;
                }
                _ = ticks.tick() => {
                    // Counting comes first: it needs fewer permissions.
                    self.count(connection).await?;
                    if consumer.is_none() {
                        consumer = subscribe_to_heartbeats(connection).await?;
                        self.tell(Event::Exchange(consumer.is_some())).await?;
                    }
                }
            }
        }
    }

    async fn count(&mut self, connection: &Connection) -> Result<(), End> {
        let to_count = self.to_count.borrow_and_update().clone();
        for (key, names) in to_count {
            let mut further = Vec::with_capacity(names.len());
            for name in names {
                let depth = queue_depth(connection, &name).await?;
                further.push((name, depth));
            }
            let counted = Counted {
                jobs: queue_depth(connection, &jobs_queue(&key)).await?,
                bulk: queue_depth(connection, &bulk_queue(&key)).await?,
                suspects: queue_depth(connection, &suspects_queue(&key)).await?,
                dead: queue_depth(connection, &dead_queue(&key)).await?,
                further,
            };
            self.tell(Event::Counted(key, counted)).await?;
        }
        Ok(())
    }

    async fn tell(&self, events: Event) -> Result<(), End> {
        self.events.send(events).await.map_err(|_| End::Unwanted)
    }
}
