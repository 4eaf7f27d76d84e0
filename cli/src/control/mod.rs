//! `vramq control`: tells workers what to do, and shows what each of them says to it.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Subcommand;
use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer};
use serde_json::json;
use tokio::time::{Instant, timeout_at};
use vramq_schemas::control::{Answer, Command, Outcome};
use vramq_schemas::status::{Heartbeat, WorkerState};
use vramq_schemas::topology::{CONTROL_ALL, CONTROL_EXCHANGE, STATUS_EXCHANGE, control_key};

use crate::broker::{self, Broker};
use crate::{duration, exit};

/// How long workers are listened for: one that lives sends a heartbeat every 5 s, unless it is told otherwise.
const LISTEN: &str = "6s";

/// Answers and heartbeats that wait to be read here.
const WAITING_MAX: i64 = 10_000;

/// Tell workers what to do: pause, resume, drain, cancel a job, change what they log.
///
/// Prints what each worker answers. Ends with 0 only if every worker that it heard of has done it; of `cancel`, if one had
/// the job and has given back its memory.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  vramq control pause --all\n  vramq control cancel 4711\n  vramq control set log=debug \
    --worker gpu-3\n\nExit codes: 0 done, 1 a worker has not done it or none answers, 2 usage, 3 broker unreachable, \
    4 the broker refuses."
)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    broker: Broker,
}

/// What help ends with.
macro_rules! after_help {
    ($example:literal) => {
        concat!(
            "Example:\n  vramq control ",
            $example,
            "\n\nExit codes:\n  0 done · 1 a worker has not done it or none answers · 2 usage · 3 broker unreachable · 4 the broker \
             refuses"
        )
    };
}

#[derive(Debug, Subcommand)]
enum What {
    /// Take no more jobs; those in hand go on.
    #[command(after_help = after_help!("pause --all"))]
    Pause(To),
    /// Take jobs again.
    #[command(after_help = after_help!("resume --worker gpu-3"))]
    Resume(To),
    /// Finish or hand over what is in hand, and exit with 0, as at SIGTERM.
    #[command(after_help = after_help!("drain --worker gpu-3"))]
    Drain(To),
    /// End a job that a worker has in hand: it becomes a dead letter, and its caller is told.
    #[command(after_help = after_help!("cancel 4711"))]
    Cancel {
        /// The job's id.
        id: String,
        #[command(flatten)]
        to: Anyone,
    },
    /// Change a setting until the worker ends.
    #[command(after_help = after_help!("set log=debug --worker gpu-3"))]
    Set {
        /// log=FILTER: a level, or directives as in log=info,lapin=debug.
        #[arg(value_name = "log=FILTER", value_parser = setting)]
        setting: String,
        #[command(flatten)]
        to: To,
    },
}

/// Whom it is for; it has to be said.
#[derive(Clone, Debug, clap::Args)]
#[group(required = true, multiple = false, args = ["worker", "all"])]
struct To {
    /// A worker, by its name; may be repeated.
    #[arg(long, short, value_name = "NAME")]
    worker: Vec<String>,
    /// All workers.
    #[arg(long, short)]
    all: bool,
    #[command(flatten)]
    how: How,
}

/// Whom it is for: all, unless it is said.
#[derive(Clone, Debug, clap::Args)]
struct Anyone {
    /// A worker, by its name; may be repeated [default: all].
    #[arg(long, short, value_name = "NAME")]
    worker: Vec<String>,
    /// All workers.
    #[arg(long, short, conflicts_with = "worker")]
    all: bool,
    #[command(flatten)]
    how: How,
}

#[derive(Clone, Debug, clap::Args)]
struct How {
    /// How long to listen for workers that do not answer.
    #[arg(long, value_parser = duration::parse, default_value = LISTEN, value_name = "TIME")]
    timeout: Duration,
    /// End as soon as so many workers have given their last answer, rather than listen for more.
    #[arg(long, value_name = "N")]
    expect: Option<usize>,
    /// One JSON object a line for each answer, rather than text.
    #[arg(long)]
    json: bool,
}

fn setting(text: &str) -> Result<String, String> {
    match text.split_once('=') {
        Some(("log", filter)) if !filter.is_empty() => Ok(filter.to_owned()),
        _ => Err("there is `log=FILTER`, as in log=debug".to_owned()),
    }
}

impl What {
    /// The command, the workers that it is for (none: all), and how to wait for them.
    fn parts(self) -> (Command, Vec<String>, How) {
        match self {
            Self::Pause(to) => (Command::Pause, to.worker, to.how),
            Self::Resume(to) => (Command::Resume, to.worker, to.how),
            Self::Drain(to) => (Command::Drain, to.worker, to.how),
            Self::Cancel { id, to } => (Command::Cancel { job: id }, to.worker, to.how),
            Self::Set { setting, to } => (Command::Set { log: setting }, to.worker, to.how),
        }
    }
}

/// Runs it; the exit code.
pub(crate) async fn run(args: Args) -> u8 {
    let connection = match args.broker.connect("control").await {
        Ok(connection) => connection,
        Err(error) => {
            eprintln!("error: {error}");
            return error.code();
        }
    };
    let (command, workers, how) = args.what.parts();
    let code = match Control::open(&connection).await {
        Ok(control) => control.carry_out(&command, workers, &how).await,
        Err(error) => Err(error),
    };
    broker::close(&connection).await;
    code.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        exit::REFUSED
    })
}

/// A place to hear answers and heartbeats at.
struct Control {
    channel: Channel,
    queue: ShortString,
    heard: Consumer,
}

/// What is known of the workers.
#[derive(Debug, Default)]
struct Responses {
    /// Each that was heard of, with its last answer.
    workers: BTreeMap<String, Option<Answer>>,
    /// Workers that said that they have the job, and have not said yet what became of it.
    in_progress: BTreeMap<String, InProgress>,
}

/// How long a worker may say nothing, not even by a heartbeat, before it is taken for dead.
const SILENCES: u32 = 3;
const SILENCE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct InProgress {
    heard: Instant,
    silence_max: Duration,
}

impl Control {
    async fn open(connection: &Connection) -> Result<Self> {
        let channel = connection.create_channel().await.context("open channel")?;
        channel.confirm_select(ConfirmSelectOptions::default()).await.context("ask for confirms")?;
        let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
        let mut arguments = FieldTable::default();
        arguments.insert("x-max-length".into(), AMQPValue::LongLongInt(WAITING_MAX));
        let queue = channel.queue_declare("".into(), options, arguments).await.context("declare a queue")?;
        let queue = queue.name().clone();
        let (options, none) = (QueueBindOptions::default(), FieldTable::default());
        channel
            .queue_bind(queue.clone(), STATUS_EXCHANGE.into(), "".into(), options, none)
            .await
            .with_context(|| format!("listen to `{STATUS_EXCHANGE}`, which the first worker declares"))?;
        let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
        let heard = channel
            .basic_consume(queue.clone(), "".into(), options, FieldTable::default())
            .await
            .context("listen for answers")?;
        Ok(Self { channel, queue, heard })
    }

    async fn carry_out(mut self, command: &Command, workers: Vec<String>, how: &How) -> Result<u8> {
        let correlation = uuid::Uuid::new_v4().to_string();
        let mut responses = Responses::default();
        let keys = if workers.is_empty() {
            vec![CONTROL_ALL.to_owned()]
        } else {
            workers.iter().map(|worker| control_key(worker)).collect()
        };
        let mut unheard = 0;
        for key in &keys {
            unheard += usize::from(!self.publish(command, key, &correlation).await?);
        }
        responses.workers = workers.iter().map(|worker| (worker.clone(), None)).collect();
        if unheard < keys.len() {
            self.listen(command, &correlation, &mut responses, &workers, how).await?;
        }
        Ok(responses.verdict(command, how))
    }

    /// False if nobody hears it.
    async fn publish(&self, command: &Command, key: &str, correlation: &str) -> Result<bool> {
        let properties = BasicProperties::default()
            .with_content_type("application/json".into())
            .with_reply_to(self.queue.clone())
            .with_correlation_id(correlation.into());
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        let body = serde_json::to_vec(command)?;
        let publish = async {
            self.channel
                .basic_publish(CONTROL_EXCHANGE.into(), key.into(), options, &body, properties)
                .await?
                .await
        };
        match publish.await.with_context(|| format!("publish to `{CONTROL_EXCHANGE}`"))? {
            Confirmation::Ack(returned) => Ok(returned.is_none()),
            _ => bail!("the broker does not take the command"),
        }
    }

    /// Until all that is to be heard was heard, or for as long as there may be more.
    async fn listen(
        &mut self,
        command: &Command,
        correlation: &str,
        responses: &mut Responses,
        named: &[String],
        how: &How,
    ) -> Result<()> {
        let mut until = Instant::now() + how.timeout;
        while !responses.is_complete(command, named, how) {
            let Ok(delivery) = timeout_at(until, self.heard.next()).await else {
                // Whoever has died says no more.
                responses.in_progress.retain(|_, worker| worker.heard.elapsed() < worker.silence_max);
                if responses.in_progress.is_empty() {
                    break;
                }
                // A pass that runs is not interrupted; the operator may be.
                until = Instant::now() + how.timeout;
                continue;
            };
            let delivery = delivery.context("the broker has ended the conversation")??;
            let of_kind =
                |kind: &str| delivery.properties.kind().as_ref().is_some_and(|it| it.as_str() == kind);
            if of_kind("heartbeat") {
                responses.beat(&delivery, named);
            } else if delivery
                .properties
                .correlation_id()
                .as_ref()
                .is_some_and(|id| id.as_str() == correlation)
                && let Ok(answer) = serde_json::from_slice::<Answer>(&delivery.data)
            {
                responses.answered(answer, how.json);
            }
        }
        Ok(())
    }
}

impl Responses {
    /// A worker lives, so it is to answer.
    fn beat(&mut self, delivery: &Delivery, named: &[String]) {
        let Ok(heartbeat) = serde_json::from_slice::<Heartbeat>(&delivery.data) else { return };
        if heartbeat.state == WorkerState::Gone {
            self.in_progress.remove(&heartbeat.worker);
        } else if let Some(in_progress) = self.in_progress.get_mut(&heartbeat.worker) {
            let silence_max = Duration::from_millis(heartbeat.interval_ms) * SILENCES;
            *in_progress = InProgress { heard: Instant::now(), silence_max };
        }
        if heartbeat.state != WorkerState::Gone && named.is_empty() {
            self.workers.entry(heartbeat.worker).or_default();
        }
    }

    fn answered(&mut self, answer: Answer, json: bool) {
        if json {
            // Names and numbers: cannot fail.
            println!("{}", serde_json::to_string(&answer).unwrap_or_default());
        } else {
            println!("{}\t{}\t{}", answer.worker, answer.outcome.as_str(), answer.text);
        }
        match answer.outcome {
            Outcome::Requested => {
                let in_progress = InProgress { heard: Instant::now(), silence_max: SILENCE_MAX };
                self.in_progress.insert(answer.worker.clone(), in_progress);
            }
            _ if answer.last => drop(self.in_progress.remove(&answer.worker)),
            _ => {}
        }
        let last = answer.last.then(|| answer.clone());
        let known = self.workers.entry(answer.worker).or_default();
        *known = last.or(known.take());
    }

    fn is_complete(&self, command: &Command, named: &[String], how: &How) -> bool {
        let ended = self.workers.values().flatten();
        if matches!(command, Command::Cancel { .. })
            && ended.clone().any(|answer| answer.outcome.is_success())
        {
            return true;
        }
        let count = ended.count();
        how.expect.is_some_and(|expected| count >= expected)
            || (!named.is_empty() && count == self.workers.len())
    }

    /// Tells of those that said nothing; the exit code.
    fn verdict(&self, command: &Command, how: &How) -> u8 {
        for worker in self.workers.iter().filter(|(_, last)| last.is_none()).map(|(worker, _)| worker) {
            if how.json {
                println!("{}", json!({"worker": worker, "outcome": "no-answer"}));
            } else {
                eprintln!("{worker}\tno answer within {:?}", how.timeout);
            }
        }
        if self.workers.is_empty() {
            eprintln!("error: no worker answers");
        }
        let done = |last: &Option<Answer>| last.as_ref().is_some_and(|answer| answer.outcome.is_success());
        let cancelled = matches!(command, Command::Cancel { .. }) && self.workers.values().any(done);
        let all = !self.workers.is_empty() && self.workers.values().all(done);
        if cancelled || all { exit::DONE } else { exit::FAILED }
    }
}
