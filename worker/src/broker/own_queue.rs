//! A queue of the worker's own, for what an exchange sends to workers beside jobs: operators' commands, and withdrawals.

use std::io;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Consumer, ExchangeKind};
use tokio::sync::watch;

use super::aux_channel::AuxChannel;

/// What comes to a queue, and how much of it the broker keeps.
pub(super) struct Intake {
    /// What the messages are, for an error.
    pub(super) what: &'static str,
    pub(super) exchange: &'static str,
    pub(super) kind: ExchangeKind,
    pub(super) routing_keys: Vec<String>,
    /// The most messages that the broker keeps. Beyond that it drops the oldest.
    pub(super) length_max: i64,
    /// The most bytes of these messages, if they have a limit.
    pub(super) bytes_max: Option<i64>,
    /// The most messages delivered ahead, so that the worker takes a flood at its own pace.
    pub(super) prefetch: u16,
}

impl Intake {
    fn limits(&self) -> FieldTable {
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(self.length_max));
        if let Some(bytes) = self.bytes_max {
            arguments.insert("x-max-length-bytes".into(), AMQPValue::LongLongInt(bytes));
        }
        arguments
    }
}

/// A queue and its consumer, with which the broker deletes it.
pub(super) struct OwnQueue<'a> {
    binding: Binding<'a>,
    consumer: Consumer,
    declared: watch::Receiver<()>,
}

impl<'a> OwnQueue<'a> {
    /// Declares a queue, binds it to its exchange and consumes from it. `declared` changes when the worker has declared exchanges, which may
    /// have been deleted.
    ///
    /// # Errors
    /// The broker refused a step; the channel is closed then.
    pub(super) async fn consume(
        channel: &'a Channel,
        declaring: &'a AuxChannel,
        intake: Intake,
        declared: watch::Receiver<()>,
    ) -> lapin::Result<Self> {
        let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
        let queue = channel.queue_declare("".into(), options, intake.limits()).await?.name().clone();
        let prefetch = intake.prefetch;
        let binding = Binding { channel, declaring, intake, queue: queue.clone() };
        binding.bind().await?;
        channel.basic_qos(prefetch, BasicQosOptions { global: false }).await?;
        let options = BasicConsumeOptions { exclusive: true, ..Default::default() };
        let consumer = channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
        Ok(Self { binding, consumer, declared })
    }

    /// The next message. Meanwhile binds the queue again when the worker has declared exchanges; if this is dropped, that may be lost.
    ///
    /// # Errors
    /// The channel is closed, or the queue was deleted.
    pub(super) async fn next(&mut self) -> lapin::Result<Delivery> {
        loop {
            tokio::select! {
                delivery = self.consumer.next() => {
                    return delivery.unwrap_or_else(|| Err(deleted(self.binding.intake.what)));
                }
                Ok(()) = self.declared.changed() => self.binding.bind().await?,
            }
        }
    }
}

/// How a queue is bound to its exchange.
struct Binding<'a> {
    channel: &'a Channel,
    declaring: &'a AuxChannel,
    intake: Intake,
    queue: ShortString,
}

impl Binding<'_> {
    /// Binds the queue to the exchange, which it declares.
    async fn bind(&self) -> lapin::Result<()> {
        let Intake { exchange, kind, routing_keys, .. } = &self.intake;
        self.declaring.exchange(self.channel, exchange, kind.clone()).await?;
        for key in routing_keys {
            let (queue, exchange, key) = (self.queue.clone(), (*exchange).into(), key.as_str().into());
            let options = QueueBindOptions::default();
            self.channel.queue_bind(queue, exchange, key, options, FieldTable::default()).await?;
        }
        Ok(())
    }
}

fn deleted(what: &str) -> lapin::Error {
    let ended = format!("the broker deleted the worker's queue of {what}");
    io::Error::new(io::ErrorKind::ConnectionAborted, ended).into()
}
