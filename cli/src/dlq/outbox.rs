//! Publishing with an answer for each message, many under way at once.

use std::collections::HashMap;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Connection};
use vramq_amqp::{Confirms, Verdict};
use vramq_schemas::fields::{integer, long};
use vramq_schemas::headers::PUBLISH_SEQ;

use super::error::Error;
use super::republish::Message;

/// Publishes awaiting their confirm: one at a time gives about 1/15 of the pipelined rate.
const CONFIRMS_MAX: usize = 256;

/// Bytes of bodies awaiting their confirm.
const BYTES_MAX: usize = 32 * 1024 * 1024;

/// Messages on their way, each with what its sender wants to know it by.
pub(super) struct Outbox<T> {
    channel: Channel,
    last: u64,
    open: HashMap<u64, (T, usize)>,
    bytes: usize,
    sent: FuturesUnordered<BoxFuture<'static, (u64, lapin::Result<Confirmation>)>>,
    confirms: Confirms,
    /// With a confirm, but the verdict hangs on another's.
    waiting: HashMap<u64, T>,
}

impl<T> Outbox<T> {
    pub(super) async fn open(connection: &Connection) -> Result<Self, Error> {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self {
            channel,
            // From anywhere, with room to count on: no two copies of a job are alike.
            last: uuid::Uuid::new_v4().as_u64_pair().0 >> 2,
            open: HashMap::new(),
            bytes: 0,
            sent: FuturesUnordered::new(),
            confirms: Confirms::default(),
            waiting: HashMap::new(),
        })
    }

    pub(super) fn has_room(&self) -> bool {
        self.open.len() < CONFIRMS_MAX && self.bytes < BYTES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn send(&mut self, token: T, message: Message) {
        self.last += 1;
        let number = self.last;
        let Message { exchange, routing_key, properties, mut headers, body } = message;
        headers.insert(PUBLISH_SEQ.into(), long(number));
        self.bytes += body.len();
        self.open.insert(number, (token, body.len()));
        let channel = self.channel.clone();
        let publish = async move {
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let properties = properties.with_headers(headers);
            channel
                .basic_publish(exchange.into(), routing_key.into(), options, &body, properties)
                .await?
                .await
        };
        self.sent.push(publish.map(move |told| (number, told)).boxed());
    }

    /// What came of those that the broker has judged; waits for the next of them. Empty when nothing is under way, or the
    /// verdict hangs on others.
    ///
    /// Cancel safety: what is dropped is asked for again by the next call.
    pub(super) async fn judged(&mut self) -> Result<Vec<(T, Verdict)>, Error> {
        let mut next = self.sent.next().await;
        while let Some((number, told)) = next {
            let confirmation = told?;
            let ack = !confirmation.is_nack();
            // lapin gives a returned message to whichever confirm completes next: it says of itself whose it is.
            let carried = confirmation
                .take_message()
                .and_then(|message| integer(message.properties.headers().as_ref()?.inner().get(PUBLISH_SEQ)))
                .and_then(|number| u64::try_from(number).ok());
            if let Some((token, bytes)) = self.open.remove(&number) {
                self.bytes -= bytes;
                self.waiting.insert(number, token);
            }
            self.confirms.complete(number, ack, carried);
            next = self.sent.next().now_or_never().flatten();
        }
        let open = &self.open;
        let settled = self.confirms.settle(|number| open.contains_key(&number));
        let tokens = settled.into_iter();
        Ok(tokens.filter_map(|(number, verdict)| Some((self.waiting.remove(&number)?, verdict))).collect())
    }
}
