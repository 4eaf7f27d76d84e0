//! The AMQP side of `vramq status`: receives heartbeats, counts queues, and reconnects for ever.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, ErrorKind, ExchangeKind};
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval, sleep};
use vramq_amqp::Address;
use vramq_schemas::topology::{STATUS_EXCHANGE, bulk_queue, dead_queue, jobs_queue, suspects_queue};

use super::fleet::{Counted, Depth};

/// How often queues are counted, and a missing exchange is looked for again.
const COUNT_EVERY: Duration = Duration::from_secs(2);

/// How long to wait before the next attempt to connect.
const RECONNECT_WAIT: Duration = Duration::from_secs(1);

/// Heartbeats that may wait in the queue; then the broker drops the oldest.
const WAITING_MAX: i32 = 1_024;

const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;

/// What the listener reports.
#[derive(Debug)]
pub(super) enum Event {
    Connected,
    Lost(String),
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
    /// The keys of models whose queues are counted.
    pub(super) keys: watch::Receiver<BTreeSet<String>>,
    pub(super) events: mpsc::Sender<Event>,
}

/// Why a session ended.
enum End {
    Lost(String),
    /// The receiver of the events was dropped.
    Unwanted,
}

impl From<lapin::Error> for End {
    fn from(error: lapin::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

impl Listener {
    /// Opens one session after another.
    pub(super) async fn run(mut self) {
        loop {
            let error = match self.session().await {
                Ok(never) => match never {},
                Err(End::Unwanted) => return,
                Err(End::Lost(error)) => error,
            };
            if self.events.send(Event::Lost(error)).await.is_err() {
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
                connected.map_err(|error| End::Lost(error.to_string()))?
            }
            () = self.events.closed() => return Err(End::Unwanted),
        };
        let ended = self.listen(&connection).await;
        if matches!(ended, Err(End::Unwanted)) {
            // A proper close, so that the broker logs no warning.
            let _ = tokio::time::timeout(RECONNECT_WAIT, connection.close(200, "bye".into())).await;
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
                delivery = next(&mut consumer) => {
                    let delivery = delivery.ok_or_else(|| End::Lost("the connection ended".to_owned()))??;
                    self.tell(Event::Heartbeat(delivery.data)).await?;
                }
                changed = self.keys.changed() => {
                    changed.map_err(|_| End::Unwanted)?;
                    self.count(connection).await?;
                }
                _ = ticks.tick() => {
                    // Counting comes first: it needs fewer permissions.
                    self.count(connection).await?;
                    if consumer.is_none() {
                        consumer = subscribe(connection).await?;
                        self.tell(Event::Exchange(consumer.is_some())).await?;
                    }
                }
            }
        }
    }

    async fn count(&mut self, connection: &Connection) -> Result<(), End> {
        let keys = self.keys.borrow_and_update().clone();
        for key in keys {
            let counted = Counted {
                jobs: depth(connection, &jobs_queue(&key)).await?,
                bulk: depth(connection, &bulk_queue(&key)).await?,
                suspects: depth(connection, &suspects_queue(&key)).await?,
                dead: depth(connection, &dead_queue(&key)).await?,
            };
            self.tell(Event::Counted(key, counted)).await?;
        }
        Ok(())
    }

    async fn tell(&self, events: Event) -> Result<(), End> {
        self.events.send(events).await.map_err(|_| End::Unwanted)
    }
}

/// The next delivery; never, while there is no consumer.
async fn next(consumer: &mut Option<Consumer>) -> Option<lapin::Result<lapin::message::Delivery>> {
    match consumer {
        Some(consumer) => consumer.next().await,
        None => std::future::pending().await,
    }
}

/// Consumes from an exclusive queue. `None` while there is no exchange: workers declare it, and `status` changes nothing.
async fn subscribe(connection: &Connection) -> Result<Option<Consumer>, End> {
    let channel = connection.create_channel().await?;
    let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let exchange = ShortString::from(STATUS_EXCHANGE);
    let found = channel
        .exchange_declare(exchange.clone(), ExchangeKind::Fanout, passive, FieldTable::default())
        .await;
    match found {
        Ok(()) => {}
        Err(error) if code(&error) == Some(NOT_FOUND) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let queue = own_queue(&channel).await?;
    let (key, none) = (ShortString::default(), FieldTable::default());
    channel
        .queue_bind(queue.clone(), exchange, key.clone(), QueueBindOptions::default(), none.clone())
        .await?;
    let options = BasicConsumeOptions { no_ack: true, exclusive: true, ..BasicConsumeOptions::default() };
    Ok(Some(channel.basic_consume(queue, key, options, none).await?))
}

async fn own_queue(channel: &Channel) -> lapin::Result<ShortString> {
    let options =
        QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(WAITING_MAX));
    Ok(channel.queue_declare(ShortString::default(), options, arguments).await?.name().clone())
}

async fn depth(connection: &Connection, queue: &str) -> Result<Depth, End> {
    // On a channel of its own: a refusal closes it.
    let channel = connection.create_channel().await?;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(queue.into(), passive, FieldTable::default()).await {
        Ok(queue) => {
            channel.close(200, "counted".into()).await?;
            Ok(Depth::Messages { ready: queue.message_count(), consumers: queue.consumer_count() })
        }
        Err(error) => match code(&error) {
            Some(NOT_FOUND) => Ok(Depth::NoQueue),
            Some(ACCESS_REFUSED) => Ok(Depth::NoPermission),
            _ => Err(error.into()),
        },
    }
}

fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(said) => Some(said.get_id()),
        _ => None,
    }
}
