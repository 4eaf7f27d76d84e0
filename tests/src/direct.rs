//! Callers that take replies on a channel (RabbitMQ's direct reply-to), and addresses that belong to no such caller.

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, Consumer};
use tokio::time::timeout;
use vramq_schemas::topology::JOBS_EXCHANGE;

use crate::job::Message;
use crate::test_env::MODEL;
use crate::wait::{DEADLINE, until};

/// What a caller writes into `reply_to`; the broker replaces it.
pub const DIRECT_REPLIES: &str = "amq.rabbitmq.reply-to";

/// A caller that takes its replies on its channel.
pub struct Caller {
    connection: Connection,
    channel: Channel,
    consumer: Consumer,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Caller")
    }
}

/// With the `reply_to` that a caller writes.
pub fn calling(properties: BasicProperties) -> BasicProperties {
    properties.with_reply_to(DIRECT_REPLIES.into())
}

impl Caller {
    /// # Errors
    /// No connection.
    pub async fn open(url: &str) -> Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let consumer =
            channel.basic_consume(DIRECT_REPLIES.into(), "".into(), options, FieldTable::default()).await?;
        Ok(Self { connection, channel, consumer })
    }

    /// Publishes a job as it is.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn publish(&self, job: &Message) -> Result<()> {
        let (exchange, options) = (JOBS_EXCHANGE.into(), BasicPublishOptions::default());
        self.channel
            .basic_publish(exchange, MODEL.into(), options, &job.body, job.properties.clone())
            .await?;
        Ok(())
    }

    /// The next reply.
    ///
    /// # Errors
    /// None comes.
    pub async fn next(&mut self) -> Result<Delivery> {
        timeout(DEADLINE, self.consumer.next()).await?.context("the consumer ended")?.map_err(Into::into)
    }

    /// Publishes a job, and waits for its reply.
    ///
    /// # Errors
    /// None comes, or another job's.
    pub async fn call(&mut self, job: Message) -> Result<Delivery> {
        let job = job.with(calling);
        self.publish(&job).await?;
        let reply = self.next().await?;
        ensure!(reply.properties.message_id() == job.properties.message_id(), "{:?}", reply.properties);
        Ok(reply)
    }

    /// The caller's own address, as the broker writes it into messages.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn address(&self) -> Result<String> {
        let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
        let queue = self.channel.queue_declare("".into(), options, FieldTable::default()).await?;
        let (name, options) = (queue.name().clone(), BasicPublishOptions::default());
        let properties = calling(BasicProperties::default());
        self.channel.basic_publish("".into(), name.clone(), options, b"", properties).await?;
        let message = until("the caller's own message", async || {
            Ok(self.channel.basic_get(name.clone(), BasicGetOptions { no_ack: true }).await?)
        });
        let reply_to = message.await?.delivery.properties.reply_to().clone();
        Ok(reply_to.context("no reply_to")?.to_string())
    }

    /// Leaves. Its address stays what it is, and leads nowhere.
    ///
    /// # Errors
    /// The connection is gone.
    pub async fn leave(self) -> Result<()> {
        Ok(self.connection.close(200, "gone".into()).await?)
    }
}

/// An address of a process of some node.
pub fn address(node: &str, id: u32, creation: u32) -> String {
    address_of(node, [id, 0, creation])
}

/// The same with any numbers: id, serial, creation.
pub fn address_of(node: &str, numbers: [u32; 3]) -> String {
    let length = u16::try_from(node.len()).unwrap_or(u16::MAX).to_be_bytes();
    let pid =
        [&[131, 88, 118], &length[..], node.as_bytes(), &numbers.map(u32::to_be_bytes).concat()].concat();
    with_pid(&pid)
}

/// An address with any bytes where the process id should be.
pub fn with_pid(pid: &[u8]) -> String {
    format!("{DIRECT_REPLIES}.{}.{}", STANDARD.encode(pid), STANDARD.encode([7; 16]))
}

/// The node and the creation that an address names.
///
/// # Errors
/// It names none.
pub fn node_of(address: &str) -> Result<(String, u32)> {
    let pid = address.strip_prefix(DIRECT_REPLIES).and_then(|rest| rest.split('.').nth(1));
    let pid = STANDARD.decode(pid.context("no process id")?)?;
    let node = pid.get(5..pid.len() - 12).context("no node")?;
    let creation = pid.last_chunk().context("no creation")?;
    Ok((std::str::from_utf8(node)?.to_owned(), u32::from_be_bytes(*creation)))
}
