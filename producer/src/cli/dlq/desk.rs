//! Where one operator at a time reads a dead queue: a lock, and deliveries that nobody acknowledges.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer, ErrorKind};
use tokio::time::{Instant, sleep, timeout};
use vramq_amqp::Address;
use vramq_schemas::topology::dead_queue;

use super::letter::Letter;
use super::trouble::Trouble;
use super::windows::Windows;
use crate::cli::Broker;
use crate::cli::screen::safe;
use crate::cli::signals::Signals;

/// How long an operator waits for the one before: longer than any look takes, shorter than a coffee.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(120);
const LOCK_WAIT: Duration = Duration::from_millis(200);

/// How long a queue that says it has letters may give none before it is asked again.
const SILENCE: Duration = Duration::from_secs(2);

/// How often it may be asked again in vain.
const SILENCES_MAX: u32 = 5;

/// How long the broker may take to have letters back that were given back.
const BACK_MAX: Duration = Duration::from_secs(10);
const BACK_WAIT: Duration = Duration::from_millis(10);

/// How long closing may take before the connection is just dropped.
const CLOSE_MAX: Duration = Duration::from_secs(3);

const NOT_FOUND: u16 = 404;
const ACCESS_REFUSED: u16 = 403;
const RESOURCE_LOCKED: u16 = 405;

/// A connection, and the lock of one dead queue, which the broker takes back when the connection ends, however it ends.
pub(super) struct Desk {
    pub(super) connection: Connection,
    pub(super) queue: String,
}

impl Desk {
    /// Connects, and waits until nobody else is at the queue.
    pub(super) async fn open(broker: &Broker, model: &str) -> Result<Self, Trouble> {
        let connection = connect(broker).await?;
        let desk = Self { connection, queue: dead_queue(model) };
        // First of all: a queue that does not exist needs no lock.
        desk.ready().await?;
        desk.lock().await?;
        Ok(desk)
    }

    /// The same, unless a signal ends the wait.
    pub(super) async fn open_unless(
        broker: &Broker,
        model: &str,
        signals: &mut Signals,
    ) -> Result<Self, Trouble> {
        tokio::select! {
            desk = Self::open(broker, model) => desk,
            (code, name) = signals.next() => Err(Trouble::Stopped(code, name.to_owned())),
        }
    }

    async fn lock(&self) -> Result<(), Trouble> {
        let name = format!("vramq.dlq-lock.{}", self.queue);
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        let start = Instant::now();
        loop {
            let channel = self.connection.create_channel().await?;
            let declared = channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await;
            let Err(error) = declared else {
                return Ok(());
            };
            if code(&error) != Some(RESOURCE_LOCKED) {
                return Err(self.explained(error));
            }
            if start.elapsed() < LOCK_WAIT {
                eprintln!("waiting: somebody else is at {}", safe(&self.queue));
            }
            if start.elapsed() >= LOCK_WAIT_MAX {
                return Err(Trouble::Refused(format!(
                    "somebody else is at {}: their connection has the exclusive queue {}",
                    safe(&self.queue),
                    safe(&name)
                )));
            }
            sleep(LOCK_WAIT).await;
        }
    }

    /// Letters that wait in the queue at this moment.
    pub(super) async fn ready(&self) -> Result<u64, Trouble> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        // On a channel of its own, because a refusal closes it.
        let channel = self.connection.create_channel().await?;
        let told = channel.queue_declare(self.queue.as_str().into(), options, FieldTable::default()).await;
        let told = told.map_err(|error| self.explained(error))?;
        let _ = channel.close(200, "counted".into()).await;
        Ok(told.message_count().into())
    }

    /// Starts to read, from the oldest letter on.
    pub(super) async fn read(&self) -> Result<Reader<'_>, Trouble> {
        let channel = self.connection.create_channel().await?;
        let due = self.ready().await?;
        let acked = Rc::default();
        Ok(Reader { desk: self, channel, consumer: None, windows: Windows::new(due), due, seen: 0, acked })
    }

    fn explained(&self, error: lapin::Error) -> Trouble {
        let queue = safe(&self.queue);
        match code(&error) {
            Some(NOT_FOUND) => Trouble::Refused(format!(
                "there is no queue {queue}: no worker has served this model on this virtual host; `rabbitmqctl \
                 list_queues name messages` shows which there are"
            )),
            Some(ACCESS_REFUSED) => Trouble::Refused(format!(
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

pub(super) async fn connect(broker: &Broker) -> Result<Connection, Trouble> {
    let address: Address =
        broker.url.0.parse().map_err(|error| Trouble::Usage(format!("the broker's URL {error}")))?;
    let address = broker.ca_pem.iter().fold(address, |address, pem| address.trusting(pem.0.clone()));
    let name = format!("vramq dlq {}", std::process::id());
    address.connect(&name).await.map_err(|error| Trouble::Unreachable(error.to_string()))
}

fn code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        ErrorKind::ProtocolError(told) => Some(told.get_id()),
        _ => None,
    }
}

/// Deliveries that are acknowledged by whoever gets them, or go back when the reader does.
///
/// One consumer after the other, each with a prefetch, which bounds what is here and not looked at yet: lapin puts what
/// comes into memory as fast as it comes, and a quorum queue takes "no limit" for 2,000.
pub(super) struct Reader<'a> {
    desk: &'a Desk,
    channel: Channel,
    consumer: Option<(Consumer, u64)>,
    windows: Windows,
    /// Letters that the queue has, as far as it has said.
    due: u64,
    seen: u64,
    acked: Rc<Cell<u64>>,
}

/// Removes what a reader has read.
pub(super) struct Acks {
    channel: Channel,
    acked: Rc<Cell<u64>>,
}

impl Acks {
    pub(super) async fn ack(&self, tag: u64) -> Result<(), Trouble> {
        self.channel.basic_ack(tag, BasicAckOptions::default()).await?;
        self.acked.set(self.acked.get() + 1);
        Ok(())
    }
}

impl Reader<'_> {
    /// The next letter, until all are read that were there.
    ///
    /// Cancel safety: none; whoever drops it half-way gives back what was read.
    pub(super) async fn next(&mut self) -> Result<Option<Taken>, Trouble> {
        let mut silences = 0;
        loop {
            if self.seen >= self.due {
                // A look before, killed a moment ago, may only now have given back what it held. Letters that come while
                // this one goes on are taken along, but do not keep it going: it reads at most twice what was there first.
                let more = self.desk.ready().await?;
                if more == 0 || self.windows.is_last_round(self.seen, more) {
                    return Ok(None);
                }
                self.due += more;
            }
            if self.consumer.as_ref().is_none_or(|(_, left)| *left == 0) {
                self.advance().await?;
            }
            let Some((consumer, left)) = self.consumer.as_mut() else { continue };
            match timeout(SILENCE, consumer.next()).await {
                Ok(Some(Ok(delivery))) => {
                    *left -= 1;
                    self.seen += 1;
                    self.windows.note(delivery.data.len());
                    return Ok(Some(self.taken(delivery)));
                }
                Ok(Some(Err(error))) => return Err(error.into()),
                Ok(None) => return Err(Trouble::Refused(format!("{} was deleted", safe(&self.desk.queue)))),
                // Somebody without this lock took letters, or they expired.
                Err(_) if self.desk.ready().await? == 0 => return Ok(None),
                Err(_) if silences == SILENCES_MAX => {
                    return Err(Trouble::Refused(format!(
                        "{} says that it has letters, but gives none",
                        safe(&self.desk.queue)
                    )));
                }
                Err(_) => silences += 1,
            }
        }
    }

    /// A consumer with another window, in place of the one that is used up.
    async fn advance(&mut self) -> Result<(), Trouble> {
        if let Some((consumer, _)) = self.consumer.take() {
            // What it was given stays unacknowledged.
            self.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await?;
        }
        let (tag, size) = self.windows.next(self.due - self.seen.min(self.due));
        self.channel.basic_qos(size, BasicQosOptions::default()).await?;
        let queue = self.desk.queue.as_str().into();
        let consumer = self.channel.basic_consume(
            queue,
            tag.into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        );
        let consumer = consumer.await.map_err(|error| self.desk.explained(error))?;
        self.consumer = Some((consumer, size.into()));
        Ok(())
    }

    fn taken(&self, delivery: Delivery) -> Taken {
        let Delivery { properties, data, delivery_tag, .. } = delivery;
        Taken { letter: Letter::new(&self.desk.queue, properties, data), tag: delivery_tag }
    }

    pub(super) fn acks(&self) -> Acks {
        Acks { channel: self.channel.clone(), acked: Rc::clone(&self.acked) }
    }

    /// Gives everything back that is not acknowledged, and waits until the queue has it: the next to look would count it
    /// as missing.
    pub(super) async fn give_back(self) -> Result<(), Trouble> {
        let held = self.seen - self.acked.get();
        let _ = timeout(CLOSE_MAX, self.channel.close(200, "seen".into())).await;
        let start = Instant::now();
        while self.desk.ready().await? < held && start.elapsed() < BACK_MAX {
            sleep(BACK_WAIT).await;
        }
        Ok(())
    }
}

/// A letter in hand.
pub(super) struct Taken {
    pub(super) letter: Letter,
    pub(super) tag: u64,
}
