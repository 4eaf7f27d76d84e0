//! Publishes on a channel in confirm mode, and finds out what the broker did with each message.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lapin::options::BasicPublishOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, PublisherConfirm};
use vramq_schemas::fields::long;
use vramq_schemas::headers::PUBLISH_SEQ;

use crate::confirms::PublishOutcome;
use crate::ledger::{Ledger, OnItsWay, UnknownOutcome};
use crate::returns::MatchBy;
use crate::transfer::Transfer;

/// The delivery mode of messages that survive a restart of the broker.
pub const PERSISTENT: u8 = 2;

/// A message to publish.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message<B = Bytes> {
    /// Empty for the default exchange, which routes to the queue that the routing key names.
    pub exchange: ShortString,
    pub routing_key: ShortString,
    /// Without headers.
    pub properties: BasicProperties,
    pub headers: FieldTable,
    pub body: B,
    /// The broker returns the message if no queue is bound for it. Only direct replies do without.
    pub mandatory: bool,
}

/// A channel in confirm mode, and what is published on it without a known outcome. Clones share both.
///
/// Its users differ in who holds the messages that wait for their confirm. The worker has one future for each job, which publishes
/// several messages in turn: it calls [`send`](Self::send) and [`outcome`](Self::outcome). All others hand their messages over to a
/// [`PublishPipeline`](crate::PublishPipeline), which limits them and returns outcomes with the caller's token.
///
/// Invariants: no other code publishes on the channel. All futures that wait for a confirm are in one `FuturesUnordered`, each with one
/// confirm at a time. Matching returns with publishes relies on its order of polling, which is the order of waking.
#[derive(Clone)]
pub struct ConfirmedPublisher {
    channel: Channel,
    match_by: MatchBy,
    ledger: Arc<Mutex<Ledger>>,
}

/// A message that was sent and is not confirmed.
#[derive(Debug)]
pub struct Unconfirmed {
    sequence: u64,
    confirm: PublisherConfirm,
}

impl fmt::Debug for ConfirmedPublisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfirmedPublisher").field("channel", &self.channel.id()).finish_non_exhaustive()
    }
}

impl ConfirmedPublisher {
    /// `channel` is in confirm mode. The broker has `confirm_s` seconds, counted by [`tick`](Self::tick), for each confirm. `None`:
    /// confirms are awaited as long as the channel is open.
    pub fn new(channel: Channel, match_by: MatchBy, confirm_s: Option<u32>) -> Self {
        Self::beside_others(channel, match_by, confirm_s, Transfer::default())
    }

    /// The same on a connection with other publishers: all count what they publish in its `transfer`, so that a confirm has the time for
    /// what was published before it on any channel.
    pub fn beside_others(
        channel: Channel,
        match_by: MatchBy,
        confirm_s: Option<u32>,
        transfer: Transfer,
    ) -> Self {
        // A random start below 2^62: no two publishers use the same numbers, and counting cannot overflow.
        let last = uuid::Uuid::new_v4().as_u64_pair().0 >> 2;
        let ledger = Ledger::new(last, match_by, confirm_s, transfer, Instant::now());
        Self { channel, match_by, ledger: Arc::new(Mutex::new(ledger)) }
    }

    pub fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Closes the channel, and waits until the broker has done so. Messages without a confirm stay without one.
    ///
    /// # Errors
    /// The channel or its connection is closed already.
    pub async fn close(&self) -> lapin::Result<()> {
        self.channel.close(200, "bye".into()).await
    }

    /// The longest recent time that the broker took for a confirm, without the time for which it blocked publishers.
    pub fn slowest_confirm(&self) -> Duration {
        self.ledger().slowest()
    }

    /// What of the connection's messages may still be on its way to the broker.
    pub fn on_its_way(&self) -> OnItsWay {
        self.ledger().on_its_way()
    }

    /// The broker blocks publishers: it reads nothing from now on.
    pub fn blocked(&self) {
        self.ledger().stop_clock(Instant::now());
    }

    /// The broker reads again.
    pub fn unblocked(&self) {
        self.ledger().start_clock(Instant::now());
    }

    /// Counts a second in which confirms could be taken. Overdue confirms are given up.
    pub fn tick(&self) {
        self.ledger().tick();
    }

    /// Sends a message. [`outcome`](Self::outcome) waits for the broker's answer.
    ///
    /// # Errors
    /// The channel is closed. Whether the broker has the message is unknown.
    pub async fn send<B: AsRef<[u8]>>(&self, message: Message<B>) -> lapin::Result<Unconfirmed> {
        let sequence = self.register(&message);
        self.send_as(sequence, message).await
    }

    /// Numbers a message that is about to be sent. Messages are sent in the order of their numbers.
    pub(crate) fn register<B: AsRef<[u8]>>(&self, message: &Message<B>) -> u64 {
        let bytes = message.body.as_ref().len();
        self.ledger().register(message.properties.message_id().as_ref(), bytes, Instant::now())
    }

    /// Sends a message that has its number.
    pub(crate) async fn send_as<B: AsRef<[u8]>>(
        &self,
        sequence: u64,
        message: Message<B>,
    ) -> lapin::Result<Unconfirmed> {
        let Message { exchange, routing_key, properties, mut headers, body, mandatory } = message;
        if self.match_by == MatchBy::PublishSeq {
            headers.insert(PUBLISH_SEQ.into(), long(sequence));
        }
        let properties = properties.with_headers(headers);
        let options = BasicPublishOptions { mandatory, immediate: false };
        let publish = self.channel.basic_publish(exchange, routing_key, options, body.as_ref(), properties);
        // lapin copies the body into frames, so it is not kept until the confirm.
        Ok(Unconfirmed { sequence, confirm: publish.await? })
    }

    /// What the broker did with a message: [`Confirmed`](PublishOutcome::Confirmed), [`Returned`](PublishOutcome::Returned) or
    /// [`Refused`](PublishOutcome::Refused).
    ///
    /// # Errors
    /// [`UnknownOutcome`]: no confirm came, or none in time.
    pub async fn outcome(&self, unconfirmed: Unconfirmed) -> Result<PublishOutcome, UnknownOutcome> {
        let sequence = unconfirmed.sequence;
        self.confirmed(unconfirmed).await?;
        let judged = self.ledger().judge(sequence);
        Ok(match judged {
            Ok(outcome) => outcome,
            // The sender is in the ledger, which `self` keeps.
            Err(outcome) => outcome.await.unwrap_or(PublishOutcome::Refused),
        })
    }

    /// Waits until a message has its confirm, and every confirm that completed before it is noted.
    ///
    /// A return reaches lapin before the confirm of its publish. lapin attaches it to the next confirm that completes, whichever publish
    /// that is of. A future may be polled for another reason, for example because its message was sent, and see its confirm before earlier
    /// ones are noted. So this lets all futures go first that were woken before.
    pub(crate) async fn confirmed(&self, unconfirmed: Unconfirmed) -> Result<(), UnknownOutcome> {
        let sequence = unconfirmed.sequence;
        let confirmation = self.confirmation(unconfirmed).await?;
        let place = self.ledger().note(sequence, &confirmation, Instant::now());
        after_the_others().await;
        self.ledger().no_gap_before(place);
        Ok(())
    }

    /// Waits for a confirm as long as the ledger allows. The ledger keeps a confirm that may still come.
    async fn confirmation(&self, unconfirmed: Unconfirmed) -> Result<Confirmation, UnknownOutcome> {
        let Unconfirmed { sequence, confirm } = unconfirmed;
        let mut confirm = Some(confirm);
        poll_fn(|context| {
            let Some(waiting) = &mut confirm else { return Poll::Pending };
            if let Poll::Ready(confirmation) = Pin::new(waiting).poll(context) {
                return Poll::Ready(confirmation.map_err(UnknownOutcome::Closed));
            }
            self.ledger().wait(sequence, &mut confirm, context.waker()).map(Err)
        })
        .await
    }

    /// The outcomes that are known and that no call of [`outcome`](Self::outcome) waits for; each is given once.
    pub(crate) fn settle(&self) -> Vec<(u64, PublishOutcome)> {
        self.ledger().settle()
    }

    /// The ledger.
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // Nothing panics while it holds the lock.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
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
