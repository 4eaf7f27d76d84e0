//! An operator at the broker: commands to workers, their answers, their heartbeats.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Error, Result, ensure};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Confirmation, ExchangeKind};
use vramq_schemas::control::{Answer, Command};
use vramq_schemas::status::Heartbeat;
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, STATUS_EXCHANGE, control_key};

use crate::client::{Client, Mailbox};
use crate::job::Message;
use crate::schema::validate;
use crate::setup::Queue;
use crate::test_env::TestEnv;
use crate::wait::until;
use crate::worker::Worker;

const ANSWERS: &str = "operator.answers";
const HEARTBEATS: &str = "operator.heartbeats";

/// A queue of commands that wait to be sent. Rejecting one sends it to all workers.
const PUT_ASIDE: &str = "operator.put-aside";

/// What heartbeats are, as foreign programs read it.
const HEARTBEAT_SCHEMA: &str = include_str!("../../schemas/json/heartbeat.json");

/// An operator: receives heartbeats and answers, and sends commands.
#[derive(Debug)]
pub struct Operator {
    client: Arc<Client>,
    answers: Mailbox,
    heartbeats: Mailbox,
    asked: usize,
}

impl Operator {
    /// # Errors
    /// The broker refuses the consumer.
    pub async fn new(env: &mut TestEnv) -> Result<Self> {
        // Those of workers that end are not all read.
        env.leave(HEARTBEATS);
        let client = Arc::clone(&env.client);
        for queue in [ANSWERS, HEARTBEATS] {
            client.declare_queue(queue, Queue::Classic.arguments()).await?;
        }
        client.declare_exchange(STATUS_EXCHANGE, ExchangeKind::Fanout).await?;
        client.declare_exchange(CONTROL_EXCHANGE, ExchangeKind::Direct).await?;
        client.bind_queue(HEARTBEATS, STATUS_EXCHANGE, "").await?;
        let (answers, heartbeats) = (client.mailbox(ANSWERS).await?, client.mailbox(HEARTBEATS).await?);
        Ok(Self { client, answers, heartbeats, asked: 0 })
    }

    /// Tells one worker, as soon as it listens.
    ///
    /// # Errors
    /// It never does.
    pub async fn tell(&mut self, worker: &Worker, command: &Command) -> Result<()> {
        self.say(&control_key(&worker.name), serde_json::to_vec(command)?).await
    }

    /// Publishes a message under a key as soon as a queue is bound to it.
    ///
    /// # Errors
    /// Nobody ever does.
    pub async fn say(&mut self, key: &str, body: impl Into<Vec<u8>>) -> Result<()> {
        let message = self.next_message(body);
        until("a worker that listens", async || {
            let confirmation = self.client.publish_to(CONTROL_EXCHANGE, key, message.clone()).await?;
            Ok(matches!(confirmation, Confirmation::Ack(None)).then_some(()))
        })
        .await
    }

    fn next_message(&mut self, body: impl Into<Vec<u8>>) -> Message {
        self.asked += 1;
        let properties = BasicProperties::default()
            .with_reply_to(ANSWERS.into())
            .with_correlation_id(self.asked.to_string().into());
        Message { properties, body: body.into(), as_worker: false }
    }

    /// Publishes a command for all workers to a queue of the operator's own, behind those already in it. Returns the command's number, for
    /// [`answer_to`](Self::answer_to).
    ///
    /// # Errors
    /// The broker does not take it.
    pub async fn put_aside(&mut self, command: &Command) -> Result<usize> {
        let mut arguments = Queue::Classic.arguments();
        let text = |text: &str| AMQPValue::LongString(text.into());
        arguments.insert("x-dead-letter-exchange".into(), text(CONTROL_EXCHANGE));
        arguments.insert("x-dead-letter-routing-key".into(), text(CONTROL_ALL));
        self.client.declare_queue(PUT_ASIDE, arguments).await?;
        let message = self.next_message(serde_json::to_vec(command)?);
        let confirms = self.client.publish_to_queue(PUT_ASIDE, &[message]).await?;
        ensure!(matches!(confirms[..], [Confirmation::Ack(None)]), "{confirms:?}");
        Ok(self.asked)
    }

    /// Has the broker itself send the first command that was put aside. Nothing is published, so it works while the broker blocks
    /// publishers.
    ///
    /// # Errors
    /// There is none.
    pub async fn send_put_aside(&self) -> Result<()> {
        self.client.reject(PUT_ASIDE).await
    }

    /// The next answer, which is one to the last command.
    ///
    /// # Errors
    /// None comes, or one to another command.
    pub async fn answer(&mut self) -> Result<Answer> {
        self.answer_to(self.asked).await
    }

    /// The next answer, which is one to the command of this number.
    ///
    /// # Errors
    /// As for [`answer`](Self::answer).
    pub async fn answer_to(&mut self, asked: usize) -> Result<Answer> {
        let (message, asked) = (self.answers.next().await?, asked.to_string());
        ensure!(message.correlation_id() == asked, "an answer to {}, not {asked}", message.correlation_id());
        serde_json::from_slice(&message.body).context("no answer")
    }

    /// Tells one worker, and takes its first answer.
    ///
    /// # Errors
    /// There is none.
    pub async fn ask(&mut self, worker: &Worker, command: &Command) -> Result<Answer> {
        self.tell(worker, command).await?;
        self.answer().await
    }

    /// Whether no answer comes for a while.
    ///
    /// # Errors
    /// The queue is gone.
    pub async fn hears_nothing(&mut self) -> Result<bool> {
        Ok(!self.hears_within(crate::wait::SILENCE).await?)
    }

    /// Whether an answer comes within a time.
    ///
    /// # Errors
    /// The queue is gone.
    pub async fn hears_within(&mut self, time: Duration) -> Result<bool> {
        Ok(self.answers.next_within(time).await?.is_some())
    }

    /// The next heartbeat that is as wanted.
    ///
    /// # Errors
    /// None comes, or one that does not fit its schema.
    pub async fn heartbeat(&mut self, wanted: impl Fn(&Heartbeat) -> bool) -> Result<Heartbeat> {
        let schema = serde_json::from_str(HEARTBEAT_SCHEMA)?;
        loop {
            let body = self.heartbeats.next().await?.body;
            validate(&schema, &serde_json::from_slice(&body)?)
                .map_err(Error::msg)
                .context("a heartbeat does not fit its schema")?;
            let heartbeat: Heartbeat = serde_json::from_slice(&body)?;
            if wanted(&heartbeat) {
                return Ok(heartbeat);
            }
        }
    }
}
