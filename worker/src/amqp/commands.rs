//! Commands from operators, and the answers to them. What cannot be read is answered here, and reaches nobody else.

use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, QueueBindOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::{mpsc, watch};
use vramq_schemas::control::{Answer, COMMAND_BYTES_MAX, Command, Outcome};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, control_key};

use crate::amqp::aside::{Aside, is_over};
use crate::amqp::direct_replies::DirectReplies;
use crate::amqp::message::{Message, reply_to_fault};
use crate::heartbeat::Teller;
use crate::job::unix_ms;

/// Commands that wait for the loop; more are refused. People type them.
const COMMANDS_MAX: usize = 64;

/// Answers that wait to be published; more are dropped, because whoever does not read them asks for no more.
const ANSWERS_MAX: usize = 256;

/// Commands that the broker keeps for this worker; of a flood, the newest.
const QUEUE_LENGTH_MAX: i64 = 1000;

/// Commands on their way from the broker. With this many the worker takes a flood at its own pace.
const PREFETCH: u16 = 16;

/// What cannot be read is counted as.
const UNKNOWN: &str = "unknown";

/// The longest text of an error in an answer: it may quote the command.
const ERROR_BYTES_MAX: usize = 256;

/// A command, and who gave it.
#[derive(Debug)]
pub struct Asked {
    pub command: Command,
    pub asker: Asker,
}

/// Takes the answers to one command.
#[derive(Debug)]
pub struct Asker {
    command: &'static str,
    to: Option<(ShortString, Option<ShortString>)>,
    answers: mpsc::Sender<Outgoing>,
    teller: Arc<Teller>,
}

/// An answer on its way.
#[derive(Debug)]
pub struct Outgoing {
    queue: ShortString,
    correlation_id: Option<ShortString>,
    answer: Answer,
}

impl Asker {
    fn of(delivery: &Delivery, answers: &mpsc::Sender<Outgoing>, teller: &Arc<Teller>) -> Self {
        let properties = &delivery.properties;
        let reply_to = properties.reply_to().clone().filter(|queue| !queue.as_str().is_empty());
        let to = reply_to.filter(|queue| reply_to_fault(queue.as_str()).is_none());
        Self {
            command: UNKNOWN,
            to: to.map(|queue| (queue, properties.correlation_id().clone())),
            answers: answers.clone(),
            teller: Arc::clone(teller),
        }
    }

    /// Says how far the command came; more follows.
    pub fn tell(&self, outcome: Outcome, text: impl Into<String>) {
        self.send(outcome, text.into(), false);
    }

    /// Says how the command ended.
    pub fn end(self, outcome: Outcome, text: impl Into<String>) {
        self.teller.meters.worker.command(self.command, outcome.as_str());
        self.send(outcome, text.into(), true);
    }

    fn send(&self, outcome: Outcome, text: String, last: bool) {
        let worker = self.teller.identity.worker.clone();
        let state = self.teller.board.now().state;
        if self.command == UNKNOWN {
            // Whoever floods a worker with nonsense is not to fill its log as well.
            tracing::debug!(text, "no command");
        } else {
            tracing::info!(command = self.command, outcome = outcome.as_str(), text, "command answered");
        }
        let Some((queue, correlation_id)) = self.to.clone() else { return };
        let answer = Answer { worker, at_ms: unix_ms(), outcome, text, last, state };
        if self.answers.try_send(Outgoing { queue, correlation_id, answer }).is_err() {
            tracing::debug!("an answer to a command is dropped: too many wait");
        }
    }
}

/// Takes commands until the worker has said its last word.
pub async fn take(
    aside: Aside,
    teller: Arc<Teller>,
    commands: mpsc::Sender<Asked>,
    over: watch::Receiver<bool>,
) {
    let (sender, mut answers) = mpsc::channel(ANSWERS_MAX);
    let told = aside.clone();
    aside
        .run("commands", async move |channel| {
            let direct_replies = &told.direct_replies;
            let desk =
                Desk { channel, direct_replies, teller: &teller, commands: &commands, sender: &sender };
            desk.serve(&told, &mut answers, over.clone()).await
        })
        .await;
}

/// Room for commands on their way to the loop.
pub fn room() -> (mpsc::Sender<Asked>, mpsc::Receiver<Asked>) {
    mpsc::channel(COMMANDS_MAX)
}

struct Desk<'a> {
    channel: &'a Channel,
    direct_replies: &'a DirectReplies,
    teller: &'a Arc<Teller>,
    commands: &'a mpsc::Sender<Asked>,
    sender: &'a mpsc::Sender<Outgoing>,
}

impl Desk<'_> {
    async fn serve(
        &self,
        aside: &Aside,
        answers: &mut mpsc::Receiver<Outgoing>,
        mut over: watch::Receiver<bool>,
    ) -> lapin::Result<()> {
        let channel = self.channel;
        aside.exchange(channel, CONTROL_EXCHANGE, ExchangeKind::Direct).await?;
        let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(QUEUE_LENGTH_MAX));
        let queue = channel.queue_declare("".into(), options, arguments).await?.name().clone();
        for key in [CONTROL_ALL.to_owned(), control_key(&self.teller.identity.worker)] {
            let (queue, options) = (queue.clone(), QueueBindOptions::default());
            channel
                .queue_bind(queue, CONTROL_EXCHANGE.into(), key.into(), options, FieldTable::default())
                .await?;
        }
        channel.basic_qos(PREFETCH, BasicQosOptions { global: false }).await?;
        let options = BasicConsumeOptions { exclusive: true, ..Default::default() };
        let mut consumer = channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
        loop {
            tokio::select! {
                delivery = consumer.next() => match delivery {
                    Some(delivery) => self.heard(delivery?).await?,
                    None => return Err(gone()),
                },
                // `self` keeps a sender, so this never ends.
                Some(answer) = answers.recv() => self.answer(answer).await?,
                () = is_over(&mut over) => {
                    while let Ok(answer) = answers.try_recv() {
                        self.answer(answer).await?;
                    }
                    return Ok(());
                }
            }
        }
    }

    async fn heard(&self, delivery: Delivery) -> lapin::Result<()> {
        let mut asker = Asker::of(&delivery, self.sender, self.teller);
        match read(&delivery.data) {
            Err(why) => asker.end(Outcome::Refused, why),
            Ok(command) => {
                asker.command = command.name();
                if let Err(refused) = self.commands.try_send(Asked { command, asker }) {
                    let asked = refused.into_inner();
                    asked.asker.end(Outcome::Refused, "too many commands at a time: try again");
                }
            }
        }
        delivery.acker.ack(BasicAckOptions::default()).await.map(drop)
    }

    async fn answer(&self, outgoing: Outgoing) -> lapin::Result<()> {
        let Outgoing { queue, correlation_id, answer } = outgoing;
        // Names and numbers: cannot fail.
        let body = serde_json::to_vec(&answer).unwrap_or_default();
        let mut properties = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_type("answer".into());
        if let Some(id) = correlation_id {
            properties = properties.with_correlation_id(id);
        }
        let headers = FieldTable::default();
        let answer = Message { exchange: "".into(), routing_key: queue, properties, headers, body };
        if answer.is_direct_reply() {
            if !self.direct_replies.try_publish(answer) {
                tracing::debug!("an answer to a command is dropped: too many direct replies wait");
            }
            return Ok(());
        }
        let Message { exchange, routing_key, properties, body, .. } = answer;
        let options = BasicPublishOptions::default();
        self.channel.basic_publish(exchange, routing_key, options, &body, properties).await.map(drop)
    }
}

fn read(body: &[u8]) -> Result<Command, String> {
    if body.len() > COMMAND_BYTES_MAX {
        return Err(format!("the command has {} bytes, at most {COMMAND_BYTES_MAX} are read", body.len()));
    }
    serde_json::from_slice(body).map_err(|error| {
        let error = error.to_string();
        format!("no command that this worker knows: {}", &error[..error.floor_char_boundary(ERROR_BYTES_MAX)])
    })
}

fn gone() -> lapin::Error {
    std::io::Error::new(
        std::io::ErrorKind::ConnectionAborted,
        "the broker deleted the worker's queue of commands",
    )
    .into()
}
