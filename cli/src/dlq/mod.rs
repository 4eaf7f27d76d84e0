//! `vramq dlq`: lists, explains, retries and archives dead letters.

mod archive;
mod audit_log;
mod byte_limiter;
mod dead_letter;
mod destination;
mod drop;
mod error;
mod explain;
mod export;
mod import;
mod list;
mod plan;
mod preview;
mod prompt;
mod queue_lock;
mod reader;
mod record;
mod republish;
mod retry;
mod scan;
mod select;
mod show;
mod transfer;

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Subcommand};
use vramq_schemas::topology::check_model_name;

use crate::broker::Broker;
use crate::output::text as screen;
use audit_log::AuditLog;
use error::Error;
use select::{Filter, Name};

const EXIT_CODES: &str = "\
Exit codes:
  0 done · 1 some letters were kept or missing, or nothing was done · 2 usage or input · 3 broker unreachable or lost
  4 refused by the broker (no queue, queue full, no permission), or another `vramq dlq` holds the queue lock · 130 interrupted";

/// List, explain, retry and archive dead letters.
///
/// Reading changes nothing: dead letters are read without being acknowledged, and are requeued in their order. A lock lets one
/// `vramq dlq` at a time read a queue; the next one waits. A dead letter leaves its queue only when it is stored elsewhere.
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_long_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

/// Arguments of all subcommands.
#[derive(Debug, clap::Args)]
struct Common {
    /// The model (or its key); a list, or repeated. AMQP cannot list queues: `rabbitmqctl list_queues name messages` shows
    /// those that start with vramq.dead.
    #[arg(
        long = "model",
        short,
        env = "VRAMQ_MODEL",
        value_name = "MODEL",
        value_delimiter = ',',
        global = true
    )]
    models: Vec<String>,
    /// Refuse everything that changes a queue.
    #[arg(long, env = "VRAMQ_READ_ONLY", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), global = true)]
    read_only: bool,
    /// The action log; by default vramq/actions.jsonl in $XDG_STATE_HOME or ~/.local/state.
    #[arg(long, env = "VRAMQ_ACTION_LOG", value_name = "FILE", global = true)]
    log: Option<PathBuf>,
    /// No progress on standard error.
    #[arg(long, short, global = true)]
    quiet: bool,
    #[command(flatten)]
    broker: Broker,
}

#[derive(Debug, Subcommand)]
enum Command {
    List(list::Args),
    Show(show::Args),
    Retry(retry::Args),
    Drop(drop::Args),
    Export(export::Args),
    #[command(visible_alias = "restore")]
    Import(import::Args),
}

/// The dead letters that an action takes.
#[derive(Clone, Debug, clap::Args)]
struct Selection {
    /// Message ids or starts of fingerprints; id:… or fp:… restricts a name to one of them.
    #[arg(value_name = "ID")]
    names: Vec<String>,
    #[command(flatten)]
    filter: Filter,
    /// All dead letters of the model.
    #[arg(long, conflicts_with_all = ["names", "reason", "since", "group"])]
    all: bool,
    /// Only the oldest N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    first: Option<u64>,
}

impl Selection {
    /// # Errors
    /// Nothing is selected.
    fn query(&self) -> Result<plan::Query, Error> {
        if self.names.is_empty() && self.filter.is_empty() && !self.all {
            return Err(Error::Usage(
                "select letters: give ids, --group, --reason, --since, or --all".to_owned(),
            ));
        }
        Ok(plan::Query {
            names: self.names.iter().map(|text| Name { text: text.clone() }).collect(),
            filter: self.filter.clone(),
            first: self.first,
        })
    }
}

impl Common {
    /// # Errors
    /// None is given, or one is no valid name.
    fn models(&self) -> Result<&[String], Error> {
        if self.models.is_empty() {
            return Err(Error::Usage(
                "which model? Give --model NAME (or set VRAMQ_MODEL). AMQP cannot list queues; `rabbitmqctl list_queues \
                 name messages` shows those that start with vramq.dead."
                    .to_owned(),
            ));
        }
        for model in &self.models {
            check_model_name(model).map_err(|error| Error::Usage(screen::safe(&error.to_string())))?;
        }
        Ok(&self.models)
    }

    /// Opens the action log for a command that changes a queue.
    ///
    /// # Errors
    /// --read-only is set, or the log cannot be written.
    fn changing(&self, command: &'static str) -> Result<AuditLog, Error> {
        if self.read_only {
            return Err(Error::Usage(format!(
                "{command} changes queues, and --read-only (VRAMQ_READ_ONLY) is set"
            )));
        }
        AuditLog::open(self.log.as_deref(), command)
    }
}

/// Runs the command; its exit code.
pub(crate) async fn run(args: Args) -> u8 {
    let Args { command, common } = args;
    let done = match command {
        Command::List(args) => list::run(&args, &common).await,
        Command::Show(args) => show::run(&args, &common).await,
        Command::Retry(args) => retry::run(&args, &common).await,
        Command::Drop(args) => drop::run(&args, &common).await,
        Command::Export(args) => export::run(&args, &common).await,
        Command::Import(args) => import::run(&args, &common).await,
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            if !matches!(error, Error::BrokenPipe) {
                eprintln!("error: {error}");
            }
            error.code()
        }
    }
}
