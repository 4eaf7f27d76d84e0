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

use super::direct_replies::DirectReplies;
use super::message::Message;
use crate::failpoint;

/// The broker's answer to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The broker has it: on disk, on a majority for a quorum queue. A direct reply it has passed to the caller, if there
    /// still is one.
    Confirmed,
    /// No queue takes it. The message is gone.
    Unroutable,
    /// The queue is full and rejects publishes.
    Refused,
    /// It is larger than the broker takes, and was not sent: the broker would close the channel.
    TooLarge,
    /// Of a direct reply: its connection was lost over it twice, the second time with no other reply on its way.
    ConnectionLost,
    /// Of a direct reply: there is no connection for it, or it was not confirmed in time.
    NoConnection,
}

/// What every other confirm leaves of the slowest one: after some dozens it no longer counts.
const SLOWEST_FADES: f64 = 0.95;

/// Time that the broker has for confirms: it stands still while the broker blocks publishers, because then it reads nothing of
/// what was sent.
#[derive(Clone, Copy, Debug, Default)]
struct ConfirmClock {
    /// The time until it last started or stopped.
    before: Duration,
    /// Since when it runs.
    since: Option<Instant>,
}

impl ConfirmClock {
    fn running(now: Instant) -> Self {
        Self { before: Duration::ZERO, since: Some(now) }
    }

    fn read(&self, now: Instant) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    fn stop(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: None };
    }

    fn start(&mut self, now: Instant) {
        *self = Self { before: self.read(now), since: Some(now) };
    }
}

/// A channel in confirm mode, and what is open on it. Clones share both.
#[derive(Clone)]
pub struct Publisher {
    channel: Channel,
    direct_replies: DirectReplies,
    /// The largest body that the broker takes, as far as is known.
    body_max: usize,
    ledger: Arc<Mutex<Ledger>>,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("channel", &self.channel.id()).finish_non_exhaustive()
    }
}

/// Publishes by number. Bounded by the unacknowledged jobs: each has one message on its way at most.
#[derive(Default)]
struct Ledger {
    last: u64,
    clock: ConfirmClock,
    /// Not confirmed yet, each with what the clock showed when it was sent.
    open: HashMap<u64, Duration>,
    /// The longest recent time to a confirm: what the broker's disks take.
    slowest: Duration,
    confirms: Confirms,
    /// Its outcome is known and waits to be fetched.
    judged: HashMap<u64, Answer>,
    /// Confirmed, but its outcome depends on another publish.
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
}

impl Publisher {
    /// `channel` is in confirm mode, and nothing else publishes on it. Direct replies go over their own connection.
    pub fn new(channel: Channel, direct_replies: DirectReplies, body_max: usize) -> Self {
        // A random start below 2^62: no two sessions or workers use the same numbers.
        let last = uuid::Uuid::new_v4().as_u64_pair().0 >> 2;
        Self {
            channel,
            direct_replies,
            body_max,
            ledger: Arc::new(Mutex::new(Ledger::new(last, Instant::now()))),
        }
    }

    /// The longest recent time that the broker took for a confirm, without the time for which it blocked publishers.
    pub fn slowest_confirm(&self) -> Duration {
        self.ledger().slowest
    }

    /// The broker reads nothing from now on.
    pub fn blocked(&self) {
        self.ledger().clock.stop(Instant::now());
    }

    /// The broker reads again.
    pub fn unblocked(&self) {
        self.ledger().clock.start(Instant::now());
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Publishes one message, once.
    ///
    /// # Errors
    /// The connection or channel is closed; whether the message arrived is unknown.
    pub async fn publish(&self, message: &Message) -> lapin::Result<Answer> {
        if message.body.len() > self.body_max {
            return Ok(Answer::TooLarge);
        }
        let (sent, confirmed) = message.failpoints();
        let id = message.properties.message_id().as_ref().map(|id| id.as_str());
        if message.is_direct_reply() {
            let answer = self.direct_replies.publish(message, None).await;
            if answer == Answer::Confirmed {
                failpoint::reach(confirmed, [id]);
            }
            return Ok(answer);
        }
        let (sequence, confirm) = self.send(message).await?;
        failpoint::reach(sent, [id]);
        let answer = self.answer(sequence, confirm).await?;
        if answer != Answer::Refused {
            failpoint::reach(confirmed, [id]);
        }
        Ok(answer)
    }

    async fn send(&self, message: &Message) -> lapin::Result<(u64, PublisherConfirm)> {
        let sequence = self.ledger().open(Instant::now());
        let mut headers = message.headers.clone();
        headers.insert(PUBLISH_SEQ.into(), AMQPValue::LongLongInt(sequence.cast_signed()));
        let properties = message.properties.clone().with_headers(headers);
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let exchange = message.exchange.clone();
        let key = message.routing_key.clone();
        let confirm = self.channel.basic_publish(exchange, key, options, &message.body, properties).await?;
        Ok((sequence, confirm))
    }

    /// The broker's answer to one publish.
    ///
    /// A return reaches lapin before the confirm of its publish, and lapin attaches it to the next confirm that completes, of
    /// whichever publish. So a confirm is judged only when all that completed before it are noted.
    ///
    /// This holds because all publishes of this channel belong to futures of one `FuturesUnordered`, each with one confirm
    /// at a time, which it polls as soon as it has it; see [`after_the_others`].
    async fn answer(&self, sequence: u64, confirm: PublisherConfirm) -> lapin::Result<Answer> {
        let confirmation = confirm.await?;
        self.ledger().note(sequence, &confirmation, Instant::now());
        after_the_others().await;
        let judged = self.ledger().judge(sequence);
        Ok(match judged {
            Ok(answer) => answer,
            // The sender is in the ledger, which `self` keeps.
            Err(verdict) => verdict.await.unwrap_or(Answer::Refused),
        })
    }

    /// Nothing panics while it holds the lock, and every entry stands by itself.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    /// Numbers start after `last`.
    fn new(last: u64, now: Instant) -> Self {
        Self { last, clock: ConfirmClock::running(now), ..Self::default() }
    }

    fn open(&mut self, now: Instant) -> u64 {
        self.last += 1;
        self.open.insert(self.last, self.clock.read(now));
        self.last
    }

    /// Takes in a confirm.
    fn note(&mut self, sequence: u64, confirmation: &Confirmation, now: Instant) {
        if let Some(sent) = self.open.remove(&sequence) {
            let took = self.clock.read(now).saturating_sub(sent);
            self.slowest = took.max(self.slowest.mul_f64(SLOWEST_FADES));
        }
        self.confirms.complete(sequence, confirmation.is_ack(), whose(confirmation));
    }

    /// Judges all publishes that can be judged. Gives the answer to one of them, or a receiver for it.
    fn judge(&mut self, sequence: u64) -> Result<Answer, oneshot::Receiver<Answer>> {
        let open = &self.open;
        for (judged, verdict) in self.confirms.settle(|sequence| open.contains_key(&sequence)) {
            let answer = match verdict {
                Verdict::Accepted => Answer::Confirmed,
                Verdict::Returned => Answer::Unroutable,
                Verdict::Rejected => Answer::Refused,
            };
            match self.waiting.remove(&judged) {
                // An `Err`: the future that waited was dropped.
                Some(waiting) => drop(waiting.send(answer)),
                None => drop(self.judged.insert(judged, answer)),
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
fn whose(confirmation: &Confirmation) -> Option<u64> {
    let (Confirmation::Ack(returned) | Confirmation::Nack(returned)) = confirmation else { return None };
    let headers = returned.as_ref()?.delivery.properties.headers().as_ref()?;
    headers.inner().get(PUBLISH_SEQ)?.as_long_long_int().map(i64::cast_unsigned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_confirm_does_not_count_the_time_for_which_the_broker_blocked() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ledger = Ledger::new(0, start);
        let before = ledger.open(at(100));
        ledger.clock.stop(at(120));
        // Neither does a second word on it.
        ledger.clock.stop(at(130));
        let during = ledger.open(at(5_000));
        ledger.clock.start(at(60_120));
        ledger.note(before, &Confirmation::Ack(None), at(60_140));
        assert_eq!(ledger.slowest, Duration::from_millis(40));
        ledger.note(during, &Confirmation::Ack(None), at(60_150));
        assert_eq!(ledger.slowest, Duration::from_millis(38), "30 ms, and what is left of the 40");
        let after = ledger.open(at(60_200));
        ledger.note(after, &Confirmation::Ack(None), at(60_300));
        assert_eq!(ledger.slowest, Duration::from_millis(100));
    }
}
