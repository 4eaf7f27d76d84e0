//! Publishes many messages at a time, and returns the outcome of each with its token.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::ConfirmSelectOptions;
use lapin::{Connection, ErrorKind};
use tokio::time::{Sleep, sleep};

use crate::confirms::PublishOutcome;
use crate::header_frame::{frame_max, header_frame_bytes};
use crate::ledger::UnknownOutcome;
use crate::publisher::{ConfirmedPublisher, Message};
use crate::returns::MatchBy;

/// Publishes that await their confirm. One at a time gives about 1/15 of the pipelined rate; 64 in flight reach it on a
/// local broker, and 256 leave room for the round trip of a remote one.
pub const CONFIRMS_IN_FLIGHT: usize = 256;

/// How long the reason for which a channel was closed is awaited.
const EXPLAINED_WITHIN: Duration = Duration::from_secs(1);

/// How much may wait for its confirm.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Messages.
    pub messages: usize,
    /// Bytes of all bodies. One message may exceed it, so that a large body is not stuck for ever.
    pub bytes: usize,
    /// The largest body that the broker accepts.
    pub body_bytes: usize,
}

/// Messages whose outcome is known, by their tokens.
pub type Outcomes<T> = Vec<(T, PublishOutcome)>;

/// A [`ConfirmedPublisher`] with the messages that it has in flight. `T` is the caller's token for a message: it comes back with
/// the outcome.
///
/// The owner publishes while there is room, and calls [`next`](Self::next) while messages are in flight; messages are sent only while
/// `next` runs. Refused messages are not published again: that is the caller's choice.
pub struct PublishPipeline<T> {
    publisher: ConfirmedPublisher,
    limits: Limits,
    /// The largest frame of the connection.
    frame_max: usize,
    in_flight: HashMap<u64, InFlight<T>>,
    /// The bytes of the bodies of those in `in_flight` that have no confirm.
    bytes: usize,
    confirming: FuturesUnordered<BoxFuture<'static, Confirmed>>,
    too_large: Vec<T>,
    /// The loss of the channel. After it the outcomes of the messages in flight stay unknown.
    lost: Option<Loss>,
}

type Confirmed = (u64, Result<(), UnknownOutcome>);

struct Loss {
    error: lapin::Error,
    /// Ends when a better error is no longer awaited.
    over: Pin<Box<Sleep>>,
}

impl Loss {
    /// Whether no better error is to be expected. When the broker closes a channel, a publish may fail first with the channel's state. Those
    /// that await their confirm then fail with the broker's reason.
    fn is_explained(&self) -> bool {
        !matches!(self.error.kind(), ErrorKind::InvalidChannelState(..)) || self.over.is_elapsed()
    }
}

/// A message whose outcome is not known.
struct InFlight<T> {
    token: T,
    bytes: usize,
    /// It has a confirm, but the outcome depends on the confirm of another message.
    is_confirmed: bool,
}

impl<T> fmt::Debug for PublishPipeline<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublishPipeline")
            .field("publisher", &self.publisher)
            .field("unconfirmed", &self.unconfirmed().count())
            .finish_non_exhaustive()
    }
}

impl<T> PublishPipeline<T> {
    /// Opens a channel in confirm mode.
    ///
    /// # Errors
    /// The broker does not open it.
    pub async fn open(connection: &Connection, limits: Limits, match_by: MatchBy) -> lapin::Result<Self> {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self {
            publisher: ConfirmedPublisher::new(channel, match_by, None),
            limits,
            frame_max: frame_max(connection),
            in_flight: HashMap::new(),
            bytes: 0,
            confirming: FuturesUnordered::new(),
            too_large: Vec::new(),
            lost: None,
        })
    }

    /// Whether another message may be published.
    pub fn has_room(&self) -> bool {
        self.in_flight.len() + self.too_large.len() < self.limits.messages && self.bytes < self.limits.bytes
    }

    /// Whether no outcome is outstanding.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.too_large.is_empty()
    }

    /// The tokens of messages without a confirm.
    pub fn unconfirmed(&self) -> impl Iterator<Item = &T> {
        let unconfirmed = self.in_flight.values().filter(|message| !message.is_confirmed);
        unconfirmed.map(|message| &message.token)
    }

    /// Forgets the messages in flight, and returns their tokens: their outcomes will not be known. Also forgets those that were too large
    /// to be sent, without returning them.
    pub fn forget(&mut self) -> Vec<T> {
        self.bytes = 0;
        self.too_large.clear();
        self.in_flight.drain().map(|(_, message)| message.token).collect()
    }

    /// Takes a message, to be sent by the next call of [`next`](Self::next). To be called only while
    /// [`has_room`](Self::has_room).
    pub fn publish(&mut self, token: T, message: Message) {
        debug_assert!(self.has_room(), "publish without room");
        let bytes = message.body.len();
        let is_frame_too_large =
            || header_frame_bytes(&message.properties, &message.headers) > self.frame_max;
        if bytes > self.limits.body_bytes || is_frame_too_large() {
            self.too_large.push(token);
            return;
        }
        let sequence = self.publisher.register(&message);
        self.in_flight.insert(sequence, InFlight { token, bytes, is_confirmed: false });
        self.bytes += bytes;
        let publisher = self.publisher.clone();
        let confirmed = async move {
            let unconfirmed = publisher.send_as(sequence, message).await?;
            publisher.confirmed(unconfirmed).await
        };
        self.confirming.push(confirmed.map(move |result| (sequence, result)).boxed());
    }

    /// Sends what was published, and waits until some outcomes are known. Returns none at once if no outcome is outstanding.
    ///
    /// Cancel safety: an outcome that a dropped call has not returned is returned by the next one.
    ///
    /// # Errors
    /// Why the channel is closed; every later call returns it as well. Whether the broker has the messages in
    /// [`unconfirmed`](Self::unconfirmed) is unknown.
    pub async fn next(&mut self) -> lapin::Result<Outcomes<T>> {
        let too_large = self.too_large.drain(..).map(|token| (token, PublishOutcome::TooLarge));
        let mut outcomes = too_large.collect::<Vec<_>>();
        while outcomes.is_empty() {
            if let Some(lost) = &self.lost
                && lost.is_explained()
            {
                return Err(lost.error.clone());
            }
            match (self.completed().await, &self.lost) {
                (Some(completed), _) => self.note(completed),
                (None, Some(lost)) => return Err(lost.error.clone()),
                (None, None) => break,
            }
            // All that are ready, so that the caller gets them together.
            while let Some(completed) = self.confirming.next().now_or_never().flatten() {
                self.note(completed);
            }
            for (sequence, outcome) in self.publisher.settle() {
                self.set_confirmed(sequence);
                outcomes.extend(self.in_flight.remove(&sequence).map(|it| (it.token, outcome)));
            }
        }
        Ok(outcomes)
    }

    /// The next publish that is confirmed or has failed. `None` if there is none, or if the reason of a loss did not come in time.
    async fn completed(&mut self) -> Option<Confirmed> {
        let Some(lost) = &mut self.lost else { return self.confirming.next().await };
        tokio::select! {
            biased;
            completed = self.confirming.next() => completed,
            () = &mut lost.over => None,
        }
    }

    fn note(&mut self, (sequence, result): Confirmed) {
        match result {
            Ok(()) => self.set_confirmed(sequence),
            // Several publishes fail together, and the first error may not say why.
            Err(UnknownOutcome::Closed(error)) => match &mut self.lost {
                None => self.lost = Some(Loss { error, over: Box::pin(sleep(EXPLAINED_WITHIN)) }),
                Some(lost) if !lost.is_explained() || error.is_amqp_error() => lost.error = error,
                Some(_) => {}
            },
            // Without a deadline, a confirm fails only with the channel.
            Err(_) => {}
        }
    }

    fn set_confirmed(&mut self, sequence: u64) {
        if let Some(message) = self.in_flight.get_mut(&sequence)
            && !message.is_confirmed
        {
            message.is_confirmed = true;
            self.bytes -= message.bytes;
        }
    }
}
