//! A publisher with its own user of the broker and a publisher's permissions. Each of its jobs carries the `user_id`.

use anyhow::Result;
use vramq_schemas::Encoding;

use crate::client::{Client, Mailbox};
use crate::job::Message;
use crate::test_env::{MODEL, TestEnv};

/// The role in the documented permissions.
const ROLE: &str = "publisher";

/// A caller, connected.
#[derive(Debug)]
pub struct Caller {
    /// The user's name at the broker.
    pub user: String,
    pub url: String,
    pub client: Client,
    /// Its reply queue, under the prefix that publishers may use.
    pub replies: String,
    encoding: Encoding,
}

impl Caller {
    /// Makes the user and its reply queue, and connects.
    ///
    /// # Errors
    /// The broker does not answer, or the documented permissions do not suffice.
    pub async fn new(env: &mut TestEnv, name: &str) -> Result<Self> {
        let (user, url) = env.add_user(name, ROLE).await?;
        let client = Client::connect(&url).await?;
        let replies = format!("vramq.replies.client.{name}");
        client.declare_queue(&replies, env.setup.queue.arguments()).await?;
        Ok(Self { user, url, client, replies, encoding: env.setup.encoding })
    }

    /// A good job for [`MODEL`] with the caller's `user_id`, whose replies come to its own queue.
    ///
    /// # Errors
    /// The texts have no form in the encoding.
    pub fn job<T: Into<String>>(&self, id: &str, texts: impl IntoIterator<Item = T>) -> Result<Message> {
        self.job_for(MODEL, id, texts)
    }

    /// The same for another model.
    ///
    /// # Errors
    /// The texts have no form in the encoding.
    pub fn job_for<T: Into<String>>(
        &self,
        model: &str,
        id: &str,
        texts: impl IntoIterator<Item = T>,
    ) -> Result<Message> {
        let job = Message::texts(self.encoding, model, id, &self.replies, texts)?;
        Ok(job.with(|properties| properties.with_user_id(self.user.as_str().into())))
    }

    /// # Errors
    /// The broker does not take the job.
    pub async fn publish(&self, job: Message) -> Result<()> {
        self.publish_for(MODEL, job).await
    }

    /// # Errors
    /// The broker does not take the job, which is for this model.
    pub async fn publish_for(&self, model: &str, job: Message) -> Result<()> {
        self.client.publish(model, job).await
    }

    /// # Errors
    /// No such queue.
    pub async fn mailbox(&self) -> Result<Mailbox> {
        self.client.mailbox(&self.replies).await
    }
}
