//! Receives operators' commands and publishes the answers. A command that cannot be read is answered here.

use std::sync::Arc;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Channel, ExchangeKind};
use tokio::sync::{mpsc, watch};
use vramq_schemas::control::{Answer, COMMAND_BYTES_MAX, Command, Outcome};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, control_key};

use super::aux_channel::{AuxChannel, WorksSince, is_over};
use super::direct_replies::DirectReplies;
use super::message::Message;
use super::own_queue::{Intake, OwnQueue};
use crate::observability::status_reporter::StatusReporter;
use crate::publishers::PublisherRules;
use crate::unix_ms;

/// The most commands that wait for the event loop; further ones are refused. People type them, so few are enough.
const COMMANDS_MAX: usize = 64;

/// The most answers that wait to be published; further ones are dropped. Only a flood of commands makes so many.
const ANSWERS_MAX: usize = 256;

/// The most commands that the broker keeps for this worker. In a flood it keeps the newest.
const QUEUE_LENGTH_MAX: i64 = 1000;

/// The most commands delivered ahead.
const PREFETCH: u16 = 16;

/// The name under which a command that cannot be read is counted.
const UNKNOWN: &str = "unknown";

/// The longest text of an error in an answer: it may quote the command.
const ERROR_BYTES_MAX: usize = 256;

/// A command, and how to answer it.
#[derive(Debug)]
pub struct CommandRequest {
    pub command: Command,
    pub responder: Responder,
}

/// Answers one command.
#[derive(Debug)]
pub struct Responder {
    command: &'static str,
    /// The user who sent the command, if the broker verified it.
    user: Option<String>,
    to: Option<(ShortString, Option<ShortString>)>,
    /// Why no answer is sent although the command requests one.
    unsent: Option<String>,
    answers: mpsc::Sender<Outgoing>,
    reporter: Arc<StatusReporter>,
}

/// An answer on its way.
#[derive(Debug)]
pub struct Outgoing {
    queue: ShortString,
    correlation_id: Option<ShortString>,
    answer: Answer,
}

impl Responder {
    fn of(
        delivery: &Delivery,
        rules: &PublisherRules,
        answers: &mpsc::Sender<Outgoing>,
        reporter: &Arc<StatusReporter>,
    ) -> Self {
        let properties = &delivery.properties;
        let reply_to = properties.reply_to().clone().filter(|queue| !queue.as_str().is_empty());
        let unsent = reply_to.as_ref().and_then(|queue| rules.reply_to_fault(queue.as_str()));
        let to = reply_to.filter(|_| unsent.is_none());
        Self {
            command: UNKNOWN,
            user: properties.user_id().as_ref().map(ToString::to_string),
            to: to.map(|queue| (queue, properties.correlation_id().clone())),
            unsent,
            answers: answers.clone(),
            reporter: Arc::clone(reporter),
        }
    }

    /// Answers how far the command has come. More answers follow.
    pub fn progress(&self, outcome: Outcome, text: impl Into<String>) {
        self.send(outcome, text.into(), false);
    }

    /// Answers how the command ended.
    pub fn end(self, outcome: Outcome, text: impl Into<String>) {
        self.reporter.meters.worker.command(self.command, outcome.as_str());
        self.send(outcome, text.into(), true);
    }

    fn send(&self, outcome: Outcome, text: String, last: bool) {
        let worker = self.reporter.identity.worker.clone();
        let state = self.reporter.board.now().state;
        if self.command == UNKNOWN {
            // A flood of commands that cannot be read must not fill the log as well.
            tracing::debug!(text, "refused a command that cannot be read");
        } else {
            let user = self.user.as_deref();
            tracing::info!(
                command = self.command,
                user,
                outcome = outcome.as_str(),
                text,
                unsent = self.unsent.as_deref(),
                "command answered"
            );
        }
        let Some((queue, correlation_id)) = self.to.clone() else { return };
        let answer = Answer { worker, at_ms: unix_ms(), outcome, text, last, state };
        if self.answers.try_send(Outgoing { queue, correlation_id, answer }).is_err() {
            tracing::debug!("dropped an answer to a command: too many answers wait");
        }
    }
}

/// A channel for commands on their way to the event loop.
pub fn channel() -> (mpsc::Sender<CommandRequest>, mpsc::Receiver<CommandRequest>) {
    mpsc::channel(COMMANDS_MAX)
}

/// A channel for answers on their way to the broker.
pub fn answers() -> (mpsc::Sender<Outgoing>, mpsc::Receiver<Outgoing>) {
    mpsc::channel(ANSWERS_MAX)
}

/// Receives commands until the session is over. `declared` changes when the worker has declared exchanges, which may have been deleted.
pub async fn receive(
    aux: AuxChannel,
    rules: Arc<PublisherRules>,
    reporter: Arc<StatusReporter>,
    (commands, answers): (mpsc::Sender<CommandRequest>, mpsc::Sender<Outgoing>),
    declared: watch::Receiver<()>,
    over: watch::Receiver<bool>,
) {
    let declaring = aux.clone();
    aux.run("commands", async move |channel, works| {
        let server = CommandServer {
            channel,
            works,
            rules: &rules,
            reporter: &reporter,
            commands: &commands,
            answers: &answers,
        };
        server.serve(&declaring, declared.clone(), over.clone()).await
    })
    .await;
}

/// Publishes answers until the session is over, then the remaining ones.
pub async fn publish_answers(
    aux: AuxChannel,
    mut answers: mpsc::Receiver<Outgoing>,
    over: watch::Receiver<bool>,
) {
    let direct_replies = aux.direct_replies.clone();
    aux.run("answers to commands", async move |channel, works| {
        let mut over = over.clone();
        // It needs nothing but the channel.
        works.note();
        loop {
            tokio::select! {
                answer = answers.recv() => match answer {
                    Some(answer) => publish(channel, &direct_replies, answer).await?,
                    None => return Ok(()),
                },
                () = is_over(&mut over) => {
                    while let Ok(answer) = answers.try_recv() {
                        publish(channel, &direct_replies, answer).await?;
                    }
                    return Ok(());
                }
            }
        }
    })
    .await;
}

/// Receives commands on one channel.
struct CommandServer<'a> {
    channel: &'a Channel,
    works: &'a WorksSince,
    /// Which queues a command may name for its answers.
    rules: &'a PublisherRules,
    reporter: &'a Arc<StatusReporter>,
    commands: &'a mpsc::Sender<CommandRequest>,
    answers: &'a mpsc::Sender<Outgoing>,
}

impl CommandServer<'_> {
    async fn serve(
        &self,
        declaring: &AuxChannel,
        declared: watch::Receiver<()>,
        mut over: watch::Receiver<bool>,
    ) -> lapin::Result<()> {
        let intake = Intake {
            what: "commands",
            exchange: CONTROL_EXCHANGE,
            kind: ExchangeKind::Direct,
            routing_keys: vec![CONTROL_ALL.to_owned(), control_key(&self.reporter.identity.worker)],
            length_max: QUEUE_LENGTH_MAX,
            bytes_max: None,
            prefetch: PREFETCH,
        };
        let mut queue = OwnQueue::consume(self.channel, declaring, intake, declared).await?;
        self.works.note();
        loop {
            tokio::select! {
                delivery = queue.next() => self.received(delivery?).await?,
                () = is_over(&mut over) => return Ok(()),
            }
        }
    }

    async fn received(&self, delivery: Delivery) -> lapin::Result<()> {
        let mut responder = Responder::of(&delivery, self.rules, self.answers, self.reporter);
        match read(&delivery.data) {
            Err(why) => responder.end(Outcome::Refused, why),
            Ok(command) => {
                responder.command = command.name();
                tracing::info!(
                    command = responder.command,
                    user = responder.user.as_deref(),
                    "command received"
                );
                if let Err(refused) = self.commands.try_send(CommandRequest { command, responder }) {
                    let request = refused.into_inner();
                    request.responder.end(Outcome::Refused, "too many commands at a time: try again");
                }
            }
        }
        delivery.acker.ack(BasicAckOptions::default()).await.map(drop)
    }
}

async fn publish(channel: &Channel, direct_replies: &DirectReplies, outgoing: Outgoing) -> lapin::Result<()> {
    let Outgoing { queue, correlation_id, answer } = outgoing;
    // Cannot fail: only names and numbers.
    let body = serde_json::to_vec(&answer).unwrap_or_default();
    let mut properties =
        BasicProperties::default().with_content_type("application/json".into()).with_type("answer".into());
    if let Some(id) = correlation_id {
        properties = properties.with_correlation_id(id);
    }
    let headers = FieldTable::default();
    let answer = Message { exchange: "".into(), routing_key: queue, properties, headers, body };
    if answer.is_direct_reply() {
        if !direct_replies.try_publish(answer) {
            tracing::debug!("dropped an answer to a command: too many direct replies wait");
        }
        return Ok(());
    }
    let Message { exchange, routing_key, properties, body, .. } = answer;
    let options = BasicPublishOptions::default();
    channel.basic_publish(exchange, routing_key, options, &body, properties).await.map(drop)
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
