//! Publishes messages on a channel of its own, many at a time, and reports what the broker did with each of them.

use std::collections::HashMap;
use std::fmt;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use vramq_schemas::fields::{integer, long};
use vramq_schemas::headers::PUBLISH_SEQ;

use crate::confirms::{Confirms, Verdict};

/// Publishes that await their confirm. One at a time gives about 1/15 of the pipelined rate; 64 in flight reach it on a
/// local broker, and 256 leave room for the round trip of a remote one.
pub const CONFIRMS_IN_FLIGHT: usize = 256;

/// What the broker did with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishOutcome {
    /// The broker has it: on disk, and on a majority of nodes for a quorum queue.
    Confirmed,
    /// No queue is bound for it. It is gone.
    Returned,
    /// Nacked: the length limit of a queue with `reject-publish` is reached.
    Refused,
    /// Larger than [`Limits::body_bytes`], and not sent: the broker would close the channel.
    TooLarge,
}

/// How much may wait for its confirm.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub messages: usize,
    /// Bytes of all bodies. One message may exceed it, so that a large body is not stuck for ever.
    pub bytes: usize,
    /// The largest body that the broker accepts.
    pub body_bytes: usize,
}

/// By what a returned message is matched with its publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchBy {
    /// By a number that the publisher adds as the header `publish-seq`. It makes every copy of a message different.
    PublishSeq,
    /// By the property `message_id`, which the caller keeps unique among the messages in flight. The message is sent as it
    /// is, so a copy that is published again is the same message.
    MessageId,
}

/// A message to publish.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// Empty for the default exchange, which routes to the queue that the routing key names.
    pub exchange: ShortString,
    pub routing_key: ShortString,
    /// Without headers.
    pub properties: BasicProperties,
    pub headers: FieldTable,
    pub body: Bytes,
    /// The broker returns the message if no queue is bound for it. Only direct replies do without.
    pub mandatory: bool,
}

/// What a call of [`ConfirmedPublisher::next`] found out.
#[derive(Debug)]
pub struct Settled<T> {
    /// The tokens of messages whose outcome is known.
    pub outcomes: Vec<(T, PublishOutcome)>,
    /// The channel is closed, and why; said by this call and each later one. Whether the broker has the messages in
    /// [`ConfirmedPublisher::unconfirmed`] is unknown.
    pub lost: Option<lapin::Error>,
}

/// A channel in confirm mode, and the messages on it whose outcome is not known yet. `T` is the caller's token for a
/// message: it comes back with the outcome.
///
/// The owner publishes while there is room, and calls [`next`](Self::next) for as long as messages are in flight; messages
/// are sent only while `next` runs. It decides nothing: whether a refused message is published again is the caller's choice.
///
/// Invariant: no other code publishes on the channel. All confirms are awaited in one `FuturesUnordered`, which yields them in
/// the order in which they completed; [`Confirms`] needs that to match returned messages with their publishes.
pub struct ConfirmedPublisher<T> {
    channel: Channel,
    limits: Limits,
    match_by: MatchBy,
    last: u64,
    /// Without a confirm.
    open: HashMap<u64, InFlight<T>>,
    /// Bytes of the bodies of `open`.
    bytes: usize,
    /// The numbers of `open` and `confirmed` by message id, for [`MatchBy::MessageId`].
    numbers: HashMap<ShortString, u64>,
    confirming: FuturesUnordered<BoxFuture<'static, Confirmed>>,
    confirms: Confirms,
    /// With a confirm, but the outcome depends on the confirm of another message.
    confirmed: HashMap<u64, InFlight<T>>,
    too_large: Vec<T>,
    /// Why the channel is closed, once it is: nothing more is known of the messages that are in flight then.
    lost: Option<lapin::Error>,
}

type Confirmed = (u64, lapin::Result<Confirmation>);

struct InFlight<T> {
    token: T,
    bytes: usize,
    id: Option<ShortString>,
}

impl<T> fmt::Debug for ConfirmedPublisher<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfirmedPublisher")
            .field("channel", &self.channel.id())
            .field("open", &self.open.len())
            .finish_non_exhaustive()
    }
}

impl<T> ConfirmedPublisher<T> {
    /// Opens a channel in confirm mode.
    ///
    /// # Errors
    /// The broker does not open it.
    pub async fn open(connection: &Connection, limits: Limits, match_by: MatchBy) -> lapin::Result<Self> {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self {
            channel,
            limits,
            match_by,
            // Random, with room to count on: no two publishers use the same numbers.
            last: uuid::Uuid::new_v4().as_u64_pair().0 >> 2,
            open: HashMap::new(),
            bytes: 0,
            numbers: HashMap::new(),
            confirming: FuturesUnordered::new(),
            confirms: Confirms::default(),
            confirmed: HashMap::new(),
            too_large: Vec::new(),
            lost: None,
        })
    }

    /// Whether another message may be published.
    pub fn has_room(&self) -> bool {
        self.open.len() + self.confirmed.len() + self.too_large.len() < self.limits.messages
            && self.bytes < self.limits.bytes
    }

    /// Whether no outcome is outstanding.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.confirmed.is_empty() && self.too_large.is_empty()
    }

    /// How many messages await their confirm.
    pub fn in_flight(&self) -> usize {
        self.open.len()
    }

    /// The tokens of messages without a confirm.
    pub fn unconfirmed(&self) -> impl Iterator<Item = &T> {
        self.open.values().map(|in_flight| &in_flight.token)
    }

    /// Forgets the messages in flight if the channel is lost: their outcomes will not be known.
    pub fn forget_lost(&mut self) {
        if self.lost.is_some() {
            self.open.clear();
            self.confirmed.clear();
            self.numbers.clear();
            self.bytes = 0;
        }
    }

    /// Takes a message, to be sent by the next call of [`next`](Self::next). To be called only while
    /// [`has_room`](Self::has_room).
    pub fn publish(&mut self, token: T, message: Message) {
        debug_assert!(self.has_room(), "publish without room");
        if message.body.len() > self.limits.body_bytes {
            self.too_large.push(token);
            return;
        }
        self.last += 1;
        let number = self.last;
        let Message { exchange, routing_key, properties, mut headers, body, mandatory } = message;
        let id = match self.match_by {
            MatchBy::PublishSeq => {
                headers.insert(PUBLISH_SEQ.into(), long(number));
                None
            }
            MatchBy::MessageId => properties.message_id().clone(),
        };
        self.numbers.extend(id.clone().map(|id| (id, number)));
        self.bytes += body.len();
        self.open.insert(number, InFlight { token, bytes: body.len(), id });
        let channel = self.channel.clone();
        let properties = properties.with_headers(headers);
        let options = BasicPublishOptions { mandatory, immediate: false };
        let publish = async move {
            let confirm = channel.basic_publish(exchange, routing_key, options, &body, properties).await?;
            // lapin has copied it into frames.
            drop(body);
            confirm.await
        };
        self.confirming.push(publish.map(move |result| (number, result)).boxed());
    }

    /// Sends what was published, and waits until some outcomes are known or the channel is lost. Returns at once if no outcome is
    /// outstanding, or if the channel was lost before.
    ///
    /// Cancel safety: an outcome that a dropped call has not returned is returned by the next one.
    pub async fn next(&mut self) -> Settled<T> {
        let too_large = self.too_large.drain(..).map(|token| (token, PublishOutcome::TooLarge));
        let mut settled = Settled { outcomes: too_large.collect(), lost: self.lost.clone() };
        while settled.outcomes.is_empty() && settled.lost.is_none() {
            let mut completed = self.confirming.next().await;
            if completed.is_none() {
                break;
            }
            while let Some((number, result)) = completed {
                match result {
                    Ok(confirmation) => self.note(number, confirmation),
                    // Several publishes fail together. What the broker says tells more than that the channel is closed.
                    Err(error) if self.lost.is_none() || error.is_amqp_error() => self.lost = Some(error),
                    Err(_) => {}
                }
                completed = self.confirming.next().now_or_never().flatten();
            }
            self.settle(&mut settled.outcomes);
            settled.lost.clone_from(&self.lost);
        }
        settled
    }

    fn note(&mut self, number: u64, confirmation: Confirmation) {
        let ack = !confirmation.is_nack();
        let carried = confirmation.take_message().and_then(|returned| self.number_of(&returned.properties));
        if let Some(in_flight) = self.open.remove(&number) {
            self.bytes -= in_flight.bytes;
            self.confirmed.insert(number, in_flight);
        }
        self.confirms.complete(number, ack, carried);
    }

    /// The publish that a returned message belongs to.
    fn number_of(&self, returned: &BasicProperties) -> Option<u64> {
        match self.match_by {
            MatchBy::PublishSeq => {
                let number = integer(returned.headers().as_ref()?.inner().get(PUBLISH_SEQ))?;
                u64::try_from(number).ok()
            }
            MatchBy::MessageId => self.numbers.get(returned.message_id().as_ref()?).copied(),
        }
    }

    fn settle(&mut self, outcomes: &mut Vec<(T, PublishOutcome)>) {
        let open = &self.open;
        for (number, verdict) in self.confirms.settle(|number| open.contains_key(&number)) {
            let Some(InFlight { token, id, .. }) = self.confirmed.remove(&number) else { continue };
            // The id may belong to a younger message by now.
            if let Some(id) = id.filter(|id| self.numbers.get(id) == Some(&number)) {
                self.numbers.remove(&id);
            }
            outcomes.push((token, verdict.into()));
        }
    }
}

impl From<Verdict> for PublishOutcome {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Accepted => Self::Confirmed,
            Verdict::Rejected => Self::Refused,
            Verdict::Returned => Self::Returned,
        }
    }
}
