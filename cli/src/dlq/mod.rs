//! `vramq dlq`: lists, explains, retries and archives dead letters.

pub(crate) mod browse;
mod drop;
mod error;
mod export;
mod filter;
mod import;
mod list;
mod management;
mod models;
mod prompt;
mod retry;
mod show;
mod transfer;

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Subcommand};
use vramq_dlq::audit_log::AuditLog;
use vramq_dlq::plan::{Plan, Query};
use vramq_dlq::select::{DIGITS_MIN, Name};
use vramq_dlq::{Access, scan};
use vramq_schemas::topology::{check_model_name, dead_queue};

use crate::broker::{Broker, Secret, connection_name};
use crate::output::text as screen;
use error::Error;
use filter::FilterArgs;
use management::ManagementApi;

/// The longest wait for another operator to release the lock of a queue: longer than any scan takes.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(120);

const EXIT_CODES: &str = "\
Exit codes:
  0 done · 1 some dead letters were not moved or not found, or the action was declined · 2 usage or input · 3 broker unreachable or lost
  4 refused by the broker (no queue, queue full, no permission), or another operator holds the queue lock · 130 interrupted
  141 the reader of the output has gone";

/// List, explain, retry and archive dead letters.
///
/// Reading changes nothing: dead letters are read without being acknowledged, and are requeued in their order. A lock lets one
/// operator at a time read a queue; the next one waits. A dead letter leaves its queue only when it is stored elsewhere.
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
    /// The model (or its key); a list, or repeated. Without it: the models that workers serve now, by their heartbeats, which
    /// takes some seconds; with --broker-management-url, all models.
    #[arg(
        long = "model",
        short,
        env = "VRAMQ_MODEL",
        value_name = "MODEL",
        value_delimiter = ',',
        global = true
    )]
    models: Vec<String>,
    /// RabbitMQ's management API, http://USER:PASSWORD@HOST:15672: without --model it lists the models, also those that no worker serves
    /// now. The user needs the tag `management`; without a user it is the broker's.
    // Its value has credentials: `--help` must not show it.
    #[arg(
        long = "broker-management-url",
        env = "VRAMQ_BROKER_MANAGEMENT_URL",
        hide_env_values = true,
        value_name = "URL",
        global = true,
        help_heading = crate::broker::HEADING
    )]
    management_url: Option<Secret>,
    /// Refuse everything that changes a queue.
    #[arg(long, env = "VRAMQ_READ_ONLY", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new(), global = true)]
    read_only: bool,
    /// The action log; by default vramq/actions.jsonl in $XDG_STATE_HOME or ~/.local/state.
    #[arg(long, env = "VRAMQ_ACTION_LOG", value_name = "FILE", global = true)]
    action_log: Option<PathBuf>,
    /// The name of --action-log in 0.2: elsewhere --log is what to log.
    #[arg(long = "log", hide = true, value_parser = renamed_log, global = true)]
    _log: Option<String>,
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
    /// Message ids or starts of fingerprints (at least 6 digits); id:… or fp:… restricts a name to one of them. Identical dead letters have
    /// one fingerprint: with --first 1 it selects one of them.
    #[arg(value_name = "ID")]
    names: Vec<String>,
    #[command(flatten)]
    filter: FilterArgs,
    /// All dead letters of the model.
    #[arg(long, conflicts_with_all = ["names", "reason", "since", "group", "error", "worker", "trace"])]
    all: bool,
    /// Only the oldest N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    first: Option<u64>,
}

impl Selection {
    /// # Errors
    /// Nothing is selected.
    fn query(&self) -> Result<Query, Error> {
        let filter = self.filter.filter();
        if self.names.is_empty() && filter.is_empty() && !self.all {
            return Err(Error::Usage(
                "select dead letters: give ids, --reason, --since, --group, --error, --worker, --trace, or --all"
                    .to_owned(),
            ));
        }
        Ok(Query {
            names: self.names.iter().map(|text| Name { text: text.clone() }).collect(),
            filter,
            first: self.first,
        })
    }
}

impl Common {
    /// The models that are named, else the keys of those with dead letters that the broker lists, or that workers serve now.
    ///
    /// # Errors
    /// One is no valid name; or none is named, and none can be learned.
    async fn models(&self) -> Result<Vec<String>, Error> {
        for model in &self.models {
            check_model_name(model).map_err(|error| Error::Usage(screen::safe(&error.to_string())))?;
        }
        if self.models.is_empty() {
            return models::learn(&self.access()?, self.management().await?, self.quiet).await;
        }
        Ok(distinct(&self.models))
    }

    /// # Errors
    /// The URL is none, or there is no user for it.
    async fn management(&self) -> Result<Option<ManagementApi>, Error> {
        let Some(Secret(url)) = &self.management_url else { return Ok(None) };
        let address = self.broker.address().map_err(|error| Error::Usage(error.to_string()))?;
        ManagementApi::new(url, &address, self.broker.ca_pem()).await.map(Some)
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
        let path = self.action_log.clone().or_else(default_log).ok_or_else(|| {
            Error::Usage(
                "there is no state folder for the action log: name a file with --action-log".to_owned(),
            )
        })?;
        AuditLog::open(&path, command, who())
            .map_err(|error| Error::Usage(format!("{error}; name another file with --action-log")))
    }

    /// The connection by which queues are read and changed.
    ///
    /// # Errors
    /// The URL is no address.
    fn access(&self) -> Result<Access, Error> {
        let address = self.broker.address().map_err(|error| Error::Usage(error.to_string()))?;
        Ok(Access {
            address,
            connection_name: connection_name("dlq"),
            lock_wait_max: LOCK_WAIT_MAX,
            on_lock_wait: |waiting| eprintln!("{waiting}"),
        })
    }

    /// Plans an action, and prints the names that match nothing. Returns the plans of queues with a selected letter, and whether every name
    /// matches.
    ///
    /// # Errors
    /// A queue cannot be read, a name is ambiguous, or all dead letters of models that are not named are selected.
    async fn plan(&self, selection: &Selection, query: &Query) -> Result<(Vec<(String, Plan)>, bool), Error> {
        let models = self.models().await?;
        // To change whole queues, the operator has to name the models: not everybody knows all of them.
        if selection.all && self.models.is_empty() && !models.is_empty() {
            let models = models.iter().map(|model| screen::safe(model)).collect::<Vec<_>>().join(", ");
            return Err(Error::Usage(format!("--all needs --model; there are {models}")));
        }
        let planned = scan::plan(&self.access()?, &models, query).await?;
        print_missing(&planned.missing);
        Ok((planned.plans, planned.missing.is_empty()))
    }
}

/// The models in their order, each once: an action that read a queue twice would plan each of its letters twice.
fn distinct(models: &[String]) -> Vec<String> {
    let mut seen = HashSet::new();
    models.iter().filter(|model| seen.insert(model.as_str())).cloned().collect()
}

/// The key of the model whose dead letters this queue has; none if the queue is of another program.
fn key_of(queue: &str) -> Option<String> {
    let key = queue.strip_prefix(&dead_queue(""))?;
    check_model_name(key).is_ok().then(|| key.to_owned())
}

/// Refuses the old name of a flag, with the new one.
fn renamed_log(_file: &str) -> Result<String, String> {
    Err("the action log's flag is --action-log".to_owned())
}

/// Prints the names that match no letter.
fn print_missing(names: &[impl AsRef<str>]) {
    for name in names {
        eprintln!("{}", not_found(name.as_ref()));
    }
}

/// That no letter has this name.
fn not_found(name: &str) -> String {
    let is_too_short = Name { text: name.to_owned() }.is_too_short();
    let hint = match is_too_short {
        true => format!("; the start of a fingerprint has at least {DIGITS_MIN} digits"),
        false => String::new(),
    };
    format!("no dead letter has the id or fingerprint {}{hint}", screen::safe(name))
}

/// `vramq/actions.jsonl` in the user's state folder.
fn default_log() -> Option<PathBuf> {
    let folder = dirs::state_dir().or_else(dirs::data_local_dir)?;
    Some(folder.join("vramq").join("actions.jsonl"))
}

/// `user@host`.
fn who() -> String {
    let user = ["USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    let user = user.unwrap_or_else(|| format!("uid-{}", rustix::process::getuid().as_raw()));
    format!("{user}@{}", rustix::system::uname().nodename().to_string_lossy())
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
            error::code(&error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_named_twice_is_read_once() {
        let named = ["minilm", "bge", "minilm"].map(str::to_owned);
        assert_eq!(distinct(&named), ["minilm", "bge"]);
    }

    #[test]
    fn a_name_that_is_too_short_is_explained() {
        assert!(not_found("75b6").ends_with("75b6; the start of a fingerprint has at least 6 digits"));
        assert!(not_found("75b64e").ends_with("fingerprint 75b64e"));
        // The help has the number, too.
        assert_eq!(DIGITS_MIN, 6);
    }

    #[test]
    fn only_queues_of_dead_letters_name_a_model() {
        let keys =
            ["vramq.dead.minilm", "vramq.dead.", "vramq.dead.a b", "vramq.jobs.minilm", "x.vramq.dead.m"];
        assert_eq!(keys.map(key_of), [Some("minilm".to_owned()), None, None, None, None]);
    }
}
