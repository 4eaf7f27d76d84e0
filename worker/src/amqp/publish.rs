//! Publishing with an answer: confirmed, returned or refused.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use lapin::options::BasicPublishOptions;
use lapin::types::AMQPValue;
use lapin::{Channel, Confirmation, PublisherConfirm};
use tokio::sync::oneshot;
use vramq_amqp::{Confirms, Verdict};
use vramq_schemas::headers::PUBLISH_SEQ;

use crate::amqp::direct_replies::DirectReplies;
use crate::amqp::message::Message;
use crate::drill;
use crate::retry::Waits;

/// How often a message that the broker refused (a full queue with `reject-publish`) is offered again, and the waits
/// in between: about 20 s in all, in which a consumer that only paused comes back. Meanwhile the job keeps its slot,
/// so a reply queue that nobody reads slows the worker down instead of filling its memory.
const REFUSED_TRIES: usize = 8;
const REFUSED_WAIT_MIN: Duration = Duration::from_millis(200);
const REFUSED_WAIT_MAX: Duration = Duration::from_secs(5);

/// How the broker took a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It has it: on disk, on a majority for a quorum queue. Of a direct reply: it has given it to the caller, if there
    /// still is one.
    Confirmed,
    /// No queue to route it to. It is gone.
    Unroutable,
    /// It refused it for good: the queue stayed full.
    Refused,
    /// It is larger than the broker takes, and was not sent: the broker would close the channel.
    TooLarge,
    /// Of a direct reply: the connection was lost over it twice, the second time with no other reply on its way.
    ConnectionLost,
    /// Of a direct reply: there is no connection for it, or it did not get through in time.
    NoConnection,
}

/// What is left of the slowest confirm with every other: some dozens later it is forgotten.
const SLOWEST_FADES: f64 = 0.95;

/// What the broker does with messages, as far as it has said.
#[derive(Clone, Copy, Debug)]
pub struct BrokerLimits {
    /// The largest body that it takes.
    pub body_max: usize,
    /// The queues are declared by workers: what is rejected is dead-lettered, and what is gone comes back with a session.
    pub declares: bool,
}

/// A channel in confirm mode, and what is open on it. Clones share both.
#[derive(Clone)]
pub struct Publisher {
    channel: Channel,
    direct_replies: DirectReplies,
    limits: BrokerLimits,
    /// When it offers what was refused no more: the job that it is about may not be in hand for longer.
    until: Option<Instant>,
    ledger: Arc<Mutex<Ledger>>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("channel", &self.channel.id()).finish_non_exhaustive()
    }
}

/// Publishes by number. Bounded by the jobs in hand: each has a few messages under way at most.
#[derive(Default)]
struct Ledger {
    last: u64,
    /// Without a confirm yet, each with the moment it was sent.
    open: HashMap<u64, Instant>,
    /// The longest time to a confirm, of late: what the broker's disks take.
    slowest: Duration,
    confirms: Confirms,
    /// Judged, and about to ask.
    judged: HashMap<u64, Taken>,
    /// With a confirm, but the verdict hangs on another's.
    waiting: HashMap<u64, oneshot::Sender<Taken>>,
}

impl Publisher {
    /// `channel` is in confirm mode, and nobody else publishes on it. Direct replies do not go over it.
    pub fn new(channel: Channel, direct_replies: DirectReplies, limits: BrokerLimits) -> Self {
        // From anywhere, with room to count on: numbers of other sessions and workers are others.
        let last = uuid::Uuid::new_v4().as_u64_pair().0 >> 2;
        Self {
            channel,
            direct_replies,
            limits,
            until: None,
            ledger: Arc::new(Mutex::new(Ledger { last, ..Ledger::default() })),
        }
    }

    /// The same for a job that may be in hand until then.
    #[must_use]
    pub fn until(&self, until: Instant) -> Self {
        Self { until: Some(until), ..self.clone() }
    }

    /// The longest time that the broker took for a confirm, of late.
    pub fn slowest_confirm(&self) -> Duration {
        self.ledger().slowest
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    pub fn limits(&self) -> BrokerLimits {
        self.limits
    }

    /// Publishes the messages of one job, each when the one before is confirmed, so that `done` never overtakes a
    /// `part`. What the broker refuses is offered again for a while. The answer is the first that is not `Confirmed`.
    ///
    /// # Errors
    /// The connection or channel is gone; whether the messages arrived is unknown.
    pub async fn publish_all(&self, messages: &[Message]) -> lapin::Result<Taken> {
        for message in messages {
            let taken = self.publish(message).await?;
            if taken != Taken::Confirmed {
                return Ok(taken);
            }
        }
        Ok(Taken::Confirmed)
    }

    /// Publishes one message. See [`publish_all`](Self::publish_all).
    ///
    /// # Errors
    /// As for [`publish_all`](Self::publish_all).
    pub async fn publish(&self, message: &Message) -> lapin::Result<Taken> {
        if message.body.len() > self.limits.body_max {
            return Ok(Taken::TooLarge);
        }
        let (sent, confirmed) = message.drill_points();
        let id = message.properties.message_id().as_ref().map(|id| id.as_str());
        if message.is_direct_reply() {
            let taken = self.direct_replies.publish(message, self.until).await;
            if taken == Taken::Confirmed {
                drill::reach(confirmed, [id]);
            }
            return Ok(taken);
        }
        let mut waits = Waits::between(REFUSED_WAIT_MIN, REFUSED_WAIT_MAX);
        for _ in 0..REFUSED_TRIES {
            let (sequence, confirm) = self.send(message).await?;
            drill::reach(sent, [id]);
            match self.taken(sequence, confirm).await? {
                Taken::Refused => {
                    let wait = waits.next_wait();
                    if self.until.is_some_and(|until| Instant::now() + wait > until) {
                        break;
                    }
                    tokio::time::sleep(wait).await;
                }
                taken => {
                    drill::reach(confirmed, [id]);
                    return Ok(taken);
                }
            }
        }
        Ok(Taken::Refused)
    }

    async fn send(&self, message: &Message) -> lapin::Result<(u64, PublisherConfirm)> {
        let sequence = self.ledger().open();
        let mut headers = message.headers.clone();
        headers.insert(PUBLISH_SEQ.into(), AMQPValue::LongLongInt(sequence.cast_signed()));
        let properties = message.properties.clone().with_headers(headers);
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let exchange = message.exchange.clone();
        let key = message.routing_key.clone();
        let confirm = self.channel.basic_publish(exchange, key, options, &message.body, properties).await?;
        Ok((sequence, confirm))
    }

    /// The broker's word on one publish.
    ///
    /// A return reaches lapin before the confirm of its publish, and goes with the next confirm that completes,
    /// whosever that is. So a confirm is judged only when all that completed before it are noted.
    ///
    /// This holds because all publishes of this channel belong to futures of one `FuturesUnordered`, each with one confirm
    /// at a time, which it polls as soon as it has it; see [`after_the_others`].
    async fn taken(&self, sequence: u64, confirm: PublisherConfirm) -> lapin::Result<Taken> {
        let answer = confirm.await?;
        self.ledger().note(sequence, &answer);
        after_the_others().await;
        let judged = self.ledger().judge(sequence);
        Ok(match judged {
            Ok(taken) => taken,
            // The sender is in the ledger, which `self` keeps.
            Err(verdict) => verdict.await.unwrap_or(Taken::Refused),
        })
    }

    /// Nothing panics while it holds the lock, and every entry stands by itself.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn open(&mut self) -> u64 {
        self.last += 1;
        self.open.insert(self.last, Instant::now());
        self.last
    }

    /// Takes in a confirm.
    fn note(&mut self, sequence: u64, answer: &Confirmation) {
        if let Some(sent) = self.open.remove(&sequence) {
            self.slowest = sent.elapsed().max(self.slowest.mul_f64(SLOWEST_FADES));
        }
        self.confirms.complete(sequence, answer.is_ack(), whose(answer));
    }

    /// Judges all that can be, and tells those who wait for it. Gives the verdict on one publish, or the promise of it.
    fn judge(&mut self, sequence: u64) -> Result<Taken, oneshot::Receiver<Taken>> {
        let open = &self.open;
        for (judged, verdict) in self.confirms.settle(|sequence| open.contains_key(&sequence)) {
            let taken = match verdict {
                Verdict::Accepted => Taken::Confirmed,
                Verdict::Returned => Taken::Unroutable,
                Verdict::Rejected => Taken::Refused,
            };
            match self.waiting.remove(&judged) {
                // An `Err` means that nobody wants to know any more.
                Some(waiting) => drop(waiting.send(taken)),
                None => drop(self.judged.insert(judged, taken)),
            }
        }
        self.judged.remove(&sequence).ok_or_else(|| {
            let (sender, verdict) = oneshot::channel();
            self.waiting.insert(sequence, sender);
            verdict
        })
    }
}

/// Lets the other futures of the same `FuturesUnordered` go first. It polls in the order of waking, so this comes back
/// when all that were woken before have been polled: every confirm that completed before ours is noted then.
async fn after_the_others() {
    let mut first = true;
    poll_fn(|context| {
        if std::mem::take(&mut first) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    })
    .await;
}

/// The publish whose return came with a confirm.
fn whose(answer: &Confirmation) -> Option<u64> {
    let (Confirmation::Ack(returned) | Confirmation::Nack(returned)) = answer else { return None };
    let headers = returned.as_ref()?.delivery.properties.headers().as_ref()?;
    headers.inner().get(PUBLISH_SEQ)?.as_long_long_int().map(i64::cast_unsigned)
}
