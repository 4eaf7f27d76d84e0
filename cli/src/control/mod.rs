//! `vramq control`: sends a command to workers, and prints their answers.

mod args;
mod failure;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Connection, Consumer};
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use vramq_amqp::{CONFIRMS_IN_FLIGHT, Limits, MatchBy, Message, PublishOutcome, PublishPipeline};
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::status::{Heartbeat, WorkerState};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, STATUS_EXCHANGE, control_key};

use crate::broker;
use crate::exit;
use crate::output::text::{safe, safe_json};
use crate::output::{warn_renamed, write_line};
pub(crate) use args::Args;
use args::How;
use failure::{BROKER_MAX, NoAnswer, within};

/// Answers and heartbeats that may wait in this command's queue; then the broker drops the oldest.
const WAITING_MAX: i64 = 10_000;

/// Commands that may await their confirm: a command is smaller than 64 KiB, of which its job id and log filter take the most.
const LIMITS: Limits = Limits { messages: CONFIRMS_IN_FLIGHT, bytes: 1 << 24, body_bytes: 1 << 16 };

/// What fails when standard output takes no answer.
const WRITING: &str = "write the answers";

/// Runs the command; its exit code.
pub(crate) async fn run(args: Args) -> u8 {
    let (command, workers, how) = args.what.parts();
    if let Some((old, new)) = how.renamed() {
        warn_renamed(old, new);
    }
    let connection = match args.broker.connect("control").await {
        Ok(connection) => connection,
        Err(error) => {
            eprintln!("error: {error}");
            return error.code();
        }
    };
    let user = args.broker.address().ok().and_then(|address| ShortString::try_new(address.user_id()?).ok());
    let opened = within(BROKER_MAX, || connection.status().blocked(), Control::open(&connection, user));
    let code = match opened.await {
        Ok(control) => control.carry_out(&connection, &command, workers, &how).await,
        Err(error) => Err(error),
    };
    broker::close(&connection).await;
    code.unwrap_or_else(|error| {
        let code = failure::code(&error);
        if code != exit::BROKEN_PIPE {
            eprintln!("error: {}", safe(&failure::in_words(&error)));
        }
        code
    })
}

/// Publishes commands, and consumes answers and heartbeats.
struct Control {
    /// Each command with the number of its key.
    publisher: PublishPipeline<usize>,
    /// The connected user, which workers log. The broker refuses a message that names another user than its publisher's.
    user: Option<ShortString>,
    queue: ShortString,
    heard: Consumer,
}

/// What the workers have answered.
#[derive(Debug, Default)]
struct Responses {
    /// The known workers by name.
    workers: BTreeMap<String, Known>,
    /// Named workers whose command the broker returned: no queue takes it.
    not_listening: BTreeSet<String>,
    /// Workers that are cancelling the job.
    in_progress: BTreeMap<String, InProgress>,
}

/// What is known of a worker, or of several with one name.
#[derive(Debug, Default)]
struct Known {
    /// The last answer of each: answers do not say which worker of the name gave them.
    answers: Vec<Answer>,
    /// The processes by their heartbeats: host, process id, start.
    processes: BTreeSet<(String, u32, u64)>,
}

impl Known {
    /// Whether one has answered, and as many as there are by the heartbeats so far.
    fn has_answered(&self) -> bool {
        self.answers.len() >= self.processes.len().max(1)
    }

    fn has_succeeded(&self) -> bool {
        self.has_answered() && self.answers.iter().all(|answer| answer.outcome.is_success())
    }
}

/// A worker that is cancelling is taken for dead after this time without a heartbeat, if its interval is unknown.
const SILENCE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct InProgress {
    heard: Instant,
    silence_max: Duration,
}

impl Control {
    async fn open(connection: &Connection, user: Option<ShortString>) -> Result<Self> {
        let channel = connection.create_channel().await.context("open channel")?;
        let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(WAITING_MAX));
        let queue = channel.queue_declare("".into(), options, arguments).await.context("declare a queue")?;
        let queue = queue.name().clone();
        let (options, none) = (QueueBindOptions::default(), FieldTable::default());
        channel
            .queue_bind(queue.clone(), STATUS_EXCHANGE.into(), "".into(), options, none)
            .await
            .with_context(|| format!("bind to `{STATUS_EXCHANGE}`, which the first worker declares"))?;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let heard = channel
            .basic_consume(queue.clone(), "".into(), options, FieldTable::default())
            .await
            .context("consume answers")?;
        let publisher = PublishPipeline::open(connection, LIMITS, MatchBy::MessageId).await;
        Ok(Self { publisher: publisher.context("open channel")?, user, queue, heard })
    }

    async fn carry_out(
        mut self,
        connection: &Connection,
        command: &Command,
        workers: Vec<String>,
        how: &How,
    ) -> Result<u8> {
        let correlation = uuid::Uuid::new_v4().to_string();
        let keys = if workers.is_empty() {
            vec![CONTROL_ALL.to_owned()]
        } else {
            workers.iter().map(|worker| control_key(worker)).collect()
        };
        let mut responses = Responses::default();
        let publishing = self.publish(command, &keys, &correlation);
        let returned = within(BROKER_MAX, || connection.status().blocked(), publishing).await?;
        responses.workers = workers.iter().map(|worker| (worker.clone(), Known::default())).collect();
        responses.not_listening = returned.iter().filter_map(|key| workers.get(*key).cloned()).collect();
        if returned.len() < keys.len() {
            self.listen(command, &correlation, &mut responses, &workers, how).await?;
        }
        responses.report(command, how).context(WRITING)
    }

    /// Publishes the command under each key. Returns the numbers of the keys to which no worker is bound.
    async fn publish(&mut self, command: &Command, keys: &[String], correlation: &str) -> Result<Vec<usize>> {
        let body = Bytes::from(serde_json::to_vec(command)?);
        let mut keys = keys.iter().enumerate().peekable();
        let mut returned = Vec::new();
        while keys.peek().is_some() || !self.publisher.is_empty() {
            while self.publisher.has_room()
                && let Some((number, key)) = keys.next()
            {
                let mut properties = BasicProperties::default()
                    .with_content_type("application/json".into())
                    .with_message_id(format!("{correlation}-{number}").into())
                    .with_reply_to(self.queue.clone())
                    .with_correlation_id(correlation.into());
                if let Some(user) = &self.user {
                    properties = properties.with_user_id(user.clone());
                }
                let message = Message {
                    exchange: CONTROL_EXCHANGE.into(),
                    routing_key: key.as_str().into(),
                    properties,
                    headers: FieldTable::default(),
                    body: body.clone(),
                    mandatory: true,
                };
                self.publisher.publish(number, message);
            }
            let outcomes = self.publisher.next().await;
            for (number, outcome) in outcomes.with_context(|| format!("publish to `{CONTROL_EXCHANGE}`"))? {
                match outcome {
                    PublishOutcome::Confirmed => {}
                    PublishOutcome::Returned => returned.push(number),
                    PublishOutcome::Refused => bail!("the broker refuses the command"),
                    PublishOutcome::TooLarge => {
                        bail!("the command is longer than {} bytes", LIMITS.body_bytes)
                    }
                }
            }
        }
        Ok(returned)
    }

    /// Collects answers until they are complete or the time is over. Waits longer for a worker that is cancelling.
    async fn listen(
        &mut self,
        command: &Command,
        correlation: &str,
        responses: &mut Responses,
        named: &[String],
        how: &How,
    ) -> Result<()> {
        let mut until = Instant::now() + how.wait();
        while !responses.is_complete(command, named, how) {
            let Ok(delivery) = timeout_at(until, self.heard.next()).await else {
                // Dead workers do not answer.
                responses.in_progress.retain(|_, worker| worker.heard.elapsed() < worker.silence_max);
                if responses.in_progress.is_empty() {
                    break;
                }
                // A running pass is not interrupted, so a cancellation may take longer than --wait.
                until = Instant::now() + how.wait();
                continue;
            };
            let delivery = delivery.ok_or(NoAnswer::Lost)??;
            let of_kind =
                |kind: &str| delivery.properties.kind().as_ref().is_some_and(|it| it.as_str() == kind);
            if of_kind("heartbeat") {
                if let Ok(heartbeat) = serde_json::from_slice(&delivery.data) {
                    responses.heartbeat(heartbeat, named);
                }
            } else if delivery
                .properties
                .correlation_id()
                .as_ref()
                .is_some_and(|id| id.as_str() == correlation)
                && let Ok(answer) = serde_json::from_slice::<Answer>(&delivery.data)
            {
                responses.answered(answer, how.json).context(WRITING)?;
            }
        }
        Ok(())
    }
}

/// An answer on one line. Its texts come from a worker, or from any publisher that knows the reply queue.
fn shown(answer: &Answer, json: bool) -> String {
    if json {
        // Cannot fail: it is made of texts and numbers.
        return safe_json(&serde_json::to_string(answer).unwrap_or_default());
    }
    format!("{}\t{}\t{}", safe(&answer.worker), answer.outcome.as_str(), safe(&answer.text))
}

impl Responses {
    /// Notes a heartbeat: a running worker is expected to answer.
    fn heartbeat(&mut self, heartbeat: Heartbeat, named: &[String]) {
        let process = (heartbeat.host.clone(), heartbeat.pid, heartbeat.started_at_ms);
        if heartbeat.state == WorkerState::Gone {
            // It may have answered, as one that drains does.
            for known in self.workers.values_mut() {
                known.processes.remove(&process);
            }
            self.in_progress.remove(&heartbeat.worker);
        } else if let Some(in_progress) = self.in_progress.get_mut(&heartbeat.worker) {
            *in_progress = InProgress { heard: Instant::now(), silence_max: heartbeat.silence_max() };
        }
        if heartbeat.state != WorkerState::Gone && (named.is_empty() || named.contains(&heartbeat.worker)) {
            self.workers.entry(heartbeat.worker).or_default().processes.insert(process);
        }
    }

    /// Prints an answer, and notes it.
    fn answered(&mut self, answer: Answer, json: bool) -> io::Result<()> {
        write_line(&shown(&answer, json))?;
        match answer.outcome {
            Outcome::Requested => {
                let in_progress = InProgress { heard: Instant::now(), silence_max: SILENCE_MAX };
                self.in_progress.insert(answer.worker.clone(), in_progress);
            }
            _ if answer.last => drop(self.in_progress.remove(&answer.worker)),
            _ => {}
        }
        let known = self.workers.entry(answer.worker.clone()).or_default();
        if answer.last {
            known.answers.push(answer);
        }
        Ok(())
    }

    fn is_complete(&self, command: &Command, named: &[String], how: &How) -> bool {
        let ended = self.workers.values().flat_map(|known| &known.answers);
        if matches!(command, Command::Cancel { .. })
            && ended.clone().any(|answer| answer.outcome.is_success())
        {
            return true;
        }
        match how.expect {
            Some(expected) => ended.count() + self.not_listening.len() >= expected,
            None => {
                let has_ended = |(name, known): (&String, &Known)| {
                    known.has_answered() || self.not_listening.contains(name)
                };
                !named.is_empty() && self.workers.iter().all(has_ended)
            }
        }
    }

    /// Prints the workers that did not answer; the exit code.
    fn report(&self, command: &Command, how: &How) -> io::Result<u8> {
        for (worker, known) in self.workers.iter().filter(|(_, known)| !known.has_answered()) {
            let (answered, there) = (known.answers.len(), known.processes.len());
            if how.json {
                write_line(&safe_json(&json!({"worker": worker, "outcome": "no-answer"}).to_string()))?;
            } else if self.not_listening.contains(worker) {
                eprintln!(
                    "{}\tno worker of this name takes commands: it is not connected, or worker.control is off",
                    safe(worker)
                );
            } else if answered > 0 {
                eprintln!("{}\tonly {answered} of {there} workers of this name answered", safe(worker));
            } else {
                eprintln!("{}\tno answer within {:?}", safe(worker), how.wait());
            }
        }
        if self.workers.is_empty() {
            eprintln!("error: no worker answers");
        }
        let mut answers = self.workers.values().flat_map(|known| &known.answers);
        let cancelled =
            matches!(command, Command::Cancel { .. }) && answers.any(|answer| answer.outcome.is_success());
        let all = !self.workers.is_empty() && self.workers.values().all(Known::has_succeeded);
        Ok(if cancelled || all { exit::DONE } else { exit::FAILED })
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
