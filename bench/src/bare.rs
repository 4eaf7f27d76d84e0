//! The reference for the message path: the least that a correct worker does. It consumes a job, publishes a reply, and acks when
//! the confirm arrives. Everything is pipelined; nothing is decoded or decided.

use futures_util::stream::{FuturesUnordered, StreamExt};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};

/// Serves `queue` for ever, answering every message with `reply`.
pub async fn serve(url: &str, queue: &str, prefetch: u16, reply: &'static [u8]) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let publisher = connection.create_channel().await?;
    publisher.confirm_select(ConfirmSelectOptions::default()).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    let mut deliveries = channel
        .basic_consume(queue.into(), "bare".into(), BasicConsumeOptions::default(), FieldTable::default())
        .await?;
    let mut settling = FuturesUnordered::new();
    loop {
        tokio::select! {
            Some(delivery) = deliveries.next() => settling.push(answer(&publisher, delivery?, reply)),
            Some(settled) = settling.next() => settled?,
            else => anyhow::bail!("the consumer ended"),
        }
    }
}

async fn answer(publisher: &Channel, delivery: Delivery, reply: &[u8]) -> anyhow::Result<()> {
    let reply_to = delivery.properties.reply_to().clone().unwrap_or_else(|| "".into());
    let mut properties = BasicProperties::default().with_delivery_mode(2);
    if let Some(id) = delivery.properties.message_id() {
        properties = properties.with_correlation_id(id.clone());
    }
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    let confirm = publisher.basic_publish("".into(), reply_to, options, reply, properties).await?;
    anyhow::ensure!(confirm.await?.is_ack(), "reply not confirmed");
    delivery.acker.ack(BasicAckOptions::default()).await?;
    Ok(())
}
