//! A reply queue that takes nothing until it is opened. It keeps a job unacknowledged for about a second; then the worker gives
//! up on the queue and dead-letters the reply. To hold a job for longer, let its pass hang (`worker.drill=pass=hang`), or hold
//! the confirm of its reply ([`Proxy::hold_confirms`](crate::proxy::Proxy::hold_confirms)).

use std::sync::Arc;

use anyhow::{Result, bail};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Confirmation};

use crate::client::{Client, Mailbox};
use crate::job::Message;
use crate::management::VirtualHost;
use crate::setup::Queue;

const NAME: &str = "blocked-replies";

/// How many replies the queue takes once it is open. More than any test's jobs.
const ROOM: usize = 2500;

/// Fillers sent before their confirms are looked at.
const AT_A_TIME: usize = 500;

/// The queue, full.
#[derive(Debug)]
pub struct BlockedReplyQueue {
    client: Arc<Client>,
    name: String,
}

impl BlockedReplyQueue {
    /// Declares the queue and fills it until the broker refuses more.
    ///
    /// # Errors
    /// The broker does not answer, or takes everything.
    pub async fn declare(client: &Arc<Client>, kind: Queue) -> Result<Self> {
        Self::declare_named(client, kind, NAME, ROOM).await
    }

    /// The same with this name and room for so many replies.
    ///
    /// # Errors
    /// As for [`declare`](Self::declare).
    pub async fn declare_named(client: &Arc<Client>, kind: Queue, name: &str, room: usize) -> Result<Self> {
        let mut arguments = kind.arguments();
        arguments.insert("x-max-length".into(), AMQPValue::LongInt(i32::try_from(room)?));
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
        client.declare_queue(name, arguments).await?;
        let filler = Message { properties: BasicProperties::default(), body: Vec::new(), as_worker: false };
        let at_a_time = room.min(AT_A_TIME);
        // The broker reports late that a queue is full. Until then a short queue takes many more messages than it has room for.
        for _ in 0..2 * ROOM / at_a_time {
            let confirmation = client.publish_to_queue(name, &vec![filler.clone(); at_a_time]).await?;
            if confirmation.iter().any(|confirmation| matches!(confirmation, Confirmation::Nack(_))) {
                return Ok(Self { client: Arc::clone(client), name: name.to_owned() });
            }
        }
        bail!("a queue with room for {room} messages takes many more");
    }

    /// Makes the queue a job's reply queue.
    pub fn receives(&self, job: Message) -> Message {
        job.with(|properties| properties.with_reply_to(self.name.as_str().into()))
    }

    /// Deletes it, with all that waits before it.
    ///
    /// # Errors
    /// The broker does not answer.
    pub async fn delete(self, vhost: &VirtualHost) -> Result<()> {
        vhost.delete_queue(&self.name).await
    }

    /// Opens it: from now on replies flow. They are in the mailbox.
    ///
    /// # Errors
    /// The broker does not answer.
    pub async fn unblock(self) -> Result<Mailbox> {
        self.client.purge(&self.name).await?;
        self.client.mailbox(&self.name).await
    }
}
