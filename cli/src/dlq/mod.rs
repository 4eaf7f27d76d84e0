//! `vramq dlq`: dead letters read, explained, sent on, archived.

mod archive;
mod audit_log;
mod byte_limiter;
mod dead_letter;
mod destination;
mod drop;
mod error;
mod explain;
mod export;
mod groups;
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
  0 done · 1 some letters were kept, missing, or nothing was done · 2 usage or input · 3 broker unreachable or lost
  4 the broker says no (no queue, queue full, no permission), or somebody else is at the queue · 130 interrupted";

/// Look at dead letters, send them on, archive them.
///
/// Looking changes nothing: letters are read without being acknowledged, and go back in their order. One operator at a time
/// is at a queue; the next one waits. A letter leaves its queue only when it is safe elsewhere.
#[derive(Debug, clap::Args)]
#[command(subcommand_required = true, arg_required_else_help = true)]
#[command(after_long_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

/// What all commands share.
#[derive(Debug, clap::Args)]
struct Common {
    /// The model whose letters are meant, or its key; several, or once for each. AMQP cannot list queues: `rabbitmqctl
    /// list_queues name messages` shows those that start with vramq.dead.
    #[arg(
        long = "model",
        short,
        env = "VRAMQ_MODEL",
        value_name = "MODEL",
        value_delimiter = ',',
        global = true
    )]
    models: Vec<String>,
    /// Refuse whatever changes a queue.
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

/// Which letters an action takes.
#[derive(Clone, Debug, clap::Args)]
struct Selection {
    /// Letters by message id or by the start of their fingerprint; id:… or fp:… says which is meant.
    #[arg(value_name = "ID")]
    names: Vec<String>,
    #[command(flatten)]
    filter: Filter,
    /// All letters of the model.
    #[arg(long, conflicts_with_all = ["names", "reason", "since", "group"])]
    all: bool,
    /// Only the oldest N of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    first: Option<u64>,
}

impl Selection {
    /// # Errors
    /// It says nothing at all.
    fn query(&self) -> Result<plan::Query, Error> {
        if self.names.is_empty() && self.filter.is_empty() && !self.all {
            return Err(Error::Usage(
                "which letters? Name some, or say --group, --reason, --since, or --all".to_owned(),
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
    /// There is none, or one that can be no model.
    fn models(&self) -> Result<&[String], Error> {
        if self.models.is_empty() {
            return Err(Error::Usage(
                "which model? Say --model NAME (or set VRAMQ_MODEL). AMQP cannot list queues; `rabbitmqctl list_queues \
                 name messages` shows those that start with vramq.dead."
                    .to_owned(),
            ));
        }
        for model in &self.models {
            check_model_name(model).map_err(|error| Error::Usage(screen::safe(&error.to_string())))?;
        }
        Ok(&self.models)
    }

    /// The action log of something that changes a queue.
    ///
    /// # Errors
    /// Nothing may be changed, or it cannot be put on record.
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
        Err(trouble) => {
            if !matches!(trouble, Error::BrokenPipe) {
                eprintln!("error: {trouble}");
            }
            trouble.code()
        }
    }
}
